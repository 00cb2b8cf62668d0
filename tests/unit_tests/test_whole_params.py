"""Whole tensors reach all ranks in bounded scratch, by the same collectives on every rank."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_muon.collectives import whole_params
from megatron_muon.collectives.whole_params import cut, gather_whole
from megatron_muon.testing.ranks import run_ranks

NUM_RANKS = 3
SIZES = (
    ((40, 50), (7,), (3, 3), (64,), (10, 100), (128,)),
    (),
    ((5,), (30, 30), (64, 8)),
)
"""Shapes of what each rank holds: one has nothing. The largest has 2000 elements."""
HALVES = {(0, 1), (0, 4), (2, 1)}
"""Rank and place of those in bf16; the others are fp32."""
BUDGETS = (1, 3000, 9000, 1 << 30)
WHOLE = 4 * (2000 + 9 + 64 + 128 + 5 + 512) + 2 * (7 + 1000 + 900)


class _Peak(TorchDispatchMode):
    """Measures the most bytes that tensors made inside have at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = set(_storages((args, kwargs or {})))
        result = func(*args, **(kwargs or {}))
        for address, storage in _storages(result).items():
            if address not in before:
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return result

    def _freed(self, nbytes):
        self.now -= nbytes


def _storages(tree):
    storages = [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
    return {storage.data_ptr(): storage for storage in storages}


def held(rank):
    """Return what a rank holds: the same shapes on every rank, and values of its owner's."""
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(100 * rank + place)).to(
            torch.bfloat16 if (rank, place) in HALVES else torch.float32
        )
        for place, shape in enumerate(SIZES[rank])
    ]


@dataclass
class Seen:
    """What a rank saw of a gather.

    Attributes:
        wrong: Tensors that are not their owner's.
        most: Most bytes of scratch.
        calls: Owner, elements and dtype of each broadcast.
    """

    wrong: int
    most: int
    calls: list[tuple[int, int, str]] = field(default_factory=list)


def gather(budget, way=cut, sends=True):
    """Gather on this rank, which starts without what others hold."""
    rank, calls, send = dist.get_rank(), [], dist.broadcast
    expected = [held(owner) for owner in range(NUM_RANKS)]
    owners = [
        [tensor.clone() if owner == rank else torch.full_like(tensor, 7.0) for tensor in share]
        for owner, share in enumerate(expected)
    ]

    def broadcast(flat, *, group, group_src):
        calls.append((group_src, flat.numel(), str(flat.dtype)))
        if sends:
            send(flat, group=group, group_src=group_src)

    with (
        mock.patch.object(whole_params, "cut", way),
        mock.patch.object(dist, "broadcast", broadcast),
        _Peak() as peak,
    ):
        gather_whole(owners, dist.group.WORLD, lambda t: t, torch.Tensor.copy_, budget)
    pairs = [(a, b) for mine, theirs in zip(owners, expected, strict=True)
             for a, b in zip(mine, theirs, strict=True)]  # fmt: skip
    return Seen(sum(not torch.equal(a, b) for a, b in pairs), peak.most, calls)


def all_at_once(owners, budget):
    return cut(owners, 1 << 40)


def own_first(owners, budget):
    """Cut so that each rank starts with what it holds itself."""
    return sorted(cut(owners, budget), key=lambda slice_: slice_.owner != dist.get_rank())


def look():
    seen = {budget: gather(budget) for budget in BUDGETS}
    seen["all at once"] = gather(3000, all_at_once)
    seen["own first"] = gather(3000, own_first, sends=False)
    return seen


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(look, NUM_RANKS, timeout_s=60.0)


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_tensor_is_that_of_its_owner(ranks, budget):
    assert [rank[budget].wrong for rank in ranks] == [0] * NUM_RANKS


def test_a_gather_that_sends_nothing_is_noticed(ranks):
    assert all(rank["own first"].wrong for rank in ranks)


@pytest.mark.parametrize("budget", BUDGETS)
def test_scratch_is_within_the_budget_or_one_tensor(ranks, budget):
    most = [rank[budget].most for rank in ranks]
    assert max(most) <= max(budget, 2000 * 4)
    assert min(most) >= 2000 * 4  # the largest is on all ranks
    owners = [held(owner) for owner in range(NUM_RANKS)]
    assert most == [max(slice_.nbytes for slice_ in cut(owners, budget))] * NUM_RANKS


def test_scratch_of_all_at_once_is_noticed(ranks):
    for rank in ranks:
        assert rank["all at once"].most > 8000
    assert sum(numel * (4 if "32" in dtype else 2)
               for _, numel, dtype in ranks[0]["all at once"].calls) == WHOLE  # fmt: skip


@pytest.mark.parametrize("budget", BUDGETS)
def test_all_ranks_enter_the_same_collectives(ranks, budget):
    first, *others = [rank[budget].calls for rank in ranks]
    assert others == [first] * (NUM_RANKS - 1)
    assert {owner for owner, _, _ in first} == {0, 2}
    assert len(first) == {1: 9, 1 << 30: 4}.get(budget, len(first))


def test_another_order_on_a_rank_is_noticed(ranks):
    orders = [rank["own first"].calls for rank in ranks]
    assert orders[0] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_those_of_odd_sizes_come_last():
    (slice_, *_) = cut([held(0)], 1 << 30)
    odd = [tensor.numel() % 64 != 0 for tensor in slice_.tensors]
    assert odd == sorted(odd)
    assert any(odd)
    assert not all(odd)
