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
from megatron_muon.orthogonalize.iteration import (
    Scratch,
    column_width,
    segment_lengths,
    take_segment,
)
from megatron_muon.orthogonalize.kernels import Kernel, choose_kernel
from megatron_muon.orthogonalize.products import (
    ROUNDING_NUMEL,
    STRIP_ROWS,
    Products,
    Symmetric,
    in_strips,
)


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
        self._kernel = choose_kernel(*block_shape, arithmetic, x.device.type)
        short_first = x.mT if self._is_turned else x
        self._x = torch.empty(short_first.shape, device=x.device).copy_(short_first)

    def size(self) -> torch.Tensor:
        """Scale the part by its largest magnitude; return that and the norm of the result.

        Returns:
            A tensor of two elements, fp32; NaN where the part is not finite.
        """
        x = self._x
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
        self._x.mul_(self._largest / most).div_(norm)
        self._x = self._x.to(self.arithmetic.dtype)
        self._scratch = _scratch(self._x, self._kernel, max(self._left))
        # Not by the kernel that tunes itself in each process: all ranks iterate on the same bits.
        self._products = Products(rounding=_rounding(self._x) if self.arithmetic.rounds else None)
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

    def write(self, out: torch.Tensor) -> None:
        """Write the part of the result, not scaled, in the shape that was given."""
        (out.mT if self._is_turned else out).copy_(self._x)


def _scratch(x: torch.Tensor, kernel: Kernel, longest: int) -> Scratch:
    """Return memory for the iteration of a part whose longest segment has so many steps."""
    short, width = x.shape
    width = column_width(short, width, x.device.type)
    first = x.new_empty(short * max(short, width))
    packed = x.new_empty(STRIP_ROWS * short if kernel.symmetric == "strips" else 0)

    def square(memory: torch.Tensor) -> Symmetric:
        whole = memory[: short * short].view(short, short)
        return in_strips(whole, packed) if kernel.symmetric == "strips" else Symmetric(whole)

    gram, polynomial, *others = (
        square(memory)
        for memory in (first, *(x.new_empty(short * short) for _ in range(3 if longest > 1 else 1)))
    )
    factor, product = others or (polynomial, polynomial)
    columns = first[: short * width].view(short, width)
    return Scratch(gram, polynomial, factor, product, columns)


def _rounding(x: torch.Tensor) -> torch.Tensor:
    numel = min(x.numel(), ROUNDING_NUMEL)
    return x.new_empty(max(numel, *x.shape), dtype=torch.bfloat16)
