"""One metric of one run: a number per training step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from megatron_muon.errors import ConfigurationError

type Source = Literal["memory", "tensorboard", "console", "golden"]
"""Where the numbers come from, which decides how exact they are.

``tensorboard`` holds the float32 of the step itself. ``console`` holds seven printed digits of an
average over Megatron's log interval. ``golden`` holds five decimals.
"""

DECIMALS = 5
"""Decimals a golden file keeps, as in Megatron."""


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """The values of one metric at increasing steps.

    A run's series may hold NaN or infinity, since a run may produce them; a golden one may not.

    Attributes:
        name: Metric as tensorboard tags it, for example ``lm loss``.
        steps: Training iterations, strictly increasing.
        values: One number per step, at the precision of the source.
        source: Where the numbers come from.
        decimals: Decimals the values were rounded to; None where they were not rounded.
    """

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    source: Source = "memory"
    decimals: int | None = None

    def __post_init__(self) -> None:
        if not self.steps:
            raise ConfigurationError(f"metric {self.name!r} has no steps; expected at least one")
        if len(self.steps) != len(self.values):
            raise ConfigurationError(
                f"metric {self.name!r} has {len(self.steps)} steps and {len(self.values)} values; "
                "expected as many values as steps"
            )
        for before, after in itertools.pairwise(self.steps):
            if after <= before:
                raise ConfigurationError(
                    f"metric {self.name!r}: step {after} follows step {before}; "
                    "expected strictly increasing steps"
                )

    @classmethod
    def from_mapping(
        cls,
        name: str,
        values: Mapping[int, float],
        *,
        source: Source = "memory",
        decimals: int | None = None,
    ) -> Self:
        """Build a series from step -> value, in the order of the steps."""
        steps = tuple(sorted(values))
        return cls(name, steps, tuple(values[step] for step in steps), source, decimals)

    @property
    def first(self) -> float:
        """Value of the first step."""
        return self.values[0]

    @property
    def last(self) -> float:
        """Value of the last step."""
        return self.values[-1]

    def as_mapping(self) -> dict[int, float]:
        """Step -> value."""
        return dict(zip(self.steps, self.values, strict=True))

    def rounded(self, decimals: int = DECIMALS) -> Self:
        """The same series with every value rounded to ``decimals`` decimals."""
        values = tuple(round(value, decimals) for value in self.values)
        return replace(self, values=values, decimals=decimals)

    def since(self, step: int) -> Self:
        """The part of the series from ``step`` on, for example what a resumed run repeats."""
        kept = {at: value for at, value in self.as_mapping().items() if at >= step}
        if not kept:
            raise ConfigurationError(
                f"metric {self.name!r} ends at step {self.steps[-1]}; "
                f"nothing is left from step {step} on"
            )
        return replace(self, steps=tuple(kept), values=tuple(kept.values()))

    def first_non_finite_step(self) -> int | None:
        """First step whose value is NaN or infinite, or None."""
        for step, value in zip(self.steps, self.values, strict=True):
            if not math.isfinite(value):
                return step
        return None
