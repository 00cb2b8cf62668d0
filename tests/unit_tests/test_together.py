"""Newton-Schulz of a matrix that no rank holds whole, against the oracle, in every precision."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

from megatron_muon.bookkeeping.matrix import LogicalMatrix, whole
from megatron_muon.collectives.arena import Arena
from megatron_muon.optimizer import together
from megatron_muon.optimizer.account import StepAccount
from megatron_muon.optimizer.station import EngineSettings, Station
from megatron_muon.orthogonalize.arithmetic import BF16, BF16_IN_FP32, choose_arithmetic
from megatron_muon.orthogonalize.newton_schulz import Orthogonalization
from megatron_muon.testing.oracle import COEFFICIENTS, orthogonalize, relative_error
from megatron_muon.testing.ranks import run_ranks

NUM_RANKS = 2
SHAPES = {0: (48, 20), 1: (20, 48)}
SCALES = (1.0, 0.0, 1e-30, 1e30, math.inf)
ARITHMETICS = {"bf16": BF16, "bf16 in fp32": BF16_IN_FP32}


def matrix_of(dim):
    rows, columns = SHAPES[dim]
    x = torch.randn((rows, columns), generator=torch.Generator().manual_seed(dim))
    return x, LogicalMatrix("w", (rows, columns), whole(rows), tp_dim=dim, tp_size=NUM_RANKS)


def shard_of_the_update(dim, precision, arithmetic=None, scale=1.0, nan_rank=None):
    """Return this rank's shard, and the precisions torch multiplied in between reductions."""
    import torch.distributed as dist

    settings = Orthogonalization(
        num_steps=5, coefficient_type="quintic", scale_mode="shape_scaling",
        extra_scale_factor=1.0, matmul_precision=precision,
    )  # fmt: skip
    settings = EngineSettings(orthogonalization=settings, mode="distributed")
    station = Station(None, dist.group.WORLD, settings, Arena(), StepAccount(), torch.device("cpu"))
    x, matrix = matrix_of(dim)
    shard = (scale * x).chunk(NUM_RANKS, dim)[dist.get_rank()].clone()
    if dist.get_rank() == nan_rank:
        shard[0, 0] = math.nan
    seen, reduce = [], together.reduce_flat

    def reduce_and_look(tensor, *rest):
        seen.append(torch.get_float32_matmul_precision())
        reduce(tensor, *rest)

    choose = choose_arithmetic if arithmetic is None else lambda *_: arithmetic
    with (
        mock.patch.object(together, "reduce_flat", reduce_and_look),
        mock.patch.object(together, "choose_arithmetic", choose),
    ):
        together.orthogonalize_together(station, shard, matrix)
    return shard, seen[2:]


def compute():
    results = {}
    for outside in ("highest", "medium"):
        torch.set_float32_matmul_precision(outside)
        for dim in SHAPES:
            for precision in ("highest", "high", "medium"):
                results[outside, dim, precision] = shard_of_the_update(dim, precision)
            for name, arithmetic in ARITHMETICS.items():
                results[outside, dim, name] = shard_of_the_update(dim, "medium", arithmetic)
        assert torch.get_float32_matmul_precision() == outside
    for scale in SCALES:
        results["scale", scale] = shard_of_the_update(1, "highest", scale=scale)
    for rank in range(NUM_RANKS):
        results["nan", rank] = shard_of_the_update(1, "highest", nan_rank=rank)
    return results


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    return run_ranks(compute, NUM_RANKS, timeout_s=60, logs=tmp_path_factory.mktemp("ranks"))


def update_of(computed, dim, key):
    return torch.cat([results[key][0] for results in computed], dim)


def oracle_of(dim):
    x, _ = matrix_of(dim)
    size = max(1.0, SHAPES[dim][0] / SHAPES[dim][1]) ** 0.5
    return orthogonalize(x.double(), COEFFICIENTS["quintic"]) * size


@pytest.mark.distributed
@pytest.mark.parametrize("outside", ["highest", "medium"])
@pytest.mark.parametrize("dim", SHAPES)
def test_precision_is_that_of_the_setting(computed, dim, outside):
    """Whatever precision is set outside; medium multiplies in bf16."""
    for precision, inside in (("highest", "highest"), ("high", "high"), ("medium", "highest")):
        for results in computed:
            assert results[outside, dim, precision][1] == [inside] * 5
    expected = oracle_of(dim)
    got = update_of(computed, dim, (outside, dim, "highest"))
    assert relative_error(got, expected) < 5e-6
    error = relative_error(update_of(computed, dim, (outside, dim, "medium")), expected)
    assert 1e-3 < error < 3e-2


@pytest.mark.distributed
@pytest.mark.parametrize("dim", SHAPES)
def test_bf16_is_the_same_on_processors_without_it(computed, dim):
    """Held in fp32 and rounded, results are numbers of bf16 and as far from the oracle."""
    errors = []
    for name in ("bf16", "bf16 in fp32"):
        got = update_of(computed, dim, ("highest", dim, name))
        size = max(1.0, SHAPES[dim][0] / SHAPES[dim][1]) ** 0.5
        plain = (got.double() / size).float()
        torch.testing.assert_close(plain, plain.bfloat16().float(), rtol=1e-6, atol=0)
        errors.append(relative_error(got, oracle_of(dim)))
    assert errors[1] == pytest.approx(errors[0], rel=0.5)
    assert min(errors) > 1e-3


@pytest.mark.distributed
def test_the_size_of_the_input_does_not_matter(computed):
    expected = update_of(computed, 1, ("scale", 1.0))
    for scale in (1e-30, 1e30):
        got = update_of(computed, 1, ("scale", scale))
        assert relative_error(got, expected.double()) < 5e-6


@pytest.mark.distributed
def test_zero_stays_zero_and_what_is_not_finite_becomes_nan_on_every_rank(computed):
    assert not update_of(computed, 1, ("scale", 0.0)).any()
    assert update_of(computed, 1, ("scale", math.inf)).isnan().all()
    for rank in range(NUM_RANKS):
        assert update_of(computed, 1, ("nan", rank)).isnan().all()
