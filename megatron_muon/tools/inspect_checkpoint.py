"""``megatron-muon inspect``: show what a checkpoint holds, or compare two of them."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron_muon.checkpoint.comparison import Comparison, TensorComparison, TextComparison
    from megatron_muon.checkpoint.contents import Contents

_WIDTH = 100
_LABEL = 18
_MAX_LINES = 8
_EXIT_CODES = (
    "exit code: 0 if it is shown, and with --diff if a run continues alike from both; 1 if not; "
    "2 if there is no checkpoint, it is torn, or an argument is wrong"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of the subcommand."""
    parser.epilog = _EXIT_CODES
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CKPT",
        help="folder iter_XXXXXXX, or one of --save, of which the latest is taken",
    )
    parser.add_argument(
        "--diff",
        type=Path,
        metavar="OTHER",
        help="compare with another checkpoint",
    )
    parser.add_argument(
        "--keys",
        metavar="PATTERN",
        help="list every tensor whose key matches, such as '*momentum*fc1*'; without *, ? and [ "
        "every one whose key has it in it",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it as JSON too")


def main(options: argparse.Namespace) -> int:
    """Show a checkpoint, or compare two; return the exit code."""
    from megatron_muon.integration.cpu_quiet import IMPORT_SILENCES

    with ExitStack() as stack:
        for row in IMPORT_SILENCES:
            stack.callback(row.apply())
        from megatron_muon.checkpoint.comparison import compare
        from megatron_muon.checkpoint.contents import read_contents

    here = read_contents(options.checkpoint)
    report = _as_json(here)
    if options.diff is None:
        lines, code = _summary(here, options.keys), 0
    else:
        there = read_contents(options.diff)
        comparison = compare(here, there)
        report["other"] = _as_json(there)
        report["comparison"] = asdict(comparison) | {"is_equal": comparison.is_equal}
        lines = _difference(here, there, comparison, options.keys)
        code = 0 if comparison.is_equal else 1
    _print(lines)
    if options.json is not None:
        _write(options.json, report)
    return code


def _print(lines: Iterable[str]) -> None:
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as head, has enough. What is still buffered must go somewhere, or Python
        # complains at its end.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _summary(contents: Contents, pattern: str | None) -> Iterator[str]:
    """Yield what a reader asks first: whence it is, and what it holds of each kind."""
    nbytes = sum(contents.file_nbytes.values())
    whole = ", all there and as long as the index says" * (contents.format == "torch_dist")
    yield from _entry("checkpoint", f"{contents.path}")
    yield from _entry(
        "format",
        f"{contents.format}, {len(contents.file_nbytes)} files, {nbytes:,} bytes{whole}",
    )
    yield from _entry("iteration", f"{contents.iteration}, {contents.consumed_samples} samples")
    yield from _entry("precision", contents.precision)
    yield from _entry("ran on", _pairs(contents.sizes))
    yield from _record(contents)
    if contents.step is not None:
        yield from _entry("scalar optimizer", f"{contents.step} steps")
    if contents.scaler:
        yield from _entry("loss scaler", _pairs(contents.scaler))
    schedule = {
        key.partition(".")[2]: value
        for key, value in contents.state.items()
        if key.startswith("opt_param_scheduler.")
    }
    if schedule:
        yield from _entry("schedule", _pairs(schedule))
    yield ""
    yield from _families(contents)
    if pattern is not None:
        yield ""
        yield from _keys(contents, pattern)


def _record(contents: Contents) -> Iterator[str]:
    record = contents.record
    if contents.no_optimizer is not None:
        yield from _entry("optimizer", f"none: {contents.no_optimizer}")
        return
    if record is None:
        yield from _entry("optimizer", "Megatron's own: there is no record of this package")
        return
    told = {key: value for key, value in record.items() if key != "settings"}
    yield from _entry("optimizer", _pairs(told))
    if record.get("settings"):
        yield from _entry("settings", _pairs(record["settings"]))


def _families(contents: Contents) -> Iterator[str]:
    """Yield the table of what there is of each kind, and all of it."""
    from megatron_muon.checkpoint.contents import names_of

    kinds: dict[str, list[Any]] = {}
    for key, (kind, _) in names_of(contents.tensors).items():
        kinds.setdefault(kind, []).append(contents.tensors[key])
    rows = [("", "tensors", "elements", "bytes", "dtypes")]
    for kind, tensors in [*kinds.items(), ("all", list(contents.tensors.values()))]:
        rows.append(
            (
                kind,
                f"{len(tensors)}",
                f"{sum(math.prod(tensor.shape) for tensor in tensors):,}",
                f"{sum(tensor.nbytes for tensor in tensors):,}",
                ", ".join(sorted({_dtype(tensor.dtype) for tensor in tensors})),
            )
        )
    yield from _table(rows)


def _keys(contents: Contents, pattern: str) -> Iterator[str]:
    rows = [("key", "shape", "dtype", "bytes")]
    rows += [
        (key, "x".join(map(str, tensor.shape)), _dtype(tensor.dtype), f"{tensor.nbytes:,}")
        for key, tensor in contents.tensors.items()
        if _has(key, pattern)
    ]
    yield from _table(rows) if len(rows) > 1 else _no_key(pattern)


def _has(key: str, pattern: str) -> bool:
    """Whether a key matches; a pattern without wildcards need not be all of it."""
    return fnmatchcase(key, pattern) if set("*?[") & set(pattern) else pattern in key


def _no_key(pattern: str) -> Iterator[str]:
    yield f"no key matches {pattern!r}"


def _difference(
    here: Contents, there: Contents, comparison: Comparison, pattern: str | None
) -> Iterator[str]:
    """Yield the comparison: counts by kind, the worst that differ, then the rest of the state."""
    yield from _entry("here", f"{here.path}")
    yield from _entry("there", f"{there.path}")
    yield ""
    yield from _table(list(_verdicts(comparison.tensors)))
    shown = [item for item in comparison.tensors if item.verdict != "equal"]
    limit: int | None = _MAX_LINES
    if pattern is not None:
        shown = [t for t in comparison.tensors if _matches(t, pattern)]
        limit = None
        if not shown:
            yield from _no_key(pattern)
    yield from _some([_tensor_line(item) for item in sorted(shown, key=_rank)], limit)
    yield ""
    yield f"other state: {comparison.num_alike} alike, {len(comparison.state)} not"
    yield from _some([_text_line(item) for item in comparison.state], _MAX_LINES)
    if comparison.of_other_ranks:
        yield from _entry(
            "not compared", f"of other numbers of ranks: {', '.join(comparison.of_other_ranks)}"
        )
    if comparison.described:
        yield f"how the runs were set up: {len(comparison.described)} differ, which does not count"
        yield from _some([_text_line(item) for item in comparison.described], _MAX_LINES)
    yield ""
    yield "equal" if comparison.is_equal else "different"


def _verdicts(tensors: Iterable[TensorComparison]) -> Iterator[tuple[str, ...]]:
    from megatron_muon.checkpoint.comparison import VERDICTS

    count: dict[str, Counter[str]] = {}
    largest: dict[str, float] = {}
    for item in tensors:
        count.setdefault(item.family, Counter())[item.verdict] += 1
        before = largest.get(item.family, 0.0)
        largest[item.family] = item.max_abs if not before >= item.max_abs else before
    seen = [v for v in VERDICTS if v == "equal" or any(found[v] for found in count.values())]
    yield ("", *seen, "largest |here - there|")
    for kind, found in count.items():
        yield (kind, *(f"{found[verdict]}" for verdict in seen), f"{largest[kind]:.3g}")


def _matches(item: TensorComparison, pattern: str) -> bool:
    return any(key is not None and _has(key, pattern) for key in (item.here, item.there))


def _rank(item: TensorComparison) -> tuple[int, float]:
    """Return what to sort by: what differs in more than values, then relative differences."""
    relative = item.max_abs / item.max_value if item.max_value else item.max_abs
    of_verdict = {"different": 1, "equal": 2}.get(item.verdict, 0)
    return of_verdict, -math.inf if math.isnan(relative) else -relative


def _tensor_line(item: TensorComparison) -> str:
    line = f"{item.family} {item.name}: {item.verdict}"
    if not item.num_different:
        return line
    return (
        f"{line}, {item.num_different:,} of {item.numel:,} elements, by up to {item.max_abs:.3g} "
        f"of {item.max_value:.3g}"
    )


def _text_line(item: TextComparison) -> str:
    here, there = ("nothing" if t is None else t for t in (item.here, item.there))
    return f"{item.name}: {here} here, {there} there"


def _some(lines: Sequence[str], limit: int | None) -> Iterator[str]:
    """Yield the first lines, and how many more there are."""
    for line in lines[:limit]:
        yield f"  {line}"
    if limit is not None and len(lines) > limit:
        yield f"  and {len(lines) - limit} more, all of them in --json"


def _entry(label: str, text: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"{label:{_LABEL}}",
        subsequent_indent=" " * _LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _pairs(values: Mapping[str, Any]) -> str:
    def text(value: Any) -> str:
        return (
            " ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else f"{value}"
        )

    return ", ".join(f"{key} {text(value)}" for key, value in values.items())


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows, the first column to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [f"{row[0]:{widths[0]}}"]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


def _dtype(dtype: Any) -> str:
    return f"{dtype}".removeprefix("torch.")


def _as_json(contents: Contents) -> dict[str, Any]:
    from megatron_muon.checkpoint.contents import names_of

    names = names_of(contents.tensors)
    plain = ("format", "iteration", "consumed_samples", "no_optimizer", "precision", "step")
    mappings = ("file_nbytes", "sizes", "scaler", "state", "described")
    return {
        "path": f"{contents.path}",
        **{name: getattr(contents, name) for name in plain},
        **{name: dict(getattr(contents, name)) for name in mappings},
        "record": contents.record,
        "tensors": [
            {
                "key": tensor.key,
                "family": names[tensor.key][0],
                "shape": tensor.shape,
                "dtype": _dtype(tensor.dtype),
                "nbytes": tensor.nbytes,
                "files": tensor.files,
            }
            for tensor in contents.tensors.values()
        ],
    }


def _write(path: Path, report: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(_finite(report), indent=1, default=str) + "\n")
    except OSError as error:
        raise ConfigurationError(f"--json {path}: it cannot be written: {error}") from error


def _finite(value: Any) -> Any:
    """Return the value with NaN and infinity, which JSON has no word for, as text."""
    if isinstance(value, Mapping):
        return {f"{key}": _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return f"{value}" if isinstance(value, float) and not math.isfinite(value) else value
