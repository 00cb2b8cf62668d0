"""Gathers of weights that start in the optimizer's step: sooner, and of the same weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.reference import stale_weights, whole_masters
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests import early_gathers_job

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

LATE = Case(
    backward=True, adam_eps=1e-3, micro_batches=2, overlap_grad=True, overlap_param=True,
    layers=3, bucket_size=6000, budget_nbytes=16 * 1024,
)  # fmt: skip
MODELS = {
    "fp32": LATE,
    "bf16": replace(LATE, bf16=True),
    "fp16": replace(LATE, fp16=True, loss_scales=(1.0,) * 3),
    "bf16 TP2": replace(LATE, bf16=True, tp=2, layers=5),  # several turns of its four homes
    "bf16 EP2": replace(LATE, bf16=True, experts=4, ep=2),
    "bf16 builder": replace(LATE, bf16=True, wrap="builder"),
}
CASES = {
    f"{name} {layout}": replace(model, layout=layout)
    for name, model in MODELS.items()
    for layout in ("owner", "flat")
}
FAULTS = ("one matrix too early", "masters not written")


def num_ranks(label):
    return 4 if "TP2" in label or "EP2" in label else 2


@cache
def runs(ranks):
    labels = [label for label in CASES if num_ranks(label) == ranks]
    plan = [(label, early, None) for label in labels for early in (False, True)]
    if ranks == 2:
        plan += [(f"bf16 {layout}", True, fault) for layout in ("owner", "flat")
                 for fault in FAULTS]  # fmt: skip
    jobs = [(replace(CASES[label], gathers_early=early), fault) for label, early, fault in plan]
    with TemporaryDirectory() as logs:
        seen = run_ranks(early_gathers_job.run_all, ranks, jobs, timeout_s=120, logs=Path(logs))
    return dict(zip(plan, zip(*seen, strict=True), strict=True))


def run(label, early, fault=None):
    """Return case, outcomes, whole masters and events of the last step, of every rank."""
    ranks = runs(num_ranks(label))[label, early, fault]
    case = CASES[label]
    outcomes = [outcome for outcome, _ in ranks]
    return case, outcomes, whole_masters(case, outcomes), [events for _, events in ranks]


@pytest.mark.parametrize("label", CASES)
def test_masters_and_weights_are_those_without_it(label):
    case, outcomes, masters, _ = run(label, early=True)
    _, others, expected, _ = run(label, early=False)
    assert masters.keys() == expected.keys()
    assert [name for name in masters if not torch.equal(masters[name], expected[name])] == []
    assert stale_weights(case, outcomes, masters) == []
    for outcome, other in zip(outcomes, others, strict=True):
        assert outcome.grad_norms == other.grad_norms
        assert all(torch.equal(outcome.weights[n], other.weights[n]) for n in other.weights)


@pytest.mark.parametrize("label", CASES)
def test_gathers_start_in_the_step_and_the_first_before_its_last_matrix(label):
    for events in run(label, early=True)[-1]:
        inside = events[: events.index("step ended")]
        assert inside.count("gather") >= 2
        assert "gather" not in events[len(inside) :]
    started_before = []
    for events in run(label, early=True)[-1]:
        last = len(events) - 1 - events[::-1].index("orthogonalize")
        started_before.append(events[:last].count("gather"))
    assert max(started_before) >= 1
    for events in run(label, early=False)[-1]:
        assert "gather" not in events[: events.index("step ended")]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("label", ["bf16 owner", "bf16 flat"])
def test_a_gather_that_is_too_early_is_noticed(label, fault):
    case, outcomes, masters, _ = run(label, True, fault)
    assert stale_weights(case, outcomes, masters) != []
