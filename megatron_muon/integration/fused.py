"""The parts that Megatron's fused weights are made of, as logical blocks.

Decided on the whole weight, whatever tensor parallelism makes of it; and where the sizes of the
config do not confirm what the name says, the weight stays whole or is an error.
"""

from __future__ import annotations

import math
import re
from typing import Any

from megatron_muon.bookkeeping.matrix import (
    LogicalBlock,
    LogicalMatrix,
    interleaved,
    stacked,
    whole,
)
from megatron_muon.bookkeeping.routing import SplitRules
from megatron_muon.errors import ConfigurationError

Blocks = tuple[LogicalBlock, ...]

GATED_FC1 = re.compile(r"(.*\.)?linear_fc1\.(weight|bias)")
"""First layer of a unit that may be gated."""

_FUSED_QKV = re.compile(r"(.*\.)?linear_qkv\.weight")
_CROSS_ATTENTION = re.compile(r"(.*\.)?linear_(q|kv)\.weight")
_UNKNOWN_HEADS = re.compile(
    # Multi-latent attention, its sparse indexer, and linear attention.
    r"(.*\.)?(linear_(q|kv|qkv)(_down|_up)?_proj|linear_wq_b|linear_wk|in_proj)\.weight"
)

_HEADS_UNKNOWN = "WARNING: whole, since --muon-split-heads does not know the heads of this weight"
_GATE_UNKNOWN = (
    "WARNING: whole, since --muon-split-gated-fc1 needs experts of 2 x moe_ffn_hidden_size rows"
)


def logical_matrix(
    name: str,
    shape: tuple[int, ...],
    config: Any,
    splits: SplitRules,
    glu_interleave: int | None = None,
    *,
    tp_dim: int | None,
    tp_stride: int,
    **cut: Any,
) -> tuple[LogicalMatrix, str]:
    """Return a weight as a matrix with its blocks, and a warning where a split could not be done.

    Args:
        name: Global name.
        shape: Whole shape, ``(M, N)``, or ``(E, m, N)`` of a stack of experts.
        config: Megatron's ``TransformerConfig`` of the module that holds it, if it has one.
        splits: The splits that are asked for.
        glu_interleave: Rows of gate and of up that alternate, ``None`` where gate comes first.
        tp_dim: Dimension of ``shape`` that tensor parallelism cuts.
        tp_stride: Parts stacked along it that are cut one by one.
        cut: All other fields of :class:`LogicalMatrix`, as they are.
    """
    blocks, warning = blocks_of_weight(name, shape, config, splits, glu_interleave)
    if len(shape) == 3 and tp_dim is not None and tp_dim > 0:
        # Seen as one matrix, the experts are parts that are cut one by one.
        tp_stride *= shape[0] if tp_dim == 1 else 1
        tp_dim -= 1
    seen = (math.prod(shape[:-1]), shape[-1])
    matrix = LogicalMatrix(name, seen, blocks, tp_dim=tp_dim, tp_stride=tp_stride, **cut)
    return matrix, warning


def blocks_of_weight(
    name: str, shape: tuple[int, ...], config: Any, splits: SplitRules, glu_interleave: int | None
) -> tuple[Blocks, str]:
    """Return the logical blocks of a weight, and a warning where a split could not be done.

    Args:
        name: Global name.
        shape: Whole shape, ``(M, N)``, or ``(E, m, N)`` of a stack of experts.
        config: Megatron's ``TransformerConfig`` of the module that holds it, if it has one.
        splits: The splits that are asked for.
        glu_interleave: Rows of gate and of up that alternate, ``None`` where gate comes first.

    Returns:
        The blocks of the weight seen as a matrix ``(M, N)`` or ``(E m, N)``.

    Raises:
        ConfigurationError: A fused projection has not the rows that its config implies.
    """
    if len(shape) == 2:
        return _blocks_of_matrix(name, shape[0], config, splits, glu_interleave)
    size, num_rows, _ = shape
    blocks: Blocks = (LogicalBlock("expert", 0, num_rows, num_rows, 1),)
    warning = ""
    if splits.gated_fc1 and _is_gated(name, config):
        if num_rows == 2 * (getattr(config, "moe_ffn_hidden_size", None) or 0):
            blocks = _gate_and_up(num_rows, glu_interleave)
        else:
            warning = _GATE_UNKNOWN
    return stacked(blocks, num_rows, size), warning


def _blocks_of_matrix(
    name: str, num_rows: int, config: Any, splits: SplitRules, glu_interleave: int | None
) -> tuple[Blocks, str]:
    if config is None:
        return whole(num_rows), ""
    if _FUSED_QKV.fullmatch(name):
        return _qkv(name, num_rows, config, splits) if splits.qkv else whole(num_rows), ""
    if splits.heads and (match := _CROSS_ATTENTION.fullmatch(name)):
        parts = match[2]  # a letter a part; k and v alternate head by head
        if num_rows == len(parts) * config.num_attention_heads * config.kv_channels:
            widths = dict.fromkeys(parts, config.kv_channels)
            return interleaved(widths, num_rows, name, config.kv_channels), ""
        return whole(num_rows), _HEADS_UNKNOWN
    if splits.heads and _UNKNOWN_HEADS.fullmatch(name):
        return whole(num_rows), _HEADS_UNKNOWN
    if splits.gated_fc1 and _is_gated(name, config):
        return _gate_and_up(num_rows, glu_interleave), ""
    return whole(num_rows), ""


def _qkv(name: str, num_rows: int, config: Any, splits: SplitRules) -> Blocks:
    """Return q, an output gate, k and v, which repeat query group by query group.

    As megatron-core 0.19.2 reads them, ``core/transformer/attention.py``:
    ``SelfAttention.get_query_key_value_tensors``.
    """
    head = config.kv_channels
    heads, groups = config.num_attention_heads, config.num_query_groups
    query = heads // groups * head
    gate = {"gate": query} if getattr(config, "attention_output_gate", False) else {}
    widths = {"q": query, **gate, "k": head, "v": head}
    if num_rows != groups * sum(widths.values()):
        raise ConfigurationError(
            f"{name} has {num_rows} rows, expected {groups * sum(widths.values())}: {groups} query "
            f"groups of {'+'.join(map(str, widths.values()))} rows ({', '.join(widths)}) by the "
            f"config's {heads} heads of {head} channels. Give the module the config it was built "
            "with, or give --muon-no-split-qkv."
        )
    return interleaved(widths, num_rows, name, head if splits.heads else None)


def _is_gated(name: str, config: Any) -> bool:
    return bool(getattr(config, "gated_linear_unit", False) and GATED_FC1.fullmatch(name))


def _gate_and_up(num_rows: int, glu_interleave: int | None) -> Blocks:
    """Return gate and up: one half each (``core/transformer/mlp.py``), or alternating runs."""
    run = glu_interleave or num_rows // 2
    count = num_rows // (2 * run)
    return (
        LogicalBlock("gate", 0, run, 2 * run, count),
        LogicalBlock("up", run, run, 2 * run, count),
    )
