"""The owner layout: every matrix whole in one owner's shard, padded no more than Megatron's."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.bookkeeping.layout import (
    PARAM_ALIGNMENT_NUMEL,
    LayoutItem,
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
def test_padding_is_that_of_megatron(items, bucket_size, num_owners, pad_buckets):
    """The buckets are Megatron's for the same parameters; only owners of equal load may differ."""
    import torch

    from megatron_muon.integration.cpu import import_megatron

    import_megatron()
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer as Stock

    params = [torch.nn.Parameter(torch.empty(item.numel, device="meta")) for item in items]
    for param, item in zip(params, items, strict=True):
        param.shared_embedding = item.alone
    ddp_config = SimpleNamespace(pad_buckets_for_high_nccl_busbw=pad_buckets)
    stock = Stock._compute_per_buffer_param_layout(params, bucket_size, num_owners, ddp_config)
    alignment = Stock._shard_divisor(num_owners, ddp_config)
    ours = compute_owner_layout(items, bucket_size, num_owners, alignment)
    assert [(bucket.start, bucket.end) for bucket in ours.buckets] == stock.bucket_indices
    assert list(ours.unpadded_numel) == stock.per_bucket_numel_unpadded
    buckets = [stock.param_index_map[param][2] for param in params]
    assert [placement.bucket_idx for placement in ours.placements] == buckets


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


@pytest.mark.parametrize("num_owners", [1, 3])
def test_nothing_to_lay_out(num_owners):
    layout = compute_owner_layout([], 100, num_owners, 64)
    assert (layout.placements, layout.buckets, layout.numel) == ((), (), 0)
    assert layout.padding_ratio == 1.0
