"""What a step costs, counted from outside: flops by torch, collectives and bytes by a spy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.matrix import num_layers
from megatron_muon.testing.law.model import blocks
from megatron_muon.testing.law.runs import Runs

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

LAYOUTS = ("owner", "flat")
GRIDS = ((2, 1), (4, 1), (1, 2), (1, 3), (1, 4), (2, 2), (4, 2), (2, 4))
BUDGETS = (4 * 2**10, 64 * 2**10, 2**20, 64 * 2**20)
FEW_STEPS = Case(steps=2)

CASES: dict[str, tuple[int, Case]] = {
    **{
        f"{layout} TP{tp} DP{dp}": (
            tp * dp, replace(FEW_STEPS, tp=tp, layers=num_layers(dp), layout=layout, counted=True)
        )
        for layout in LAYOUTS
        for tp, dp in GRIDS
    },
    **{
        f"one process, {layers} layers": (1, replace(FEW_STEPS, layers=layers, counted=True))
        for layers in (2, 3)
    },
    **{
        f"{layout} TP{tp} DP{dp} budget {budget}": (
            tp * dp,
            replace(FEW_STEPS, tp=tp, layers=3, layout=layout, budget_nbytes=budget),
        )
        for layout in LAYOUTS
        for tp, dp in ((2, 2), (4, 2))
        for budget in BUDGETS
    },
    **{
        f"{layout}, {micro} micro-batches, {layers} layers": (
            4, replace(FEW_STEPS, tp=2, layout=layout, layers=layers, micro_batches=micro),
        )
        for layout in LAYOUTS
        for micro, layers in ((1, 3), (4, 3), (1, 5))
    },
    **{
        f"{mode} {layout}": (
            4, replace(FEW_STEPS, tp=4, tp_mode=mode, layout=layout, layers=3, counted=True),
        )
        for layout in LAYOUTS
        for mode in ("duplicated",)
    },
    **{
        f"distributed {layout}": (
            4, replace(FEW_STEPS, tp=2, tp_mode="distributed", layout=layout, budget_nbytes=4096)
        )
        for layout in LAYOUTS
    },
}  # fmt: skip

RUNS = Runs(CASES, timeout_s=110)
DISTRIBUTED = [f"{layout} TP{tp} DP{dp}" for layout in LAYOUTS for tp, dp in GRIDS]


def one_process(label):
    (outcome,) = RUNS.outcomes(f"one process, {RUNS.case(label).layers} layers")
    return outcome


@pytest.mark.parametrize("label", DISTRIBUTED)
def test_each_block_is_orthogonalized_once_in_the_whole_job(label):
    """By the package's own count, and by the matrix products that torch sees."""
    ranks, one = RUNS.outcomes(label), one_process(label)
    case = RUNS.case(label)
    every_block = sum(map(len, blocks(case).values()))
    assert sum(o.newton_schulz_calls for o in ranks) == case.steps * every_block
    assert sum(o.newton_schulz_flops for o in ranks) == one.newton_schulz_flops
    matmul_flops = sum(o.matmul_flops for o in ranks)
    assert matmul_flops == pytest.approx(one.matmul_flops, rel=0.01)
    assert one.matmul_flops > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_duplicated_orthogonalizes_each_block_on_every_tensor_rank(layout):
    """Where all is repeated the counters say so."""
    label = f"duplicated {layout}"
    received = needed = 0
    for outcome in RUNS.outcomes(label):
        received += sum(collective.received_nbytes for collective in outcome.spied[0])
        needed += to_be_received(outcome, RUNS.case(label).tp)[0]
        assert outcome.newton_schulz_calls == one_process(label).newton_schulz_calls
        assert outcome.matmul_flops == pytest.approx(one_process(label).matmul_flops, rel=0.01)
    assert received > 1.5 * needed


def to_be_received(outcome, tp_size):
    """Bytes that have to come to a rank in a step, and those that make matrices whole.

    Pieces of a shard come to the home's data-parallel rank, shards to the home, and each part of
    the update goes back the same way.
    """
    here, whole = 0, 0
    dp, tp = outcome.dp_rank, outcome.tp_rank
    for place in outcome.places.values():
        (home_dp, home_tp), pieces = place.home, dict(place.pieces)
        shard = sum(pieces.values())
        if dp != home_dp:
            here += pieces.get(dp, 0)
            continue
        if place.is_cut or tp == home_tp:
            here += shard - pieces.get(dp, 0)
        if tp != home_tp:
            here += shard
        elif place.is_cut:
            whole += (tp_size - 1) * shard
    return 4 * (here + whole), 4 * whole


@pytest.mark.parametrize("label", DISTRIBUTED)
def test_no_rank_but_the_home_receives_a_whole_matrix(label):
    case = RUNS.case(label)
    for outcome in RUNS.outcomes(label):
        expected, _ = to_be_received(outcome, case.tp)
        for step in outcome.spied:
            assert {collective.name for collective in step} <= {"all_to_all_single"}
            assert sum(collective.received_nbytes for collective in step) == expected
        assert outcome.exchanged_nbytes == case.steps * expected
        assert outcome.collectives == sum(map(len, outcome.spied))


@pytest.mark.parametrize("label", DISTRIBUTED)
def test_homes_share_what_makes_matrices_whole(label):
    """All of it moves once; no rank gets it all."""
    case, ranks = RUNS.case(label), RUNS.outcomes(label)
    whole = [to_be_received(outcome, case.tp)[1] for outcome in ranks]
    places = ranks[0].places.values()
    assert sum(whole) == 4 * sum(p.numel - p.numel // case.tp for p in places if p.is_cut)
    assert max(whole) < sum(whole) or sum(whole) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_number_of_collectives_grows_with_nothing(layout):
    """Neither with micro-batches nor, as long as the budget has room, with matrices."""
    counts = [
        [[len(step) for step in outcome.spied] for outcome in RUNS.outcomes(label)]
        for label in CASES
        if label.startswith(f"{layout}, ")
    ]
    assert counts[0] == counts[1] == counts[2]
    assert all(2 <= count <= 4 for rank in counts[0] for count in rank)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("grid", [(2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_collective_exceeds_the_budget(layout, grid, budget):
    label = "{} TP{} DP{} budget {}".format(layout, *grid, budget)
    spied = [c for outcome in RUNS.outcomes(label) for step in outcome.spied for c in step]
    largest = max(collective.scratch_nbytes for collective in spied)
    assert largest <= budget
    # What fits beside others under way has a third of it; a matrix that does not takes all.
    assert largest > min(budget, BUDGETS[1]) // 3 // 2
    if budget == BUDGETS[0]:
        # It is used, not just kept: more calls and little left over.
        assert largest > 0.9 * budget
        per_rank = Counter(len(step) for o in RUNS.outcomes(label) for step in o.spied)
        assert min(per_rank) > 4


@pytest.mark.parametrize("budget", BUDGETS[:-1])
@pytest.mark.parametrize("grid", [(2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_budget_changes_no_bit(layout, grid, budget):
    label = "{} TP{} DP{} budget {}".format(layout, *grid, "{}")
    assert RUNS.differing(label.format(budget), label.format(BUDGETS[-1])) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_distributed_counts_its_reductions_within_the_budget(layout):
    """Seven all-reduces for each block by each of two ranks, in pieces of at most the budget."""
    ranks = RUNS.outcomes(f"distributed {layout}")
    case = RUNS.case(f"distributed {layout}")
    spied = [c for outcome in ranks for step in outcome.spied for c in step]
    reductions = [c for c in spied if c.name == "all_reduce"]
    every_block = sum(map(len, blocks(case).values()))
    assert len(reductions) >= case.tp * case.steps * every_block * 7
    assert sum(o.collectives for o in ranks) == len(spied)
    assert max(c.scratch_nbytes for c in spied) <= case.budget_nbytes
