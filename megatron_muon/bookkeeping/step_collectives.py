"""How many collectives a step enters, by the rounds of the schedule that a run makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict, Unpack

from megatron_muon.bookkeeping.plan import Grid, GridSize, PlannedMatrix
from megatron_muon.bookkeeping.schedule import (
    Hops,
    Position,
    Spread,
    Transfer,
    cut_into_rounds,
    micro_groups_of,
    overlaps,
)
from megatron_muon.bookkeeping.units import PlannedPart, units_of

_FP32_NBYTES = 4
_PER_SHARED_GROUP = 5
"""Of a micro-group with shared blocks in a line: one for the sizes of the parts, and two for each
of two sums of their Gram matrices. In bf16, and where these exceed the budget, there are more."""


class ExchangeSettings(TypedDict):
    """What the exchange of a step depends on.

    Attributes:
        exchange_nbytes: Bytes of an element that travels.
        budget_nbytes: What a rank may send and receive in one collective.
        by_bucket: Whether all matrices of a bucket are done before those of the next.
    """

    exchange_nbytes: int
    budget_nbytes: int
    by_bucket: bool


def collectives_of(
    matrices: Iterable[PlannedMatrix],
    grids: Mapping[Grid, GridSize],
    **settings: Unpack[ExchangeSettings],
) -> int:
    """Return the collectives of the exchange that the busiest rank enters in a step.

    Exact but for shared blocks. Where a stage has several grids, the busiest rank of each is taken
    to be the same.

    Args:
        matrices: Of a pipeline stage, ordered by name; of the routed experts those of one
            expert-parallel rank.
        grids: Sizes of the grids they lie in.
        settings: What the exchange depends on.
    """
    return sum(
        _rounds(units_of(members), grids[grid], settings)
        for grid, members in _by_grid(matrices).items()
    )


def overlap_of(
    matrices: Iterable[PlannedMatrix],
    grids: Mapping[Grid, GridSize],
    **settings: Unpack[ExchangeSettings],
) -> bool:
    """Whether micro-groups of any grid overlap; the arguments are those of the collectives."""
    return any(
        overlaps(*_cut(units_of(members), grids[grid], settings))
        for grid, members in _by_grid(matrices).items()
    )


def _by_grid(matrices: Iterable[PlannedMatrix]) -> dict[Grid, list[PlannedMatrix]]:
    on: dict[Grid, list[PlannedMatrix]] = {}
    for planned in matrices:
        on.setdefault(planned.owned.grid, []).append(planned)
    return on


def _cut(
    plan: Sequence[PlannedMatrix], size: GridSize, settings: ExchangeSettings
) -> tuple[Sequence[PlannedMatrix], int, Spread, int, int, bool]:
    """Return what micro-groups are cut by."""
    budget = settings["budget_nbytes"]
    return (
        plan, size.tp, Spread(whole=True, everywhere=False),
        budget // settings["exchange_nbytes"], budget // _FP32_NBYTES, settings["by_bucket"],
    )  # fmt: skip


def _rounds(plan: Sequence[PlannedMatrix], size: GridSize, settings: ExchangeSettings) -> int:
    """Return the same of one grid.

    A rank enters those of its column of the grid, between data-parallel ranks, and of its row.
    """
    if size.dp == size.tp == 1:
        return 0
    # All columns are alike but for matrices that are not cut: those travel to their home alone.
    columns = {0} | {planned.home.tp for planned in plan if not planned.matrix.is_cut}
    in_column, in_row = Counter(dict.fromkeys(columns, 0)), Counter[int]()
    cut = _cut(plan, size, settings)
    _, _, spread, budget, _, _ = cut
    groups = micro_groups_of(*cut, overlapped=overlaps(*cut))

    def rounds(transfers: Sequence[Transfer]) -> int:
        """Return the rounds of a hop: one where even all that moves is within the budget."""
        numel = sum(transfer.range.numel for transfer in transfers)
        return min(numel, 1) if numel <= budget else len(cut_into_rounds(transfers, budget))

    for indices in groups:
        members = [(i, plan[i]) for i in indices]
        for tp in columns:
            hops = Hops(Position(dp=0, tp=tp, dp_size=size.dp, tp_size=size.tp), spread)
            for i, planned in members:
                hops.add_over_data(i, planned)
            in_column[tp] += rounds(hops.to_row) + rounds(hops.from_row)
        for row in {planned.home.dp for _, planned in members} if size.tp > 1 else ():
            hops = Hops(Position(dp=row, tp=0, dp_size=size.dp, tp_size=size.tp), spread)
            for i, planned in members:
                hops.add_over_tensor(i, planned)
            in_row[row] += rounds(hops.to_home) + rounds(hops.from_home)
        parts = [planned for _, planned in members if isinstance(planned, PlannedPart)]
        for line in {(p.is_in_row, p.home.dp if p.is_in_row else p.home.tp) for p in parts}:
            (in_row if line[0] else in_column)[line[1]] += _PER_SHARED_GROUP
    return max(in_column.values()) + max(in_row.values(), default=0)
