"""The optimizers of a model: Muon over the matrices, scalar optimizers over all else."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal

import megatron.core.optimizer as host
import torch
from megatron.core.optimizer.optimizer_config import (
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
)
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_muon.bookkeeping.routing import Route
from megatron_muon.errors import UnsupportedError
from megatron_muon.integration.ddp import ROUTE
from megatron_muon.optimizer.config import MuonSettings
from megatron_muon.optimizer.grad_scaler import SharedGradScaler
from megatron_muon.optimizer.layer_wise import LayerWiseMuonOptimizer
from megatron_muon.optimizer.masters import wrap_whole
from megatron_muon.optimizer.muon import OwnedMuon
from megatron_muon.optimizer.param_layout import buffers_of

Kind = Literal["matrix", "scalar", "expert scalar"]
"""What has an optimizer of its own; the last two are sharded over different groups."""


def build_on_layout(
    config: OptimizerConfig,
    model_chunks: Sequence[Any],
    config_overrides: Mapping[ParamKey, Any],
    groups: Any,
    settings: MuonSettings,
    grad_scaler: SharedGradScaler | None,
    kinds: Set[Kind],
) -> list[Any]:
    """Build Muon over the matrices and byte-sharded scalar optimizers, for buffers laid out by us.

    Args:
        config: Megatron's optimizer config.
        model_chunks: DDP-wrapped model chunks, their layout verified.
        config_overrides: The caller's overrides of parameter groups.
        groups: Process groups of the model.
        settings: The resolved settings.
        grad_scaler: What the children have of the job's scaler.
        kinds: What parameters some rank has. Each kind has its optimizer on every rank, empty
            where a pipeline stage has none, since all take part in its collectives.
    """
    if model_chunks[0].ddp_config.num_distributed_optimizer_instances != 1:
        raise UnsupportedError(
            "--num-distributed-optimizer-instances above 1 is not supported with --optimizer muon: "
            "leave it at 1."
        )
    param_groups = _param_groups(config, model_chunks, config_overrides, settings)
    children: list[Any] = []
    if "matrix" in kinds:
        muons = _muons(param_groups, settings)
        children.append(
            LayerWiseMuonOptimizer(
                list(muons),
                config,
                groups,
                [_init_muon] * len(muons),
                list(model_chunks),
                grad_scaler,
            )
        )
    scalars = []
    for is_expert, kind in ((False, "scalar"), (True, "expert scalar")):
        members = [
            group for group in param_groups
            if not _is_muon(group) and group["is_expert_parallel"] == is_expert
        ]  # fmt: skip
        if kind in kinds:
            scalar = _sharded_scalar(config, model_chunks, members, groups, settings, is_expert)
            # Megatron's factory gives each a scaler of its own.
            scalar.grad_scaler = grad_scaler
            scalars.append(scalar)
    return children + scalars


def build_layer_wise(
    config: OptimizerConfig,
    model_chunks: Sequence[Any],
    config_overrides: Mapping[ParamKey, Any],
    groups: Any,
    settings: MuonSettings,
    grad_scaler: SharedGradScaler | None,
) -> list[Any]:
    """Build one layer-wise optimizer over whole parameters, for buffers that nobody laid out.

    Args:
        config: Megatron's optimizer config.
        model_chunks: DDP-wrapped model chunks.
        config_overrides: The caller's overrides of parameter groups.
        groups: Process groups of the model.
        settings: The resolved settings.
        grad_scaler: What the children have of the job's scaler.
    """
    param_groups = _param_groups(config, model_chunks, config_overrides, settings)
    pairs = [(muon, _init_muon) for muon in _muons(param_groups, settings)]
    members = [group for group in param_groups if not _is_muon(group)]
    if members:
        pairs.append(_whole_scalar(config, model_chunks, members, groups, settings))
    optimizers, init_fns = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return [
        LayerWiseMuonOptimizer(
            optimizers,
            config,
            groups,
            init_fns,
            list(model_chunks),
            grad_scaler,
            settings.gather_budget_nbytes,
        )
    ]


def build_replicated(
    config: OptimizerConfig,
    model_chunks: Sequence[Any],
    config_overrides: Mapping[ParamKey, Any],
    groups: Any,
    settings: MuonSettings,
    grad_scaler: SharedGradScaler | None,
) -> list[Any]:
    """Build optimizers that step every parameter on every data-parallel rank.

    Args:
        config: Megatron's optimizer config.
        model_chunks: Model chunks, DDP-wrapped or not.
        config_overrides: The caller's overrides of parameter groups.
        groups: Process groups of the model.
        settings: The resolved settings.
        grad_scaler: What the children have of the job's scaler.
    """
    param_groups = _param_groups(config, model_chunks, config_overrides, settings)
    children = []
    for is_expert in (False, True):
        of_kind = [group for group in param_groups if group["is_expert_parallel"] == is_expert]
        pairs = [(muon, _init_muon) for muon in _muons(of_kind, settings)]
        members = [group for group in of_kind if not _is_muon(group)]
        if members:
            pairs.append(_whole_scalar(config, model_chunks, members, groups, settings))
        for optimizer, init_fn in pairs:
            child = wrap_whole(optimizer, config, grad_scaler, init_fn)
            model_parallel = getattr(groups, "tp_ep_pp" if is_expert else "mp", None)
            child.grad_stats_parallel_group = model_parallel
            child.tp_group = groups.tp
            child.expert_tp_group = getattr(groups, "expt_tp", groups.tp)
            children.append(child)
    return children


def _param_groups(
    config: OptimizerConfig,
    model_chunks: Sequence[Any],
    config_overrides: Mapping[ParamKey, Any],
    settings: MuonSettings,
) -> list[dict[str, Any]]:
    """Make Megatron's parameter groups; what is not routed to Muon has the scalar optimizer.

    A rate of the scalar optimizer is for what no override of the caller gives a rate.
    """
    scalar = ParamKey(predicate=ParamPredicate(name="not_routed_to_muon", fn=_is_scalar))
    overrides = {**config_overrides, scalar: {"optimizer": settings.scalar_optimizer}}
    for field, value in (("max_lr", settings.scalar_lr), ("min_lr", settings.scalar_min_lr)):
        if value is not None:
            overrides[_scalar_without(field, config_overrides)] = {field: value}
    groups: list[dict[str, Any]] = host._get_param_groups(list(model_chunks), config, overrides)
    return groups


def _scalar_without(field: str, overrides: Mapping[ParamKey, Any]) -> ParamKey:
    """Return a key of the scalar parameters for which no override gives a field."""
    giving = [key for key, override in overrides.items() if field in override]
    return ParamKey(
        with_name_predicate=ParamWithNamePredicate(
            name=f"scalar_{field}",
            fn=lambda param, name: (
                _is_scalar(param) and not any(key.matches(param, name) for key in giving)
            ),
        )
    )


def _is_scalar(param: torch.nn.Parameter) -> bool:
    route: Route | None = getattr(param, ROUTE, None)
    return route is None or route.optimizer == "scalar"


def _muons(
    param_groups: Sequence[dict[str, Any]], settings: MuonSettings
) -> list[torch.optim.Optimizer]:
    """Return one Muon over the groups of matrices, none where there are none."""
    matrices = [group for group in param_groups if _is_muon(group)]
    return [OwnedMuon(matrices, settings)] if matrices else []


def _init_muon(muon: OwnedMuon, config: OptimizerConfig | None = None) -> None:
    """Make the state, as Megatron asks before it loads a checkpoint."""
    muon.init_state()


def _whole_scalar(
    config: OptimizerConfig,
    model_chunks: Sequence[Any],
    param_groups: Sequence[Mapping[str, Any]],
    groups: Any,
    settings: MuonSettings,
) -> tuple[torch.optim.Optimizer, Any]:
    """Build the torch optimizer over whole scalar parameters, and what makes its state."""
    scalar_config = copy.copy(config)
    scalar_config.optimizer = settings.scalar_optimizer
    scalar_config.use_distributed_optimizer = False
    pair: tuple[torch.optim.Optimizer, Any] = host._get_megatron_optimizer_based_on_param_groups(
        config=scalar_config,
        model_chunks=list(model_chunks),
        param_groups=list(param_groups),
        pg_collection=groups,
        skip_megatron_wrapping=True,
    )
    return pair


def _is_muon(group: Mapping[str, Any]) -> bool:
    return bool(group.get("optimizer") is None)


def _sharded_scalar(
    config: OptimizerConfig,
    model_chunks: Sequence[Any],
    param_groups: Sequence[Mapping[str, Any]],
    groups: Any,
    settings: MuonSettings,
    is_expert: bool,
) -> Any:
    """Build Megatron's ``DistributedOptimizer`` over one kind of scalar parameters."""
    process_groups = ProcessGroupCollection.setup_process_groups_for_optimizer(
        groups, list(model_chunks), use_gloo_process_groups=False
    )
    model_parallel = process_groups["expt_tp_pp_with_egtp_remat_group" if is_expert else "mp_group"]
    scalar_config = copy.copy(config)
    scalar_config.optimizer = settings.scalar_optimizer
    scalar_config.use_distributed_optimizer = True
    optimizer = host._get_megatron_optimizer_based_on_param_groups(
        config=scalar_config,
        model_chunks=list(model_chunks),
        param_groups=list(param_groups),
        per_model_buffers=buffers_of(model_chunks, is_expert, of_matrices=False),
        model_parallel_group=model_parallel,
        data_parallel_group=process_groups[
            "intra_expt_dp_group" if is_expert else "intra_dp_cp_group"
        ],
        data_parallel_group_gloo=None,
        data_parallel_group_idx=model_parallel.rank(),
        intra_dist_opt_group=process_groups["intra_dist_opt_group"],
        distributed_optimizer_instance_id=0,
        pg_collection=groups,
        skip_megatron_wrapping=False,
    )
    # Megatron's chain demands one config of all its children.
    optimizer.config = config
    return optimizer
