"""The layout reaches DDP: routing tags before the wrap, our layout in both wrapping paths."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_muon.bookkeeping.routing import Route, RoutingRules
from megatron_muon.errors import ConfigurationError
from megatron_muon.integration.names import named_parameters, route_parameter
from megatron_muon.optimizer.layer_wise import LayerWiseMuonOptimizer

ROUTE = "muon_route"
"""Attribute of a model parameter that holds its :class:`Route`."""


def megatron_args() -> Any:
    """Return Megatron's global arguments, ``None`` where the program has none."""
    try:
        from megatron.training import global_vars
    except ImportError:
        return None
    return getattr(global_vars, "_GLOBAL_ARGS", None)


def tag_params_for_buffer_routing(model_chunks: Sequence[torch.nn.Module]) -> None:
    """Route every trainable parameter before DDP makes its buffers.

    Takes the place of Megatron's function of the same name; the one decision is read again when
    the parameter groups are made, so that a buffer and a group cannot disagree.
    """
    args = megatron_args()
    rules = RoutingRules(
        exclude=tuple(getattr(args, "muon_exclude", None) or ()),
        include=tuple(getattr(args, "muon_include", None) or ()),
    )
    route_chunks(model_chunks, rules, getattr(args, "muon_split_qkv", True))


def route_chunks(
    model_chunks: Sequence[torch.nn.Module], rules: RoutingRules, split_qkv: bool
) -> dict[torch.nn.Parameter, Route]:
    """Route the trainable parameters of model chunks and mark them for DDP's buffers."""
    routes: dict[torch.nn.Parameter, Route] = {}
    for chunk in model_chunks:
        for entry in named_parameters(chunk):
            if not entry.param.requires_grad:
                continue
            route = route_parameter(entry, rules, split_qkv)
            routes[entry.param] = route
            setattr(entry.param, ROUTE, route)
            entry.param.is_managed_by_layer_wise_optimizer = (  # type: ignore[attr-defined]
                route.optimizer == "muon"
            )
    return routes


def wraps_with_layout(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``dist_utils._ddp_wrap``: what ``wrap_model_chunks_with_ddp`` does for Muon, here too.

    0.19.2 routes and lays out for the layer-wise optimizer only on the ``model_provider`` path.
    """

    @functools.wraps(function)
    def _ddp_wrap(
        model: list[Any], data_parallel_random_init: bool, ddp_config: Any,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        run = megatron_args()
        if getattr(run, "use_layer_wise_distributed_optimizer", False) and getattr(
            run, "optimizer", ""
        ) == "muon" and getattr(run, "use_layer_wise_param_layout", True):  # fmt: skip
            ddp_config.use_distributed_optimizer = True
            tag_params_for_buffer_routing(model)
        return function(model, data_parallel_random_init, ddp_config, *args, **kwargs)

    return _ddp_wrap


def dispatches_layout(original: Any) -> Any:
    """Stand for ``DistributedOptimizer`` in ``dist_utils``, which asks it for a layout only."""

    class LayoutDispatch:
        """Our layout where parameters are routed, Megatron's elsewhere."""

        @staticmethod
        def compute_full_param_layout(params: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            """Compute the layout of one model chunk."""
            routed = any(getattr(p, ROUTE, None) is not None for p in params)
            source = LayerWiseMuonOptimizer if routed else original
            return source.compute_full_param_layout(params, *args, **kwargs)

    return LayoutDispatch


def check_same_rules(param: torch.nn.Parameter, route: Route) -> None:
    """Raise unless a parameter was routed by the same rules when DDP made its buffers."""
    tagged: Route | None = getattr(param, ROUTE, None)
    if tagged is not None and tagged.rules != route.rules:
        raise ConfigurationError(
            f"{route.facts.name} was routed with {tagged.rules} when the model was wrapped in DDP, "
            f"the optimizer's config says {route.rules}. Give --muon-exclude and --muon-include "
            "once, before the model is built."
        )
