"""Newton-Schulz of a block by its parts, added by hand, against the oracle and the whole block.

Relative Frobenius errors, measured. Against the polynomial in fp64 a block in parts errs as much as
a whole one: at most 2.2 times in fp32 and 1.13 times with bf16 products. From the whole block's
update that of its parts differs, with fp32 and with bf16 products, by

==================================  ========  ========
random numbers                      1.5e-6    1.0e-2
one eighth of the lines 1000 times  5.0e-6    1.6e-2
singular values from 1 to 1e-4      9.0e-6    4.6e-2
rank one                            1.0e-4    4.3e-2
==================================  ========  ========
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from megatron_muon.orthogonalize.arithmetic import BF16, BF16_IN_FP32, FP32
from megatron_muon.orthogonalize.blocks import orthogonalize_blocks
from megatron_muon.orthogonalize.coefficients import coefficients
from megatron_muon.orthogonalize.parts import BlockPart, part_segments
from megatron_muon.testing.oracle import COEFFICIENTS, orthogonalize, relative_error

QUINTIC = coefficients("quintic", 5)
SHAPES = ((96, 400), (400, 96), (54, 88), (256, 256), (1, 9), (9, 1))
ARITHMETICS = {"fp32": FP32, "bf16": BF16, "bf16 in fp32": BF16_IN_FP32}

# Kind of spectrum: largest difference from the whole block's update in fp32 and with bf16 products.
DIFFERENCES = {
    "random": (3e-6, 1.5e-2),
    "skewed": (1e-5, 2.5e-2),
    "decaying": (2e-5, 6e-2),
    "rank one": (2e-4, 6e-2),
}
FACTORS = {"fp32": 3.0, "bf16": 1.25, "bf16 in fp32": 1.25}
"""How much larger the error of parts may be than that of the whole block."""


@cache
def draw(shape, kind):
    rows, columns = sorted(shape)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator)
    if kind == "skewed":
        x[:, : columns // 8] *= 1000
    if kind in ("decaying", "rank one"):
        left, _ = torch.linalg.qr(torch.randn(rows, rows, generator=generator))
        right, _ = torch.linalg.qr(torch.randn(columns, rows, generator=generator))
        values = torch.logspace(0, -4, rows) if kind == "decaying" else torch.zeros(rows)
        values[0] = 1
        x = (left * values) @ right.T
    return x if shape[0] <= shape[1] else x.T.contiguous()


def in_parts(x, count, arithmetic, left_out=None, own_norm=False):
    """The block from its parts, the sums made here; what is left out is in the first sum alone."""
    dim = 0 if x.shape[0] > x.shape[1] else 1
    slices = torch.tensor_split(x, count, dim)
    parts = [BlockPart(part, tuple(x.shape), QUINTIC, arithmetic) for part in slices]
    sizes = torch.stack([part.size() for part in parts])
    for i, part in enumerate(parts):
        part.normalize(sizes[i : i + 1] if own_norm else sizes)
    for number, _ in enumerate(part_segments(*x.shape, QUINTIC, arithmetic, "cpu")):
        for part in parts:
            part.multiply()
        total = sum(part.gram.float() for i, part in enumerate(parts)
                    if i != left_out or number == 0)  # fmt: skip
        total = total.bfloat16() if arithmetic is not FP32 else total
        for part in parts:
            part.gram.copy_(total)
            part.take_segment()
    updates = [torch.full_like(part, math.nan) for part in slices]
    for part, update in zip(parts, updates, strict=True):
        part.write(update)
    return torch.cat(updates, dim)


def whole_block(x, arithmetic):
    out = torch.empty_like(x)
    orthogonalize_blocks([x], [out], QUINTIC, arithmetic)
    return out


def oracle(x):
    return orthogonalize(x.double(), COEFFICIENTS["quintic"])


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("name", ARITHMETICS)
@pytest.mark.parametrize("kind", DIFFERENCES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_err_as_the_whole_block_does(shape, kind, name, count):
    x, arithmetic = draw(shape, kind), ARITHMETICS[name]
    got, alone, expected = in_parts(x, count, arithmetic), whole_block(x, arithmetic), oracle(x)
    assert torch.equal(got, in_parts(x, count, arithmetic))
    error = relative_error(alone, expected)
    assert relative_error(got, expected) <= max(FACTORS[name] * error, 1e-6)
    assert relative_error(got, alone.double()) <= DIFFERENCES[kind][name != "fp32"]


@pytest.mark.parametrize("name", ARITHMETICS)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_part_left_out_of_a_sum_or_of_the_norm_is_seen(count, name):
    """With lines of different sizes, or parts would have nearly the same norms."""
    x, arithmetic = draw((96, 400), "skewed"), ARITHMETICS[name]
    expected = oracle(x)
    assert relative_error(in_parts(x, count, arithmetic), expected) < 0.03
    assert relative_error(in_parts(x, count, arithmetic, left_out=0), expected) > 0.1
    assert relative_error(in_parts(x, count, arithmetic, own_norm=True), expected) > 0.1


@pytest.mark.parametrize("scale", [1e-30, 1e-38, 1e30])
def test_the_size_of_the_input_does_not_matter(scale):
    x = draw((54, 88), "random")
    expected = in_parts(x, 4, FP32)
    assert relative_error(in_parts(scale * x, 4, FP32), expected.double()) < 1e-5


def test_parts_of_very_different_sizes():
    """One is so small that it vanishes beside the others, and one is zero."""
    x = draw((54, 88), "random").clone()
    x[:, :22] *= 1e-30
    x[:, 22:44] = 0
    got = in_parts(x, 4, FP32)
    assert relative_error(got, oracle(x)) < 1e-5
    assert not got[:, 22:44].any()


def test_zero_stays_zero_and_what_is_not_finite_becomes_nan_in_every_part():
    x = draw((54, 88), "random")
    assert not in_parts(0 * x, 4, FP32).any()
    for value in (math.nan, math.inf, -math.inf):
        for column in (0, 87):
            bad = x.clone()
            bad[3, column] = value
            assert in_parts(bad, 4, FP32).isnan().all()


def test_the_input_is_not_written():
    x = draw((54, 88), "random")
    kept = x.clone()
    in_parts(x, 2, FP32)
    assert torch.equal(x, kept)
