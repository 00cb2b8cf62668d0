"""Movement: shards to the whole and back, to homes and back, and what it costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.collectives.exchange import ShardExchange, Traffic
from megatron_muon.collectives.shards import assemble, cut
from megatron_muon.testing.ranks import run_ranks


@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 1)
)
def test_cutting_and_assembling_are_inverse(ranks, stride, rows, columns, dim):
    shape = [rows, columns]
    shape[dim] *= ranks * stride
    matrix = torch.arange(shape[0] * shape[1]).view(shape)
    shards = cut(matrix, dim, stride, ranks)
    assert len(shards) == ranks
    assert {tuple(shard.shape) for shard in shards} == {
        tuple(n // ranks if d == dim else n for d, n in enumerate(shape))
    }
    assert torch.equal(assemble(shards, dim, stride), matrix)


def test_a_shard_of_stacked_parts_has_its_piece_of_each():
    gate, up = torch.tensor([[0], [1], [2], [3]]), torch.tensor([[10], [11], [12], [13]])
    first, second = cut(torch.cat([gate, up]), 0, 2, 2)
    assert first.flatten().tolist() == [0, 1, 10, 11]
    assert second.flatten().tolist() == [2, 3, 12, 13]


# On three ranks.

NUM_RANKS = 3
SHAPES = ((2, 5), (1, 1), (4, 3), (7, 2), (3, 3))
HOMES = {
    "spread": (0, 2, 1, 2, 0),
    "one home": (1, 1, 1, 1, 1),
    "a rank without": (0, 2, 2, 0, 2),
}


def shard(matrix: int, rank: int) -> torch.Tensor:
    """Rank's shard of a matrix, transposed: not contiguous."""
    rows, columns = SHAPES[matrix]
    return torch.arange(float(rows * columns)).view(columns, rows).T + 100 * matrix + 1000 * rank


def exchange_all() -> dict[str, tuple[bool, int, int, int]]:
    import torch.distributed as dist

    return {name: exchange_once(homes, dist.get_rank()) for name, homes in HOMES.items()} | {
        "gather": gather_once(dist.get_rank())
    }


def exchange_once(homes: tuple[int, ...], rank: int) -> tuple[bool, int, int, int]:
    import torch.distributed as dist

    traffic = Traffic()
    exchange = ShardExchange(dist.group.WORLD, traffic)
    every = range(len(SHAPES))
    arrived = exchange.to_homes([shard(m, rank) for m in every], homes)
    right = all(
        len(parts) == (NUM_RANKS if homes[m] == rank else 0)
        and all(torch.equal(part, shard(m, r)) for r, part in enumerate(parts))
        for m, parts in enumerate(arrived)
    )
    updates = [[part * -2 for part in parts] for parts in arrived]
    back = exchange.from_homes(updates, homes, SHAPES, torch.empty(0))
    right &= all(torch.equal(back[m], shard(m, rank) * -2) for m in every)
    return right, traffic.calls, traffic.nbytes, traffic.peak_scratch_nbytes


def gather_once(rank: int) -> tuple[bool, int, int, int]:
    import torch.distributed as dist

    traffic = Traffic()
    exchange = ShardExchange(dist.group.WORLD, traffic)
    every = exchange.gather([shard(m, rank) for m in range(len(SHAPES))])
    right = all(
        torch.equal(part, shard(m, r))
        for m, parts in enumerate(every)
        for r, part in enumerate(parts)
    )
    return right, traffic.calls, traffic.nbytes, traffic.peak_scratch_nbytes


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    return run_ranks(exchange_all, NUM_RANKS, timeout_s=60, logs=tmp_path_factory.mktemp("ranks"))


@pytest.mark.distributed
@pytest.mark.parametrize("name", HOMES)
def test_shards_reach_their_home_and_updates_their_owner(exchanged, name):
    numels = [4 * rows * columns for rows, columns in SHAPES]
    for rank, results in enumerate(exchanged):
        right, calls, nbytes, peak = results[name]
        assert right
        assert calls == 2
        home = sum(n for n, home in zip(numels, HOMES[name], strict=True) if home == rank)
        away = sum(numels) - home
        assert nbytes == home * (NUM_RANKS - 1) + away
        assert peak == sum(numels) + NUM_RANKS * home


@pytest.mark.distributed
def test_gather_brings_every_shard_to_every_rank(exchanged):
    numel = sum(4 * rows * columns for rows, columns in SHAPES)
    for results in exchanged:
        assert results["gather"] == (True, 1, numel * (NUM_RANKS - 1), numel * 2 * NUM_RANKS)


def test_one_rank_moves_nothing():
    traffic = Traffic()
    exchange = ShardExchange(None, traffic)
    own = shard(0, 0)
    assert exchange.to_homes([own], [0])[0][0] is own
    assert exchange.gather([own])[0][0] is own
    assert exchange.from_homes([[own]], [0], [own.shape], own)[0] is own
    assert traffic == Traffic()


def test_counts_add_up():
    total = Traffic(1, 10, 100)
    total.add(Traffic(2, 5, 50))
    assert total == Traffic(3, 15, 100)
