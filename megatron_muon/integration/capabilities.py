"""Optional accelerators: which are present and what they are used for."""

from __future__ import annotations

import importlib
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
    """Look for Transformer Engine and Apex as Megatron does: by import, in this order.

    Megatron takes its fused Adam and its multi-tensor copies and norms from Transformer Engine,
    else from Apex, else from torch (``core/optimizer/__init__.py``, ``optimizer.py`` and
    ``clip_grads.py``). ``apex`` on PyPI is an unrelated package, so what counts is what is used.
    """
    te = _has("transformer_engine.pytorch.optimizers", "FusedAdam", "multi_tensor_applier")
    apex = _has("apex.optimizers", "FusedAdam") and _has("amp_C", "multi_tensor_scale")
    use = "fused Adam, multi-tensor copies and norms"
    unneeded = "nothing, since Transformer Engine comes first"
    return (
        Capability("Transformer Engine", te, use, "Apex" if apex else "torch"),
        Capability("Apex", apex, unneeded if te else use, "Transformer Engine" if te else "torch"),
    )


def _has(module: str, *names: str) -> bool:
    """Whether a module can be imported and holds the names."""
    try:
        loaded = importlib.import_module(module)
    except Exception:  # an unrelated or broken package may raise anything
        return False
    return all(hasattr(loaded, name) for name in names)
