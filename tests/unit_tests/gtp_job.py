"""One rank's part of the tests of generalized tensor parallelism: Megatron's own groups and cuts.

Its layers need Transformer Engine to multiply, and none to be built: the weights are cut, and
have the rows that fill them up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_muon.collectives.span import grid_row
from megatron_muon.testing.law.build import (
    build_model,
    build_optimizer,
    find_muons,
    optimizer_config,
    parallel_state,
    wrap,
)
from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.job import train

GTP = Case(gtp=2, layers=1)
REPLICATED = Case(gtp=2, layers=1, wrap="replicated")


def run_scenarios() -> dict[str, str]:
    """Return for each scenario what it says, or the error it ends in."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    with parallel_state(*GTP.grid):
        return {name: _said(scenario) for name, scenario in SCENARIOS.items()}


def _said(scenario: Callable[[], Any]) -> str:
    try:
        return str(scenario())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _linear(rows: int) -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )  # fmt: skip
    return ColumnParallelLinear(
        64, rows, config=config, init_method=torch.nn.init.ones_, bias=False
    )


def as_megatron_cuts() -> str:
    """What routing goes by: 40 rows over two ranks, filled up to two times 32 with zeros."""
    weight = _linear(40).weight
    sums = weight.data.sum(1).tolist()
    real, filled = sums.count(64.0), sums.count(0.0)
    return f"{weight.is_gtp_weight_remat} {tuple(weight.shape)} {weight.pad_length} {real}+{filled}"


def ranks_without_a_weight_that_is_cut() -> str:
    """What is not cut over these ranks is copied there, and each of them steps its copy."""
    from megatron.core.tensor_parallel import gtp_api

    with mock.patch.object(gtp_api, "wrap_module_params_gtp", return_value=None):
        chunks = wrap(REPLICATED, build_model(REPLICATED.__class__(layers=1)))
    (muon,) = find_muons(build_optimizer(REPLICATED, chunks))
    homes = {planned.home.tp for engine in muon.engines for planned in engine.plan}
    return f"homes in rows of {muon.engines[0].position.tp_size}: {homes}"


def orthogonalization_of_shards() -> None:
    train(Case(gtp=2, layers=1, tp_mode="distributed"))


def orthogonalization_of_shards_alone() -> None:
    train(Case(gtp=2, layers=1, tp_mode="blockwise"))


def other_groups_than_the_model_has() -> None:
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    chunks = wrap(REPLICATED, build_model(REPLICATED))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.gtp_remat = groups.tp
    get_megatron_optimizer(optimizer_config(REPLICATED), chunks, pg_collection=groups)


def gradients_summed_over_ranks_with_other_rows() -> None:
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    chunks = wrap(REPLICATED, build_model(REPLICATED))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.dp_cp = dist.group.WORLD
    get_megatron_optimizer(optimizer_config(REPLICATED), chunks, pg_collection=groups)


def ranks_in_another_order() -> None:
    """Every rank would have every part."""
    grid_row(dist.group.WORLD, dist.group.WORLD, dist.group.WORLD)


def a_part_of_the_job() -> None:
    """The ranks of the row that build no optimizer are not heard of."""
    from megatron.core import parallel_state as mpu

    alone = mpu.get_tensor_model_parallel_group()
    grid_row(alone, mpu.get_gtp_weight_remat_group(), alone)


SCENARIOS: dict[str, Callable[[], Any]] = {
    scenario.__name__.replace("_", " "): scenario
    for scenario in (
        as_megatron_cuts,
        ranks_without_a_weight_that_is_cut,
        orthogonalization_of_shards,
        orthogonalization_of_shards_alone,
        other_groups_than_the_model_has,
        gradients_summed_over_ranks_with_other_rows,
        ranks_in_another_order,
        a_part_of_the_job,
    )
}
