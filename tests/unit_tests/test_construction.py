"""What cannot train says why when it is built, on every rank, with the name or flag to change."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests.construction_job import SCENARIOS, run_scenarios

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

FIRST = "wrapped before install"

ERRORS = {
    FIRST: ("ConfigurationError", "Call megatron_muon.install() before the model is built"),
    "bytes layout": ("ConfigurationError", "megatron-muon did not make"),
    "untagged layout": ("ConfigurationError", "call tag_params_for_buffer_routing(chunks) before"),
    "another shard count": ("PlanError", "laid out for 4 shards, its data-parallel group has 2"),
    "another buffer": ("PlanError", "is not laid out as published"),
    "changed after wrapping": ("ConfigurationError", "layers.0.mlp.linear_fc2.weight belongs to s"),
    "reduced by shards": ("ConfigurationError", "use_layer_wise_distributed_optimizer=True"),
    "two models of one name": ("PlanError", "Two matrices are named decoder.layers.0.mlp.linear"),
    "unequal routes": ("PlanError", "rank 0 has 'decoder.layers.0.mlp.linear_fc1.weight: "),
    "unequal owners": ("PlanError", "rank 0 has 'decoder.layers.0.mlp.linear_fc1.weight: "),
    "unequal settings": ("PlanError", "rank 0 has 'num_ns_steps = 5', rank 1 has 'num_ns_steps = "),
    "unequal scalar settings": ("PlanError", "rank 0 has 'clip_grad = 0.0', rank 1 has 'clip_grad"),
    "report on one rank": ("PlanError", "rank 0 has 'report = None', rank 1 has 'report = FILE'"),
    "report in no folder": ("ConfigurationError", "--muon-report /no/such/folder/report.json: can"),
    "no matrix": ("ConfigurationError", "none of the model's 23 trainable parameters is a matrix"),
    "exclude nothing": ("ConfigurationError", "--muon-exclude '*.linear_fc3.*' matches no paramet"),
    "include vector": ("ConfigurationError", "--muon-include *final_layernorm.weight: decoder.fin"),
    "exclude too late": ("ConfigurationError", "sets param.use_muon before it wraps the model"),
    "overlap of ddp only": (
        "ConfigurationError",
        "overlap_param_gather=True, the optimizer's has overlap_param_gather=False",
    ),
    "overlap of the optimizer only": (
        "ConfigurationError",
        "overlap_param_gather=False, the optimizer's has overlap_param_gather=True",
    ),
    "overlap on one rank only": ("ConfigurationError", "--overlap-param-gather sets both"),
    "decoupled layout": ("ConfigurationError", "--muon-layout decoupled: there is no layout of"),
    "precision aware": ("UnsupportedError", "--muon-momentum-dtype bf16"),
    "gather with the step": ("UnsupportedError", "give the config muon_overlap_param_gather=True"),
    "cpu offload": ("UnsupportedError", "--optimizer-cpu-offload"),
    "shards of query groups": ("ConfigurationError", "Use --muon-tp-mode owner or duplicated"),
}

RESULTS = {
    "by hand": "built",
    "uneven gathers": "built",
    "other rules on the same model": "built twice",
    "exclude by flag": ",".join(
        [f"decoder.layers.{i}.{name}.weight" for i in range(2)
         for name in ("mlp.linear_fc2", "self_attention.linear_proj", "self_attention.linear_qkv")]
        + ["output_layer.weight"]
    ),
    "no tags without a layout": "[]",
    "fp16": "65536.0 [65536.0, 65536.0]",
    "plain config": "owner 0.5 ()",
    "deprecated name": "owner LayerWiseMuonOptimizer",
    "overrides of the caller": "True",
    "overlap of both": "[False, True]",
    "later name of a layout": "owner",
    "momentum is made at once": "True",
    "records of owned matrices": "8",
    "frozen matrices": "DistributedOptimizer",
}  # fmt: skip


@cache
def said(num_ranks: int) -> list[dict[str, str]]:
    names = [name for name, (tp, _) in SCENARIOS.items() if (tp == 4) == (num_ranks == 4)]
    with TemporaryDirectory() as logs:
        return run_ranks(run_scenarios, num_ranks, [FIRST, *names], timeout_s=60, logs=Path(logs))


def ranks(name: str) -> list[str]:
    return [rank[name] for rank in said(4 if SCENARIOS.get(name, (0,))[0] == 4 else 2)]


@pytest.mark.parametrize("name", ERRORS)
def test_error_is_clear_and_the_same_on_every_rank(name):
    kind, message = ERRORS[name]
    for rank in ranks(name):
        assert rank.startswith(kind)
        assert message in rank
    assert len(set(ranks(name))) == 1


@pytest.mark.parametrize("name", RESULTS)
def test_what_can_train_is_built(name):
    assert ranks(name) == [RESULTS[name]] * len(ranks(name))


def test_every_scenario_has_an_expectation():
    assert {FIRST, *SCENARIOS} == {*ERRORS, *RESULTS}
