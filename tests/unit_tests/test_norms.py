"""Norm of the gradients, their zeros and norm of the parameters are those of one process.

A real GPT makes one step on several ranks; one process computes the same in plain torch, in fp64,
from whole parameters and whole gradients. Measured, norms are within 4e-10 for gradients and 8e-9
for parameters, and zeros are equal. With every copy counted the norms are 1e-3 to 0.9 away. So are
Megatron's own values: its norm of the parameters by 4e-3 to 3e-2 while a gather is pending, by
6e-6 to 4e-4 from rounded weights; its norm of the gradients by 4e-4 to 6e-4 where the experts'
tensor parallelism is below that of the rest, without a layout.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron_muon.collectives.span import Span
from megatron_muon.errors import ConfigurationError
from megatron_muon.optimizer.grad_statistics import Member, clip, measure
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests.norms_job import (
    Expected,
    Measured,
    NormCase,
    collectives_on_world,
    expected,
    run_cases,
    run_two_models,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

BOUND = 5e-6
"""Relative error of every norm."""

WRONG = 1e-3
"""Less than what a copy that counts twice adds to a norm, or a part that is missing."""

EXPERTS = NormCase(experts=4, ep=2)

MODELS: dict[str, tuple[int, NormCase]] = {
    # Two ranks.
    "DP2": (2, NormCase()),
    "TP2, buffers in the model's dtype": (2, NormCase(tp=2, grads_in_fp32=False)),
    "tied": (2, NormCase(tied=True)),
    "tied, PP2": (2, NormCase(tied=True, pp=2, layers=2)),
    "tied, VPP2": (2, NormCase(tied=True, pp=2, vpp=2, layers=4)),
    "EP2": (2, EXPERTS),
    "EP2 without biases": (2, replace(EXPERTS, bias=False)),
    "experts not cut": (2, NormCase(experts=4, tp=2, etp=1)),
    "frozen stage": (2, NormCase(pp=2, layers=2, frozen=r"embedding|layers\.0\.")),
    # Four ranks.
    "TP2 DP2": (4, NormCase(tp=2)),
    "tied, TP2 PP2": (4, NormCase(tied=True, tp=2, pp=2, layers=2)),
    "tied, PP2 DP2": (4, NormCase(tied=True, pp=2, layers=2)),
    "EP2 DP4": (4, EXPERTS),
    "EP2 TP2": (4, replace(EXPERTS, tp=2, bias=False)),
    "experts not cut, EP2": (4, replace(EXPERTS, tp=2, etp=1)),
    "experts not cut, EP1": (
        4, NormCase(experts=4, tp=2, etp=1, collection="without whole"),
    ),
    "frozen": (4, NormCase(tp=2, frozen="layernorm|embedding|linear_fc1")),
    "MTP": (4, NormCase(tp=2, mtp="linear_fc2|final")),
    "frozen experts": (
        4, replace(EXPERTS, tp=2, etp=1, frozen=r"experts\.1|experts\.3.linear_fc2|router",
                   collection="by hand"),
    ),
    "frozen, tied, TP2 PP2": (
        4, NormCase(tied=True, tp=2, pp=2, layers=2, frozen="layernorm|embedding|output|fc1"),
    ),
    "MTP on one stage, clipped": (
        4, NormCase(tp=2, pp=2, layers=2, mtp=r"layers\.1", clip=1.0),
    ),
}  # fmt: skip

OVERLAPPED = {"overlap_grad": True, "overlap_param": True, "bucket_size": 6000}

WAYS = {
    "owner": {},
    "flat": {"layout": "flat"},
    "legacy": {"wrap": "legacy"},
    "replicated": {"wrap": "replicated"},
    "owner overlapped": OVERLAPPED,
    "flat overlapped": {"layout": "flat", **OVERLAPPED},
}

PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "loss_scales": (1024.0,)},
    "fp32 scaled": {"loss_scales": (1024.0,)},
}


def every_case() -> dict[str, tuple[int, NormCase]]:
    return {
        f"{model}, {way}, {precision}": (num_ranks, replace(case, **kind, **number))
        for model, (num_ranks, case) in MODELS.items()
        for way, kind in WAYS.items()
        for precision, number in PRECISIONS.items()
    }


def chosen_labels() -> list[str]:
    """Every model in several ways, overlap and precision in turn; one small model in all."""
    labels = [label for label in every_case() if label.startswith("DP2, ")]
    precisions = list(PRECISIONS)
    for i, (model, (num_ranks, _)) in enumerate(MODELS.items()):
        overlapped = (" overlapped", "")[:: 1 if i % 2 else -1]
        ways = [*map("".join, zip(("owner", "flat"), overlapped, strict=True)), "legacy"]
        ways += ["replicated"]
        if num_ranks == 4:
            del ways[2 + i % 2]
        for j, way in enumerate(ways):
            labels.append(f"{model}, {way}, {precisions[(i // 2 + j) % len(precisions)]}")
    return list(dict.fromkeys(labels))


EVERY = every_case()
CHOSEN = chosen_labels()


def launch(labels: list[str], logs: Path, timeout_s: float) -> dict[str, list[Measured]]:
    found = {}
    for num_ranks in (2, 4):
        own = [label for label in labels if EVERY[label][0] == num_ranks]
        if not own:
            continue
        cases = [EVERY[label][1] for label in own]
        ranks = run_ranks(run_cases, num_ranks, cases, timeout_s=timeout_s, logs=logs)
        found |= dict(zip(own, map(list, zip(*ranks, strict=True)), strict=True))
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return launch(CHOSEN, tmp_path_factory.mktemp("norms"), timeout_s=110)


def one_process(label: str) -> Expected:
    num_ranks, case = EVERY[label]
    case = replace(
        case, wrap="", layout="", bucket_size=None, overlap_grad=False, overlap_param=False,
        loss_scales=(), collection="",
    )  # fmt: skip
    return expected_of(case, num_ranks)


expected_of = cache(expected)


def off(got: float, right: float) -> float:
    """Return the relative error."""
    return abs(got - right) / right


def wrong(label: str, ranks: list[Measured]) -> list[str]:
    """Return what is not as on one process."""
    right, case = one_process(label), EVERY[label][1]
    found = []
    for rank, measured in enumerate(ranks):
        said, alone = measured.said, measured.alone
        clipped = right.grad_norm if case.clip == 0 else case.clip
        by_group = {} if case.mtp is None else {"mtp": right.mtp_norm}
        pairs = [
            (said.grad_norm, right.grad_norm),
            (said.params_norm, right.params_norm),
            (alone.grad_norm, clipped),
            (alone.params_norm, right.params_norm),
            *((measured.by_group.get(name, math.inf), norm) for name, norm in by_group.items()),
        ]
        found += [
            f"rank {rank}: {got}, expected {norm}" for got, norm in pairs if off(got, norm) > BOUND
        ]
        if {said.num_zeros, alone.num_zeros} != {right.num_zeros}:
            found.append(f"rank {rank}: {said.num_zeros} zeros, expected {right.num_zeros}")
        if measured.by_group.keys() != by_group.keys():
            found.append(f"rank {rank}: norms of {list(measured.by_group)}")
        if (said, alone, measured.by_group) != (ranks[0].said, ranks[0].alone, ranks[0].by_group):
            found.append(f"rank {rank} says {said}, rank 0 {ranks[0].said}")
        if measured.world_collectives:
            found.append(f"rank {rank}: {measured.world_collectives} collectives without a group")
    return found


@pytest.mark.parametrize("label", CHOSEN)
def test_norms_and_zeros_are_those_of_one_process(label, measured):
    """From the step, and when they are asked for alone; the same on all ranks."""
    assert wrong(label, measured[label]) == []


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_norms_and_zeros_are_those_of_one_process_in_every_case(model, tmp_path):
    labels = [label for label in EVERY if label.rsplit(", ", 2)[0] == model]
    found = launch(labels, tmp_path, timeout_s=400)
    assert {label: lines for label in labels if (lines := wrong(label, found[label]))} == {}


# What these tests have to see.


def num_dense_copies(label: str) -> int:
    num_ranks, case = EVERY[label]
    return num_ranks // (case.tp * case.pp)


def has_copies(label: str) -> bool:
    """Whether some rank has a parameter that another counts."""
    case = EVERY[label][1]
    is_replicated = case.wrap == "replicated" and num_dense_copies(label) > 1
    return case.tp > 1 or (case.tied and case.pp > 1) or is_replicated


@pytest.mark.parametrize("label", [label for label in CHOSEN if has_copies(label)])
def test_a_copy_that_counts_twice_is_seen(label, measured):
    for rank in measured[label]:
        assert off(rank.all_counted.grad_norm, rank.alone.grad_norm) > WRONG
        assert off(rank.all_counted.params_norm, rank.alone.params_norm) > WRONG
        assert rank.all_counted.num_zeros > rank.alone.num_zeros


@pytest.mark.parametrize("label", [label for label in CHOSEN if num_dense_copies(label) > 1])
def test_a_sum_over_the_model_parallel_group_alone_is_seen(label, measured):
    ranks = measured[label]
    assert any(off(rank.mp_only.grad_norm, rank.alone.grad_norm) > WRONG for rank in ranks)
    assert any(off(rank.mp_only.params_norm, rank.alone.params_norm) > WRONG for rank in ranks)
    assert any(rank.mp_only.num_zeros < rank.alone.num_zeros for rank in ranks)


def stock_errors(label, measured):
    return [off(rank.stock.params_norm, one_process(label).params_norm) for rank in measured[label]]


@pytest.mark.parametrize(
    ("label", "size"),
    [
        ("DP2, owner overlapped, fp32", WRONG),
        ("DP2, owner overlapped, bf16", WRONG),
        ("DP2, owner overlapped, fp16", WRONG),
        ("DP2, flat overlapped, fp32", WRONG),
        ("DP2, flat overlapped, fp16", WRONG),
        ("DP2, owner, fp16", 10 * BOUND),
        ("DP2, flat, fp16", 10 * BOUND),
        ("DP2, replicated, fp16", 10 * BOUND),
        ("DP2, legacy, fp16", 10 * BOUND),
        ("DP2, legacy, bf16", 10 * BOUND),
    ],
)
def test_norm_of_old_or_rounded_weights_is_seen(label, size, measured):
    """Megatron's own."""
    assert max(stock_errors(label, measured)) > size


def test_norm_of_the_current_weights_is_megatrons(measured):
    """So the control differs by the fault alone."""
    for way in list(WAYS)[:4]:
        assert max(stock_errors(f"DP2, {way}, fp32", measured)) < BOUND


def test_biases_of_experts_that_count_by_the_wrong_group_are_seen(measured):
    """Megatron's own: it takes the experts' copies for those of the dense tensor parallelism."""
    labels = [name for name in CHOSEN if name.startswith("experts not cut") and "legacy" in name]
    assert labels
    for label in labels:
        right = one_process(label)
        for rank in measured[label]:
            assert off(rank.stock.grad_norm, right.grad_norm) > 20 * BOUND


def test_zeros_are_there_to_be_counted():
    for label in CHOSEN:
        assert one_process(label).num_zeros > 100


# Two models in one job.

TWO_MODELS = [
    NormCase(collection="by hand"),
    NormCase(layout="flat", collection="without whole", bf16=True),
    NormCase(wrap="legacy", collection="without whole"),
    NormCase(wrap="replicated", collection="by hand", bf16=True),
]


def test_two_models_in_one_job_do_not_see_each_other():
    """Each on half of the ranks, one stepping more often: nothing goes over all ranks."""
    ranks = run_ranks(run_two_models, 4, TWO_MODELS, timeout_s=60)
    for i, case in enumerate(TWO_MODELS):
        rights = [expected(case, 2, first=2 * half) for half in range(2)]
        assert off(rights[0].grad_norm, rights[1].grad_norm) > WRONG
        for rank in range(4):
            found, success, collectives = ranks[rank][i]
            right = rights[rank // 2]
            assert off(found.said.grad_norm, right.grad_norm) < BOUND
            assert off(found.said.params_norm, right.params_norm) < BOUND
            assert found.said.num_zeros == right.num_zeros
            # The gradients of the first model had an inf.
            assert success == (rank >= 2)
            assert found.world_collectives == collectives == 0


def test_a_collective_over_all_ranks_is_seen():
    assert run_ranks(collectives_on_world, 2) == [1, 1]


# Arithmetic.

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def member(grad: torch.Tensor | None, norm_group: str | None = None, *, is_counted: bool = True):
    master = torch.zeros(
        0 if grad is None else grad.shape, device=grad.device if grad is not None else "cpu"
    )
    master.grad = grad
    return Member(
        name="layer.weight", order=0, master=master, norm_group=norm_group,
        is_counted=is_counted, is_matrix=True,
    )  # fmt: skip


def measure_alone(*members: Member, device: str = "cpu"):
    return measure(members, Span([], torch.device(device)), count_zeros=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-10, 1.0, 1e10, 1e30, 3e38])
def test_no_square_of_a_finite_gradient_overflows_or_vanishes(size, device):
    grad = torch.full((3, 5), size, device=device)
    grad[0, :2] = 0
    found = measure_alone(member(grad), device=device)
    assert found.is_finite
    assert found.num_zeros == 2
    assert off(found.norms[None], math.sqrt(13) * float(grad[2, 2])) < 1e-12
    in_fp32 = float((grad * grad).sum().sqrt())
    assert (off(in_fp32, found.norms[None]) < BOUND) == (1e-20 < size < 1e18)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_counted", [True, False])
def test_one_element_that_is_not_finite_is_seen_also_in_a_copy(is_counted, bad, device):
    grad = torch.ones(70000, device=device)
    assert measure_alone(member(grad), device=device).is_finite
    grad[-1] = bad
    members = [member(torch.ones(3, device=device)), member(grad, is_counted=is_counted)]
    assert not measure_alone(*members, device=device).is_finite


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_and_empty_shards_count_as_nothing(device):
    empty, full = torch.zeros(0, device=device), torch.ones(4, device=device)
    found = measure_alone(member(None), member(empty), member(full), device=device)
    assert (found.is_finite, found.norms, found.num_zeros) == (True, {None: 2.0}, 0)
    nothing = measure_alone(device=device)
    assert (nothing.is_finite, nothing.norms, nothing.num_zeros) == (True, {None: 0.0}, 0)


def test_a_group_with_a_norm_of_its_own_is_clipped_by_it():
    main, own = torch.full((4,), 3.0), torch.full((4,), 0.5)
    members = [member(main), member(own, "mtp"), member(torch.ones(9), "mtp", is_counted=False)]
    found = measure_alone(*members)
    assert found.norms == {None: 6.0, "mtp": 1.0}
    clip(members, 3.0, found.norms)
    assert off(float(main.norm()), 3.0) < 1e-6
    assert float(own.norm()) == 1.0


def test_a_group_that_nobody_would_clip_is_refused():
    with pytest.raises(ConfigurationError, match=r"layer.weight has grad_norm_group 'draft'"):
        member(torch.ones(1), "draft")
