"""Recording a golden file, or refusing to.

A recording is refused unless all of this holds, at the tolerance the case will be held to:

1. the curve moves by at least ten tolerances between its first step and its last;
2. at least one other legitimate run was made (another sharding, a repetition), and all pass;
3. every mutant was run, has a curve with the same finite steps, starts from the same model (the
   loss of step 1, which no update has touched), and *fails*. A mutant that crashed, diverged to
   NaN or began elsewhere fails for a reason that says nothing about the optimizer: it does not
   count.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_muon.errors import ConfigurationError
from megatron_muon.testing.golden.compare import (
    Comparison,
    Kind,
    Precision,
    compare,
    relative_difference,
    tolerance_of,
)
from megatron_muon.testing.golden.jsonfile import write_atomically
from megatron_muon.testing.golden.provenance import (
    Evidence,
    Mutant,
    Processor,
    Provenance,
    installed_versions,
    load_provenance,
    mutant_name,
    sidecar_path,
)
from megatron_muon.testing.golden.series import MetricSeries
from megatron_muon.testing.golden.values import (
    GoldenValues,
    check_golden_name,
    load_golden,
    save_golden,
)


class GoldenRefusedError(ConfigurationError):
    """A golden file that could not tell right from wrong was not written.

    Attributes:
        reasons: Each reason with its numbers.
    """

    def __init__(self, what: str, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"{what}: {'; '.join(reasons)}")


def examine(
    run: MetricSeries,
    *,
    legitimate: Mapping[str, MetricSeries],
    mutants: Mapping[Mutant, MetricSeries],
    kind: Kind,
    precision: Precision | None = None,
) -> Evidence:
    """Measure whether ``run`` can serve as a golden curve.

    Everything is measured against the curve as the file will hold it, rounded.

    Args:
        run: Curve to be recorded.
        legitimate: Other right runs, by a name such as ``TP4xDP1``.
        mutants: Runs that are broken on purpose. A mutant may run at whichever parallel size it
            exists at; the law makes all of them one curve.
        kind: Comparison the file is meant for; not ``exact``, which is for two runs on one machine.
        precision: See :func:`~megatron_muon.testing.golden.compare.tolerance_of`.

    Raises:
        GoldenRefusedError: It cannot; the message holds every reason with its numbers.
    """
    tolerance = tolerance_of(kind, precision)
    if kind == "exact":
        raise ConfigurationError(
            "--kind exact: a golden file is read on other machines, where no run is bitwise the "
            "same; record for cross-sharding or cross-hardware"
        )
    _require_usable(run)
    golden = run.rounded()

    def held(curve: MetricSeries) -> Comparison:
        return compare(curve, golden, kind=kind, precision=precision)

    itself = held(run)
    right = {name: held(curve) for name, curve in legitimate.items()}
    broken = {mutant_name(name, "record"): held(curve) for name, curve in mutants.items()}
    problems = [
        f"rounding to {golden.decimals} decimals moves the run itself by {itself.distance:.2e}, "
        f"more than {tolerance:g}"
    ] * (not itself.passed)
    problems += [f"the legitimate run {n!r}: {c.problem}" for n, c in right.items() if c.problem]
    problems += [f"the mutant {n!r}: {c.problem}" for n, c in broken.items() if c.problem]
    problems += _other_starts(golden, mutants, tolerance)
    evidence = Evidence(
        metric=run.name,
        kind=kind,
        tolerance=tolerance,
        source=run.source,
        movement=relative_difference(golden.first, golden.last),
        legitimate={n: c.distance for n, c in right.items() if not c.problem},
        mutants={n: c.distance for n, c in broken.items() if not c.problem},
    )
    reasons = [*problems, *evidence.weaknesses()]
    if reasons:
        raise GoldenRefusedError(f"no golden values recorded for {run.name!r}", reasons)
    return evidence


def record(
    out: Path,
    run: MetricSeries,
    *,
    legitimate: Mapping[str, MetricSeries],
    mutants: Mapping[Mutant, MetricSeries],
    kind: Kind,
    command: Sequence[str],
    precision: Precision | None = None,
    also: Sequence[MetricSeries] = (),
    date: datetime.date | None = None,
) -> Provenance:
    """Write a golden file and its sidecar, if :func:`examine` finds that it can be trusted.

    Args:
        out: ``golden_values_{environment}_{platform}.json`` in the folder of the case.
        run: Curve to be recorded.
        legitimate: Other right runs, by name.
        mutants: Runs that are broken on purpose.
        kind: Comparison the file is meant for.
        command: Command or flags of the run.
        precision: Precision of the run, for ``cross-sharding``.
        also: Other metrics of the run to keep beside, unjudged (``iteration-time``).
        date: Day of the recording; today where not given.

    Raises:
        GoldenRefusedError: The curve cannot be trusted; nothing is written.
    """
    check_golden_name(out)
    evidence = examine(run, legitimate=legitimate, mutants=mutants, kind=kind, precision=precision)
    golden = GoldenValues.of((run, *also), str(out))
    provenance = Provenance(
        evidence=evidence,
        processor=Processor.of_this_machine(),
        versions=installed_versions(),
        command=tuple(command),
        date=(date or datetime.datetime.now(datetime.UTC).date()).isoformat(),
        values_sha256=golden.fingerprint(),
    )
    # Two files cannot change at once; the fingerprint tells if only one of them did.
    write_atomically(sidecar_path(out), provenance.to_json())
    save_golden(golden, out)
    return provenance


def load_recorded(path: Path) -> tuple[GoldenValues, Provenance]:
    """Read a golden file with its sidecar, and check that they still stand.

    Raises:
        ConfigurationError: The two do not belong together, or the recorded evidence does not meet
            today's rules (a mutant was added, a tolerance changed): record again.
    """
    golden, provenance = load_golden(path), load_provenance(path)
    if golden.fingerprint() != provenance.values_sha256:
        raise ConfigurationError(
            f"{path}: the numbers are not those that {sidecar_path(path).name} was written for; "
            "one of the two was changed by hand or left over: record again"
        )
    weaknesses = provenance.evidence.weaknesses()
    if weaknesses:
        raise GoldenRefusedError(f"{sidecar_path(path)}: record again", weaknesses)
    return golden, provenance


def _require_usable(run: MetricSeries) -> None:
    """Refuse a curve on which the rules have no meaning."""
    what = f"no golden values recorded for {run.name!r}"
    if run.steps[0] != 1:
        raise GoldenRefusedError(
            what,
            [
                f"the run starts at step {run.steps[0]}; expected step 1, whose loss shows that "
                "every run begins from the same model"
            ],
        )
    for step, value in run.rounded().as_mapping().items():
        if value == 0 or not math.isfinite(value):
            raise GoldenRefusedError(
                what, [f"step {step} of the run is {value}; expected finite numbers other than 0"]
            )


def _other_starts(
    golden: MetricSeries, mutants: Mapping[Mutant, MetricSeries], tolerance: float
) -> list[str]:
    """Mutants that differ before the first update, with their numbers."""
    starts = {
        name: relative_difference(curve.first, golden.first)
        for name, curve in mutants.items()
        if curve.steps[0] == golden.steps[0]
    }
    return [
        f"the mutant {name!r} starts {difference:.2e} off, more than {tolerance:g}: it begins from "
        "another model"
        for name, difference in starts.items()
        if difference > tolerance
    ]
