"""Device arguments on the CPU: ``"cuda"`` becomes ``"cpu"`` where a function of torch takes it.

Functions are wrapped one by one in place of a global ``TorchFunctionMode``, which would cost
Python time in every torch call. A call that names no CUDA device reaches torch's own function with
the very arguments it was given.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.jit._builtins import _get_builtin_table
from torch.utils._device import _device_constructors

from megatron_muon.integration.cpu_streams import CPU
from megatron_muon.integration.patching import Undo

AnyFunction = Callable[..., Any]


def is_cuda_device(device: Any) -> bool:
    """Whether a device argument names a CUDA device (an integer does, by torch's rule)."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def named_in_torch(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Give a stand-in for ``torch.<name>`` that name, so that it is pickled by reference to it."""

    def rename(function: AnyFunction) -> AnyFunction:
        function.__module__ = "torch"
        function.__qualname__ = name
        return function

    return rename


def factory_on_cpu(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Return what wraps a factory: a CUDA ``device`` becomes the CPU, pinned memory plain."""

    def wrap(function: AnyFunction) -> AnyFunction:
        @named_in_torch(name)
        @functools.wraps(function)
        def factory(*args: Any, **kwargs: Any) -> Any:
            if kwargs:
                device = kwargs.get("device")
                if device is not None and is_cuda_device(device):
                    kwargs["device"] = CPU
                if kwargs.get("pin_memory"):
                    kwargs["pin_memory"] = False
            return function(*args, **kwargs)

        return factory

    return wrap


def moves_to_cpu(function: AnyFunction) -> AnyFunction:
    """Wrap ``Tensor.to`` (and so ``Module.to``): a CUDA target becomes the CPU."""

    @named_in_torch("Tensor.to")
    @functools.wraps(function)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and is_cuda_device(args[0]):
            args = (CPU, *args[1:])
        elif kwargs:
            device = kwargs.get("device")
            if device is not None and is_cuda_device(device):
                kwargs["device"] = CPU
        return function(self, *args, **kwargs)

    return to


def stays(original: AnyFunction) -> AnyFunction:
    """Stand for ``Tensor.cuda`` (and so for ``Module.cuda``): a tensor is where it should be."""

    @named_in_torch("Tensor.cuda")
    @functools.wraps(original)
    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        del args, kwargs
        return self

    return cuda


def copies_to_plain_memory(original: AnyFunction) -> AnyFunction:
    """Stand for ``Tensor.pin_memory``: a copy, as there, since callers free the original."""

    @named_in_torch("Tensor.pin_memory")
    @functools.wraps(original)
    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        del device
        return self.detach().clone()

    return pin_memory


def loads_on_cpu(function: AnyFunction) -> AnyFunction:
    """Wrap ``torch.load``: storages saved from, or mapped to, a CUDA device go to the CPU."""

    @named_in_torch("load")
    @functools.wraps(function)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None:
            map_location = _cuda_storage_on_cpu
        elif is_cuda_device(map_location):
            map_location = CPU
        return function(f, map_location, *args, **kwargs)

    return load


def _cuda_storage_on_cpu(storage: Any, location: str) -> Any:
    """Keep a CUDA storage where it was read, on the CPU; ``None`` is torch's own choice."""
    return storage if location.startswith("cuda") else None


class TypeName(str):
    """A CPU tensor's type name that also equals the CUDA name of the same dtype.

    Megatron tells its parameters apart by comparing ``param.type()`` with
    ``"torch.cuda.BFloat16Tensor"`` and its like. The value is, prints, hashes and pickles as the
    CPU name.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if str.__eq__(self, other) is True:
            return True
        return isinstance(other, str) and str.__eq__(
            self, other.replace("torch.cuda.", "torch.", 1)
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return (str, (str(self),))


def names_type(function: AnyFunction) -> AnyFunction:
    """Wrap ``Tensor.type``: without arguments, answer to the CUDA name as well."""

    @named_in_torch("Tensor.type")
    @functools.wraps(function)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return function(self, *args, **kwargs)
        return TypeName(function(self))

    return type_


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownToTorch:
    """A row that tells torch which of its own factories the stand-ins are.

    torch knows its factories by identity: in ``with torch.device(...)`` (a cached set), in
    ``torch.jit.script`` and in ``torch.compile``. A cache that is filled while the stand-ins are in
    force would miss the originals for ever, and one filled before misses the stand-ins. The row
    comes after theirs.

    Attributes:
        names: The factories, as named in ``torch``.
        why: As for every row.
        needed_by: As for every row.
    """

    names: Sequence[str]
    why: str
    needed_by: str

    @property
    def target(self) -> str:
        """What is changed."""
        return "torch's caches of its own factories"

    def apply(self) -> Undo:
        """Enter originals and stand-ins where torch looks for factories."""
        scripted: dict[int, str] = _get_builtin_table()  # type: ignore[no-untyped-call]
        pairs = [(f, f.__wrapped__) for f in (getattr(torch, name) for name in self.names)]
        known = [(stand_in, f) for stand_in, f in pairs if id(f) in scripted]
        scripted.update({id(stand_in): scripted[id(f)] for stand_in, f in known})
        constructors = _device_constructors()
        constructors.update(f for stand_in, f in pairs if stand_in in constructors)
        _forget_compiler_rules()

        def undo() -> None:
            for stand_in, _ in known:
                del scripted[id(stand_in)]
            _forget_compiler_rules()

        return undo


def _forget_compiler_rules() -> None:
    """Make ``torch.compile`` look up torch's functions anew, if it has looked them up."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.clear_lru_cache()
