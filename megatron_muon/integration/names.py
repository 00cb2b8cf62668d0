"""Names, shards and logical matrices of a Megatron model's parameters.

One place knows how Megatron names and cuts its weights; routing, the report and the seeded
initial weights all read it here. Names do not depend on the parallel sizes: wrapper prefixes are
removed, layers and experts are numbered in the whole model, and a tied embedding has one name on
every pipeline stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_muon.bookkeeping.matrix import LogicalBlock, LogicalMatrix, interleaved, whole
from megatron_muon.bookkeeping.routing import ParamFacts, Route, RoutingRules, decide
from megatron_muon.collectives.shards import cut
from megatron_muon.errors import ConfigurationError, UnsupportedError

SHARED_EMBEDDING_NAME = "embedding.word_embeddings.weight"
"""The one name of a tied embedding, also for the copy that a later pipeline stage holds."""

_FUSED_QKV = re.compile(r"(.*\.)?linear_qkv\.weight")
_GATED_FC1 = re.compile(r"(.*\.)?linear_fc1\.(weight|bias)")
_GROUPED_EXPERT = re.compile(r"(.*\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")
_LOCAL_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class ParamShard:
    """How tensor parallelism cuts a weight, and which piece this rank holds.

    The whole weight is cut along ``dim`` into ``stride`` equal parts, each part into ``size``
    pieces; a rank holds its piece of every part, in order.

    Attributes:
        dim: The dimension that is cut, ``None`` for a weight that every rank holds whole.
        rank: This rank in the tensor-parallel group.
        size: Ranks of the group.
        stride: Parts that are cut apart: 2 for stacked gate and up projections.
    """

    dim: int | None = None
    rank: int = 0
    size: int = 1
    stride: int = 1

    def logical_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole weight whose shard has ``local_shape``."""
        return tuple(n * self.size if d == self.dim else n for d, n in enumerate(local_shape))

    def cut(self, whole_weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of a whole weight.

        Raises:
            ConfigurationError: The dimension cannot be cut into that many equal pieces.
        """
        if self.dim is None or self.size == 1:
            return whole_weight
        pieces = self.size * self.stride
        if whole_weight.shape[self.dim] % pieces:
            raise ConfigurationError(
                f"a weight of shape {tuple(whole_weight.shape)} cannot be cut in {pieces} equal "
                f"pieces along dimension {self.dim} ({self.size} tensor-parallel ranks x "
                f"{self.stride} parts): choose a --tensor-model-parallel-size that divides it"
            )
        return cut(whole_weight, self.dim, self.stride, self.size)[self.rank]


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter of a model chunk under its global name.

    Attributes:
        name: Global name.
        param: The parameter.
        shard: How it is cut.
        config: Megatron's ``TransformerConfig`` of the module that holds it, if it has one.
    """

    name: str
    param: torch.nn.Parameter
    shard: ParamShard
    config: Any


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
            yield NamedParameter(name, param, shard, config)


def route_parameter(entry: NamedParameter, rules: RoutingRules, split_qkv: bool) -> Route:
    """Decide the optimizer of one parameter and describe its logical matrix.

    Args:
        entry: The parameter.
        rules: The user's rules.
        split_qkv: Whether a fused projection is orthogonalized part by part.
    """
    param: Any = entry.param
    facts = ParamFacts(
        name=entry.name,
        shape=entry.shard.logical_shape(param.shape),
        is_embedding_or_output=getattr(param, "is_embedding_or_output_parameter", False),
        use_muon=getattr(param, "use_muon", None),
    )
    optimizer, reason = decide(facts, rules)
    matrix = _logical_matrix(entry, facts, split_qkv) if optimizer == "muon" else None
    return Route(facts=facts, optimizer=optimizer, reason=reason, rules=rules, matrix=matrix)


def _logical_matrix(entry: NamedParameter, facts: ParamFacts, split_qkv: bool) -> LogicalMatrix:
    rows, columns = facts.shape
    return LogicalMatrix(
        name=entry.name,
        shape=(rows, columns),
        blocks=_blocks(entry, rows) if split_qkv else whole(rows),
        tp_dim=entry.shard.dim,
        tp_size=entry.shard.size,
        tp_stride=entry.shard.stride,
        expert_tp=".experts." in f".{entry.name}",
        expert_parallel=not getattr(entry.param, "allreduce", True),
    )


def _blocks(entry: NamedParameter, num_rows: int) -> tuple[LogicalBlock, ...]:
    """Return q, k, v (and an output gate) of a fused projection, else the whole matrix.

    Megatron keeps the rows of a fused projection query group by query group
    (``core/transformer/attention.py:get_query_key_value_tensors``).
    """
    config = entry.config
    if config is None or not _FUSED_QKV.fullmatch(entry.name):
        return whole(num_rows)
    head = config.kv_channels
    query = config.num_attention_heads // config.num_query_groups * head
    gate = {"gate": query} if getattr(config, "attention_output_gate", False) else {}
    return interleaved({"q": query, **gate, "k": head, "v": head}, num_rows, entry.name)


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
    if getattr(param, "is_gtp_weight_remat", False):
        raise UnsupportedError(
            f"{name} is sharded by --tensor-parallel-num-weight-shards, which megatron-muon does "
            "not support: leave that flag at its default."
        )
    group = _own_tp_group(module)
    if not getattr(param, "tensor_model_parallel", False):
        return ParamShard() if group is None else ParamShard(None, group.rank(), group.size())
    group = group or nearest_group
    if group is None:
        raise UnsupportedError(
            f"{name} is cut by tensor parallelism, and neither the {type(module).__name__} that "
            "holds it nor a module around it names the group as tp_group: set that attribute."
        )
    # Not every module sets the stride (grouped experts do not), but a gated fc1 is always
    # [gate_r; up_r] on each rank, since the activation halves the local output.
    attributes: Any = param
    gated = getattr(config, "gated_linear_unit", False) and _GATED_FC1.fullmatch(name)
    stride = 2 if gated else getattr(param, "partition_stride", 1)
    return ParamShard(attributes.partition_dim, group.rank(), group.size(), stride)
