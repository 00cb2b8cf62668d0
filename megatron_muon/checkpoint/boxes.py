"""Rectangles that make up a flat range of a tensor.

Checkpoints know rectangles of tensors only; a byte-sharded optimizer holds flat ranges, which begin
and end in the middle of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a tensor.

    Attributes:
        start: First element in each dimension.
        shape: Elements in each dimension.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last element in each dimension."""
        return tuple(first + size for first, size in zip(self.start, self.shape, strict=True))


def whole(shape: tuple[int, ...]) -> Box:
    """Return all of a tensor."""
    return Box((0,) * len(shape), shape)


def boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Return rectangles that make up the elements ``[start, end)`` of a contiguous tensor.

    A matrix needs at most three: the rest of a row, whole rows, the beginning of a row.

    Args:
        shape: Shape of the tensor.
        start: First element, counted flat.
        end: One past the last.

    Returns:
        Disjoint rectangles in the order of their elements, none empty.
    """
    if start >= end:
        return []
    if len(shape) < 2:
        return [Box((start,), (end - start,))] if shape else [Box((), ())]
    inner = prod(shape[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(end, inner)
    if first == last:
        return _in_row(first, boxes(shape[1:], head, tail))
    found = []
    if head:
        found += _in_row(first, boxes(shape[1:], head, inner))
        first += 1
    if first < last:
        found.append(Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    return found + _in_row(last, boxes(shape[1:], 0, tail))


def intersection(one: Box, other: Box) -> Box | None:
    """Return what two rectangles have in common, ``None`` for nothing."""
    start = tuple(map(max, one.start, other.start))
    shape = tuple(e - s for s, e in zip(start, map(min, one.end, other.end), strict=True))
    return Box(start, shape) if all(size > 0 for size in shape) else None


def _in_row(row: int, inner: list[Box]) -> list[Box]:
    return [Box((row, *box.start), (1, *box.shape)) for box in inner]
