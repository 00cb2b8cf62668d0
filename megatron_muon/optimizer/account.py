"""What one step of this rank did, counted where it happens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_muon.collectives.exchange import Traffic


@dataclass(slots=True)
class StepAccount:
    """Work, traffic and time of one step.

    Attributes:
        newton_schulz_calls: Blocks orthogonalized.
        newton_schulz_flops: Their flops in the standard form.
        traffic: Collectives and bytes.
        seconds: Wall-clock seconds by phase.
    """

    newton_schulz_calls: int = 0
    newton_schulz_flops: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, other: StepAccount) -> None:
        """Add what another optimizer of this rank did in the same step."""
        self.newton_schulz_calls += other.newton_schulz_calls
        self.newton_schulz_flops += other.newton_schulz_flops
        self.traffic.add(other.traffic)
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def clear(self) -> None:
        """Start the account of the next step; who holds a part of it goes on counting in it."""
        self.newton_schulz_calls = self.newton_schulz_flops = 0
        self.traffic.clear()
        self.seconds.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
