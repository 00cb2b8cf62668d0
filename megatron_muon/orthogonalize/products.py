"""Matrix products into given memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

STRIP_ROWS = 128
"""Rows of a symmetric product that are computed at once."""


@dataclass(frozen=True, slots=True)
class Products:
    """Products of matrices or of batches of them.

    Tensors of two dimensions take torch's single products, those of three its batched ones.

    Attributes:
        strip: Flat memory for :data:`STRIP_ROWS` rows of a symmetric product, through which the
            part below the diagonal is mirrored; ``None`` computes symmetric products like others.
        rounding: Flat memory in bf16 through which results are rounded; ``None`` leaves them.
    """

    strip: torch.Tensor | None = None
    rounding: torch.Tensor | None = None

    def gram(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``out = x x^T``: ``([B,] a, b)`` to ``([B,] a, a)``."""
        if self.strip is not None:
            for low, high in _strips(x.shape[0]):
                torch.mm(x[low:high], x[:high].mT, out=out[low:high, :high])
                _mirror(out, low, high, self.strip)
        elif x.ndim == 2:
            torch.mm(x, x.mT, out=out)
        else:
            torch.bmm(x, x.mT, out=out)
        self.round_(out)

    def add(
        self,
        base: torch.Tensor,
        beta: float,
        left: torch.Tensor,
        right: torch.Tensor,
        alpha: float,
        out: torch.Tensor,
    ) -> None:
        """Write ``out = beta base + alpha left right``, where ``out`` is none of the three.

        Args:
            base: ``([B,] a, b)``.
            beta: Its factor.
            left: ``([B,] a, a)``.
            right: ``([B,] a, b)``.
            alpha: Factor of the product.
            out: ``([B,] a, b)``.
        """
        multiply = torch.addmm if out.ndim == 2 else torch.baddbmm
        multiply(base, left, right, beta=beta, alpha=alpha, out=out)
        self.round_(out)

    def add_symmetric(
        self,
        base: torch.Tensor,
        beta: float,
        left: torch.Tensor,
        right: torch.Tensor,
        alpha: float,
        out: torch.Tensor,
    ) -> None:
        """Write what :meth:`add` does, for symmetric matrices with a symmetric product.

        Arguments are those of :meth:`add`, all ``([B,] a, a)``.
        """
        if self.strip is None:
            self.add(base, beta, left, right, alpha, out)
            return
        for low, high in _strips(out.shape[0]):
            rows, part = slice(low, high), (slice(low, high), slice(high))
            torch.addmm(
                base[part], left[rows], right[:, :high], beta=beta, alpha=alpha, out=out[part]
            )
            _mirror(out, low, high, self.strip)
        self.round_(out)

    def accumulate(self, out: torch.Tensor, x: torch.Tensor, alpha: float) -> None:
        """Add ``alpha x`` to ``out``."""
        self.round_(out.add_(x, alpha=alpha))

    def round_(self, out: torch.Tensor) -> None:
        """Round to the numbers of the arithmetic, in place."""
        if self.rounding is not None:
            out.copy_(self.rounding[: out.numel()].view(out.shape).copy_(out))


def _strips(num_rows: int) -> list[tuple[int, int]]:
    starts = range(0, num_rows, STRIP_ROWS)
    return [(start, min(start + STRIP_ROWS, num_rows)) for start in starts]


def _mirror(out: torch.Tensor, low: int, high: int, strip: torch.Tensor) -> None:
    """Copy the strip of rows ``[low, high)`` left of column ``low`` to above the diagonal.

    Where rows are a power of two apart, a column's elements compete for few places in the cache.
    Packing the strip first makes its transposed read twice as fast.
    """
    packed = strip[: (high - low) * low].view(high - low, low)
    out[:low, low:high].copy_(packed.copy_(out[low:high, :low]).mT)
