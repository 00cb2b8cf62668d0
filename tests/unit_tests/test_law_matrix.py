"""The matrix of cases: each cell must be what one process computes.

A cover in which every two values of the axes meet runs by default, every cell with ``--full``.
"""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.job import refusals
from megatron_muon.testing.law.matrix import (
    AXES,
    CANNOT_RUN,
    KINDS,
    MAX_RANKS,
    REFUSED,
    TRIPLES,
    cells,
    cover,
    runnable,
)
from megatron_muon.testing.law.reference import violations
from megatron_muon.testing.law.runs import Runs
from megatron_muon.testing.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

BOUND = 1e-5
"""Also of the cells on three data-parallel ranks, whose gradients DDP scales by a third."""

COVER = cover(runnable())
RUNS = Runs(
    {
        **{str(cell.one_process()): (1, cell.one_process()) for cell in COVER},
        **{str(cell): (cell.num_ranks, cell.case()) for cell in COVER},
    },
    timeout_s=170,
)


def wrong(cell, runs):
    """Return what is not as on one process: beyond the bound, or not bit for bit."""
    label = str(cell)
    found = violations(cell.case(), runs.outcomes(label), BOUND)
    if cell.dp != 3:
        found += runs.differing(label, str(cell.one_process()))
    return found


@pytest.mark.parametrize("cell", COVER, ids=str)
def test_update_is_that_of_one_process(cell):
    assert wrong(cell, RUNS) == []


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", AXES["layout"])
@pytest.mark.parametrize(
    ("tp", "dp"),
    [grid for grid in product(AXES["tp"], AXES["dp"]) if grid[0] * grid[1] <= MAX_RANKS],
)
def test_update_is_that_of_one_process_in_every_cell(tp, dp, layout, kind):
    chosen = [
        cell
        for cell in runnable()
        if (cell.tp, cell.dp, cell.layout, cell.kind) == (tp, dp, layout, kind)
    ]
    runs = Runs(
        {
            **{str(cell.one_process()): (1, cell.one_process()) for cell in chosen},
            **{str(cell): (cell.num_ranks, cell.case()) for cell in chosen},
        },
        timeout_s=800,
    )
    assert {str(cell): found for cell in chosen if (found := wrong(cell, runs))} == {}


def test_a_gradient_times_a_third_is_rounded():
    """So equality bit for bit is one that a rounding breaks."""
    found = [RUNS.differing(str(cell), str(cell.one_process())) for cell in COVER if cell.dp == 3]
    assert all(found)


def together(cell, axes):
    return tuple(getattr(cell, axis) for axis in axes)


def test_cover_has_all_values_together_that_can_be():
    for axes in (*combinations(AXES, 2), *TRIPLES):
        assert {together(cell, axes) for cell in COVER} == {
            together(cell, axes) for cell in runnable()
        }
    assert cover(runnable()) == COVER
    assert len(COVER) < len(runnable()) / 50


def test_every_cell_runs_or_says_why_not():
    every = list(cells())
    assert set(every) == set(runnable()) | {cell for cell in every if cell.why_not}
    for reason, is_hit in CANNOT_RUN.items():
        assert any(is_hit(cell) for cell in every), reason


def test_megatron_makes_one_bucket_where_reduction_does_not_overlap():
    """It takes the size away, in training and in DDP."""
    for overlap, expected in ((False, None), (True, 6000)):
        assert run_ranks(bucket_size, 1, overlap) == [expected]


def bucket_size(overlap):
    import megatron_muon

    megatron_muon.install(device="cpu")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.training.training import resolve_ddp_bucket_size

    config = DistributedDataParallelConfig(bucket_size=6000)
    return resolve_ddp_bucket_size(config, None, overlap, 1)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each refused run says, on every rank."""
    found = {}
    for num_ranks in {ranks for ranks, _, _ in REFUSED.values()}:
        names = [name for name, (ranks, *_) in REFUSED.items() if ranks == num_ranks]
        results = run_ranks(
            refusals, num_ranks, [REFUSED[name][1] for name in names],
            logs=Path(tmp_path_factory.mktemp("refused")),
        )  # fmt: skip
        found |= dict(zip(names, zip(*results, strict=True), strict=True))
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_on_every_rank(name, said):
    _, _, expected = REFUSED[name]
    assert all(expected in text for text in said[name]), said[name]


def test_a_run_that_can_be_is_not_refused():
    assert run_ranks(refusals, 2, [Case(tp=2)]) == [[""]] * 2
