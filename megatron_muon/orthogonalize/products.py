"""Matrix products into given memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from emerging_optimizers import triton_kernels

STRIP_ROWS = 128
"""Rows of a symmetric product that are computed at once."""

_SYRK_CAPABILITIES = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})
"""CUDA capabilities on which emerging-optimizers 0.3 vouches for its Triton SYRK."""


@dataclass(frozen=True, slots=True)
class Products:
    """Products of matrices or of batches of them.

    Tensors of two dimensions take torch's single products, those of three its batched ones.

    Attributes:
        strip: Flat memory for :data:`STRIP_ROWS` rows of a symmetric product, through which the
            part below the diagonal is mirrored; ``None`` computes symmetric products like others.
        rounding: Flat memory in bf16 through which results are rounded; ``None`` leaves them.
        use_syrk: Whether ``x x^T`` goes through emerging-optimizers' Triton SYRK.
    """

    strip: torch.Tensor | None = None
    rounding: torch.Tensor | None = None
    use_syrk: bool = False

    def gram(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``out = x x^T``: ``([B,] a, b)`` to ``([B,] a, a)``."""
        if self.use_syrk:
            out.copy_(triton_kernels.tsyrk_ex(x))
        elif self.strip is not None:
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
        if self.use_syrk and left is right:
            out.copy_(triton_kernels.tsyrk_ex(left, base, alpha=alpha, beta=beta))
            return
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


def syrk_applies(short: int, long: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the Triton SYRK can multiply blocks of a shape.

    Its tensor descriptors need rows of a multiple of 16 bytes.

    Args:
        short: Shorter side of the blocks.
        long: Longer side of the blocks.
        dtype: What they are held in.
        device: Where they are.
    """
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and short % 8 == 0
        and long % 8 == 0
        and bool(triton_kernels.HAS_TRITON_340)
        and torch.cuda.get_device_capability(device) in _SYRK_CAPABILITIES
    )


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
