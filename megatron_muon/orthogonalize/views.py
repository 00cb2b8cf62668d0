"""Views of the matrices that a logical block consists of."""

from __future__ import annotations

import torch

from megatron_muon.bookkeeping.matrix import LogicalBlock


def block_views(x: torch.Tensor, block: LogicalBlock) -> list[torch.Tensor]:
    """View each of a block's ``batch`` matrices inside a whole matrix.

    What is written into a view is written into ``x``. :func:`as_matrix` gives the matrix that is
    orthogonalized; of a block of rows that is ``view.reshape(-1, view.shape[-1])``.

    Args:
        x: The matrix, ``(M, N)``, of any strides.
        block: One of its blocks.

    Returns:
        One view a matrix: ``(m, N)``, or ``(M, n)`` for columns, where it is one run or a part of
        one; otherwise ``(count, run, N)``, or ``(M, count, run)`` for columns.
    """
    first_parts: dict[int, tuple[int, int]] = {}
    for matrix, start, end in block.parts():
        first_parts.setdefault(matrix, (start, end - start))
    return [_view(x, block, start, length) for start, length in first_parts.values()]


def as_matrix(view: torch.Tensor, block: LogicalBlock) -> torch.Tensor:
    """Return the ``(m, n)`` matrix that a view of :func:`block_views` shows, copied if need be."""
    return view.flatten(0, -2) if block.dim == 0 else view.flatten(1)


def _view(x: torch.Tensor, block: LogicalBlock, start: int, length: int) -> torch.Tensor:
    """View the matrix whose first part is ``length`` lines from ``start``."""
    if block.runs_a_matrix == 1:
        return x.narrow(block.dim, start, length)
    span = (block.runs_a_matrix - 1) * block.period + length
    runs = x.narrow(block.dim, start, span).unfold(block.dim, length, block.period)
    return runs.transpose(1, 2) if block.dim == 0 else runs
