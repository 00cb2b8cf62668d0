"""Where parameters lie in DDP's buffers: what is published, and the check that it is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
from megatron.core.fp8_utils import is_mxfp8tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout, PerBufferParamLayout

from megatron_muon.bookkeeping.layout import LayoutItem, OwnerLayout, compute_owner_layout
from megatron_muon.bookkeeping.matrix import LogicalMatrix, whole
from megatron_muon.errors import ConfigurationError, PlanError, UnsupportedError
from megatron_muon.optimizer.compatibility import NEEDS_BUFFER

LAYOUT = "muon_layout"
"""Attribute of a model parameter that says in which layout the matrices lie."""


@dataclass
class MuonParamLayout(FullParamLayout):
    """Megatron's layout of a model chunk, made by this package.

    Attributes:
        kind: ``owner``: every matrix whole in one owner's shard; ``flat``: Megatron's own
            byte-sharded buckets; ``None`` for a chunk without parameters.
    """

    kind: str | None = None


def compute_param_layout(
    params: list[torch.nn.Parameter],
    bucket_size: int | None,
    data_parallel_world_size: int,
    ddp_config: Any,
    expert_data_parallel_world_size: int | None,
) -> MuonParamLayout:
    """Lay out the parameters of one model chunk, buffer by buffer.

    The arguments are those of :meth:`.LayerWiseMuonOptimizer.compute_full_param_layout`.

    Raises:
        UnsupportedError: DDP cannot make buffers of these parameters.
    """
    if not ddp_config.reuse_grad_buf_for_mxfp8_param_ag and any(map(is_mxfp8tensor, params)):
        raise UnsupportedError(NEEDS_BUFFER)
    layout = MuonParamLayout(kind=next((getattr(p, LAYOUT, "owner") for p in params), None))
    groups = group_params_for_buffers(params, ddp_config.grad_reduce_in_fp32)
    for key, (members, param_indices) in groups.items():
        num_shards = data_parallel_world_size
        if key.is_expert_parallel and expert_data_parallel_world_size is not None:
            num_shards = expert_data_parallel_world_size
        if key.is_managed_by_layer_wise_optimizer and layout.kind == "owner":
            owner_layout = _owner_layout(members, bucket_size, num_shards, ddp_config)
            layout.layouts[key] = _as_megatron(owner_layout, members, param_indices)
        else:
            layout.layouts[key] = DistributedOptimizer._compute_per_buffer_param_layout(
                members, bucket_size, num_shards, ddp_config, param_indices
            )
    return layout


def verify_layout(chunk: Any) -> None:
    """Check that a model chunk's buffers are those of a layout this class published.

    A chunk whose DDP all-reduces has none, and one without trainable parameters needs none.

    Raises:
        ConfigurationError: Another layout was given to DDP.
        PlanError: DDP's buffers are not those of the layout.
    """
    layout = getattr(chunk, "full_param_layout", None)
    ddp_config = getattr(chunk, "ddp_config", None)
    if layout is None and not getattr(ddp_config, "use_distributed_optimizer", False):
        return
    if layout is not None and not layout.layouts:
        return
    if not isinstance(layout, MuonParamLayout):
        raise ConfigurationError(
            "The model was wrapped in DDP with a parameter layout that megatron-muon did not "
            "make, so its matrices may be cut across ranks. Call megatron_muon.install() before "
            "the model is built; code that builds DistributedDataParallel itself calls "
            "tag_params_for_buffer_routing(chunks) first and passes full_param_layout="
            "LayerWiseDistributedOptimizer.compute_full_param_layout(...), both from "
            "megatron.core.optimizer.layer_wise_optimizer."
        )
    published = {id(buffer.param_index_map) for buffer in layout.layouts.values()}
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        shards = buffer.data_parallel_group.size()
        if id(buffer.param_index_map) not in published:
            raise PlanError(
                f"A DDP buffer of {len(buffer.params)} parameters is not laid out as published. "
                "Pass the layout of compute_full_param_layout to DistributedDataParallel as is."
            )
        if buffer.num_optimizer_shards not in (None, shards):
            raise PlanError(
                f"A DDP buffer of {len(buffer.params)} parameters is laid out for "
                f"{buffer.num_optimizer_shards} shards, its data-parallel group has {shards} "
                "ranks. Compute the layout with the size of the group DDP reduces over."
            )


def is_laid_out(chunks: Sequence[Any]) -> bool:
    """Whether DDP's buffers were laid out: the same on all ranks, unlike what lies in them."""
    ddp_configs = (getattr(chunk, "ddp_config", None) for chunk in chunks)
    return any(
        getattr(ddp_config, "use_distributed_optimizer", False) for ddp_config in ddp_configs
    )


def published_kind(chunks: Sequence[Any]) -> str | None:
    """Return the layout that the model chunks were wrapped with, ``None`` if with none."""
    layouts = (getattr(chunk, "full_param_layout", None) for chunk in chunks)
    kinds = (layout.kind for layout in layouts if isinstance(layout, MuonParamLayout))
    return next((kind for kind in kinds if kind is not None), None)


def buffers_of(chunks: Sequence[Any], is_expert: bool, of_matrices: bool) -> dict[int, list[Any]]:
    """Return DDP's buffers of one kind, by model chunk, as ``DistributedOptimizer`` takes them.

    Args:
        chunks: DDP-wrapped model chunks.
        is_expert: Whether the buffers are those of expert-parallel parameters.
        of_matrices: Whether they hold the matrices or the scalar optimizer's parameters.
    """
    attribute = "expert_parallel_buffers" if is_expert else "buffers"
    found = {
        i: [b for b in getattr(chunk, attribute) if holds_matrices(b) == of_matrices]
        for i, chunk in enumerate(chunks)
    }
    return {i: buffers for i, buffers in found.items() if buffers}


def holds_matrices(buffer: Any) -> bool:
    """Whether a DDP buffer is one of Muon's."""
    return any(getattr(p, "is_managed_by_layer_wise_optimizer", False) for p in buffer.params)


def _owner_layout(
    params: Sequence[Any], bucket_size: int | None, num_owners: int, ddp_config: Any
) -> OwnerLayout:
    items = [
        LayoutItem(
            numel=p.data.nelement(),
            flops=_matrix_of(p).ns_flops(1),
            alone=getattr(p, "shared_embedding", False),
        )
        for p in params
    ]
    alignment = LayerWiseDistributedOptimizer._shard_divisor(num_owners, ddp_config)
    return compute_owner_layout(items, bucket_size, num_owners, alignment)


def _matrix_of(param: Any) -> LogicalMatrix:
    """Return the logical matrix of a routed parameter, for one routed by other code its shard."""
    route = getattr(param, "muon_route", None)
    if route is not None and route.matrix is not None:
        return route.matrix  # type: ignore[no-any-return]
    rows, columns = param.shape
    return LogicalMatrix("", (rows, columns), whole(rows))


def _as_megatron(
    layout: OwnerLayout, params: Sequence[Any], param_indices: list[int]
) -> PerBufferParamLayout:
    return PerBufferParamLayout(
        param_index_map={
            param: (placement.range.start, placement.range.end, placement.bucket_idx)
            # DDP walks parameters in backward order and expects bucket ids to rise.
            for param, placement in reversed(list(zip(params, layout.placements, strict=True)))
        },
        bucket_indices=[(bucket.start, bucket.end) for bucket in layout.buckets],
        per_bucket_numel_unpadded=list(layout.unpadded_numel),
        param_indices=param_indices,
        num_optimizer_shards=layout.num_owners,
    )
