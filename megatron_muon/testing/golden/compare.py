"""Holding a run to a golden curve.

The rule: at *every* step ``|run - golden| <= tolerance * |golden|``. No step may fail, a step that
one of the two lacks is a failure, and so is a NaN or an infinity on either side. Megatron's own
approximate mode lets steps fail and grants a loss 5 %; a model that never learns passes that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from megatron_muon.errors import ConfigurationError
from megatron_muon.testing.golden.series import MetricSeries

type Kind = Literal["exact", "cross-sharding", "cross-hardware"]
"""How two runs are related.

``exact``: one machine and one configuration, or a resumed run: equal at every step.
``cross-sharding``: other parallel sizes, layouts or overlap, from the same initial model.
``cross-hardware``: another processor or other library versions.
"""

type Precision = Literal["bf16", "fp16", "fp32", "mxfp8"]
"""Precision of the run, which decides the tolerance between shardings."""

KINDS: tuple[Kind, ...] = get_args(Kind.__value__)
PRECISIONS: tuple[Precision, ...] = get_args(Precision.__value__)

_CROSS_SHARDING: dict[Precision, float] = {"bf16": 1e-3, "fp16": 5e-4, "fp32": 1e-5, "mxfp8": 4e-4}
_CROSS_HARDWARE = 1e-2


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of holding one curve to another.

    Attributes:
        metric: Metric compared.
        kind: Relation the two runs were held to.
        tolerance: Largest relative difference allowed at any step; 0 for ``exact``.
        distance: Largest relative difference found; infinite where the two cannot be compared.
        step: Where ``distance`` occurs.
        num_steps_outside: Steps that break the rule.
        problem: Why the two cannot be compared at every step; empty if they can.
    """

    metric: str
    kind: Kind
    tolerance: float
    distance: float
    step: int
    num_steps_outside: int
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether every step keeps the rule."""
        return not self.problem and self.num_steps_outside == 0

    @property
    def message(self) -> str:
        """One line: distance, step, kind, tolerance and verdict."""
        verdict = "ok" if self.passed else "FAILED"
        reason = f", {self.problem}" if self.problem else ""
        return (
            f"golden distance {self.distance:.2e} at step {self.step} "
            f"({self.kind}, {self.tolerance:g}): {verdict}{reason}"
        )


def tolerance_of(kind: Kind, precision: Precision | None = None) -> float:
    """Tolerance of a kind.

    Args:
        kind: Relation of the two runs.
        precision: Precision of the run, for ``cross-sharding`` only; bf16 where not given.

    Raises:
        ConfigurationError: An unknown kind or precision, or a precision that has no effect.
    """
    if kind not in KINDS:
        raise ConfigurationError(f"--kind {kind}: expected one of {', '.join(KINDS)}")
    if precision is not None and precision not in PRECISIONS:
        raise ConfigurationError(
            f"--precision {precision}: expected one of {', '.join(PRECISIONS)}"
        )
    if kind == "cross-sharding":
        return _CROSS_SHARDING[precision or "bf16"]
    if precision is not None:
        raise ConfigurationError(
            f"--precision {precision} has no effect on --kind {kind}; it belongs to "
            "--kind cross-sharding: remove it or change the kind"
        )
    return 0.0 if kind == "exact" else _CROSS_HARDWARE


def tolerances_of(kind: Kind) -> tuple[float, ...]:
    """Every tolerance a kind may have, over the precisions."""
    if kind == "cross-sharding":
        return tuple(_CROSS_SHARDING.values())
    return (tolerance_of(kind),)


def compare(
    run: MetricSeries, golden: MetricSeries, *, kind: Kind, precision: Precision | None = None
) -> Comparison:
    """Hold ``run`` to ``golden`` at every step.

    ``exact`` compares at full precision, or at the decimals of a rounded side where there is one.

    Args:
        run: Curve to judge.
        golden: Curve to judge it by.
        kind: Relation of the two runs.
        precision: See :func:`tolerance_of`.

    Raises:
        ConfigurationError: The two are not curves of one metric, or cannot be exactly equal since
            they come from sources of different precision.
    """
    tolerance = tolerance_of(kind, precision)
    if run.name != golden.name:
        raise ConfigurationError(f"cannot compare metric {run.name!r} with {golden.name!r}")
    if kind == "exact":
        run, golden = _at_common_precision(run, golden)
    problem = _problem(run, golden)
    if problem is not None:
        step, text = problem
        return Comparison(run.name, kind, tolerance, math.inf, step, 1, text)
    pairs = list(zip(run.steps, run.values, golden.values, strict=True))
    distance, step = _largest((relative_difference(a, g), at) for at, a, g in pairs)
    outside = sum(not abs(a - g) <= tolerance * abs(g) for _, a, g in pairs)
    return Comparison(run.name, kind, tolerance, distance, step, outside)


def relative_difference(value: float, reference: float) -> float:
    """``|value - reference| / |reference|``; against zero, 0 if equal and infinite if not."""
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf


def _largest(distances: Iterable[tuple[float, int]]) -> tuple[float, int]:
    """Largest distance and the first step at which it occurs."""
    return max(distances, key=lambda item: (item[0], -item[1]))


def _at_common_precision(
    run: MetricSeries, golden: MetricSeries
) -> tuple[MetricSeries, MetricSeries]:
    if {run.source, golden.source} == {"console", "tensorboard"}:
        raise ConfigurationError(
            "--kind exact cannot compare a console log (seven digits, averaged over the log "
            "interval) with tensorboard files (float32 of each step); give two of one sort"
        )
    decimals = [series.decimals for series in (run, golden) if series.decimals is not None]
    if not decimals:
        return run, golden
    return run.rounded(min(decimals)), golden.rounded(min(decimals))


def _problem(run: MetricSeries, golden: MetricSeries) -> tuple[int, str] | None:
    """First step at which the two cannot be compared, and why."""
    ours, theirs = set(run.steps), set(golden.steps)
    missing = sorted(ours ^ theirs)
    if missing:
        step = missing[0]
        side = "the golden values" if step in ours else "the run"
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        return step, f"step {step} is missing from {side}{more}"
    for series, side in ((run, "the run"), (golden, "the golden values")):
        bad = series.first_non_finite_step()
        if bad is not None:
            return bad, f"step {bad} of {side} is {series.as_mapping()[bad]}"
    return None
