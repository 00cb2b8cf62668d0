"""The arithmetic of the products inside Newton-Schulz."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from emerging_optimizers.utils import fp32_matmul_precision


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How matrices are held, multiplied and rounded.

    Attributes:
        name: ``fp32``; ``tf32`` for fp32 matrices whose factors may be shortened; ``bf16``; or
            ``bf16_in_fp32`` for numbers of bf16 that are held and multiplied as fp32. A product of
            two bf16 numbers is exact in fp32, so that with each result rounded to bf16 this gives
            what a bf16 product with fp32 sums gives, on processors without one.
        dtype: What matrices are held in.
        rounds: Whether each result has to be rounded to bf16 by hand.
        largest_growth: How far the Gram form lets errors of the Gram matrix grow before it computes
            the matrix anew, see :func:`.iteration.segment_lengths`. With the values here it errs on
            matrices of rank one and of decaying spectra by at most 1.3 times as much as the
            standard form in fp32 with quintic, and by no more than it in bf16. With the other sets
            of bf16 it is 0.8 to 1.04 times as much.
    """

    name: Literal["fp32", "tf32", "bf16", "bf16_in_fp32"]
    dtype: torch.dtype
    rounds: bool
    largest_growth: float


FP32 = Arithmetic("fp32", torch.float32, False, 20.0)
TF32 = Arithmetic("tf32", torch.float32, False, 4.0)
BF16 = Arithmetic("bf16", torch.bfloat16, False, 4.0)
BF16_IN_FP32 = Arithmetic("bf16_in_fp32", torch.float32, True, 4.0)


def choose_arithmetic(precision: str, device_type: str) -> Arithmetic:
    """Return the arithmetic of a matmul precision on a kind of device.

    Args:
        precision: As in ``torch.set_float32_matmul_precision``: ``medium`` for bf16 products,
            ``high`` for fp32 products that may run in TF32, ``highest`` for fp32 products.
        device_type: ``cpu`` or ``cuda``.
    """
    if precision == "highest":
        return FP32
    if precision == "high":
        return TF32
    return BF16 if device_type != "cpu" or _cpu_multiplies_bf16() else BF16_IN_FP32


def products_in(precision: str) -> AbstractContextManager[None]:
    """Let torch multiply in a matmul precision inside a ``with`` block, whatever is set outside."""
    # Under "medium" torch would shorten the factors of fp32 products; bf16 ones do not read it.
    context: AbstractContextManager[None] = fp32_matmul_precision(
        "highest" if precision == "medium" else precision
    )
    return context


@cache
def _cpu_multiplies_bf16() -> bool:
    """Whether this processor has bf16 products; without, they run at a thirtieth of fp32's rate."""
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
