"""The seams: every name of Megatron-Core 0.19.2 that this package replaces, and why.

Each row says which name, what takes its place, what would go wrong without it, and which
parameters the name had when the row was written. :func:`check` compares them before anything is
replaced, so that a Megatron that has moved on is refused and not half patched.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_muon.errors import HostError
from megatron_muon.integration.patching import Patch

_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam(Patch):
    """A patch with the parameters its target must have.

    Attributes:
        parameters: Parameter names of the target (for a class, of its constructor), ``None`` for
            a name that is not called.
    """

    parameters: tuple[str, ...] | None


def table(*, optimizer: bool) -> list[Seam]:
    """Return the seams that this installation has names for; none without ``optimizer``."""
    rows = _optimizer_seams() if optimizer else []
    if importlib.util.find_spec("megatron.training") is None:
        rows = [row for row in rows if not row.module.startswith("megatron.training")]
    return rows


def check(patches: Sequence[Patch]) -> None:
    """Raise :class:`HostError`, naming all misfits, unless each seam fits the installed Megatron."""
    misfits = [misfit for patch in patches if (misfit := _misfit(patch))]
    if misfits:
        raise HostError(
            "megatron-core is of a known version but not as released; nothing was changed: "
            + "; ".join(misfits)
        )


def _misfit(patch: Patch) -> str | None:
    try:
        holder, leaf = patch.holder()
    except (ImportError, AttributeError) as error:
        return f"{patch.target} cannot be reached ({error})"
    target = getattr(holder, leaf, _ABSENT)
    if target is _ABSENT or target is None:
        return f"{patch.target} is missing"
    expected = patch.parameters if isinstance(patch, Seam) else None
    if expected is None:
        return None
    found = tuple(inspect.signature(target).parameters)
    if found != expected:
        return f"{patch.target} takes {found}, expected {expected}"
    return None


def _value(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _optimizer_seams() -> list[Seam]:
    from megatron_muon.integration import arguments, ddp, factory, preflight
    from megatron_muon.optimizer.config import MuonConfig
    from megatron_muon.optimizer.layer_wise import LayerWiseMuonOptimizer

    layer_wise = dict(
        name="LayerWiseDistributedOptimizer",
        replace=_value(LayerWiseMuonOptimizer),
        why="owns whole matrices by our layout and orthogonalizes the full matrix under TP",
        needed_by="core/optimizer/__init__.py:_get_megatron_emerging_optimizer",
        parameters=("optimizers", "config", "pg_collection", "init_state_fn_list", "model_chunks"),
    )
    tag = dict(
        name="tag_params_for_buffer_routing",
        replace=_value(ddp.tag_params_for_buffer_routing),
        why="one routing decides a parameter's buffer and its optimizer",
        needed_by="training/training.py:wrap_model_chunks_with_ddp",
        parameters=("model_chunks",),
    )
    return [
        Seam(module="megatron.core.optimizer", **layer_wise),
        Seam(module="megatron.core.optimizer.layer_wise_optimizer", **layer_wise),
        Seam(module="megatron.training.training", **layer_wise),
        Seam(module="megatron.core.optimizer.layer_wise_optimizer", **tag),
        Seam(module="megatron.training.training", **tag),
        Seam(
            module="megatron.core.optimizer",
            name="_get_megatron_emerging_optimizer",
            replace=factory.builds_muon,
            why="routes, checks and plans before Megatron's factory, binds the plan after it",
            needed_by="core/optimizer/__init__.py:get_megatron_optimizer",
            parameters=("config", "model_chunks", "config_overrides", "pg_collection"),
        ),
        Seam(
            module="megatron.core.optimizer.emerging_optimizers",
            name="_EMERGING_OPTIMIZERS.muon",
            replace=factory.registers_muon,
            why="the algorithm itself: our torch optimizer and our routing predicate",
            needed_by="core/optimizer/emerging_optimizers.py:_create_emerging_optimizer",
            parameters=None,
        ),
        Seam(
            module="megatron.training.training",
            name="OptimizerConfig",
            replace=_value(MuonConfig),
            why="carries our flags from the command line to the optimizer",
            needed_by="training/training.py:get_megatron_optimizer_config",
            parameters=None,
        ),
        Seam(
            module="megatron.training.arguments",
            name="add_megatron_arguments",
            replace=arguments.adds_muon_arguments,
            why="our flags, and parser errors in one line",
            needed_by="training/arguments.py:parse_args",
            parameters=("parser",),
        ),
        Seam(
            module="megatron.training.arguments",
            name="validate_args",
            replace=preflight.checks_arguments,
            why="bad input is an error before any work starts",
            needed_by="training/arguments.py:parse_and_validate_args",
            parameters=("args", "defaults"),
        ),
        Seam(
            module="megatron.core.parallel_state",
            name="initialize_model_parallel",
            replace=preflight.compares_ranks,
            why="ranks with different flags would hang in a collective",
            needed_by="training/initialize.py:_initialize_distributed",
            parameters=None,
        ),
        Seam(
            module="megatron.training.models.dist_utils",
            name="_ddp_wrap",
            replace=ddp.wraps_with_layout,
            why="0.19.2 has no layer-wise branch on the ModelBuilder path",
            needed_by="training/models/dist_utils.py:unimodal_build_distributed_models",
            parameters=(
                "model", "data_parallel_random_init", "ddp_config",
                "overlap_param_gather_with_optimizer_step", "use_megatron_fsdp",
                "use_torch_fsdp2", "pg_collection",
            ),
        ),
        Seam(
            module="megatron.training.models.dist_utils",
            name="DistributedOptimizer",
            replace=ddp.dispatches_layout,
            why="_ddp_wrap computes its layout through this name",
            needed_by="training/models/dist_utils.py:_ddp_wrap",
            parameters=None,
        ),
    ]  # fmt: skip
