"""What Muon's step does, counted from outside: flops by torch, collectives by a spy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from megatron_muon.testing.law.case import Collective

_COLLECTIVES = (
    "all_to_all_single", "all_to_all", "all_gather_into_tensor", "all_gather", "all_reduce",
    "reduce_scatter_tensor", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "send",
    "recv", "isend", "irecv", "batch_isend_irecv",
)  # fmt: skip


class StepSpy:
    """Watches the steps of Muon optimizers.

    Attributes:
        steps: The collectives of each step.
        matmul_flops: Flops of all matrix products.
    """

    def __init__(self, counts_flops: bool) -> None:
        self.steps: list[list[Collective]] = []
        self.matmul_flops = 0
        self._counts_flops = counts_flops

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Watch every step of a Muon inside the block, as one step of this spy."""
        from megatron_muon.optimizer.muon import OwnedMuon

        self.steps.append([])
        step = OwnedMuon.step

        def spied(muon: Any, *args: Any, **kwargs: Any) -> Any:
            with self._collectives(), self._flops():
                return step(muon, *args, **kwargs)

        with mock.patch.object(OwnedMuon, "step", spied):
            yield

    @contextlib.contextmanager
    def _flops(self) -> Iterator[None]:
        if not self._counts_flops:
            yield
            return
        with FlopCounterMode(display=False) as counter:
            yield
        self.matmul_flops += counter.get_total_flops()

    @contextlib.contextmanager
    def _collectives(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in _COLLECTIVES:
                spied = self._spied(name, getattr(dist, name))
                stack.enter_context(mock.patch.object(dist, name, spied))
            yield

    def _spied(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def spied(*args: Any, **kwargs: Any) -> Any:
            self.steps[-1].append(_collective(name, args, kwargs))
            return function(*args, **kwargs)

        return spied


def _collective(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collective:
    """Describe one call; one that is not known counts all its tensors as received."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    scratch_nbytes = sum(tensor.nbytes for tensor in tensors)
    if name == "all_to_all_single":
        output, sent, output_splits, input_splits = args
        rank = kwargs["group"].rank()
        own_in = input_splits[rank] * sent.itemsize
        own_out = output_splits[rank] * output.itemsize
        return Collective(name, sent.nbytes - own_in, output.nbytes - own_out, scratch_nbytes)
    if name == "all_gather_into_tensor":
        output, sent = args
        return Collective(name, sent.nbytes, output.nbytes - sent.nbytes, scratch_nbytes)
    if name == "all_reduce":
        return Collective(name, scratch_nbytes, scratch_nbytes, 2 * scratch_nbytes)
    return Collective(name, scratch_nbytes, scratch_nbytes, scratch_nbytes)
