"""Megatron's factory builds this package's Muon: routed and checked before, bound after."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_muon.bookkeeping.costs import LayoutChoice
from megatron_muon.bookkeeping.matrix import LogicalMatrix
from megatron_muon.bookkeeping.plan import (
    Grid,
    GridSize,
    OwnedMatrix,
    Plan,
    held_by,
    make_plan,
)
from megatron_muon.bookkeeping.routing import (
    Route,
    RoutingRules,
    check_rules_match,
    check_splits_apply,
)
from megatron_muon.collectives.agreement import (
    first_difference,
    gather_distinct,
    raise_together,
)
from megatron_muon.collectives.span import grid_row
from megatron_muon.errors import ConfigurationError, PlanError, UnsupportedError
from megatron_muon.integration.children import (
    Kind,
    build_layer_wise,
    build_on_layout,
    build_replicated,
)
from megatron_muon.integration.ddp import MUON_NAMES, ROUTE, check_same_route, route_chunks
from megatron_muon.integration.install import installation
from megatron_muon.integration.layout_choice import remembered
from megatron_muon.integration.names import weight_shards_flag
from megatron_muon.integration.params_norm import watch_params_norm
from megatron_muon.integration.quantized import check_model, forget_stale_initial_values
from megatron_muon.integration.start import announce
from megatron_muon.optimizer.chain import MuonChain, ranks_of
from megatron_muon.optimizer.config import MuonSettings, resolve
from megatron_muon.optimizer.grad_scaler import make_grad_scaler, shared
from megatron_muon.optimizer.layer_wise import LayerWiseMuonOptimizer
from megatron_muon.optimizer.masters import leaves, masters_of
from megatron_muon.optimizer.muon import Groups, OwnedMuon
from megatron_muon.optimizer.param_layout import (
    MuonParamLayout,
    is_laid_out,
    published_kind,
    verify_layout,
)

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
"""Types of the config's values that every rank must have alike."""

Routes = dict[torch.nn.Parameter, Route]


def builds_muon(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_get_megatron_emerging_optimizer``."""

    @functools.wraps(original)
    def _get_megatron_emerging_optimizer(
        config: OptimizerConfig,
        model_chunks: list[Any],
        config_overrides: dict[Any, Any] | None = None,
        pg_collection: Any = None,
    ) -> Any:
        if config.optimizer not in MUON_NAMES:
            return original(config, model_chunks, config_overrides, pg_collection)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        ranks = ranks_of(groups)
        settings, routes = raise_together(lambda: _checked(config, model_chunks, groups), ranks)
        kinds = _check_routes(routes, model_chunks, settings, ranks)
        forget_stale_initial_values(routes, ranks)
        build = _builder(model_chunks, settings, kinds)

        def chained() -> MuonChain:
            scaler = make_grad_scaler(config)
            overrides = config_overrides or {}
            return MuonChain(
                build(config, model_chunks, overrides, groups, settings, shared(scaler)),
                {param: route.facts.name for param, route in routes.items()},
                groups,
                settings,
                scaler,
                _device(routes),
                model_chunks,
                ranks,
            )

        optimizer = raise_together(chained, ranks)
        plan = _bind(optimizer, routes, config, settings, groups, ranks)
        optimizer.saved.describe(_precision(config), settings, plan)
        watch_params_norm(model_chunks, optimizer)
        muons = [child.optimizer for child in find_muon_children(optimizer)]
        announce(optimizer, list(routes.values()), plan, settings, muons, model_chunks, ranks)
        return optimizer

    return _get_megatron_emerging_optimizer


def _builder(
    model_chunks: Sequence[Any], settings: MuonSettings, kinds: frozenset[Kind]
) -> Callable[..., list[Any]]:
    """Return what builds the children, in the place of Megatron's factory.

    Its own (0.19.2, optimizer/__init__.py:719) refuses fp16, leaves the children of a layer-wise
    optimizer without a wrapper in fp32, and has no scalar optimizer over the expert data-parallel
    group.
    """
    if settings.layout is None:
        return build_replicated
    if is_laid_out(model_chunks):
        return partial(build_on_layout, kinds=kinds)
    return build_layer_wise


def _precision(config: OptimizerConfig) -> str:
    return "fp16" if config.fp16 else "bf16" if config.bf16 else "fp32"


def _device(routes: Routes) -> torch.device:
    """Return where the parameters are; a rank may have none."""
    here = torch.device(torch.cuda.current_device()) if torch.cuda.is_available() else None
    return next((param.device for param in routes), here or torch.device("cpu"))


def _resolve(config: OptimizerConfig) -> MuonSettings:
    state = installation()
    return resolve(config, state.layout if state else None)


def _with_layout(settings: MuonSettings, model_chunks: Sequence[Any]) -> MuonSettings:
    """Return the settings with the layout that was chosen when the model was wrapped in DDP."""
    if settings.layout != "auto":
        return settings
    choice = remembered(model_chunks) or LayoutChoice(published_kind(model_chunks) or "owner")
    return replace(settings, layout=choice.layout, layout_why=choice.why)


def _checked(
    config: OptimizerConfig, model_chunks: Sequence[Any], groups: Any
) -> tuple[MuonSettings, Routes]:
    """Return the settings and routes, or raise what is wrong with them on this rank."""
    settings = _with_layout(_resolve(config), model_chunks)
    _check_supported(config)
    check_model(config, model_chunks, settings.layout is not None)
    _check_wrapping(model_chunks, config, settings)
    routes = _routes(model_chunks, settings)
    _check_weight_shards(routes, groups)
    return settings, routes


def _check_supported(config: OptimizerConfig) -> None:
    if getattr(config, "muon_use_syrk", False) and not torch.cuda.is_available():
        raise ConfigurationError(
            "--muon-use-syrk has no effect without CUDA: its kernel is for GPUs. Drop it."
        )
    if config.use_precision_aware_optimizer:
        raise UnsupportedError(
            "--use-precision-aware-optimizer does not work with --optimizer muon, which needs fp32 "
            "master weights: drop it. --muon-momentum-dtype bf16 halves the momentum's memory."
        )
    if config.overlap_param_gather_with_optimizer_step:
        raise UnsupportedError(
            "overlap_param_gather_with_optimizer_step is for Megatron's own optimizers: with Muon, "
            "give the config muon_overlap_param_gather=True."
        )
    if config.optimizer_cpu_offload:
        raise UnsupportedError(
            "--optimizer-cpu-offload does not move Muon's state yet: drop it with --optimizer muon."
        )


def _check_weight_shards(routes: Routes, groups: Any) -> None:
    """Check that rows of matrices are cut once more over the ranks that the groups name.

    Raises:
        UnsupportedError: They are cut over others, or gradients are summed over ranks that have
            different rows.
    """
    for param, route in routes.items():
        matrix = route.matrix
        if matrix is None or matrix.gtp_size == 1:
            continue
        flag = weight_shards_flag(matrix.expert_tp)
        attributes: Any = param
        cutting = _ranks_in(attributes.group)
        named = _ranks_in(_cutting_group(groups, matrix.expert_tp))
        if cutting != named:
            raise UnsupportedError(
                f"{matrix.name}: {flag} cuts its rows over the ranks {cutting}, the optimizer's "
                f"process groups name {named}. Give the optimizer the process groups of the model."
            )
        reducing = _ranks_in(
            getattr(groups, "expt_dp" if matrix.expert_parallel else "dp_cp", None)
        )
        if len(set(cutting) & set(reducing)) > 1:
            raise UnsupportedError(
                f"{matrix.name}: {flag} cuts its rows over the ranks {cutting}, and its gradients "
                f"are summed over {reducing}, which have different rows: drop {flag}."
            )


def _cutting_group(groups: Any, of_experts: bool) -> dist.ProcessGroup | None:
    """Return the ranks over which generalized tensor parallelism cuts rows."""
    return getattr(groups, "expt_gtp_remat" if of_experts else "gtp_remat", None)


def _ranks_in(group: dist.ProcessGroup | None) -> list[int]:
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def _check_wrapping(
    model_chunks: Sequence[Any], config: OptimizerConfig, settings: MuonSettings
) -> None:
    """Check that DDP reduces gradients and lays out parameters the way the optimizer needs."""
    for chunk in model_chunks:
        ddp_config = getattr(chunk, "ddp_config", None)
        _check_overlap(ddp_config, config)
        if settings.layout is not None:
            verify_layout(chunk)
            kind = published_kind([chunk])
            if kind not in (None, settings.layout):
                raise ConfigurationError(
                    f"--muon-layout is {settings.layout}, but the model was wrapped in DDP with "
                    f"layout {kind}. Code without a command line gives the layout to "
                    f"megatron_muon.install(layout={settings.layout!r}) before it wraps the model."
                )
        elif getattr(ddp_config, "use_distributed_optimizer", False):
            raise ConfigurationError(
                "DDP was told use_distributed_optimizer=True, so each rank has a part of the "
                "gradients only, but the optimizer is not distributed. Give OptimizerConfig("
                "use_layer_wise_distributed_optimizer=True), or wrap the model without it."
            )


def _check_overlap(ddp_config: Any, config: OptimizerConfig) -> None:
    """Check that DDP, whose hooks gather, and the optimizer agree on when.

    Megatron's loop and its scalar optimizer read the one or the other.
    """
    overlaps = getattr(ddp_config, "overlap_param_gather", config.overlap_param_gather)
    if overlaps != config.overlap_param_gather:
        raise ConfigurationError(
            f"DDP's config has overlap_param_gather={overlaps}, the optimizer's has "
            f"overlap_param_gather={config.overlap_param_gather}: give both the same value "
            "(--overlap-param-gather sets both)."
        )


def _routes(model_chunks: Sequence[Any], settings: MuonSettings) -> Routes:
    """Route every trainable parameter, and check that DDP's buffers were made by these routes."""
    tagged = {
        param: getattr(param, ROUTE, None) for chunk in model_chunks for param in chunk.parameters()
    }
    rules = RoutingRules(exclude=settings.exclude, include=settings.include)
    routes = route_chunks(model_chunks, rules, settings.splits)
    layouts = [getattr(chunk, "full_param_layout", None) for chunk in model_chunks]
    published = [layout for layout in layouts if isinstance(layout, MuonParamLayout)]
    if published:
        placed = {
            param
            for layout in published
            for key, buffer in layout.layouts.items()
            if key.is_managed_by_layer_wise_optimizer
            for param in buffer.param_index_map
        }
        for param, route in routes.items():
            check_same_route(route, tagged[param], param in placed)
    return routes


def _check_routes(
    routes: Routes,
    model_chunks: Sequence[Any],
    settings: MuonSettings,
    ranks: dist.ProcessGroup,
) -> frozenset[Kind]:
    """Check over all pipeline stages that every rule matches and that there is a matrix.

    A model whose matrices are all frozen is trained by the scalar optimizer alone, as asked for.

    Returns:
        The kinds of parameters that some rank has: all ranks have to chain the same optimizers.
    """
    names = [route.facts.name for route in routes.values()]
    kinds = sorted({_kind(param, route) for param, route in routes.items()})
    num_frozen = sum(
        not param.requires_grad and param.dim() >= 2
        for chunk in model_chunks
        for param in chunk.parameters()
    )
    blocks = sorted({b.name for route in routes.values() if route.matrix is not None
                     for b in route.matrix.blocks})  # fmt: skip
    own = (names, kinds, num_frozen, blocks)
    gathered = gather_distinct(own, own, ranks)
    every_name = [name for names, *_ in gathered for name in names]
    check_rules_match(every_name, RoutingRules(exclude=settings.exclude, include=settings.include))
    every_kind = frozenset(kind for _, kinds, *_ in gathered for kind in kinds)
    if "matrix" in every_kind:
        check_splits_apply((name for *_, found in gathered for name in found), settings.splits)
        return every_kind
    if not every_kind:
        raise ConfigurationError(
            "--optimizer muon: no parameter of the model requires a gradient, so there is nothing "
            "to train. Unfreeze some before the model is wrapped in DDP, or make no optimizer."
        )
    if any(frozen for _, _, frozen, _ in gathered):
        return every_kind
    example = f" (its first parameter is {every_name[0]})" if every_name else ""
    raise ConfigurationError(
        f"--optimizer muon: none of the model's {len(set(every_name))} trainable parameters "
        f"is a matrix for Muon{example}. Use --optimizer adam, or check --muon-exclude."
    )


def _kind(param: Any, route: Route) -> Kind:
    if route.matrix is not None:
        return "matrix"
    return "scalar" if getattr(param, "allreduce", True) else "expert scalar"


def _bind(
    optimizer: Any,
    routes: Routes,
    config: OptimizerConfig,
    settings: MuonSettings,
    groups: Any,
    ranks: dist.ProcessGroup,
) -> Plan:
    """Make the plan, compare it across ranks, and tell each Muon its part."""
    matrices = {p: route.matrix for p, route in routes.items() if route.matrix is not None}
    layer_wise = _find_layer_wise(optimizer)
    grids = _grids(layer_wise, groups, ranks)
    sizes = {grid: GridSize(_size(g.dp), _size(g.tp)) for grid, g in grids.items()}
    if layer_wise is None:
        owned = [OwnedMatrix(matrix=m, pieces=held_by(0, m)) for m in matrices.values()]
        buffer_numel = None
    else:
        owned = list(layer_wise.owned_matrices(matrices))
        buffer_numel = layer_wise.buffer_numel
    one_rank_each = settings.tp_mode == "owner"
    plan = raise_together(
        lambda: make_plan(
            owned, sizes, settings.num_ns_steps, buffer_numel, one_rank_each, settings.share_blocks
        ),
        ranks,
    )
    _compare_plans(plan, config, settings, groups, ranks)

    def bind() -> None:
        if layer_wise is not None:
            layer_wise.record_ownership(dict(zip(matrices, owned, strict=True)))
        _bind_children(optimizer, _device(routes), plan, matrices, grids)
        if settings.gathers_early:
            optimizer.gather_early({param: m.name for param, m in matrices.items()})

    raise_together(bind, ranks)
    return plan


def _bind_children(
    optimizer: Any,
    device: torch.device,
    plan: Plan,
    matrices: dict[torch.nn.Parameter, LogicalMatrix],
    grids: dict[Grid, Groups],
) -> None:
    """Tell each Muon the plan and what it holds."""
    layer_wise = _find_layer_wise(optimizer)
    for child in find_muon_children(optimizer):
        masters = {
            matrices[param].name: master
            for param, master in masters_of(child).items()
            if param in matrices
        }
        used = {item.owned.grid for item in plan.matrices}
        stepped = {grid for grid in used if _steps(child.optimizer, grid, layer_wise)}
        # A rank without matrices has an empty Muon, as one whose experts are all frozen.
        child.optimizer.bind(plan, {grid: grids[grid] for grid in stepped}, masters, device)


def _grids(
    layer_wise: LayerWiseMuonOptimizer | None, groups: Any, ranks: dist.ProcessGroup
) -> dict[Grid, Groups]:
    """Return the process groups of every grid; without distribution no data-parallel ones.

    Collective where generalized tensor parallelism cuts rows: the rows of those grids are made.
    """
    grids: dict[Grid, Groups] = {}
    for expert_tp in (False, True):
        tensor = getattr(groups, "expt_tp" if expert_tp else "tp", None)
        cutting = _cutting_group(groups, expert_tp)
        rows = {False: tensor}
        if tensor is not None and _size(cutting) > 1:
            rows[True] = grid_row(tensor, cutting, ranks)
        grids |= {
            Grid(expert_parallel, expert_tp, gtp): Groups(
                dp=None if layer_wise is None
                else layer_wise.expt_dp if expert_parallel else layer_wise.dp_cp,
                tp=row,
            )
            for expert_parallel in (False, True)
            for gtp, row in rows.items()
        }  # fmt: skip
    return grids


def _steps(muon: OwnedMuon, grid: Grid, layer_wise: LayerWiseMuonOptimizer | None) -> bool:
    """Whether a Muon steps the matrices of a grid: the owner layout has one Muon for all."""
    if layer_wise is not None and layer_wise.kind != "flat":
        return True
    return bool(muon.param_groups[0]["is_expert_parallel"]) == grid.expert_parallel


def _size(group: Any) -> int:
    return 1 if group is None else int(group.size())


def _compare_plans(
    plan: Plan,
    config: OptimizerConfig,
    settings: MuonSettings,
    groups: Any,
    ranks: dist.ProcessGroup,
) -> None:
    """Compare settings and plans: dense matrices in a pipeline stage, experts among their copies.

    Raises:
        PlanError: Two ranks differ; the same error on every rank.
    """
    # Whether there is a report is compared, and not where: rank 0 alone writes it.
    told = replace(settings, report="FILE" if settings.report is not None else None)
    head = [f"{name} = {value}" for name, value in told.to_dict().items()]
    head += [
        f"{field.name} = {value}"
        for field in fields(config)
        if field.name != "muon_report" and isinstance(value := getattr(config, field.name), _PLAIN)
    ]
    dense = [item.row() for item in plan.matrices if not item.matrix.expert_parallel]
    experts = [item.row() for item in plan.matrices if item.matrix.expert_parallel]
    stage = _rank_in(groups, "pp")
    for rows, key in (
        ([*head, f"num_owners = {plan.num_owners}", *dense], stage),
        (experts, (stage, _rank_in(groups, "ep"))),
    ):
        difference = first_difference(rows, key, ranks)
        if difference is not None:
            first, second, row, other_row = difference
            rank, other_rank = (dist.get_global_rank(ranks, each) for each in (first, second))
            raise PlanError(
                f"Ranks {rank} and {other_rank} disagree on the plan. First difference: rank "
                f"{rank} has {row or 'nothing'!r}, rank {other_rank} has "
                f"{other_row or 'nothing'!r}. Start every rank with the same flags, model and "
                "Megatron."
            )


def _rank_in(groups: Any, name: str) -> int:
    group = getattr(groups, name, None)
    return group.rank() if group is not None else 0


def find_muon_children(optimizer: Any) -> Iterator[Any]:
    """Return every wrapper in Megatron's chain of optimizers whose torch optimizer is a Muon."""
    return (leaf for leaf in leaves(optimizer) if isinstance(leaf.optimizer, OwnedMuon))


def _find_layer_wise(optimizer: MuonChain) -> LayerWiseMuonOptimizer | None:
    found = (c for c in optimizer.chained_optimizers if isinstance(c, LayerWiseMuonOptimizer))
    return next(found, None)
