"""The owner layout: every matrix whole in one owner's shard, padded no more than Megatron's."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.bookkeeping.layout import (
    PARAM_ALIGNMENT_NUMEL,
    LayoutItem,
    _padded_numel,
    compute_owner_layout,
)

items = st.lists(
    st.builds(
        LayoutItem,
        numel=st.one_of(st.integers(1, 300), st.sampled_from([64, 128, 4096, 5000])),
        flops=st.integers(1, 9),
        alone=st.sampled_from([False] * 9 + [True]),
    ),
    min_size=1,
    max_size=24,
)
bucket_sizes = st.one_of(st.none(), st.integers(1, 3000))


@given(items, bucket_sizes, st.integers(1, 9), st.sampled_from([64, 128, 192]))
def test_every_parameter_lies_whole_in_one_shard(items, bucket_size, num_owners, alignment):
    layout = compute_owner_layout(items, bucket_size, num_owners, alignment)
    assert len(layout.placements) == len(items)
    for item, placement in zip(items, layout.placements, strict=True):
        bucket = layout.buckets[placement.bucket_idx]
        shard_numel = bucket.numel // num_owners
        shard_start = bucket.start + placement.owner * shard_numel
        assert placement.range.numel == item.numel
        assert shard_start <= placement.range.start
        assert placement.range.end <= shard_start + shard_numel
        assert placement.range.start % PARAM_ALIGNMENT_NUMEL == 0
        assert bucket.numel % (num_owners * alignment) == 0


@given(items, bucket_sizes, st.integers(1, 9))
def test_placements_are_disjoint_and_buckets_follow_backward_order(items, bucket_size, num_owners):
    layout = compute_owner_layout(items, bucket_size, num_owners, 64)
    ranges = sorted(placement.range for placement in layout.placements)
    assert all(a.end <= b.start for a, b in pairwise(ranges))
    backward = [placement.bucket_idx for placement in reversed(layout.placements)]
    assert backward == sorted(backward)
    assert sorted(set(backward)) == list(range(len(layout.buckets)))
    assert [bucket.start for bucket in layout.buckets] == [
        0, *(bucket.end for bucket in layout.buckets[:-1])
    ]  # fmt: skip
    assert layout.numel == layout.buckets[-1].end
    for i, bucket in enumerate(layout.unpadded_numel):
        members = [item.numel for item, placement in zip(items, layout.placements, strict=True)
                   if placement.bucket_idx == i]  # fmt: skip
        assert bucket == sum(members)


@settings(max_examples=200)
@given(items, bucket_sizes, st.integers(1, 9), st.booleans())
def test_padding_is_at_most_that_of_megatron(items, bucket_size, num_owners, pad_buckets):
    """No larger buffer, and for the same members no larger bucket; no bucket closed earlier."""
    import torch

    from megatron_muon.integration.cpu import import_megatron

    import_megatron()
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer as Stock

    assert Stock.__module__.startswith("megatron.core")
    params = [torch.nn.Parameter(torch.empty(item.numel, device="meta")) for item in items]
    for param, item in zip(params, items, strict=True):
        param.shared_embedding = item.alone
    ddp_config = SimpleNamespace(pad_buckets_for_high_nccl_busbw=pad_buckets)
    stock = Stock._compute_per_buffer_param_layout(params, bucket_size, num_owners, ddp_config)
    alignment = Stock._shard_divisor(num_owners, ddp_config)
    ours = compute_owner_layout(items, bucket_size, num_owners, alignment)
    assert ours.numel <= stock.bucket_indices[-1][1]
    assert len(ours.buckets) <= len(stock.bucket_indices)
    theirs = {
        tuple(i for i, param in enumerate(params) if stock.param_index_map[param][2] == bucket_idx):
        end - start for bucket_idx, (start, end) in enumerate(stock.bucket_indices)
    }  # fmt: skip
    for bucket_idx, bucket in enumerate(ours.buckets):
        members = tuple(i for i, p in enumerate(ours.placements) if p.bucket_idx == bucket_idx)
        assert bucket.numel == theirs.get(members, bucket.numel)
    if bucket_size is None:
        assert [(bucket.start, bucket.end) for bucket in ours.buckets] == stock.bucket_indices


def bucket_members(layout):
    return [[i for i, p in enumerate(layout.placements) if p.bucket_idx == bucket_idx]
            for bucket_idx in range(len(layout.buckets))]  # fmt: skip


def test_what_is_left_over_gets_no_bucket_that_is_mostly_padding():
    """Megatron puts four, four and one of nine equal matrices on three owners: 15 places for 9."""
    layout = compute_owner_layout(
        [LayoutItem(640, 1)] * 9, bucket_numel=4 * 640, num_owners=3,
        shard_alignment_numel=64,
    )  # fmt: skip
    assert bucket_members(layout) == [[3, 4, 5, 6, 7, 8], [0, 1, 2]]
    assert layout.padding_ratio == 1.0


def test_buckets_of_megatron_stay_where_no_others_are_padded_less():
    layout = compute_owner_layout([LayoutItem(640, 1)] * 12, 4 * 640, 4, 64)
    assert bucket_members(layout) == [[8, 9, 10, 11], [4, 5, 6, 7], [0, 1, 2, 3]]


@given(items, st.integers(2, 9))
def test_tied_embedding_has_a_bucket_of_its_own_at_the_first_owner(items, num_owners):
    layout = compute_owner_layout(items, None, num_owners, 64)
    for item, placement in zip(items, layout.placements, strict=True):
        if item.alone:
            assert placement.owner == 0
            assert [p.bucket_idx for p in layout.placements].count(placement.bucket_idx) == 1


def test_owners_of_equal_load_are_chosen_by_work():
    """Equal sizes, unequal Newton-Schulz work: the next costly one goes where less was done."""
    layout = compute_owner_layout(
        [LayoutItem(64, flops) for flops in (8, 1, 1, 8)], bucket_numel=128, num_owners=2,
        shard_alignment_numel=64,
    )  # fmt: skip
    work = [0, 0]
    for placement, flops in zip(layout.placements, (8, 1, 1, 8), strict=True):
        work[placement.owner] += flops
    assert work == [9, 9]


def test_owners_exchange_parameters_of_unequal_work():
    """By elements alone the square matrices, which cost most, would go to one owner."""
    costs = (9, 9, 9, 9, 2, 2, 2, 2)
    layout = compute_owner_layout(
        [LayoutItem(640, flops) for flops in costs], None, 2, shard_alignment_numel=64
    )
    work = [0, 0]
    for placement, flops in zip(layout.placements, costs, strict=True):
        work[placement.owner] += flops
    assert work == [22, 22]
    assert layout.padding_ratio == 1.0


@settings(max_examples=200)
@given(items, bucket_sizes, st.integers(2, 9))
def test_no_two_owners_could_share_their_work_more_evenly(items, bucket_size, num_owners):
    """In no bucket has the busiest owner something to give to the idlest, or to exchange with it.

    Neither one parameter for one or for none, nor the whole shards.
    """
    layout = compute_owner_layout(items, bucket_size, num_owners, 64)
    work = [0] * num_owners
    shards = defaultdict(list)
    for item, placement in zip(items, layout.placements, strict=True):
        work[placement.owner] += item.flops
        if not item.alone:
            size = (item.flops, -(-item.numel // 64) * 64)
            shards[placement.bucket_idx, placement.owner].append(size)
    busy, idle = work.index(max(work)), work.index(min(work))

    def helps(flops):
        return 0 < flops < work[busy] - work[idle]

    for bucket_idx, bucket in enumerate(layout.buckets):
        mine, others = shards[bucket_idx, busy], shards[bucket_idx, idle]
        assert not helps(sum(f for f, _ in mine) - sum(f for f, _ in others))
        room = bucket.numel // num_owners
        for flops, size in mine:
            for other_flops, other_size in [*others, (0, 0)]:
                fits = (
                    sum(n for _, n in others) + size - other_size <= room
                    and sum(n for _, n in mine) - size + other_size <= room
                )
                assert not (fits and helps(flops - other_flops))


def test_an_owner_of_a_costly_parameter_has_less_of_the_other_buckets():
    """The first parameter, in the last bucket, costs as much as an owner has of the others."""
    items = [
        LayoutItem(640, 30),
        *[LayoutItem(640, 1)] * 3,
        *[LayoutItem(640, f) for f in 8 * [9, 1]],
    ]
    layout = compute_owner_layout(items, 4 * 640, 4, 64)
    assert len(layout.buckets) == 5
    work = [0] * 4
    for item, placement in zip(items, layout.placements, strict=True):
        work[placement.owner] += item.flops
    assert max(work) == 34
    assert layout.placements[0].bucket_idx == 4


def test_what_fits_beside_a_large_parameter_at_the_end_shares_its_bucket():
    """The first is as large as eight others: Megatron's last bucket would be padded 32 for 8."""
    items = [LayoutItem(8 * 640, 8), *[LayoutItem(640, 1)] * 48]
    layout = compute_owner_layout(items, 4 * 640, 4, 64)
    assert [len(members) for members in bucket_members(layout)] == [*[4] * 6, 25]
    assert layout.padding_ratio == 1.0


@pytest.mark.parametrize("num_owners", [1, 3])
def test_nothing_to_lay_out(num_owners):
    layout = compute_owner_layout([], 100, num_owners, 64)
    assert (layout.placements, layout.buckets, layout.numel) == ((), (), 0)
    assert layout.padding_ratio == 1.0


@settings(max_examples=300)
@given(
    st.dictionaries(st.integers(1, 700), st.integers(1, 60), min_size=1, max_size=5),
    st.integers(1, 40),
    st.sampled_from([64, 192]),
)
def test_a_bucket_has_the_size_that_placing_its_members_one_by_one_gives(counts, owners, alignment):
    """The largest first, each to the shard that ends first, shards padded to the alignment."""
    items = [LayoutItem(numel, 1) for numel, count in counts.items() for _ in range(count)]
    ends = [0] * owners
    for numel in sorted((item.numel for item in items), reverse=True):
        owner = ends.index(min(ends))
        ends[owner] = -(-ends[owner] // 64) * 64 + numel
    expected = owners * -(-max(ends) // alignment) * alignment
    assert _padded_numel(counts, owners, alignment) == expected
    assert compute_owner_layout(items, None, owners, alignment).numel <= expected
