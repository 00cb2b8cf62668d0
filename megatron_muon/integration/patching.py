"""Replacing names of other packages, and putting them back.

A :class:`Patch` is one row of a table: which name, what takes its place, and why. A
:class:`PatchSet` applies a table as a whole or not at all, and reverts it in reverse order, so
that what was found before is found again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One replaced name.

    Attributes:
        module: Importable module that holds the name.
        name: Attribute path inside the module, dotted where it goes through a class.
        replace: Called with what is there now (``None`` if the name is not defined by the
            holder itself but inherited or absent); returns what takes its place.
        why: What fails or goes wrong without the row.
        needed_by: The upstream line that needs it, ``path:symbol``.
    """

    module: str
    name: str
    replace: Callable[[Any], Any]
    why: str
    needed_by: str

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


class _Entries:
    """A dictionary seen as a holder of names, so that a registry's row is patched like any name."""

    def __init__(self, entries: dict[str, Any]) -> None:
        object.__setattr__(self, "__dict__", entries)


@dataclass(slots=True)
class PatchSet:
    """A table of patches, applied together."""

    patches: Sequence[Patch]
    _undo: list[tuple[Any, str, Any]] = field(default_factory=list)

    @property
    def applied(self) -> bool:
        """Whether the table is in force."""
        return bool(self._undo)

    def apply(self) -> None:
        """Replace every name; on a failure put back those already replaced and raise."""
        if self.applied:
            return
        try:
            for patch in self.patches:
                holder, leaf = patch.holder()
                own = vars(holder).get(leaf, _ABSENT)
                replacement = patch.replace(getattr(holder, leaf, None))
                setattr(holder, leaf, replacement)
                self._undo.append((holder, leaf, own))
        except BaseException:
            self.revert()
            raise

    def revert(self) -> None:
        """Put every name back, last replaced first."""
        while self._undo:
            holder, leaf, own = self._undo.pop()
            if own is _ABSENT:
                delattr(holder, leaf)
            else:
                setattr(holder, leaf, own)
