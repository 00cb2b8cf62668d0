"""State moves between conventions, versions and Megatron-LM #1428's own Muon."""

import copy
import math

import pytest
import torch

from megatron_muon import Muon
from megatron_muon.checkpoint import convert
from megatron_muon.checkpoint.convert import (
    EMA,
    SUM,
    VERSION,
    convert_momentum,
    from_pull_request,
    migrate,
    momentum_factor,
)
from megatron_muon.errors import CheckpointError, ConfigurationError

MU, LR, DECAY, EPS, BETAS = 0.9, 0.02, 0.1, 1e-8, (0.9, 0.95)


# --------------------------------------------------------------------------------------------
# Conventions
# --------------------------------------------------------------------------------------------


def grads(steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 4, generator=generator) for _ in range(steps)]


def as_sum(gs, mu, start=0.0):
    """m = mu m + g, in plain torch."""
    m = torch.zeros(6, 4) + start
    for g in gs:
        m = mu * m + g
    return m


def as_average(gs, mu, start=0.0):
    """m = mu m + (1 - mu) g, in plain torch."""
    m = torch.zeros(6, 4) + start
    for g in gs:
        m = mu * m + (1 - mu) * g
    return m


def state_dict(momentum, mu=MU):
    return {
        "state": {0: {"momentum_buffer": momentum}, 1: {"exp_avg": torch.ones(3)}},
        "param_groups": [{"params": [0], "momentum": mu}, {"params": [1], "lr": 1.0}],
    }


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9, 0.95])
def test_a_converted_momentum_is_that_of_the_other_convention(mu):
    gs = grads(7)
    average, total = as_average(gs, mu), as_sum(gs, mu)
    to_sum = convert_momentum(state_dict(average, mu), EMA, SUM)
    to_average = convert_momentum(state_dict(total, mu), SUM, EMA)
    torch.testing.assert_close(to_sum["state"][0]["momentum_buffer"], total)
    torch.testing.assert_close(to_average["state"][0]["momentum_buffer"], average)
    # and goes on as if it had always been of that convention
    later = grads(5, seed=1)
    torch.testing.assert_close(
        as_sum(later, mu, to_sum["state"][0]["momentum_buffer"]), as_sum(gs + later, mu)
    )


@pytest.mark.parametrize("mu", [0.9, 0.95])
def test_an_unconverted_momentum_is_off_by_a_factor(mu):
    """Shows that the test above can fail: 10 and 20 times too small."""
    gs = grads(7)
    ratio = as_sum(gs, mu) / as_average(gs, mu)
    torch.testing.assert_close(ratio, torch.full_like(ratio, 1 / (1 - mu)))
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(as_average(gs, mu), as_sum(gs, mu))


def test_each_group_is_converted_with_its_own_momentum_and_nothing_is_written():
    momenta = [torch.full((2, 2), 3.0) for _ in range(2)]
    before = {
        "state": {i: {"momentum_buffer": m} for i, m in enumerate(momenta)},
        "param_groups": [{"params": [0], "momentum": 0.5}, {"params": [1], "momentum": 0.75}],
    }
    after = convert_momentum(before, EMA, SUM)
    assert [float(after["state"][i]["momentum_buffer"][0, 0]) for i in (0, 1)] == [6.0, 12.0]
    assert all(torch.equal(m, torch.full((2, 2), 3.0)) for m in momenta)
    assert after["param_groups"] == before["param_groups"]


def test_one_convention_to_itself_changes_nothing():
    momentum = as_sum(grads(3), MU)
    same = convert_momentum(state_dict(momentum), SUM, SUM)
    assert same["state"][0]["momentum_buffer"] is momentum
    assert momentum_factor(EMA, EMA, 0.95) == 1.0


@pytest.mark.parametrize("mu", [1.0, -0.1, math.nan])
def test_a_momentum_out_of_range_is_refused(mu):
    with pytest.raises(ConfigurationError, match="factor in"):
        momentum_factor(EMA, SUM, mu)


def test_an_unknown_convention_is_refused():
    with pytest.raises(ConfigurationError, match="'average' is no convention"):
        momentum_factor("average", SUM, 0.9)


def test_a_group_without_its_momentum_is_refused():
    broken = state_dict(torch.ones(2, 2))
    del broken["param_groups"][0]["momentum"]
    with pytest.raises(ConfigurationError, match="Group 0 has no 'momentum'"):
        convert_momentum(broken, EMA, SUM)


# --------------------------------------------------------------------------------------------
# Megatron-LM #1428
# --------------------------------------------------------------------------------------------


class PullRequestMuon(torch.optim.Optimizer):
    """The single-process step of Megatron-LM #1428's Muon, in plain torch, with its state's names.

    The product is not asked: momentum is a sum, the update is orthogonalized with the coefficients
    (3.4445, -4.7750, 2.0315), AdamW adds epsilon before the bias correction.
    """

    def __init__(self, groups):
        super().__init__(
            groups,
            dict(lr=LR, weight_decay=DECAY, matched_adamw_rms=0.2, momentum=MU, nesterov=True,
                 ns_steps=5, adamw_betas=BETAS, adamw_eps=EPS),
        )  # fmt: skip

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
            if group.get("use_muon"):
                self._muon(group)
            else:
                self._adamw(group)

    def _muon(self, group):
        for p in group["params"]:
            buffer = self.state[p].setdefault("muon_buffer", torch.zeros_like(p))
            buffer.mul_(group["momentum"]).add_(p.grad)
            ahead = p.grad + group["momentum"] * buffer
            size = group["matched_adamw_rms"] * math.sqrt(max(p.shape))
            p.sub_(group["lr"] * size * orthogonal(ahead).float())

    def _adamw(self, group):
        group["step"] = group.get("step", 0) + 1
        beta1, beta2 = group["adamw_betas"]
        for p in group["params"]:
            mean = self.state[p].setdefault("adamw_exp_avg", torch.zeros_like(p))
            square = self.state[p].setdefault("adamw_exp_avg_sq", torch.zeros_like(p))
            mean.lerp_(p.grad, 1 - beta1)
            square.lerp_(p.grad.square(), 1 - beta2)
            scale = (1 - beta1 ** group["step"]) / math.sqrt(1 - beta2 ** group["step"])
            p.sub_(group["lr"] / scale * mean / (square.sqrt() + group["adamw_eps"]))


def orthogonal(g):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def parameters():
    generator = torch.Generator().manual_seed(5)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((24, 16), (16,))
    ]


def groups(params):
    # As #1428 makes them: AdamW's group says nothing of Muon.
    return [{"params": [params[0]], "use_muon": True}, {"params": [params[1]]}]


def train(optimizer, params, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def resumed(change=lambda state: None):
    """Train #1428's for 4 steps and then its state in ours for 3; return both ways' parameters."""
    theirs = parameters()
    optimizer = PullRequestMuon(groups(theirs))
    train(optimizer, theirs, range(4))
    state = copy.deepcopy(optimizer.state_dict())
    ours = [torch.nn.Parameter(p.detach().clone()) for p in theirs]
    train(optimizer, theirs, range(4, 7))
    change(state)
    other = Muon(groups(ours), lr=1.0)
    other.load_state_dict(state)
    train(other, ours, range(4, 7))
    return theirs, ours


def distance(theirs, ours):
    return max(float((a - b).detach().abs().max()) for a, b in zip(theirs, ours, strict=True))


def test_ours_goes_on_from_the_state_of_the_pull_request():
    # Newton-Schulz in bf16 differs in its last bits.
    assert distance(*resumed()) < 2e-3


def forget_momentum(state):
    state["state"][0]["muon_buffer"].zero_()


def scale_momentum(state):
    state["state"][0]["muon_buffer"].mul_(1 - MU)


def forget_moments(state):
    state["state"][1]["adamw_exp_avg"].zero_()


def forget_step(state):
    state["param_groups"][1]["step"] = 0


@pytest.mark.parametrize(
    "fault",
    [forget_momentum, scale_momentum, forget_moments, forget_step],
    ids=lambda f: f.__name__,
)
def test_a_lost_state_is_seen(fault):
    """Shows that the test above can fail."""
    assert distance(*resumed(fault)) > 5e-3


def test_a_state_without_its_momentum_is_refused():
    with pytest.raises(ConfigurationError, match="no momentum_buffer in the state"):
        resumed(lambda state: state["state"][0].clear())


def test_moments_without_their_count_of_steps_are_refused():
    with pytest.raises(ConfigurationError, match="Group 1 has AdamW's moments"):
        resumed(lambda state: state["param_groups"][1].pop("step"))


def test_a_state_under_both_names_is_refused():
    state = {
        "state": {0: {"muon_buffer": torch.ones(2), "momentum_buffer": torch.ones(2)}},
        "param_groups": [{"params": [0]}],
    }
    with pytest.raises(ConfigurationError, match="Parameter 0 has momentum_buffer twice"):
        from_pull_request(state)


def test_our_own_state_is_taken_as_it_is():
    params = parameters()
    optimizer = Muon(groups(params))
    train(optimizer, params, range(2))
    state = optimizer.state_dict()
    assert from_pull_request(state) == state


# --------------------------------------------------------------------------------------------
# Versions
# --------------------------------------------------------------------------------------------


def test_a_record_of_this_version_is_taken_as_it_is():
    record = {"version": VERSION, "precision": "bf16"}
    assert migrate(record) == record


def test_a_newer_record_is_refused_with_both_versions():
    with pytest.raises(CheckpointError, match=rf"version {VERSION + 1}, .* up to {VERSION}"):
        migrate({"version": VERSION + 1})


@pytest.mark.parametrize("version", [None, 0, "1", True, 1.0])
def test_a_record_without_a_version_is_refused(version):
    with pytest.raises(CheckpointError, match="expected a number from 1"):
        migrate({"version": version})


def test_every_older_version_has_a_migration():
    assert set(convert.MIGRATIONS) == set(range(1, VERSION))


def test_older_records_go_through_every_version_between(monkeypatch):
    monkeypatch.setattr(convert, "VERSION", 3)
    monkeypatch.setattr(
        convert,
        "MIGRATIONS",
        {1: lambda r: {**r, "path": "1"}, 2: lambda r: {**r, "path": r["path"] + "2"}},
    )
    old = {"version": 1}
    assert migrate(old) == {"version": 3, "path": "12"}
    assert old == {"version": 1}
    assert migrate({"version": 2, "path": ""}) == {"version": 3, "path": "2"}
