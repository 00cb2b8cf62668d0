"""Homes: the one rank of the data x tensor grid that orthogonalizes each matrix.

A row of the grid is a tensor-parallel group: the ranks of one data-parallel rank. For a matrix
that row 0 owns, a home at A or B costs an exchange inside the row, and one at C or D another hop of
the whole matrix::

            tp 0   tp 1
    dp 0  |  A   |  B   |
    dp 1  |  C   |  D   |

So a matrix stays in the row that holds most of it, unless that leaves a rank with more than its
share of Newton-Schulz flops or of elements. One that alone is more than the share of a rank may be
worked on by several, which are then ranks of one row or of one column.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace, nsmallest
from operator import attrgetter
from types import MappingProxyType
from typing import Literal, NamedTuple

from megatron_muon.errors import PlanError

FLOPS_TOLERANCE_PERCENT = 5
NUMEL_TOLERANCE_PERCENT = 10
"""How far a rank's flops and elements may lie above an even share so that matrices stay in their
row; a rank with one matrix that is larger has no other. Every rank waits for the one with the most
flops; uneven elements cost less."""

MAX_SHARERS = 8
"""Ranks that work on one matrix at most: each iterates on the whole Gram matrix by itself, so that
more of them save little."""

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


class EvenlyHeld(Mapping[int, int]):
    """How many elements neighbouring ranks hold of a matrix that equal shards cut.

    As a ``dict`` those of a plan for a thousand ranks would have a million entries.

    Attributes:
        ranks: The ranks.
    """

    __slots__ = ("_head", "_numel", "_shard", "ranks")

    def __init__(self, ranks: range, head: int, shard: int, numel: int) -> None:
        """Describe it.

        Args:
            ranks: The ranks.
            head: What the first holds.
            shard: What all others hold, but for the last.
            numel: What all of them hold together.
        """
        self.ranks, self._head, self._shard, self._numel = ranks, head, shard, numel

    @property
    def most(self) -> int:
        """The most that one of them holds."""
        return max(self._head, min(self._shard, self._numel - self._head))

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __getitem__(self, rank: int) -> int:
        if rank not in self.ranks:
            raise KeyError(rank)
        if rank == self.ranks[0]:
            return self._head
        return min(self._shard, self._numel - self._head - (rank - self.ranks[1]) * self._shard)


class HomeItem(NamedTuple):
    """What the choice of a home needs to know of a matrix; a tuple, of which many are soon made.

    Attributes:
        name: Its name, unique.
        flops: Newton-Schulz flops of all its blocks.
        numel: Elements of the whole matrix.
        owner: Data-parallel rank that holds its shards whole, ``None`` if it straddles.
        held: For one that straddles, elements of the tensor-parallel shard by the data-parallel
            rank that holds them. They are the same on every tensor-parallel rank.
        tp_size: Ranks that tensor parallelism cuts it into, 1 if each holds all of it.
        max_sharers: Ranks that may work on it together, 1 for its home alone.
    """

    name: str
    flops: int
    numel: int
    owner: int | None = None
    held: Mapping[int, int] = MappingProxyType({})
    tp_size: int = 1
    max_sharers: int = 1

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
    """Choose the home of every matrix, the first of those that :func:`choose_sharers` chooses."""
    return {name: homes[0] for name, homes in choose_sharers(items, dp_size, tp_size).items()}


def choose_sharers(
    items: Sequence[HomeItem], dp_size: int, tp_size: int
) -> dict[str, tuple[Home, ...]]:
    """Choose the home of every matrix, or the homes of those that ranks work on together.

    Several ranks work on a matrix that allows it and has more flops than an even share and
    :data:`FLOPS_TOLERANCE_PERCENT`, and more than the largest matrix that does not: a power of two
    of them, as few as bring its part below that, or twice as many. Since each repeats a part of the
    work, more ranks must take a tenth off the busiest rank's flops, else they are not used. They
    are different ranks of one row, or of one column if no row has enough of them with room. Each
    is taken to bear an equal part; "matrix" below stands for a part too.

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
        The homes of each matrix by its name, in the order of the grid's ranks; one but for those
        that several work on.

    Raises:
        PlanError: Two items have one name, or one is not held as the grid allows.
    """
    _check(items, dp_size, tp_size)
    task = _Task(items, dp_size, tp_size)
    best = _best_of(task)
    for fineness in (1, 2) if any(item.max_sharers > 1 for item in items) else ():
        cut = _Task(items, dp_size, tp_size, fineness)
        if cut.sharers:
            placed = _best_of(cut)
            best = placed if 10 * placed.max_flops <= 9 * best.max_flops else best
    places = [Home(*divmod(rank, tp_size)) for rank in range(dp_size * tp_size)]
    alone = [(place,) for place in places]
    homes: dict[str, tuple[Home, ...]] = {
        item.name: alone[rank] for item, rank in zip(task.items, best.ranks, strict=True)
    }
    for i, line in best.sharers.items():
        homes[task.items[i].name] = tuple(places[rank] for rank in line)
    return homes


@dataclass(frozen=True, slots=True)
class _Placement:
    """Where items are placed.

    Attributes:
        excess: The flops and the elements of the fullest rank beyond the limits.
        ranks: The rank of each item.
        sharers: All ranks of the items that several work on, by the item's place.
        max_flops: Flops of the busiest rank.
    """

    excess: tuple[int, int]
    ranks: list[int]
    sharers: dict[int, tuple[int, ...]]
    max_flops: int


def _best_of(task: _Task) -> _Placement:
    tried: list[_Placement] = []
    for rule, load_kind in _ATTEMPTS:
        tried.append(_place(task, rule, load_kind))
        if tried[-1].excess == (0, 0):
            return tried[-1]
    return min(tried, key=lambda placed: (placed.excess, _moved(task, placed), placed.ranks))


class _Task:
    """The items in their one order, and what a rank may bear.

    Attributes:
        items: The items, the costliest first.
        sharers: How many ranks work on an item, by its place; those of one are left out.
        part_flops: Flops of each item on each rank that works on it.
        part_numel: Its elements there.
        rows: For each item the rows worth staying in, the one that holds most first.
        max_flops: Flops that a rank may have for an item to stay in its row.
        max_numel: Elements that it may have.
    """

    def __init__(
        self, items: Sequence[HomeItem], dp_size: int, tp_size: int, fineness: int = 0
    ) -> None:
        """Order the items.

        Args:
            items: The items.
            dp_size: Rows of the grid.
            tp_size: Ranks of a row.
            fineness: For how many times the fewest ranks large items are cut, 0 for not at all.
        """
        by_name = sorted(items, key=attrgetter("name"))
        self.items = sorted(by_name, key=attrgetter("flops", "numel"), reverse=True)
        self.dp_size, self.tp_size = dp_size, tp_size
        self.rows = [_rows_worth_staying_in(item) for item in self.items]
        flops, numel = [item.flops for item in self.items], [item.numel for item in self.items]
        self.total_flops, self.total_numel = sum(flops), sum(numel)
        num_ranks = dp_size * tp_size
        share = _share(self.total_flops, num_ranks, FLOPS_TOLERANCE_PERCENT)
        self.sharers = self._num_sharers(share, fineness) if fineness else {}
        for i, count in self.sharers.items():
            flops[i], numel[i] = -(-flops[i] // count), -(-numel[i] // count)
        self.part_flops, self.part_numel = flops, numel
        self.max_flops = max(share, max(flops, default=0))
        share = _share(self.total_numel, num_ranks, NUMEL_TOLERANCE_PERCENT)
        self.max_numel = max(share, max(numel, default=0))

    def _num_sharers(self, share: int, fineness: int) -> dict[int, int]:
        """Return how many ranks work on each item that is more than one should bear."""
        alone = (item.flops for item in self.items if item.max_sharers == 1)
        limit = max(share, next(alone, 0))
        sharers: dict[int, int] = {}
        for i, item in enumerate(self.items):
            if item.flops <= limit:
                break
            most = min(item.max_sharers, MAX_SHARERS, max(self.dp_size, self.tp_size))
            count = 1
            while 2 * count <= most and item.flops > count * limit:
                count *= 2
            if count > 1:
                sharers[i] = count * fineness if count * fineness <= most else count
        return sharers

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
    if isinstance(item.held, EvenlyHeld) and item.held.most <= least:
        return []
    rows = [dp for dp, numel in item.held.items() if numel > least]
    return sorted(rows, key=lambda dp: (-item.held[dp], dp))


def _share(total: int, num_ranks: int, tolerance_percent: int) -> int:
    """Return an even share of a load and the tolerance."""
    return total * (100 + tolerance_percent) // (100 * num_ranks)


@dataclass(frozen=True, slots=True)
class _Line:
    """The least loaded ranks of a row or column.

    Attributes:
        fullest: The load of the fullest of them, and the sum of their loads.
        ranks: The ranks, in order.
    """

    fullest: tuple[int, int]
    ranks: tuple[int, ...]


class _Grid:
    """The loads of all ranks, with the least loaded one at hand.

    Rank ``dp * tp_size + tp`` is the one at ``(dp, tp)``. Of equally loaded ones the first column's
    come first, so that large matrices lie in many rows: a row receives what its homes lack. The
    heap has one entry for each rank; since loads only grow, it is enough to bring an old one up to
    date when it comes to the top.
    """

    def __init__(self, task: _Task, load_kind: _LoadKind) -> None:
        num_ranks = task.dp_size * task.tp_size
        self.loads = [0] * num_ranks
        self.flops = [0] * num_ranks
        self.numel = [0] * num_ranks
        self._task = task
        self._load_kind: _LoadKind = load_kind
        self._lines: dict[int, dict[int, _Line]] = {}  # of rows, by how many ranks
        self._heap = sorted((0, rank % task.tp_size, rank) for rank in range(num_ranks))

    def least(self) -> int:
        """Return the least loaded rank of the grid."""
        while True:
            load, column, rank = self._heap[0]
            if load == self.loads[rank]:
                return rank
            heapreplace(self._heap, (self.loads[rank], column, rank))

    def least_of_row(self, row: int) -> int:
        """Return the least loaded rank of a row."""
        tp_size = self._task.tp_size
        if tp_size == 1:
            return row
        return min(range(row * tp_size, (row + 1) * tp_size), key=self.loads.__getitem__)

    def least_line(self, i: int, rule: _Rule) -> tuple[int, ...]:
        """Return the ranks that work on an item together, the least loaded ones of a row or column.

        A row if one has room: its links are the fastest, and what stays in it moves least.
        """
        task, tp_size = self._task, self._task.tp_size
        count, rows = task.sharers[i], task.rows[i]
        lines: list[_Line] = []
        if count <= tp_size:
            preferred = [self._row_line(row, count) for row in rows]
            for line in preferred if rule == "stay" else ():
                if self._have_room(line.ranks, i):
                    return line.ranks
            others = (self._row_line(row, count) for row in range(task.dp_size))
            lines = [min((*preferred, *others), key=lambda line: line.fullest)]
            if self._have_room(lines[0].ranks, i):
                return lines[0].ranks
        if count <= task.dp_size:
            columns = (range(tp, len(self.loads), tp_size) for tp in range(tp_size))
            lines += [self._least_of(column, count) for column in columns]
        return min(lines, key=lambda line: line.fullest).ranks

    def _have_room(self, ranks: tuple[int, ...], i: int) -> bool:
        return all(self.has_room(rank, i) for rank in ranks)

    def _row_line(self, row: int, count: int) -> _Line:
        of_row = self._lines.setdefault(row, {})
        if count not in of_row:
            tp_size = self._task.tp_size
            of_row[count] = self._least_of(range(row * tp_size, (row + 1) * tp_size), count)
        return of_row[count]

    def _least_of(self, line: range, count: int) -> _Line:
        least = nsmallest(count, ((self.loads[rank], rank) for rank in line))
        return _Line((least[-1][0], sum(load for load, _ in least)),
                     tuple(sorted(rank for _, rank in least)))  # fmt: skip

    def has_room(self, rank: int, i: int) -> bool:
        """Whether a rank stays under both limits with an item, or its part of one, more."""
        return (
            self.flops[rank] + self._task.part_flops[i] <= self._task.max_flops
            and self.numel[rank] + self._task.part_numel[i] <= self._task.max_numel
        )

    def add(self, rank: int, i: int) -> None:
        """Give a rank an item, or its part of one."""
        self.flops[rank] += self._task.part_flops[i]
        self.numel[rank] += self._task.part_numel[i]
        self.loads[rank] = self._task.load(self.flops[rank], self.numel[rank], self._load_kind)
        if self._lines:
            self._lines.pop(rank // self._task.tp_size, None)


def _place(task: _Task, rule: _Rule, load_kind: _LoadKind) -> _Placement:
    """Place the items one by one, the one of the largest load first.

    Under rule "stay" an item stays in its row if the least loaded rank there has room for it;
    under rule "least" only if no rank of the grid is less loaded. All others go to the least
    loaded rank of the grid. Rule "least" with load "flops" is longest processing time first.
    An item that several ranks work on goes to those of one line, by the same rules.
    """
    grid = _Grid(task, load_kind)
    sizes = [
        task.load(flops, numel, load_kind)
        for flops, numel in zip(task.part_flops, task.part_numel, strict=True)
    ]
    ranks = [0] * len(sizes)
    sharers: dict[int, tuple[int, ...]] = {}
    for i in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        if i in task.sharers:
            sharers[i] = grid.least_line(i, rule)
            for rank in sharers[i]:
                grid.add(rank, i)
        else:
            ranks[i] = _rank_of(task, grid, rule, i)
            grid.add(ranks[i], i)
    _exchange_equals(task, ranks)
    max_flops = max(grid.flops)
    excess_flops = max(0, max_flops - task.max_flops)
    excess_numel = max(0, max(grid.numel) - task.max_numel)
    return _Placement((excess_flops, excess_numel), ranks, sharers, max_flops)


def _rank_of(task: _Task, grid: _Grid, rule: _Rule, i: int) -> int:
    """Return the rank that an item goes to; see :func:`_place`."""
    for row in task.rows[i]:
        rank = grid.least_of_row(row)
        if rule == "stay":
            stays = grid.has_room(rank, i)
        else:
            stays = grid.loads[rank] == grid.loads[grid.least()]
        if stays:
            return rank
    return grid.least()


def _moved(task: _Task, placed: _Placement) -> int:
    """Return the elements that leave their row."""
    moved_numel = sum(
        item.numel - item.row_numel(rank // task.tp_size)
        for i, (item, rank) in enumerate(zip(task.items, placed.ranks, strict=True))
        if i not in placed.sharers
    )
    for i, line in placed.sharers.items():
        stays = sum(task.items[i].row_numel(rank // task.tp_size) for rank in line)
        moved_numel += task.items[i].numel - stays // len(line)
    return moved_numel


def _exchange_equals(task: _Task, ranks: list[int]) -> None:
    """Exchange the homes of equal items so that more of them are in their row.

    No rank's load changes. Those that several ranks work on stay where they are.
    """
    classes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, item in enumerate(task.items):
        if i not in task.sharers:
            classes[item.flops, item.numel].append(i)
    for members in classes.values():
        if all([ranks[i] // task.tp_size] == task.rows[i][:1] for i in members):
            continue  # each is where it wishes to be
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


def _outer_rows(item: HomeItem) -> tuple[int, int]:
    """Return the first and the last row that hold something of an item."""
    if item.owner is not None:
        return item.owner, item.owner
    if isinstance(item.held, EvenlyHeld):
        return item.held.ranks[0], item.held.ranks[-1]
    return min(item.held, default=0), max(item.held, default=0)


def _check(items: Sequence[HomeItem], dp_size: int, tp_size: int) -> None:
    names = Counter([item.name for item in items])
    if len(names) < len(items):
        ((name, _),) = names.most_common(1)
        raise PlanError(f"Two matrices are named {name}; a home is chosen by name.")
    for item in items:
        first, last = _outer_rows(item)
        if not 0 <= first <= last < dp_size or item.tp_size not in (1, tp_size):
            raise PlanError(
                f"{item.name} is held by data-parallel ranks {first} to {last} and cut into "
                f"{item.tp_size}; the grid has {dp_size} data- x {tp_size} tensor-parallel ranks."
            )
