"""Movement: shards as views of the whole, stretches of them, and what travels between ranks."""

from __future__ import annotations

import contextlib
import random
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.bookkeeping.dist_meta import ParamRange
from megatron_muon.bookkeeping.schedule import Transfer, cut_into_rounds, round_of
from megatron_muon.collectives.arena import Arena
from megatron_muon.collectives.exchange import Exchange, Traffic, Wire, gather_flat, reduce_flat
from megatron_muon.collectives.shards import (
    part_of_piece,
    read_stretch,
    shard_view,
    stretch,
    write_stretch,
)
from megatron_muon.testing.ranks import run_ranks


@st.composite
def cut_matrices(draw):
    """A whole matrix and how it is cut: ``(whole, dim, stride, ranks)``."""
    ranks, stride = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    dim = draw(st.sampled_from([0, 1, None]))
    shape = [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
    if dim is not None:
        shape[dim] *= ranks * stride
    return torch.arange(shape[0] * shape[1]).view(shape), dim, stride, ranks


def assemble(shards, dim, stride):
    """Join the shards of all ranks, in rank order, into the whole matrix."""
    rows, columns = shards[0].shape
    size = len(shards)
    whole = shards[0].new_empty((rows * size, columns) if dim == 0 else (rows, columns * size))
    for rank, shard in enumerate(shards):
        view = shard_view(whole, dim, stride, size, rank)
        view.copy_(shard.reshape(view.shape))
    return whole


@given(
    st.integers(1, 5), st.integers(1, 5), st.integers(0, 1), st.integers(0, 5), st.integers(0, 5),
    st.integers(0, 25), st.integers(0, 25),
)  # fmt: skip
def test_lines_of_a_piece_are_found_and_written(rows, columns, dim, first, past, start, end):
    """Compared element by element; what is written lands in those lines of the piece alone."""
    end = min(end, rows * columns)
    if start > end:
        start, end = end, start
    lines = min(first, past), max(first, past)
    piece = torch.arange(start, end)
    expected = [i for i in range(start, end) if lines[0] <= divmod(i, columns)[dim] < lines[1]]
    views = list(part_of_piece(piece, start, columns, dim, lines))
    assert [i for view in views for i in view.flatten().tolist()] == expected
    for view in views:
        view.neg_()
    assert piece.tolist() == [-i if i in expected else i for i in range(start, end)]


def cut(whole, dim, stride, num_ranks):
    """Cut a whole matrix into one shard a rank, copies: the inverse of :func:`assemble`."""
    rows, columns = whole.shape
    shape = (rows // num_ranks, columns) if dim == 0 else (rows, columns // num_ranks)
    return [
        shard_view(whole, dim, stride, num_ranks, rank).reshape(shape).clone()
        for rank in range(num_ranks)
    ]


@given(cut_matrices())
def test_cutting_and_assembling_are_inverse(case):
    matrix, dim, stride, ranks = case
    if dim is None:
        return
    shards = cut(matrix, dim, stride, ranks)
    assert len(shards) == ranks
    assert {tuple(shard.shape) for shard in shards} == {
        tuple(n // ranks if d == dim else n for d, n in enumerate(matrix.shape))
    }
    assert torch.equal(assemble(shards, dim, stride), matrix)
    # A cut is a copy.
    shards[0].zero_()
    assert matrix.flatten().tolist() == list(range(matrix.numel()))


@given(cut_matrices())
def test_a_view_is_the_shard_and_all_views_are_the_whole(case):
    """A shard is its rank's piece of each of the stacked parts, one after the other."""
    matrix, dim, stride, ranks = case
    for rank in range(ranks):
        view = shard_view(matrix, dim, stride, ranks, rank)
        assert view.ndim == 3
        parts = [matrix] if dim is None else matrix.chunk(stride, dim)
        want = parts[0] if dim is None else torch.cat(
            [part.chunk(ranks, dim)[rank] for part in parts], dim
        )  # fmt: skip
        assert torch.equal(view.reshape(want.shape), want)
        view.add_(1000 * (rank + 1))
    each = 1000 * torch.arange(1, ranks + 1)
    tags = matrix // 1000
    if dim is None:
        assert bool((tags == each.sum() // 1000).all())
    else:
        numels = [int((tags == rank + 1).sum()) for rank in range(ranks)]
        assert numels == [matrix.numel() // ranks] * ranks


def test_a_shard_of_stacked_parts_has_its_piece_of_each():
    gate, up = torch.tensor([[0], [1], [2], [3]]), torch.tensor([[10], [11], [12], [13]])
    first, second = cut(torch.cat([gate, up]), 0, 2, 2)
    assert first.flatten().tolist() == [0, 1, 10, 11]
    assert second.flatten().tolist() == [2, 3, 12, 13]


@given(cut_matrices(), st.data())
def test_a_stretch_is_these_elements_in_their_order(case, data):
    matrix, dim, stride, ranks = case
    view = shard_view(matrix, dim, stride, ranks, data.draw(st.integers(0, ranks - 1)))
    if data.draw(st.booleans()):
        view = view.permute(data.draw(st.permutations(range(3))))
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, view.numel())] * 2)))
    want = view.reshape(-1)[start:end].clone()
    parts = list(stretch(view, start, end))
    assert len(parts) <= 2 * (view.ndim - 1) + 1
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts] or [want[:0]]), want)
    out = torch.empty(end - start, dtype=matrix.dtype)
    read_stretch(view, start, end, out)
    assert torch.equal(out, want)
    # Writing reaches these elements of the matrix and no others.
    before = set(matrix.flatten().tolist())
    write_stretch(view, start, end, -1 - out)
    assert torch.equal(view.reshape(-1)[start:end], -1 - want)
    assert set(matrix.flatten().tolist()) == (before - set(want.tolist())) | set(
        (-1 - want).tolist()
    )


# On three ranks.

NUM_RANKS = 3
NUMELS = (10, 1, 12, 300, 9)
BUDGETS = (16, 64, 512, 2**20)


def values(matrix: int, rank: int) -> torch.Tensor:
    """What a rank has of a matrix; bf16 holds it exactly."""
    return (torch.arange(NUMELS[matrix]) + 7 * matrix) % 64 + 64.0 * rank


def transfers(seed: int) -> list[Transfer]:
    """Several stretches of each matrix, from random ranks to random others."""
    rng = random.Random(seed)
    moves = []
    for matrix, numel in enumerate(NUMELS):
        ends = sorted({0, numel, rng.randint(0, numel), rng.randint(0, numel)})
        for start, end in pairwise(ends):
            src, dst = rng.sample(range(NUM_RANKS), 2)
            moves.append(Transfer(matrix, src, ParamRange(start, end), src, dst))
    rng.shuffle(moves)
    return moves


@contextlib.contextmanager
def seen(names):
    """Yield the bytes that this rank sends and receives in each collective."""
    import torch.distributed as dist

    nbytes = []

    def watch(original):
        def call(*tensors, **options):
            given = [t.nbytes for t in tensors if isinstance(t, torch.Tensor)]
            nbytes.append(2 * given[0] if len(given) == 1 else sum(given))
            return original(*tensors, **options)

        return call

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, watch(getattr(dist, name))))
        yield nbytes


def wire(budget: int, dtype: torch.dtype = torch.bfloat16) -> Wire:
    return Wire(dtype, torch.device("cpu"), Arena(), Traffic(), budget)


def exchange(budget: int, seed: int, mutant: bool = False):
    """Return what is wrong, the rounds, and what was seen and counted."""
    import torch.distributed as dist

    rank = dist.get_rank()
    used = wire(budget)
    moves = transfers(seed)
    rounds = cut_into_rounds(moves, used.budget_numel)
    if mutant and rank == 0:
        rounds = tuple(round_[::-1] for round_ in rounds)
    parts = [round_of(round_, rank, NUM_RANKS) for round_ in rounds]
    arrived = {matrix: torch.full((numel,), -1.0) for matrix, numel in enumerate(NUMELS)}

    def pack(transfer, out):
        assert transfer.src == rank
        out.copy_(values(transfer.index, rank)[transfer.range.start : transfer.range.end])

    def unpack(transfer, part):
        assert transfer.dst == rank
        arrived[transfer.index][transfer.range.start : transfer.range.end].copy_(part)

    start = Exchange(dist.group.WORLD, used).start
    with seen(["all_to_all_single"]) as nbytes, start(parts, pack, at_once=False) as flight:
        flight.land(unpack)
    want = {matrix: torch.full((numel,), -1.0) for matrix, numel in enumerate(NUMELS)}
    for move in moves:
        if move.dst == rank:
            here = slice(move.range.start, move.range.end)
            want[move.index][here] = values(move.index, move.src)[here]
    wrong = [matrix for matrix in want if not torch.equal(arrived[matrix], want[matrix])]
    received = 2 * sum(move.range.numel for move in moves if move.dst == rank)
    right_count = (used.traffic.calls, used.traffic.nbytes) == (len(rounds), received)
    idle = used.arena.lent_nbytes == 0 and used.traffic.peak_scratch_nbytes == max(nbytes)
    return wrong, len(rounds), max(nbytes), right_count and idle


def fly():
    """Two exchanges under way together, the later one landed first; then one that is left.

    Returns what is wrong, the buffers lent at most and at the end, and the calls of ``packed``.
    """
    import torch.distributed as dist

    rank, used, wrong, calls = dist.get_rank(), wire(64), [], []
    rounds = cut_into_rounds(transfers(0), used.budget_numel)
    parts = [round_of(round_, rank, NUM_RANKS) for round_ in rounds]
    mine = [transfer for part in parts for transfer in part.incoming]
    exchange = Exchange(dist.group.WORLD, used)

    def start(factor):
        def pack(transfer, out):
            content = values(transfer.index, rank)[transfer.range.start : transfer.range.end]
            out.copy_(factor * content)

        return exchange.start(parts, pack, lambda: calls.append(factor))

    def land(flight, factor):
        landed = []

        def unpack(transfer, part):
            want = factor * values(transfer.index, transfer.src)
            landed.append(transfer)
            if not torch.equal(part.float(), want[transfer.range.start : transfer.range.end]):
                wrong.append(transfer)

        flight.land(unpack)
        if landed != mine:
            wrong.append("order")

    with start(1) as first, start(2) as second:
        early = list(calls)
        lent = used.arena.lent_nbytes
        land(second, 2)
        land(first, 1)
    with start(1):
        under_way = used.arena.lent_nbytes
    left = used.arena.lent_nbytes
    launch, launched = dist.all_to_all_single, []

    def second_fails(*args, **kwargs):
        if launched:
            raise RuntimeError("no second")
        launched.append(launch(*args, **kwargs))
        return launched[0]

    with mock.patch.object(dist, "all_to_all_single", second_fails), contextlib.suppress(
        RuntimeError
    ):  # fmt: skip
        start(1)
    left += used.arena.lent_nbytes
    launched[0].wait()
    return wrong, len(rounds), early, calls[:2], (lent, under_way, left)


def gather(budget: int, mutant: bool = False):
    """Return what is wrong, and what was seen and counted."""
    import torch.distributed as dist

    rank, used, wrong = dist.get_rank(), wire(budget), []
    for matrix, numel in enumerate(NUMELS):
        # Rank 1 has nothing and the others not alike.
        sizes = [numel, 0, numel // 2]
        arrived = [torch.full((size,), -1.0) for size in sizes]

        def write(src, start, part, arrived=arrived):
            src = (src + 2) % NUM_RANKS if mutant and src != 1 else src
            arrived[src][start : start + part.numel()] = part[: arrived[src].numel() - start]

        own = values(matrix, rank)[: sizes[rank]] if sizes[rank] else None
        with seen(["all_gather_into_tensor"]) as nbytes:
            gather_flat(dist.group.WORLD, own, sizes, write, used)
        for src, size in enumerate(sizes):
            if not torch.equal(arrived[src], values(matrix, src)[:size]):
                wrong.append((matrix, src))
        if max(nbytes) > budget:
            wrong.append((matrix, "budget"))
    received = used.traffic.nbytes
    return wrong, used.traffic.calls, received, used.arena.lent_nbytes


def reduce(budget: int):
    """Return whether sums and maxima are right, and the most bytes seen."""
    import torch.distributed as dist

    used, right, most = wire(budget, torch.float32), True, 0
    for matrix in range(len(NUMELS)):
        for op, combine in ((dist.ReduceOp.SUM, torch.sum), (dist.ReduceOp.MAX, torch.amax)):
            x = values(matrix, dist.get_rank())
            with seen(["all_reduce"]) as nbytes:
                reduce_flat(x, dist.group.WORLD, used, op)
            everyone = torch.stack([values(matrix, rank) for rank in range(NUM_RANKS)])
            right &= torch.equal(x, combine(everyone, 0))
            most = max(most, *nbytes)
    return right, most, used.traffic.calls


def move_all():
    return {
        "exchange": {
            (budget, seed): exchange(budget, seed) for budget in BUDGETS for seed in range(4)
        },
        "fly": fly(),
        "exchange broken": exchange(2**20, 0, mutant=True),
        "gather": {budget: gather(budget) for budget in BUDGETS},
        "gather broken": gather(2**20, mutant=True),
        "reduce": {budget: reduce(budget) for budget in BUDGETS},
    }


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    return run_ranks(move_all, NUM_RANKS, timeout_s=60, logs=tmp_path_factory.mktemp("ranks"))


@pytest.mark.distributed
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_transfer_arrives_within_the_budget(moved, budget):
    for seed in range(4):
        ranks = [results["exchange"][budget, seed] for results in moved]
        assert [wrong for wrong, *_ in ranks] == [[]] * NUM_RANKS
        assert len({num_rounds for _, num_rounds, *_ in ranks}) == 1
        assert all(nbytes <= budget for _, _, nbytes, _ in ranks)
        assert all(is_counted for *_, is_counted in ranks)
        assert (ranks[0][1] == 1) == (budget == 2**20)


@pytest.mark.distributed
def test_exchanges_under_way_together_land_in_any_order(moved):
    """Buffers are lent until each has landed; what is left is given up."""
    for results in moved:
        wrong, num_rounds, early, calls, (lent, under_way, left) = results["fly"]
        assert wrong == []
        assert num_rounds > 2
        assert early == calls == [1, 2]
        assert lent == 2 * under_way > 0
        assert left == 0


@pytest.mark.distributed
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_gather_brings_every_tensor_to_every_rank(moved, budget):
    for results in moved:
        wrong, calls, _, lent = results["gather"][budget]
        assert (wrong, lent) == ([], 0)
        chunk = budget // 2 // (NUM_RANKS + 1)
        assert calls == sum(-(-numel // min(numel, chunk)) for numel in NUMELS)


@pytest.mark.distributed
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_reduction_goes_chunk_by_chunk(moved, budget):
    for results in moved:
        right, most, calls = results["reduce"][budget]
        assert right
        assert most <= budget
        assert calls == 2 * sum(-(-numel // min(numel, budget // 8)) for numel in NUMELS)


@pytest.mark.distributed
def test_ranks_that_disagree_on_the_order_are_seen(moved):
    """The two mutants: one rank sends in another order, and a gather takes ranks for others."""
    assert any(results["exchange broken"][0] for results in moved)
    assert all(results["gather broken"][0] for results in moved)


def test_one_rank_has_no_rounds():
    alone = Exchange(None, wire(64))
    with alone.start((), None) as flight:
        flight.land(None)
    assert (alone.size, alone.rank, alone.wire.traffic) == (1, 0, Traffic())


def test_counts_add_up():
    total = Traffic(1, 10, 100)
    total.add(Traffic(2, 5, 50))
    assert total == Traffic(3, 15, 100)
    total.count(7, 200)
    assert total == Traffic(4, 22, 200)
    total.clear()
    assert total == Traffic()
