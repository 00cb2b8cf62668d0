"""Frames of coordinates, and where one shard of a matrix lies in a DDP buffer.

Four frames are in use, and a range never travels without its frame: *buffer* (a whole DDP
buffer), *bucket* (buffer minus the bucket's start), *shard* (bucket minus the owner's start) and
*param* (flat index in the tensor-parallel-local parameter). All ranges are half-open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from megatron_muon.errors import PlanError


@dataclass(frozen=True, slots=True, order=True)
class _Range:
    """A half-open range ``[start, end)``, in elements, of the frame its class names."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise PlanError(f"{type(self).__name__}({self.start}, {self.end}) is not a range.")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.start

    def intersect(self, other: Self) -> Self:
        """Return the common part; an empty one lies at ``other``'s start."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return type(self)(start, end) if start < end else type(self)(other.start, other.start)

    def contains(self, other: Self) -> bool:
        """Whether ``other`` lies inside."""
        return self.start <= other.start and other.end <= self.end


class BufferRange(_Range):
    """Elements of a DDP buffer, bucket offset included."""

    __slots__ = ()

    def in_bucket(self, bucket: BufferRange) -> BucketRange:
        """Return the same elements counted from the bucket's start."""
        return BucketRange(self.start - bucket.start, self.end - bucket.start)


class BucketRange(_Range):
    """Elements of a bucket, counted from its start."""

    __slots__ = ()

    def in_buffer(self, bucket: BufferRange) -> BufferRange:
        """Return the same elements counted from the buffer's start."""
        return BufferRange(self.start + bucket.start, self.end + bucket.start)

    def in_shard(self, shard: BucketRange) -> ShardRange:
        """Return the same elements counted from the shard's start."""
        return ShardRange(self.start - shard.start, self.end - shard.start)


class ShardRange(_Range):
    """Elements of one owner's shard of a bucket, counted from its start."""

    __slots__ = ()

    def in_bucket(self, shard: BucketRange) -> BucketRange:
        """Return the same elements counted from the bucket's start."""
        return BucketRange(self.start + shard.start, self.end + shard.start)


class ParamRange(_Range):
    """Flat elements of a tensor-parallel-local parameter."""

    __slots__ = ()


def normalize_range(range_: tuple[int, int], start: int) -> tuple[int, int]:
    """Return ``(start, end)`` of ``range_`` relative to ``start``."""
    return (range_[0] - start, range_[1] - start)


class MuonDistMeta:
    """Where a tensor-parallel-local matrix lies in a DDP buffer, and which part of it is local.

    The fields are those of Megatron-LM #1428. Ranges are ``(start, end)`` in the buffer frame,
    bucket offset included.

    Attributes:
        buffer_idx: Index of the buffer.
        bucket_idx: Index of the bucket in the buffer.
        shape: Shape of the matrix after tensor parallelism, ``(M, N)``.
        global_range: Where the whole of it lies in the buffer.
        tp_split_dim: Dimension tensor parallelism cuts, -1 for none.
        local_range: The part inside this rank's slice of the buffer, set by
            :meth:`set_local_buffer_range`; ``None`` before.
    """

    __slots__ = (
        "_global_range", "_local_range", "bucket_idx", "buffer_idx", "shape", "tp_split_dim",
    )  # fmt: skip

    def __init__(
        self,
        buffer_idx: int,
        bucket_idx: int,
        shape: Sequence[int],
        global_range: tuple[int, int],
        tp_split_dim: int = -1,
    ) -> None:
        self.buffer_idx = buffer_idx
        self.bucket_idx = bucket_idx
        self.shape = tuple(shape)
        self.tp_split_dim = tp_split_dim
        self._global_range = BufferRange(*global_range)
        self._local_range: BufferRange | None = None
        if tp_split_dim not in (-1, *range(len(self.shape))):
            raise PlanError(f"tp_split_dim {tp_split_dim} is no dimension of shape {self.shape}.")
        numel = 1
        for size in self.shape:
            numel *= size
        if self._global_range.numel != numel:
            raise PlanError(
                f"A matrix of shape {self.shape} has {numel} elements, its range {global_range} "
                f"has {self._global_range.numel}."
            )

    @property
    def global_range(self) -> tuple[int, int]:
        """Where the whole matrix lies, in the buffer frame."""
        return (self._global_range.start, self._global_range.end)

    @property
    def local_range(self) -> tuple[int, int] | None:
        """The local part, in the buffer frame; ``(start, start)`` of the slice if it is empty."""
        if self._local_range is None:
            return None
        return (self._local_range.start, self._local_range.end)

    def set_local_buffer_range(self, local_buffer_range: tuple[int, int]) -> None:
        """Complete the record with this rank's slice of the buffer."""
        self._local_range = self._global_range.intersect(BufferRange(*local_buffer_range))

    def __repr__(self) -> str:
        return (
            f"MuonDistMeta(buffer_idx={self.buffer_idx}, bucket_idx={self.bucket_idx}, "
            f"shape={self.shape}, global_range={self.global_range}, "
            f"tp_split_dim={self.tp_split_dim}, local_range={self.local_range})"
        )
