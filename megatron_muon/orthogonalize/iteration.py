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


@dataclass(slots=True)
class Scratch:
    """Memory of the iteration. What is in it before and after means nothing.

    Attributes:
        x: As large as the blocks, ``([B,] a, b)``.
        gram: ``([B,] a, a)``.
        polynomial: ``([B,] a, a)``.
        factor: ``([B,] a, a)``.
        product: ``([B,] a, a)``.
    """

    x: torch.Tensor
    gram: Symmetric
    polynomial: Symmetric
    factor: Symmetric
    product: Symmetric

    def part(self, index: slice) -> Scratch:
        """Return the memory of some of the blocks of a batch."""
        return Scratch(
            self.x[index],
            self.gram.part(index),
            self.polynomial.part(index),
            self.factor.part(index),
            self.product.part(index),
        )


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
) -> torch.Tensor:
    """Take all steps.

    Args:
        x: Blocks, ``([B,] a, b)`` with ``a <= b``, of norm at most 1; overwritten.
        coefficients: The triples of all steps.
        lengths: Steps of each segment.
        scratch: Memory to work in.
        products: How to multiply.

    Returns:
        The result, in the memory of ``x`` or of the scratch.
    """
    done = 0
    for length in lengths:
        products.gram(x, scratch.gram)
        take_segment(x, coefficients[done : done + length], scratch, products)
        x, scratch.x = scratch.x, x
        done += length
    return x


def take_segment(
    x: torch.Tensor, coefficients: Coefficients, scratch: Scratch, products: Products
) -> None:
    """Write to ``scratch.x`` what a segment's steps make of the blocks ``x``.

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
    products.add(x, alpha, scratch.factor.whole, x, 1.0, scratch.x)
