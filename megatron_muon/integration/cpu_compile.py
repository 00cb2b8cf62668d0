"""Megatron's fused functions on the CPU: they run as written, and nothing is compiled.

Compiling for the CPU takes longer than a short run and needs a C++ compiler, and the mere
decorating imports the compiler, 3 s of processor time in each process.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from megatron_muon.integration.cpu_quiet import IMPORT_SILENCES
from megatron_muon.integration.patching import Patch

AnyFunction = Callable[..., Any]

_JIT = "megatron.core.jit"
_COMPILED = "_torchdynamo_orig_callable"
"""Where a function that ``torch.compile`` made keeps the one it was given (torch 2.13)."""


def import_megatron() -> None:
    """Import Megatron without the compiler, which is imported when something is compiled.

    Nothing is installed by it: a function that Megatron decorates is compiled when it is first
    called, unless the CPU stand-in is in force by then.
    """
    compile_ = torch.compile
    torch.compile = _compiles_later
    try:
        with _silences():
            training = find_spec("megatron.training") is not None
            importlib.import_module("megatron.training.training" if training else "megatron.core")
    finally:
        torch.compile = compile_
        jit = sys.modules.get(_JIT)
        if getattr(jit, "jit_fuser", None) is _compiles_later:
            jit.jit_fuser = compile_  # type: ignore[union-attr]  # as it would have been


@contextmanager
def _silences() -> Iterator[None]:
    with ExitStack() as stack:
        for silence in IMPORT_SILENCES:
            stack.callback(silence.apply())
        yield


def _compiles_later(model: Any = None, **options: Any) -> Any:
    """Stand for ``torch.compile``, with and without options."""
    if model is None:
        return functools.partial(_compiles_later, **options)
    compiled: AnyFunction | None = None

    @functools.wraps(model)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if runs_as_written():
            return model(*args, **kwargs)
        if compiled is None:
            compiled = torch.compile(model, **options)
        return compiled(*args, **kwargs)

    setattr(call, _COMPILED, model)
    return call


def _fuses_later(model: Any = None, **options: Any) -> Any:
    """Stand for Megatron's ``jit_fuser``; while it does, functions run as written."""
    return _compiles_later(model, **options)


def runs_as_written() -> bool:
    """Whether the row for ``jit_fuser`` is in force."""
    return getattr(sys.modules.get(_JIT), "jit_fuser", None) is _fuses_later


def compile_rows() -> list[Patch]:
    """Return the row for ``jit_fuser``, and one for each name that holds what it has compiled."""
    fuser = Patch(
        module=_JIT,
        name="jit_fuser",
        replace=lambda original: _fuses_later,
        why="compiling for the CPU takes longer than a short run and needs a C++ compiler",
        needed_by="core/jit.py:enable_jit_fuser",
    )
    return [fuser, *_compiled_rows()]


def _compiled_rows() -> Iterator[Patch]:
    for module in [name for name in sys.modules if name.startswith("megatron.")]:
        for name, value in list(vars(sys.modules[module]).items()):
            members = {name: value}
            if isinstance(value, type) and value.__module__ == module:
                members = {f"{name}.{key}": member for key, member in vars(value).items()}
            for path, member in members.items():
                if (written := _as_written(member)) is not None:
                    yield _uncompiled(module, path, written)


def _as_written(member: Any) -> Any:
    """Return what a compiled function or static method was made of, ``None`` for all else."""
    if isinstance(member, staticmethod):
        function = _as_written(member.__func__)
        return None if function is None else staticmethod(function)
    return getattr(member, _COMPILED, None) if inspect.isfunction(member) else None


def _uncompiled(module: str, path: str, written: Any) -> Patch:
    function = getattr(written, "__func__", written)
    file = function.__module__.removeprefix("megatron.").replace(".", "/")
    return Patch(
        module=module,
        name=path,
        replace=lambda original: written,
        why="was decorated with torch.compile when it was imported",
        needed_by=f"{file}.py:{function.__qualname__}",
    )
