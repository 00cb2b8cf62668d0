"""The owner layout: buckets in which every matrix lies whole inside one owner's shard.

A bucket is cut into ``num_owners`` equal shards. Reduce-scatter and parameter gather then move
whole matrices, and each owner steps its own::

    bucket  |  shard 0: A, D, pad  |  shard 1: B, C  |  shard 2: E, pad  |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_muon.bookkeeping.dist_meta import BufferRange

PARAM_ALIGNMENT_NUMEL = 64
"""A parameter starts at a multiple of this, as in Megatron's ``pad_param_start``."""

FILL_BEFORE_CLOSING = 0.9
"""A bucket with one dominant matrix is filled to this share of ``owners x largest`` before it is
closed, so that its other shards are not mostly padding."""


@dataclass(frozen=True, slots=True)
class LayoutItem:
    """A parameter to lay out.

    Attributes:
        numel: Its elements.
        flops: Newton-Schulz flops of its logical matrix; the owners' loads are balanced by it.
        alone: Whether it has a bucket of its own, in the first owner's shard: the copies of a tied
            embedding on two pipeline stages are reduced between owners of equal rank.
    """

    numel: int
    flops: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one parameter lies.

    Attributes:
        range: Its elements in the buffer.
        bucket_idx: Its bucket.
        owner: Group-local rank whose shard holds it.
    """

    range: BufferRange
    bucket_idx: int
    owner: int


@dataclass(frozen=True, slots=True)
class OwnerLayout:
    """Buckets and placements of one buffer.

    Attributes:
        placements: One for each item, in the items' order.
        buckets: The buckets, in the buffer frame.
        unpadded_numel: Elements of parameters in each bucket.
        num_owners: Shards of each bucket.
    """

    placements: tuple[Placement, ...]
    buckets: tuple[BufferRange, ...]
    unpadded_numel: tuple[int, ...]
    num_owners: int

    @property
    def padding_ratio(self) -> float:
        """Buffer elements over parameter elements."""
        return self.numel / sum(self.unpadded_numel) if self.buckets else 1.0

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.buckets[-1].end if self.buckets else 0


def compute_owner_layout(
    items: Sequence[LayoutItem],
    bucket_numel: int | None,
    num_owners: int,
    shard_alignment_numel: int,
) -> OwnerLayout:
    """Lay out parameters so that none crosses a shard boundary.

    Buckets follow backward order (last parameter first), so that each can be reduced as soon as
    its stretch of the backward pass is done. Within a bucket the largest parameter goes first,
    each to the shard with the fewest elements; between equals the owner with the least
    Newton-Schulz work so far takes it.

    Args:
        items: Parameters in forward order.
        bucket_numel: Elements after which a bucket is closed, ``None`` for a single bucket.
        num_owners: Ranks of the data-parallel group.
        shard_alignment_numel: Shards are padded to a multiple of this.
    """
    placements: list[Placement | None] = [None] * len(items)
    buckets: list[BufferRange] = []
    unpadded: list[int] = []
    work = [0] * num_owners
    cursor = 0
    for bucket_idx, members in enumerate(_cut_into_buckets(items, bucket_numel, num_owners)):
        shards = _pack(items, members, num_owners, work)
        shard_numel = _align(max(end for _, end in shards), shard_alignment_numel)
        for owner, (placed, _) in enumerate(shards):
            shard_start = cursor + owner * shard_numel
            for index, start in placed:
                start += shard_start
                placements[index] = Placement(
                    BufferRange(start, start + items[index].numel), bucket_idx, owner
                )
        buckets.append(BufferRange(cursor, cursor + num_owners * shard_numel))
        unpadded.append(sum(items[index].numel for index in members))
        cursor = buckets[-1].end
    return OwnerLayout(
        tuple(placement for placement in placements if placement is not None),
        tuple(buckets),
        tuple(unpadded),
        num_owners,
    )


def _cut_into_buckets(
    items: Sequence[LayoutItem], bucket_numel: int | None, num_owners: int
) -> list[list[int]]:
    """Cut the items, last first, into runs of at least ``bucket_numel`` elements."""
    buckets: list[list[int]] = [[]]
    numel = largest = 0
    for index in reversed(range(len(items))):
        item = items[index]
        if item.alone:
            buckets += [[index], []]
            numel = largest = 0
            continue
        buckets[-1].append(index)
        numel, largest = numel + item.numel, max(largest, item.numel)
        if bucket_numel is not None and numel >= max(
            bucket_numel, int(num_owners * largest * FILL_BEFORE_CLOSING)
        ):
            buckets.append([])
            numel = largest = 0
    return [members for members in buckets if members]


def _pack(
    items: Sequence[LayoutItem], members: Sequence[int], num_owners: int, work: list[int]
) -> list[tuple[list[tuple[int, int]], int]]:
    """Give each member to a shard; return per shard its (index, start) pairs and its end."""
    placed: list[list[tuple[int, int]]] = [[] for _ in range(num_owners)]
    ends = [0] * num_owners
    for index in sorted(members, key=lambda i: (-items[i].numel, -items[i].flops, i)):
        item = items[index]
        owner = 0 if item.alone else min(range(num_owners), key=lambda o: (ends[o], work[o], o))
        start = _align(ends[owner], PARAM_ALIGNMENT_NUMEL)
        placed[owner].append((index, start))
        ends[owner] = start + item.numel
        work[owner] += item.flops
    return list(zip(placed, ends, strict=True))


def _align(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple
