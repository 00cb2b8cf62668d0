"""Megatron on a machine without a CUDA device: one table of what is stood in for.

Megatron-Core asks ``torch.cuda`` for devices, streams, events and random-number state, and passes
``"cuda"`` devices to factory functions. Each row of the table answers one of these from the CPU and
names the upstream code that asks, inside the ``megatron`` package. What torch answers by itself
without a device (memory counters, ``empty_cache``) has no row, and of torch nothing outside
``torch.cuda`` and device arguments changes: ``torch.accelerator`` still says that there is no
device, and a tensor made on the CPU takes the very path it took before.

The stand-ins are in modules beside this one: :mod:`~megatron_muon.integration.cpu_streams`,
:mod:`~megatron_muon.integration.cpu_devices`, :mod:`~megatron_muon.integration.cpu_random`,
:mod:`~megatron_muon.integration.cpu_compile`, :mod:`~megatron_muon.integration.cpu_quiet`,
:mod:`~megatron_muon.integration.cpu_flags` and :mod:`~megatron_muon.integration.cpu_mxfp8`, which
stands in for Transformer Engine's MXFP8 weights.
``scripts/bench_cpu_standin.py`` measures their share of a training step.
"""

from __future__ import annotations

import functools
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.integration import cpu_devices as devices
from megatron_muon.integration import cpu_mxfp8
from megatron_muon.integration.cpu_compile import compile_rows, import_megatron
from megatron_muon.integration.cpu_flags import supplies_cpu_flags
from megatron_muon.integration.cpu_quiet import SILENCES
from megatron_muon.integration.cpu_random import random_state_rows
from megatron_muon.integration.cpu_streams import CPU, CpuEvent, CpuStream, CpuStreamContext
from megatron_muon.integration.patching import Patch, Row

__all__ = ["ENVIRONMENT", "import_megatron", "table"]

Replace = Callable[[Any], Any]

ENVIRONMENT = {
    # training/arguments.py:validate_args asks for it with tensor parallelism before Blackwell.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
"""Environment variables that Megatron checks, set where the user has not set them."""

FACTORIES = {
    "arange": "training/utils/common_utils.py:get_ltor_masks_and_position_ids",
    "as_tensor": "core/pipeline_parallel/schedules.py:_normalize_loss_scale",
    "empty": "core/pipeline_parallel/fine_grained_activation_offload.py:OffloadTensorPool.allocate",
    "empty_like": "core/dist_checkpointing/exchange_utils.py:_get_empty_tensor_for_exchange",
    "eye": "core/ssm/gated_delta_net/common.py:torch_chunk_gated_delta_rule",
    "full": "core/fault_injector.py:setup_fault_injection",
    "linspace": "core/models/vision/radio.py:RADIOViTModel._get_pos_embeddings",
    "ones": "core/transformer/utils.py:get_default_causal_mask",
    "ones_like": "core/models/mimo/model/base.py:MimoModel.align_embeddings_by_token_positions",
    "rand": "training/initialize.py:_warmup_jit_function",
    "randint": "core/models/audio/nemo_audio_preprocessing.py",
    "randn": "training/gpu_sniff_test.py:bench_gemms",
    "tensor": "core/optimizer/grad_scaler.py:MegatronGradScaler.__init__",
    "zeros": "core/optimizer/clip_grads.py:get_grad_norm_fp32",
    "zeros_like": "core/transformer/experimental_attention_variant/dsa_masking.py"
    ":build_dsattention_forward_mask",
}
"""Every factory function of torch to which Megatron gives a device, and one place where it does."""


def table() -> list[Row]:
    """Return every row: what is stood in for, why, and which upstream code needs it.

    Imports Megatron, so that what it compiled on import can be found.
    """
    import_megatron()
    return [
        *_device_rows(),
        *_stream_rows(),
        *random_state_rows(),
        *_report_rows(),
        *_device_argument_rows(),
        *_process_group_rows(),
        *_megatron_rows(),
        *cpu_mxfp8.table(),
        *compile_rows(),
        *SILENCES,
    ]


def _cuda(name: str, replace: Replace, why: str, needed_by: str) -> Patch:
    return Patch(module="torch.cuda", name=name, replace=replace, why=why, needed_by=needed_by)


def _value(value: Any) -> Replace:
    return lambda original: value


def _answers(value: Any) -> Replace:
    """Return what puts a function in place that answers ``value`` to whatever it is asked."""

    def replace(original: Any) -> Any:
        @functools.wraps(original)
        def answer(*args: Any, **kwargs: Any) -> Any:
            del args, kwargs
            return value

        return answer

    return replace


# --------------------------------------------------------------------------------------------
# torch.cuda
# --------------------------------------------------------------------------------------------


def _device_rows() -> list[Patch]:
    start = "training/initialize.py:_initialize_distributed"
    return [
        _cuda("is_available", _answers(False), "where there is a GPU that is not to be used, "
              "Megatron would take it", "training/training.py:update_seqlen_stats_from_cu_seqlens"),
        _cuda("current_device", _answers(CPU), "factories take the answer as their device",
              "core/distributed/param_and_grad_buffer.py:_ParamAndGradBuffer.__init__"),
        _cuda("device_count", _answers(1), "with no device the model-parallel random state is not "
              "seeded", "training/initialize.py:_set_random_seed"),
        Patch(module="torch.accelerator", name="device_count", replace=_answers(0),
              why="asks torch.cuda, and there is none to be found",
              needed_by="training/initialize.py:_set_random_seed"),
        _cuda("set_device", _answers(None), "there is one device", start),
        _cuda("get_device_capability", _answers((0, 0)), "asks the driver",
              "training/arguments.py:validate_args"),
        _cuda("get_device_properties", _value(_device_properties), "asks the driver",
              "training/utils/common_utils.py:get_device_arch_version"),
    ]  # fmt: skip


def _device_properties(device: Any = None) -> SimpleNamespace:
    del device
    return SimpleNamespace(
        name=platform.processor() or platform.machine(),
        major=0,
        minor=0,
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        multi_processor_count=os.cpu_count() or 1,
    )


def _stream_rows() -> list[Patch]:
    why = "there are no CUDA streams; the CPU works in program order"
    wrap = "training/models/dist_utils.py:_ddp_wrap"
    return [
        _cuda("Stream", _value(CpuStream), why, wrap),
        _cuda("Event", _value(CpuEvent), why, "core/utils.py:StragglerDetector.start_method"),
        _cuda("stream", _value(CpuStreamContext), why, wrap),
        _cuda("current_stream", _answers(CpuStream()), why, wrap),
        _cuda("synchronize", _answers(None), why, "core/timers.py:Timer.start"),
        _cuda("is_current_stream_capturing", _answers(False), "there are no CUDA graphs",
              "core/transformer/moe/router_trace.py:RouterTracer.make_hook"),
    ]  # fmt: skip


def _report_rows() -> list[Patch]:
    profile = "a torch without CUDA has no NVTX"
    return [
        _cuda("memory_stats", lambda original: lambda device=None: defaultdict(int),
              "without a device it holds no counters, and they are read by name",
              "training/training.py:training_log"),
        _cuda("device_memory_used", _answers(0), "asks the driver",
              "training/utils/common_utils.py:report_memory"),
        _cuda("nvtx.range_push", _answers(None), profile, "core/utils.py:nvtx_range_push"),
        _cuda("nvtx.range_pop", _answers(None), profile, "core/utils.py:nvtx_range_pop"),
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------
# Device arguments
# --------------------------------------------------------------------------------------------


def _device_argument_rows() -> list[Row]:
    why = 'a device argument "cuda" becomes the CPU'
    optimizer = "core/optimizer"
    others: dict[str, tuple[Replace, str]] = {
        "Tensor.to": (
            devices.moves_to_cpu,
            f"{optimizer}/cpu_offloading/hybrid_optimizer.py:HybridDeviceOptimizer",
        ),
        "Tensor.cuda": (devices.stays, "core/tensor_parallel/data.py:broadcast_data"),
        "Tensor.pin_memory": (
            devices.copies_to_plain_memory,
            "core/distributed/param_and_grad_buffer.py:_ParamAndGradBuffer.offload_to_cpu",
        ),
        "Tensor.type": (devices.names_type, f"{optimizer}/optimizer.py"
                        ":Float16OptimizerWithFloat16Params.__init__"),
        "load": (
            devices.loads_on_cpu,
            f"{optimizer}/layer_wise_optimizer.py"
            ":LayerWiseDistributedOptimizer.load_state_dict_from_file",
        ),
    }  # fmt: skip
    return [
        *(Patch(module="torch", name=name, replace=devices.factory_on_cpu(name), why=why,
                needed_by=needed_by)
          for name, needed_by in FACTORIES.items()),
        devices.KnownToTorch(
            names=tuple(FACTORIES),
            why="torch knows its own factories by identity",
            needed_by="core/jit.py:enable_jit_fuser",
        ),
        *(Patch(module="torch", name=name, replace=replace, why=why, needed_by=needed_by)
          for name, (replace, needed_by) in others.items()),
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------
# Process groups
# --------------------------------------------------------------------------------------------


def _process_group_rows() -> list[Patch]:
    why = "gloo is the CPU's backend"
    return [
        Patch(module="torch.distributed", name="init_process_group", replace=_over_gloo, why=why,
              needed_by="training/initialize.py:_initialize_distributed"),
        Patch(module="torch.distributed", name="new_group", replace=_over_gloo, why=why,
              needed_by="core/parallel_state.py:create_group"),
        Patch(module="torch.distributed", name="barrier", replace=_without_device_ids,
              why="gloo takes no device ids",
              needed_by="core/parallel_state.py:initialize_model_parallel"),
        Patch(module="torch.distributed", name="all_gather", replace=_of_uneven_sizes,
              why="gloo gathers equal sizes only",
              needed_by="core/optimizer/layer_wise_optimizer.py:LayerWiseDistributedOptimizer"),
        Patch(module="megatron.core.distributed.param_and_grad_buffer",
              name="_LayerwiseAllGatherHandle.wait", replace=_waits_for_all,
              why="gloo's collectives do not end in order",
              needed_by="core/distributed/param_and_grad_buffer.py:_ParamAndGradBucketGroup"),
    ]  # fmt: skip


class _Works:
    """Several asynchronous collectives as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, *args: Any) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait(*args)


def _of_uneven_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``all_gather``: parts of different sizes are broadcast one by one."""

    @functools.wraps(function)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        if len({part.numel() for part in tensor_list}) == 1:
            return function(tensor_list, tensor, group=group, async_op=async_op)
        group = group or dist.group.WORLD
        own = tensor_list[group.rank()]
        if own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor)
        works = [
            dist.broadcast(part, dist.get_global_rank(group, rank), group=group, async_op=async_op)
            for rank, part in enumerate(tensor_list)
            if part.numel()
        ]
        return _Works(works) if async_op else None

    return all_gather


def _waits_for_all(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``_LayerwiseAllGatherHandle.wait``, which waits for the last collective only."""

    @functools.wraps(function)
    def wait(self: Any) -> None:
        for handle in self.handles[:-1]:
            handle.wait()
        function(self)

    return wait


def _over_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what makes process groups: NCCL becomes gloo, and what only NCCL takes is dropped."""

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        if devices.is_cuda_device(kwargs.get("device_id")):
            del kwargs["device_id"]
        if "NCCL" in type(kwargs.get("pg_options")).__qualname__:
            del kwargs["pg_options"]
        kwargs = {name: _gloo_for_nccl(value) for name, value in kwargs.items()}
        return function(*map(_gloo_for_nccl, args), **kwargs)

    return make


def _gloo_for_nccl(argument: Any) -> Any:
    """Return ``gloo`` for ``nccl`` and for ``cpu:gloo,cuda:nccl``, and all else as it is."""
    if isinstance(argument, str) and "nccl" in argument.lower().replace(",", ":").split(":"):
        return "gloo"
    return argument


def _without_device_ids(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def barrier(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return function(*args, **kwargs)

    return barrier


# --------------------------------------------------------------------------------------------
# Megatron
# --------------------------------------------------------------------------------------------


def _megatron_rows() -> list[Patch]:
    core = [
        Patch(module="megatron.core.datasets.utils", name="compile_helpers",
              replace=_compiles_where_missing, why="runs make where the wheel has no Makefile",
              needed_by="training/initialize.py:_compile_dependencies"),
        Patch(module="megatron.core.transformer.moe.token_dispatcher",
              name="maybe_move_tensor_to_cpu", replace=_counts_as_numpy,
              why="all_to_all takes sizes as numbers, and leaves a tensor on the CPU a tensor",
              needed_by="core/transformer/moe/token_dispatcher.py:MoEAlltoAllTokenDispatcher"),
    ]  # fmt: skip
    if find_spec("megatron.training") is None:
        return core
    return [
        *core,
        Patch(module="megatron.training.arguments", name="add_megatron_arguments",
              replace=supplies_cpu_flags, why="some defaults need CUDA or Transformer Engine",
              needed_by="training/arguments.py:parse_args"),
        *(Patch(module=module, name="initialize_megatron", replace=_allows_no_cuda,
                why="refuses to start without CUDA unless told so", needed_by=needed_by)
          for module, needed_by in (
              ("megatron.training.initialize", "training/initialize.py:initialize_megatron"),
              ("megatron.training.training", "training/training.py:pretrain"),
              ("megatron.training", "training/__init__.py"))),
    ]  # fmt: skip


def _compiles_where_missing(function: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``compile_helpers``: the wheel ships the compiled helper and no Makefile."""

    @functools.wraps(function)
    def compile_helpers() -> None:
        try:
            from megatron.core.datasets import helpers_cpp  # noqa: F401
        except ImportError:
            function()

    return compile_helpers


def _counts_as_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``maybe_move_tensor_to_cpu``: what is on the CPU is still returned as numbers."""

    @functools.wraps(function)
    def maybe_move_tensor_to_cpu(
        tensor: Any, as_numpy: bool = False, record_stream: bool = False
    ) -> Any:
        if as_numpy and torch.is_tensor(tensor) and tensor.device == CPU:
            return tensor.numpy()
        return function(tensor, as_numpy, record_stream)

    return maybe_move_tensor_to_cpu


def _allows_no_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``initialize_megatron``: Megatron's own switch for machines without CUDA is on."""

    @functools.wraps(function)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        if not args:
            kwargs.setdefault("allow_no_cuda", True)
        return function(*args, **kwargs)

    return initialize_megatron
