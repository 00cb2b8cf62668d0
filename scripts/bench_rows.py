"""Rows of a benchmark: a name, a value, a limit, and whether it is met."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One number.

    Attributes:
        name: What it is.
        value: The number.
        limit: The largest that is accepted, ``None`` where any is.
        known: Why it is known not to be met, empty where it has to be; it then fails nothing.
    """

    name: str
    value: float
    limit: float | None = None
    known: str = ""

    @property
    def met(self) -> bool:
        """Whether the value is within the limit."""
        return self.limit is None or self.value <= self.limit


def finish(rows: Sequence[Row], path: Path | None) -> int:
    """Print rows, write them if asked for, and return the exit status: 1 if a limit is not met."""
    width = max(len(row.name) for row in rows)
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:10.4g}"
        said = "" if row.met else f"  NOT MET{': ' * bool(row.known)}{row.known}"
        print(f"{row.name:<{width}} {row.value:10.4g} {limit:>10}{said}")
    if path is not None:
        told = [{**asdict(row), "met": row.met} for row in rows]
        path.write_text(json.dumps(told, indent=1) + "\n")
    missed = [row.name for row in rows if not row.met and not row.known]
    print(f"{len(missed)} limits not met" if missed else "all limits met")
    return bool(missed)
