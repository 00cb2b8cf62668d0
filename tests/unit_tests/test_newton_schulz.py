"""Newton-Schulz with the settings of a run, against the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor, muon_utils
from emerging_optimizers.utils import fp32_matmul_precision

from megatron_muon.orthogonalize import newton_schulz
from megatron_muon.orthogonalize.newton_schulz import Orthogonalization
from megatron_muon.testing.oracle import COEFFICIENTS, orthogonalize, relative_error


def settings(**changes):
    return Orthogonalization(
        **{
            "num_steps": 5,
            "coefficient_type": "quintic",
            "scale_mode": "spectral",
            "extra_scale_factor": 1.0,
            "matmul_precision": "highest",
        }
        | changes
    )


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("coefficients", ["quintic", "simple"])
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 9), (9, 1), (4, 33), (48, 48), (96, 32), (32, 96), (70, 210)]
)
def test_block_is_that_of_the_oracle(shape, coefficients):
    x = draw(*shape)
    got = settings(coefficient_type=coefficients).block(x)
    expected = orthogonalize(x.double(), COEFFICIENTS[coefficients]) * math.sqrt(max(shape))
    assert got.dtype == torch.float32
    assert relative_error(got, expected) < 5e-6


def test_bf16_products_stay_near():
    x = draw(64, 96)
    expected = orthogonalize(x.double(), COEFFICIENTS["quintic"]) * math.sqrt(96)
    error = relative_error(settings(matmul_precision="medium").block(x), expected)
    assert 1e-4 < error < 2e-2


def test_matmul_precision_is_put_back():
    before = torch.get_float32_matmul_precision()
    settings(matmul_precision="medium").block(draw(4, 4))
    assert torch.get_float32_matmul_precision() == before


def test_singular_values_lie_in_the_band_of_the_coefficients():
    values = torch.linalg.svdvals(settings(scale_mode="shape_scaling").block(draw(32, 64)))
    assert values.min() > 0.25
    assert values.max() < 1.2


@pytest.mark.parametrize(
    ("mode", "shape", "expected"),
    [
        ("spectral", (8, 2), math.sqrt(8)),
        ("spectral", (2, 8), math.sqrt(8)),
        ("unit_rms_norm", (8, 2), 2.0),
        ("shape_scaling", (8, 2), 2.0),
        ("shape_scaling", (2, 8), 1.0),
    ],
)
def test_scale_comes_from_the_shape(mode, shape, expected):
    assert settings(scale_mode=mode, extra_scale_factor=0.2).scale(*shape) == pytest.approx(
        0.2 * expected
    )


def test_zero_stays_zero():
    assert not settings().block(torch.zeros(5, 3)).any()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_blocks_stay_empty(shape):
    x = torch.empty(shape)
    assert settings().block(x).shape == shape
    assert newton_schulz.orthogonalize(x, COEFFICIENTS["quintic"], "highest").shape == shape
    empty, other = settings().blocks([x, draw(4, 3)])
    assert empty.shape == shape
    assert torch.equal(other, settings().block(draw(4, 3)))


@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
def test_many_blocks_are_those_of_one_each(precision):
    shapes = [(32, 64), (5, 3), (64, 32), (32, 64), (4, 33), (32, 64), (1, 9), (40, 40), (40, 40)]
    xs = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    xs[3], xs[5] = xs[3].T.contiguous().T, xs[5].bfloat16()
    one_by_one = settings(matmul_precision=precision)
    for together in (one_by_one, settings(matmul_precision=precision, batch_nbytes=1)):
        for x, got in zip(xs, together.blocks(xs), strict=True):
            assert got.dtype == torch.float32
            assert torch.equal(got, one_by_one.block(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 33), (96, 32), (70, 210)])
def test_a_plain_function_takes_coefficients(shape, dtype):
    x = draw(*shape).to(dtype)
    steps = list(COEFFICIENTS["simple"][:3])
    got = newton_schulz.orthogonalize(x, steps, "highest")
    assert got.dtype == dtype
    assert got.shape == x.shape
    error = relative_error(got, orthogonalize(x.double(), steps))
    assert error < (5e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("x", [torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, 2)])
def test_other_tensors_are_refused(x):
    with pytest.raises(TypeError, match="fp32 or bf16"):
        newton_schulz.orthogonalize(x, COEFFICIENTS["quintic"], "highest")


def test_input_is_not_written():
    x = draw(8, 4)
    kept = x.clone()
    settings().blocks([x, x])
    assert torch.equal(x, kept)


def test_an_update_may_go_where_its_block_is():
    xs = [draw(16, 6), draw(6, 16, seed=1).T, draw(40, 33, seed=2)]
    expected = settings().blocks(xs)
    assert settings().blocks(xs, xs) is xs
    assert all(map(torch.equal, xs, expected))


# The kernel of emerging-optimizers.

SHAPES = [(1, 5), (5, 1), (32, 64), (64, 32), (100, 300), (300, 100), (128, 128), (256, 1024)]


def stock(x, precision, name="quintic", extra=1.0):
    """The lines of Megatron's TensorParallelMuon."""
    with fp32_matmul_precision(precision):
        update = muon_utils.newton_schulz(x, 5, name)
    return update * get_muon_scale_factor(*x.shape, mode="spectral") * extra


@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
@pytest.mark.parametrize("extra", [1.0, 0.2])
def test_exact_is_emerging_optimizers_to_the_bit(precision, extra):
    xs = [draw(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    expected = [stock(x, precision, extra=extra) for x in xs]
    changes = {"matmul_precision": precision, "extra_scale_factor": extra}
    exact = settings(kernel="exact", **changes)
    assert all(map(torch.equal, exact.blocks(xs), expected))
    scattered = [torch.cat([x, x], dim=1)[:, x.shape[1] :] for x in xs]  # of a fused weight
    assert all(map(torch.equal, exact.blocks(scattered, scattered), expected))
    # The control: the kernels that are chosen by shape find other bits.
    assert not all(map(torch.equal, settings(**changes).blocks(xs), expected))


@pytest.mark.parametrize("name", ["simple", "polar_express"])
def test_exact_takes_every_set(name):
    x = draw(48, 96)
    exact = settings(kernel="exact", coefficient_type=name)
    assert torch.equal(exact.block(x), stock(x, "highest", name))
    assert exact.block(torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("kernel", ["standard", "gram", "eigh"])
def test_a_kernel_can_be_asked_for(kernel):
    x = draw(96, 200)
    got = settings(kernel=kernel, scale_mode="shape_scaling").block(x)
    assert relative_error(got, orthogonalize(x.double(), COEFFICIENTS["quintic"])) < 2e-5
    others = {"standard", "gram", "eigh", "exact"} - {kernel}
    for other in others:
        assert not torch.equal(settings(kernel=other, scale_mode="shape_scaling").block(x), got)
