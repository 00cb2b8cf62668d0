"""Reading the curve of a run from what Megatron writes: event files or console lines.

The two are not the same numbers. Tensorboard holds the float32 of each step. A console line holds
seven digits of the average since the previous line; see :func:`series_from_console` for what
follows from that. Exact comparisons, of a resumed run above all, belong to event files.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_muon.errors import ConfigurationError, HostError
from megatron_muon.testing.golden.jsonfile import read_text
from megatron_muon.testing.golden.series import MetricSeries
from megatron_muon.testing.golden.values import load_golden

LM_LOSS = "lm loss"

_EVENT_FILE = "tfevents"

# megatron-core 0.19.2, training/training.py: training_log and print_datetime.
_LINE = re.compile(r"\[\d{4}-\d\d-\d\d [\d:.]+\]\s+iteration\s+(\d+)/\s*(\d+)\s+\|(.*)")
_FIELD = re.compile(r"\s*([^:|]+?):\s*([^|]*?)\s*\|")
_START = "[before the start of training step]"
_SKIPPED = "number of skipped iterations"

_TAGS = {
    "learning rate": "learning-rate",
    "loss scale": "loss-scale",
    "grad norm": "grad-norm",
    "num zeros": "num-zeros",
    "params norm": "params-norm",
}
"""Names on the console that tensorboard spells otherwise."""


@dataclass(frozen=True, slots=True)
class IterationLine:
    """One iteration line of Megatron's console.

    Attributes:
        iteration: Training iteration.
        train_iters: Iterations of the whole training.
        numbers: Tensorboard's name of each metric to the number as printed.
        num_skipped: Iterations skipped since the previous line.
        starts_run: Whether this is the first line after a start or a resume.
    """

    iteration: int
    train_iters: int
    numbers: Mapping[str, float]
    num_skipped: int
    starts_run: bool


def read_curve(path: Path, metric: str = LM_LOSS) -> MetricSeries:
    """Read one metric of a run.

    Args:
        path: A tensorboard folder, one event file, a golden JSON file, or a console log.
        metric: Tensorboard tag of the metric.

    Raises:
        ConfigurationError: The path or the metric is not there, or a step has two values.
    """
    if not path.exists():
        raise ConfigurationError(f"{path}: no such file or folder")
    if path.is_dir() or _EVENT_FILE in path.name:
        return read_tensorboard(path, metric)
    if path.suffix == ".json":
        return load_golden(path).metric(metric)
    return read_console(path, metric)


def read_tensorboard(path: Path, metric: str = LM_LOSS) -> MetricSeries:
    """Read one metric from a folder of event files, or from one event file."""
    files = sorted(path.glob(f"*{_EVENT_FILE}*")) if path.is_dir() else [path]
    if not files:
        raise ConfigurationError(
            f"{path}: no tensorboard event file in it; expected what --tensorboard-dir wrote"
        )
    tags: set[str] = set()
    points: list[tuple[int, float]] = []
    for file in files:
        scalars = _scalars_of(file)
        tags |= scalars.keys()
        points += scalars.get(metric, [])
    if not points:
        raise ConfigurationError(f"{path}: no metric {metric!r}; it has {sorted(tags)}")
    values = _unique(points, f"{path}: metric {metric!r}")
    return MetricSeries.from_mapping(metric, values, source="tensorboard")


def read_console(path: Path, metric: str = LM_LOSS) -> MetricSeries:
    """Read one metric from a console log."""
    return series_from_console(parse_console_log(read_text(path)), metric, where=str(path))


def parse_console_log(text: str) -> tuple[IterationLine, ...]:
    """Find the iteration lines of a console log, with whatever else lies around them.

    Prefixes of launchers are allowed. A field that lacks its closing bar, as at the torn end of a
    killed run, is left out.
    """
    return tuple(_iteration_lines(text.splitlines()))


def series_from_console(
    lines: Sequence[IterationLine], metric: str = LM_LOSS, *, where: str = "console log"
) -> MetricSeries:
    """Curve of one metric, as near to the value of each step as the console allows.

    A console line holds the average of a loss over the iterations since the previous line, so
    only a log interval of 1 shows single steps. Three habits of Megatron are undone:

    1. The first line of a run does not reset the average, so the line of the very next iteration
       averages two; that step reads as twice the average minus the first (good to 2e-6).
    2. A loss that is NaN is left out of its line; it reads as NaN here.
    3. A skipped iteration shows a loss of 0, that of the first step again, or none; the step is
       left out here.

    Raises:
        ConfigurationError: No line has the metric, or a step has two values.
    """
    if not any(metric in line.numbers for line in lines):
        known = sorted({name for line in lines for name in line.numbers})
        have = f"its {len(lines)} iteration lines have {known}" if lines else "no iteration line"
        raise ConfigurationError(f"{where}: no metric {metric!r}; {have}")
    read = _loss_of_step if _is_loss(metric) else _number_of_line
    before = [None, *lines[:-1]]
    found = [
        (line.iteration, read(metric, previous, line))
        for previous, line in zip(before, lines, strict=True)
    ]
    points = [(step, value) for step, value in found if value is not None]
    if not points:
        raise ConfigurationError(f"{where}: metric {metric!r}: every step was skipped")
    values = _unique(points, f"{where}: metric {metric!r}")
    return MetricSeries.from_mapping(metric, values, source="console")


def _iteration_lines(lines: Iterable[str]) -> Iterator[IterationLine]:
    started = False
    for text in lines:
        started = started or _START in text
        match = _LINE.search(text)
        if match is None:
            continue
        iteration = int(match[1])
        fields = {name.strip(): value for name, value in _FIELD.findall(match[3])}
        numbers = {_TAGS.get(name, name): _number(value) for name, value in fields.items()}
        yield IterationLine(
            iteration=iteration,
            train_iters=int(match[2]),
            numbers=MappingProxyType({k: v for k, v in numbers.items() if v is not None}),
            num_skipped=int(numbers.get(_SKIPPED) or 0),
            starts_run=started or iteration == 1,
        )
        started = False


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_loss(metric: str) -> bool:
    """Whether Megatron averages the metric over the log interval (``lm loss``, ``mtp_1 loss``)."""
    return metric.endswith(" loss")


def _number_of_line(metric: str, _: IterationLine | None, line: IterationLine) -> float:
    return line.numbers.get(metric, math.nan)


def _loss_of_step(metric: str, previous: IterationLine | None, line: IterationLine) -> float | None:
    """Loss of the line's own iteration; None where that iteration was skipped."""
    value = line.numbers.get(metric)
    if previous is None or not previous.starts_run or line.iteration != previous.iteration + 1:
        if line.num_skipped and not value:
            return None
        return math.nan if value is None else value
    # The first line of a run resets neither the sum nor the counts.
    if line.num_skipped > previous.num_skipped:
        return None
    if value is None or previous.num_skipped:
        return math.nan if value is None else value
    return 2 * value - previous.numbers.get(metric, math.nan)


def _scalars_of(file: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of one event file: tag -> (step, value)."""
    name = "tensorboard.backend.event_processing.event_accumulator"
    try:
        module: Any = importlib.import_module(name)
    except ImportError as error:
        raise HostError(
            f"{file}: reading event files needs the package tensorboard; install "
            "megatron-muon[test], or give the console log"
        ) from error
    # Nothing is sampled or purged: a step written twice has to be seen.
    accumulator = module.EventAccumulator(
        str(file), size_guidance={module.SCALARS: 0}, purge_orphaned_data=False
    )
    accumulator.Reload()
    return {
        tag: [(int(event.step), float(event.value)) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()[module.SCALARS]
    }


def _unique(points: Iterable[tuple[int, float]], where: str) -> dict[int, float]:
    """Step -> value; a step may come twice (a resumed run), but only with one value."""
    values: dict[int, float] = {}
    for step, value in points:
        before = values.setdefault(step, value)
        if before != value and not (math.isnan(before) and math.isnan(value)):
            raise ConfigurationError(
                f"{where}: step {step} has two values, {before!r} and {value!r}, so two runs wrote "
                "here; give the event file or the log of one"
            )
    return values
