"""The law: the update of a parameter is that of one process, however the job is cut.

A real GPT goes through the real DDP and the real factory of Megatron on gloo; its gradients are
given, so that the updates can be compared with an oracle that knows no ranks, and bit for bit with
one process. ``test_law_mutants`` sees every law fail.

Relative Frobenius errors, measured over three steps against the fp64 oracle: at most 1.0e-6 in
fp32, 4.5e-3 with bf16 products, 2.0e-3 where bf16 travels; 1.9e-2 to 1.5 for the mutants.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.matrix import num_layers
from megatron_muon.testing.law.model import (
    HEAD,
    Replica,
    blocks,
    gradients,
    logical_shapes,
    micro_batch,
    qkv_widths,
)
from megatron_muon.testing.law.reference import errors, reference, run_oracle, violations
from megatron_muon.testing.law.runs import Runs
from megatron_muon.testing.oracle import relative_error

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

BOUND = 5e-6
"""Above the error of fp32 arithmetic, far below that of any fault."""

BF16_BOUND = 1e-2
"""The same where products are in bf16, or what travels is."""

EXACT_GRIDS = (
    (1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2),
)  # fmt: skip
"""Tensor and data parallel sizes where DDP's factor of one over the data-parallel size is exact."""

GRIDS = (*EXACT_GRIDS, (1, 3), (2, 3))
LAYOUTS = ("owner", "flat")
SMALL_GRIDS = tuple(grid for grid in EXACT_GRIDS if grid[0] * grid[1] <= 4)

FP32 = Case(layers=3)
BF16 = Case(layers=3, bf16=True, precision="medium", nesterov=True)
WIRE = Case(layers=3, exchange_dtype="bf16")
OVERLAPPED = replace(BF16, tp=2, overlap_grad=True, overlap_param=True, bucket_size=6000)

# The first parameter of the second chunk must be a matrix for Megatron's mixed bucket group to
# be gathered too early.
VIRTUAL_PIPELINE = Case(pp=2, vpp=2, layers=4, frozen="input_layernorm")
ONE_MATRIX = r"layers.0.mlp.linear_fc2.weight"
MATRICES = r"decoder.*linear_\w+\.weight"

IN_BOTH_LAYOUTS: dict[str, tuple[int, Case]] = {
    # Two ranks.
    "one matrix, two ranks": (2, Case(trained=ONE_MATRIX)),
    "frozen matrices": (2, Case(frozen=r"layers.0.*(linear_proj|linear_fc1).weight")),
    "all matrices frozen": (2, Case(frozen=MATRICES)),
    "all else frozen": (2, Case(trained=MATRICES, layers=3)),
    "gradients reduced in bf16": (2, Case(bf16=True, grads_in_fp32=False)),
    "two pipeline stages": (2, Case(pp=2, bf16=True)),
    "nothing but decay": (2, Case(tp=2, zero_grads=True, weight_decay=5.0)),
    # Four ranks.
    "clipped": (4, Case(tp=2, clip=300.0, nesterov=True)),
    "one step skipped": (4, Case(tp=2, skip_above=300.0)),
    "no momentum": (4, Case(tp=2, momentum=0.0, weight_decay=0.0)),
    "whole qkv": (4, Case(tp=4, split_qkv=False)),
    "one matrix, four ranks": (4, Case(tp=2, trained=ONE_MATRIX)),
    "virtual pipeline": (4, VIRTUAL_PIPELINE),
    "overlapped": (4, OVERLAPPED),
    "overlapped, builder": (4, replace(OVERLAPPED, wrap="builder")),
    "small buckets": (4, replace(BF16, tp=2, overlap_grad=True, bucket_size=6000)),
    "micro-batches": (4, replace(FP32, tp=2, micro_batches=4)),
    "micro-batches, overlapped": (
        4, replace(FP32, tp=2, micro_batches=4, overlap_grad=True, overlap_param=True,
                   bucket_size=6000),
    ),
    "one rank permuted": (4, replace(FP32, tp=2, permuted=True)),
    "duplicated": (4, replace(FP32, tp=2, tp_mode="duplicated")),
    "duplicated TP4": (4, replace(FP32, tp=4, tp_mode="duplicated")),
    "distributed": (4, Case(tp=2, tp_mode="distributed")),
    "blockwise": (4, Case(tp=2, tp_mode="blockwise")),
    "experts": (4, Case(experts=4, ep=2, bf16=True)),
    "experts, TP2": (4, Case(tp=2, ep=2, experts=4, bias=False)),
    "experts not cut": (4, Case(tp=2, ep=2, etp=1, experts=4)),
    "experts not cut, EP1": (4, Case(tp=2, etp=1, experts=4)),
    "one expert frozen": (4, Case(ep=2, experts=4, frozen=r"local_experts\.1\.")),
    # Eight ranks.
    "experts, TP2 EP2 DP4": (8, Case(tp=2, ep=2, experts=4, bias=False)),
    "experts, one matrix": (
        8, Case(ep=2, experts=4, trained=r"norm|layers.0.*local_experts\.1\.linear_fc1\.weight"),
    ),
}  # fmt: skip

# Megatron 0.19.2 shards no expert where the dense data-parallel group has one rank, and takes a
# pipeline stage without trainable parameters for one without a layout.
UNEVEN = {
    "experts over more ranks than dense matrices": (4, Case(tp=4, ep=2, etp=1, experts=4)),
    "experts over data-parallel ranks alone": (4, Case(tp=4, ep=1, etp=1, experts=4)),
    "a frozen stage": (2, Case(pp=2, frozen=r"embedding|layers\.0\.")),
    "a frozen stage, builder": (
        2, Case(pp=2, wrap="builder", frozen=r"embedding|layers\.0\."),
    ),
    "a stage of matrices alone": (2, Case(pp=2, frozen=r"embedding|layers\.0\..*(norm|bias)")),
    "matrices alone": (2, Case(frozen="norm|bias|embedding|output")),
}  # fmt: skip

CASES: dict[str, tuple[int, Case]] = {
    **{
        f"{kind} {layout} TP{tp} DP{dp}": (
            tp * dp, replace(case, tp=tp, layout=layout, layers=num_layers(dp)),
        )
        for kind, case, grids in (
            ("fp32", FP32, GRIDS), ("bf16", BF16, SMALL_GRIDS), ("wire", WIRE, SMALL_GRIDS),
        )
        for layout in LAYOUTS
        for tp, dp in grids
    },
    **{
        f"{name}, {layout}": (num_ranks, replace(case, layout=layout))
        for name, (num_ranks, case) in IN_BOTH_LAYOUTS.items()
        for layout in LAYOUTS
    },
    **{
        f"{name}, {layout}": (num_ranks, replace(case, layout=layout))
        for name, (num_ranks, case) in UNEVEN.items()
        for layout in LAYOUTS
    },
    "no distributed optimizer": (2, replace(BF16, wrap="replicated")),
    "no layout": (2, replace(BF16, wrap="legacy")),
    "no layout, fp32": (2, replace(FP32, wrap="legacy")),
}  # fmt: skip

RUNS = Runs(CASES, timeout_s=170)

IN_FP32 = [name for name, (_, case) in CASES.items()
           if case.precision == "highest" and case.exchange_dtype is None
           and case.tp_mode != "blockwise"]  # fmt: skip


@pytest.mark.parametrize("label", IN_FP32)
def test_update_is_that_of_one_process(label):
    assert violations(RUNS.case(label), RUNS.outcomes(label), BOUND) == []


@pytest.mark.parametrize(
    "label",
    [name for name, (_, case) in CASES.items()
     if case.precision == "medium" or case.exchange_dtype],
)  # fmt: skip
def test_update_with_bf16_products_or_exchange_is_near_that_of_one_process(label):
    assert violations(RUNS.case(label), RUNS.outcomes(label), BF16_BOUND) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grid", EXACT_GRIDS, ids=str)
def test_update_is_bit_equal_on_every_grid(grid, layout):
    label = "fp32 {} TP{} DP{}".format(layout, *grid)
    assert RUNS.differing(label, "fp32 owner TP1 DP1") == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grid", SMALL_GRIDS, ids=str)
@pytest.mark.parametrize("kind", ["bf16", "wire"])
def test_update_in_bf16_is_bit_equal_on_every_grid(kind, grid, layout):
    label = "{} {} TP{} DP{}".format(kind, layout, *grid)
    assert RUNS.differing(label, f"{kind} owner TP1 DP1") == []


def test_exchange_in_bf16_rounds():
    """Or the bound on its error would say nothing."""
    rounded, exact = RUNS.masters("wire owner TP1 DP1"), RUNS.masters("fp32 owner TP1 DP1")
    changed = {name for name in exact if (rounded[name] != exact[name]).any()}
    assert changed == set(blocks(FP32))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("label", "other"),
    [
        ("overlapped", "bf16 {} TP2 DP2"),
        ("overlapped, builder", "bf16 {} TP2 DP2"),
        ("small buckets", "bf16 {} TP2 DP2"),
        ("micro-batches", "fp32 {} TP2 DP2"),
        ("micro-batches, overlapped", "fp32 {} TP2 DP2"),
        ("one rank permuted", "fp32 {} TP2 DP2"),
        ("duplicated", "fp32 {} TP2 DP2"),
        ("duplicated TP4", "fp32 {} TP4 DP1"),
    ],
)
def test_how_the_step_is_made_changes_no_bit(label, other, layout):
    assert RUNS.differing(f"{label}, {layout}", other.format(layout)) == []


@pytest.mark.parametrize("label", IN_BOTH_LAYOUTS)
def test_layouts_are_bit_equal(label):
    assert RUNS.differing(f"{label}, flat", f"{label}, owner") == []


@pytest.mark.parametrize(
    ("label", "other"),
    [("no layout, fp32", "fp32 owner TP1 DP2"), ("no distributed optimizer", "no layout")],
)
def test_distribution_changes_no_bit(label, other):
    assert RUNS.differing(label, other) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blockwise_is_another_optimizer_and_says_so(layout):
    case, outcomes = RUNS.case(f"blockwise, {layout}"), RUNS.outcomes(f"blockwise, {layout}")
    found = violations(case, outcomes, 0.1)
    wrong = {name for name in blocks(case) for line in found if name in line}
    assert wrong == set(blocks(case))
    assert "WARNING: --muon-tp-mode blockwise" in outcomes[0].printed
    assert "WARNING" not in RUNS.outcomes(f"duplicated, {layout}")[0].printed


@pytest.mark.parametrize(
    ("label", "change", "expected"),
    [
        ("fp32 owner TP2 DP2", {"split_qkv": False}, "linear_qkv"),
        ("fp32 flat TP2 DP2", {"split_gated_fc1": True}, "linear_fc1"),
        ("fp32 flat TP2 DP2", {"split_heads": True}, "linear_qkv"),
        ("whole qkv, owner", {"split_qkv": True}, "linear_qkv"),
        ("clipped, owner", {"nesterov": False}, "linear_proj"),
        ("clipped, flat", {"clip": 0.0}, "linear_proj"),
    ],
)
def test_another_setting_is_seen(label, change, expected):
    case = replace(RUNS.case(label), **change)
    assert expected in "\n".join(violations(case, RUNS.outcomes(label), 1e-2))


def test_frozen_parameters_do_not_move():
    """Those of one expert on all its copies too; without a matrix there is no Muon."""
    for layout in LAYOUTS:
        for outcome in RUNS.outcomes(f"all matrices frozen, {layout}"):
            assert outcome.places == {}
        for outcome in RUNS.outcomes(f"one expert frozen, {layout}"):
            assert not any("local_experts.1." in name for name in outcome.masters)


# What the model of these tests has to have, for the laws to say anything.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_buffer_has_padding(grid, layout):
    """As the buffers say, and the line that is printed at the start."""
    outcome = RUNS.outcomes("fp32 {} TP{} DP{}".format(layout, *grid))[0]
    assert len(outcome.buffers) == 2
    assert all(buffer.numel > buffer.unpadded_numel for buffer in outcome.buffers)
    padding = re.search(r"padding ([\d.]+)", outcome.printed)
    assert padding
    assert float(padding[1]) > 1


@pytest.mark.parametrize("grid", [grid for grid in GRIDS if grid[1] > 1], ids=str)
def test_flat_shards_cut_matrices(grid):
    for place in RUNS.outcomes("fp32 owner TP{} DP{}".format(*grid))[0].places.values():
        assert len(place.pieces) == 1
    places = RUNS.outcomes("fp32 flat TP{} DP{}".format(*grid))[0].places
    straddling = [name for name, place in places.items() if len(place.pieces) > 1]
    assert straddling
    assert len(straddling) < len(places)


def test_a_shard_cuts_a_query_group():
    """With more tensor-parallel ranks than groups: ``fp32 TP4`` and ``TP8``."""
    widths = qkv_widths(FP32)
    rows = FP32.groups * sum(widths.values())
    assert rows // 4 < widths["q"]
    assert (rows // 8) % HEAD != 0


def test_homes_leave_the_row_of_the_owner():
    """Somewhere a matrix is orthogonalized by a rank whose row holds none of it."""
    places = [
        place
        for layout in LAYOUTS
        for tp, dp in EXACT_GRIDS
        for place in RUNS.outcomes(f"fp32 {layout} TP{tp} DP{dp}")[0].places.values()
    ]
    assert any(place.home[0] not in dict(place.pieces) for place in places)


def test_ranks_have_one_mean_gradient():
    for num_ranks, num_copies in ((2, 2), (3, 3), (4, 4), (8, 8), (4, 2)):
        case = Case(experts=4, ep=num_ranks // num_copies)
        replicas = [
            gradients(case, Replica(rank, num_ranks, rank % num_copies, num_copies), 1)
            for rank in range(num_ranks)
        ]
        for name, mean in gradients(replace(case, ep=1), Replica(), 1).items():
            copies = sum(grads[name].double() for grads in replicas) / num_ranks
            assert relative_error(copies, mean) == 0 or num_ranks == 3
            assert not (replicas[0][name] == mean).all()


def test_micro_batches_add_up_exactly_and_differ():
    for name, whole in gradients(Case(), Replica(1, 3, 1, 3), 1).items():
        parts = [micro_batch(whole, index, 4).bfloat16() for index in range(4)]
        assert (sum(part.float() for part in parts) == whole).all(), name
        assert not any((part == whole).all() for part in parts)


def test_a_permuted_rank_really_has_another_order():
    for layout in LAYOUTS:
        plain = RUNS.outcomes(f"fp32 {layout} TP2 DP2")
        permuted = RUNS.outcomes(f"one rank permuted, {layout}")
        orders = [(list(a.masters), list(b.masters)) for a, b in zip(plain, permuted, strict=True)]
        assert all(a == b for a, b in orders[:-1])
        assert orders[-1][0] != orders[-1][1]
        assert set(orders[-1][0]) == set(orders[-1][1])


def test_bound_is_just_above_the_rounding_of_fp32():
    """The same oracle in fp32 is as far from itself as the distributed optimizer is."""
    steps = [gradients(FP32, Replica(), step) for step in range(FP32.steps)]
    in_fp32 = run_oracle(FP32, steps, torch.float32)
    rounding = max(errors(in_fp32.weights, reference(FP32).weights).values())
    assert BOUND / 20 < rounding < BOUND


def test_reference_has_every_block_apart():
    case = Case(split_heads=True, split_gated_fc1=True, output_gate=True)
    oracle = reference(case)
    for name, rows in blocks(case).items():
        assert sorted(row for block in rows for row in block) == list(
            range(logical_shapes(case)[name][0])
        )
        assert name in oracle.weights
    assert len(blocks(case)["decoder.layers.0.self_attention.linear_qkv.weight"]) == 8 + 8 + 2 + 2
    assert len(blocks(case)["decoder.layers.0.mlp.linear_fc1.weight"]) == 2
