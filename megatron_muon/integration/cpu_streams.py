"""Streams and events on the CPU, which runs everything in program order: waiting is already done.

They are classes, not instances or functions, because Megatron and its users write them in
annotations, derive from them and ask ``isinstance``.
"""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import Any, Self

import torch

CPU = torch.device("cpu")


class CpuStream:
    """Stands for ``torch.cuda.Stream``: work is finished when the call that started it returns."""

    cuda_stream = 0
    device = CPU
    priority = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        del device, priority, kwargs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: the other stream's work has been done."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: the event has happened."""

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Return ``event``, or a new one, recorded now."""
        event = event or CpuEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Do nothing: there is no work left."""

    def query(self) -> bool:
        """Say that all work is done."""
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the only priority there is."""
        return (0, 0)


class CpuEvent:
    """Stands for ``torch.cuda.Event``; keeps the second at which it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self._second = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        del stream
        self._second = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Do nothing: it has happened."""

    def query(self) -> bool:
        """Say that it has happened."""
        return True

    def synchronize(self) -> None:
        """Do nothing: it has happened."""

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Milliseconds from this event to ``end_event``."""
        return (end_event._second - self._second) * 1e3


class CpuStreamContext(contextlib.AbstractContextManager[None]):
    """Stands for ``torch.cuda.stream(stream)``: there is one stream, so nothing is selected."""

    def __init__(self, stream: Any = None) -> None:
        del stream

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None
