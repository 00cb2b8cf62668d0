"""Weights kept quantized between steps: what does not work, said before any work and when built.

One table serves the command line and the construction of the optimizer, which sees what the model
has become, also where there is no command line.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.enums import Fp8Recipe
from megatron.core.fp4_utils import is_nvfp4tensor
from megatron.core.fp8_utils import (
    get_fp8_align_size,
    is_grouped_tensor_with_quantized_storage,
    is_mxfp8tensor,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron_muon.bookkeeping.routing import Route
from megatron_muon.collectives.agreement import gather
from megatron_muon.errors import ConfigurationError, UnsupportedError
from megatron_muon.optimizer.compatibility import NEEDS_BUFFER
from megatron_muon.optimizer.masters import forget_stale_initial_value, is_quantized

logger = logging.getLogger(__name__)

_BLOCK: int = get_fp8_align_size(Fp8Recipe.mxfp8)
"""Elements of an MXFP8 block; rows and columns of a weight are multiples of it."""

_USE_MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How a run keeps its weights between steps.

    Attributes:
        nvfp4: Whether the model computes in NVFP4, or keeps weights in it.
        fp8: Whether it computes in FP8.
        gathers: Whether weights are kept in FP8, and new ones quantized after they were gathered.
        recipe: How they are quantized.
        reuses: Whether they travel in a borrowed gradient buffer.
        distributed: Whether the optimizer is distributed.
        bf16: Whether the weights stand for bf16 ones.
        grouped: Whether the experts of a layer are one quantized parameter.
        random_init: Whether each data-parallel rank draws initial weights of its own.
        meta_device: Whether weights are made without values.
    """

    nvfp4: bool
    fp8: bool
    gathers: bool
    recipe: str
    reuses: bool
    distributed: bool
    bf16: bool
    grouped: bool
    random_init: bool
    meta_device: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """What does not work.

    Attributes:
        applies: Whether a run is of this kind.
        message: What is wrong and what to change.
    """

    applies: Callable[[Storage], bool]
    message: str


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda s: s.nvfp4,
        "--fp4-format: NVFP4 does not work with --optimizer muon. Drop it and --fp4-param-gather, "
        f"or use {_USE_MXFP8}.",
    ),
    Refusal(
        lambda s: s.reuses and not s.gathers,
        "--reuse-grad-buf-for-mxfp8-param-ag has no effect without --fp8-param-gather: add that "
        "flag, or drop this one.",
    ),
    Refusal(
        lambda s: s.gathers and not s.fp8,
        f"--fp8-param-gather has no effect without --fp8-format: add {_USE_MXFP8}, or drop it.",
    ),
    Refusal(
        lambda s: s.gathers and s.recipe != "mxfp8",
        "--fp8-param-gather works with --optimizer muon in --fp8-recipe mxfp8 only: use that "
        "recipe, or drop --fp8-param-gather.",
    ),
    Refusal(
        lambda s: s.gathers and not s.distributed,
        "--fp8-param-gather does not work with --optimizer muon alone: add "
        "--use-distributed-optimizer, or drop --fp8-param-gather.",
    ),
    Refusal(
        lambda s: s.gathers and not s.reuses,
        NEEDS_BUFFER,
    ),
    Refusal(
        lambda s: s.gathers and not s.bf16,
        "--fp8-param-gather: MXFP8 weights are made of bf16 ones, which masters and gathers rely "
        "on. Use --bf16, or drop --fp8-param-gather.",
    ),
    Refusal(
        lambda s: s.gathers and s.grouped,
        "--moe-single-grouped-weight does not work with --fp8-param-gather and --optimizer muon: "
        "drop one of the first two flags.",
    ),
    Refusal(
        lambda s: s.gathers and s.random_init,
        "--data-parallel-random-init does not work with --fp8-param-gather: masters start from "
        "the values that weights were quantized from, which are not broadcast. Drop one of the "
        "two flags.",
    ),
    Refusal(
        lambda s: s.gathers and s.meta_device,
        "--init-model-with-meta-device does not work with --fp8-param-gather and --optimizer muon: "
        "masters start from the values that weights were quantized from. Drop one of the first "
        "two flags.",
    ),
)
"""Every kind of run that is refused, in the order in which it is looked for."""


def problem(storage: Storage) -> str | None:
    """Return what does not work about a run, ``None`` if nothing is known."""
    return next((row.message for row in REFUSALS if row.applies(storage)), None)


def storage_of_arguments(args: argparse.Namespace) -> Storage:
    """Return what Megatron's arguments ask for, before it has validated them."""
    return Storage(
        nvfp4=bool(args.fp4 or args.fp4_param_gather),
        fp8=bool(args.fp8),
        gathers=args.fp8_param_gather,
        recipe=str(getattr(args.fp8_recipe, "value", args.fp8_recipe)),
        reuses=args.reuse_grad_buf_for_mxfp8_param_ag,
        distributed=args.use_distributed_optimizer or args.optimizer == "dist_muon",
        bf16=args.bf16,
        grouped=args.moe_single_grouped_weight,
        random_init=args.data_parallel_random_init,
        meta_device=args.init_model_with_meta_device,
    )


def check_model(config: OptimizerConfig, model_chunks: Sequence[Any], is_distributed: bool) -> None:
    """Check that the model's weights are kept in a way that the optimizer knows.

    Args:
        config: Megatron's optimizer config.
        model_chunks: Model chunks, DDP-wrapped or not.
        is_distributed: Whether the optimizer is distributed.

    Raises:
        UnsupportedError: They are not; the message names the flag to change.
        ConfigurationError: DDP and the optimizer were told different things.
    """
    storage = _storage_of_model(config, model_chunks, is_distributed)
    message = problem(storage)
    if message is not None:
        raise UnsupportedError(message)
    for chunk in model_chunks:
        told = _reuses_buffer(chunk)
        if hasattr(chunk, "ddp_config") and told != config.reuse_grad_buf_for_mxfp8_param_ag:
            raise ConfigurationError(
                f"DDP's config has reuse_grad_buf_for_mxfp8_param_ag={told}, the optimizer's has "
                f"{not told}: give OptimizerConfig the same value "
                "(--reuse-grad-buf-for-mxfp8-param-ag sets both)."
            )


def _storage_of_model(
    config: OptimizerConfig, model_chunks: Sequence[Any], is_distributed: bool
) -> Storage:
    configs = [getattr(chunk, "config", None) for chunk in model_chunks]
    quantized = [
        param for chunk in model_chunks for param in chunk.parameters() if is_quantized(param)
    ]
    # DDP has no place for frozen weights, and nobody gathers them.
    gathered = [param for param in quantized if param.requires_grad]
    grouped = any(map(is_grouped_tensor_with_quantized_storage, gathered))
    return Storage(
        nvfp4=any(getattr(c, "fp4", None) for c in configs) or any(map(is_nvfp4tensor, quantized)),
        # What is kept in FP8 is multiplied in FP8, whatever the config says.
        fp8=bool(quantized) or any(getattr(c, "fp8", None) for c in configs),
        gathers=bool(gathered),
        recipe="mxfp8" if grouped or all(map(is_mxfp8tensor, gathered)) else "another",
        # A pipeline stage may have no such weight, and DDP the same config as on other stages.
        reuses=bool(gathered) and all(map(_reuses_buffer, model_chunks)),
        distributed=is_distributed,
        bf16=config.bf16,
        grouped=grouped,
        # Only a command line has it; what a rank drew cannot be told from what it should have.
        random_init=False,
        meta_device=any(getattr(c, "init_model_with_meta_device", False) for c in configs),
    )


def forget_stale_initial_values(
    routes: Mapping[torch.nn.Parameter, Route], ranks: dist.ProcessGroup
) -> None:
    """Let masters start from weights that were loaded before the optimizer is built; collective.

    They would start from what the weights were made of, which is another model. Said once.

    Args:
        routes: Route of each trained parameter of this rank.
        ranks: All ranks of the model.
    """
    stale = [route.facts.name for param, route in routes.items()
             if forget_stale_initial_value(param)]  # fmt: skip
    names = list(dict.fromkeys(name for found in gather(stale, ranks) for name in found))
    if names and ranks.rank() == 0:
        logger.warning(
            "%s and %d more MXFP8 weights were changed after they had been made, by a load for "
            "example: their masters start from the MXFP8 values, and not from the bf16 values "
            "that were kept.",
            names[0], len(names) - 1,
        )  # fmt: skip


def _reuses_buffer(chunk: torch.nn.Module) -> bool:
    ddp_config = getattr(chunk, "ddp_config", None)
    return bool(getattr(ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False))


# --------------------------------------------------------------------------------------------
# Shapes
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Weight:
    """A kind of weight as one rank has it.

    Attributes:
        name: The end of its name.
        shape: ``(rows, columns)`` on one rank.
        flags: The flags that they come from.
    """

    name: str
    shape: tuple[int, int]
    flags: str


def shape_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield what the shapes of validated arguments rule out.

    Without a command line a layer that is built with such a weight raises by itself.
    """
    recipe = getattr(args.fp8_recipe, "value", args.fp8_recipe)
    if not args.fp8 or recipe != "mxfp8":
        return
    for weight in _weights(args):
        if any(size % _BLOCK for size in weight.shape):
            yield (
                f"--fp8-recipe mxfp8: {weight.name} is {weight.shape} on one rank, and MXFP8 takes "
                f"multiples of {_BLOCK} only. Change {weight.flags}."
            )


def _weights(args: argparse.Namespace) -> Iterator[_Weight]:
    """Yield the weights of the transformer layers whose shapes the flags alone decide."""
    if args.heterogeneous_layers_config_path or args.heterogeneous_layers_config_encoded_json:
        return
    if args.hybrid_layer_pattern or args.hybrid_override_pattern:
        return
    if not args.multi_latent_attention and args.experimental_attention_variant is None:
        yield from _attention_weights(args)
    tp = args.tensor_model_parallel_size
    at_tp = "--hidden-size, {} or --tensor-model-parallel-size"
    if args.num_experts is None or args.moe_layer_freq != 1:
        yield from _mlp_weights(args, "mlp", args.ffn_hidden_size, tp,
                                at_tp.format("--ffn-hidden-size"))  # fmt: skip
    if args.num_experts is not None and args.moe_latent_size is None:
        yield from _mlp_weights(
            args, "mlp.experts", args.moe_ffn_hidden_size, args.expert_tensor_parallel_size,
            "--hidden-size, --moe-ffn-hidden-size or --expert-tensor-parallel-size",
        )  # fmt: skip
    if args.moe_shared_expert_intermediate_size is not None:
        yield from _mlp_weights(
            args, "mlp.shared_experts", args.moe_shared_expert_intermediate_size, tp,
            at_tp.format("--moe-shared-expert-intermediate-size"),
        )  # fmt: skip


def _attention_weights(args: argparse.Namespace) -> Iterator[_Weight]:
    num_groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    query = args.num_attention_heads * args.kv_channels
    rows = query * (2 if args.attention_output_gate else 1) + 2 * num_groups * args.kv_channels
    tp = args.tensor_model_parallel_size
    flags = (
        "--hidden-size, --num-attention-heads, --num-query-groups, --kv-channels or "
        "--tensor-model-parallel-size"
    )
    yield _Weight("self_attention.linear_qkv.weight", (rows // tp, args.hidden_size), flags)
    yield _Weight("self_attention.linear_proj.weight", (args.hidden_size, query // tp), flags)


def _mlp_weights(
    args: argparse.Namespace, name: str, width: int, tp: int, flags: str
) -> Iterator[_Weight]:
    parts = 2 if args.swiglu or getattr(args, "quick_geglu", False) else 1
    yield _Weight(f"{name}.linear_fc1.weight", (parts * width // tp, args.hidden_size), flags)
    yield _Weight(f"{name}.linear_fc2.weight", (args.hidden_size, width // tp), flags)
