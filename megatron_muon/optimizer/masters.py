"""fp32 masters of whole parameters, of quantized weights too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import _param_uses_quantized_storage
from megatron.core.fp8_utils import copy_tensor_to_quantized_param
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig

_PLANES = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
"""What an MXFP8 weight consists of, by Transformer Engine's names."""

Pairs = Iterable[tuple[torch.nn.Parameter, torch.Tensor]]


class MasterOptimizer(Float16OptimizerWithFloat16Params):
    """Megatron's wrapper with masters of whole fp16, bf16 and quantized parameters.

    The master of a quantized weight starts from the bf16 value that the weight was quantized from,
    where that is kept. A step leaves quantized weights alone: they are made of what their gather
    brings, once.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None,
        init_fn: Callable[..., None] | None,
    ) -> None:
        """Make the masters.

        Args:
            optimizer: Over the parameters this rank steps.
            config: Megatron's optimizer config.
            grad_scaler: The job's scaler; fp16 has one.
            init_fn: Makes the optimizer's state.
        """
        super().__init__(optimizer, config, grad_scaler, init_fn)
        for param, master in self._pairs():
            value = _initial_value(param) if is_quantized(param) else None
            if value is not None:
                # Megatron's own wrapper starts from the quantized value.
                master.data.copy_(value.view(master.shape))
        self._plain = [(p, m) for p, m in self._pairs() if not is_quantized(p) and p is not m]

    def _pairs(self) -> Pairs:
        return masters_of(self).items()

    def _get_model_and_main_params_data_float16(
        self,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the data of models and masters that are copied as they are."""
        return [param.data for param, _ in self._plain], [master.data for _, master in self._plain]

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        super()._copy_model_params_to_main_params(state_dict)
        for param, master in self._pairs():
            if is_quantized(param):
                master.data.copy_(param.detach().float())


class WholeFP32Optimizer(FP32Optimizer):
    """Megatron's wrapper of fp32 parameters, which are their own masters.

    Its gradients have the form of the other wrappers'.
    """

    def _copy_model_grads_to_main_grads(self) -> None:
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if hasattr(param, "main_grad"):
                    param.grad = param.main_grad


def wrap_whole(
    optimizer: torch.optim.Optimizer,
    config: OptimizerConfig,
    grad_scaler: MegatronGradScaler | None,
    init_fn: Callable[..., None] | None,
) -> Any:
    """Put Megatron's wrapper around a torch optimizer that steps whole parameters.

    Args:
        optimizer: Over the parameters this rank steps.
        config: Megatron's optimizer config.
        grad_scaler: The job's scaler; fp16 has one.
        init_fn: Makes its state.
    """
    if config.fp16 or config.bf16:
        return MasterOptimizer(optimizer, config, grad_scaler, init_fn)
    return WholeFP32Optimizer(optimizer, config, init_fn)


def masters_of(child: Any) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Return what a wrapped child steps on this rank, by model parameter.

    Args:
        child: A ``DistributedOptimizer``, which steps flat pieces, or one of Megatron's other
            wrappers, which step whole parameters.
    """
    if isinstance(child, DistributedOptimizer):
        pairs = [
            (child.model_float16_groups, child.shard_fp32_from_float16_groups),
            (child.model_fp32_groups, child.shard_fp32_groups),
        ]
    elif hasattr(child, "float16_groups"):
        pairs = [
            (child.float16_groups, child.fp32_from_float16_groups),
            (child.fp32_from_fp32_groups, child.fp32_from_fp32_groups),
        ]
    else:
        own = [group["params"] for group in child.optimizer.param_groups]
        pairs = [(own, own)]
    return {
        param: master
        for models, masters in pairs
        for model_group, master_group in zip(models, masters, strict=True)
        for param, master in zip(model_group, master_group, strict=True)
    }


def leaves(optimizer: Any) -> Iterator[Any]:
    """Yield the innermost of Megatron's wrappers in a chain of optimizers."""
    if hasattr(optimizer, "chained_optimizers"):
        for child in optimizer.chained_optimizers:
            yield from leaves(child)
    else:
        yield optimizer


def is_quantized(param: torch.Tensor) -> bool:
    """Whether a parameter keeps quantized bytes and no bf16 values."""
    return bool(_param_uses_quantized_storage(param))


def planes_of(param: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the codes and scales that an MXFP8 weight keeps."""
    planes = (getattr(param, name, None) for name in _PLANES)
    yield from (plane for plane in planes if plane is not None)


def quantize(pairs: Pairs) -> None:
    """Make quantized weights of their masters, rounded to bf16 first as what travels is."""
    for param, master in pairs:
        set_values(param, master.to(param.dtype))


def set_values(param: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Give a weight new values of its dtype and shape; quantized ones are made of them."""
    if is_quantized(param):
        copy_tensor_to_quantized_param(param, values)
    else:
        param.data.copy_(values)


def _initial_value(param: Any) -> torch.Tensor | None:
    """Return what a quantized weight was made of, ``None`` if it is not kept."""
    if not hasattr(param, "get_high_precision_init_val"):
        return None
    value: torch.Tensor | None = param.get_high_precision_init_val()
    return value


@torch.no_grad()
def forget_stale_initial_value(param: Any) -> bool:
    """Free a kept value that a quantized weight is no longer made of, and say whether it was so.

    Quantizing is deterministic: other bytes are those of a weight that was loaded since.
    """
    value = _initial_value(param) if is_quantized(param) else None
    if value is None:
        return False
    made = param.detach().clone()
    copy_tensor_to_quantized_param(made, value.to(param.device))
    if all(map(torch.equal, planes_of(made), planes_of(param))):
        return False
    param.clear_high_precision_init_val()
    # 0.19.2 (distrib_optimizer.py:423) asks for the method and not for the value.
    del param.get_high_precision_init_val, param.clear_high_precision_init_val
    return True


def forget_initial_values(model_chunks: Iterable[torch.nn.Module]) -> None:
    """Free the values that quantized weights were made of, on every rank, once masters are made.

    Megatron frees those of the weights that a rank steps and keeps the others for good.
    """
    for chunk in model_chunks:
        for param in chunk.parameters():
            if hasattr(param, "clear_high_precision_init_val"):
                param.clear_high_precision_init_val()
