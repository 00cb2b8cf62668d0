"""Shared matrices: who works on them, which elements are of which part, and how parts are added.

All of it in plain Python, over all ranks of a grid at once.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.bookkeeping.dist_meta import ParamRange
from megatron_muon.bookkeeping.gram_sums import (
    LineRounds,
    shared_matrices,
    strip_numel,
    strips_of,
)
from megatron_muon.bookkeeping.homes import (
    FLOPS_TOLERANCE_PERCENT,
    Home,
    HomeItem,
    choose_homes,
    choose_sharers,
)
from megatron_muon.bookkeeping.matrix import LogicalBlock, LogicalMatrix, interleaved, whole
from megatron_muon.bookkeeping.parts import long_dim, max_sharers, part_range
from megatron_muon.bookkeeping.plan import (
    Grid,
    GridSize,
    OwnedMatrix,
    held_by,
    held_by_slices,
    make_plan,
)
from megatron_muon.bookkeeping.schedule import Position
from megatron_muon.bookkeeping.units import PlannedPart, units_of

# Who works on what.


@st.composite
def grids(draw):
    """A grid, and items some of which may be shared."""
    dp_size, tp_size = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 3, 4, 8]))
    costs = st.one_of(st.integers(0, 60), st.sampled_from([6, 18, 30, 200]))
    items = [
        HomeItem(
            name=f"layer{i}", flops=draw(costs), numel=draw(st.integers(1, 60)),
            owner=draw(st.integers(0, dp_size - 1)), max_sharers=draw(st.sampled_from([1, 3, 8])),
        )
        for i in range(draw(st.integers(0, 16)))
    ]  # fmt: skip
    return items, dp_size, tp_size


def share_of(items, num_ranks):
    total = sum(item.flops for item in items)
    return total * (100 + FLOPS_TOLERANCE_PERCENT) // (100 * num_ranks)


@settings(max_examples=300)
@given(grids())
def test_sharers_are_different_ranks_of_one_line_and_only_of_large_matrices(grid):
    items, dp_size, tp_size = grid
    homes = choose_sharers(items, dp_size, tp_size)
    assert sorted(homes) == sorted(item.name for item in items)
    alone = max((item.flops for item in items if item.max_sharers == 1), default=0)
    limit = max(share_of(items, dp_size * tp_size), alone)
    for item in items:
        ranks = homes[item.name]
        assert all(0 <= home.dp < dp_size and 0 <= home.tp < tp_size for home in ranks)
        assert len(set(ranks)) == len(ranks)
        assert list(ranks) == sorted(ranks)
        assert len(ranks) in (1, 2, 4, 8)
        assert len(ranks) <= max(1, item.max_sharers)
        assert len({home.dp for home in ranks}) == 1 or len({home.tp for home in ranks}) == 1
        assert len(ranks) == 1 or item.flops > limit


@given(grids(), st.randoms())
def test_order_of_the_items_does_not_matter(grid, shuffler):
    items, dp_size, tp_size = grid
    shuffled = list(items)
    shuffler.shuffle(shuffled)
    assert choose_sharers(items, dp_size, tp_size) == choose_sharers(shuffled, dp_size, tp_size)


@given(grids())
def test_without_items_that_may_be_shared_homes_are_what_they_were(grid):
    items, dp_size, tp_size = grid
    items = [item._replace(max_sharers=1) for item in items]
    homes = choose_sharers(items, dp_size, tp_size)
    assert {name: ranks[0] for name, ranks in homes.items()} == choose_homes(
        items, dp_size, tp_size
    )
    assert all(len(ranks) == 1 for ranks in homes.values())


@given(grids())
def test_sharing_takes_a_tenth_off_the_busiest_rank_or_is_left(grid):
    items, dp_size, tp_size = grid

    def busiest(homes):
        loads = Counter()
        for item in items:
            for home in homes[item.name]:
                loads[home] += -(-item.flops // len(homes[item.name]))
        return max(loads.values(), default=0)

    alone = choose_sharers([i._replace(max_sharers=1) for i in items], dp_size, tp_size)
    shared = choose_sharers(items, dp_size, tp_size)
    assert shared == alone or 10 * busiest(shared) <= 9 * busiest(alone)


def test_the_line_is_a_row_if_it_has_room_and_a_column_else():
    item = HomeItem(name="w", flops=100, numel=10, owner=1, tp_size=2, max_sharers=8)
    assert choose_sharers([item], 4, 2)["w"] == tuple(Home(dp, 0) for dp in range(4))
    assert choose_sharers([item], 2, 2)["w"] == (Home(1, 0), Home(1, 1))
    alone = item._replace(owner=0, tp_size=1)
    assert choose_sharers([alone], 1, 1)["w"] == (Home(0, 0),)
    # Each row has one rank free: two of one column.
    full = [HomeItem(name=f"f{i}", flops=100, numel=10, owner=i) for i in range(2)]
    large = item._replace(flops=190)
    found = choose_sharers([*full, large], 2, 2)
    assert len({home.tp for home in found["w"]}) == 1
    assert not set(found["w"]) & {found["f0"][0], found["f1"][0]}


def test_twice_as_many_share_where_that_evens_the_work_out():
    """Eight halves of 16 on eight ranks leave room for no 12; quarters do."""
    large = [HomeItem(name=f"l{i}", flops=32, numel=1, owner=0, max_sharers=8) for i in range(4)]
    small = [HomeItem(name=f"s{i}", flops=12, numel=1, owner=0) for i in range(4)]

    def placed(items):
        loads, homes = Counter(), choose_sharers(items, 8, 1)
        for item in items:
            for home in homes[item.name]:
                loads[home] += item.flops / len(homes[item.name])
        return {len(homes[item.name]) for item in large}, max(loads.values())

    assert placed([*large, *small]) == ({4}, 24)
    assert placed([item._replace(max_sharers=min(item.max_sharers, 2))
                   for item in (*large, *small)]) == ({2}, 28)  # fmt: skip


@pytest.mark.parametrize(
    ("matrix", "most"),
    [
        (LogicalMatrix("w", (8, 24), whole(8)), 8),
        (LogicalMatrix("w", (24, 8), whole(24), tp_dim=0, tp_size=8), 3),
        (LogicalMatrix("w", (24, 8), whole(24), tp_dim=1, tp_size=8), 8),
        (LogicalMatrix("w", (8, 24), whole(8), tp_dim=1, tp_size=8), 3),
        (LogicalMatrix("w", (24, 8), (LogicalBlock("all", 0, 6, 6, 4),)), 8),
        (LogicalMatrix("w", (24, 8), (LogicalBlock("experts", 0, 6, 6, 4, batch=4),)), 1),
        (LogicalMatrix("w", (24, 8), interleaved({"q": 2, "k": 2}, 24, "w")), 1),
        (LogicalMatrix("w", (24, 8), whole(24), gtp_size=2, gtp_rows=12), 1),
    ],
)
def test_only_one_block_whose_shards_are_equal_may_be_shared(matrix, most):
    assert max_sharers(matrix) == most


# Which elements are of which part.


@st.composite
def planned_matrices(draw):
    """One matrix on a grid, shared by as many ranks as it may be, with its pieces."""
    tp, dp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 8))
    tp_dim = draw(st.sampled_from([0, 1, None]))
    shape = [draw(st.integers(1, 9)), draw(st.integers(1, 9))]
    stride = draw(st.sampled_from([1, 2]))
    if tp_dim is not None:
        shape[tp_dim] *= tp * stride
    matrix = LogicalMatrix(
        "w", tuple(shape), whole(shape[0]), tp_dim=tp_dim, tp_size=tp, tp_stride=stride
    )
    pieces = held_by(draw(st.integers(0, dp - 1)), matrix)
    if draw(st.booleans()):
        start = draw(st.integers(0, 9))
        numel = -(-(start + matrix.local_numel) // dp) * dp
        pieces = held_by_slices((start, start + matrix.local_numel), (0, numel), dp)
    owned = OwnedMatrix(matrix=matrix, pieces=tuple(pieces))
    (planned,) = make_plan([owned], {Grid(): GridSize(dp, tp)}, 5, share_blocks=True).matrices
    return planned, dp, tp


def lines_of_elements(matrix, numel):
    """The line of the long side, and its place on the short one, of each element of a shard."""
    _, columns = matrix.local_shape
    places = [divmod(i, columns) for i in range(numel)]
    return [(row, column) if long_dim(matrix) == 0 else (column, row) for row, column in places]


@settings(max_examples=300)
@given(planned_matrices())
def test_every_element_is_of_one_part(case):
    """And a part's pieces are those of the whole, in its own order."""
    planned, _, _ = case
    matrix, units = planned.matrix, units_of([planned])
    if not planned.sharers:
        assert units == (planned,)
        return
    assert len(units) == len(planned.sharers)
    assert sum(unit.flops for unit in units) == planned.flops
    assert max(unit.flops for unit in units) - min(unit.flops for unit in units) <= 1
    assert sum(unit.matrix.numel for unit in units) == matrix.numel
    lines = lines_of_elements(matrix, matrix.local_numel)
    seen = Counter()
    for number, unit in enumerate(units):
        assert isinstance(unit, PlannedPart)
        assert (unit.number, unit.home, unit.count) == (
            number, planned.sharers[number], len(units),
        )  # fmt: skip
        dim = long_dim(matrix)
        assert unit.matrix.shape[1 - dim] == matrix.shape[1 - dim]
        start, end = unit.lines
        own = [i for i, (line, _) in enumerate(lines) if start <= line < end]
        assert len(own) == unit.matrix.local_numel
        seen.update(own)
        held = []
        for piece in planned.owned.pieces:
            mine = [i for i in own if piece.range.start <= i < piece.range.end]
            range_ = part_range(matrix, unit.lines, piece.range)
            assert own[range_.start : range_.end] == mine
            held += [(piece.rank, range_)] if mine else []
        assert [(piece.rank, piece.range) for piece in unit.owned.pieces] == held
    assert seen == Counter(range(matrix.local_numel))


@settings(max_examples=200)
@given(planned_matrices(), st.randoms())
def test_gram_matrices_of_the_parts_add_up_to_that_of_the_whole(case, shuffler):
    """On numbers: parts as tensor parallelism puts their shards together, in any order of lines."""
    planned, _, tp = case
    matrix = planned.matrix
    if not planned.sharers:
        return
    generator = random.Random(shuffler.random())
    (rows, columns), dim = matrix.shape, long_dim(matrix)
    x = [[generator.randint(-4, 4) for _ in range(columns)] for _ in range(rows)]

    def vectors(m):
        return m if dim == 0 else [list(column) for column in zip(*m, strict=True)]

    def gram(lines, short):
        return Counter(
            {
                (i, j): sum(line[i] * line[j] for line in lines)
                for i, j in product(range(short), repeat=2)
            }
        )

    def shard(rank):
        """Elements that a tensor-parallel rank has, as rows."""

        def mine(length):
            run = length // (matrix.tp_stride * tp)
            return [s * tp * run + rank * run + i for s in range(matrix.tp_stride)
                    for i in range(run)]  # fmt: skip

        if matrix.tp_dim == 0:
            return [x[row] for row in mine(rows)]
        if matrix.tp_dim == 1:
            return [[line[column] for column in mine(columns)] for line in x]
        return x

    ranks = range(tp) if matrix.tp_dim is not None else [0]
    total = Counter()
    short = min(rows, columns)
    for unit in units_of([planned]):
        start, end = unit.lines
        if matrix.tp_dim in (dim, None):
            lines = [line for rank in ranks for line in vectors(shard(rank))[start:end]]
        else:  # each rank has some places of every line
            shards = [vectors(shard(rank))[start:end] for rank in ranks]
            lines = [[v for part in of_line for v in part] for of_line in zip(*shards, strict=True)]
        total.update(gram(lines, short))
    expected = vectors(x)
    if matrix.tp_dim not in (dim, None):  # stacked parts are not in the whole's order
        places = [
            place for rank in ranks for place in _places_of(matrix, short, tp, rank)
        ]  # fmt: skip
        expected = [[line[place] for place in places] for line in expected]
    assert {k: v for k, v in total.items() if v} == {
        k: v for k, v in gram(expected, short).items() if v
    }


def _places_of(matrix, length, tp, rank):
    run = length // (matrix.tp_stride * tp)
    return [s * tp * run + rank * run + i for s in range(matrix.tp_stride) for i in range(run)]


# How they are added.


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64, 4096, 5120, 8192])
def test_strips_cover_the_lower_half_once_and_are_equal(rows, count):
    strips = strips_of(rows, count)
    assert [start for start, _ in strips] == [0, *(end for _, end in strips[:-1])]
    assert strips[-1][1] == rows
    assert len(strips) == count
    if rows >= 64 * count:
        numels = [strip_numel(strip) for strip in strips]
        assert max(numels) <= 1.1 * min(numels)
        assert sum(numels) <= (0.5 + 0.65 / count) * rows * rows


SUMS = {
    "a row of four": (1, 4, 1),
    "a column of eight": (8, 1, 1),
    "columns of four": (4, 2, 2),
    "rows of two": (3, 2, 3),
    "rows of eight": (2, 8, 2),
}


def plan_of(dp, tp, count):
    """Matrices of two sizes that are shared, and one that is not."""
    matrices = [
        LogicalMatrix(f"m{i}", (16, 40 + 8 * i), whole(16), tp_dim=1, tp_size=tp)
        for i in range(count)
    ]
    matrices.append(LogicalMatrix("z", (8, 8), whole(8), tp_dim=1, tp_size=tp))
    owned = [
        OwnedMatrix(matrix=matrix, pieces=held_by(i % dp, matrix))
        for i, matrix in enumerate(matrices)
    ]
    plan = make_plan(owned, {Grid(): GridSize(dp, tp)}, 5, share_blocks=True)
    assert sum(bool(planned.sharers) for planned in plan.matrices) >= 1
    return units_of(plan.matrices)


def add_up(units, dp, tp, budget, in_row):
    """Carry the sums out: what each home has of each strip, as what it was made of, in order."""
    places = list(product(range(dp), range(tp)))
    at = {place: Position(dp=place[0], tp=place[1], dp_size=dp, tp_size=tp) for place in places}
    shared = {
        place: shared_matrices(units, range(len(units)), at[place], in_row) for place in places
    }
    lines = [[(d, t) for t in range(tp)] for d in range(dp)] if in_row else [
        [(d, t) for d in range(dp)] for t in range(tp)
    ]  # fmt: skip
    sums = {}
    for line in lines:
        rounds = {
            place: LineRounds(rank, len(line)).sums(shared[place], budget)
            for rank, place in enumerate(line)
        }
        sizes = {
            place: LineRounds(rank, len(line)).sizes(shared[place], budget)
            for rank, place in enumerate(line)
        }
        told = defaultdict(set)
        for _, t in moves(sizes, line):
            told[line[t.dst], t.index].add(t.shard)
        gathered = defaultdict(dict)
        for _, t in moves({p: r.gather for p, r in rounds.items()}, line):
            for element in range(t.range.start, t.range.end):
                assert t.src not in gathered[t.index, t.shard].get(element, ())
                gathered[t.index, t.shard].setdefault(element, []).append(t.src)
        spread = defaultdict(Counter)
        for _, t in moves({p: r.spread for p, r in rounds.items()}, line):
            spread[t.index, t.shard, t.src].update(
                (t.dst, element) for element in range(t.range.start, t.range.end)
            )
        for matrix in shared[line[0]]:
            for number, (rank, strip) in enumerate(zip(matrix.ranks, matrix.strips, strict=True)):
                elements, others = range(strip_numel(strip)), set(matrix.ranks) - {rank}
                from_all = gathered[matrix.index, number]
                assert sorted(from_all) == list(elements)
                assert all(set(sources) == others for sources in from_all.values())
                assert spread[matrix.index, number, rank] == Counter(product(others, elements))
                assert told[line[rank], matrix.index] == set(range(len(matrix.ranks))) - {number}
                sums[matrix.index, number] = line[rank]
    return sums


def moves(rounds, line):
    """Yield each transfer with the number of its round; every rank enters the same rounds."""
    assert len({len(rounds[place]) for place in line}) == 1
    for number in range(len(rounds[line[0]])):
        parts = [rounds[place][number] for place in line]
        for rank, part in enumerate(parts):
            for other, theirs in enumerate(parts):
                assert part.sent[other] == theirs.received[rank]
            yield from ((number, t) for t in part.outgoing)


@pytest.mark.parametrize("budget", [7, 100, 10**9])
@pytest.mark.parametrize("name", SUMS)
def test_every_strip_is_added_by_one_home_and_reaches_all_others(name, budget):
    dp, tp, count = SUMS[name]
    units = plan_of(dp, tp, count)
    found = {}
    for in_row in (True, False):
        found |= add_up(units, dp, tp, budget, in_row)
    parts = {
        (i - unit.number, unit.number): (unit.home.dp, unit.home.tp)
        for i, unit in enumerate(units)
        if isinstance(unit, PlannedPart)
    }
    assert found == parts


@pytest.mark.parametrize("budget", [7, 100])
def test_no_rank_moves_more_than_the_budget(budget):
    units = plan_of(8, 1, 1)
    for rank in range(8):
        position = Position(dp=rank, tp=0, dp_size=8, tp_size=1)
        shared = shared_matrices(units, range(len(units)), position, in_row=False)
        rounds = LineRounds(rank, 8).sums(shared, budget)
        for round_ in (*rounds.gather, *rounds.spread):
            assert sum(round_.sent) + sum(round_.received) <= budget


def test_a_range_outside_a_part_is_empty():
    matrix = LogicalMatrix("w", (4, 8), whole(4))
    assert part_range(matrix, (2, 4), ParamRange(4, 10)).numel == 0
    assert part_range(matrix, (2, 4), ParamRange(0, 32)) == ParamRange(0, 8)
