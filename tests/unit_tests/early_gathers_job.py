"""One rank's part of the tests of gathers that start in the optimizer's step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from megatron_muon.testing.law.build import parallel_state
from megatron_muon.testing.law.case import Case, Outcome
from megatron_muon.testing.law.job import train

Run = tuple[Case, str | None]
"""A case, and what is broken on purpose."""


def run_all(runs: Sequence[Run]) -> list[tuple[Outcome, list[str]]]:
    """Train each case on this rank; return what it holds and the events of its last step."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    seen = []
    for case, fault in runs:
        events: list[str] = []
        with parallel_state(*case.grid), _broken(fault), _watched(events):
            outcome = train(case)
        last = len(events) - events[::-1].index("step")
        seen.append((outcome, events[last:]))
    return seen


@contextlib.contextmanager
def _watched(events: list[str]) -> Iterator[None]:
    """Write down when the optimizer steps, orthogonalizes and starts a gather of matrices."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    from megatron_muon.optimizer.chain import MuonChain
    from megatron_muon.optimizer.station import Station

    step, start = MuonChain.step_with_ready_grads, _ParamAndGradBucketGroup.start_param_sync
    orthogonalize = Station.orthogonalize

    def watched_step(self: Any) -> bool:
        events.append("step")
        result = step(self)
        events.append("step ended")
        return result

    def watched_start(self: Any, force_sync: bool = False) -> None:
        params = [param for bucket in self.buckets for param in bucket.params_list]
        if all(getattr(param, "is_managed_by_layer_wise_optimizer", False) for param in params):
            events.append("gather")
        start(self, force_sync)

    def watched_orthogonalize(self: Any, *args: Any) -> None:
        events.append("orthogonalize")
        orthogonalize(self, *args)

    with (
        mock.patch.object(MuonChain, "step_with_ready_grads", watched_step),
        mock.patch.object(_ParamAndGradBucketGroup, "start_param_sync", watched_start),
        mock.patch.object(Station, "orthogonalize", watched_orthogonalize),
    ):
        yield


@contextlib.contextmanager
def _broken(fault: str | None) -> Iterator[None]:
    from megatron_muon.optimizer.early_gathers import EarlyGathers, GatheredGroup

    if fault == "one matrix too early":
        done = EarlyGathers.done

        def early(self: EarlyGathers, names: Sequence[str]) -> None:
            for left in self._left:
                if len(left) > 1:
                    left.remove(max(left))
            done(self, names)

        with mock.patch.object(EarlyGathers, "done", early):
            yield
    elif fault == "masters not written":
        with mock.patch.object(GatheredGroup, "start", lambda self: self.group.start_param_sync()):
            yield
    else:
        yield
