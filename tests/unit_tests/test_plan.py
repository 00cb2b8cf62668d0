"""The plan: the same for every order of the matrices, and different for every other fact."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import pairwise, product
from unittest import mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_muon.bookkeeping.dist_meta import ParamRange
from megatron_muon.bookkeeping.homes import Home
from megatron_muon.bookkeeping.matrix import LogicalMatrix, interleaved, whole
from megatron_muon.bookkeeping.plan import (
    Grid,
    GridSize,
    OwnedMatrix,
    Piece,
    PlannedMatrix,
    _home_item,
    held_by,
    held_by_slices,
    make_plan,
)
from megatron_muon.errors import PlanError

DENSE, EXPERT = Grid(), Grid(expert_parallel=True, expert_tp=True)


@st.composite
def pieces_of(draw, numel, dp_size):
    """One piece, or several of neighbouring ranks."""
    num = draw(st.integers(1, min(dp_size, numel)))
    first = draw(st.integers(0, dp_size - num))
    cuts = st.lists(
        st.integers(1, max(1, numel - 1)), min_size=num - 1, max_size=num - 1, unique=True
    )
    ends = [0, *sorted(draw(cuts)), numel]
    return tuple(
        Piece(first + i, ParamRange(low, high)) for i, (low, high) in enumerate(pairwise(ends))
    )


@st.composite
def owned_matrices(draw):
    """Matrices and the sizes of the grids they lie in."""
    grids = {
        grid: GridSize(draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4])))
        for grid in (DENSE, EXPERT)
    }
    owned = []
    shapes = draw(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 40)), max_size=12))
    for i, (rows, columns) in enumerate(shapes):
        grid = draw(st.sampled_from([DENSE, EXPERT]))
        size = grids[grid]
        matrix = LogicalMatrix(
            f"layer{i}.weight", (rows * size.tp, columns), whole(rows * size.tp),
            tp_dim=draw(st.sampled_from([0, None])), tp_size=size.tp, expert_tp=grid.expert_tp,
            expert_parallel=grid.expert_parallel,
        )  # fmt: skip
        pieces = draw(pieces_of(matrix.local_numel, size.dp))
        owned.append(OwnedMatrix(matrix=matrix, pieces=pieces))
    return owned, grids


@given(owned_matrices(), st.randoms())
def test_order_of_insertion_changes_nothing(case, random):
    owned, grids = case
    shuffled = list(owned)
    random.shuffle(shuffled)
    plan, other = make_plan(owned, grids, 5), make_plan(shuffled, grids, 5)
    assert plan == other
    assert plan.fingerprint == other.fingerprint
    names = [planned.matrix.name for planned in plan.matrices]
    assert names == sorted(item.matrix.name for item in owned)


@given(owned_matrices())
def test_every_matrix_has_a_home_in_its_own_grid(case):
    owned, grids = case
    plan = make_plan(owned, grids, 5)
    assert [m for grid in sorted(grids) for m in plan.on(grid)] == sorted(
        plan.matrices, key=lambda m: (m.owned.grid, m.matrix.name)
    )
    for grid, size in grids.items():
        for planned in plan.on(grid):
            assert planned.owned.grid == grid
            assert 0 <= planned.home.dp < size.dp
            assert 0 <= planned.home.tp < size.tp
            assert planned.flops == planned.matrix.ns_flops(5)
    assert plan.param_numel == sum(item.matrix.local_numel for item in owned)
    assert plan.num_owners == grids[DENSE].dp


@given(owned_matrices())
def test_shared_matrices_are_marked_and_only_they(case):
    """What is not shared has the row that it has without the flag, but for where its home is."""
    owned, grids = case
    plan, shared = make_plan(owned, grids, 5), make_plan(owned, grids, 5, share_blocks=True)
    assert not any(planned.sharers for planned in plan.matrices)
    for planned, other in zip(plan.matrices, shared.matrices, strict=True):
        assert other.homes[0] == other.home
        assert len(other.homes) in (1, 2, 4, 8)
        assert len(set(other.homes)) == len(other.homes)
        assert (", sharers " in other.row()) == (len(other.homes) > 1) == bool(other.sharers)
        if not other.sharers:
            assert replace(other, home=planned.home).row() == planned.row()
    if not any(planned.sharers for planned in shared.matrices):
        assert shared == plan
        assert shared.fingerprint == plan.fingerprint
    one_row = make_plan(owned, grids, 5, one_rank_each=False, share_blocks=True)
    assert not any(planned.sharers for planned in one_row.matrices)


@given(owned_matrices())
def test_a_grid_that_is_not_named_has_one_rank(case):
    owned = [replace(o, pieces=held_by(0, o.matrix)) for o in case[0] if o.matrix.tp_dim is None]
    plan = make_plan(owned, {}, 5)
    assert {planned.home for planned in plan.matrices} <= {Home(0, 0)}
    assert plan.num_owners == 1


MATRIX = LogicalMatrix("w", (12, 8), whole(12), tp_dim=0, tp_size=2)
BASE = OwnedMatrix(
    matrix=MATRIX, pieces=held_by(1, MATRIX), buffer_idx=0, bucket_idx=2, range=(64, 112)
)
GRIDS = {DENSE: GridSize(2, 2)}


def with_matrix(**changes):
    """The base with another matrix, whose rank holds all of it."""
    matrix = replace(MATRIX, **changes)
    return replace(BASE, matrix=matrix, pieces=held_by(1, matrix))


def cut_at(middle):
    return (Piece(0, ParamRange(0, middle)), Piece(1, ParamRange(middle, 48)))


GRIDS_OF_ALL = {
    Grid(ep, etp, gtp): GridSize(2, 4 if gtp else 2)
    for ep, etp, gtp in product((False, True), repeat=3)
}


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, pieces=held_by(0, MATRIX)),
        replace(BASE, pieces=cut_at(20)),
        replace(BASE, buffer_idx=1),
        replace(BASE, bucket_idx=0),
        replace(BASE, range=(0, 48)),
        replace(BASE, range=None),
        *(
            with_matrix(**change)
            for change in (
                {"name": "v"},
                {"shape": (12, 10)},
                {"tp_dim": 1},
                {"tp_dim": None},
                {"tp_stride": 2},
                {"gtp_size": 2, "gtp_rows": 3},
                {"gtp_size": 2, "gtp_rows": 4},
                {"expert_tp": True},
                {"expert_parallel": True},
                {"blocks": interleaved({"q": 2, "k": 1, "v": 1}, 12, "w")},
                {"blocks": interleaved({"q": 1, "k": 2, "v": 1}, 12, "w")},
                {"blocks": interleaved({"q": 4, "k": 2}, 12, "w")},
                {"blocks": interleaved({"q": 4, "k": 2}, 12, "w", head_rows=2)},
            )
        ),
    ],
)
def test_fingerprint_and_row_tell_every_difference(other):
    plan, changed = (make_plan([item], GRIDS_OF_ALL, 5) for item in (BASE, other))
    assert plan.fingerprint != changed.fingerprint
    assert plan.rows() != changed.rows()
    assert changed.rows()[0].startswith(f"{other.matrix.name}: ")
    assert plan.fingerprint != make_plan([BASE], GRIDS_OF_ALL, 6).fingerprint


def test_fingerprint_and_row_tell_who_holds_which_part_and_the_home():
    plan, other = (
        make_plan([replace(BASE, pieces=cut_at(middle))], GRIDS, 5) for middle in (20, 21)
    )
    assert plan.fingerprint != other.fingerprint
    assert "0[0:20] 1[20:48]" in plan.rows()[0]
    (planned,) = plan.matrices
    moved = replace(plan, matrices=(replace(planned, home=Home(0, 1)),))
    assert moved.fingerprint != replace(
        plan, matrices=(replace(planned, home=Home(1, 0)),)
    ).fingerprint  # fmt: skip


def test_a_row_has_every_field():
    """A field that is added later is told too."""
    (row,) = make_plan([BASE], GRIDS, 5).rows()
    expected = {
        f.name for kind in (LogicalMatrix, OwnedMatrix, PlannedMatrix) for f in fields(kind)
    }
    values = dict(part.split(" ", 1) for part in re.split(", (?=[a-z])", row.split(": ", 1)[1]))
    assert set(values) == expected - {"name", "matrix", "owned", "sharers"}
    assert values["shape"] == "(12, 8)"
    assert values["range"] == "(64, 112)"
    assert values["pieces"] == "1[0:48]"
    assert values["home"] == "1,0"
    (row,) = make_plan([BASE], GRIDS, 5, share_blocks=True).rows()
    assert row.endswith("home 0,0, sharers 0,0 0,1") or row.endswith("home 1,0, sharers 1,0 1,1")


def test_the_rows_are_written_once_for_the_fingerprint():
    plan = make_plan([BASE, with_matrix(name="v")], GRIDS, 5)
    with mock.patch.object(PlannedMatrix, "row", autospec=True, return_value="row") as row:
        assert plan.fingerprint == plan.fingerprint
    assert row.call_count == 2


def test_fingerprint_tells_the_order():
    """Ranks that step matrices in different orders wait for each other forever."""
    plan = make_plan([BASE, with_matrix(name="v")], GRIDS, 5)
    assert replace(plan, matrices=plan.matrices[::-1]).fingerprint != plan.fingerprint


def test_two_matrices_of_one_name_are_refused():
    with pytest.raises(PlanError, match="Two matrices are named w"):
        make_plan([BASE, replace(BASE, pieces=held_by(0, MATRIX))], GRIDS, 5)


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [(0, 47)],  # ends too early
        [(0, 49)],
        [(1, 48)],  # begins too late
        [(0, 20), (21, 48)],  # a hole
        [(0, 20), (19, 48)],  # an overlap
        [(20, 48), (0, 20)],  # out of order
        [(0, 48), (0, 48)],
    ],
)
def test_pieces_that_do_not_cover_are_refused(ranges):
    pieces = tuple(Piece(rank, ParamRange(*range_)) for rank, range_ in enumerate(ranges))
    with pytest.raises(PlanError, match=r"w: .* do not cover its 48 elements once"):
        replace(BASE, pieces=pieces)


def test_owner_is_who_holds_all_of_it():
    assert BASE.owner == 1
    straddling = replace(BASE, pieces=cut_at(20))
    assert straddling.owner is None
    assert straddling.piece_of(1) == Piece(1, ParamRange(20, 48))
    assert straddling.piece_of(2) is None


@given(
    st.integers(1, 6), st.integers(1, 12), st.integers(0, 30), st.integers(0, 70),
    st.integers(1, 70),
)  # fmt: skip
def test_slices_are_those_of_equal_shards(size, shard_numel, offset, start, numel):
    """Compared element by element; no piece is empty."""
    bucket_numel = size * shard_numel
    assume(start + numel <= bucket_numel)
    pieces = held_by_slices(
        (offset + start, offset + start + numel), (offset, offset + bucket_numel), size
    )
    holders = [(start + i) // shard_numel for i in range(numel)]
    assert [piece.rank for piece in pieces] == sorted(set(holders))
    for piece in pieces:
        mine = [i for i, rank in enumerate(holders) if rank == piece.rank]
        assert list(range(piece.range.start, piece.range.end)) == mine
        assert piece.range.numel


def test_buffer_without_a_layout_has_no_padding():
    assert make_plan([BASE], GRIDS, 5).buffer_numel == MATRIX.local_numel == 48
    assert make_plan([BASE], GRIDS, 5, buffer_numel=128).buffer_numel == 128


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 200), st.integers(1, 200))
def test_slices_are_what_each_equal_shard_has_of_a_matrix(shard, size, start, numel):
    """Counted element by element; the bucket starts somewhere in the buffer."""
    bucket = (1000, 1000 + shard * size)
    start = min(start, shard * size - 1)
    numel = min(numel, shard * size - start)
    slices = held_by_slices((1000 + start, 1000 + start + numel), bucket, size)
    by_rank = {}
    for element in range(numel):
        by_rank.setdefault((start + element) // shard, []).append(element)
    pieces = tuple(Piece(rank, ParamRange(held[0], held[-1] + 1)) for rank, held in by_rank.items())
    assert tuple(slices) == pieces
    assert slices == pieces
    assert hash(slices) == hash(pieces)
    assert (len(slices), slices[0], slices[-1], slices[1:]) == (
        len(pieces), pieces[0], pieces[-1], pieces[1:],
    )  # fmt: skip
    assert list(slices.spans()) == [(p.rank, p.range.start, p.range.end) for p in pieces]
    assert [slices.of(rank) for rank in range(-1, size + 1)] == [
        next((p for p in pieces if p.rank == rank), None) for rank in range(-1, size + 1)
    ]
    matrix = LogicalMatrix("w", (1, numel), whole(1))
    lazy, made = (OwnedMatrix(matrix=matrix, pieces=p) for p in (slices, pieces))
    assert lazy == made
    assert _home_item(lazy, 7, False) == _home_item(made, 7, False)
    assert dict(_home_item(lazy, 7, False).held) == dict(_home_item(made, 7, False).held)
    with pytest.raises(PlanError, match="do not cover its"):
        OwnedMatrix(matrix=LogicalMatrix("w", (1, numel + 1), whole(1)), pieces=slices)


def test_a_renamed_matrix_is_the_one_that_is_made_under_that_name():
    shape = {"tp_dim": 0, "tp_size": 2, "expert_tp": True, "gtp_size": 3, "gtp_rows": 1}
    one, other = (LogicalMatrix(name, (4, 5), whole(4), **shape) for name in ("a", "b"))
    assert one.renamed("b") == other != one
