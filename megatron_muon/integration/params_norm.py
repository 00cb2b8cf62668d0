"""The norm of all parameters that ``--log-params-norm`` shows."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from megatron_muon.optimizer.chain import MuonChain

_chains: weakref.WeakKeyDictionary[Any, weakref.ref[MuonChain]] = weakref.WeakKeyDictionary()
"""The optimizer of each model chunk; neither is kept alive by being here."""


def watch_params_norm(model_chunks: Sequence[Any], optimizer: MuonChain) -> None:
    """Take the norm of these model chunks' parameters from their optimizer from now on."""
    for chunk in model_chunks:
        _chains[chunk] = weakref.ref(optimizer)


def counts_masters(original: Callable[..., float]) -> Callable[..., float]:
    """Wrap ``calc_params_l2_norm``: each parameter once, from its fp32 master.

    Megatron's own (0.19.2, training/utils/common_utils.py:80) takes the masters of this rank and
    the rounded weights of all other owners, in fp16 the fp16 weights, and with an overlapped
    parameter gather the weights of the step before.
    """

    @functools.wraps(original)
    def calc_params_l2_norm(model: Any, *args: Any, **kwargs: Any) -> float:
        chunks = model if isinstance(model, list) else [model]
        found = _chains.get(chunks[0])
        optimizer = None if found is None else found()
        if optimizer is None:
            return original(model, *args, **kwargs)
        return optimizer.params_norm(chunks)

    return calc_params_l2_norm
