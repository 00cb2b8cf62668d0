"""What the measuring scripts share: rows, limits, the table that is printed, and the JSON.

A row is one measured value. A limit decides the exit status; a limit to reach is shown and decides
nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One measured value.

    Attributes:
        name: What was measured.
        value: The value.
        limit: Largest value that is accepted, ``None`` for any.
        met: Whether it is.
        reach: Whether the limit is one to reach, which does not decide the exit status.
        note: What else is to be said, on the line that is printed alone.
    """

    name: str
    value: float
    limit: float | None = None
    met: bool = True
    reach: bool = False
    note: str = ""


def rows_of(
    name: str,
    value: float,
    limit: float | None = None,
    reach: float | None = None,
    note: str = "",
) -> list[Row]:
    """Return the row of a value with its limit, and that of the limit to reach if there is one."""
    rows = []
    if limit is not None or reach is None:
        rows.append(Row(name, value, limit, limit is None or value <= limit, note=note))
    if reach is not None:
        rows.append(Row(name, value, reach, value <= reach, reach=True))
    return rows


def line_of(row: Row) -> str:
    """Return the line of a row in the table."""
    told = ""
    if row.limit is not None:
        verdict = "met" if row.met else "NOT REACHED" if row.reach else "NOT MET"
        told = f"{'reach' if row.reach else 'limit'} {row.limit:<8.4g} {verdict}"
    return f"{row.name:64} {row.value:12.4g}  {told:26} {row.note}".rstrip()


DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
"""Has a place for the table of each script, between two comments."""


def markdown(rows: Iterable[Row]) -> str:
    """Return the rows as a table: name, value, limit and limit to reach."""
    lines: dict[str, list[str]] = {
        "": ["measured", "value", "limit", "to reach"], "-": ["---"] * 4
    }  # fmt: skip
    for row in rows:
        cells = lines.setdefault(row.name, [row.name, f"{row.value:.3g}", "", ""])
        if row.limit is not None:
            cells[3 if row.reach else 2] = f"{row.limit:g}{'' if row.met else ' (missed)'}"
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines.values())


def put_into(text: str, script: str, table: str) -> str:
    """Return a document with a table in the place of the script's last one.

    Raises:
        ValueError: The document has no place for it.
    """
    begin, end = f"<!-- {script} -->", f"<!-- end of {script} -->"
    place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not place.search(text):
        raise ValueError(f"no {begin} followed by {end}: add them where the table should be")
    return place.sub(lambda found: f"{begin}\n\n{table}\n\n{end}", text)


def to_json(rows: Iterable[Row]) -> str:
    """Return the rows as JSON, without notes; ``reach`` is only in those of a limit to reach."""
    return json.dumps([_plain(row) for row in rows], indent=2) + "\n"


def _plain(row: Row) -> dict[str, object]:
    plain = asdict(row)
    del plain["note"]
    if not row.reach:
        del plain["reach"]
    return plain


def machine() -> str:
    """Name the machine: values of time are of no other."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    name = models[0] if models else platform.machine()
    return f"{len(models)} x {name}; torch {version('torch')}"


def main(
    measure: Callable[[bool], Iterable[Row]],
    description: str,
    quick: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """Measure, print each row when it is there, write JSON, and return the exit status.

    Args:
        measure: Yields the rows; it is told whether to be quick.
        description: Of the command, of which the first line is shown.
        quick: What ``--quick`` leaves out.
        arguments: The command line.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    parser.add_argument(
        "--markdown", action="store_true", help="print the rows once more, as a table"
    )
    parser.add_argument(
        "--document", action="store_true",
        help="put the rows that have a limit into docs/performance.md",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    script = Path(parser.prog).name
    if options.document:  # before hours of measuring
        put_into(DOCUMENT.read_text(), script, "")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.absolute().parent}")
    print(machine(), flush=True)
    rows = []
    for row in measure(options.quick):
        rows.append(row)
        print(line_of(row), flush=True)
    if options.json:
        options.json.write_text(to_json(rows))
    if options.markdown:
        print(markdown(rows))
    if options.document:
        table = f"{machine()}.\n\n{markdown(row for row in rows if row.limit is not None)}"
        DOCUMENT.write_text(put_into(DOCUMENT.read_text(), script, table))
    missed = [row.name for row in rows if not (row.met or row.reach)]
    print(f"{len(missed)} limits not met" if missed else "all limits met")
    return 1 if missed else 0
