"""The owner layout: buckets in which every matrix lies whole inside one owner's shard.

A bucket is cut into ``num_owners`` equal shards. Reduce-scatter and parameter gather then move
whole matrices, and each owner steps its own::

    bucket  |  shard 0: A, D, pad  |  shard 1: B, C  |  shard 2: E, pad  |
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush, nsmallest
from itertools import accumulate, pairwise

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
"""Bounds on the search for even work: exchanges for each owner, and owners, of different work, that
are tried as partners for each exchange."""

_Size = tuple[int, int, int]
"""Elements of a parameter, its Newton-Schulz flops, and the elements aligned."""


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
    larger than the one of megatron-core 0.19.2. Under that size owners exchange parameters and
    whole shards until their Newton-Schulz work, summed over the buckets, is as even as that allows.

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
    aligned = {numel: _align(numel, PARAM_ALIGNMENT_NUMEL) for numel in {i.numel for i in items}}
    sizes = [(item.numel, item.flops, aligned[item.numel]) for item in items]
    cuts = [
        members
        for run in _runs(items, num_owners, alignment)
        for members in _cut_into_buckets(run, bucket_numel)
    ]
    unpadded = [sum([sizes[index][0] for index in members]) for members in cuts]
    packed = [_pack(sizes, members, num_owners, alignment) for members in cuts]
    if _is_padded_much(num_owners * sum(numel for _, numel in packed), sum(unpadded)):
        packed = [_pack_tightly(sizes, members, num_owners, alignment) for members in cuts]
    filled = [
        _Bucket(
            shards,
            [sum([sizes[index][1] for index in shard]) for shard in shards],
            shard_numel,
            items[members[0]].alone,
        )
        for members, (shards, shard_numel) in zip(cuts, packed, strict=True)
    ]
    _balance(sizes, filled, num_owners)
    places = [(0, 0, 0)] * len(items)
    buckets: list[tuple[int, int]] = []
    cursor = 0
    for bucket_idx, bucket in enumerate(filled):
        for owner, shard in enumerate(bucket.shards):
            start = cursor + owner * bucket.shard_numel
            for index in shard:
                places[index] = (start, bucket_idx, owner)
                start += sizes[index][2]
        buckets.append((cursor, cursor + num_owners * bucket.shard_numel))
        _, cursor = buckets[-1]
    return places, buckets, unpadded


@dataclass(frozen=True, slots=True)
class _Run:
    """Items between those with a bucket of their own; each bucket is a stretch of a run.

    Attributes:
        members: Indices of the items, last first.
        numels: Elements of each.
        before: Elements of all items before each position, and of all.
        num_owners: Shards of a bucket.
        alignment: Shards are padded to a multiple of this.
        is_alone: Whether it is an item with a bucket of its own.
    """

    members: list[int]
    numels: list[int]
    before: list[int]
    num_owners: int
    alignment: int
    is_alone: bool
    _padded: dict[tuple[int, int], int] = field(default_factory=dict)

    def numel(self, start: int, end: int) -> int:
        """Return the elements between two positions."""
        return self.before[end] - self.before[start]

    def padded_numel(self, start: int, end: int) -> int:
        """Return the elements of the bucket between two positions."""
        if (start, end) not in self._padded:
            counts = Counter(self.numels[start:end])
            self._padded[start, end] = _padded_numel(counts, self.num_owners, self.alignment)
        return self._padded[start, end]


def _runs(items: Sequence[LayoutItem], num_owners: int, alignment: int) -> list[_Run]:
    """Return the items, last first, in runs between those with a bucket of their own."""
    runs: list[list[int]] = [[]]
    for index in reversed(range(len(items))):
        if items[index].alone:
            runs += [[index], []]
        else:
            runs[-1].append(index)
    found: list[_Run] = []
    for members in filter(None, runs):
        numels = [items[index].numel for index in members]
        before = list(accumulate(numels, initial=0))
        found.append(_Run(members, numels, before, num_owners, alignment, items[members[0]].alone))
    return found


def _cut_into_buckets(run: _Run, bucket_numel: int | None) -> list[list[int]]:
    """Cut a run into buckets: Megatron's, or others that are padded less.

    The others are Megatron's with what is left over at the end added to the last full buckets, and
    buckets stretched to where they come out even.
    """
    if bucket_numel is None or run.is_alone:
        return [run.members]
    numel = run.numel(0, len(run.members))
    best = _cut(run, bucket_numel)
    best_numel = _all_padded(run, best)
    candidates = list(_merged_at_the_end(run, best))
    for percent in _STRETCH_PERCENTS:
        stretched = _cut(run, bucket_numel, percent)
        for ends in (*candidates, stretched, *_merged_at_the_end(run, stretched)):
            padded_numel = _all_padded(run, ends)
            if padded_numel + numel * _WORTHWHILE_PERCENT // 100 < best_numel:
                best, best_numel = ends, padded_numel
        if not _is_padded_much(best_numel, numel):
            break
        candidates = []
    return [run.members[start:end] for start, end in pairwise([0, *best])]


def _all_padded(run: _Run, ends: Sequence[int]) -> int:
    """Return the elements of all buckets of a run, given where each ends."""
    return sum(run.padded_numel(start, end) for start, end in pairwise([0, *ends]))


def _cut(run: _Run, bucket_numel: int, stretch_percent: int = 100) -> list[int]:
    """Return where buckets end: where Megatron's do or, stretched, where they are padded least."""
    ends: list[int] = []
    start = 0
    while start < len(run.members):
        end = _closing(run, start, bucket_numel)
        if stretch_percent > 100:
            end = _least_padded(run, start, _later_closings(run, start, end, stretch_percent))
        ends.append(end)
        start = end
    return ends


def _closing(run: _Run, start: int, bucket_numel: int) -> int:
    """Return the position in the run at which Megatron closes the bucket begun at ``start``."""
    numel = largest = 0
    least = bucket_numel
    for position in range(start, len(run.members)):
        added = run.numels[position]
        numel += added
        if added > largest:
            largest = added
            least = max(bucket_numel, int(run.num_owners * largest * FILL_BEFORE_CLOSING))
        if numel >= least:
            return position + 1
    return len(run.members)


def _later_closings(run: _Run, start: int, end: int, stretch_percent: int) -> range:
    """Return positions from ``end`` up to which the bucket may be stretched, ``end`` first."""
    most = run.before[end] + run.numel(start, end) * (stretch_percent - 100) // 100
    last = bisect_right(run.before, most) - 1
    return range(end, last + 1, _ceil_div(last + 1 - end, _MAX_CLOSINGS))


def _least_padded(run: _Run, start: int, closings: Sequence[int]) -> int:
    """Return the first of the positions at which the bucket begun at ``start`` is padded least."""
    counts: Counter[int] = Counter()
    ratios: list[float] = []
    seen = start
    for end in closings:
        counts.update(run.numels[seen:end])
        seen = end
        padded = _padded_numel(counts, run.num_owners, run.alignment)
        ratios.append(padded / run.numel(start, end))
    return closings[ratios.index(min(ratios))]


def _merged_at_the_end(run: _Run, ends: Sequence[int]) -> Iterator[list[int]]:
    """Yield the cuts with the last two buckets made one, the last three and so on.

    The last holds what is left over, but takes no fewer elements than ``num_owners`` times its
    largest matrix. As many buckets as fit into its padding are tried, which costs no overlap since
    it becomes no larger, and one more, until little padding is left.
    """
    starts = [0, *ends]
    last_numel = run.padded_numel(*starts[-2:])
    for num_kept in reversed(range(len(ends) - 1)):
        merged = [*ends[:num_kept], ends[-1]]
        yield merged
        is_padded = _is_padded_much(_all_padded(run, merged), run.before[-1])
        if not is_padded or run.padded_numel(starts[num_kept], ends[-1]) > last_numel:
            return


def _largest_first(sizes: Sequence[_Size], members: Sequence[int]) -> list[int]:
    """Return members by elements, then by work, the largest first, then in their order."""
    return sorted(sorted(members), key=sizes.__getitem__, reverse=True)


def _padded_numel(counts: Mapping[int, int], num_owners: int, shard_alignment_numel: int) -> int:
    """Return the elements of the bucket that :func:`_pack` makes, from the sizes alone.

    Args:
        counts: How many members there are of each number of elements.
        num_owners: Shards.
        shard_alignment_numel: Shards are padded to a multiple of this.
    """
    ends = [(0, num_owners)]
    last = 0
    for numel in sorted(counts, reverse=True):
        left = counts[numel]
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
    sizes: Sequence[_Size], members: Sequence[int], num_owners: int, shard_alignment_numel: int
) -> tuple[list[list[int]], int]:
    """Spread a bucket's members over the shards by elements, the largest first.

    Each goes to the shard that ends first. Equal members go to equally full shards together, so
    that thousands of experts take a few steps.

    Returns:
        The members of each shard, and the elements of a shard.
    """
    alike: dict[_Size, list[int]] = defaultdict(list)
    for index in sorted(members):
        alike[sizes[index]].append(index)
    shards: list[list[int]] = [[] for _ in range(num_owners)]
    ends = [(0, list(range(num_owners)))]
    last = 0
    for size in sorted(alike, reverse=True):
        left = alike[size]
        while left:
            end, owners = heappop(ends)
            while ends and ends[0][0] == end:
                owners = sorted(owners + heappop(ends)[1])
            for owner, index in zip(owners, left, strict=False):
                shards[owner].append(index)
            given, kept = owners[: len(left)], owners[len(left) :]
            left = left[len(given) :]
            if kept:
                heappush(ends, (end, kept))
            end = _align(end, PARAM_ALIGNMENT_NUMEL) + size[0]
            heappush(ends, (end, given))
            last = max(last, end)
    return shards, _align(last, shard_alignment_numel)


def _pack_tightly(
    sizes: Sequence[_Size], members: Sequence[int], num_owners: int, shard_alignment_numel: int
) -> tuple[list[list[int]], int]:
    """Pack as :func:`_pack`; where that leaves much padding, fill shards up to a common size.

    24 matrices of 4 elements, 12 of 3 and 12 of 1 fit into 16 shards of 9 (4 4 1 and 3 3 3), where
    the former takes 10. The work of the shards is then less even, so that this comes last.
    """
    shards, shard_numel = _pack(sizes, members, num_owners, shard_alignment_numel)
    ordered = _largest_first(sizes, members)
    aligned = [sizes[i][2] for i in ordered]
    least = max(_ceil_div(sum(aligned), num_owners), *aligned)
    if _is_padded_much(shard_numel, least):
        for percent in range(_MAX_PADDING_PERCENT + 1):
            limit = least * (100 + percent) // 100
            filled = _fill(ordered, aligned, num_owners, limit)
            if filled is not None:
                return filled, _align(limit, shard_alignment_numel)
    return shards, shard_numel


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


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A bucket's members.

    Attributes:
        shards: The members of each owner's shard, the largest first; :func:`_balance` changes them.
        costs: Flops of each shard.
        shard_numel: Elements of a shard.
        is_alone: Whether it is a bucket of one item that stays at the first owner.
    """

    shards: list[list[int]]
    costs: list[int]
    shard_numel: int
    is_alone: bool


def _balance(sizes: Sequence[_Size], buckets: Sequence[_Bucket], num_owners: int) -> None:
    """Give each owner shards so that the work of all is even.

    Bucket by bucket, the one with the costliest parameter first, the costliest shard goes to the
    owner with the least work so far. Then the busiest owner exchanges with one of the idlest, as
    long as that helps.
    """
    work = [0] * num_owners
    for bucket in sorted(buckets, key=partial(_order, sizes)):
        if not bucket.is_alone:
            _deal(bucket, sorted(range(num_owners), key=work.__getitem__))
        work = [sum(both) for both in zip(work, bucket.costs, strict=True)]
    movable = [bucket for bucket in buckets if not bucket.is_alone]
    for _ in range(_EXCHANGES_PER_OWNER * num_owners):
        busy = work.index(max(work))
        # Of those with equal work the first.
        owners = dict(zip(reversed(work), reversed(range(num_owners)), strict=True))
        for flops in nsmallest(_PARTNERS, owners):
            idle = owners[flops]
            exchange = _best_exchange(sizes, movable, busy, idle, work[busy] - work[idle])
            if exchange is not None:
                break
        else:
            return
        exchange.make(sizes, busy, idle)
        work[busy] -= exchange.flops
        work[idle] += exchange.flops


def _order(sizes: Sequence[_Size], bucket: _Bucket) -> tuple[bool, int]:
    """Return what buckets are sorted by: what is fixed comes first, then what is hard to match."""
    costliest = max([sizes[index][1] for shard in bucket.shards for index in shard])
    return not bucket.is_alone, -costliest


def _deal(bucket: _Bucket, owners: Sequence[int]) -> None:
    """Give the shards of a bucket to owners in their order, the costliest first."""
    ranked = sorted(range(len(owners)), key=bucket.costs.__getitem__, reverse=True)
    shard_of = [shard for _, shard in sorted(zip(owners, ranked, strict=True))]
    bucket.shards[:] = [bucket.shards[shard] for shard in shard_of]
    bucket.costs[:] = [bucket.costs[shard] for shard in shard_of]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What two owners exchange in a bucket.

    Attributes:
        bucket: The bucket.
        flops: Work that the one is relieved of.
        given: What it gives.
        taken: What it takes for it.
    """

    bucket: _Bucket
    flops: int
    given: list[int]
    taken: list[int]

    def make(self, sizes: Sequence[_Size], busy: int, idle: int) -> None:
        """Make the exchange between two owners."""
        shards, costs = self.bucket.shards, self.bucket.costs
        for owner, less, more in (busy, self.given, self.taken), (idle, self.taken, self.given):
            shards[owner] = _largest_first(sizes, [*{*shards[owner]}.difference(less), *more])
        costs[busy] -= self.flops
        costs[idle] += self.flops


def _best_exchange(
    sizes: Sequence[_Size], buckets: Sequence[_Bucket], busy: int, idle: int, spare_flops: int
) -> _Exchange | None:
    """Return the exchange after which the work of two owners is most alike, ``None`` if none helps.

    They exchange their shards of a bucket or, where both have room, one parameter for one, or one
    for nothing.

    Args:
        sizes: Of all parameters.
        buckets: The buckets.
        busy: The owner with more work.
        idle: The owner with less.
        spare_flops: Work of the one minus that of the other.
    """
    best: _Exchange | None = None
    best_gap = spare_flops
    for bucket in buckets:
        for flops, given, taken in _exchanges(sizes, bucket, busy, idle):
            gap = abs(spare_flops - 2 * flops)
            if gap < best_gap:
                best, best_gap = _Exchange(bucket, flops, given, taken), gap
    return best


def _exchanges(
    sizes: Sequence[_Size], bucket: _Bucket, busy: int, idle: int
) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield what two owners can exchange: the flops moved, what is given and what is taken."""
    busy_shard, idle_shard = bucket.shards[busy], bucket.shards[idle]
    yield bucket.costs[busy] - bucket.costs[idle], busy_shard, idle_shard
    busy_room, idle_room = (
        bucket.shard_numel - sum([sizes[i][2] for i in shard]) for shard in (busy_shard, idle_shard)
    )
    takable = _distinct(sizes, idle_shard)
    for given in _distinct(sizes, busy_shard):
        _, flops, numel = sizes[given]
        if numel <= idle_room:
            yield flops, [given], []
        for taken in takable:
            more = sizes[taken][2] - numel
            if -idle_room <= more <= busy_room:
                yield flops - sizes[taken][1], [given], [taken]


def _distinct(sizes: Sequence[_Size], members: Sequence[int]) -> list[int]:
    """Return one member of each size, the first."""
    firsts: dict[_Size, int] = {}
    for index in members:
        firsts.setdefault(sizes[index], index)
    return list(firsts.values())


def _align(value: int, multiple: int) -> int:
    return _ceil_div(value, multiple) * multiple


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
