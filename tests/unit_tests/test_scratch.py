"""Scratch is bounded: live temporaries of a step do not grow with the number of matrices."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_muon import Muon
from megatron_muon.optimizer import flat
from megatron_muon.optimizer.station import EngineSettings

SHAPE = (192, 256)
MATRIX_NBYTES = 4 * SHAPE[0] * SHAPE[1]


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that operators have made and that are still alive."""

    def __init__(self, known):
        super().__init__()
        self.known = {storage(t) for t in known}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and storage(tensor) not in self.known:
                place = tensor.untyped_storage()
                self.live[storage(tensor)] = (StorageWeakRef(place), place.nbytes())
        self.live = {key: row for key, row in self.live.items() if not row[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))
        return result


def storage(tensor):
    return tensor.untyped_storage()._cdata


def optimizer_of(num_matrices, nesterov):
    params = [torch.nn.Parameter(torch.randn(SHAPE)) for _ in range(num_matrices)]
    for param in params:
        param.grad = torch.randn(SHAPE)
    return Muon([{"params": params, "use_muon": True}], nesterov=nesterov), params


def peak_of_a_step(monkeypatch, num_matrices, budget_nbytes, nesterov=True):
    settings = partial(EngineSettings, budget_nbytes=budget_nbytes)
    monkeypatch.setattr(flat, "EngineSettings", settings)
    optimizer, params = optimizer_of(num_matrices, nesterov)
    optimizer.step()  # makes plan, momentum and scratch
    optimizer.close()
    momenta = [optimizer.state[param][flat.MOMENTUM] for param in params]
    grads = [param.grad for param in params]
    with LiveBytes([*params, *momenta, *grads]) as seen:
        optimizer.step()
    return seen.peak


@pytest.mark.parametrize("nesterov", [False, True])
def test_live_temporaries_do_not_grow_with_the_number_of_matrices(monkeypatch, nesterov):
    """Of one matrix: what is orthogonalized in place, and what Newton-Schulz works in."""
    few = peak_of_a_step(monkeypatch, 2, 4096, nesterov)
    many = peak_of_a_step(monkeypatch, 16, 4096, nesterov)
    assert many == few
    assert few <= 5 * MATRIX_NBYTES


def test_live_temporaries_follow_the_budget(monkeypatch):
    """Beside the matrices that are worked on together there is the scratch of one."""
    one = peak_of_a_step(monkeypatch, 16, 4096)
    for together in (4, 8, 16):
        peak = peak_of_a_step(monkeypatch, 16, together * MATRIX_NBYTES)
        assert peak == one + (together - 1) * MATRIX_NBYTES
