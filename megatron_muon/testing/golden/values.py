"""Megatron's golden file: ``golden_values_{environment}_{platform}.json``.

The file maps a metric name to ``start_step``, ``end_step``, ``step_interval`` and ``values`` (step,
as a string, to a number rounded to five decimals). Megatron's loader refuses any other key, so
what is known about the recording lies in a sidecar (see ``provenance``).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from megatron_muon.errors import ConfigurationError
from megatron_muon.testing.golden.jsonfile import (
    as_integer,
    as_number,
    as_object,
    parse_object,
    read_text,
    require_keys,
    write_atomically,
)
from megatron_muon.testing.golden.series import DECIMALS, MetricSeries

_METRIC_KEYS = ("start_step", "end_step", "step_interval", "values")
_NAME = re.compile(
    r"golden_values_(?P<environment>[A-Za-z0-9-]+)_(?P<platform>[A-Za-z0-9_-]+)\.json"
)


@dataclass(frozen=True, slots=True)
class GoldenValues:
    """The metrics of one golden file, finite, evenly spaced and rounded.

    Attributes:
        metrics: One series a metric, in the order of the file.
        where: File name for messages; not part of the value.
    """

    metrics: tuple[MetricSeries, ...]
    where: str = field(default="golden values", compare=False)

    def __post_init__(self) -> None:
        names = [series.name for series in self.metrics]
        if not names or len(set(names)) != len(names):
            raise ConfigurationError(
                f"{self.where}: got the metrics {names}; expected at least one, each once"
            )
        for series in self.metrics:
            _check_golden_series(series, self.where)

    @classmethod
    def of(cls, series: Iterable[MetricSeries], where: str = "golden values") -> Self:
        """Round the series of a run to what a golden file keeps."""
        return cls(tuple(one.rounded() for one in series), where)

    @classmethod
    def from_json(cls, text: str, where: str) -> Self:
        """Read and validate the JSON of a golden file.

        Raises:
            ConfigurationError: Something is not as the format wants it; the message names
                ``where``, the metric and what was expected.
        """
        parsed = parse_object(text, where)
        return cls(tuple(_parse_metric(where, *item) for item in parsed.items()), where)

    def to_json(self) -> str:
        """The text of the golden file, ending in a newline."""
        metrics = {
            series.name: {
                "start_step": series.steps[0],
                "end_step": series.steps[-1],
                "step_interval": _step_interval(series, self.where),
                "values": {str(step): value for step, value in series.as_mapping().items()},
            }
            for series in self.metrics
        }
        return json.dumps(metrics, indent=4, allow_nan=False) + "\n"

    def fingerprint(self) -> str:
        """SHA-256 of the numbers, independent of white space and line ends."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def metric(self, name: str) -> MetricSeries:
        """The series of one metric; a missing one is an error that lists those there are."""
        for series in self.metrics:
            if series.name == name:
                return series
        have = [series.name for series in self.metrics]
        raise ConfigurationError(f"{self.where}: no metric {name!r}; the file has {have}")


def golden_path(case_dir: Path, environment: str, platform: str) -> Path:
    """Where a case keeps its golden file for one environment (dev, lts) and platform (cpu)."""
    path = case_dir / f"golden_values_{environment}_{platform}.json"
    check_golden_name(path)
    return path


def check_golden_name(path: Path) -> None:
    """Raise unless the file is named as Megatron looks it up."""
    if _NAME.fullmatch(path.name) is None:
        raise ConfigurationError(
            f"{path}: expected the name golden_values_ENVIRONMENT_PLATFORM.json, for example "
            "golden_values_dev_cpu.json"
        )


def load_golden(path: Path) -> GoldenValues:
    """Read a golden file, ours or one of Megatron's."""
    return GoldenValues.from_json(read_text(path), str(path))


def save_golden(golden: GoldenValues, path: Path) -> None:
    """Write a golden file, whole or not at all."""
    check_golden_name(path)
    write_atomically(path, golden.to_json())


def _parse_metric(where: str, name: str, value: object) -> MetricSeries:
    at = f"{where}: metric {name!r}"
    fields = as_object(value, at)
    require_keys(fields, _METRIC_KEYS, at)
    start, end, interval = (as_integer(fields[key], f"{at}: {key}") for key in _METRIC_KEYS[:3])
    if interval < 1 or end < start:
        raise ConfigurationError(
            f"{at}: got start_step {start}, end_step {end}, step_interval {interval}; expected "
            "start_step <= end_step and a step_interval of at least 1"
        )
    values = {
        _parse_step(step, at): _parse_value(number, f"{at}: step {step}")
        for step, number in as_object(fields["values"], f"{at}: values").items()
    }
    _check_steps(values, start, end, interval, at)
    return MetricSeries.from_mapping(name, values, source="golden", decimals=DECIMALS)


def _parse_step(step: str, at: str) -> int:
    if not step.isascii() or not step.isdigit() or str(int(step)) != step:
        raise ConfigurationError(f"{at}: got the step {step!r}; expected a number such as '10'")
    return int(step)


def _parse_value(value: object, at: str) -> float:
    if isinstance(value, str):
        raise ConfigurationError(
            f"{at}: got {value!r}; expected a finite number. A metric that starts later (such as "
            "iteration-time) begins at its first measured step, with no NaN before it"
        )
    return as_number(value, at)


def _check_steps(steps: Iterable[int], start: int, end: int, interval: int, at: str) -> None:
    """Accept each ``interval`` from ``start`` on, or, as Megatron logs, ``start`` and multiples."""
    got = sorted(steps)
    every = range(start, end + 1, interval)
    logged = [start, *(step for step in range(start + 1, end + 1) if step % interval == 0)]
    if got in (list(every), logged):
        return
    missing = sorted(set(every) - set(got))
    extra = sorted(set(got) - set(every))
    raise ConfigurationError(
        f"{at}: steps {missing[:5]} are missing and {extra[:5]} are not expected, with start_step "
        f"{start}, end_step {end} and step_interval {interval}"
    )


def _check_golden_series(series: MetricSeries, where: str) -> None:
    at = f"{where}: metric {series.name!r}"
    step = series.first_non_finite_step()
    if step is not None:
        raise ConfigurationError(
            f"{at}: step {step} is {series.as_mapping()[step]}; expected finite numbers only"
        )
    _step_interval(series, where)
    for step, value in series.as_mapping().items():
        if round(value, DECIMALS) != value:
            raise ConfigurationError(
                f"{at}: step {step} is {value!r}; expected at most {DECIMALS} decimals"
            )


def _step_interval(series: MetricSeries, where: str) -> int:
    """Interval of evenly spaced steps; the first may be off, as Megatron also logs step 1."""
    steps = series.steps
    if len(steps) == 1:
        return 1
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    interval = min(gaps[1:] or gaps)
    _check_steps(steps, steps[0], steps[-1], interval, f"{where}: metric {series.name!r}")
    return interval
