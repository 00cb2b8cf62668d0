"""Optional accelerators: which are present and what they are used for."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capability:
    """An optional package.

    Attributes:
        name: What it is called.
        found: Whether its parts that are used here can be imported.
        used_for: What it is used for where found.
        instead: What is used where it is not.
    """

    name: str
    found: bool
    used_for: str
    instead: str

    def __str__(self) -> str:
        if self.found:
            return f"{self.name}: found, used for {self.used_for}"
        return f"{self.name}: not found, {self.instead} instead"


def capabilities() -> tuple[Capability, ...]:
    """Look for Transformer Engine and Apex by import, never by distribution name.

    ``apex`` on PyPI is an unrelated package: NVIDIA's is told by ``apex.optimizers``.
    """
    te = _importable("transformer_engine", "transformer_engine.pytorch.optimizers")
    apex = _importable("apex", "apex.optimizers")
    return (
        Capability("Transformer Engine", te, "fused Adam, multi-tensor copies", "torch"),
        Capability("Apex", apex, "fused Adam and multi-tensor copies where Transformer Engine is "
                   "not", "torch"),
    )  # fmt: skip


def _importable(package: str, module: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None and (
            importlib.util.find_spec(module) is not None
        )
    except (ImportError, ValueError, OSError):
        return False
