"""State is there from the start, and what a checkpoint has depends on no gradient that was seen."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests.reshard_job import (
    EMBEDDING,
    OUTPUT,
    Model,
    Run,
    Way,
    look_at_state,
    run_all,
    save_differing_steps,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

EXPERTS = Model(experts=4)
WAYS = {
    "owner": Way(dp=2),
    "flat": Way(dp=2, layout="flat"),
    "none": Way(dp=2, layout="none"),
    "replicated": Way(dp=2, layout="replicated"),
    "fp32 owner": Way(dp=2, precision="fp32"),
    "fp32 flat": Way(dp=2, precision="fp32", layout="flat"),
    "fp32 none": Way(dp=2, precision="fp32", layout="none"),
    "bf16 momentum": Way(tp=2, momentum_dtype="bf16"),
    "experts": Way(model=EXPERTS, ep=2, dp=2),
    "experts, flat": Way(model=EXPERTS, ep=2, dp=2, layout="flat"),
    "MXFP8": Way(model=Model(hidden=64, ffn=96, head=16), dp=2, mxfp8=True, mxfp8_gather=True),
    "pipeline": Way(model=Model(tied=True), pp=2),
}

LAYER = "decoder.layers."
MATRICES = {
    f"{LAYER}{name}.weight"
    for name in (
        "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1",
        "mlp.linear_fc2",
    )
}  # fmt: skip
SCALARS = {
    f"{LAYER}self_attention.linear_qkv.layer_norm_weight",
    f"{LAYER}mlp.linear_fc1.layer_norm_weight",
    "decoder.final_layernorm.weight", EMBEDDING, OUTPUT,
}  # fmt: skip


@cache
def looked():
    """What each rank would save at the start, after zeros, and after gradients, by way."""
    ranks = run_ranks(look_at_state, 2, list(WAYS.values()), timeout_s=140)
    return dict(zip(WAYS, zip(*ranks, strict=True), strict=True))


def model_keys(way):
    """Keys of the model's matrices and of all else, as Megatron saves them."""
    scalars = SCALARS - ({OUTPUT} if way.model.tied else set())
    if not way.model.experts:
        return MATRICES, scalars
    of_experts = {f"{LAYER}mlp.experts.experts.linear_{name}.weight" for name in ("fc1", "fc2")}
    dense = {key for key in MATRICES if "mlp" not in key}
    return dense | of_experts, scalars | {f"{LAYER}mlp.router.weight"}


@pytest.mark.parametrize("label", WAYS)
def test_every_parameter_has_every_state_under_its_own_key(label):
    way = WAYS[label]
    matrices, scalars = model_keys(way)
    states = [("momentum_buffer", matrices), ("exp_avg", scalars), ("exp_avg_sq", scalars)]
    if way.precision != "fp32":
        states += [("fp32_param", matrices | scalars)]
        if way.layout in ("owner", "flat"):
            states += [("param", scalars)]  # for Megatron's loader
    expected = {f"optimizer.state.{state}.{key}" for state, keys in states for key in keys}
    assert {key for rank in looked()[label] for key, _ in rank[0].keys} == expected


@pytest.mark.parametrize("label", WAYS)
def test_what_is_saved_depends_on_no_gradient(label):
    for at_start, after_zeros, after_gradients in looked()[label]:
        assert at_start.keys == after_zeros.keys == after_gradients.keys
        assert at_start.keys


@pytest.mark.parametrize("layout", ["owner", "none"])
def test_state_that_is_made_with_a_first_gradient_is_seen(layout):
    ways = [Way(dp=2, layout=layout)]
    for ((at_start, after_zeros, _),) in run_ranks(
        look_at_state, 2, ways, "no state at the start", timeout_s=60
    ):
        assert at_start.keys.keys() < after_zeros.keys.keys()


@pytest.mark.parametrize("label", WAYS)
def test_state_at_the_start_is_zero(label):
    way = WAYS[label]
    dtypes = set()
    for at_start, _, _ in looked()[label]:
        for state in (state for pieces in at_start.state.values() for _, state in pieces):
            assert set(state) in ({"momentum_buffer"}, {"exp_avg", "exp_avg_sq", "step"})
            assert not any(value.any() for value in state.values())
            dtypes |= {state[key].dtype for key in state if key == "momentum_buffer"}
    assert dtypes == {torch.bfloat16 if way.momentum_dtype == "bf16" else torch.float32}


@pytest.mark.parametrize("label", WAYS)
def test_steps_are_counted_once_and_alike_on_all_ranks(label):
    for number in range(3):
        one, other = (rank[number].common for rank in looked()[label])
        assert repr(one) == repr(other)
        muon, scalar = one[0]["optimizer"], one[1]["optimizer"]
        assert scalar["state"]["common_step"] == number
        assert muon["muon"]["momentum_convention"] == "ema"
        assert muon["muon"]["precision"] == WAYS[label].precision


def test_steps_that_differ_are_an_error_on_all_ranks():
    told = run_ranks(save_differing_steps, 2, Way(dp=2), timeout_s=100)
    assert told[0] == told[1]
    assert "made [0, 1] steps" in told[0]


@pytest.mark.parametrize("layout", ["owner", "flat"])
def test_run_that_has_made_no_step_goes_on_as_if_never_stopped(layout, tmp_path):
    way = Way(dp=2, layout=layout, overlap=True)
    save = Run(way=way, save=str(tmp_path), steps=0)
    load = Run(way=way, load=str(tmp_path))
    for live, kept in run_ranks(run_all, 2, [save, load], timeout_s=100):
        assert kept.losses == live.losses
        steps = {float(state["step"]) for pieces in kept.states.values() for _, state in pieces
                 if "step" in state}  # fmt: skip
        assert steps == {0}


def test_keys_are_those_of_every_other_way():
    """Of another layout and other sizes, so that these can load it."""
    of = {label: {key.replace("state.param.", "state.fp32_param.")
                  for rank in looked()[label] for key, _ in rank[0].keys}
          for label in ("owner", "flat", "none", "replicated", "bf16 momentum")}  # fmt: skip
    assert all(keys == of["owner"] for keys in of.values())
