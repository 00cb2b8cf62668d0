"""``install()`` and ``uninstall()``: from here on Megatron builds this package's Muon.

Everything is checked before anything is replaced: the versions of the packages, that every name
of the seam table exists, and that it still has the parameters the table was written for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from megatron_muon.errors import ConfigurationError
from megatron_muon.integration.hosts import check_hosts
from megatron_muon.integration.messages import hook_errors, unhook_errors
from megatron_muon.integration.patching import PatchSet
from megatron_muon.optimizer.compatibility import our_layout

Device = Literal["auto", "cpu", "cuda"]
Layout = Literal["owner", "flat", "auto"]


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

    def __str__(self) -> str:
        return (
            f"install(device={'cpu' if self.on_cpu else 'cuda'!r}, layout={self.layout!r}, "
            f"optimizer={self.optimizer})"
        )


_installation: Installation | None = None
_tables: list[PatchSet] = []
_environment: dict[str, str | None] = {}


def installation() -> Installation | None:
    """Return what is in force, ``None`` if nothing is."""
    return _installation


def install(
    device: Device = "auto",
    layout: Layout | Literal["padded"] | None = None,
    optimizer: bool = True,
) -> None:
    """Make Megatron's own API build this package's Muon; idempotent.

    Call it in the first lines of the script: before Megatron parses its command line, and before
    models are wrapped in DDP. Modules that had imported a replaced name by then are served too.
    From here on an uncaught error of this package is shown as one line.

    Args:
        device: ``"cpu"`` puts Megatron on the CPU and gloo, ``"cuda"`` leaves the device alone,
            ``"auto"`` takes the CPU where no CUDA device is visible.
        layout: For code that builds DDP itself and has no flags; ``None`` takes the default, which
            is ``"owner"`` there, since nothing says what to choose by, and ``"auto"`` in a run with
            Megatron's command line. ``"padded"`` is later Megatrons' name of ``"owner"``.
        optimizer: ``False`` installs the CPU stand-in alone.

    Raises:
        ConfigurationError: An argument has no such value, differs from what is installed, or
            Megatron has parsed its command line already.
        HostError: megatron-core is missing, unknown, or has not the names it should have.
    """
    global _installation
    hook_errors()
    kind = cast(Layout | None, our_layout(layout, f"install({layout=})"))
    _check_arguments(device, kind, optimizer)
    check_hosts(optimizer=optimizer)
    wanted = Installation(on_cpu=_takes_cpu(device), layout=kind, optimizer=optimizer)
    if _installation is not None:
        _installation = _joined(_installation, wanted)
        return
    tables = _checked_tables(wanted)
    _installation = wanted
    try:
        if wanted.on_cpu:
            _set_environment()
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
    unhook_errors()


def seam_tables(device: Device = "auto", optimizer: bool = True) -> dict[str, PatchSet]:
    """Return the tables that ``install()`` with these arguments puts in force, by title.

    Raises:
        ConfigurationError: An argument has no such value.
        HostError: megatron-core is missing or unknown.
    """
    _check_arguments(device, None, optimizer)
    check_hosts(optimizer=optimizer)
    wanted = Installation(on_cpu=_takes_cpu(device), layout=None, optimizer=optimizer)
    return _titled_tables(wanted)


def _check_arguments(device: object, layout: object, optimizer: object) -> None:
    for name, value, legal in (
        ("device", device, get_args(Device)),
        ("layout", layout, (None, *get_args(Layout))),
        ("optimizer", optimizer, (True, False)),
    ):
        if not any(type(value) is type(choice) and value == choice for choice in legal):
            choices = " or ".join(map(repr, legal))
            raise ConfigurationError(f"install({name}={value!r}): expected {choices}.")


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


def _joined(now: Installation, wanted: Installation) -> Installation:
    """Return what is in force after a second call: a layout may be added, the rest must agree."""
    layout = now.layout if wanted.layout is None else wanted.layout
    if replace(now, layout=layout) != replace(wanted, layout=layout) or now.layout not in (
        None,
        layout,
    ):
        raise ConfigurationError(
            f"megatron_muon is already installed, by {now}; {wanted} asks for something else. "
            "Call uninstall() first, or give both calls the same arguments."
        )
    return replace(now, layout=layout)


def _checked_tables(wanted: Installation) -> list[PatchSet]:
    """Return the tables to put in force; nothing is changed yet."""
    tables = list(_titled_tables(wanted).values())
    from megatron_muon.integration import seams

    for table in tables:
        seams.check(table.rows)
    if wanted.optimizer:
        from megatron_muon.integration.preflight import refuse_late_install

        refuse_late_install()
    return tables


def _titled_tables(wanted: Installation) -> dict[str, PatchSet]:
    tables = {}
    if wanted.on_cpu:
        # First, since it also decides how Megatron is imported.
        from megatron_muon.integration import cpu

        rows = cpu.table()
        from megatron_muon.integration.saving import writer_row

        tables["CPU stand-in"] = PatchSet([*rows, writer_row()])
    if wanted.optimizer:
        from megatron_muon.integration import seams

        tables["optimizer"] = PatchSet(seams.table())
    return tables


def _set_environment() -> None:
    from megatron_muon.integration.cpu import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        if name not in os.environ:
            _environment[name] = None
            os.environ[name] = value
