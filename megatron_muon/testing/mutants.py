"""Training runs that are broken on purpose, to see that a golden curve can fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.testing.golden import Mutant

_SKIPPED_OWNER = 1
_MXFP8_FLAGS = {
    "--fp8-format": 1, "--fp8-recipe": 1, "--fp8-param-gather": 0,
    "--reuse-grad-buf-for-mxfp8-param-ag": 0,
}  # fmt: skip
"""Flags that make weights MXFP8, each with the number of its values."""


def mutant_flags(mutant: Mutant | None, flags: Sequence[str]) -> list[str]:
    """Return the flags with those of a mutant that a user could give by mistake."""
    changed = list(flags)
    if mutant == "adamw-for-muon":
        changed[changed.index("muon")] = "adam"
        report = changed.index("--muon-report") if "--muon-report" in changed else None
        if report is not None:
            del changed[report : report + 2]
    if mutant == "blockwise-tp":
        changed += ["--muon-tp-mode", "blockwise"]
    if mutant == "unsplit-qkv":
        changed += ["--muon-no-split-qkv"]
    if mutant == "unquantized-weights":
        for flag, num_values in _MXFP8_FLAGS.items():
            place = changed.index(flag)
            del changed[place : place + 1 + num_values]
    return changed


def break_step(mutant: Mutant | None) -> None:
    """Break the optimizer's step in this process, for mutants that no flag gives."""
    if mutant == "frozen-weights":
        from megatron.core.optimizer import ChainedOptimizer

        ChainedOptimizer.step_with_ready_grads = _does_nothing
    if mutant == "one-owner-skipped":
        from megatron_muon.optimizer.muon import OwnedMuon

        OwnedMuon.step = without_effect(  # type: ignore[method-assign]
            OwnedMuon.step, _SKIPPED_OWNER
        )
    if mutant == "update-divided-by-loss-scale":
        from megatron_muon.optimizer.chain import MuonChain

        MuonChain.step_with_ready_grads = divided_by_loss_scale(  # type: ignore[method-assign]
            MuonChain.step_with_ready_grads
        )
    if mutant == "gradients-left-scaled":
        from megatron.core.optimizer.grad_scaler import DynamicGradScaler

        DynamicGradScaler.inv_scale = property(lambda self: torch.ones_like(self.scale))
    if mutant == "unstaged-weights":
        from megatron_muon.optimizer.param_sync import Staging

        Staging.stage = _does_nothing  # type: ignore[method-assign,assignment]


def _does_nothing(self: Any) -> bool:
    del self
    return True


def without_effect(step: Callable[..., Any], dp_rank: int) -> Callable[..., Any]:
    """Wrap a Muon's step so that one data-parallel rank ends it with the weights it had.

    The rank takes part in every collective: others may orthogonalize what it owns.

    Args:
        step: ``OwnedMuon.step``.
        dp_rank: The rank, taken modulo the number of ranks.
    """

    def skipping_step(self: Any, closure: Any = None) -> Any:
        from megatron.core import parallel_state

        size = dist.get_world_size(parallel_state.get_data_parallel_group())
        skips = parallel_state.get_data_parallel_rank() == dp_rank % size
        params = [param for group in self.param_groups for param in group["params"]]
        before = [param.detach().clone() for param in params if skips]
        result = step(self, closure)
        for param, old in zip(params, before, strict=False):
            param.data.copy_(old)
        return result

    return skipping_step


def divided_by_loss_scale(step: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap the chain's step so that Muon's learning rate is divided by the loss scale."""

    def step_of_scaled_gradients(self: Any) -> bool:
        from megatron_muon.optimizer.muon import OwnedMuon

        muons = [leaf.optimizer for leaf in self.leaves if isinstance(leaf.optimizer, OwnedMuon)]
        groups = [group for muon in muons for group in muon.param_groups]
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] /= float(self.get_loss_scale())
        result = step(self)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return result

    return step_of_scaled_gradients
