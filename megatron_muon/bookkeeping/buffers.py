"""Where parameters lie in DDP's buffers, in either layout.

The owner layout is the one that training computes. The flat one is Megatron's own; here are its
rules without its classes, which need parameters, and a test holds the two together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_muon.bookkeeping.layout import (
    PARAM_ALIGNMENT_NUMEL,
    LayoutItem,
    owner_places,
)

_BUCKET_ALIGNMENT_NUMEL = 128
_BUSBW_ALIGNMENT_NUMEL = 2**16


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """One buffer.

    Attributes:
        places: Start, end and bucket of each parameter, in the parameters' order.
        buckets: Start and end of each bucket.
        param_numel: Elements of the parameters.
    """

    places: tuple[tuple[int, int, int], ...]
    buckets: tuple[tuple[int, int], ...]
    param_numel: int

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.buckets[-1][1] if self.buckets else 0


def owner_layout(
    items: Sequence[LayoutItem], bucket_numel: int | None, num_shards: int, high_busbw: bool
) -> BufferLayout:
    """Return the layout in which every matrix lies whole in one shard.

    Args:
        items: Parameters in forward order.
        bucket_numel: Elements after which a bucket is closed, ``None`` for a single bucket.
        num_shards: Ranks that have one shard each.
        high_busbw: Whether buckets are padded for the network (``--ddp-pad-buckets-for-high-nccl-
            busbw``).
    """
    # 0.19.2, optimizer/layer_wise_optimizer.py:184.
    alignment = math.lcm(64, _bucket_divisor(num_shards, high_busbw) // num_shards)
    places, buckets, unpadded = owner_places(items, bucket_numel, num_shards, alignment)
    return BufferLayout(
        tuple(
            (start, start + item.numel, bucket)
            for item, (start, bucket, _) in zip(items, places, strict=True)
        ),
        tuple(buckets),
        sum(unpadded),
    )


def flat_layout(
    items: Sequence[LayoutItem], bucket_numel: int | None, num_shards: int, high_busbw: bool
) -> BufferLayout:
    """Return Megatron's byte-sharded layout (0.19.2, optimizer/distrib_optimizer.py:506).

    Args:
        items: Parameters in forward order.
        bucket_numel: Elements after which a bucket is closed, ``None`` for a single bucket.
        num_shards: Ranks that have one shard each.
        high_busbw: Whether buckets are padded for the network.
    """
    divisor = _bucket_divisor(num_shards, high_busbw)
    places: list[tuple[int, int, int]] = []
    buckets: list[tuple[int, int]] = []
    start = bucket_start = end = 0
    is_open = False

    def close(at: int) -> int:
        buckets.append((bucket_start, _align(at, divisor)))
        return buckets[-1][1]

    for item in reversed(items):
        start = _align(start, PARAM_ALIGNMENT_NUMEL)
        if item.alone and is_open:
            start = bucket_start = close(start)
        end = start + item.numel
        places.append((start, end, len(buckets)))
        is_full = bucket_numel is not None and end - bucket_start >= bucket_numel
        is_open = not (is_full or item.alone)
        if not is_open:
            bucket_start = close(end)
        start = end if is_open else bucket_start
    if is_open:
        close(end)
    return BufferLayout(tuple(reversed(places)), tuple(buckets), sum(item.numel for item in items))


def _bucket_divisor(num_shards: int, high_busbw: bool) -> int:
    """Return what a bucket's length is a multiple of (0.19.2, optimizer/param_layout.py:31)."""
    more = (_BUSBW_ALIGNMENT_NUMEL,) if high_busbw else ()
    return math.lcm(num_shards, _BUCKET_ALIGNMENT_NUMEL, *more)


def _align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
