"""The owner layout: buckets in which every matrix lies whole inside one owner's shard.

A bucket is cut into ``num_owners`` equal shards. Reduce-scatter and parameter gather then move
whole matrices, and each owner steps its own::

    bucket  |  shard 0: A, D, pad  |  shard 1: B, C  |  shard 2: E, pad  |
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace, nsmallest
from itertools import product

from megatron_muon.bookkeeping.dist_meta import BufferRange

PARAM_ALIGNMENT_NUMEL = 64
"""A parameter starts at a multiple of this, as in Megatron's ``pad_param_start``."""

FILL_BEFORE_CLOSING = 0.9
"""A bucket with one dominant matrix is filled to this share of ``owners x largest`` before it is
closed, so that its other shards are not mostly padding."""

_STRETCH_PERCENTS = (150, 200, 300)
"""A bucket may grow to this share of the size at which it could be closed, if it then is padded
less. Larger ones would leave more of the last reduce-scatter behind the backward pass, so that the
next share is tried only where buckets are still padded by more than :data:`_MAX_PADDING_PERCENT`.
"""

_MAX_PADDING_PERCENT = 5
"""Padding that is worth no further search."""

_WORTHWHILE_PERCENT = 1
"""Share of the parameters that other buckets than Megatron's have to save. Megatron's are the
smallest, so they overlap best."""

_MAX_CLOSINGS = 32
"""Places that are tried for the end of a bucket: it bounds the time on models of many matrices."""

_EXCHANGES_PER_OWNER = 4
_PARTNERS = 4
"""Bounds on the search for even work: exchanges in a bucket for each owner, and owners that are
tried as partners for each exchange."""


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
    its stretch of the backward pass is done. They are closed where Megatron closes them, or a
    little later where that saves padding. The largest parameter goes first, each to the shard
    with the fewest elements, and the fullest shard gives the bucket its size: the buffer is never
    larger than the one of megatron-core 0.19.2. Under that size owners exchange parameters until
    their Newton-Schulz work, summed over the buckets, is as even as that allows.

    The result depends on the sequence of items alone.

    Args:
        items: Parameters in forward order.
        bucket_numel: Elements after which a bucket is closed, ``None`` for a single bucket.
        num_owners: Ranks of the data-parallel group.
        shard_alignment_numel: Shards are padded to a multiple of this.
    """
    places, buckets, unpadded = owner_places(items, bucket_numel, num_owners, shard_alignment_numel)
    return OwnerLayout(
        tuple(
            Placement(BufferRange(start, start + item.numel), bucket_idx, owner)
            for item, (start, bucket_idx, owner) in zip(items, places, strict=True)
        ),
        tuple(BufferRange(*bucket) for bucket in buckets),
        tuple(unpadded),
        num_owners,
    )


def owner_places(
    items: Sequence[LayoutItem], bucket_numel: int | None, num_owners: int, alignment: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]], list[int]]:
    """Return what :func:`compute_owner_layout` does, as plain numbers.

    Args:
        items: Parameters in forward order.
        bucket_numel: Elements after which a bucket is closed, ``None`` for a single bucket.
        num_owners: Ranks of the data-parallel group.
        alignment: Shards are padded to a multiple of this.

    Returns:
        Start in the buffer, bucket and owner of each item; start and end of each bucket; elements
        of parameters in each bucket.
    """
    places = [(0, 0, 0)] * len(items)
    buckets: list[tuple[int, int]] = []
    unpadded: list[int] = []
    work = [0] * num_owners
    cursor = 0
    cuts = _cut_into_buckets(items, bucket_numel, num_owners, alignment)
    numel = sum(_padded_numel(_sizes(items, c), num_owners, alignment) for c in cuts)
    is_padded = _is_padded_much(numel, _numel(items, range(len(items))))
    pack = _pack_tightly if is_padded else _pack
    for bucket_idx, members in enumerate(cuts):
        shards, shard_numel = pack(items, members, num_owners, alignment)
        if not items[members[0]].alone:
            shards = _balance(items, shards, shard_numel, work)
        for owner, shard in enumerate(shards):
            start = cursor + owner * shard_numel
            for index in _largest_first(items, shard):
                places[index] = (start, bucket_idx, owner)
                start += _aligned_numel(items[index])
            work[owner] += _flops(items, shard)
        buckets.append((cursor, cursor + num_owners * shard_numel))
        unpadded.append(_numel(items, members))
        _, cursor = buckets[-1]
    return places, buckets, unpadded


def _cut_into_buckets(
    items: Sequence[LayoutItem],
    bucket_numel: int | None,
    num_owners: int,
    shard_alignment_numel: int,
) -> list[list[int]]:
    """Cut the items, last first, into buckets: Megatron's, or others that are padded less.

    The others are Megatron's with what is left over at the end added to the last full bucket, and
    buckets stretched to where they come out even.
    """

    def padded_numel(buckets: Sequence[Sequence[int]]) -> int:
        return sum(
            _padded_numel(_sizes(items, members), num_owners, shard_alignment_numel)
            for members in buckets
        )

    buckets: list[list[int]] = []
    for run in _runs(items):
        if bucket_numel is None or items[run[0]].alone:
            buckets.append(run)
            continue
        megatron = _cut(items, run, bucket_numel, num_owners)
        numel = _numel(items, run)
        best, best_numel = megatron, padded_numel(megatron)
        candidates = [_merge_last(megatron)]
        for percent in _STRETCH_PERCENTS:
            stretched = _cut(items, run, bucket_numel, num_owners, percent, shard_alignment_numel)
            for cuts in (*candidates, stretched, _merge_last(stretched)):
                cuts_numel = padded_numel(cuts)
                if cuts_numel + numel * _WORTHWHILE_PERCENT // 100 < best_numel:
                    best, best_numel = cuts, cuts_numel
            if not _is_padded_much(best_numel, numel):
                break
            candidates = []
        buckets += best
    return buckets


def _runs(items: Sequence[LayoutItem]) -> list[list[int]]:
    """Return the indices, last first, in runs between the items with a bucket of their own."""
    runs: list[list[int]] = [[]]
    for index in reversed(range(len(items))):
        if items[index].alone:
            runs += [[index], []]
        else:
            runs[-1].append(index)
    return [run for run in runs if run]


def _cut(
    items: Sequence[LayoutItem],
    run: Sequence[int],
    bucket_numel: int,
    num_owners: int,
    stretch_percent: int = 100,
    shard_alignment_numel: int | None = None,
) -> list[list[int]]:
    """Cut a run where Megatron does or, given an alignment, where a bucket is padded least."""
    buckets: list[list[int]] = []
    start = 0
    while start < len(run):
        end = _closing(items, run, start, bucket_numel, num_owners)
        if shard_alignment_numel is not None:
            closings = _later_closings(items, run, start, end, stretch_percent)
            sizes: Counter[int] = Counter()
            ratios, seen = [], start
            for later in closings:
                sizes += _sizes(items, run[seen:later])
                seen = later
                padded = _padded_numel(sizes, num_owners, shard_alignment_numel)
                ratios.append(padded / sum(numel * count for numel, count in sizes.items()))
            end = closings[ratios.index(min(ratios))]
        buckets.append(list(run[start:end]))
        start = end
    return buckets


def _closing(
    items: Sequence[LayoutItem], run: Sequence[int], start: int, bucket_numel: int, num_owners: int
) -> int:
    """Return the position in the run at which Megatron closes the bucket begun at ``start``."""
    numel = largest = 0
    least = bucket_numel
    for position in range(start, len(run)):
        added = items[run[position]].numel
        numel += added
        if added > largest:
            largest = added
            least = max(bucket_numel, int(num_owners * largest * FILL_BEFORE_CLOSING))
        if numel >= least:
            return position + 1
    return len(run)


def _later_closings(
    items: Sequence[LayoutItem], run: Sequence[int], start: int, end: int, stretch_percent: int
) -> Sequence[int]:
    """Return positions from ``end`` up to which the bucket may be stretched, ``end`` first."""
    spare_numel = _numel(items, run[start:end]) * (stretch_percent - 100) // 100
    last = end
    while last < len(run) and spare_numel >= items[run[last]].numel:
        spare_numel -= items[run[last]].numel
        last += 1
    return range(end, last + 1, _ceil_div(last + 1 - end, _MAX_CLOSINGS))


def _merge_last(buckets: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the buckets with the last two made one.

    The last holds what is left over, but takes no fewer elements than ``num_owners`` times its
    largest matrix.
    """
    merged = [list(members) for members in buckets]
    if len(merged) > 1:
        merged[-2:] = [merged[-2] + merged[-1]]
    return merged


def _largest_first(items: Sequence[LayoutItem], members: Sequence[int]) -> list[int]:
    """Return members by elements, then by work, the largest first, then in their order."""
    if len(members) < 2:
        return list(members)
    keys = sorted([(-items[i].numel, -items[i].flops, i) for i in members])
    return [i for _, _, i in keys]


def _sizes(items: Sequence[LayoutItem], members: Sequence[int]) -> Counter[int]:
    """Return how many members there are of each number of elements."""
    return Counter([items[index].numel for index in members])


def _padded_numel(sizes: Mapping[int, int], num_owners: int, shard_alignment_numel: int) -> int:
    """Return the elements of the bucket that :func:`_pack` makes, from the sizes alone.

    Equal members go to equally full shards together, so that thousands of experts take a few steps.
    """
    ends = [(0, num_owners)]
    last = 0
    for numel in sorted(sizes, reverse=True):
        left = sizes[numel]
        while left:
            end, owners = heappop(ends)
            while ends and ends[0][0] == end:
                owners += heappop(ends)[1]
            given = min(owners, left)
            if given < owners:
                heappush(ends, (end, owners - given))
            end = _align(end, PARAM_ALIGNMENT_NUMEL) + numel
            heappush(ends, (end, given))
            left -= given
            last = max(last, end)
    return num_owners * _align(last, shard_alignment_numel)


def _pack(
    items: Sequence[LayoutItem],
    members: Sequence[int],
    num_owners: int,
    shard_alignment_numel: int,
) -> tuple[list[list[int]], int]:
    """Spread a bucket's members over the shards by elements, the largest first.

    Returns:
        The members of each shard, and the elements of a shard.
    """
    ordered = _largest_first(items, members)
    shards: list[list[int]] = [[] for _ in range(num_owners)]
    ends = [(0, owner) for owner in range(num_owners)]
    last = 0
    for index in ordered:
        end, owner = ends[0]
        end = _align(end, PARAM_ALIGNMENT_NUMEL) + items[index].numel
        heapreplace(ends, (end, owner))
        shards[owner].append(index)
        last = max(last, end)
    return shards, _align(last, shard_alignment_numel)


def _pack_tightly(
    items: Sequence[LayoutItem],
    members: Sequence[int],
    num_owners: int,
    shard_alignment_numel: int,
) -> tuple[list[list[int]], int]:
    """Pack as :func:`_pack`; where that leaves much padding, fill shards up to a common size.

    24 matrices of 4 elements, 12 of 3 and 12 of 1 fit into 16 shards of 9 (4 4 1 and 3 3 3), where
    the former takes 10. The work of the shards is then less even, so that this comes last.
    """
    numel = _padded_numel(_sizes(items, members), num_owners, shard_alignment_numel) // num_owners
    ordered = _largest_first(items, members)
    aligned = [_aligned_numel(items[i]) for i in ordered]
    least = max(_ceil_div(sum(aligned), num_owners), *aligned)
    if _is_padded_much(numel, least):
        for percent in range(_MAX_PADDING_PERCENT + 1):
            limit = least * (100 + percent) // 100
            filled = _fill(ordered, aligned, num_owners, limit)
            if filled is not None:
                return filled, _align(limit, shard_alignment_numel)
    return _pack(items, members, num_owners, shard_alignment_numel)


def _fill(
    ordered: Sequence[int], numels: Sequence[int], num_owners: int, limit: int
) -> list[list[int]] | None:
    """Put each member where the least room is left behind; ``None`` if one finds no room.

    Args:
        ordered: The members, the largest first.
        numels: Elements of each, aligned.
        num_owners: Shards.
        limit: Elements that a shard may have.
    """
    shards: list[list[int]] = [[] for _ in range(num_owners)]
    rooms = [(limit, owner) for owner in range(num_owners)]
    for index, numel in zip(ordered, numels, strict=True):
        position = bisect_left(rooms, (numel, -1))
        if position == num_owners:
            return None
        room, owner = rooms.pop(position)
        insort(rooms, (room - numel, owner))
        shards[owner].append(index)
    return shards


def _is_padded_much(numel: int, param_numel: int) -> bool:
    return numel * 100 > param_numel * (100 + _MAX_PADDING_PERCENT)


def _balance(
    items: Sequence[LayoutItem],
    shards: Sequence[Sequence[int]],
    shard_numel: int,
    work: Sequence[int],
) -> list[list[int]]:
    """Give each owner a shard so that the work of all, former buckets included, is even.

    The costliest shard goes to the owner with the least work so far. Then the busiest owner gives
    one parameter to one of the idlest, or exchanges one with it, as long as that helps and both
    shards have room.

    Args:
        items: All parameters.
        shards: Members of each shard of the bucket.
        shard_numel: Elements of a shard.
        work: Flops of each owner before this bucket.

    Returns:
        The members of each owner's shard.
    """
    costs = sorted((-_flops(items, shard), s) for s, shard in enumerate(shards))
    owners = sorted(range(len(shards)), key=lambda owner: (work[owner], owner))
    balanced: list[list[int]] = [[] for _ in shards]
    loads = list(work)
    for (cost, s), owner in zip(costs, owners, strict=True):
        balanced[owner] = list(shards[s])
        loads[owner] -= cost
    for _ in range(_EXCHANGES_PER_OWNER * len(shards)):
        busiest = loads.index(max(loads))
        idlest = nsmallest(_PARTNERS, range(len(loads)), key=lambda owner: (loads[owner], owner))
        for idle in idlest:
            spare_flops = loads[busiest] - loads[idle]
            exchange = _best_exchange(
                items, balanced[busiest], balanced[idle], spare_flops, shard_numel
            )
            if exchange is not None:
                break
        else:
            break
        for index, giver, taker in zip(exchange, (busiest, idle), (idle, busiest), strict=True):
            if index is not None:
                balanced[giver].remove(index)
                balanced[taker].append(index)
                loads[giver] -= items[index].flops
                loads[taker] += items[index].flops
    return balanced


def _best_exchange(
    items: Sequence[LayoutItem],
    busy: Sequence[int],
    idle: Sequence[int],
    spare_flops: int,
    shard_numel: int,
) -> tuple[int, int | None] | None:
    """Return what one owner gives another, and takes for it, so that their work is most alike.

    Args:
        items: All parameters.
        busy: Members of the shard of the owner with more work.
        idle: Members of the shard of the owner with less work.
        spare_flops: Work of the one minus that of the other.
        shard_numel: Elements that a shard may have.

    Returns:
        The parameter given and the one taken, if any; ``None`` if no exchange makes it better.
    """
    busy_numel, idle_numel = (sum(_aligned_numel(items[i]) for i in s) for s in (busy, idle))
    best: tuple[int, int | None] | None = None
    best_gap = spare_flops
    for given, taken in product(_distinct(items, busy), [*_distinct(items, idle), None]):
        flops, numel = items[given].flops, _aligned_numel(items[given])
        if taken is not None:
            flops, numel = flops - items[taken].flops, numel - _aligned_numel(items[taken])
        gap = abs(spare_flops - 2 * flops)
        if gap < best_gap and busy_numel - numel <= shard_numel >= idle_numel + numel:
            best, best_gap = (given, taken), gap
    return best


def _distinct(items: Sequence[LayoutItem], members: Sequence[int]) -> list[int]:
    """Return one member of each size and cost, the first."""
    firsts: dict[tuple[int, int], int] = {}
    for index in members:
        firsts.setdefault((items[index].numel, items[index].flops), index)
    return list(firsts.values())


def _numel(items: Sequence[LayoutItem], members: Sequence[int]) -> int:
    return sum(items[index].numel for index in members)


def _flops(items: Sequence[LayoutItem], members: Sequence[int]) -> int:
    return sum(items[index].flops for index in members)


def _aligned_numel(item: LayoutItem) -> int:
    return _align(item.numel, PARAM_ALIGNMENT_NUMEL)


def _align(value: int, multiple: int) -> int:
    return _ceil_div(value, multiple) * multiple


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
