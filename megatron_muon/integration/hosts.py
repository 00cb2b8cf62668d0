"""The packages this one builds on: which versions it knows, and one line where one does not fit.

Nothing is imported to find out, so that a package of another version is refused and not half
loaded.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_muon.errors import HostError

KNOWN_MEGATRON_CORE = ("0.19.2",)
"""Versions whose names and signatures the seam table was written for."""

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Bound:
    """The versions of a package that fit.

    Attributes:
        distribution: Name for pip.
        module: Name for import.
        at_least: First version that fits, as ``(major, minor)``.
        below: First version that no longer fits, ``None`` for no such bound.
    """

    distribution: str
    module: str
    at_least: Version
    below: Version | None = None

    def __str__(self) -> str:
        text = f"{self.distribution}>={_dotted(self.at_least)}"
        return text if self.below is None else f"{text},<{_dotted(self.below)}"

    def admits(self, version: str) -> bool:
        """Whether a version, such as ``2.13.0+cpu``, fits."""
        found = _major_minor(version)
        return self.at_least <= found and (self.below is None or found < self.below)


TORCH = Bound("torch", "torch", (2, 13))
EMERGING_OPTIMIZERS = Bound("emerging-optimizers", "emerging_optimizers", (0, 3), (0, 4))


def check_hosts(*, optimizer: bool) -> None:
    """Raise unless torch, megatron-core and what the optimizer needs are there and known.

    Args:
        optimizer: Whether the optimizer's own needs count.

    Raises:
        HostError: A package is missing or of a version that does not fit; names both versions.
    """
    _check_bound(TORCH)
    _check_megatron_core()
    if optimizer:
        _check_bound(EMERGING_OPTIMIZERS)


def _check_bound(bound: Bound) -> None:
    if importlib.util.find_spec(bound.module) is None:
        raise HostError(
            f"{bound.distribution} is not installed; megatron-muon {_own_version()} needs "
            f"{bound}: pip install '{bound}'."
        )
    version = _distribution_version(bound.distribution)
    if version is not None and not bound.admits(version):
        raise HostError(
            f"{bound.distribution} {version} is installed, megatron-muon {_own_version()} needs "
            f"{bound}. Nothing was changed. Install one that fits: pip install '{bound}'."
        )


def _check_megatron_core() -> None:
    found = list(dict.fromkeys(_megatron_core_versions()))
    known = " or ".join(KNOWN_MEGATRON_CORE)
    advice = f"pip install megatron-core=={KNOWN_MEGATRON_CORE[-1]}."
    if not found:
        raise HostError(
            f"megatron-core is not installed; megatron-muon {_own_version()} needs megatron-core "
            f"{known}: {advice}"
        )
    unknown = [version for version in found if version not in KNOWN_MEGATRON_CORE]
    if unknown:
        raise HostError(
            f"megatron-core {unknown[0]} is installed, megatron-muon {_own_version()} knows "
            f"megatron-core {known}. Nothing was changed. Install one it knows: {advice}"
        )


def _megatron_core_versions() -> Iterator[str]:
    """Yield what the code that would be imported and the installed distribution say they are.

    They differ where a checkout of Megatron-LM comes first on the path.
    """
    code = _code_version()
    if code is not None:
        yield code
        installed = _distribution_version("megatron-core")
        if installed is not None:
            yield installed


def _code_version() -> str | None:
    """Read the version out of ``megatron/core/package_info.py`` without importing it."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ImportError:
        return None
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).with_name("package_info.py")
    if not source.is_file():
        return "(a version without package_info.py)"
    parts = {
        node.targets[0].id: node.value.value
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, int | str)
    }
    numbers = ".".join(str(parts.get(name, "?")) for name in ("MAJOR", "MINOR", "PATCH"))
    return f"{numbers}{parts.get('PRE_RELEASE', '')}"


def _distribution_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _major_minor(version: str) -> Version:
    numbers = [int(part) if part.isdigit() else 0 for part in version.split("+")[0].split(".")]
    major, minor, *_ = [*numbers, 0, 0]
    return major, minor


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def _own_version() -> str:
    from megatron_muon import __version__

    return __version__
