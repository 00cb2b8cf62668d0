"""Homes: the one rank of the data x tensor grid that orthogonalizes each matrix.

A row of the grid is a tensor-parallel group: the ranks of one data-parallel rank. For a matrix
that row 0 owns, a home at A or B costs an exchange inside the row, and one at C or D another hop of
the whole matrix::

            tp 0   tp 1
    dp 0  |  A   |  B   |
    dp 1  |  C   |  D   |

So a matrix stays in the row that holds most of it, unless that leaves a rank with more than its
share of Newton-Schulz flops or of elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from megatron_muon.errors import PlanError

FLOPS_TOLERANCE_PERCENT = 5
NUMEL_TOLERANCE_PERCENT = 10
"""How far a rank's flops and elements may lie above an even share so that matrices stay in their
row; a rank with one matrix that is larger has no other. Every rank waits for the one with the most
flops; uneven elements cost less."""

_SMALLEST_PART = 4
"""A row that holds less than one in this many elements of a matrix is no better than another."""

_LoadKind = Literal["share", "flops"]
_Rule = Literal["stay", "least"]

_ATTEMPTS: tuple[tuple[_Rule, _LoadKind], ...] = (
    ("stay", "share"),
    ("least", "share"),
    ("least", "flops"),
)
"""Greedy placements in the order in which they are tried; see :func:`_place`. The first moves
least; the last is the one with a bound on its flops."""


@dataclass(frozen=True, slots=True, order=True)
class Home:
    """A rank of the data x tensor grid.

    Attributes:
        dp: Group-local data-parallel rank.
        tp: Group-local tensor-parallel rank.
    """

    dp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeItem:
    """What the choice of a home needs to know of a matrix.

    Attributes:
        name: Its name, unique.
        flops: Newton-Schulz flops of all its blocks.
        numel: Elements of the whole matrix.
        owner: Data-parallel rank that holds its shards whole, ``None`` if it straddles.
        held: For one that straddles, elements of the tensor-parallel shard by the data-parallel
            rank that holds them. They are the same on every tensor-parallel rank.
        tp_size: Ranks that tensor parallelism cuts it into, 1 if each holds all of it.
    """

    name: str
    flops: int
    numel: int
    owner: int | None = None
    held: Mapping[int, int] = field(default_factory=dict)
    tp_size: int = 1

    def row_numel(self, dp: int) -> int:
        """Return how many elements of the whole matrix a row of the grid holds."""
        if self.owner is not None:
            return self.numel if dp == self.owner else 0
        return self.held.get(dp, 0) * self.tp_size


def lower_bound(loads: Sequence[int], num_ranks: int) -> float:
    """Return what the busiest of ``num_ranks`` bears at least if no item is shared.

    Args:
        loads: Flops (or elements) of each item.
        num_ranks: Ranks that share them.
    """
    return max(sum(loads) / num_ranks, max(loads)) if loads else 0.0


def moved_numel(items: Sequence[HomeItem], homes: Mapping[str, Home]) -> int:
    """Return the elements that leave their row to reach the homes."""
    return sum(item.numel - item.row_numel(homes[item.name].dp) for item in items)


def choose_homes(items: Sequence[HomeItem], dp_size: int, tp_size: int) -> dict[str, Home]:
    """Choose the home of every matrix.

    The busiest rank has at most :data:`FLOPS_TOLERANCE_PERCENT` more flops than an even share, or
    those of the largest matrix, or what longest-processing-time-first over the whole grid gives it
    if that is more. Under that limit come the elements of the fullest rank, then the elements that
    leave their row. The result depends on the set of items alone, not on their order.

    Several greedy placements are tried, since each has inputs on which it loses; with heaps one
    takes a fraction of a second for 50,000 matrices.

    Args:
        items: The matrices.
        dp_size: Rows of the grid.
        tp_size: Ranks of a row.

    Returns:
        The home of each matrix by its name.

    Raises:
        PlanError: Two items have one name, or one is not held as the grid allows.
    """
    _check(items, dp_size, tp_size)
    task = _Task(items, dp_size, tp_size)
    best: tuple[tuple[int, int, int], list[int]] | None = None
    for rule, load_kind in _ATTEMPTS:
        scored = _place(task, rule, load_kind)
        if best is None or scored < best:
            best = scored
        if best[0][:2] == (0, 0):
            break
    assert best is not None
    return {
        item.name: Home(*divmod(rank, tp_size))
        for item, rank in zip(task.items, best[1], strict=True)
    }


class _Task:
    """The items in their one order, and what a rank may bear.

    Attributes:
        items: The items, the costliest first.
        rows: For each item the rows worth staying in, the one that holds most first.
        max_flops: Flops that a rank may have for an item to stay in its row.
        max_numel: Elements that it may have.
    """

    def __init__(self, items: Sequence[HomeItem], dp_size: int, tp_size: int) -> None:
        self.items = sorted(items, key=lambda item: (-item.flops, -item.numel, item.name))
        self.dp_size, self.tp_size = dp_size, tp_size
        self.rows = [_rows_worth_staying_in(item) for item in self.items]
        flops, numel = [item.flops for item in self.items], [item.numel for item in self.items]
        self.total_flops, self.total_numel = sum(flops), sum(numel)
        num_ranks = dp_size * tp_size
        self.max_flops = _limit(flops, num_ranks, FLOPS_TOLERANCE_PERCENT)
        self.max_numel = _limit(numel, num_ranks, NUMEL_TOLERANCE_PERCENT)

    def load(self, flops: int, numel: int, load_kind: _LoadKind) -> int:
        """Return the number that ranks are compared by.

        For "share" it is the larger of the shares of all flops and of all elements, for "flops" the
        flops and, between equals, the elements: both as one integer.
        """
        if load_kind == "share":
            return max(flops * self.total_numel, numel * self.total_flops)
        return flops * (self.total_numel + 1) + numel


def _rows_worth_staying_in(item: HomeItem) -> list[int]:
    if item.owner is not None:
        return [item.owner]
    least = item.numel // (item.tp_size * _SMALLEST_PART)
    rows = [dp for dp, numel in item.held.items() if numel > least]
    return sorted(rows, key=lambda dp: (-item.held[dp], dp))


def _limit(loads: Sequence[int], num_ranks: int, tolerance_percent: int) -> int:
    """Return what a rank may have: an even share and the tolerance, or the largest item."""
    share = sum(loads) * (100 + tolerance_percent) // (100 * num_ranks)
    return max(share, max(loads, default=0))


class _Grid:
    """The loads of all ranks, with the least loaded rank of each row and of the grid at hand.

    Rank ``dp * tp_size + tp`` is the one at ``(dp, tp)``. Of equally loaded ones the first column's
    come first, so that large matrices lie in many rows: a row receives what its homes lack. The
    heaps are lazy: an entry that is no longer its rank's load is dropped when it comes to the top.
    """

    def __init__(self, task: _Task, load_kind: _LoadKind) -> None:
        num_ranks = task.dp_size * task.tp_size
        self.loads = [0] * num_ranks
        self.flops = [0] * num_ranks
        self.numel = [0] * num_ranks
        self._task = task
        self._load_kind: _LoadKind = load_kind
        self._all = sorted((0, rank % task.tp_size, rank) for rank in range(num_ranks))
        self._rows: list[list[tuple[int, int, int]]] = [
            [(0, tp, dp * task.tp_size + tp) for tp in range(task.tp_size)]
            for dp in range(task.dp_size)
        ]

    def least(self, row: int | None = None) -> int:
        """Return the least loaded rank of a row, or of the grid."""
        heap = self._all if row is None else self._rows[row]
        while heap[0][0] != self.loads[heap[0][2]]:
            heappop(heap)
        return heap[0][2]

    def has_room(self, rank: int, item: HomeItem) -> bool:
        """Whether a rank stays under both limits with an item more."""
        return (
            self.flops[rank] + item.flops <= self._task.max_flops
            and self.numel[rank] + item.numel <= self._task.max_numel
        )

    def add(self, rank: int, item: HomeItem) -> None:
        """Give a rank an item."""
        self.flops[rank] += item.flops
        self.numel[rank] += item.numel
        load = self._task.load(self.flops[rank], self.numel[rank], self._load_kind)
        self.loads[rank] = load
        row, column = divmod(rank, self._task.tp_size)
        heappush(self._all, (load, column, rank))
        heappush(self._rows[row], (load, column, rank))


def _place(
    task: _Task, rule: _Rule, load_kind: _LoadKind
) -> tuple[tuple[int, int, int], list[int]]:
    """Place the items one by one, the one of the largest load first.

    Under rule "stay" an item stays in its row if the least loaded rank there has room for it;
    under rule "least" only if no rank of the grid is less loaded. All others go to the least
    loaded rank of the grid. Rule "least" with load "flops" is longest processing time first.

    Returns:
        The flops and the elements of the fullest rank beyond the limits, and the elements that
        leave their row; and the rank of each item.
    """
    items, grid = task.items, _Grid(task, load_kind)
    sizes = [task.load(item.flops, item.numel, load_kind) for item in items]
    ranks = [0] * len(items)
    for i in sorted(range(len(items)), key=lambda i: -sizes[i]):
        ranks[i] = grid.least()
        for row in task.rows[i]:
            rank = grid.least(row)
            if (rule == "stay" and grid.has_room(rank, items[i])) or (
                rule == "least" and grid.loads[rank] == grid.loads[ranks[i]]
            ):
                ranks[i] = rank
                break
        grid.add(ranks[i], items[i])
    _exchange_equals(task, ranks)
    moved_numel = sum(
        item.numel - item.row_numel(rank // task.tp_size)
        for item, rank in zip(items, ranks, strict=True)
    )
    excess_flops = max(0, max(grid.flops) - task.max_flops)
    excess_numel = max(0, max(grid.numel) - task.max_numel)
    return (excess_flops, excess_numel, moved_numel), ranks


def _exchange_equals(task: _Task, ranks: list[int]) -> None:
    """Exchange the homes of equal items so that more of them are in their row.

    No rank's load changes.
    """
    classes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, item in enumerate(task.items):
        classes[item.flops, item.numel].append(i)
    for members in classes.values():
        free: dict[int, list[int]] = defaultdict(list)
        for rank in sorted((ranks[i] for i in members), reverse=True):
            free[rank // task.tp_size].append(rank)
        wishes = [(-task.items[i].row_numel(row), i, row) for i in members for row in task.rows[i]]
        waiting = dict.fromkeys(members)
        for _, i, row in sorted(wishes):
            if i in waiting and free[row]:
                ranks[i] = free[row].pop()
                del waiting[i]
        left = sorted(rank for row in free.values() for rank in row)
        for i, rank in zip(waiting, left, strict=True):
            ranks[i] = rank


def _check(items: Sequence[HomeItem], dp_size: int, tp_size: int) -> None:
    names: set[str] = set()
    for item in items:
        if item.name in names:
            raise PlanError(f"Two matrices are named {item.name}; a home is chosen by name.")
        names.add(item.name)
        rows = item.held if item.owner is None else (item.owner,)
        if not all(0 <= dp < dp_size for dp in rows) or item.tp_size not in (1, tp_size):
            raise PlanError(
                f"{item.name} is held by data-parallel ranks {sorted(rows)} and cut into "
                f"{item.tp_size}; the grid has {dp_size} data- x {tp_size} tensor-parallel ranks."
            )
