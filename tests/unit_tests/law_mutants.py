"""Breaking the step on purpose, so that each law is seen to fail."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from tests.unit_tests.law_model import GROUP_ROWS, GROUPS, HEAD


@contextlib.contextmanager
def _patched(target: str, make: Callable[[Any], Any]) -> Iterator[None]:
    module, _, name = target.rpartition(":")
    holder: Any = importlib.import_module(module)
    *path, leaf = name.split(".")
    for part in path:
        holder = getattr(holder, part)
    with mock.patch.object(holder, leaf, make(getattr(holder, leaf))):
        yield


def _skipped_owner(step: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.core import parallel_state

    def skipping(muon: Any, closure: Any = None) -> Any:
        if parallel_state.get_data_parallel_rank() != 1:
            return step(muon, closure)
        return None

    return skipping


def _own_gradient_only(sync: Callable[..., Any]) -> Callable[..., Any]:
    def keep(group: Any, *args: Any, **kwargs: Any) -> None:
        group.param_gather_dispatched = False

    return keep


def _cut_in_rows(cut: Callable[..., Any]) -> Callable[..., Any]:
    return lambda whole, dim, stride, num_ranks: cut(whole, dim, 1, num_ranks)


def _without_decay(apply: Callable[..., Any]) -> Callable[..., Any]:
    return lambda weight, update, lr, weight_decay: apply(weight, update, lr, 0.0)


def _scale_of_whole(block: Callable[..., Any]) -> Callable[..., Any]:
    def scaled(orthogonalization: Any, x: torch.Tensor) -> torch.Tensor:
        is_part = x.shape[0] in (GROUPS * HEAD, GROUPS * (GROUP_ROWS - 2 * HEAD))
        factor = math.sqrt(GROUPS * GROUP_ROWS / max(x.shape)) if is_part else 1.0
        return block(orthogonalization, x) * factor

    return scaled


def _never_advances(advance: Callable[..., Any]) -> Callable[..., Any]:
    return lambda momentum, grad, mu, nesterov: advance(momentum.clone(), grad, mu, nesterov)


_MUON = "megatron_muon.optimizer.muon:"
MUTANTS: Mapping[str | None, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    None: contextlib.nullcontext,
    "skipped owner": lambda: _patched(_MUON + "OwnedMuon.step", _skipped_owner),
    "no average over data-parallel ranks": lambda: _patched(
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_grad_sync",
        _own_gradient_only,
    ),
    "gate and up cut as one": lambda: _patched(_MUON + "cut", _cut_in_rows),
    "no decay": lambda: _patched(_MUON + "apply_update", _without_decay),
    "scale of the whole": lambda: _patched(
        "megatron_muon.orthogonalize.newton_schulz:Orthogonalization.block", _scale_of_whole
    ),
    "momentum never advances": lambda: _patched(_MUON + "advance_momentum", _never_advances),
    "bucket groups of two optimizers": lambda: _patched(
        "megatron.core.distributed.distributed_data_parallel:partition_buckets",
        lambda partition: partition.__wrapped__,
    ),
}
