"""``install()`` and ``uninstall()``: from here on Megatron builds this package's Muon.

Everything is checked before anything is replaced: the version of megatron-core, that every name
of the seam table exists, and that it still has the parameters the table was written for.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from typing import Literal, get_args

from megatron_muon.errors import ConfigurationError, HostError
from megatron_muon.integration.patching import PatchSet

Device = Literal["auto", "cpu", "cuda"]
Layout = Literal["owner"]

KNOWN_MEGATRON_CORE = ("0.19.2",)


@dataclass(frozen=True, slots=True)
class Installation:
    """What :func:`install` put in force.

    Attributes:
        on_cpu: Whether the CPU stand-in is active.
        layout: The layout asked for, ``None`` for the default.
        optimizer: Whether the optimizer's seams are installed.
    """

    on_cpu: bool
    layout: Layout | None
    optimizer: bool


_installation: Installation | None = None
_tables: list[PatchSet] = []
_environment: dict[str, str | None] = {}


def installation() -> Installation | None:
    """Return what is in force, ``None`` if nothing is."""
    return _installation


def install(
    device: Device = "auto", layout: Layout | None = None, optimizer: bool = True
) -> None:
    """Make Megatron's own API build this package's Muon; idempotent.

    Call it before Megatron wraps the model in DDP (best as the first lines of the script).

    Args:
        device: ``"cpu"`` puts Megatron on the CPU and gloo, ``"cuda"`` leaves the device alone,
            ``"auto"`` takes the CPU where no CUDA device is visible.
        layout: For code that builds DDP itself and has no flags; ``None`` takes the default.
        optimizer: ``False`` installs the CPU stand-in alone.

    Raises:
        ConfigurationError: An argument has no such value, or differs from an earlier call's.
        HostError: megatron-core is missing, unknown, or has not the names it should have.
    """
    global _installation
    for name, value, legal in (("device", device, get_args(Device)),
                               ("layout", layout, (None, *get_args(Layout)))):  # fmt: skip
        if value not in legal:
            raise ConfigurationError(f"install({name}={value!r}): expected one of {legal}.")
    _check_megatron_core()
    wanted = Installation(on_cpu=_takes_cpu(device), layout=layout, optimizer=optimizer)
    if _installation is not None:
        _check_same(_installation, wanted)
        return

    from megatron_muon.integration import cpu, seams

    tables: list[PatchSet] = []
    if wanted.on_cpu:
        tables.append(PatchSet(cpu.table()))
    tables.append(PatchSet(seams.table(optimizer=optimizer)))
    seams.check(tables[-1].patches)
    _installation = wanted
    try:
        if wanted.on_cpu:
            _set_environment(cpu.ENVIRONMENT)
        for table in tables:
            _tables.append(table)
            table.apply()
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Put back every name :func:`install` replaced; does nothing if nothing is installed."""
    global _installation
    while _tables:
        _tables.pop().revert()
    while _environment:
        name, value = _environment.popitem()
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _installation = None


def _takes_cpu(device: Device) -> bool:
    import torch

    if _installation is not None and device == "auto":
        return _installation.on_cpu
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigurationError(
            'install(device="cuda"): torch sees no CUDA device. Use device="cpu" (or --device cpu) '
            "to run Megatron on the CPU."
        )
    return device == "cpu" or not has_cuda


def _check_same(now: Installation, wanted: Installation) -> None:
    if now != wanted:
        raise ConfigurationError(
            f"megatron_muon is already installed as {now}; call uninstall() before installing it "
            f"as {wanted}."
        )


def _check_megatron_core() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise HostError(
            f"torch cannot be imported ({error}). Install it, e.g. with `pip install "
            "megatron-muon`, which brings torch 2.13 or newer."
        ) from error
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise HostError(
            "megatron-core is not installed; megatron-muon needs "
            f"megatron-core {' or '.join(KNOWN_MEGATRON_CORE)}: pip install megatron-core=="
            f"{KNOWN_MEGATRON_CORE[-1]}."
        ) from None
    if version not in KNOWN_MEGATRON_CORE:
        raise HostError(
            f"megatron-core {version} is installed, megatron-muon {_own_version()} knows "
            f"megatron-core {', '.join(KNOWN_MEGATRON_CORE)}. Nothing was changed. Install one it "
            f"knows: pip install megatron-core=={KNOWN_MEGATRON_CORE[-1]}."
        )


def _own_version() -> str:
    from megatron_muon import __version__

    return __version__


def _set_environment(values: dict[str, str]) -> None:
    for name, value in values.items():
        if name not in os.environ:
            _environment[name] = None
            os.environ[name] = value
