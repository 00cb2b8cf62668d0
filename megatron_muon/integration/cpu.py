"""Megatron on a machine without a CUDA device: one table of what is stood in for.

Megatron-Core asks ``torch.cuda`` for devices, streams, events, random-number state and memory
counters, and passes ``"cuda"`` devices to factory functions. Each row of the table answers one of
these from the CPU and names the upstream code that asks. Nothing else of torch changes:
``torch.cuda.is_available()`` and ``torch.accelerator`` still say that there is no device, and a
tensor made with ``device="cpu"`` or without a device takes the very path it took before.

Factory functions are wrapped one by one in place of a global ``TorchFunctionMode``, which would
cost Python time in every torch call; a wrapped call without a CUDA device costs one dictionary
look-up (``scripts/bench_cpu_standin.py`` measures the share of a training step).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from megatron_muon.integration.cpu_flags import supplies_cpu_flags
from megatron_muon.integration.patching import Patch, PatchSet

CPU = torch.device("cpu")


# --------------------------------------------------------------------------------------------
# Streams and events: the CPU runs everything in program order, so waiting is already done.
# --------------------------------------------------------------------------------------------


class CpuStream:
    """Stands for ``torch.cuda.Stream``: work is finished when the call that started it returns."""

    cuda_stream = 0
    device = CPU
    priority = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        del device, priority, kwargs

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: the other stream's work has been done."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: the event has happened."""

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Return ``event``, or a new one, recorded now."""
        event = event or CpuEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Do nothing: there is no work left."""

    def query(self) -> bool:
        """Say that all work is done."""
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the only priority there is."""
        return (0, 0)


class CpuEvent:
    """Stands for ``torch.cuda.Event``; keeps the wall-clock second of its record."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self._second = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        del stream
        self._second = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Do nothing: it has happened."""

    def query(self) -> bool:
        """Say that it has happened."""
        return True

    def synchronize(self) -> None:
        """Do nothing: it has happened."""

    def elapsed_time(self, end: CpuEvent) -> float:
        """Milliseconds from this event to ``end``."""
        return (end._second - self._second) * 1e3


_STREAM = CpuStream()


# --------------------------------------------------------------------------------------------
# Device arguments
# --------------------------------------------------------------------------------------------


def is_cuda_device(device: Any) -> bool:
    """Whether a device argument names a CUDA device (an integer does, by torch's rule)."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a factory: a CUDA ``device`` becomes the CPU, pinned memory becomes plain memory."""

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


def _moves_to_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.to`` and ``Module.to``: a CUDA target, by place or by name, becomes the CPU."""

    @functools.wraps(function)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and is_cuda_device(args[0]):
            args = (CPU, *args[1:])
        elif kwargs:
            device = kwargs.get("device")
            if device is not None and is_cuda_device(device):
                kwargs["device"] = CPU
        return function(self, *args, **kwargs)

    return to


def _stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for ``Tensor.cuda``, ``Module.cuda`` and ``Tensor.pin_memory``: already where it is."""
    del args, kwargs
    return self


def _loads_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``torch.load``: a CUDA ``map_location`` becomes the CPU."""

    @functools.wraps(function)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is not None and is_cuda_device(map_location):
            map_location = CPU
        return function(f, map_location, *args, **kwargs)

    return load


class _TypeName(str):
    """A CPU tensor's type name that also equals the CUDA name of the same dtype.

    Megatron tells its parameters apart by comparing ``param.type()`` with
    ``"torch.cuda.BFloat16Tensor"`` and its like. The value is, prints and hashes as the CPU name.
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


def _names_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.type``: without arguments, answer to the CUDA name as well."""

    @functools.wraps(function)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return function(self, *args, **kwargs)
        return _TypeName(function(self))

    return type_


# --------------------------------------------------------------------------------------------
# torch.cuda questions
# --------------------------------------------------------------------------------------------


def _device_properties(device: Any = None) -> SimpleNamespace:
    del device
    return SimpleNamespace(
        name=platform.processor() or platform.machine(),
        major=0,
        minor=0,
        total_memory=_memory_nbytes(),
        multi_processor_count=os.cpu_count() or 1,
    )


def _memory_nbytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_nbytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _rng_state(device: Any = None) -> torch.Tensor:
    del device
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    del device
    torch.default_generator.set_state(new_state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _megatron_rng_state(
    device: Any = "cuda", clone: bool = False, graph_safe: bool = False
) -> torch.Tensor:
    del clone, graph_safe
    return _rng_state(device)


def _megatron_set_rng_state(
    new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False
) -> None:
    del graph_safe
    _set_rng_state(new_state, device)


@contextlib.contextmanager
def _no_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    del args, kwargs
    yield


class _NoDevice(contextlib.AbstractContextManager[None]):
    """Stands for ``torch.cuda.device``: selecting a device selects nothing."""

    def __init__(self, device: Any = None) -> None:
        del device

    def __exit__(self, *exc: object) -> None:
        return None


def _no_typed_tensor(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def build(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 1 and not isinstance(args[0], int):
            return torch.tensor(args[0], dtype=dtype, **kwargs)
        return torch.empty(*args, dtype=dtype, **kwargs)

    return build


def _always(value: Any) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return value

    return answer


# --------------------------------------------------------------------------------------------
# Process groups
# --------------------------------------------------------------------------------------------


def _gloo_backend(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a process-group constructor: ``nccl`` becomes ``gloo``, its options fall away."""

    @functools.wraps(function)
    def build(*args: Any, **kwargs: Any) -> Any:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("pg_options", "device_id")}
        if str(kwargs.get("backend", "")).startswith("nccl"):
            kwargs["backend"] = "gloo"
        if args and isinstance(args[0], str) and args[0].startswith("nccl"):
            args = ("gloo", *args[1:])
        return function(*args, **kwargs)

    return build


def _plain_barrier(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def barrier(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return function(*args, **kwargs)

    return barrier


def _allow_no_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``initialize_megatron``: Megatron's own switch for machines without CUDA is on."""

    @functools.wraps(function)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        if not args:
            kwargs.setdefault("allow_no_cuda", True)
        return function(*args, **kwargs)

    return initialize_megatron


def _as_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Stand for Megatron's ``jit_fuser``: the function runs as written."""
    return function


def import_megatron() -> None:
    """Import Megatron without compiling: ``torch.compile`` returns the function while it loads.

    Decorating with the real one imports dynamo and inductor, 3 s of CPU time a process, for
    functions that are then run as written.
    """
    compile_ = torch.compile
    torch.compile = _as_decorated  # type: ignore[assignment]
    try:
        training = find_spec("megatron.training") is not None
        importlib.import_module("megatron.training.training" if training else "megatron.core")
    finally:
        torch.compile = compile_


def _as_decorated(function: Any = None, **kwargs: Any) -> Any:
    """Stand for ``torch.compile``, with and without arguments."""
    del kwargs
    return _as_is if function is None else function


def _compiled_rows() -> list[Patch]:
    """Return a row for each function that Megatron's ``jit_fuser`` wrapped when it was imported."""
    rows = []
    for module in [name for name in sys.modules if name.startswith("megatron.")]:
        for name, value in list(vars(sys.modules[module]).items()):
            members = {name: value}
            if isinstance(value, type) and value.__module__ == module:
                members = {f"{name}.{attribute}": v for attribute, v in vars(value).items()}
            rows += [
                Patch(module=module, name=path, replace=_value(v._torchdynamo_orig_callable),
                      why="was wrapped by torch.compile at import, see jit_fuser",
                      needed_by="core/jit.py:jit_fuser")
                for path, v in members.items()
                if inspect.isfunction(v) and hasattr(v, "_torchdynamo_orig_callable")
            ]  # fmt: skip
    return rows


def _compile_where_missing(function: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``compile_helpers``: the wheel ships the compiled helper and no Makefile."""

    @functools.wraps(function)
    def compile_helpers() -> None:
        try:
            from megatron.core.datasets import helpers_cpp  # noqa: F401
        except ImportError:
            function()

    return compile_helpers


# --------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------

_FACTORIES = (
    "arange as_tensor asarray empty empty_like empty_strided eye full full_like linspace logspace "
    "normal ones ones_like rand rand_like randint randint_like randn randn_like randperm "
    "scalar_tensor tensor zeros zeros_like tril_indices triu_indices"
).split()
_NEW_TENSORS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()


def _value(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _cuda(name: str, value: Any, why: str, needed_by: str) -> Patch:
    return Patch(
        module="torch.cuda", name=name, replace=_value(value), why=why, needed_by=needed_by
    )


def _cuda_rows() -> list[Patch]:
    stream = "there are no CUDA streams; the CPU works in program order"
    memory = "device memory counters have nothing to count"
    rng = "the model-parallel random state lives in the CPU generator"
    buffers = "core/distributed/param_and_grad_buffer.py:start_param_sync"
    report = "training/utils/common_utils.py:report_memory"
    random = "core/tensor_parallel/random.py:CudaRNGStatesTracker"
    nvtx = "core/utils.py:nvtx_range_push"
    return [
        _cuda("current_device", _always(CPU), "factories take the answer as their device",
              "core/optimizer/optimizer.py:_copy_model_grads_to_main_grads"),
        _cuda("device_count", _always(1), "with 0 devices no model-parallel group is made",
              "training/initialize.py:_initialize_distributed"),
        _cuda("set_device", _always(None), "there is one device",
              "training/initialize.py:_initialize_distributed"),
        _cuda("device", _NoDevice, "selecting a device selects nothing", random),
        _cuda("get_device_properties", _device_properties, "asks the driver",
              "training/utils/common_utils.py:get_device_arch_version"),
        _cuda("get_device_capability", _always((0, 0)), "asks the driver",
              "core/utils.py:is_te_min_version users"),
        _cuda("get_device_name", _always(platform.processor() or platform.machine()),
              "asks the driver", "training/theoretical_memory_usage.py"),
        _cuda("synchronize", _always(None), stream, "core/timers.py:Timer.start"),
        _cuda("Stream", CpuStream, stream, buffers),
        _cuda("ExternalStream", CpuStream, stream, "core/full_cuda_graph.py"),
        _cuda("Event", CpuEvent, stream, "core/pipeline_parallel/schedules.py"),
        _cuda("stream", _no_context, stream, buffers),
        _cuda("StreamContext", _no_context, stream, buffers),
        _cuda("current_stream", _always(_STREAM), stream, buffers),
        _cuda("default_stream", _always(_STREAM), stream, buffers),
        _cuda("set_stream", _always(None), stream, "training/initialize.py:_initialize_distributed"),
        _cuda("is_current_stream_capturing", _always(False), "there are no CUDA graphs",
              "core/utils.py:safe_get_full_tensor"),
        _cuda("empty_cache", _always(None), memory, "training/training.py:train_step"),
        _cuda("ipc_collect", _always(None), memory, "training/training.py:train"),
        _cuda("memory_allocated", _always(0), memory, report),
        _cuda("max_memory_allocated", _always(0), memory, report),
        _cuda("memory_reserved", _always(0), memory, report),
        _cuda("max_memory_reserved", _always(0), memory, report),
        _cuda("device_memory_used", _always(0), memory, report),
        _cuda("reset_peak_memory_stats", _always(None), memory, report),
        _cuda("memory_stats", lambda device=None: defaultdict(int), memory, report),
        _cuda("mem_get_info", lambda device=None: (_free_nbytes(), _memory_nbytes()),
              "answers with the host's memory", "core/inference/contexts"),
        _cuda("get_rng_state", _rng_state, rng, "training/checkpointing.py:get_rng_state"),
        _cuda("set_rng_state", _set_rng_state, rng, "training/checkpointing.py:load_checkpoint"),
        _cuda("random.get_rng_state", _rng_state, rng, random),
        _cuda("random.set_rng_state", _set_rng_state, rng, random),
        _cuda("manual_seed", _seed, rng, random),
        _cuda("manual_seed_all", _seed, rng, "training/initialize.py:_set_random_seed"),
        _cuda("default_generators", (torch.default_generator,), rng, random),
        _cuda("nvtx.range_push", _always(None), "a torch without CUDA has no NVTX", nvtx),
        _cuda("nvtx.range_pop", _always(None), "a torch without CUDA has no NVTX", nvtx),
        _cuda("nvtx.range", _no_context, "a torch without CUDA has no NVTX", nvtx),
        _cuda("FloatTensor", _no_typed_tensor(torch.float32), "the type has no CUDA storage",
              "core/optimizer/grad_scaler.py:DynamicGradScaler"),
        _cuda("HalfTensor", _no_typed_tensor(torch.float16), "the type has no CUDA storage",
              "core/optimizer/optimizer.py"),
        _cuda("BFloat16Tensor", _no_typed_tensor(torch.bfloat16), "the type has no CUDA storage",
              "core/optimizer/optimizer.py"),
        _cuda("IntTensor", _no_typed_tensor(torch.int32), "the type has no CUDA storage",
              "core/optimizer/optimizer.py"),
        _cuda("LongTensor", _no_typed_tensor(torch.int64), "the type has no CUDA storage",
              "core/tensor_parallel/data.py:_build_key_size_numel_dictionaries"),
    ]  # fmt: skip


def _device_argument_rows() -> list[Patch]:
    why = 'a device argument "cuda" becomes the CPU'
    factories = [
        Patch(module="torch", name=name, replace=_on_cpu, why=why,
              needed_by="core/distributed/param_and_grad_buffer.py:_ParamAndGradBuffer")
        for name in _FACTORIES
    ]  # fmt: skip
    methods = [
        Patch(module="torch", name=f"Tensor.{name}", replace=_on_cpu, why=why,
              needed_by="core/optimizer/distrib_optimizer.py")
        for name in _NEW_TENSORS
    ]  # fmt: skip
    moves = [
        ("Tensor.to", _moves_to_cpu, "core/optimizer/optimizer.py"),
        ("nn.Module.to", _moves_to_cpu, "training/training.py:get_model"),
        ("Tensor.cuda", _value(_stay), "core/tensor_parallel/data.py:broadcast_data"),
        ("nn.Module.cuda", _value(_stay), "training/models/dist_utils.py"),
        ("Tensor.pin_memory", _value(_stay), "core/optimizer/cpu_offloading"),
        ("load", _loads_on_cpu, "training/checkpointing.py:_load_base_checkpoint"),
        ("Tensor.type", _names_type, "core/optimizer/optimizer.py:1009"),
    ]
    return [
        *factories,
        *methods,
        *(Patch(module="torch", name=name, replace=make, why=why, needed_by=needed_by)
          for name, make, needed_by in moves),
    ]  # fmt: skip


def _process_group_rows() -> list[Patch]:
    groups = "gloo is the CPU's backend"
    return [
        Patch(module="torch.distributed", name="init_process_group", replace=_gloo_backend,
              why=groups, needed_by="training/initialize.py:_initialize_distributed"),
        Patch(module="torch.distributed", name="new_group", replace=_gloo_backend,
              why=groups, needed_by="core/parallel_state.py:create_group"),
        Patch(module="torch.distributed", name="barrier", replace=_plain_barrier,
              why="gloo takes no device ids", needed_by="core/timers.py:Timers"),
    ]  # fmt: skip


def _megatron_core_rows() -> list[Patch]:
    rng = "goes through private CUDA calls, past torch.cuda"
    return [
        Patch(module="megatron.core.tensor_parallel.random", name="_get_cuda_rng_state",
              replace=_value(_megatron_rng_state), why=rng,
              needed_by="core/tensor_parallel/random.py:CudaRNGStatesTracker.fork"),
        Patch(module="megatron.core.tensor_parallel.random", name="_set_cuda_rng_state",
              replace=_value(_megatron_set_rng_state), why=rng,
              needed_by="core/tensor_parallel/random.py:CudaRNGStatesTracker.fork"),
        Patch(module="megatron.core.jit", name="jit_fuser", replace=_value(_as_is),
              why="compiling for the CPU takes longer than a short run and needs a C++ compiler",
              needed_by="core/jit.py:enable_jit_fuser"),
        Patch(module="megatron.core.datasets.utils", name="compile_helpers",
              replace=_compile_where_missing, why="runs make where the wheel has no Makefile",
              needed_by="training/initialize.py:_compile_dependencies"),
    ]  # fmt: skip


def _megatron_training_rows() -> list[Patch]:
    why = "refuses to start without CUDA unless told so"
    flags = Patch(module="megatron.training.arguments", name="add_megatron_arguments",
                  replace=supplies_cpu_flags, why="some defaults need CUDA or Transformer Engine",
                  needed_by="training/arguments.py:parse_args")
    return [
        flags,
        *(Patch(module=module, name="initialize_megatron", replace=_allow_no_cuda, why=why,
                needed_by="training/initialize.py:initialize_megatron")
          for module in ("megatron.training.initialize", "megatron.training.training",
                         "megatron.training")),
    ]  # fmt: skip


def table() -> list[Patch]:
    """Return every row: what is stood in for, why, and which upstream code needs it.

    Imports Megatron, so that what it compiled on import can be found.
    """
    import_megatron()
    return [
        *_cuda_rows(),
        *_device_argument_rows(),
        *_process_group_rows(),
        *_megatron_core_rows(),
        *(_megatron_training_rows() if find_spec("megatron.training") else ()),
        *_compiled_rows(),
    ]


ENVIRONMENT = {
    # training/arguments.py:validate_args asks for it with tensor parallelism before Blackwell.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
"""Environment variables that Megatron checks, set where the user has not set them."""
