"""MXFP8 weights take the bytes they should: no bf16 copy of one lives beside it.

In 0.19.2 every rank keeps the values that its MXFP8 weights were made of, for good, except of those
that it steps with its own ``DistributedOptimizer``.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from unittest import mock

import pytest
import torch

from megatron_muon.integration.cpu_mxfp8_format import BLOCK
from megatron_muon.integration.cpu_mxfp8_tensor import CpuMXFP8Tensor
from megatron_muon.integration.start import measure
from megatron_muon.optimizer import chain
from megatron_muon.optimizer.memory import Memory, largest
from megatron_muon.testing.law.build import parallel_state
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests.mxfp8_job import MuonRun, _Training

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

GATHERED = {
    "owner": MuonRun(gather=True),
    "owner, overlapped, bf16 gradients": MuonRun(gather=True, overlap=True, grads_in_fp32=False),
    "flat, overlapped": MuonRun(gather=True, overlap=True, layout="flat"),
    "no layout": MuonRun(gather=True, layout=None),
    "no layout, overlapped": MuonRun(gather=True, overlap=True, layout=None),
}
USED = MuonRun(gather=False)
KEPT = "initial values kept"
"""A run in which nobody forgets the initial values."""


@dataclass
class Seen:
    """What a rank saw.

    Attributes:
        memory: As measured by the package.
        shapes: Of the MXFP8 weights.
        plain_numel: Elements of all other weights.
        buffer_nbytes: Of the gradient buffers.
        largest_share: Bytes of bf16 weights that the rank with most owns without a layout.
        copies: Shapes of bf16 tensors that belong to no bf16 weight and no gradient buffer and are
            as large as an MXFP8 weight: when the optimizer was made, after a step, after a gather.
    """

    memory: Memory
    shapes: list[tuple[int, int]]
    plain_numel: int
    buffer_nbytes: int
    largest_share: int
    copies: list[list[tuple[int, ...]]]


def look(runs, kept):
    """Train each run for a step on this rank; those in ``kept`` keep the initial values."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    with parallel_state(1):
        return [look_at(run, keeps) for run, keeps in zip(runs, kept, strict=True)]


def look_at(run, keeps):
    before = live_bf16()  # held, so that no new tensor takes the id of one of these
    keeping = mock.patch.object(chain, "forget_initial_values")
    with keeping if keeps else nullcontext():
        training = _Training(run)
    copies = [copies_of(training, before)]
    training._step()
    copies.append(copies_of(training, before))
    training._sync()
    copies.append(copies_of(training, before))
    (ddp,) = training.chunks
    shapes = [tuple(param.shape) for param in training.mxfp8.values()]
    numel = sum(param.numel() for param in training.params.values())
    return Seen(
        memory=measure(training.optimizer, training.chunks),
        shapes=shapes,
        plain_numel=numel - sum(rows * columns for rows, columns in shapes),
        largest_share=largest_share(training),
        buffer_nbytes=sum(b.numel * (4 if run.grads_in_fp32 else 2) for b in ddp.buffers),
        copies=copies,
    )


def largest_share(training):
    owners = training.optimizer.chained_optimizers[0].dp_cp_params_list
    return max((2 * sum(param.numel() for param in owned) for owned in owners or []), default=0)


def copies_of(training, before):
    """Return the shapes of new bf16 tensors that are a copy of an MXFP8 weight by their size."""
    (ddp,) = training.chunks
    plain = [param for param in training.params.values() if not isinstance(param, CpuMXFP8Tensor)]
    known = [*(p.detach() for p in plain), *(buffer.grad_data for buffer in ddp.buffers)]
    known_storages = {tensor.untyped_storage().data_ptr() for tensor in known}
    known_ids = set(map(id, before))
    smallest = min((param.numel() for param in training.mxfp8.values()), default=1 << 62)
    return [
        tuple(tensor.shape) for tensor in live_bf16()
        if tensor.numel() >= smallest and id(tensor) not in known_ids
        and tensor.untyped_storage().data_ptr() not in known_storages
    ]  # fmt: skip


def live_bf16():
    """Return all bf16 tensors of this process that hold bf16 values."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return [t for t in tensors if t.dtype == torch.bfloat16 and type(t) is not CpuMXFP8Tensor]


@cache
def seen():
    runs = [*GATHERED.values(), USED, GATHERED["owner"]]
    ranks = run_ranks(look, 2, runs, [False] * (len(runs) - 1) + [True], timeout_s=90.0)
    names = [*GATHERED, "used", KEPT]
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(names)}


@pytest.mark.parametrize("name", GATHERED)
def test_no_bf16_copy_of_an_mxfp8_weight_lives(name):
    for rank in seen()[name]:
        assert len(rank.shapes) == 8
        assert rank.copies == [[], [], []]


def test_kept_initial_values_are_seen():
    """Shows that the test above can fail."""
    for rank in seen()[KEPT]:
        for copies in rank.copies:
            assert sorted(copies) == sorted(rank.shapes)


@pytest.mark.parametrize("name", GATHERED)
def test_bytes_of_weights_and_gradients(name):
    for rank in seen()[name]:
        memory = rank.memory
        numel = sum(rows * columns for rows, columns in rank.shapes)
        assert memory.num_quantized == 8
        assert memory.quantized_nbytes == 2 * numel + 2 * numel // BLOCK
        assert memory.gradients_nbytes == rank.buffer_nbytes
        # Buffers are padded.
        assert rank.plain_numel * 2 <= memory.plain_nbytes <= rank.plain_numel * 2.2


@pytest.mark.parametrize("name", GATHERED)
def test_every_weight_is_staged_by_one_rank_where_it_goes_through_a_buffer(name):
    ranks = seen()[name]
    numel = sum(rows * columns for rows, columns in ranks[0].shapes)
    staged = [rank.memory.staging_nbytes for rank in ranks]
    if GATHERED[name].layout is None:
        assert staged == [0, 0]
    else:
        # Where there are any, Megatron's own optimizer leaves its bf16 weights to be staged too.
        assert sum(staged) == 2 * (numel + ranks[0].plain_numel)
        assert min(staged) > 0


@pytest.mark.parametrize("name", GATHERED)
def test_a_gather_takes_scratch_where_it_goes_through_no_buffer(name):
    for rank in seen()[name]:
        assert rank.memory.gather_nbytes == (rank.largest_share if name == "no layout" else 0)
    assert (seen()[name][0].memory.gather_nbytes > 0) == (name == "no layout")


def test_weights_that_are_quantized_where_used_are_bf16():
    for rank in seen()["used"]:
        assert rank.memory.num_quantized == rank.memory.quantized_nbytes == 0
        assert rank.memory.staging_nbytes == 0
        assert rank.memory.plain_nbytes >= 2 * rank.plain_numel


def test_the_largest_of_each_number_is_reported():
    memories = [Memory(1, 20, 3, 40, 5, 6), Memory(1, 2, 30, 40, 50, 0)]
    assert largest(memories) == Memory(1, 20, 30, 40, 50, 6)
    assert largest(memories).to_dict() == {
        "parameters_bytes": 50, "gradients_bytes": 40, "staging_bytes": 50,
        "gather_bytes": 6,
    }  # fmt: skip
    assert replace(memories[0], quantized_nbytes=0).to_dict()["parameters_bytes"] == 3
