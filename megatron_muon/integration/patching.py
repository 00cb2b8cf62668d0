"""Replacing names of other packages, and putting them back.

A :class:`Row` is one line of a table: what is changed, why, and who needs it. A :class:`Patch`
replaces a name; other kinds of row change what is no name, a logger's filter for example. A
:class:`PatchSet` puts a table in force as a whole or not at all, and takes it back in reverse
order, so that what was found before is found again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

_ABSENT = object()

Undo = Callable[[], None]
"""What puts one row back."""


class Row(Protocol):
    """One line of a table: a change that can be put in force and put back."""

    @property
    def target(self) -> str:
        """What is changed."""

    @property
    def why(self) -> str:
        """What fails or goes wrong without the row."""

    @property
    def needed_by(self) -> str:
        """The upstream line that needs it, ``path:symbol``, the path inside the package."""

    def apply(self) -> Undo:
        """Put the row in force and return what puts it back; change nothing where it raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One replaced name.

    Attributes:
        module: Importable module that holds the name.
        name: Attribute path inside the module, dotted where it goes through a class.
        replace: Called with what is there now (``None`` if there is nothing); returns what takes
            its place.
        why: What fails or goes wrong without the row.
        needed_by: The upstream line that needs it, ``path:symbol``.
        vacant: Whether the name is one that may be missing, or ``None``, until it is replaced.
    """

    module: str
    name: str
    replace: Callable[[Any], Any]
    why: str
    needed_by: str
    vacant: bool = False

    @property
    def target(self) -> str:
        """Full dotted name."""
        return f"{self.module}.{self.name}"

    def holder(self) -> tuple[Any, str]:
        """Import the module and walk to the object whose attribute is replaced."""
        holder: Any = importlib.import_module(self.module)
        *path, leaf = self.name.split(".")
        for part in path:
            holder = getattr(holder, part)
        return (_Entries(holder) if isinstance(holder, dict) else holder), leaf

    def apply(self) -> Undo:
        """Replace the name; return what puts back the very object that was there.

        A name that the holder only inherits is set on the holder and deleted from it again.
        """
        holder, leaf = self.holder()
        own = vars(holder).get(leaf, _ABSENT)
        replacement = self.replace(getattr(holder, leaf, None))

        def undo() -> None:
            if own is _ABSENT:
                delattr(holder, leaf)
            else:
                setattr(holder, leaf, own)

        setattr(holder, leaf, replacement)
        return undo


class _Entries:
    """A dictionary seen as a holder of names, so that a registry's row is patched like any name."""

    def __init__(self, entries: dict[str, Any]) -> None:
        object.__setattr__(self, "__dict__", entries)


@dataclass(slots=True)
class PatchSet:
    """A table, put in force and put back together.

    Attributes:
        rows: The table.
    """

    rows: Sequence[Row]
    _undo: list[Undo] = field(default_factory=list)

    @property
    def applied(self) -> bool:
        """Whether the table is in force."""
        return bool(self._undo)

    def apply(self) -> None:
        """Put every row in force; on a failure put back those that were and raise."""
        if self.applied:
            return
        try:
            for row in self.rows:
                self._undo.append(row.apply())
        except BaseException:
            self.revert()
            raise

    def revert(self) -> None:
        """Put every row back, the last one first."""
        while self._undo:
            self._undo.pop()()
