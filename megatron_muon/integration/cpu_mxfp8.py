"""MXFP8 weights in Megatron's local layers, on a machine without Transformer Engine.

With ``--fp8-format e4m3 --fp8-recipe mxfp8`` the linear layers of the transformer layers multiply
by MXFP8 weights in forward and backward; activations and gradients stay bf16. Which layers these
are Megatron decides, by building them inside ``get_fp8_context(is_init=True)``; their weights are
marked.

* ``Float16Module`` checks that every marked weight can be cut in blocks, by its name.
* Without ``--fp8-param-gather`` a marked weight is bf16, and is quantized where it is used.
* With it, ``Float16Module`` also turns every marked weight into a :class:`CpuMXFP8Tensor`, before
  DDP makes its buffers, and keeps the bf16 value for the optimizer's masters.

Either way a layer multiplies by the same tensor of the same class, so that both can be compared bit
for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from megatron_muon.errors import ConfigurationError, UnsupportedError
from megatron_muon.integration.cpu_mxfp8_format import BLOCK
from megatron_muon.integration.cpu_mxfp8_tensor import (
    CpuMXFP8Quantizer,
    CpuMXFP8Tensor,
    keep_high_precision_init_val,
)
from megatron_muon.integration.names import named_parameters
from megatron_muon.integration.patching import Patch

MARK = "is_mxfp8_weight"
"""Attribute of a parameter: a layer multiplies by its MXFP8 values."""

_is_building = False


def table() -> list[Patch]:
    """Return the rows, none where Transformer Engine's classes are there to be used."""
    if not _stands_in():
        return []
    return [
        *_class_rows(),
        *_weight_rows(),
        *_recompute_rows(),
        *_checkpoint_rows(),
        Patch(
            module="megatron.core.transformer.transformer_config",
            name="is_te_min_version",
            replace=_takes_empty_experts,
            why="an expert without tokens needs a Transformer Engine that takes none; local layers "
            "do",
            needed_by="core/transformer/transformer_config.py:TransformerConfig.__post_init__",
        ),
    ]


def is_cpu_fp8() -> bool:
    """Whether FP8 is what this module makes of it, and not Transformer Engine's."""
    from megatron_muon.integration.install import installation

    state = installation()
    return state is not None and state.on_cpu and _stands_in()


def _stands_in() -> bool:
    from megatron.core import fp8_utils

    return not fp8_utils.HAVE_TE


def _class_rows() -> list[Patch]:
    """Return the rows through which Megatron finds the class when it asks what a tensor is."""
    module = "megatron.core.fp8_utils"
    why = "weights of the CPU's class are MXFP8 weights to Megatron"
    rows: dict[str, tuple[Any, str]] = {
        "FP8_TENSOR_CLASS": (CpuMXFP8Tensor, "is_float8tensor"),
        "HAVE_TE_FP8_TENSOR_CLASS": (True, "is_float8tensor"),
        "MXFP8Tensor": (CpuMXFP8Tensor, "is_mxfp8tensor"),
        "HAVE_TE_MXFP8TENSOR": (True, "is_mxfp8tensor"),
    }
    return [_fills(module, name, value, why, f"core/fp8_utils.py:{function}")
            for name, (value, function) in rows.items()]  # fmt: skip


def _fills(module: str, name: str, value: Any, why: str, needed_by: str) -> Patch:
    """Return a row for a name that Megatron leaves empty without Transformer Engine."""
    return Patch(
        module=module, name=name, replace=lambda empty: value, why=why, needed_by=needed_by,
        vacant=True,
    )  # fmt: skip


def _weight_rows() -> list[Patch]:
    """Return the rows that mark, use and convert the weights."""
    where_built = {
        "megatron.core.fp8_utils": "core/transformer/transformer_block.py",
        "megatron.core.transformer.transformer_block":
            "core/transformer/transformer_block.py:TransformerBlock._build_layers",
        "megatron.core.transformer.multi_token_prediction":
            "core/transformer/multi_token_prediction.py:MultiTokenPredictionBlock._build_layers",
        "megatron.core.models.hybrid.hybrid_block":
            "core/models/hybrid/hybrid_block.py:HybridStack.__init__",
    }  # fmt: skip
    linear = "megatron.core.tensor_parallel.layers"
    layers = ("ColumnParallelLinear", "RowParallelLinear")
    return [
        *(Patch(module=module, name="get_fp8_context", replace=_builds_mxfp8_layers,
                why="says which layers have MXFP8 weights", needed_by=needed_by)
          for module, needed_by in where_built.items()),
        *(Patch(module=linear, name=f"{layer}.__init__", replace=_marks_weight,
                why="a layer built where MXFP8 layers are has its weight marked",
                needed_by=f"core/tensor_parallel/layers.py:{layer}")
          for layer in layers),
        *(Patch(module=linear, name=f"{layer}._forward_impl", replace=_multiplies_by_mxfp8,
                why="Transformer Engine's layers quantize a bf16 weight where it is used",
                needed_by=f"core/tensor_parallel/layers.py:{layer}.forward")
          for layer in layers),
        Patch(module="megatron.core.transformer.module", name="Float16Module.__init__",
              replace=_checks_and_quantizes_weights,
              why="DDP makes its buffers by what the weights are; Transformer Engine's layers are "
              "built with MXFP8 weights, and refuse shapes that have none",
              needed_by="core/transformer/module.py:Float16Module"),
    ]  # fmt: skip


def _recompute_rows() -> list[Patch]:
    """Return the rows that let layers with MXFP8 weights recompute their activations."""
    why = "with FP8 Megatron recomputes by Transformer Engine, which local layers do not need"
    return [
        Patch(module="megatron.core.extensions.transformer_engine", name="te_checkpoint",
              replace=lambda original: _checkpoint, why=why,
              needed_by="core/transformer/transformer_layer.py:TransformerLayer"),
        *(_fills(f"megatron.core.{module}", "te_checkpoint", _checkpoint, why, needed_by)
          for module, needed_by in (
              ("recompute", "core/recompute.py:checkpointed_forward"),
              ("transformer.moe.moe_layer", "core/transformer/moe/moe_layer.py:MoELayer"))),
    ]  # fmt: skip


def _checkpoint_rows() -> list[Patch]:
    """Return the rows that keep MXFP8 out of checkpoints."""
    core = [
        Patch(module="megatron.core.dist_checkpointing", name=name, replace=_takes_values,
              why="a checkpoint holds bf16 values; Megatron makes them of tensors on a GPU only",
              needed_by=f"core/dist_checkpointing/serialization.py:{name}")
        for name in ("save", "load")
    ]  # fmt: skip
    if find_spec("megatron.training") is None:
        return core
    return [
        *core,
        Patch(
            module="megatron.training.checkpointing",
            name="generate_state_dict",
            replace=_gives_values,
            why="torch.load takes no class that it does not know from a torch checkpoint",
            needed_by="training/checkpointing.py:save_checkpoint",
        ),
    ]


# --------------------------------------------------------------------------------------------
# Which weights
# --------------------------------------------------------------------------------------------


@contextmanager
def building_mxfp8_layers() -> Iterator[None]:
    """Give the linear layers that are built inside MXFP8 weights."""
    global _is_building
    before, _is_building = _is_building, True
    try:
        yield
    finally:
        _is_building = before


def _builds_mxfp8_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_fp8_context``: where layers are built, their weights are marked."""

    @functools.wraps(original)
    def get_fp8_context(config: Any, layer_no: int = -1, is_init: bool = False) -> Any:
        from megatron.core.fp8_utils import is_first_last_bf16_layer

        if not config.fp8:
            return original(config, layer_no, is_init)
        message = unsupported(config)
        if message is not None:
            raise UnsupportedError(message)
        if not is_init or is_first_last_bf16_layer(config, layer_no):
            return original(config, layer_no, is_init)
        return building_mxfp8_layers()

    return get_fp8_context


def unsupported(config: Any) -> str | None:
    """Return what the layers here cannot compute in FP8, ``None`` if nothing is asked for.

    Args:
        config: Megatron's ``TransformerConfig``, or its arguments, which have the same names.
    """
    if not config.fp8:
        return None
    recipe = getattr(config.fp8_recipe, "value", config.fp8_recipe)
    if recipe != "mxfp8":
        return (
            f"--fp8-recipe {recipe} needs Transformer Engine and a GPU. On the CPU use "
            "--fp8-recipe mxfp8, or drop --fp8-format."
        )
    if config.fp8_output_proj:
        return "--fp8-output-proj needs Transformer Engine and a GPU. Drop it on the CPU."
    return None


def _marks_weight(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a linear layer's constructor: its weight is marked if MXFP8 layers are being built."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        if _is_building and self.weight is not None:
            setattr(self.weight, MARK, True)

    return __init__


# --------------------------------------------------------------------------------------------
# How they are used
# --------------------------------------------------------------------------------------------


class _QuantizedForUse(torch.autograd.Function):
    """The MXFP8 tensor of a bf16 weight; the gradient reaches the weight as it is."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> CpuMXFP8Tensor:
        """Quantize."""
        del ctx
        return CpuMXFP8Quantizer()(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Pass the gradient on."""
        del ctx
        return grads[0]


def _multiplies_by_mxfp8(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a linear layer's product: a marked weight that is still bf16 is quantized for it."""

    @functools.wraps(original)
    def _forward_impl(self: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(weight, MARK, False) and not isinstance(weight, CpuMXFP8Tensor):
            weight = _QuantizedForUse.apply(weight)  # type: ignore[no-untyped-call]
        return original(self, input, weight, *args, **kwargs)

    return _forward_impl


def _checkpoint(
    forward_func: Any, distribute_saved_activations: bool, get_rng_state_tracker: Any,
    tp_group: Any, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Stand for ``te_checkpoint``: Megatron's own way to recompute."""
    from megatron.core.tensor_parallel import checkpoint

    del get_rng_state_tracker, tp_group
    if kwargs:
        forward_func = functools.partial(forward_func, **kwargs)
    return checkpoint(forward_func, distribute_saved_activations, *args)


def _takes_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap saving and loading: MXFP8 weights take part by their row-wise values.

    What is loaded is quantized again when the model takes it.
    """

    @functools.wraps(original)
    def with_values(sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8

        force_all_tensors_to_non_fp8(sharded_state_dict)
        return original(sharded_state_dict, *args, **kwargs)

    return with_values


def _gives_values(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap ``generate_state_dict``: plain MXFP8 weights, of the torch format, become values."""

    @functools.wraps(original)
    def generate_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        state_dict = original(*args, **kwargs)
        for key in [key for key in state_dict if key.startswith("model")]:
            for name, weight in state_dict[key].items():
                if isinstance(weight, CpuMXFP8Tensor):
                    state_dict[key][name] = weight.dequantize()
        return state_dict

    return generate_state_dict


def _takes_empty_experts(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap ``is_te_min_version``: the first version that takes experts without tokens is there."""

    @functools.wraps(original)
    def is_te_min_version(version: str, *args: Any, **kwargs: Any) -> bool:
        return version == "1.7.0.dev0" or original(version, *args, **kwargs)

    return is_te_min_version


# --------------------------------------------------------------------------------------------
# How they become MXFP8
# --------------------------------------------------------------------------------------------


def _checks_and_quantizes_weights(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Float16Module``'s constructor: with ``fp8_param`` marked weights become MXFP8."""

    @functools.wraps(original)
    def __init__(self: Any, config: Any, module: torch.nn.Module) -> None:  # noqa: N807
        original(self, config, module)
        check_shapes(self)
        if config.fp8_param:
            quantize_weights(self)

    return __init__


def check_shapes(model: torch.nn.Module) -> None:
    """Check that every marked weight can be cut in blocks.

    Raises:
        ConfigurationError: One cannot; the message names it.
    """
    if not any(map(_has_no_blocks, model.parameters())):
        return
    # A layer that is being built does not know its name.
    name, param = next((e.name, e.param) for e in named_parameters(model)
                       if _has_no_blocks(e.param))  # fmt: skip
    raise ConfigurationError(
        f"--fp8-recipe mxfp8: {name} is {tuple(param.shape)} on one rank, and MXFP8 takes "
        f"multiples of {BLOCK} only. Change --hidden-size, --ffn-hidden-size, --num-query-groups "
        "or --tensor-model-parallel-size."
    )


def _has_no_blocks(param: torch.Tensor) -> bool:
    return getattr(param, MARK, False) and any(size % BLOCK for size in param.shape)


def quantize_weights(model: torch.nn.Module) -> None:
    """Replace every marked bf16 weight of a model by an MXFP8 parameter, attributes and all.

    As Transformer Engine does under Megatron, the value before is kept where gradients are on:
    optimizers start their masters from it.
    """
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if getattr(param, MARK, False) and not isinstance(param, CpuMXFP8Tensor):
                if param not in made:
                    made[param] = _quantized(param)
                setattr(module, name, made[param])


def _quantized(param: torch.nn.Parameter) -> torch.nn.Parameter:
    if param.dtype != torch.bfloat16:
        raise ConfigurationError(
            f"--fp8-param-gather: MXFP8 weights are made of bf16 ones, this one is {param.dtype}. "
            "Use --bf16."
        )
    value = param.detach()
    quantized = torch.nn.Parameter(CpuMXFP8Quantizer()(value), requires_grad=param.requires_grad)
    vars(quantized).update(vars(param))
    if torch.is_grad_enabled():
        keep_high_precision_init_val(quantized, value)
    return quantized
