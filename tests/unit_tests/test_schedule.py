"""The schedule: within the budget, and after it every piece has been home and back.

The four hops are carried out here in plain Python, over all ranks of a grid at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import product
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.bookkeeping import schedule as schedule_module
from megatron_muon.bookkeeping.dist_meta import ParamRange
from megatron_muon.bookkeeping.matrix import LogicalMatrix, whole
from megatron_muon.bookkeeping.plan import (
    Grid,
    GridSize,
    OwnedMatrix,
    PlannedMatrix,
    held_by,
    held_by_slices,
    make_plan,
)
from megatron_muon.bookkeeping.schedule import (
    Position,
    Round,
    Spread,
    Transfer,
    cut_into_micro_groups,
    cut_into_rounds,
    make_schedule,
    micro_groups_of,
    overlaps,
    room_to_overlap,
    stages_of,
)
from megatron_muon.bookkeeping.units import PlannedPart, units_of

SPREADS = {
    "owner": Spread(whole=True, everywhere=False),
    "duplicated": Spread(whole=True, everywhere=True),
    "shards": Spread(whole=False, everywhere=True),
}
PLENTY = 10**9


@dataclass(frozen=True)
class Case:
    """A plan on a grid, and a budget in elements."""

    plan: tuple[PlannedMatrix, ...]
    dp: int
    tp: int
    budget: int

    def schedules(self, spread):
        return {
            (dp, tp): make_schedule(
                self.plan,
                Position(dp=dp, tp=tp, dp_size=self.dp, tp_size=self.tp),
                spread,
                self.budget,
            )
            for dp, tp in product(range(self.dp), range(self.tp))
        }

    def items(self):
        """Every matrix with its index, place of home and whether it is cut."""
        for i, planned in enumerate(self.plan):
            yield i, planned, is_cut(planned.matrix)


def is_cut(matrix):
    return matrix.tp_dim is not None or matrix.gtp_size > 1


def num_held(matrix, tp):
    """Elements of a matrix that a rank of the row has, without those that fill it up."""
    rows, columns = matrix.local_shape
    if matrix.gtp_size > 1:
        rows = len(range(matrix.shape[0])[tp * rows : (tp + 1) * rows])
    return rows * columns


def bundles_of(case):
    """Matrices, and the parts of one together."""
    bundles = defaultdict(list)
    for i, planned in enumerate(case.plan):
        bundles[planned.whole.matrix.name if isinstance(planned, PlannedPart) else i].append(i)
    return list(bundles.values())


def elements_of(planned, piece, tp):
    """Those of a piece, in the shard of a rank of the row."""
    if piece is None:
        return range(0)
    return range(num_held(planned.matrix, tp))[piece.range.start : piece.range.end]


def plan_of(owned, dp, tp, share_blocks=False):
    grids = {Grid(gtp=gtp): GridSize(dp, tp) for gtp in (False, True)}
    return units_of(make_plan(owned, grids, 5, share_blocks=share_blocks).matrices)


@st.composite
def cases(draw):
    """Matrices of owners and others cut by the slices of a bucket, with and without tensor cut.

    In the place of some are the parts that several ranks share; they move as matrices do. The rows
    of others are cut so that the last ranks have fewer, or none, and are filled up.
    """
    dp, tp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    owned, cursor = [], 0
    shapes = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7)), max_size=9))
    is_flat = [draw(st.booleans()) for _ in shapes]
    matrices = []
    for i, (rows, columns) in enumerate(shapes):
        cut = draw(st.sampled_from(["tensor", "rows", None]))
        if cut == "rows":
            how = {"gtp_size": tp, "gtp_rows": -(-rows // tp) + draw(st.integers(0, 3))}
        else:
            rows *= tp
            how = {"tp_dim": 0 if cut else None, "tp_size": tp}
        matrices.append(LogicalMatrix(f"m{i}", (rows, columns), whole(rows), **how))
    numel = sum(m.local_numel for m, flat in zip(matrices, is_flat, strict=True) if flat)
    bucket = (0, -(-(numel + draw(st.integers(0, 20))) // dp) * dp or dp)
    for matrix, flat in zip(matrices, is_flat, strict=True):
        if flat:
            range_ = cursor, cursor + matrix.local_numel
            pieces = tuple(held_by_slices(range_, bucket, dp))
            cursor += matrix.local_numel
        else:
            pieces = held_by(draw(st.integers(0, dp - 1)), matrix)
        owned.append(OwnedMatrix(matrix=matrix, pieces=pieces))
    budget = draw(st.one_of(st.integers(2, 40), st.just(PLENTY)))
    return Case(plan_of(owned, dp, tp, draw(st.booleans())), dp, tp, budget)


spreads = pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)


HOPS = ("to_row", "to_home", "from_home", "from_row")


def groups_of(case, hop):
    """The places of each process group that a hop runs over, by rank in the group."""
    if hop.endswith("row"):
        return [[(dp, tp) for dp in range(case.dp)] for tp in range(case.tp)]
    return [[(dp, tp) for tp in range(case.tp)] for dp in range(case.dp)]


def hops_of(case, schedules):
    """Yield each hop's places and, round by round, the part that each of them has."""
    for hop in HOPS:
        for places in groups_of(case, hop):
            for groups in zip(*(schedules[place] for place in places), strict=True):
                yield places, list(zip(*(getattr(g, hop) for g in groups), strict=True))


def moves_of(parts):
    """The transfers of a round, from the parts of all ranks."""
    return [transfer for part in parts for transfer in part.outgoing]


@spreads
@given(cases())
def test_no_rank_moves_more_than_the_budget(spread, case):
    for _, rounds in hops_of(case, case.schedules(spread)):
        for parts in rounds:
            moved = [sum((*part.sent, *part.received)) for part in parts]
            assert 0 < max(moved) <= case.budget


@spreads
@given(cases())
def test_a_rank_has_its_own_transfers_alone_and_receives_what_others_send(spread, case):
    """Members of a group enter the same rounds, and agree on each of them."""
    schedules = case.schedules(spread)
    for place, schedule in schedules.items():
        for group, first in zip(schedule, schedules[0, 0], strict=True):
            assert group.indices == first.indices
            assert group.held == tuple(
                i
                for i in group.indices
                if elements_of(case.plan[i], case.plan[i].owned.piece_of(place[0]), place[1])
            )
            assert group.in_row == tuple(
                i for i in group.indices if case.plan[i].home.dp == place[0]
            )
    for places, rounds in hops_of(case, schedules):
        for parts in rounds:
            for rank, part in enumerate(parts):
                assert {t.src for t in part.outgoing} <= {rank}
                assert {t.dst for t in part.incoming} <= {rank}
                assert len(part.sent) == len(part.received) == len(places)
                assert [t.dst for t in part.outgoing] == sorted(t.dst for t in part.outgoing)
                assert [t.src for t in part.incoming] == sorted(t.src for t in part.incoming)
                for other, theirs in enumerate(parts):
                    going = [t for t in part.outgoing if t.dst == other]
                    assert other != rank or not going
                    assert going == [t for t in theirs.incoming if t.src == rank]
                    numel = sum(t.range.numel for t in going)
                    assert part.sent[other] == theirs.received[rank] == numel


def test_a_rank_without_transfers_enters_the_round():
    """Of three rows two exchange a matrix; the third has a part of nothing in the same round."""
    matrix = LogicalMatrix("w", (4, 4), whole(4))
    (planned,) = plan_of([OwnedMatrix(matrix=matrix, pieces=held_by(0, matrix))], 3, 1)
    away = replace(planned, home=replace(planned.home, dp=1))
    (group,) = Case((away,), 3, 1, PLENTY).schedules(SPREADS["owner"])[2, 0]
    nothing = Round(outgoing=(), incoming=(), sent=(0, 0, 0), received=(0, 0, 0))
    assert group.to_row == group.from_row == (nothing,)
    assert (group.held, group.in_row) == ((), ())


# What is known of an element where it lies: (matrix, shard, element), or its update.


@dataclass
class Grids:
    """What every rank of the grid has: of each matrix the elements of each shard.

    Attributes:
        held: Pieces, then shards, then wholes on the way in.
        updates: The same on the way out.
    """

    held: dict = field(default_factory=lambda: defaultdict(dict))
    updates: dict = field(default_factory=lambda: defaultdict(dict))


def carry(case, memory, groups, hop):
    """Carry out the rounds of a hop; whoever sends must have what it sends."""
    for places in groups_of(case, hop):
        rounds = zip(*(getattr(groups[place], hop) for place in places), strict=True)
        carry_rounds(memory, rounds, places)


def carry_rounds(memory, rounds, places):
    for parts in rounds:
        arrived = []
        for t in moves_of(parts):
            for element in range(t.range.start, t.range.end):
                key = t.index, t.shard, element
                arrived.append((places[t.dst], key, memory[places[t.src]][key]))
        for place, key, value in arrived:
            memory[place][key] = value


def carry_out(case, spread):
    """Return the updates of all ranks after the four hops of all micro-groups."""
    schedules = case.schedules(spread)
    places = list(schedules)
    after = defaultdict(dict)
    for number in range(len(schedules[0, 0])):
        groups = {place: schedule[number] for place, schedule in schedules.items()}
        grids = Grids()
        for place in places:
            for i in groups[place].indices:
                planned = case.plan[i]
                piece = planned.owned.piece_of(place[0])
                shard = place[1] if is_cut(planned.matrix) else 0
                for element in elements_of(planned, piece, place[1]):
                    grids.held[place][i, shard, element] = (i, shard, element)
        carry(case, grids.held, groups, "to_row")
        carry(case, grids.held, groups, "to_home")
        work(case, spread, groups[0, 0].indices, grids)
        carry(case, grids.updates, groups, "from_home")
        carry(case, grids.updates, groups, "from_row")
        for place, updates in grids.updates.items():
            after[place] |= updates
    return after


def work(case, spread, indices, grids):
    """Who works on a matrix must have all of it; it makes the update of what it works on."""
    for i in indices:
        planned = case.plan[i]
        for tp in range(case.tp) if spread.everywhere else [planned.home.tp]:
            place = planned.home.dp, tp
            shards = (range(case.tp) if spread.whole else [tp]) if is_cut(planned.matrix) else [0]
            for shard in shards:
                for element in range(num_held(planned.matrix, shard)):
                    key = i, shard, element
                    assert grids.held[place][key] == key
                    grids.updates[place][key] = "update", key


def assert_complete(case, after):
    """Every rank has the update of every element of its pieces."""
    for (dp, tp), (i, planned, cut) in product(
        product(range(case.dp), range(case.tp)), case.items()
    ):
        piece = planned.owned.piece_of(dp)
        for element in elements_of(planned, piece, tp):
            key = i, tp if cut else 0, element
            assert after[dp, tp][key] == ("update", key)


@spreads
@given(cases())
@settings(max_examples=60)
def test_every_piece_reaches_the_home_and_every_update_comes_back(spread, case):
    assert_complete(case, carry_out(case, spread))


STRADDLING = Case(
    plan_of(
        [
            OwnedMatrix(matrix=matrix, pieces=tuple(held_by_slices(range_, (0, 30), 3)))
            for matrix, range_ in (
                (LogicalMatrix("cut", (6, 4), whole(6), tp_dim=0, tp_size=2), (2, 14)),
                (LogicalMatrix("copied", (3, 4), whole(3), tp_size=2), (15, 27)),
            )
        ],
        3, 2,
    ),
    3, 2, 5,
)  # fmt: skip


@spreads
@pytest.mark.parametrize("hop", HOPS)
def test_a_transfer_left_out_is_seen(spread, hop):
    """The mutant of the simulation, for each hop that a spread has."""
    hops = schedule_module.Hops

    class Forgetful(hops):
        def add(self, index, planned):
            super().add(index, planned)
            del getattr(self, hop)[:1]

    has_hop = any(
        getattr(group, hop) for schedule in STRADDLING.schedules(spread).values()
        for group in schedule
    )  # fmt: skip
    # Replicated matrices have copies, so that a forgotten one of these need not be missed.
    assert has_hop == (spread.whole and (hop != "from_home" or not spread.everywhere)) or (
        hop in ("to_row", "from_row")
    )
    if not has_hop:
        return
    with mock.patch.object(schedule_module, "Hops", Forgetful), pytest.raises(KeyError):
        assert_complete(STRADDLING, carry_out(STRADDLING, spread))


transfers = st.lists(
    st.builds(
        lambda i, shard, start, numel, src, step: Transfer(
            i, shard, ParamRange(start, start + numel), src, (src + step) % 4
        ),
        st.integers(0, 5), st.integers(0, 2), st.integers(0, 30), st.integers(0, 30),
        st.integers(0, 3), st.integers(1, 3),
    ),
    max_size=10,
)  # fmt: skip


def elements(moves):
    return Counter(
        (t.index, t.shard, t.src, t.dst, element)
        for t in moves
        for element in range(t.range.start, t.range.end)
    )


@given(transfers, st.integers(1, 50))
def test_rounds_carry_every_element_of_every_transfer_once(moves, budget):
    rounds = cut_into_rounds(moves, budget)
    assert elements(t for round_ in rounds for t in round_) == elements(moves)
    assert all(round_ and all(t.range.numel for t in round_) for round_ in rounds)


@given(transfers)
def test_what_fits_travels_in_one_round(moves):
    assert len(cut_into_rounds(moves, PLENTY)) == (1 if elements(moves) else 0)


@given(transfers, st.integers(1, 50))
def test_a_round_ends_only_where_a_rank_is_full(moves, budget):
    """What waits has an end that moves the whole budget, so rounds are not more than needed."""
    rounds = cut_into_rounds(moves, budget)
    for number, round_ in enumerate(rounds):
        moved = Counter()
        for t in round_:
            moved[t.src] += t.range.numel
            moved[t.dst] += t.range.numel
        for t in (t for later in rounds[number + 1 :] for t in later):
            assert max(moved[t.src], moved[t.dst]) == budget


def loads_of(case, spread, group):
    """Elements of each matrix that a rank holds to work on, and that its transfers move in a hop.

    In the tensor-parallel hops the transfers themselves are counted.
    """
    loads = defaultdict(Counter)
    for i in group:
        planned = case.plan[i]
        home, matrix = planned.home, planned.matrix
        for tp in range(case.tp) if spread.everywhere else [home.tp]:
            loads["held", home.dp, tp][i] = matrix.numel if spread.whole else matrix.local_numel
            if isinstance(planned, PlannedPart) and tp == home.tp:
                loads["held", home.dp, tp][i] += 4 * min(planned.whole.matrix.shape) ** 2
        for piece, tp in product(planned.owned.pieces, range(case.tp)):
            moved = len(elements_of(planned, piece, tp))
            loads["read", piece.rank, tp][i] += moved * (1 + (piece.rank != home.dp))
            if piece.rank != home.dp:
                loads["row", home.dp, tp][i] += moved
                loads["row", piece.rank, tp][i] += moved
    alone = replace(case, plan=tuple(case.plan[i] for i in group), budget=PLENTY)
    for place, schedule in alone.schedules(spread).items():
        for hop in ("to_home", "from_home"):
            for part in (part for one in schedule for part in getattr(one, hop)):
                for t in (*part.outgoing, *part.incoming):
                    loads[hop, place][group[t.index]] += t.range.numel
    return loads


def room_of(case, spread, budget):
    """What a rank may hold and move: the budget, or what each home's largest matrix needs.

    A home that receives its own matrix sends as much of the others', and a data-parallel rank moves
    its shards for every home of its row.
    """
    most = Counter()
    for bundle in bundles_of(case):
        for (kind, *_), load in loads_of(case, spread, bundle).items():
            most[kind] = max(most[kind], load.total())
    in_row = max(budget, 2 * most["to_home"], 2 * most["from_home"])
    homes_in_row = 1 if spread.everywhere else case.tp
    return {
        "read": max(budget, most["read"], 2 * most["held"]),
        "held": max(budget, most["held"]),
        "row": max(budget, 2 * most["row"] * homes_in_row),
        "to_home": in_row,
        "from_home": in_row,
    }


@spreads
@given(cases())
def test_micro_groups_cover_every_matrix_once_within_the_bound(spread, case):
    """No rank holds, or moves in one hop, more than the budget or what each home's largest needs.

    The parts of a shared matrix are in one group.
    """
    groups = cut_into_micro_groups(case.plan, case.tp, spread, case.budget)
    assert sorted(i for group in groups for i in group) == list(range(len(case.plan)))
    room = room_of(case, spread, case.budget)
    for group in groups:
        bundles = [bundle for bundle in bundles_of(case) if set(bundle) <= set(group)]
        assert sorted(i for bundle in bundles for i in bundle) == sorted(group)
        for (kind, *_), load in loads_of(case, spread, group).items():
            assert load.total() <= room[kind]


@pytest.mark.parametrize(("dp", "tp"), [(1, 8), (4, 1), (2, 4)])
@pytest.mark.parametrize("layout", ["owner", "flat"])
@pytest.mark.parametrize("budget", [2, 64, 100, 128, 200])
def test_no_home_waits_for_another_however_small_the_budget(budget, layout, dp, tp):
    """Every home has a matrix in every micro-group, though one is more than the budget."""
    matrices = [
        LogicalMatrix(f"m{i:02d}", (16, 8), whole(16), tp_dim=0, tp_size=tp)
        for i in range(3 * dp * tp)
    ]
    owned = []
    for i, matrix in enumerate(matrices):
        numel = matrix.local_numel
        pieces = (
            held_by(i % dp, matrix)
            if layout == "owner"
            else tuple(held_by_slices((0, numel), (0, numel + -numel % dp), dp))
        )
        owned.append(OwnedMatrix(matrix=matrix, pieces=pieces))
    plan = make_plan(owned, {Grid(): GridSize(dp, tp)}, 5).matrices
    groups = cut_into_micro_groups(plan, tp, SPREADS["owner"], budget)
    homes = [Counter(plan[i].home for i in group) for group in groups]
    assert [set(each) for each in homes] == [{planned.home for planned in plan}] * len(groups)
    assert len(homes[0]) == dp * tp
    assert len(groups) == 3  # and none has two, which would be beyond the budget


@pytest.mark.parametrize("tp_mode", ["owner", "duplicated", "shards"])
def test_no_rank_of_a_row_of_eight_holds_more_than_the_budget(tp_mode):
    """In the flat layout homes lie over the whole row, though with ``duplicated`` all hold each."""
    spread = SPREADS[tp_mode]
    matrices = [
        LogicalMatrix(f"m{i:02d}", (16, 8), whole(16), tp_dim=0, tp_size=8) for i in range(64)
    ]
    numel = matrices[0].local_numel
    owned = [
        OwnedMatrix(
            matrix=matrix,
            pieces=held_by_slices((i * numel, (i + 1) * numel), (0, 64 * numel + 8), 3),
        )
        for i, matrix in enumerate(matrices)
    ]
    plan = make_plan(owned, {Grid(): GridSize(3, 8)}, 5, one_rank_each=spread.whole).matrices
    if spread.whole:
        assert len({planned.home.tp for planned in plan}) == 8
    budget = 4 * matrices[0].numel
    worked_on = {"owner": 128, "duplicated": 128, "shards": 16}[tp_mode]
    groups = cut_into_micro_groups(plan, 8, spread, PLENTY, budget)
    most = 0
    for group in groups:
        held = Counter()
        for i in group:
            home = plan[i].home
            for tp in [home.tp] if tp_mode == "owner" else range(8):
                held[home.dp, tp] += worked_on
        most = max(most, *held.values())
    assert most <= budget
    assert (most == budget) == (tp_mode == "duplicated")  # enough matrices to be cut
    assert len(groups) == {"owner": 1, "duplicated": -(-22 // 4), "shards": 1}[tp_mode]


@spreads
@given(cases())
def test_what_fits_takes_one_group_and_one_round_a_hop(spread, case):
    case = replace(case, budget=PLENTY)
    for schedule in case.schedules(spread).values():
        assert len(schedule) == (1 if case.plan else 0)
        for group in schedule:
            hops = group.to_row, group.to_home, group.from_home, group.from_row
            assert all(len(rounds) <= 1 for rounds in hops)


@given(cases(), st.randoms())
def test_order_of_the_matrices_given_does_not_matter(case, random):
    """Groups and rounds name the same matrices, though the plan's list is in another order.

    The parts of a shared one stay side by side.
    """
    order = bundles_of(case)
    random.shuffle(order)
    shuffled = replace(case, plan=tuple(case.plan[i] for bundle in order for i in bundle))

    def named(case, schedules):
        def rounds(hop):
            return [
                [
                    (case.plan[t.index].matrix.name, t.shard, t.range, t.src, t.dst)
                    for t in (*part.outgoing, *part.incoming)
                ]
                for part in hop
            ]

        return {
            place: [
                (
                    [case.plan[i].matrix.name for i in group.indices],
                    *map(rounds, (group.to_row, group.to_home, group.from_home, group.from_row)),
                )
                for group in schedule
            ]
            for place, schedule in schedules.items()
        }

    spread = SPREADS["owner"]
    assert named(case, case.schedules(spread)) == named(shuffled, shuffled.schedules(spread))


def test_homes_take_turns():
    """Each of four homes has a matrix in each run, the costliest of each in the first."""
    owned = []
    for i in range(12):
        size = 8 - i // 4
        matrix = LogicalMatrix(f"m{i:02d}", (size, size), whole(size))
        owned.append(OwnedMatrix(matrix=matrix, pieces=held_by(i % 4, matrix)))
    plan = plan_of(owned, 4, 1)
    groups = cut_into_micro_groups(plan, 1, SPREADS["owner"], 64)
    assert len(groups) == 3
    for group in groups:
        assert sorted(plan[i].home.dp for i in group) == [0, 1, 2, 3]
    flops = [sum(plan[i].flops for i in group) for group in groups]
    assert flops == sorted(flops, reverse=True)


def test_only_pieces_of_other_rows_travel_far():
    """Of a matrix that the home's row owns nothing crosses rows; a replicated one is sent once."""
    cut = LogicalMatrix("cut", (6, 4), whole(6), tp_dim=0, tp_size=2)
    copied = LogicalMatrix("copied", (3, 4), whole(3), tp_size=2)
    plan = plan_of([OwnedMatrix(matrix=m, pieces=held_by(0, m)) for m in (cut, copied)], 2, 2)
    at_owner = tuple(replace(p, home=replace(p.home, dp=0)) for p in plan)
    schedules = Case(at_owner, 2, 2, PLENTY).schedules(SPREADS["owner"])

    def moved(hop, places):
        groups = [schedules[place][0] for place in places]
        rounds = zip(*(getattr(group, hop) for group in groups), strict=True)
        return [sum(t.range.numel for t in moves_of(parts)) for parts in rounds]

    for dp, tp in product(range(2), repeat=2):
        group = schedules[dp, tp][0]
        assert group.to_row == group.from_row == ()
        row = [(dp, 0), (dp, 1)]
        assert moved("to_home", row) == ([12] if dp == 0 else [])
        assert moved("from_home", row) == ([24] if dp == 0 else [])
    away = tuple(replace(p, home=replace(p.home, dp=1)) for p in plan)
    schedules = Case(away, 2, 2, PLENTY).schedules(SPREADS["owner"])
    sent = sum(sum(moved("to_row", [(0, tp), (1, tp)])) for tp in range(2))
    assert sent == cut.numel + copied.numel


@spreads
@given(cases())
def test_stages_are_the_hops_that_any_rank_has(spread, case):
    """They are the same on every rank, so all overlap the same micro-groups."""
    stages = stages_of(case.plan, case.tp, spread)
    groups = [group for schedule in case.schedules(spread).values() for group in schedule]
    for hop, is_used in {
        "to_row": stages.to_row, "to_home": stages.to_home, "from_home": stages.from_home,
        "from_row": stages.to_row,
    }.items():  # fmt: skip
        assert is_used or not any(getattr(group, hop) for group in groups)
    assert (stages.num_in, stages.num_out) == (
        stages.to_row + stages.to_home, stages.from_home + stages.to_row,
    )  # fmt: skip


@spreads
@given(cases(), st.integers(-1, 60))
def test_micro_groups_that_overlap_share_the_budget(spread, case, more):
    """They do where each has room in its share for one matrix of every home, and travel at once."""
    share = stages_of(case.plan, case.tp, spread).share
    assert share in (1, 2, 3)
    needs = room_of(case, spread, 0)
    least = share * max(needs.values())
    moved, held = room_to_overlap(case.plan, case.tp, spread)
    assert held == share * max(needs["held"], needs["read"])
    assert moved == (share > 1) * share * max(needs["row"], needs["to_home"])
    budget = max(2, least + more)
    alone = cut_into_micro_groups(case.plan, case.tp, spread, budget)
    overlapped = overlaps(case.plan, case.tp, spread, budget)
    assert overlapped == (share > 1 and len(alone) > 1 and budget >= least)
    if not overlapped:
        return
    groups = micro_groups_of(case.plan, case.tp, spread, budget, overlapped=True)
    assert sorted(i for group in groups for i in group) == list(range(len(case.plan)))
    assert len(groups) >= len(alone)
    for group in groups:
        for load in loads_of(case, spread, group).values():
            assert share * load.total() <= budget
    at = Position(dp=0, tp=0, dp_size=case.dp, tp_size=case.tp)
    for group in make_schedule(case.plan, at, spread, budget, overlapped=True):
        assert all(len(getattr(group, hop)) <= 1 for hop in HOPS)


def test_a_budget_with_room_may_leave_one_micro_group():
    """Of two matrices on each of two homes nothing overlaps at any budget, of ten much does."""

    def at_least_room(count):
        matrices = [
            LogicalMatrix(f"m{i}", (8, 8), whole(8), tp_dim=0, tp_size=2) for i in range(count)
        ]
        plan = plan_of([OwnedMatrix(matrix=m, pieces=held_by(0, m)) for m in matrices], 1, 2)
        moved, held = room_to_overlap(plan, 2, SPREADS["owner"])
        assert (moved, held) == (2 * 2 * 32, 2 * 2 * 64)
        return [overlaps(plan, 2, SPREADS["owner"], b, b) for b in (held - 1, held, 10 * held)]

    assert at_least_room(4) == [False, False, False]
    assert at_least_room(20) == [False, True, False]
