"""A tensor-parallel shard as a view of the whole matrix, and flat stretches of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def shard_view(
    whole: torch.Tensor, dim: int | None, stride: int, size: int, rank: int
) -> torch.Tensor:
    """View one rank's shard in a whole matrix.

    The whole is cut along ``dim`` into ``stride`` parts (stacked gate and up projections are two),
    each part into ``size`` pieces; a shard is its piece of every part, in order.

    Args:
        whole: The matrix, ``(M, N)``, contiguous.
        dim: The dimension that is cut, ``None`` if every rank holds the whole.
        stride: Stacked parts.
        size: Ranks that hold a shard.
        rank: The rank whose shard is viewed.

    Returns:
        A view of three dimensions. Its elements in row-major order are those of the shard, which
        has shape ``(M / size, N)`` or ``(M, N / size)``.
    """
    rows, columns = whole.shape
    if dim is None:
        return whole.view(1, rows, columns)
    if dim == 0:
        return whole.view(stride, size, rows // (stride * size), columns)[:, rank]
    return whole.view(rows, stride, size, columns // (stride * size))[:, :, rank]


def stretch(view: torch.Tensor, start: int, end: int) -> Iterator[torch.Tensor]:
    """Yield views that together are the elements ``[start, end)`` of ``view`` in row-major order.

    Args:
        view: A tensor with any strides.
        start: First element, counted in row-major order.
        end: End of the elements.

    Yields:
        At most two views for each dimension but the last, and one for the rest.
    """
    if start >= end:
        return
    if (start == 0 and end == view.numel()) or view.ndim == 1:
        yield view[start:end] if view.ndim == 1 else view
        return
    row_numel = view.numel() // view.shape[0]
    first, last = start // row_numel, (end - 1) // row_numel
    if first == last:
        yield from stretch(view[first], start - first * row_numel, end - first * row_numel)
        return
    if start % row_numel:
        yield from stretch(view[first], start % row_numel, row_numel)
        first += 1
    full = end // row_numel
    if full > first:
        yield view[first:full]
    if end % row_numel:
        yield from stretch(view[full], 0, end % row_numel)


def read_stretch(view: torch.Tensor, start: int, end: int, out: torch.Tensor) -> None:
    """Copy the elements ``[start, end)`` of ``view``, in row-major order, to the flat ``out``."""
    offset = 0
    for part in stretch(view, start, end):
        out[offset : offset + part.numel()].view(part.shape).copy_(part)
        offset += part.numel()


def write_stretch(view: torch.Tensor, start: int, end: int, source: torch.Tensor) -> None:
    """Copy the flat ``source`` to the elements ``[start, end)`` of ``view``, in row-major order."""
    offset = 0
    for part in stretch(view, start, end):
        part.copy_(source[offset : offset + part.numel()].view(part.shape))
        offset += part.numel()


def part_of_piece(
    piece: torch.Tensor, start: int, columns: int, dim: int, lines: tuple[int, int]
) -> Iterator[torch.Tensor]:
    """Yield views of the elements of a piece that lie in some lines of the shard, in their order.

    Args:
        piece: Elements of a shard in row-major order, flat and contiguous.
        start: The first of them in the shard.
        columns: Columns of the shard.
        dim: 0 for lines that are rows, 1 for columns.
        lines: First line and end of the lines.

    Yields:
        Views of one dimension, and one of two for the whole rows of which ``lines`` are columns.
    """
    first, past = lines
    end = start + piece.numel()
    if dim == 0:
        low, high = max(start, first * columns), min(end, past * columns)
        if low < high:
            yield piece[low - start : high - start]
        return
    at = start
    while at < end:
        column = at % columns
        num_rows = (end - at) // columns if column == 0 else 0
        if num_rows:
            length = num_rows * columns
            yield piece[at - start :][:length].view(num_rows, columns)[:, first:past]
        else:  # a part of one row
            length = min(columns - column, end - at)
            low, high = max(first, column), min(past, column + length)
            if low < high:
                yield piece[at - start - column + low : at - start - column + high]
        at += length
