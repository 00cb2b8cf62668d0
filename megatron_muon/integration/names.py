"""Names, shards and logical matrices of a Megatron model's parameters.

One place knows how Megatron names and cuts its weights; routing, the report and the seeded
initial weights all read it here. Names do not depend on the parallel sizes: wrapper prefixes are
removed, layers and experts are numbered in the whole model, and a tied embedding has one name on
every pipeline stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_muon.bookkeeping.matrix import LogicalMatrix
from megatron_muon.bookkeeping.routing import ParamFacts, Route, RoutingRules, SplitRules, decide
from megatron_muon.errors import ConfigurationError, UnsupportedError
from megatron_muon.integration.fused import GATED_FC1, logical_matrix
from megatron_muon.optimizer.masters import is_quantized

SHARED_EMBEDDING_NAME = "embedding.word_embeddings.weight"
"""The one name of a tied embedding, also for the copy that a later pipeline stage holds."""

_GROUPED_EXPERT = re.compile(r"(.*\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")
_LOCAL_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class ParamShard:
    """How a weight is cut, and which piece this rank holds.

    The whole weight is cut along ``dim`` into ``stride`` equal parts, each part into ``size``
    pieces; a tensor-parallel rank holds its piece of every part, in order. Generalized tensor
    parallelism (GTP) puts rows of zeros below that and cuts the rows into ``gtp_size`` equal runs
    (0.19.2, tensor_parallel/generalized_tensor_parallelism.py:472).

    Attributes:
        dim: The dimension that is cut, ``None`` for a weight that every rank holds whole.
        rank: This rank in the tensor-parallel group.
        size: Ranks of the group.
        stride: Parts that are cut apart: 2 for stacked gate and up projections.
        gtp_rank: This rank among those that cut the rows once more.
        gtp_size: How many these are.
        gtp_padding: Rows of zeros.
    """

    dim: int | None = None
    rank: int = 0
    size: int = 1
    stride: int = 1
    gtp_rank: int = 0
    gtp_size: int = 1
    gtp_padding: int = 0

    def logical_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole weight whose shard has ``local_shape``."""
        shape = list(local_shape)
        if self.gtp_size > 1:
            shape[0] = shape[0] * self.gtp_size - self.gtp_padding
        return tuple(n * self.size if d == self.dim else n for d, n in enumerate(shape))

    def cut(self, whole_weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of a whole weight.

        Raises:
            ConfigurationError: The dimension cannot be cut into that many equal pieces.
        """
        shard = self._tp_shard(whole_weight)
        if self.gtp_size == 1:
            return shard
        filled = torch.cat([shard, shard.new_zeros(self.gtp_padding, *shard.shape[1:])])
        return filled.chunk(self.gtp_size)[self.gtp_rank]

    def _tp_shard(self, whole_weight: torch.Tensor) -> torch.Tensor:
        if self.dim is None or self.size == 1:
            return whole_weight
        pieces = self.size * self.stride
        if whole_weight.shape[self.dim] % pieces:
            raise ConfigurationError(
                f"a weight of shape {tuple(whole_weight.shape)} cannot be cut in {pieces} equal "
                f"pieces along dimension {self.dim} ({self.size} tensor-parallel ranks x "
                f"{self.stride} parts): choose a --tensor-model-parallel-size that divides it"
            )
        parts = torch.unflatten(whole_weight, self.dim, (self.stride, self.size, -1))
        return parts.select(self.dim + 1, self.rank).flatten(self.dim, self.dim + 1)


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter of a model chunk under its global name.

    Attributes:
        name: Global name.
        param: The parameter.
        shard: How it is cut.
        config: Megatron's ``TransformerConfig`` of the module that holds it, if it has one.
        glu_interleave: Rows of gate and of up that alternate in grouped experts
            (``moe_mlp_glu_interleave_size``), ``None`` where all of gate comes first.
    """

    name: str
    param: torch.nn.Parameter
    shard: ParamShard
    config: Any
    glu_interleave: int | None = None

    @property
    def is_expert(self) -> bool:
        """Whether it is a routed expert's, or those of several stacked."""
        return is_expert(self.name)

    @property
    def is_expert_stack(self) -> bool:
        """Whether its shape is ``(E, m, n)``: a matrix an expert."""
        return self.is_expert and self.param.dim() == 3


def is_expert(name: str) -> bool:
    """Whether a parameter of that name is a routed expert's."""
    return ".experts." in f".{name}"


def named_parameters(chunk: torch.nn.Module) -> Iterator[NamedParameter]:
    """Yield every parameter of a Megatron model chunk, wrapped or not, in module order.

    One that several modules share has the name of the first.

    Raises:
        UnsupportedError: A weight is sharded by more than tensor parallelism.
    """
    chunk = _unwrapped(chunk)
    chunk_config = getattr(chunk, "config", None)
    seen: set[torch.nn.Parameter] = set()
    for path, module, expert_offset, tp_group in _walk(chunk, "", 0, None):
        for label, param in module.named_parameters(recurse=False):
            if param in seen:
                continue
            seen.add(param)
            name = _global_expert_name(f"{path}{label}", expert_offset)
            if getattr(param, "shared_embedding", False):
                name = SHARED_EMBEDDING_NAME
            config = getattr(module, "config", None) or chunk_config
            shard = _shard_of(name, module, param, config, tp_group)
            yield NamedParameter(name, param, shard, config, _glu_interleave(module, config))


def route_parameter(entry: NamedParameter, rules: RoutingRules, splits: SplitRules) -> Route:
    """Decide the optimizer of one parameter and describe its logical matrix.

    Args:
        entry: The parameter.
        rules: The user's rules.
        splits: Which fused weights are orthogonalized part by part.
    """
    param: Any = entry.param
    facts = ParamFacts(
        name=entry.name,
        shape=entry.shard.logical_shape(param.shape),
        is_embedding_or_output=getattr(param, "is_embedding_or_output_parameter", False),
        is_expert_stack=entry.is_expert_stack,
        use_muon=getattr(param, "use_muon", None),
    )
    optimizer, reason = decide(facts, rules)
    if optimizer == "scalar":
        return Route(facts=facts, optimizer=optimizer, reason=reason, rules=rules)
    matrix, warning = _logical_matrix(entry, facts, splits)
    reason = f"{reason}; {warning}" if warning else reason
    return Route(facts=facts, optimizer=optimizer, reason=reason, rules=rules, matrix=matrix)


def _logical_matrix(
    entry: NamedParameter, facts: ParamFacts, splits: SplitRules
) -> tuple[LogicalMatrix, str]:
    return logical_matrix(
        entry.name,
        facts.shape,
        entry.config,
        splits,
        entry.glu_interleave,
        tp_dim=entry.shard.dim,
        tp_size=entry.shard.size,
        tp_stride=entry.shard.stride,
        expert_tp=entry.is_expert,
        expert_parallel=not getattr(entry.param, "allreduce", True),
        gtp_size=entry.shard.gtp_size,
        gtp_rows=entry.param.shape[0] if entry.shard.gtp_size > 1 else 0,
    )


def _unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """Remove DDP and the precision wrapper, which hold the model as their one child ``module``."""
    while [label for label, _ in chunk.named_children()] == ["module"]:
        chunk = chunk.get_submodule("module")
    return chunk


def _walk(
    module: torch.nn.Module, path: str, expert_offset: int, tp_group: Any
) -> Iterator[tuple[str, torch.nn.Module, int, Any]]:
    """Yield path with a trailing dot, module, index of the first local expert, and TP group.

    A plain module inside a parallel one (the convolution of a linear attention) is cut by the
    group of the module around it.
    """
    tp_group = _own_tp_group(module) or tp_group
    num_local_experts: Any = getattr(module, "num_local_experts", None)
    ep_group: Any = getattr(module, "ep_group", None)
    if num_local_experts is not None and ep_group is not None:
        expert_offset = ep_group.rank() * num_local_experts
    yield path, module, expert_offset, tp_group
    for label, child in module.named_children():
        layer_number: Any = getattr(child, "layer_number", None)
        if label.isdigit() and layer_number is not None:
            label = str(layer_number - 1)
        yield from _walk(child, f"{path}{label}.", expert_offset, tp_group)


def _global_expert_name(name: str, expert_offset: int) -> str:
    """Return ``name`` with its expert numbered in the whole model, whichever module holds it."""
    if match := _LOCAL_EXPERT.fullmatch(name):
        experts, index, tail = match.groups()
        return f"{experts}.{int(index) + expert_offset}.{tail}"
    if match := _GROUPED_EXPERT.fullmatch(name):
        experts, linear, tail, index = match.groups()
        return f"{experts}.{int(index) + expert_offset}.{linear}.{tail}"
    return name


def _own_tp_group(module: torch.nn.Module) -> Any:
    """Return the tensor-parallel group a module names, ``None`` if it names none.

    Transformer Engine's modules keep the real group in ``_tp_group``; their ``tp_group`` is None
    where Megatron does the communication.
    """
    return getattr(module, "_tp_group", None) or getattr(module, "tp_group", None)


def _shard_of(
    name: str, module: torch.nn.Module, param: torch.nn.Parameter, config: Any, nearest_group: Any
) -> ParamShard:
    """Return how this rank's piece of ``param`` lies in the whole weight."""
    shard = _tp_shard_of(name, module, param, config, nearest_group)
    if not getattr(param, "is_gtp_weight_remat", False):
        return shard
    attributes: Any = param
    _check_gtp(name, param, shard)
    group = attributes.group
    return replace(
        shard, gtp_rank=group.rank(), gtp_size=group.size(), gtp_padding=attributes.pad_length
    )


def _check_gtp(name: str, param: torch.nn.Parameter, shard: ParamShard) -> None:
    """Check that rows of a weight are cut once more in the one way that is known.

    Raises:
        UnsupportedError: They are not.
    """
    why = None
    if is_quantized(param):
        why = "kept in FP8: drop --fp8-param-gather"
    elif param.dim() != 2:
        why = f"of shape {tuple(param.shape)}, and rows of one matrix alone can be: drop that flag"
    elif shard.dim is None and shard.size > 1:
        why = f"copied on {shard.size} tensor-parallel ranks: drop that flag"
    if why is not None:
        raise UnsupportedError(
            f"{name}, whose rows {weight_shards_flag(is_expert(name))} cuts once more, is {why}. "
            "--optimizer muon does not support both."
        )


def weight_shards_flag(of_experts: bool) -> str:
    """Return the flag of generalized tensor parallelism that cuts a weight's rows."""
    return f"--{'expert-' if of_experts else ''}tensor-parallel-num-weight-shards"


def _tp_shard_of(
    name: str, module: torch.nn.Module, param: torch.nn.Parameter, config: Any, nearest_group: Any
) -> ParamShard:
    """Return how tensor parallelism cuts ``param``."""
    group = _own_tp_group(module)
    if not getattr(param, "tensor_model_parallel", False):
        return ParamShard() if group is None else ParamShard(None, group.rank(), group.size())
    group = group or nearest_group
    if group is None:
        raise UnsupportedError(
            f"{name} is cut by tensor parallelism, and neither the {type(module).__name__} that "
            "holds it nor a module around it names the group as tp_group: set that attribute."
        )
    attributes: Any = param
    dim = attributes.partition_dim
    if _is_grouped(module) and param.dim() == (2 if name.endswith("bias") else 3):
        dim += 1  # Of stacked experts Megatron 0.19.2 names the dimension in one expert's weight.
    return ParamShard(dim, group.rank(), group.size(), _stride_of(name, module, param, config))


def _stride_of(name: str, module: torch.nn.Module, param: torch.nn.Parameter, config: Any) -> int:
    """Return how many parts of a weight tensor parallelism cuts apart.

    Not every module sets the stride (grouped experts do not), but a gated fc1 is always
    ``[gate_r; up_r]`` on each rank, since the activation halves the local output; only where gate
    and up alternate it is one.
    """
    if not (getattr(config, "gated_linear_unit", False) and GATED_FC1.fullmatch(name)):
        return getattr(param, "partition_stride", 1)
    return 1 if _glu_interleave(module, config) else 2


def _glu_interleave(module: torch.nn.Module, config: Any) -> int | None:
    size: int | None = getattr(config, "moe_mlp_glu_interleave_size", None)
    return size if _is_grouped(module) else None


def _is_grouped(module: torch.nn.Module) -> bool:
    """Whether a module is Transformer Engine's linear layer of several experts."""
    return hasattr(module, "num_gemms")
