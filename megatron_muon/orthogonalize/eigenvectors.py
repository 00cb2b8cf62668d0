"""All steps of Newton-Schulz at once, by the eigenvectors of the Gram matrix."""

from __future__ import annotations

import math

import torch

from megatron_muon.orthogonalize.coefficients import Coefficients
from megatron_muon.orthogonalize.iteration import Scratch, iterate
from megatron_muon.orthogonalize.products import Products


def diagonalize(
    x: torch.Tensor, coefficients: Coefficients, scratch: Scratch, products: Products
) -> None:
    """Take all steps in place: ``U g(L) U^T X``, ``X X^T = U L U^T``, their effect ``g(s^2) s``.

    The decomposition is in fp64. In fp32 its error, which small singular values multiply by up to
    ``g(0)`` squared, would be up to 8e-3 of the result where they decay like a power, in fp64 it
    is that of the fp32 Gram matrix: up to 2e-4.

    A block that is not finite gives NaN. Where the decomposition does not converge, the standard
    form takes its place; the block alone decides that.

    Args:
        x: One block, ``(a, b)`` fp32 with ``a <= b``, of norm at most 1.
        coefficients: The triples of all steps.
        scratch: Memory to work in.
        products: How to multiply.
    """
    gram, vectors, scaled, factor = (
        scratch.gram, scratch.polynomial, scratch.product, scratch.factor,
    )  # fmt: skip
    products.gram(x, gram)
    if not bool(gram.whole.isfinite().all()):
        x.fill_(math.nan)
        return
    try:
        squares, directions = torch.linalg.eigh(gram.whole.double())
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        iterate(x, coefficients, [1] * len(coefficients), scratch, products)
        return
    vectors.whole.copy_(directions.mT)
    scaled.whole.copy_((directions * effect(squares.clamp_min_(0), coefficients)).mT)
    products.multiply_to_symmetric(scaled, vectors, factor)
    products.apply(x, 0.0, factor.whole, scratch.columns)


def effect(squares: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    """Return what all steps multiply singular values by, given the squares of these, fp64."""
    factor = torch.ones_like(squares)
    for a, b, c in coefficients:
        step = a + b * squares + c * squares.square()
        factor, squares = factor * step, squares * step.square()
    return factor
