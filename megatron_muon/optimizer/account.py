"""What one step of this rank did, counted where it happens."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch.autograd import profiler

from megatron_muon.collectives.exchange import Traffic

PHASES = ("momentum", "exchange", "newton_schulz", "update")
"""The phases of a step."""

TIMER_LEVEL = 2
"""``--timing-log-level`` from which Megatron's timers have the phases."""

Ranges = tuple[Callable[[str], None], Callable[[str], None]]
"""Begins and ends a named range of a profiler; both are told its name."""


@functools.cache
def label_of(phase: str) -> str:
    """Return the name of a phase in timers, traces and ranges."""
    return f"muon-{phase.replace('_', '-')}"


@dataclass(slots=True)
class StepAccount:
    """Work, traffic and time of one step.

    Attributes:
        newton_schulz_calls: Blocks orthogonalized.
        newton_schulz_flops: Their flops in the standard form.
        traffic: Collectives and bytes.
        seconds: Seconds by phase. ``exchange`` is what the step spends on packing, waiting and
            unpacking: what moves under another phase costs nothing there. On CUDA they are those
            of the stream if ``is_read``, and else those of the host that launches.
        events: What happened to which micro-group, in order; ``None`` to note nothing.
        is_read: Whether the seconds are read after each step, which then waits for the device.
        is_on_cuda: Whether the work is done on CUDA.
        ranges: Where phases are shown besides the profiler of torch.
    """

    newton_schulz_calls: int = 0
    newton_schulz_flops: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    seconds: dict[str, float] = field(default_factory=dict)
    events: list[tuple[str, int]] | None = None
    is_read: bool = False
    is_on_cuda: bool = False
    ranges: Ranges | None = None
    _marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def add(self, other: StepAccount) -> None:
        """Add what another optimizer of this rank did in the same step."""
        self.newton_schulz_calls += other.newton_schulz_calls
        self.newton_schulz_flops += other.newton_schulz_flops
        self.traffic.add(other.traffic)
        for name, seconds in other.seconds.items():
            self.add_seconds(name, seconds)

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Add to the time of a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def clear(self) -> None:
        """Start the account of the next step; who holds a part of it goes on counting in it."""
        self.newton_schulz_calls = self.newton_schulz_flops = 0
        self.traffic.clear()
        self.seconds.clear()
        self._marks.clear()
        if self.events is not None:
            self.events.clear()

    def note(self, event: str, micro_group: int) -> None:
        """Note what happens to a micro-group, by its number in its engine's schedule."""
        if self.events is not None:
            self.events.append((event, micro_group))

    def phase(self, name: str) -> Phase:
        """Return a context that adds the time inside to a phase; phases do not nest."""
        return Phase(self, name)

    def settle(self) -> None:
        """Wait for the device and read its clock, if seconds are read."""
        for name, begun, ended in self._marks:
            ended.synchronize()
            self.add_seconds(name, begun.elapsed_time(ended) / 1e3)
        self._marks.clear()


class Phase:
    """The time of one phase, from entering to leaving it; see :meth:`StepAccount.phase`."""

    __slots__ = ("_account", "_begun", "_label", "_name", "_recorded", "_start")

    def __init__(self, account: StepAccount, name: str) -> None:
        """Time a phase of an account."""
        self._account, self._name, self._label = account, name, label_of(name)
        self._recorded: profiler.record_function | None = None
        self._begun: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        account = self._account
        if profiler._is_profiler_enabled:
            # Without a profiler this costs more than all else here.
            self._recorded = profiler.record_function(self._label)
            self._recorded.__enter__()  # type: ignore[no-untyped-call]
        if account.ranges is not None:
            account.ranges[0](self._label)
        if account.is_read and account.is_on_cuda:
            self._begun = _mark()
        self._start = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        account = self._account
        if self._begun is None:
            account.add_seconds(self._name, time.perf_counter() - self._start)
        else:
            account._marks.append((self._name, self._begun, _mark()))
        if account.ranges is not None:
            account.ranges[1](self._label)
        if self._recorded is not None:
            self._recorded.__exit__(kind, error, trace)


def _mark() -> torch.cuda.Event:
    """Mark where the current stream is."""
    mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    mark.record()
    return mark
