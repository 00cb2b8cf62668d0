"""Newton-Schulz of one part of a block whose other parts are computed elsewhere.

With the parts ``X_j`` of the long side, ``X X^T`` is the sum of all ``X_j X_j^T``, and every step
``X <- Z X`` with ``Z`` a polynomial of it is ``X_j <- Z X_j``. So a part needs of the others the
sizes, for the norm of the whole, and the sum of Gram matrices, once in each segment of the
iteration. How they come is the caller's affair.
"""

from __future__ import annotations

import torch

from megatron_muon.orthogonalize.arithmetic import Arithmetic
from megatron_muon.orthogonalize.blocks import TINY
from megatron_muon.orthogonalize.coefficients import Coefficients
from megatron_muon.orthogonalize.iteration import Scratch, segment_lengths, take_segment
from megatron_muon.orthogonalize.kernels import Kernel, choose_kernel
from megatron_muon.orthogonalize.products import STRIP_ROWS, Products, Symmetric, in_strips


def part_segments(
    rows: int, columns: int, coefficients: Coefficients, arithmetic: Arithmetic, device_type: str
) -> list[int]:
    """Return the steps of each segment of a block, hence how often its Gram matrix is computed.

    They are those of the kernel that computes the block where it is not cut into parts.

    Args:
        rows: Rows of the block.
        columns: Its columns.
        coefficients: The triples of all steps.
        arithmetic: How its products are computed.
        device_type: ``cpu`` or ``cuda``.
    """
    kernel = choose_kernel(rows, columns, arithmetic, device_type)
    growth = arithmetic.largest_growth if kernel.form == "gram" else 0.0
    return segment_lengths(coefficients, growth)


class BlockPart:
    """One part in the making.

    :meth:`size`, :meth:`normalize` with the sizes of all parts, then for each segment
    :meth:`multiply`, the sum of all parts' products in :attr:`gram`, and :meth:`take_segment`; at
    the end :meth:`write`.

    Attributes:
        arithmetic: How products are computed; all numbers but sizes are of it.
    """

    def __init__(
        self,
        x: torch.Tensor,
        block_shape: tuple[int, int],
        coefficients: Coefficients,
        arithmetic: Arithmetic,
    ) -> None:
        """Copy the part to memory to work in.

        Args:
            x: The part, fp32: ``(m, n)`` of which the block's shorter side is whole.
            block_shape: Shape of the whole block.
            coefficients: The triples of all steps.
            arithmetic: How products are computed.
        """
        self.arithmetic = arithmetic
        self._is_turned = block_shape[0] > block_shape[1]
        self._coefficients = coefficients
        self._left = part_segments(*block_shape, coefficients, arithmetic, x.device.type)
        short_first = x.mT if self._is_turned else x
        short, width = short_first.shape
        dtype, device = arithmetic.dtype, x.device
        self._source = torch.empty(short, width, device=device).copy_(short_first)
        self._x = self._source
        if dtype != torch.float32:
            self._x = torch.empty(short, width, dtype=dtype, device=device)
        self._scratch = Scratch(
            torch.empty(short, width, dtype=dtype, device=device),
            *_squares(short, choose_kernel(*block_shape, arithmetic, device.type), dtype, device),
        )
        # Not by the kernel that tunes itself in each process: all ranks iterate on the same bits.
        rounding = short * max(short, width)
        self._products = Products(
            rounding=torch.empty(rounding, dtype=torch.bfloat16, device=device)
            if arithmetic.rounds
            else None
        )

    def size(self) -> torch.Tensor:
        """Scale the part by its largest magnitude; return that and the norm of the result.

        Returns:
            A tensor of two elements, fp32; NaN where the part is not finite.
        """
        x = self._source
        self._largest = torch.maximum(x.amax(), x.amin().neg_()).clamp_min_(TINY)
        x.div_(self._largest)
        row_norms = torch.linalg.vector_norm(x, dim=-1)
        return torch.stack([self._largest, torch.linalg.vector_norm(row_norms)])

    def normalize(self, sizes: torch.Tensor) -> None:
        """Divide by the Frobenius norm of the whole block; zero stays zero.

        Args:
            sizes: What :meth:`size` returned for each part, in their order, ``(k, 2)``.
        """
        largest, norms = sizes.unbind(1)
        most = largest.amax()
        # No square overflows, and what underflows is too small to count.
        norm = torch.linalg.vector_norm(norms * (largest / most)).clamp_min_(TINY)
        self._source.mul_(self._largest / most).div_(norm)
        if self._x is not self._source:
            self._x.copy_(self._source)
        self._products.round_(self._x)

    @property
    def gram(self) -> torch.Tensor:
        """The Gram matrix, ``(a, a)``: of the part until it is overwritten with the sum."""
        return self._scratch.gram.whole

    def multiply(self) -> None:
        """Compute the Gram matrix of the part."""
        self._products.gram(self._x, self._scratch.gram)

    def take_segment(self) -> None:
        """Take the steps of the next segment on the Gram matrix, and apply them to the part."""
        length = self._left.pop(0)
        steps, self._coefficients = self._coefficients[:length], self._coefficients[length:]
        take_segment(self._x, steps, self._scratch, self._products)
        self._x, self._scratch.x = self._scratch.x, self._x

    def write(self, out: torch.Tensor) -> None:
        """Write the part of the result, not scaled, in the shape that was given."""
        (out.mT if self._is_turned else out).copy_(self._x)


def _squares(
    short: int, kernel: Kernel, dtype: torch.dtype, device: torch.device
) -> list[Symmetric]:
    """Return memory for the four square matrices of the iteration."""
    packed = torch.empty(STRIP_ROWS * short, dtype=dtype, device=device)
    squares = (torch.empty(short, short, dtype=dtype, device=device) for _ in range(4))
    if kernel.symmetric == "strips":
        return [in_strips(square, packed) for square in squares]
    return [Symmetric(square) for square in squares]
