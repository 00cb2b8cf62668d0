"""``megatron-muon golden``: show a golden file, hold a run to one, or record one."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_muon.errors import ConfigurationError
from megatron_muon.testing.golden import (
    EXPECTED_MUTANTS,
    KINDS,
    GoldenValues,
    Kind,
    MetricSeries,
    Mutant,
    Provenance,
    compare,
    load_golden,
    load_recorded,
    read_case,
    read_curve,
    record,
    sidecar_path,
)
from megatron_muon.testing.golden.case import CONFIG_NAME
from megatron_muon.testing.golden.compare import PRECISIONS
from megatron_muon.testing.golden.curves import LM_LOSS
from megatron_muon.testing.golden.provenance import mutant_name

_RUN = "tensorboard folder, event file, console log or golden file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions ``show``, ``compare`` and ``record`` to the parser of the subcommand."""
    actions = parser.add_subparsers(dest="golden_action", metavar="ACTION", required=True)

    show = actions.add_parser("show", help="print what a golden file holds and where it is from")
    show.add_argument("file", type=Path, metavar="FILE")

    held = actions.add_parser("compare", help="hold a run to a golden file; exit 1 if it fails")
    held.add_argument("run", type=Path, metavar="RUN", help=_RUN)
    held.add_argument("golden", type=Path, metavar="GOLDEN", help="golden file, or another run")
    _add_rule(held, KINDS)
    held.add_argument(
        "--from-step", type=int, metavar="N", help="compare from step N on (what a resume repeats)"
    )

    new = actions.add_parser("record", help="write a golden file if wrong runs fail against it")
    new.add_argument("--run", type=Path, required=True, metavar="RUN", help=f"to record: {_RUN}")
    new.add_argument(
        "--legitimate",
        nargs="+",
        action="extend",
        required=True,
        metavar="[NAME=]RUN",
        help="other right runs: repetitions, other shardings",
    )
    new.add_argument(
        "--mutant",
        action="append",
        required=True,
        metavar="NAME=RUN",
        help=f"runs broken on purpose, all of: {', '.join(EXPECTED_MUTANTS)}",
    )
    new.add_argument("--out", type=Path, required=True, metavar="FILE")
    _add_rule(new, [kind for kind in KINDS if kind != "exact"])
    new.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="METRIC",
        help="keep this metric of the run too, unjudged (repeatable)",
    )
    new.add_argument(
        "--run-command",
        metavar="TEXT",
        help=f"command of the run; default: the flags in {CONFIG_NAME} beside FILE",
    )


def main(args: argparse.Namespace) -> int:
    """Carry out the action that was parsed.

    Returns:
        0, or 1 where ``compare`` finds that the run fails.

    Raises:
        ConfigurationError: An input is wrong, or a recording is refused; one line.
    """
    if args.golden_action == "show":
        return _show(args.file)
    if args.golden_action == "compare":
        return _compare(args)
    return _record(args)


def _add_rule(parser: argparse.ArgumentParser, kinds: Sequence[Kind]) -> None:
    parser.add_argument("--kind", choices=kinds, required=True, help="how the runs are related")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="precision of the run, for cross-sharding (default: bf16)",
    )
    parser.add_argument("--metric", default=LM_LOSS, help="metric to judge (default: %(default)s)")


def _show(path: Path) -> int:
    golden, provenance = _load(path)
    for series in golden.metrics:
        print(
            f"{series.name}: steps {series.steps[0]} to {series.steps[-1]} "
            f"({len(series.steps)} values), {series.first:g} -> {series.last:g}"
        )
    for line in _provenance_lines(provenance):
        print(line)
    return 0


def _compare(args: argparse.Namespace) -> int:
    run, golden = read_curve(args.run, args.metric), _golden_curve(args.golden, args.metric)
    if args.from_step is not None:
        run, golden = run.since(args.from_step), golden.since(args.from_step)
    result = compare(run, golden, kind=args.kind, precision=args.precision)
    print(result.message)
    return 0 if result.passed else 1


def _record(args: argparse.Namespace) -> int:
    legitimate, mutants = _named(args.legitimate), _mutants(args.mutant)
    _require_distinct([args.run, *legitimate.values(), *mutants.values()])
    provenance = record(
        args.out,
        read_curve(args.run, args.metric),
        legitimate={name: read_curve(path, args.metric) for name, path in legitimate.items()},
        mutants={name: read_curve(path, args.metric) for name, path in mutants.items()},
        kind=args.kind,
        precision=args.precision,
        command=_run_command(args.run_command, args.out),
        also=_other_metrics(args.run, args.also, args.metric),
    )
    evidence = provenance.evidence
    nearest = min(evidence.mutants, key=lambda name: evidence.mutants[name])
    print(
        f"recorded {args.out} ({evidence.kind}, {evidence.tolerance:g}): moves "
        f"{evidence.movement:.2e}, spread {evidence.spread:.2e} over "
        f"{len(evidence.legitimate)} runs, nearest mutant {nearest} at "
        f"{evidence.mutants[nearest]:.2e}"
    )
    return 0


def _load(path: Path) -> tuple[GoldenValues, Provenance | None]:
    """Read a golden file; where it has a sidecar, the two have to belong together."""
    return load_recorded(path) if sidecar_path(path).exists() else (load_golden(path), None)


def _golden_curve(path: Path, metric: str) -> MetricSeries:
    if path.suffix == ".json" and path.is_file():
        return _load(path)[0].metric(metric)
    return read_curve(path, metric)


def _provenance_lines(provenance: Provenance | None) -> Iterable[str]:
    if provenance is None:
        yield "no provenance beside it: nothing is known about what fails against it"
        return
    evidence, processor = provenance.evidence, provenance.processor
    yield f"held to: {evidence.metric}, {evidence.kind}, {evidence.tolerance:g}"
    yield f"moves: {evidence.movement:.2e}"
    yield f"spread: {evidence.spread:.2e} over {_distances(evidence.legitimate.items())}"
    yield f"mutants: {_distances(evidence.mutants.items())}"
    yield f"processor: {processor.model} ({' '.join(processor.instructions) or 'no avx2'})"
    yield "versions: " + ", ".join(f"{k} {v}" for k, v in provenance.versions.items())
    yield f"recorded: {provenance.date} from {evidence.source}"
    yield f"command: {shlex.join(provenance.command)}"


def _distances(items: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {distance:.2e}" for name, distance in items)


def _named(values: Sequence[str]) -> dict[str, Path]:
    """``[NAME=]RUN`` as name -> path; without a name, that of the file or folder."""
    named: dict[str, Path] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not equals or Path(value).exists():
            name, path = Path(value).name, value
        if name in named:
            raise ConfigurationError(
                f"--legitimate: two runs are called {name!r}; name them, as in TP4xDP1={path}"
            )
        named[name] = Path(path)
    return named


def _mutants(values: Sequence[str]) -> dict[Mutant, Path]:
    mutants: dict[Mutant, Path] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not equals:
            raise ConfigurationError(f"--mutant {value}: expected NAME=RUN")
        mutant = mutant_name(name, f"--mutant {value}")
        if mutant in mutants:
            raise ConfigurationError(f"--mutant {name} is given twice; expected once")
        mutants[mutant] = Path(path)
    return mutants


def _require_distinct(paths: Sequence[Path]) -> None:
    """A run compared with itself proves nothing."""
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise ConfigurationError(
                f"{path} is given twice among --run, --legitimate and --mutant; each is one run"
            )
        seen.add(path.resolve())


def _run_command(text: str | None, out: Path) -> Sequence[str]:
    if text is not None:
        try:
            return shlex.split(text)
        except ValueError as error:
            raise ConfigurationError(f"--run-command {text}: {error}") from error
    config = out.parent / CONFIG_NAME
    if not config.exists():
        raise ConfigurationError(
            f"--run-command is missing and there is no {config}; one of them has to say how the "
            "run was made"
        )
    return read_case(config).command_line()


def _other_metrics(run: Path, names: Sequence[str], judged: str) -> tuple[MetricSeries, ...]:
    if judged in names:
        raise ConfigurationError(f"--also {judged}: it is already the metric that is judged")
    return tuple(read_curve(run, name) for name in names)
