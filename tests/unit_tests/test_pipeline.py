"""Micro-groups overlap: exchanges run under Newton-Schulz, in a fixed order, with the same result.

Engines are stepped on real ranks, over matrices that tensor parallelism cuts along either dimension
or not at all. The order is read from the account's log, and from outside by a spy on what is
launched and waited for.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
import torch

from megatron_muon.bookkeeping.matrix import LogicalMatrix, whole
from megatron_muon.bookkeeping.plan import (
    Grid,
    GridSize,
    OwnedMatrix,
    held_by,
    held_by_slices,
    make_plan,
)
from megatron_muon.optimizer.pipeline import step_one_by_one, step_overlapped
from megatron_muon.testing.oracle import COEFFICIENTS, orthogonalize, relative_error
from megatron_muon.testing.ranks import run_ranks

SHAPES = (((24, 32), 0), ((48, 16), 0), ((32, 24), 1), ((16, 40), 1), ((20, 28), None))
IN, OUT = ("to_row", "to_home"), ("from_home", "from_row")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step of one engine."""

    tp: int
    dp: int
    layout: str = "owner"
    mode: str = "owner"
    matrices: int = 30
    budget_nbytes: int = 4 * 4096
    wire: torch.dtype = torch.float32
    pipelined: bool = True
    # A micro-group of which no rank can read the momentum, the first time.
    failing: int | None = None


GRIDS = {
    "owner TP2": Case(tp=2, dp=1),
    "flat DP2": Case(tp=1, dp=2, layout="flat"),
    "owner TP2 DP2": Case(tp=2, dp=2),
    "flat TP2 DP2": Case(tp=2, dp=2, layout="flat", budget_nbytes=4 * 5120, matrices=40),
    "owner TP4": Case(tp=4, dp=1, budget_nbytes=4 * 8192, matrices=60),
    "flat DP4": Case(tp=1, dp=4, layout="flat"),
    "flat TP2 DP2, bf16 exchange": Case(
        tp=2, dp=2, layout="flat", wire=torch.bfloat16, budget_nbytes=4 * 5120, matrices=40
    ),
    "flat TP2 DP2, duplicated": Case(
        tp=2, dp=2, layout="flat", mode="duplicated", budget_nbytes=4 * 6144
    ),
    "flat TP2 DP2, distributed": Case(
        tp=2, dp=2, layout="flat", mode="distributed", budget_nbytes=4 * 2304
    ),
}  # fmt: skip
CASES = {
    **GRIDS,
    **{f"{name}, one by one": replace(case, pipelined=False) for name, case in GRIDS.items()},
    **{
        f"{name}, one group, {num} matrices": replace(
            GRIDS[name], budget_nbytes=2**20, matrices=num
        )
        for name in ("owner TP4", "owner TP2 DP2", "flat DP4")
        for num in (10, 20)
    },
    **{
        f"{name}, twice as many": replace(GRIDS[name], matrices=2 * GRIDS[name].matrices)
        for name in ("owner TP4", "flat TP2 DP2", "flat DP4")
    },
    "flat TP2 DP2, rounds": replace(GRIDS["flat TP2 DP2"], budget_nbytes=512),
    "failing": replace(GRIDS["flat TP2 DP2"], failing=3),
}


@dataclass
class Seen:
    """What one rank saw in a step.

    Attributes:
        updates: Its piece of the update of each matrix.
        events: The account's log.
        spied: What was launched, waited for and orthogonalized, in order, seen from outside.
        under_way: Most collectives launched and not waited for, and those at the end.
    """

    updates: dict[str, torch.Tensor] = field(default_factory=dict)
    events: list[tuple[str, int]] = field(default_factory=list)
    spied: list[str] = field(default_factory=list)
    under_way: tuple[int, int] = (0, 0)
    num_groups: int = 0
    stages: object = None
    num_collectives: int = 0
    largest_nbytes: int = 0
    peak_nbytes: int = 0
    lent_nbytes: int = 0
    error: str = ""


def plan_of(case):
    """Matrices with one owner each, or each alone in a bucket of which every rank has a part."""
    items = []
    for i in range(case.matrices):
        shape, dim = SHAPES[i % len(SHAPES)]
        matrix = LogicalMatrix(
            f"matrix {i:03d}", shape, whole(shape[0]), tp_dim=dim, tp_size=case.tp
        )
        numel = matrix.local_numel
        bucket = (0, numel + -numel % case.dp)
        pieces = (
            held_by(i % case.dp, matrix)
            if case.layout == "owner"
            else held_by_slices((0, numel), bucket, case.dp)
        )
        items.append(OwnedMatrix(matrix=matrix, pieces=pieces))
    one_rank_each = case.mode in ("owner", "duplicated")
    plan = make_plan(items, {Grid(): GridSize(case.dp, case.tp)}, 5, one_rank_each=one_rank_each)
    return plan.matrices


def content(i, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(i))


def shard(x, dim, tp, size):
    return x if dim is None else x.chunk(size, dim)[tp]


def piece_of(planned, x, dp, tp, size):
    piece = planned.owned.piece_of(dp)
    flat = shard(x, planned.matrix.tp_dim, tp, size).reshape(-1)
    return flat[piece.range.start : piece.range.end].clone()


def make_engine(case, rows, columns):
    from megatron_muon.collectives.arena import Arena
    from megatron_muon.optimizer import engine
    from megatron_muon.optimizer.account import StepAccount
    from megatron_muon.optimizer.station import EngineSettings, Station
    from megatron_muon.orthogonalize.newton_schulz import Orthogonalization

    settings = EngineSettings(
        orthogonalization=Orthogonalization(
            num_steps=5, coefficient_type="quintic", scale_mode="spectral",
            extra_scale_factor=1.0, matmul_precision="highest",
        ),
        mode=case.mode, budget_nbytes=case.budget_nbytes, exchange_dtype=case.wire,
    )  # fmt: skip
    station = Station(rows, columns, settings, Arena(), StepAccount(events=[]), torch.device("cpu"))
    with (
        contextlib.nullcontext()
        if case.pipelined
        else mock.patch.object(engine, "overlaps", return_value=False)
    ):
        return engine.Engine(plan_of(case), station)


@contextlib.contextmanager
def spied(seen):
    """See every launch, wait and Newton-Schulz of this rank."""
    import torch.distributed as dist

    from megatron_muon.optimizer.station import Station

    under_way, most = set(), 0
    original, orthogonalize_ = dist.all_to_all_single, Station.orthogonalize

    class Watched:
        def __init__(self, number, work):
            self.number, self.work = number, work

        def wait(self):
            self.work.wait()
            under_way.remove(self.number)
            seen.spied.append(f"wait {self.number}")

    def launch(received, sent, *args, **kwargs):
        nonlocal most
        number = seen.num_collectives
        seen.num_collectives += 1
        seen.largest_nbytes = max(seen.largest_nbytes, received.nbytes + sent.nbytes)
        seen.spied.append(f"launch {number}")
        under_way.add(number)
        most = max(most, len(under_way))
        return Watched(number, original(received, sent, *args, **kwargs))

    def compute(station, work):
        orthogonalize_(station, work)
        seen.spied.append("orthogonalized")

    with (
        mock.patch.object(dist, "all_to_all_single", launch),
        mock.patch.object(Station, "orthogonalize", compute),
    ):
        try:
            yield
        finally:
            seen.under_way = most, len(under_way)


def step(case, rows, columns):
    engine, seen = make_engine(case, rows, columns), Seen()
    account, arena, at = engine.station.account, engine.station.wire.arena, engine.position
    numbers = {planned.matrix.name: i for i, planned in enumerate(engine.plan)}

    def read(planned, out):
        name = planned.matrix.name
        if seen.error and numbers[name] in engine.schedule[case.failing].indices:
            raise RuntimeError(seen.error)
        x = content(numbers[name], planned.matrix.shape)
        out.copy_(piece_of(planned, x, at.dp, at.tp, case.tp))

    def apply(planned, update):
        seen.updates[planned.matrix.name] = update.clone()

    if case.failing:
        seen.error = "no momentum"
        with pytest.raises(RuntimeError, match=seen.error), spied(seen):
            engine.step(read, apply)
        assert seen.under_way[1] > 0
        seen = Seen(lent_nbytes=arena.lent_nbytes)
        account.clear()
    with spied(seen):
        engine.step(read, apply)
    seen.events = list(account.events)
    seen.num_groups, seen.stages = len(engine.schedule), engine.stages
    seen.peak_nbytes = arena.peak_lent_nbytes
    seen.lent_nbytes += arena.lent_nbytes
    assert account.traffic.calls >= seen.num_collectives
    return seen


def step_all(names):
    import torch.distributed as dist

    results, grids = {}, {}
    for name in names:
        case = CASES[name]
        if (case.dp, case.tp) not in grids:
            grids[case.dp, case.tp] = make_groups(case.dp, case.tp, dist)
        results[name] = step(case, *grids[case.dp, case.tp])
    return results


def make_groups(dp, tp, dist):
    grid = [[d * tp + t for t in range(tp)] for d in range(dp)]
    mine = []
    for lists in (list(zip(*grid, strict=True)), grid):
        groups = {tuple(ranks): dist.new_group(list(ranks)) for ranks in lists}
        mine.append(next(group for ranks, group in groups.items() if dist.get_rank() in ranks))
    return [group if group.size() > 1 else None for group in mine]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank saw, by case."""
    found = {}
    for size in (2, 4):
        names = [name for name, case in CASES.items() if case.tp * case.dp == size]
        seen = run_ranks(
            step_all, size, names, timeout_s=100, logs=tmp_path_factory.mktemp(f"ranks{size}")
        )
        found.update({name: [rank[name] for rank in seen] for name in names})
    return found


def late(events, hops):
    """Micro-groups whose hops in do not all start before Newton-Schulz of the one before ends."""
    place = {event: i for i, event in enumerate(events)}
    count = 1 + max(k for _, k in events)
    return [
        k for k in range(1, count) for hop in hops
        if place[f"{hop} starts", k] > place["newton_schulz ends", k - 1]
    ]  # fmt: skip


def exposed(events, hops_in, hops_out):
    """Exchanges during which no micro-group is orthogonalized."""
    place = {event: i for i, event in enumerate(events)}
    count = 1 + max(k for _, k in events)
    found = []
    for hops in filter(None, (hops_in, hops_out)):
        for k in range(count):
            start, end = place[f"{hops[0]} starts", k], place[f"{hops[-1]} ends", k]
            inside = events[start:end]
            if not any(
                ("newton_schulz starts", j) in inside and ("newton_schulz ends", j) in inside
                for j in range(count)
            ):
                found.append((hops, k))
    return found


def hops_of(stages):
    used = {
        "to_row": stages.to_row, "to_home": stages.to_home, "from_home": stages.from_home,
        "from_row": stages.to_row,
    }  # fmt: skip
    return [hop for hop in IN if used[hop]], [hop for hop in OUT if used[hop]]


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(220)]


@pytest.mark.parametrize("name", GRIDS)
def test_the_next_exchange_starts_before_newton_schulz_ends(ranks, name):
    """Of every micro-group and on every rank; at most the first in and the last out are exposed."""
    for seen in ranks[name]:
        hops_in, hops_out = hops_of(seen.stages)
        assert seen.num_groups >= 4
        assert late(seen.events, hops_in) == []
        found = exposed(seen.events, hops_in, hops_out)
        assert len(found) <= 2
        assert {k for _, k in found} <= {0, seen.num_groups - 1}


@pytest.mark.parametrize("name", GRIDS)
def test_one_by_one_is_seen_to_be_so(ranks, name):
    """The negative control: every exchange is late and exposed."""
    for seen in ranks[f"{name}, one by one"]:
        hops_in, hops_out = hops_of(seen.stages)
        count = seen.num_groups
        assert set(late(seen.events, hops_in)) == set(range(1, count))
        directions = bool(hops_in) + bool(hops_out)
        assert len(exposed(seen.events, hops_in, hops_out)) == directions * count


@pytest.mark.parametrize("name", ["owner TP2", "owner TP4", "flat DP2", "flat DP4"])
def test_the_spy_sees_what_the_log_says(ranks, name):
    """One hop each way: between launch and wait of all but two collectives something is computed.

    A rank that is home to nothing in a micro-group computes nothing there.
    """
    for seen in ranks[name]:
        assert seen.num_groups < seen.num_collectives <= 2 * seen.num_groups
        bare = [
            number
            for number in range(seen.num_collectives)
            if "orthogonalized"
            not in seen.spied[
                seen.spied.index(f"launch {number}") : seen.spied.index(f"wait {number}")
            ]
        ]
        assert len(bare) <= 2
        assert 2 <= seen.under_way[0] <= 3


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_under_way(ranks, name):
    for seen in ranks[name]:
        assert seen.under_way[1] == 0
        assert seen.lent_nbytes == 0


@pytest.mark.parametrize("name", GRIDS)
def test_overlap_changes_no_bit(ranks, name):
    """Nor does the number of micro-groups."""
    for seen, other in zip(ranks[name], ranks[f"{name}, one by one"], strict=True):
        assert seen.updates.keys() == other.updates.keys()
        assert all(torch.equal(update, other.updates[i]) for i, update in seen.updates.items())


def test_a_budget_without_room_for_it_overlaps_nothing(ranks):
    """Though matrices are larger than the budget, no more than a few of them are held at a time."""
    case, largest = CASES["flat TP2 DP2, rounds"], 4 * 48 * 16
    for seen, other in zip(ranks["flat TP2 DP2, rounds"], ranks["flat TP2 DP2"], strict=True):
        hops_in, _ = hops_of(seen.stages)
        assert set(late(seen.events, hops_in)) == set(range(1, seen.num_groups))
        assert seen.num_collectives > 8 * seen.num_groups
        assert seen.largest_nbytes <= case.budget_nbytes
        assert seen.peak_nbytes <= 4 * largest
        assert all(torch.equal(update, other.updates[i]) for i, update in seen.updates.items())


@pytest.mark.parametrize("name", [*GRIDS, "flat TP2 DP2, rounds", "failing"])
def test_updates_are_those_of_whole_matrices(ranks, name):
    case = CASES[name]
    plan = plan_of(case)
    bound = 5e-6 if case.wire == torch.float32 else 1e-2
    for i, planned in enumerate(plan):
        x = content(i, planned.matrix.shape).double()
        expected = orthogonalize(x, COEFFICIENTS["quintic"]) * max(x.shape) ** 0.5
        for rank, seen in enumerate(ranks[name]):
            dp, tp = divmod(rank, case.tp)
            if planned.owned.piece_of(dp) is not None:
                want = piece_of(planned, expected, dp, tp, case.tp)
                assert relative_error(seen.updates[planned.matrix.name], want) < 2 * bound


@pytest.mark.parametrize("name", ["owner TP4", "owner TP2 DP2", "flat DP4"])
def test_a_step_within_the_budget_is_one_micro_group(ranks, name):
    """And as many collectives whatever the number of matrices, two of a group each."""
    for num in (10, 20):
        for seen in ranks[f"{name}, one group, {num} matrices"]:
            assert seen.num_groups == 1
            assert seen.num_collectives <= (2 if "TP2 DP2" not in name else 4)
            assert seen.under_way[0] == 1


@pytest.mark.parametrize("name", GRIDS)
def test_those_under_way_share_the_budget(ranks, name):
    """All that is lent at a time: what is worked on and in, and what comes and goes.

    One by one it is matrices, and as much of shards and what is received. Overlapped groups take
    little more than that together: not cut smaller, they would take up to 5.4 times the budget.
    """
    case = CASES[name]
    for seen, other in zip(ranks[name], ranks[f"{name}, one by one"], strict=True):
        assert seen.largest_nbytes <= case.budget_nbytes
        assert other.peak_nbytes <= 2 * case.budget_nbytes
        assert seen.peak_nbytes <= 2.5 * case.budget_nbytes


@pytest.mark.parametrize("name", ["owner TP4", "flat TP2 DP2", "flat DP4"])
def test_scratch_does_not_grow_with_the_number_of_matrices(ranks, name):
    for seen, other in zip(ranks[name], ranks[f"{name}, twice as many"], strict=True):
        assert other.num_groups >= 1.5 * seen.num_groups
        assert other.peak_nbytes <= 2.7 * CASES[name].budget_nbytes


# The order alone.


def life(number, num_in, num_out, events):
    for hop in range(num_in):
        events.append(("in", hop, number))
        yield
    events.append(("arrived", 0, number))
    yield
    events.append(("computed", 0, number))
    yield
    for hop in range(num_out):
        events.append(("out", hop, number))
        yield
    events.append(("ended", 0, number))


@pytest.mark.parametrize("num_in", range(4))
@pytest.mark.parametrize("num_out", range(4))
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_every_group_lives_to_its_end_in_order(num_in, num_out, count):
    events = []
    step_overlapped([life(k, num_in, num_out, events) for k in range(count)], num_in, num_out)
    alone = []
    step_one_by_one([life(k, num_in, num_out, alone) for k in range(count)])
    assert sorted(events) == sorted(alone)
    place = {event: i for i, event in enumerate(events)}
    for k in range(count):
        own = [event for event in events if event[2] == k]
        assert own == [event for event in alone if event[2] == k]
        for hop in range(num_in):
            # The hop begins while an earlier group is not yet computed.
            earlier = k - (num_in - hop)
            if earlier >= 0:
                assert place["in", hop, k] < place["computed", 0, earlier]
        alive = {k for event in events[: place["computed", 0, k]] for k in [event[2]]}
        ended = {e[2] for e in events[: place["computed", 0, k]] if e[0] == "ended"}
        assert len(alive - ended) <= 1 + num_in + num_out
