"""Masters of MXFP8 weights start from what the weights are, loaded before the optimizer or not."""

from __future__ import annotations

import contextlib
import io
import logging
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from megatron_muon.integration import quantized
from megatron_muon.integration.cpu_mxfp8_tensor import CpuMXFP8Tensor
from megatron_muon.testing.law.build import masters, parallel_state, parameters
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests.mxfp8_job import MuonRun, _optimizer, _wrapped

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

WAYS = {
    "owner": MuonRun(gather=True),
    # The scalar optimizer, which is Megatron's, has an MXFP8 weight.
    "owner, head": MuonRun(gather=True, mxfp8_head=True),
    "flat, overlapped": MuonRun(gather=True, layout="flat", overlap=True),
    "none": MuonRun(gather=True, layout=None),
}
KEPT = "stale values used"


@dataclass
class Seen:
    """What a rank saw.

    Attributes:
        loaded: Names of the MXFP8 weights that were loaded.
        made: What MXFP8 weights were made of, by name.
        weights: What they stand for when the optimizer is built.
        masters: Pieces of the masters that this rank holds.
        said: Warnings.
    """

    loaded: list[str]
    made: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    masters: dict[str, list[tuple[int, torch.Tensor]]]
    said: list[str]


def look(runs, faults):
    """Build each run's optimizer after every other MXFP8 weight was loaded."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    with parallel_state(1):
        return [look_at(run, fault) for run, fault in zip(runs, faults, strict=True)]


def look_at(run, fault):
    chunks = _wrapped(run)
    weights = {n: p for n, p in parameters(chunks) if isinstance(p, CpuMXFP8Tensor)}
    made = {name: p.get_high_precision_init_val().clone() for name, p in weights.items()}
    loaded = sorted(weights)[::2]
    for i, name in enumerate(loaded):
        generator = torch.Generator().manual_seed(i)
        weights[name].data.copy_(torch.randn(made[name].shape, generator=generator).bfloat16())
    # What is loaded as it was is not another weight.
    for name in sorted(weights)[1::2]:
        weights[name].data.copy_(made[name])
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    quantized.logger.addHandler(handler)
    never = mock.patch.object(quantized, "forget_stale_initial_value", return_value=False)
    with contextlib.redirect_stdout(io.StringIO()), never if fault else contextlib.nullcontext():
        optimizer = _optimizer(run, chunks)
    quantized.logger.removeHandler(handler)
    values = {name: param.dequantize().float() for name, param in weights.items()}
    return Seen(loaded, made, values, masters(optimizer, chunks)[0], said)


@pytest.fixture(scope="module")
def ranks():
    runs = [*WAYS.values(), WAYS["owner"]]
    found = run_ranks(look, 2, runs, [*len(WAYS) * [False], True], timeout_s=90.0)
    return {name: [rank[i] for rank in found] for i, name in enumerate([*WAYS, KEPT])}


def started_from(ranks, which):
    """Return the weights whose masters are, to the last bit, those of ``which``."""
    pieces = {}
    for rank in ranks:
        for name, found in rank.masters.items():
            pieces.setdefault(name, {}).update(found)
    return {
        name for name, value in getattr(ranks[0], which).items()
        if torch.equal(torch.cat([p for _, p in sorted(pieces[name].items())]),
                       value.float().flatten())
    }  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_masters_of_loaded_weights_start_from_them_and_others_from_bf16(ranks, name):
    loaded = set(ranks[name][0].loaded)
    others = ranks[name][0].made.keys() - loaded
    assert len(loaded) == (5 if "head" in name else 4)
    assert started_from(ranks[name], "weights") == loaded
    assert started_from(ranks[name], "made") == others


@pytest.mark.parametrize("name", WAYS)
def test_it_is_said_once(ranks, name):
    first, second = ranks[name]
    assert len(first.said) == 1
    example, _, rest = first.said[0].partition(" and ")
    assert example in first.loaded
    assert rest.startswith(f"{len(first.loaded) - 1} more MXFP8 weights were changed")
    assert not second.said


def test_stale_values_are_noticed(ranks):
    assert started_from(ranks[KEPT], "made") == ranks[KEPT][0].made.keys()
    assert not started_from(ranks[KEPT], "weights")
