"""Every law fails when the step is broken on purpose.

The relative Frobenius error of the worst update, measured, is beside each mutant; a right step has
1e-6. The least is that of a missing decay, 1.9e-2: with a zero gradient it is everything.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.model import blocks
from megatron_muon.testing.law.mutants import MUTANTS
from megatron_muon.testing.law.reference import violations
from megatron_muon.testing.law.runs import Runs

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

WRONG = 1e-2
"""Parts every fault from every rounding."""

TP2 = Case(tp=2)
FLAT = Case(layout="flat", layers=3)
SPLIT = replace(TP2, split_gated_fc1=True)
EXPERTS = Case(experts=4, ep=2)
FROZEN_FIRST = Case(pp=2, vpp=2, layers=4, frozen="input_layernorm")
DECAY = Case(tp=2, zero_grads=True, weight_decay=5.0)

BROKEN: dict[str, tuple[str, int, Case, str]] = {
    # label: mutant, ranks, case, what is found
    "no average": ("no average over data-parallel ranks", 4, TP2, "linear_proj.bias"),  # 0.9
    "no average, flat": (
        "no average over data-parallel ranks", 4, replace(TP2, layout="flat"), "linear_fc1.weight",
    ),
    "half reduced": ("straddling matrix half reduced", 2, FLAT, r"1.*linear_\w+.weight"),  # 0.8
    "wrong group": ("experts reduced over the wrong group", 4, EXPERTS, "linear_fc1.weight"),  # 1.0
    "wrong group, flat": (
        "experts reduced over the wrong group", 4, replace(EXPERTS, layout="flat"), "fc2.bias",
    ),
    "in the hook": (
        "Newton-Schulz of each micro-batch", 2, Case(micro_batches=4), "linear_fc2.weight",
    ),  # 0.5
    "skipped owner": ("skipped owner", 4, TP2, r"linear_\w+.weight"),  # 1.0
    "skipped owner, flat": (
        "skipped owner", 4, replace(TP2, layout="flat"), r"linear_\w+.weight",
    ),
    "stale piece": ("stale piece", 2, FLAT, r"linear_\w+.weight"),  # 0.1
    "wrong order": ("shards in wrong order", 4, Case(tp=4), "linear_fc2.weight"),  # 1.0
    "cut as one": ("gate and up cut as one", 2, SPLIT, "linear_fc1.weight"),  # 0.4
    "dropped home": (
        "update of one home dropped", 4, replace(TP2, layout="flat"), r"linear_\w+.weight",
    ),  # 1.0
    "scratch": ("scratch lent twice", 4, TP2, r"linear_\w+.weight"),  # 1.4
    "scratch, flat": (
        "scratch lent twice", 4, replace(TP2, layout="flat"), r"linear_\w+.weight",
    ),
    "one bucket group": ("bucket groups of two optimizers", 4, FROZEN_FIRST, "is not its master"),
    "qkv as one": ("qkv as one", 2, TP2, "linear_qkv.weight"),  # 0.3
    "output gate as one": (
        "qkv as one", 2, replace(TP2, output_gate=True), "linear_qkv.weight",
    ),
    "gate and up as one": ("gate and up as one", 2, SPLIT, "linear_fc1.weight"),  # 0.3
    "heads together": ("heads together", 2, Case(split_heads=True), "linear_qkv.weight"),  # 0.3
    "scale": ("scale of the whole", 2, TP2, "linear_qkv.weight"),  # 0.5
    "scale of fc1": ("scale of the whole", 2, SPLIT, "linear_fc1.weight"),
    "blockwise": ("blockwise", 2, TP2, "linear_proj.weight"),  # 0.4
    "no decay": ("no decay", 2, TP2, "linear_fc2.weight"),  # 0.02
    "no decay, zero gradient": ("no decay", 2, DECAY, "linear_qkv.weight"),  # 1.0
    "no momentum": ("momentum never advances", 2, TP2, "linear_proj.weight"),  # 0.6
    "router": ("router is a matrix", 4, EXPERTS, "router.weight"),  # 0.6
}  # fmt: skip

RUNS = Runs(
    {
        label: (num_ranks, replace(case, mutant=mutant))
        for label, (mutant, num_ranks, case, _) in BROKEN.items()
    },
    timeout_s=110,
)


@pytest.mark.parametrize("label", BROKEN)
def test_broken_step_is_seen(label):
    found = "\n".join(violations(RUNS.case(label), RUNS.outcomes(label), WRONG))
    assert re.search(BROKEN[label][3], found), found


def test_every_mutant_is_tried():
    assert {mutant for mutant, *_ in BROKEN.values()} == set(MUTANTS) - {None}


@pytest.mark.parametrize(
    ("label", "right"),
    [
        ("qkv as one", "linear_(proj|fc1|fc2)"),
        ("gate and up as one", "linear_(proj|qkv|fc2)"),
        ("heads together", "linear_(proj|fc1|fc2)"),
        ("router", "linear_"),
    ],
)
def test_what_a_mutant_does_not_touch_stays_right(label, right):
    """So it is the fault that is seen."""
    case = RUNS.case(label)
    untouched = [name for name in blocks(case) if re.search(right, name)]
    found = "\n".join(violations(case, RUNS.outcomes(label), 5e-6))
    assert untouched
    assert not [name for name in untouched if name in found]
