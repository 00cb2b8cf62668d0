"""Megatron's factory builds this package's Muon: routed and checked before, bound after."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.emerging_optimizers import EmergingOptimizerEntry
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey, ParamPredicate
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_muon.bookkeeping.plan import EVERY_OWNER, OwnedMatrix, Plan, make_plan
from megatron_muon.bookkeeping.routing import Route, RoutingRules, check_rules_match
from megatron_muon.collectives.agreement import first_difference, gather
from megatron_muon.errors import ConfigurationError, PlanError, UnsupportedError
from megatron_muon.integration.ddp import MUON_NAMES, ROUTE, check_same_route, route_chunks
from megatron_muon.integration.install import installation
from megatron_muon.integration.start import announce
from megatron_muon.optimizer.config import MuonSettings, resolve
from megatron_muon.optimizer.layer_wise import (
    LayerWiseMuonOptimizer,
    MuonParamLayout,
    verify_layout,
)
from megatron_muon.optimizer.muon import OwnedMuon

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
        settings = _resolve(config)
        _check_supported(config)
        _check_wrapping(model_chunks, settings)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        routes = _routes(model_chunks, settings)
        _check_routes(routes, settings)
        # Megatron's factory writes its defaults into the overrides it is given.
        optimizer = original(config, model_chunks, dict(config_overrides or {}), groups)
        plan = _bind(optimizer, routes, settings, groups)
        announce(optimizer, list(routes.values()), plan, settings, list(find_muons(optimizer)))
        return optimizer

    return _get_megatron_emerging_optimizer


def registers_muon(original: EmergingOptimizerEntry) -> EmergingOptimizerEntry:
    """Return the registry's row for ``muon``: our optimizer, made from the config."""
    del original
    scalar = ParamKey(predicate=ParamPredicate(name="not_routed_to_muon", fn=_is_scalar))
    return EmergingOptimizerEntry(
        optimizer_cls=OwnedMuon,
        init_state_fn=lambda muon, config=None: muon.init_state(),
        config_to_kwargs=_constructor_arguments,
        # The factory puts the configured scalar optimizer in this place.
        default_param_overrides={scalar: {"optimizer": "adam"}},
    )


def _constructor_arguments(
    config: OptimizerConfig, model_chunks: Sequence[Any], pg_collection: Any
) -> dict[str, Any]:
    del model_chunks
    return {
        "settings": _resolve(config),
        "tp_group": getattr(pg_collection, "tp", None),
        "expert_tp_group": getattr(pg_collection, "expt_tp", None),
    }


def _is_scalar(param: torch.nn.Parameter) -> bool:
    route: Route | None = getattr(param, ROUTE, None)
    return route is None or route.optimizer == "scalar"


def _resolve(config: OptimizerConfig) -> MuonSettings:
    state = installation()
    return resolve(config, state.layout if state else None)


def _check_supported(config: OptimizerConfig) -> None:
    if config.fp16:
        raise UnsupportedError(
            "--optimizer muon does not train in fp16 yet, as megatron-core's does not: use --bf16."
        )
    if config.optimizer_cpu_offload:
        raise UnsupportedError(
            "--optimizer-cpu-offload does not move Muon's state yet: drop it with --optimizer muon."
        )


def _check_wrapping(model_chunks: Sequence[Any], settings: MuonSettings) -> None:
    """Check that DDP reduces gradients and lays out parameters the way the optimizer needs."""
    for chunk in model_chunks:
        ddp_config = getattr(chunk, "ddp_config", None)
        if settings.layout is not None:
            verify_layout(chunk)
        elif getattr(ddp_config, "use_distributed_optimizer", False):
            raise ConfigurationError(
                "DDP was told use_distributed_optimizer=True, so each rank has a part of the "
                "gradients only, but the optimizer is not distributed. Give OptimizerConfig("
                "use_layer_wise_distributed_optimizer=True), or wrap the model without it."
            )


def _routes(model_chunks: Sequence[Any], settings: MuonSettings) -> Routes:
    """Route every trainable parameter, and check that DDP's buffers were made by these routes."""
    tagged = {
        param: getattr(param, ROUTE, None) for chunk in model_chunks for param in chunk.parameters()
    }
    rules = RoutingRules(exclude=settings.exclude, include=settings.include)
    routes = route_chunks(model_chunks, rules, settings.split_qkv)
    layouts = [getattr(chunk, "full_param_layout", None) for chunk in model_chunks]
    published = [layout for layout in layouts if isinstance(layout, MuonParamLayout)]
    if published:
        placed = {param for layout in published for param in layout.placements}
        for param, route in routes.items():
            check_same_route(route, tagged[param], param in placed)
            if route.optimizer == "scalar" and not getattr(param, "allreduce", True):
                raise UnsupportedError(
                    f"{route.facts.name} is an expert's and belongs to the scalar optimizer, which "
                    "Megatron cannot shard over the expert data-parallel group yet. Train experts "
                    "without biases, or give --no-use-layer-wise-param-layout."
                )
    return routes


def _check_routes(routes: Routes, settings: MuonSettings) -> None:
    """Check over all pipeline stages that every rule matches and that there is a matrix."""
    world = dist.group.WORLD
    assert world is not None
    names = [route.facts.name for route in routes.values()]
    num_matrices = sum(route.matrix is not None for route in routes.values())
    gathered = gather((names, num_matrices), world)
    every_name = [name for names, _ in gathered for name in names]
    check_rules_match(every_name, RoutingRules(exclude=settings.exclude, include=settings.include))
    if not any(count for _, count in gathered):
        example = f" (its first parameter is {every_name[0]})" if every_name else ""
        raise ConfigurationError(
            f"--optimizer muon: none of the model's {len(set(every_name))} trainable parameters "
            f"is a matrix for Muon{example}. Use --optimizer adam, or check --muon-exclude and "
            "the frozen parameters."
        )


def _bind(optimizer: Any, routes: Routes, settings: MuonSettings, groups: Any) -> Plan:
    """Make the plan, compare it across ranks, and tell each Muon its part."""
    matrices = {p: route.matrix for p, route in routes.items() if route.matrix is not None}
    layer_wise = _find_layer_wise(optimizer)
    if layer_wise is None:
        owned = [OwnedMatrix(matrix=m, owner=EVERY_OWNER) for m in matrices.values()]
        plan = make_plan(owned, 1, settings.num_ns_steps)
    else:
        owned = list(layer_wise.owned_matrices(matrices))
        num_owners = layer_wise.dp_cp.size() if layer_wise.dp_cp is not None else 1
        plan = make_plan(owned, num_owners, settings.num_ns_steps, layer_wise.buffer_numel)
    _compare_plans(plan, settings, groups)
    if layer_wise is not None:
        layer_wise.record_ownership(dict(zip(matrices, owned, strict=True)))
    planned = {item.matrix.name: item for item in plan.matrices}
    bound = {param: planned[matrix.name] for param, matrix in matrices.items()}
    for muon in find_muons(optimizer):
        muon.bind(bound)
    return plan


def _compare_plans(plan: Plan, settings: MuonSettings, groups: Any) -> None:
    """Compare settings and plans: dense matrices in a pipeline stage, experts among their copies.

    Raises:
        PlanError: Two ranks differ; the same error on every rank.
    """
    world = dist.group.WORLD
    assert world is not None
    head = [f"{name} = {value}" for name, value in replace(settings, report=None).to_dict().items()]
    dense = [item.row() for item in plan.matrices if not item.matrix.expert_parallel]
    experts = [item.row() for item in plan.matrices if item.matrix.expert_parallel]
    stage = _rank_in(groups, "pp")
    for rows, key in (
        ([*head, f"num_owners = {plan.num_owners}", *dense], stage),
        (experts, (stage, _rank_in(groups, "ep"))),
    ):
        difference = first_difference(rows, key, world)
        if difference is not None:
            rank, other_rank, row, other_row = difference
            raise PlanError(
                f"Ranks {rank} and {other_rank} disagree on the plan. First difference: rank "
                f"{rank} has {row or 'nothing'!r}, rank {other_rank} has "
                f"{other_row or 'nothing'!r}. Start every rank with the same flags, model and "
                "Megatron."
            )


def _rank_in(groups: Any, name: str) -> int:
    group = getattr(groups, name, None)
    return group.rank() if group is not None else 0


def find_muons(optimizer: Any) -> Iterator[OwnedMuon]:
    """Yield every Muon inside Megatron's chain of optimizers."""
    if isinstance(optimizer, OwnedMuon):
        yield optimizer
    elif hasattr(optimizer, "chained_optimizers"):
        for child in optimizer.chained_optimizers:
            yield from find_muons(child)
    elif getattr(optimizer, "optimizer", None) is not None:
        yield from find_muons(optimizer.optimizer)


def _find_layer_wise(optimizer: Any) -> LayerWiseMuonOptimizer | None:
    if isinstance(optimizer, LayerWiseMuonOptimizer):
        return optimizer
    for child in getattr(optimizer, "chained_optimizers", ()):
        if isinstance(child, LayerWiseMuonOptimizer):
            return child
    return None
