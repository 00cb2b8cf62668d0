"""The layout reaches DDP: routing tags before the wrap, our layout in both wrapping paths."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_muon.bookkeeping.routing import Route, RoutingRules, SplitRules
from megatron_muon.errors import ConfigurationError
from megatron_muon.integration.layout_choice import layout_of_run, remember
from megatron_muon.integration.names import named_parameters, route_parameter
from megatron_muon.optimizer.layer_wise import LayerWiseMuonOptimizer
from megatron_muon.optimizer.param_layout import LAYOUT
from megatron_muon.optimizer.param_sync import STAGING, Staging

MUON_NAMES = ("muon", "dist_muon")
"""Values of ``--optimizer`` that mean Muon; Megatron deprecates the second."""

ROUTE = "muon_route"
"""Attribute of a model parameter that holds its :class:`Route`."""


def megatron_args() -> Any:
    """Return Megatron's global arguments, ``None`` where the program has none."""
    try:
        from megatron.training import global_vars
    except ImportError:
        return None
    return getattr(global_vars, "_GLOBAL_ARGS", None)


def tag_params_for_buffer_routing(
    model_chunks: Sequence[torch.nn.Module], pg_collection: Any = None
) -> None:
    """Route every trainable parameter before DDP makes its buffers, and say in which layout.

    Takes the place of Megatron's function of the same name; the one decision is read again when
    the parameter groups are made, so that a buffer and a group cannot disagree. Collective where
    the layout is chosen (``--muon-layout auto``).

    Args:
        model_chunks: All model chunks of this rank.
        pg_collection: Process groups of the model, ``None`` for Megatron's global ones.
    """
    args = megatron_args()
    rules = RoutingRules(
        exclude=tuple(getattr(args, "muon_exclude", None) or ()),
        include=tuple(getattr(args, "muon_include", None) or ()),
    )
    splits = SplitRules(
        qkv=getattr(args, "muon_split_qkv", True),
        gated_fc1=getattr(args, "muon_split_gated_fc1", False),
        heads=getattr(args, "muon_split_heads", False),
    )
    routes = route_chunks(model_chunks, rules, splits)
    choice = layout_of_run(args, model_chunks, routes, pg_collection)
    remember(model_chunks, choice)
    for param, route in routes.items():
        setattr(param, LAYOUT, choice.layout)
        param.is_managed_by_layer_wise_optimizer = (  # type: ignore[attr-defined]
            route.optimizer == "muon"
        )


def route_chunks(
    model_chunks: Sequence[torch.nn.Module], rules: RoutingRules, splits: SplitRules
) -> dict[torch.nn.Parameter, Route]:
    """Route the trainable parameters of model chunks and leave each its route."""
    routes: dict[torch.nn.Parameter, Route] = {}
    for chunk in model_chunks:
        for entry in named_parameters(chunk):
            if not entry.param.requires_grad:
                continue
            route = route_parameter(entry, rules, splits)
            routes[entry.param] = route
            setattr(entry.param, ROUTE, route)
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
        if not kwargs.get("use_megatron_fsdp") and not kwargs.get("use_torch_fsdp2"):
            run = megatron_args()
            if (
                getattr(run, "optimizer", "") in MUON_NAMES
                and getattr(run, "use_layer_wise_distributed_optimizer", False)
                and getattr(run, "use_layer_wise_param_layout", True)
            ):
                ddp_config.use_distributed_optimizer = True
                tag_params_for_buffer_routing(model, kwargs.get("pg_collection"))
        return function(model, data_parallel_random_init, ddp_config, *args, **kwargs)

    return _ddp_wrap


def partitions_by_owner(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Wrap ``partition_buckets``: a bucket group never mixes two optimizers' buckets.

    Megatron puts all buckets of a chunk without bucketing, the second of a virtual pipeline for
    example, into one group and syncs it after the optimizer of its first bucket: the other's new
    parameters are then never gathered.
    """

    @functools.wraps(function)
    def partition_buckets(buffers: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        owners: dict[bool, list[Any]] = {}
        for buffer in buffers:
            owner = any(getattr(p, "is_managed_by_layer_wise_optimizer", False)
                        for p in buffer.params)  # fmt: skip
            owners.setdefault(owner, []).append(buffer)
        return [group for part in owners.values() for group in function(part, *args, **kwargs)]

    return partition_buckets


def stages_before_gather(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``start_param_sync`` of a bucket group: what it gathers is written right before.

    Megatron writes the masters of its own ``DistributedOptimizer`` only, and in some modes only
    in its training loop.
    """

    @functools.wraps(function)
    def start_param_sync(self: Any, force_sync: bool = False) -> None:
        staging: Staging | None = getattr(self, STAGING, None)
        is_under_way = force_sync and self.param_gather_handle is not None
        if is_under_way and not self.ddp_config.use_distributed_optimizer:
            # Megatron would only wait, and leave what came in the gradient buffer.
            self.finish_param_sync(skip_next_bucket_dispatch=True)
            return
        if staging is not None and not is_under_way:
            staging.stage()
        function(self, force_sync)

    return start_param_sync


def dispatches_layout(original: Any) -> Any:
    """Stand for ``DistributedOptimizer`` in ``dist_utils``, which asks it for a layout only."""

    class LayoutDispatch:
        """Our layout where parameters are routed, Megatron's elsewhere."""

        @staticmethod
        def compute_full_param_layout(params: list[Any], *args: Any, **kwargs: Any) -> Any:
            """Compute the layout of one model chunk."""
            routed = any(getattr(p, ROUTE, None) is not None for p in params)
            source = LayerWiseMuonOptimizer if routed else original
            return source.compute_full_param_layout(params, *args, **kwargs)

    return LayoutDispatch


def check_same_route(route: Route, tagged: Route | None, is_placed: bool) -> None:
    """Check that a parameter goes where it went when DDP made its buffers.

    Args:
        route: Its route now.
        tagged: Its route then, ``None`` if it had none.
        is_placed: Whether its buffer is one of Muon's.

    Raises:
        ConfigurationError: The rules or the parameter have changed since.
    """
    if tagged is not None and tagged.rules != route.rules:
        raise ConfigurationError(
            f"{route.facts.name} was routed with {tagged.rules} when the model was wrapped in DDP, "
            f"the optimizer's config says {route.rules}. Give --muon-exclude and --muon-include on "
            "the command line; code without one sets param.use_muon before it wraps the model."
        )
    if tagged is None or is_placed != (route.optimizer == "muon"):
        raise ConfigurationError(
            f"{route.facts.name} belongs to {route.optimizer} ({route.reason}), but it was not "
            "routed so when the model was wrapped in DDP. Set requires_grad and use_muon before, "
            "and call tag_params_for_buffer_routing(chunks) before computing a layout yourself."
        )
