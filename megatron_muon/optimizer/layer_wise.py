"""Megatron's layer-wise distributed optimizer with our owner layout and Muon inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_layout import FullParamLayout, PerBufferParamLayout

from megatron_muon.bookkeeping.dist_meta import BufferRange, MuonDistMeta
from megatron_muon.bookkeeping.layout import (
    LayoutItem,
    OwnerLayout,
    Placement,
    compute_owner_layout,
)
from megatron_muon.bookkeeping.matrix import LogicalMatrix, whole
from megatron_muon.bookkeeping.plan import EVERY_OWNER, OwnedMatrix
from megatron_muon.errors import ConfigurationError, PlanError, UnsupportedError


@dataclass
class MuonParamLayout(FullParamLayout):
    """Megatron's layout of a model chunk, with the owner layouts it was made from.

    Attributes:
        owner_layouts: One for each buffer that holds matrices.
        placements: Where each matrix lies, by model parameter.
    """

    owner_layouts: list[OwnerLayout] = field(default_factory=list)
    placements: dict[torch.nn.Parameter, Placement] = field(default_factory=dict)


class LayerWiseMuonOptimizer(LayerWiseDistributedOptimizer):
    """Layer-wise distributed Muon: every matrix is stepped by the one rank that owns it.

    ``compute_full_param_layout`` publishes a layout in which each matrix lies whole inside one
    owner's shard of a bucket; DDP builds its buffers from it; the constructor verifies that the
    buffers in use are those. Parameters that are not matrices live in Megatron's byte-sharded
    ``DistributedOptimizer``.
    """

    @staticmethod
    def compute_full_param_layout(
        params: list[torch.nn.Parameter],
        bucket_size: int | None,
        data_parallel_world_size: int,
        ddp_config: Any,
        expert_data_parallel_world_size: int | None = None,
    ) -> MuonParamLayout:
        """Lay out the parameters of one model chunk, buffer by buffer.

        Args:
            params: Trainable parameters in forward order, routed.
            bucket_size: Elements of a bucket, ``None`` for one bucket.
            data_parallel_world_size: Ranks that shard dense parameters.
            ddp_config: Megatron's ``DistributedDataParallelConfig``.
            expert_data_parallel_world_size: Ranks that shard expert parameters.
        """
        layout = MuonParamLayout()
        groups = group_params_for_buffers(params, ddp_config.grad_reduce_in_fp32)
        for key, (members, param_indices) in groups.items():
            num_shards = data_parallel_world_size
            if key.is_expert_parallel and expert_data_parallel_world_size is not None:
                num_shards = expert_data_parallel_world_size
            if key.is_managed_by_layer_wise_optimizer:
                owner_layout = _owner_layout(members, bucket_size, num_shards, ddp_config)
                layout.owner_layouts.append(owner_layout)
                layout.placements.update(zip(members, owner_layout.placements, strict=True))
                layout.layouts[key] = _as_megatron(owner_layout, members, param_indices)
            else:
                layout.layouts[key] = DistributedOptimizer._compute_per_buffer_param_layout(
                    members, bucket_size, num_shards, ddp_config, param_indices
                )
        return layout

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        config: OptimizerConfig,
        pg_collection: Any = None,
        init_state_fn_list: list[Callable[..., None]] | None = None,
        model_chunks: list[Any] | None = None,
    ) -> None:
        """Take the matrices this rank owns and wrap their optimizers; called by Megatron.

        Args:
            optimizers: Torch optimizers over all matrices.
            config: Megatron's optimizer config.
            pg_collection: Process groups.
            init_state_fn_list: One state initializer an optimizer.
            model_chunks: DDP-wrapped model chunks.

        Raises:
            ConfigurationError: The model was wrapped with a layout that this class did not make.
            PlanError: DDP's buffers are not those of the layout.
        """
        chunks = model_chunks or []
        for chunk in chunks:
            verify_layout(chunk)
        self.dist_metas: dict[torch.nn.Parameter, MuonDistMeta] = {}
        self._buckets: list[list[BufferRange]] = []
        self._placements: dict[torch.nn.Parameter, tuple[int, Placement]] = {}
        self._index_buffers(chunks)
        if not config.bf16 and not config.fp16:
            # Megatron wraps the children for bf16 only; a raw child dies at its first step.
            init_fns: Sequence[Any] = init_state_fn_list or len(optimizers) * (None,)
            optimizers = [FP32Optimizer(o, config, fn)
                          for o, fn in zip(optimizers, init_fns, strict=True)]  # fmt: skip
        super().__init__(optimizers, config, pg_collection, init_state_fn_list, chunks)
        # DDP's hooks gather the parameters, so DDP's config decides and not the optimizer's.
        ddp_configs = [chunk.ddp_config for chunk in chunks if hasattr(chunk, "ddp_config")]
        self.overlap_param_gather = any(config.overlap_param_gather for config in ddp_configs)
        if self.overlap_param_gather and not self.use_buffer_param_sync:
            if self._broadcasts:
                raise UnsupportedError(
                    "--overlap-param-gather together with --no-use-layer-wise-param-layout makes "
                    "gathers of uneven size, which gloo does not have. Drop one of the two flags."
                )
            self.set_bucket_layerwise_params_list(chunks)

    @property
    def _broadcasts(self) -> bool:
        """Whether owners broadcast their matrices: gloo takes no gathers of uneven size."""
        return self.dp_cp is not None and dist.get_backend(self.dp_cp) == "gloo"

    @torch.no_grad()
    def allgather_params(self) -> None:
        """Bring every owner's parameters to all ranks, where DDP was given no layout."""
        if self._broadcasts:
            self.broadcast_params()
        else:
            super().allgather_params()

    def owned_matrices(
        self, matrices: dict[torch.nn.Parameter, LogicalMatrix]
    ) -> Iterator[OwnedMatrix]:
        """Yield where each matrix of this pipeline stage lies and who steps it.

        Args:
            matrices: Logical matrix of each model parameter that belongs to Muon.
        """
        owners = self._listed_owners()
        for param, matrix in matrices.items():
            if not self.use_buffer_param_sync:
                yield OwnedMatrix(matrix=matrix, owner=owners.get(param, EVERY_OWNER))
                continue
            buffer_idx, placement = self._placements[param]
            yield OwnedMatrix(
                matrix=matrix,
                owner=placement.owner,
                buffer_idx=buffer_idx,
                bucket_idx=placement.bucket_idx,
                range=(placement.range.start, placement.range.end),
            )

    @property
    def buffer_numel(self) -> int | None:
        """Elements of the buffers that hold the matrices, ``None`` without a layout."""
        if not self.use_buffer_param_sync:
            return None
        return sum(
            owner_layout.numel
            for chunk in self.model_chunks
            if isinstance(chunk.full_param_layout, MuonParamLayout)
            for owner_layout in chunk.full_param_layout.owner_layouts
        )

    def record_ownership(self, owned: dict[torch.nn.Parameter, OwnedMatrix]) -> None:
        """Make the bookkeeping record of each matrix this rank owns, and check it.

        Args:
            owned: The matrices of this pipeline stage.

        Raises:
            PlanError: A matrix is stepped here but does not lie whole in this rank's shards, or
                lies here and is not stepped.
        """
        stepped = {param for child in self.chained_optimizers for param in _model_params(child)}
        for param, matrix in owned.items():
            if matrix.range is None:
                continue
            meta = self._meta(param, matrix)
            if (meta.local_range == meta.global_range) != (param in stepped):
                raise PlanError(
                    f"{matrix.matrix.name} lies at {meta.global_range} of buffer "
                    f"{meta.buffer_idx}, this rank's slice holds {meta.local_range}, and this rank "
                    f"{'steps' if param in stepped else 'does not step'} it."
                )
            if param in stepped:
                self.dist_metas[param] = meta

    def _meta(self, param: torch.nn.Parameter, owned: OwnedMatrix) -> MuonDistMeta:
        """Return where a matrix lies and how much of it lies in this rank's shard."""
        assert owned.range is not None
        matrix = owned.matrix
        meta = MuonDistMeta(
            owned.buffer_idx, owned.bucket_idx, matrix.local_shape, owned.range,
            -1 if matrix.tp_dim is None else matrix.tp_dim,
        )  # fmt: skip
        group = self.expt_dp if matrix.expert_parallel else self.dp_cp
        rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
        bucket = self._buckets[owned.buffer_idx][owned.bucket_idx]
        shard = bucket.numel // size
        start = bucket.start + rank * shard
        meta.set_local_buffer_range((start, start + shard))
        return meta

    def _index_buffers(self, chunks: Sequence[Any]) -> None:
        """Number the buffers of all chunks and find each matrix in them."""
        for chunk in chunks:
            layout = getattr(chunk, "full_param_layout", None)
            if layout is None:
                continue
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer_idx = len(self._buckets)
                self._buckets.append([BufferRange(*bucket) for bucket in buffer.bucket_indices])
                for param in buffer.param_index_map:
                    if param in layout.placements:
                        self._placements[param] = (buffer_idx, layout.placements[param])

    def _listed_owners(self) -> dict[torch.nn.Parameter, int]:
        owners: dict[torch.nn.Parameter, int] = {}
        for lists in (self.dp_cp_params_list, self.expt_dp_params_list):
            for owner, params in enumerate(lists or []):
                owners.update(dict.fromkeys(params, owner))
        return owners


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


def _model_params(child: Any) -> Iterator[torch.nn.Parameter]:
    """Yield the model parameters that a wrapped child steps on this rank."""
    masters = getattr(child, "float16_groups", None)
    if masters is None:
        for group in child.param_groups:
            yield from group["params"]
        return
    for group in (*masters, *child.fp32_from_fp32_groups):
        yield from group


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
