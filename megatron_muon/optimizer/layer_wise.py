"""Megatron's layer-wise distributed optimizer with our owner layout and Muon inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_muon.bookkeeping.dist_meta import MuonDistMeta
from megatron_muon.bookkeeping.matrix import LogicalMatrix
from megatron_muon.bookkeeping.plan import OwnedMatrix, held_by, held_by_slices
from megatron_muon.bookkeeping.stage import DEFAULT_BUDGET_NBYTES
from megatron_muon.collectives.whole_params import cut, gather_whole
from megatron_muon.errors import PlanError, UnsupportedError
from megatron_muon.optimizer.masters import (
    is_quantized,
    masters_of,
    quantize,
    set_values,
    wrap_whole,
)
from megatron_muon.optimizer.muon import OwnedMuon
from megatron_muon.optimizer.param_layout import (
    MuonParamLayout,
    buffers_of,
    compute_param_layout,
    holds_matrices,
    published_kind,
    verify_layout,
)


class LayerWiseMuonOptimizer(LayerWiseDistributedOptimizer):
    """Distributed Muon: each matrix is orthogonalized whole and once, in either of two layouts.

    ``compute_full_param_layout`` publishes a layout, DDP builds its buffers from it, and the
    constructor verifies that the buffers in use are those.

    * Owner layout: a matrix lies whole inside one owner's shard of a bucket, and that rank holds
      its master and momentum.
    * Flat layout: buckets are cut in equal shards wherever that falls, as for Megatron's
      ``DistributedOptimizer``, which holds flat pieces of the masters here too. No padding.

    Parameters that are not matrices live in a byte-sharded ``DistributedOptimizer`` of their own.

    Without a layout it steps all parameters, each whole on one rank.

    Attributes:
        layerwise_param_sync_via_bucket_group: Whether DDP's bucket groups gather new weights, fixed
            when built: with a layout, and with overlap. Without either this optimizer gathers by
            itself, MXFP8 weights too, and borrows no gradient buffer for it.
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
            params: Trainable parameters in forward order, routed; :data:`LAYOUT` on the matrices
                says which layout.
            bucket_size: Elements of a bucket, ``None`` for one bucket.
            data_parallel_world_size: Ranks that shard dense parameters.
            ddp_config: Megatron's ``DistributedDataParallelConfig``.
            expert_data_parallel_world_size: Ranks that shard expert parameters.
        """
        return compute_param_layout(
            params,
            bucket_size,
            data_parallel_world_size,
            ddp_config,
            expert_data_parallel_world_size,
        )

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        config: OptimizerConfig,
        pg_collection: Any = None,
        init_state_fn_list: list[Callable[..., None]] | None = None,
        model_chunks: list[Any] | None = None,
        grad_scaler: MegatronGradScaler | None = None,
        gather_budget_nbytes: int = DEFAULT_BUDGET_NBYTES,
    ) -> None:
        """Take the matrices this rank owns and wrap their optimizers; called by Megatron.

        Args:
            optimizers: Torch optimizers over all matrices.
            config: Megatron's optimizer config.
            pg_collection: Process groups.
            init_state_fn_list: One state initializer an optimizer.
            model_chunks: DDP-wrapped model chunks.
            grad_scaler: The job's scaler; fp16 has one.
            gather_budget_nbytes: Bytes of scratch of :meth:`allgather_params`; one parameter may
                take more.

        Raises:
            ConfigurationError: The model was wrapped with a layout that this class did not make.
            PlanError: DDP's buffers are not those of the layout.
        """
        chunks = model_chunks or []
        for chunk in chunks:
            verify_layout(chunk)
        intra, whole = (getattr(pg_collection, name, None) for name in ("intra_dp_cp", "dp_cp"))
        if intra is not None and whole is not None and intra.size() != whole.size():
            raise UnsupportedError(
                "--num-distributed-optimizer-instances above 1 is not supported with --optimizer "
                "muon: a rank would step matrices of whose gradients it has a part. Leave it at 1."
            )
        self.kind, self._grad_scaler = published_kind(chunks), grad_scaler
        self._gather_budget_nbytes = gather_budget_nbytes
        self.dist_metas: dict[torch.nn.Parameter, MuonDistMeta] = {}
        self._buffers = [
            buffer
            for chunk in chunks
            if isinstance(getattr(chunk, "full_param_layout", None), MuonParamLayout)
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        if self.kind == "flat":
            self._init_flat(optimizers, config, pg_collection, init_state_fn_list, chunks)
        else:
            self._init_owner(optimizers, config, pg_collection, init_state_fn_list, chunks)
        self.layerwise_param_sync_via_bucket_group = bool(
            self.use_buffer_param_sync or self.overlap_param_gather
        )

    def _init_owner(
        self,
        optimizers: list[torch.optim.Optimizer],
        config: OptimizerConfig,
        pg_collection: Any,
        init_fns: list[Callable[..., None]] | None,
        chunks: list[Any],
    ) -> None:
        """Narrow the optimizers to what this rank owns, and wrap them.

        In the place of Megatron's constructor (0.19.2, layer_wise_optimizer.py:428), which wraps
        for bf16 only and knows no quantized weights.
        """
        self.pg_collection = pg_collection
        self.dp_cp = getattr(pg_collection, "dp_cp", None)
        self.expt_dp = getattr(pg_collection, "expt_dp", None)
        layouts = [chunk.full_param_layout for chunk in chunks
                   if getattr(chunk, "full_param_layout", None) is not None]  # fmt: skip
        self.shard_params(optimizers, layouts or None)
        self.use_buffer_param_sync = bool(layouts)
        # DDP's hooks gather the parameters, so DDP's config decides and not the optimizer's.
        self.overlap_param_gather = _overlaps_param_gather(chunks)
        ChainedOptimizer.__init__(
            self,
            [
                wrap_whole(optimizer, config, self._grad_scaler, init_fn)
                for optimizer, init_fn in zip(
                    optimizers, init_fns or len(optimizers) * (None,), strict=True
                )
            ],
        )
        self.model_chunks = chunks
        if self.overlap_param_gather and not self.use_buffer_param_sync:
            self.set_bucket_layerwise_params_list(chunks)

    def _init_flat(
        self,
        optimizers: list[torch.optim.Optimizer],
        config: OptimizerConfig,
        pg_collection: Any,
        init_fns: list[Callable[..., None]] | None,
        chunks: list[Any],
    ) -> None:
        """Put a byte-sharded ``DistributedOptimizer`` around the matrices of each grid."""
        self.pg_collection = pg_collection
        self.dp_cp, self.expt_dp = pg_collection.dp_cp, pg_collection.expt_dp
        self.dp_cp_params_list: Any = None
        self.expt_dp_params_list: Any = None
        groups = ProcessGroupCollection.setup_process_groups_for_optimizer(
            pg_collection, chunks, use_gloo_process_groups=False
        )
        children = []
        for optimizer, init_fn in zip(optimizers, init_fns or [], strict=True):
            for part in split_by_expert(optimizer):
                is_expert = part.param_groups[0]["is_expert_parallel"]
                child = DistributedOptimizer(
                    part,
                    config,
                    self._grad_scaler,
                    init_fn,
                    model_chunks=chunks,
                    per_model_buffers=buffers_of(chunks, is_expert, of_matrices=True),
                    data_parallel_group=groups[
                        "intra_expt_dp_group" if is_expert else "intra_dp_cp_group"
                    ],
                    data_parallel_group_gloo=None,
                    data_parallel_group_idx=groups[
                        "expt_tp_pp_group" if is_expert else "mp_group"
                    ].rank(),
                    distributed_optimizer_instance_id=0,
                )
                child.grad_stats_parallel_group = groups["intra_dist_opt_group"]
                child.tp_group = pg_collection.tp
                child.expert_tp_group = getattr(pg_collection, "expt_tp", pg_collection.tp)
                # This optimizer gathers the matrices' buckets, once, when all children are done.
                child._defer_param_sync = True
                children.append(child)
        ChainedOptimizer.__init__(self, children)
        self.model_chunks = chunks
        self.use_buffer_param_sync = True
        self.overlap_param_gather = _overlaps_param_gather(chunks)

    def shard_params(
        self, optimizers: list[torch.optim.Optimizer], full_param_layouts: Any = None
    ) -> None:
        """Narrow the optimizers to what this rank owns; called by Megatron's constructor.

        0.19.2 shards nothing where the data-parallel group has one rank, although the expert
        data-parallel group may have more (expert tensor parallelism below tensor parallelism).
        """
        sizes = [1 if group is None else group.size() for group in (self.dp_cp, self.expt_dp)]
        if max(sizes) == 1:
            self.dp_cp_params_list = self.expt_dp_params_list = None
        elif full_param_layouts is not None:
            self._shard_params_from_layout(optimizers, full_param_layouts, *sizes)
        else:
            self._shard_params_ping_pong(optimizers, *sizes)

    def get_grad_stats_parallel_group(self) -> Any:
        """Return the group of gradient statistics: all ranks, also those that own no matrix."""
        return getattr(self.pg_collection, "intra_dist_opt", None)

    def _should_defer_mxfp8_param_sync(self) -> bool:
        """Never hold back the gather of scalar buckets: theirs is not this optimizer's to start."""
        return False

    @torch.no_grad()
    def allgather_params(self) -> None:
        """Bring every owner's parameters to all ranks, where DDP was given no layout."""
        masters = {
            param: master
            for child in self.chained_optimizers
            for param, master in masters_of(child).items()
            if is_quantized(param)
        }
        quantize(masters.items())

        def value_of(param: torch.nn.Parameter) -> torch.Tensor:
            return masters[param] if param in masters else param.detach()

        for owners, group in self._owners():
            gather_whole(owners, group, value_of, set_values, self._gather_budget_nbytes)

    @property
    def gather_nbytes(self) -> int:
        """Bytes of scratch that :meth:`allgather_params` takes, 0 where DDP gathers."""
        if self.layerwise_param_sync_via_bucket_group:
            return 0
        return max(
            (slice_.nbytes for owners, group in self._owners() if group.size() > 1
             for slice_ in cut(owners, self._gather_budget_nbytes)),
            default=0,
        )  # fmt: skip

    def _owners(self) -> Iterator[tuple[Sequence[Sequence[torch.nn.Parameter]], Any]]:
        """Yield what each rank of a group owns, without a layout, and the group."""
        for owners, group in (
            (self.dp_cp_params_list, self.dp_cp),
            (self.expt_dp_params_list, self.expt_dp),
        ):
            if owners and group is not None:
                yield owners, group

    def owned_matrices(
        self, matrices: Mapping[torch.nn.Parameter, LogicalMatrix]
    ) -> Iterator[OwnedMatrix]:
        """Yield where each matrix of this pipeline stage lies and who holds it.

        Args:
            matrices: Logical matrix of each model parameter that belongs to Muon.
        """
        owners = self._listed_owners()
        places = self._places()
        for param, matrix in matrices.items():
            if not self.use_buffer_param_sync:
                yield OwnedMatrix(matrix=matrix, pieces=held_by(owners.get(param, 0), matrix))
                continue
            buffer_idx, (start, end, bucket_idx) = places[param]
            buffer = self._buffers[buffer_idx]
            yield OwnedMatrix(
                matrix=matrix,
                pieces=held_by_slices(
                    (start, end),
                    buffer.bucket_indices[bucket_idx],
                    buffer.data_parallel_group.size(),
                ),
                buffer_idx=buffer_idx,
                bucket_idx=bucket_idx,
                range=(start, end),
            )

    @property
    def buffer_numel(self) -> int | None:
        """Elements of the buffers that hold the matrices, ``None`` without a layout."""
        if not self.use_buffer_param_sync:
            return None
        return sum(
            int(buffer.bucket_indices[-1][1]) for buffer in self._buffers if holds_matrices(buffer)
        )

    def record_ownership(self, owned: Mapping[torch.nn.Parameter, OwnedMatrix]) -> None:
        """Make the bookkeeping record of each matrix this rank holds a part of, and check it.

        Args:
            owned: The matrices of this pipeline stage.

        Raises:
            PlanError: What lies in this rank's shards is not what this rank steps.
        """
        stepped = {
            param: master.numel()
            for child in self.chained_optimizers
            for param, master in masters_of(child).items()
        }
        for param, matrix in owned.items():
            if matrix.range is None:
                continue
            meta = self._meta(matrix)
            assert meta.local_range is not None
            numel = meta.local_range[1] - meta.local_range[0]
            if numel != stepped.get(param, 0):
                raise PlanError(
                    f"{matrix.matrix.name} lies at {meta.global_range} of buffer "
                    f"{meta.buffer_idx}, this rank's slice holds {meta.local_range}, and this rank "
                    f"steps {stepped.get(param, 0)} of its elements."
                )
            if numel:
                self.dist_metas[param] = meta

    def _meta(self, owned: OwnedMatrix) -> MuonDistMeta:
        """Return where a matrix lies and how much of it lies in this rank's shard."""
        assert owned.range is not None
        matrix, buffer = owned.matrix, self._buffers[owned.buffer_idx]
        meta = MuonDistMeta(
            owned.buffer_idx, owned.bucket_idx, matrix.local_shape, owned.range,
            -1 if matrix.tp_dim is None else matrix.tp_dim,
        )  # fmt: skip
        group = buffer.data_parallel_group
        bucket_start, bucket_end = buffer.bucket_indices[owned.bucket_idx]
        shard = (bucket_end - bucket_start) // group.size()
        start = bucket_start + group.rank() * shard
        meta.set_local_buffer_range((start, start + shard))
        return meta

    def _places(self) -> dict[torch.nn.Parameter, tuple[int, tuple[int, int, int]]]:
        """Return for each parameter its buffer and its start, end and bucket there."""
        return {
            param: (buffer_idx, place)
            for buffer_idx, buffer in enumerate(self._buffers)
            for param, place in buffer.param_index_map.items()
        }

    def _listed_owners(self) -> dict[torch.nn.Parameter, int]:
        owners: dict[torch.nn.Parameter, int] = {}
        for lists in (self.dp_cp_params_list, self.expt_dp_params_list):
            for owner, params in enumerate(lists or []):
                owners.update(dict.fromkeys(params, owner))
        return owners


def split_by_expert(optimizer: Any) -> Iterator[OwnedMuon]:
    """Yield one Muon for dense groups and one for expert-parallel ones, where there are any."""
    for is_expert in (False, True):
        groups = [g for g in optimizer.param_groups if g["is_expert_parallel"] == is_expert]
        if groups:
            yield OwnedMuon(groups, optimizer.settings)


def _overlaps_param_gather(chunks: Sequence[Any]) -> bool:
    ddp_configs = [chunk.ddp_config for chunk in chunks if hasattr(chunk, "ddp_config")]
    return any(config.overlap_param_gather for config in ddp_configs)
