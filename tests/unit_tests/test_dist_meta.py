"""Frames and ``MuonDistMeta``: half-open ranges that cover, never overlap, and convert back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon import MuonDistMeta, normalize_range
from megatron_muon.bookkeeping.dist_meta import BucketRange, BufferRange, ParamRange, ShardRange
from megatron_muon.errors import PlanError

sizes = st.integers(0, 50)


@st.composite
def ranges(draw, kind):
    start = draw(st.integers(0, 1000))
    return kind(start, start + draw(sizes))


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ((0, 200), (110, 116)),  # all of it
        ((110, 116), (110, 116)),  # exactly
        ((112, 200), (112, 116)),  # cut on the left
        ((0, 112), (110, 112)),  # cut on the right
        ((111, 113), (111, 113)),  # cut on both sides
        ((0, 110), (0, 0)),  # ends where the matrix starts
        ((116, 130), (116, 116)),  # starts where the matrix ends
        ((40, 50), (40, 40)),  # elsewhere
        ((112, 112), (112, 112)),  # an empty slice
    ],
)
def test_local_range_is_the_overlap_in_the_buffer_frame(local, expected):
    meta = MuonDistMeta(1, 2, (2, 3), (110, 116), tp_split_dim=1)
    assert meta.local_range is None
    meta.set_local_buffer_range(local)
    assert meta.local_range == expected
    assert (meta.buffer_idx, meta.bucket_idx) == (1, 2)
    assert (meta.shape, meta.global_range, meta.tp_split_dim) == ((2, 3), (110, 116), 1)
    assert "local_range" in repr(meta)


def test_wrong_records_are_refused():
    with pytest.raises(PlanError, match="6 elements"):
        MuonDistMeta(0, 0, (2, 3), (0, 7))
    with pytest.raises(PlanError, match="tp_split_dim 2"):
        MuonDistMeta(0, 0, (2, 3), (0, 6), 2)
    with pytest.raises(PlanError, match="not a range"):
        MuonDistMeta(0, 0, (2, 3), (6, 0))
    with pytest.raises(PlanError, match="not a range"):
        BufferRange(-1, 3)


@given(st.tuples(sizes, sizes), sizes)
def test_normalize_range_is_relative_to_the_start(range_, start):
    low, high = sorted(range_)
    assert normalize_range((low + start, high + start), start) == (low, high)


@given(st.lists(sizes, min_size=1, max_size=6), st.integers(0, 99), sizes, sizes)
def test_slices_of_all_ranks_cover_a_matrix_once(slices, offset, before, rows):
    """Whatever the cut of the buffer, the local ranges are disjoint and cover the matrix."""
    total = sum(slices)
    start = offset + min(before, total)
    numel = min(2 * rows, (total - (start - offset)) // 2 * 2)
    covered, cursor = [], offset
    for size in slices:
        meta = MuonDistMeta(0, 0, (numel // 2, 2), (start, start + numel))
        meta.set_local_buffer_range((cursor, cursor + size))
        low, high = meta.local_range
        assert (low, high) == (cursor, cursor) or cursor <= low < high <= cursor + size
        covered += range(low, high)
        cursor += size
    assert covered == list(range(start, start + numel))


@given(ranges(ShardRange), ranges(BucketRange), ranges(BufferRange))
def test_frames_convert_and_back(inner, shard, bucket):
    in_bucket = inner.in_bucket(shard)
    in_buffer = in_bucket.in_buffer(bucket)
    assert in_buffer.in_bucket(bucket) == in_bucket
    assert in_bucket.in_shard(shard) == inner
    assert in_buffer.start == inner.start + shard.start + bucket.start
    assert in_buffer.numel == in_bucket.numel == inner.numel


@st.composite
def sharded_buffers(draw):
    """Buckets of equal shards, one after the other, and parameters with gaps between them.

    Returns the buckets ``(start, end)`` in the buffer frame, the number of shards of each, and
    ``(bucket, start, end)`` of each parameter, in the buffer frame.
    """
    num_shards, buckets, params, cursor = draw(st.integers(1, 5)), [], [], draw(sizes)
    for bucket_idx in range(draw(st.integers(1, 3))):
        start = end = cursor
        for gap, numel in draw(st.lists(st.tuples(st.integers(0, 3), sizes), max_size=4)):
            params.append((bucket_idx, end + gap, end + gap + numel))
            end += gap + numel
        end += -(end - start) % num_shards
        buckets.append((start, end))
        cursor = end
    return buckets, num_shards, params


@given(sharded_buffers())
def test_shards_of_a_bucket_hold_every_parameter_once_in_every_frame(sharded):
    """Whatever frame a piece is counted in, it is the same elements, and none is held twice."""
    buckets, num_shards, params = sharded
    for bucket_idx, start, end in params:
        bucket = BufferRange(*buckets[bucket_idx])
        whole = BufferRange(start, end)
        shard_numel = bucket.numel // num_shards
        held = []
        for rank in range(num_shards):
            shard = BucketRange(rank * shard_numel, (rank + 1) * shard_numel)
            meta = MuonDistMeta(0, bucket_idx, (end - start, 1), (start, end))
            shard_start = shard.in_buffer(bucket)
            meta.set_local_buffer_range((shard_start.start, shard_start.end))
            local = BufferRange(*meta.local_range)
            assert shard_start.contains(local)
            in_shard = local.in_bucket(bucket).in_shard(shard)
            assert in_shard.in_bucket(shard).in_buffer(bucket) == local
            assert 0 <= in_shard.start <= in_shard.end <= shard_numel
            assert in_shard.start == local.start - bucket.start - rank * shard_numel
            in_param = normalize_range(meta.local_range, start)
            if local.numel:
                assert whole.contains(local)
                assert 0 <= in_param[0] < in_param[1] <= whole.numel
                held += range(*in_param)
        assert held == list(range(whole.numel))


@given(sharded_buffers(), st.data())
def test_a_range_has_one_place_in_each_frame(sharded, data):
    """An element that goes into a shard and back is where it was; no other goes there."""
    buckets, num_shards, _ = sharded
    bucket = BufferRange(*data.draw(st.sampled_from(buckets)))
    shard_numel = bucket.numel // num_shards
    places = {}
    for element in range(bucket.start, bucket.end):
        one = BufferRange(element, element + 1).in_bucket(bucket)
        rank = one.start // shard_numel
        shard = BucketRange(rank * shard_numel, (rank + 1) * shard_numel)
        in_shard = one.in_shard(shard)
        assert places.setdefault((rank, in_shard.start), element) == element
        assert in_shard.in_bucket(shard).in_buffer(bucket).start == element
    assert len(places) == bucket.numel


@given(ranges(BufferRange), ranges(BufferRange))
def test_intersection_is_what_both_contain(a, b):
    common = set(range(a.start, a.end)) & set(range(b.start, b.end))
    both = a.intersect(b)
    assert set(range(both.start, both.end)) == common
    assert b.contains(both)
    assert a.contains(both) or both.numel == 0
    if not common:
        assert (both.start, both.end) == (b.start, b.start)


def test_ranges_of_two_frames_are_never_equal():
    kinds = [BufferRange, BucketRange, ShardRange, ParamRange]
    assert len({kind(0, 1) for kind in kinds}) == len(kinds)


def test_leaving_a_frame_on_the_wrong_side_is_refused():
    with pytest.raises(PlanError):
        BufferRange(3, 5).in_bucket(BufferRange(4, 9))
    with pytest.raises(PlanError):
        BucketRange(3, 5).in_shard(BucketRange(4, 9))
