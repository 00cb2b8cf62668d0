"""The Newton-Schulz iteration on blocks whose norm is at most one.

References:
    Muon, the iteration: https://kellerjordan.github.io/posts/muon/
    Gram form: https://github.com/Dao-AILab/gram-newton-schulz
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_muon.orthogonalize.coefficients import Coefficients
from megatron_muon.orthogonalize.products import Products, Symmetric

_LEAST_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements of a block's columns below which a product takes longer than a whole one: on a CPU 6 %
in bf16 with 1 << 17. Not measured on a GPU."""


@dataclass(slots=True)
class Scratch:
    """Memory of the iteration. What is in it before and after means nothing.

    Attributes:
        gram: ``([B,] a, a)``.
        polynomial: ``([B,] a, a)``.
        factor: ``([B,] a, a)``; may be that of ``polynomial`` where segments are of one step.
        product: ``([B,] a, a)``; likewise.
        columns: For some columns of the blocks, ``([B,] a, w)``, as wide as :func:`column_width`
            says; may begin where ``gram`` does.
    """

    gram: Symmetric
    polynomial: Symmetric
    factor: Symmetric
    product: Symmetric
    columns: torch.Tensor

    def part(self, index: slice) -> Scratch:
        """Return the memory of some of the blocks of a batch."""
        return Scratch(
            self.gram.part(index),
            self.polynomial.part(index),
            self.factor.part(index),
            self.product.part(index),
            self.columns[index],
        )


def column_width(short: int, width: int, device_type: str) -> int:
    """Return how many columns of blocks are multiplied at once.

    Half as many as there are rows, which have room where the Gram matrix was and on a CPU stay in
    the cache, but no fewer than make a product as fast as a whole one; a multiple of 64, so that
    all begin aligned.

    Args:
        short: Rows of the blocks.
        width: Their columns.
        device_type: ``cpu`` or ``cuda``.
    """
    columns = max(short // 2, _LEAST_NUMEL[device_type] // short)
    return min(width, -(-columns // 64) * 64)


def segment_lengths(coefficients: Coefficients, largest_growth: float) -> list[int]:
    """Cut the steps into the segments of the Gram form.

    A step multiplies small singular values by its ``a``, hence an error in their squares, which the
    Gram matrix holds, by ``a^2``. The matrix is therefore computed anew, from the block, before the
    product of the ``a`` of the steps that it has taken would exceed ``largest_growth``. A segment's
    last step does not count: nothing reads its Gram matrix.

    Args:
        coefficients: The triples of all steps.
        largest_growth: Largest product. 0 makes every step a segment: the standard form.

    Returns:
        The number of steps of each segment. Example: quintic's five in bf16 are ``[1, 2, 2]``.
    """
    lengths: list[int] = []
    growth = 0.0
    previous = 0.0
    for a, _, _ in coefficients:
        growth *= previous
        if lengths and growth <= largest_growth:
            lengths[-1] += 1
        else:
            lengths.append(1)
            growth = 1.0
        previous = a
    return lengths


def iterate(
    x: torch.Tensor,
    coefficients: Coefficients,
    lengths: Sequence[int],
    scratch: Scratch,
    products: Products,
) -> None:
    """Take all steps, in place.

    Args:
        x: Blocks, ``([B,] a, b)`` with ``a <= b``, of norm at most 1.
        coefficients: The triples of all steps.
        lengths: Steps of each segment.
        scratch: Memory to work in.
        products: How to multiply.
    """
    done = 0
    for length in lengths:
        products.gram(x, scratch.gram)
        take_segment(x, coefficients[done : done + length], scratch, products)
        done += length


def take_segment(
    x: torch.Tensor, coefficients: Coefficients, scratch: Scratch, products: Products
) -> None:
    """Take the steps of a segment on the blocks ``x``, in place.

    Their Gram matrix is in ``scratch.gram``. A step is ``X <- Z X`` with ``Z = a I + P``,
    ``P = b R + c R^2`` and ``R = X X^T``. The product of all ``Z`` is kept as ``alpha I + Q``, so
    that rounding ``Q`` leaves the part of the identity exact, and ``R <- Z R Z`` needs no ``X``.
    All are polynomials of one symmetric matrix, so that they commute and their products are
    symmetric. With one step this is the standard form.
    """
    alpha = 1.0
    for i, (a, b, c) in enumerate(coefficients):
        R, P, Q = scratch.gram, scratch.polynomial, scratch.factor
        products.add_symmetric(R, b, R, R, c, P)
        if i == 0:
            scratch.factor, scratch.polynomial = P, Q
        else:
            grown = scratch.product
            products.add_symmetric(Q, a, P, Q, 1.0, grown)
            products.accumulate(grown, P, alpha)
            scratch.factor, scratch.product = grown, Q
        alpha *= a
        if i + 1 < len(coefficients):
            T = scratch.product
            products.add_symmetric(R, a, P, R, 1.0, T)
            products.add_symmetric(T, a, T, P, 1.0, R)
    products.apply(x, alpha, scratch.factor.whole, scratch.columns)
