"""Training runs that are broken on purpose, to see that a golden curve can fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from megatron_muon.testing.golden import Mutant

_SKIPPED_OWNER = 1


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
    return changed


def break_step(mutant: Mutant | None) -> None:
    """Break the optimizer's step in this process, for mutants that no flag gives."""
    if mutant == "frozen-weights":
        from megatron.core.optimizer import ChainedOptimizer

        ChainedOptimizer.step_with_ready_grads = _does_nothing
    if mutant == "one-owner-skipped":
        from megatron_muon.optimizer.muon import OwnedMuon

        OwnedMuon.step = _skips_one_owner(OwnedMuon.step)  # type: ignore[method-assign]


def _does_nothing(self: Any) -> bool:
    del self
    return True


def _skips_one_owner(step: Callable[..., Any]) -> Callable[..., Any]:
    def skipping_step(self: Any, closure: Any = None) -> Any:
        from megatron.core import parallel_state

        size = dist.get_world_size(parallel_state.get_data_parallel_group())
        if parallel_state.get_data_parallel_rank() == _SKIPPED_OWNER % size:
            return None
        return step(self, closure)

    return skipping_step
