"""The optimizers of a model whose DDP buffers lie as this package published them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal

import megatron.core.optimizer as host
import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_muon.errors import UnsupportedError
from megatron_muon.optimizer.config import MuonSettings
from megatron_muon.optimizer.layer_wise import LayerWiseMuonOptimizer
from megatron_muon.optimizer.muon import OwnedMuon
from megatron_muon.optimizer.param_layout import buffers_of

Kind = Literal["matrix", "scalar", "expert scalar"]
"""What has an optimizer of its own; the last two are sharded over different groups."""

_MUON = "muon"


def build_on_layout(
    config: OptimizerConfig,
    model_chunks: Sequence[Any],
    config_overrides: dict[Any, Any],
    groups: Any,
    settings: MuonSettings,
    kinds: Set[Kind],
) -> Any:
    """Build Muon over the matrices and byte-sharded scalar optimizers over all else.

    In the place of ``_get_megatron_emerging_optimizer`` (0.19.2, optimizer/__init__.py:719), which
    has no scalar optimizer over the expert data-parallel group.

    Args:
        config: Megatron's optimizer config.
        model_chunks: DDP-wrapped model chunks, their layout verified.
        config_overrides: Overrides of parameter groups; Muon's own are added.
        groups: Process groups of the model.
        settings: The resolved settings.
        kinds: What parameters some rank has. Each kind has its optimizer on every rank, empty
            where a pipeline stage has none, since all take part in its gradient statistics.
    """
    if model_chunks[0].ddp_config.num_distributed_optimizer_instances != 1:
        raise UnsupportedError(
            "--num-distributed-optimizer-instances above 1 is not supported with --optimizer muon: "
            "leave it at 1, or give --no-use-layer-wise-param-layout."
        )
    for key, override in host._EMERGING_OPTIMIZERS[_MUON].default_param_overrides.items():
        config_overrides[key] = {**override, "optimizer": settings.scalar_optimizer}
    param_groups = host._get_param_groups(model_chunks, config, config_overrides)
    matrices = [group for group in param_groups if _is_muon(group)]
    children: list[Any] = []
    if "matrix" in kinds:
        init_state = host._EMERGING_OPTIMIZERS[_MUON].init_state_fn
        muons: list[torch.optim.Optimizer] = [OwnedMuon(matrices, settings)] if matrices else []
        children.append(
            LayerWiseMuonOptimizer(
                muons, config, groups, [init_state] * len(muons), list(model_chunks)
            )
        )
    scalars = []
    for is_expert, kind in ((False, "scalar"), (True, "expert scalar")):
        members = [
            group for group in param_groups
            if not _is_muon(group) and group["is_expert_parallel"] == is_expert
        ]  # fmt: skip
        if kind in kinds:
            scalars.append(
                _scalar_optimizer(config, model_chunks, members, groups, settings, is_expert)
            )
    for child in scalars[:-1]:
        # Each would gather the buckets of all of them: the last does, when all have stepped.
        child._defer_param_sync = True
    children += scalars
    return children[0] if kinds == {"matrix"} else ChainedOptimizer(children)


def _is_muon(group: Mapping[str, Any]) -> bool:
    return bool(group.get("optimizer", _MUON) == _MUON)


def _scalar_optimizer(
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
    model_parallel = process_groups["expt_tp_pp_group" if is_expert else "mp_group"]
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
