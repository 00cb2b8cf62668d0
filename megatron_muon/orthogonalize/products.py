"""Matrix products into given memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from emerging_optimizers import triton_kernels

STRIP_ROWS = 128
"""Rows of a symmetric product that are computed at once."""

_PADDING = 8
"""Elements between the rows of a strip that is packed."""

ROUNDING_NUMEL = 1 << 18
"""Elements that are rounded at once."""

_SYRK_CAPABILITIES = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})
"""CUDA capabilities on which emerging-optimizers 0.3 vouches for its Triton SYRK."""


@dataclass(frozen=True, slots=True)
class Strip:
    """Views of some rows of a symmetric matrix: made once, since making them takes its time.

    Attributes:
        low: The first row.
        high: The row after the last.
        rows: All of these rows, ``(high - low, a)``.
        columns: The columns up to ``high``, ``(a, high)``: by symmetry rows, which lie together.
        part: What is computed of these rows, ``(high - low, high)``.
        below: The part below the diagonal block, ``(high - low, low)``.
        above: Where that is mirrored to, ``(low, high - low)``.
        packed: Memory in between, ``(high - low, low)``. Where rows are a power of two apart, a
            column's elements compete for few places in the cache: packing the strip first makes
            its transposed read twice as fast, and padding its rows again a fifth faster.
    """

    low: int
    high: int
    rows: torch.Tensor
    columns: torch.Tensor
    part: torch.Tensor
    below: torch.Tensor
    above: torch.Tensor
    packed: torch.Tensor


@dataclass(frozen=True, slots=True)
class Symmetric:
    """Memory of symmetric matrices.

    Attributes:
        whole: ``([B,] a, a)``.
        strips: Its strips; none where products are computed whole.
    """

    whole: torch.Tensor
    strips: tuple[Strip, ...] = ()

    def part(self, index: slice) -> Symmetric:
        """Return the memory of some matrices of a batch."""
        return Symmetric(self.whole[index])


def in_strips(whole: torch.Tensor, packed: torch.Tensor) -> Symmetric:
    """Return a matrix whose products are computed in strips.

    Args:
        whole: The matrix, ``(a, a)``.
        packed: Flat memory for :data:`STRIP_ROWS` rows, which several matrices may share.
    """
    num_rows = whole.shape[0]
    strips = []
    for low in range(0, num_rows, STRIP_ROWS):
        high = min(low + STRIP_ROWS, num_rows)
        strips.append(
            Strip(
                low,
                high,
                rows=whole[low:high],
                columns=whole[:high].mT,
                part=whole[low:high, :high],
                below=whole[low:high, :low],
                above=whole[:low, low:high],
                packed=packed.as_strided((high - low, low), (low + _PADDING, 1)),
            )
        )
    return Symmetric(whole, tuple(strips))


@dataclass(frozen=True, slots=True)
class Products:
    """Products of matrices or of batches of them.

    Tensors of two dimensions take torch's single products, those of three its batched ones.

    Attributes:
        rounding: Flat memory in bf16 through which results are rounded, a row of a matrix or a
            matrix of a batch at least; ``None`` leaves them.
        use_syrk: Whether ``x x^T`` goes through emerging-optimizers' Triton SYRK.
    """

    rounding: torch.Tensor | None = None
    use_syrk: bool = False

    def gram(self, x: torch.Tensor, out: Symmetric) -> None:
        """Write ``out = x x^T``: ``([B,] a, b)`` to ``([B,] a, a)``."""
        if self.use_syrk:
            out.whole.copy_(triton_kernels.tsyrk_ex(x))
        elif out.strips:
            for strip in out.strips:
                torch.mm(x[strip.low : strip.high], x[: strip.high].mT, out=strip.part)
                _mirror(strip)
        elif x.ndim == 2:
            torch.mm(x, x.mT, out=out.whole)
        else:
            torch.bmm(x, x.mT, out=out.whole)
        self.round_(out.whole)

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
        base: Symmetric,
        beta: float,
        left: Symmetric,
        right: Symmetric,
        alpha: float,
        out: Symmetric,
    ) -> None:
        """Write what :meth:`add` does, for symmetric matrices with a symmetric product.

        The right factor is read transposed, along its rows, which is up to 10 % faster.

        Arguments are those of :meth:`add`, all ``([B,] a, a)``.
        """
        if self.use_syrk and left is right:
            out.whole.copy_(triton_kernels.tsyrk_ex(left.whole, base.whole, alpha=alpha, beta=beta))
            return
        if not out.strips:
            self.add(base.whole, beta, left.whole, right.whole.mT, alpha, out.whole)
            return
        for b, x, y, strip in zip(base.strips, left.strips, right.strips, out.strips, strict=True):
            torch.addmm(b.part, x.rows, y.columns, beta=beta, alpha=alpha, out=strip.part)
            _mirror(strip)
        self.round_(out.whole)

    def apply(
        self, x: torch.Tensor, alpha: float, factor: torch.Tensor, columns: torch.Tensor
    ) -> None:
        """Write ``x <- alpha x + factor x``, as many columns at a time as there is room to copy.

        On a CPU that is as fast as a product into other memory, or up to 4 % faster: torch copies
        the base of such a product first, and here that copy is read again before it leaves the
        cache.

        Args:
            x: ``([B,] a, b)``.
            alpha: Its factor.
            factor: ``([B,] a, a)``.
            columns: Memory for some columns of ``x``, ``([B,] a, w)``.
        """
        width = columns.shape[-1]
        for first in range(0, x.shape[-1], width):
            part = x[..., first : first + width]
            copy = columns[..., : part.shape[-1]].copy_(part)
            multiply = part.addmm_ if x.ndim == 2 else part.baddbmm_
            multiply(factor, copy, beta=alpha)
            self.round_(part)

    def multiply_to_symmetric(self, left: Symmetric, right: Symmetric, out: Symmetric) -> None:
        """Write ``left^T right`` of any two matrices ``(a, a)`` whose product is symmetric."""
        if not out.strips:
            torch.mm(left.whole.mT, right.whole, out=out.whole)
        for strip in out.strips:
            high = strip.high
            torch.mm(left.whole[:, strip.low : high].mT, right.whole[:, :high], out=strip.part)
            _mirror(strip)

    def accumulate(self, out: Symmetric, x: Symmetric, alpha: float) -> None:
        """Add ``alpha x`` to ``out``."""
        self.round_(out.whole.add_(x.whole, alpha=alpha))

    def round_(self, out: torch.Tensor) -> None:
        """Round to the numbers of the arithmetic, in place: matrices, or batches of them."""
        if self.rounding is None:
            return
        count = max(1, self.rounding.numel() // out[0].numel())
        for first in range(0, out.shape[0], count):
            part = out[first : first + count]
            part.copy_(self.rounding[: part.numel()].view(part.shape).copy_(part))


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


def _mirror(strip: Strip) -> None:
    if strip.low:
        strip.above.copy_(strip.packed.copy_(strip.below).mT)
