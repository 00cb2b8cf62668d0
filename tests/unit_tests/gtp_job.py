"""One rank's part of the tests of generalized tensor parallelism: Megatron's own groups and cuts.

Its layers need Transformer Engine to multiply, and none to be built: the weights are cut, and
have the rows that fill them up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from megatron_muon.testing.law.build import build_model, optimizer_config, parallel_state, wrap
from megatron_muon.testing.law.case import Case

REPLICATED = Case(wrap="replicated")


def run_scenarios() -> dict[str, str]:
    """Return for each scenario what it says, or the error it ends in."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    from megatron.core import parallel_state as mpu

    with mock.patch.object(mpu, "initialize_model_parallel", _with_shards()), parallel_state(1):
        return {name: _said(scenario) for name, scenario in SCENARIOS.items()}


def _with_shards() -> Callable[..., None]:
    """Return what makes Megatron's groups, with two ranks to cut rows over."""
    from megatron.core import parallel_state as mpu

    initialize = mpu.initialize_model_parallel
    return lambda *args, **kwargs: initialize(*args, **kwargs, gtp_remat_size=2)


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
    """What the refusals go by: 40 rows over two ranks, filled up to two times 32 with zeros."""
    weight = _linear(40).weight
    sums = weight.data.sum(1).tolist()
    real, filled = sums.count(64.0), sums.count(0.0)
    return f"{weight.is_gtp_weight_remat} {tuple(weight.shape)} {weight.pad_length} {real}+{filled}"


def a_weight_that_is_cut() -> None:
    """The error comes before DDP makes its buffers."""
    from megatron.core.optimizer.layer_wise_optimizer import tag_params_for_buffer_routing

    module = torch.nn.Module()
    module.decoder = torch.nn.Module()
    module.decoder.linear_fc1 = _linear(128)
    tag_params_for_buffer_routing([module])


def groups_without_a_weight_that_is_cut() -> None:
    """What is not cut over these ranks is copied there, and reduced again after DDP."""
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.tensor_parallel import gtp_api

    with mock.patch.object(gtp_api, "wrap_module_params_gtp", return_value=None):
        chunks = wrap(REPLICATED, build_model(REPLICATED))
    get_megatron_optimizer(optimizer_config(REPLICATED), chunks)


SCENARIOS: dict[str, Callable[[], Any]] = {
    scenario.__name__.replace("_", " "): scenario
    for scenario in (as_megatron_cuts, a_weight_that_is_cut, groups_without_a_weight_that_is_cut)
}
