"""Which optimizer a parameter belongs to: one decision, by logical shape and rules."""

from __future__ import annotations

import pytest

from megatron_muon.bookkeeping.routing import (
    ParamFacts,
    RoutingRules,
    SplitRules,
    check_rules_match,
    check_splits_apply,
    decide,
)
from megatron_muon.errors import ConfigurationError

NONE = RoutingRules()


def facts(**changes):
    return ParamFacts(
        **{"name": "decoder.layers.3.mlp.linear_fc1.weight", "shape": (8, 4)} | changes
    )


@pytest.mark.parametrize(
    ("given", "rules", "optimizer", "reason"),
    [
        (facts(), NONE, "muon", "matrix"),
        (facts(shape=(1, 8)), NONE, "muon", "matrix"),
        (facts(shape=(8,)), NONE, "scalar", "1-dimensional"),
        (facts(shape=(2, 8, 4)), NONE, "scalar", "3-dimensional"),
        (facts(shape=(2, 8, 4), is_expert_stack=True), NONE, "muon", "2 experts"),
        (facts(shape=(2, 0, 4), is_expert_stack=True), NONE, "scalar", "no elements"),
        (facts(shape=(2, 8, 4, 1), is_expert_stack=True), NONE, "scalar", "4-dimensional"),
        (facts(shape=()), NONE, "scalar", "0-dimensional"),
        (facts(shape=(0, 4)), NONE, "scalar", "no elements"),
        (facts(is_embedding_or_output=True), NONE, "scalar", "embedding or output layer"),
        (facts(use_muon=False), NONE, "scalar", "attribute use_muon=False"),
        (
            facts(use_muon=True, is_embedding_or_output=True),
            NONE,
            "muon",
            "attribute use_muon=True",
        ),
        (facts(), RoutingRules(exclude=("*fc1*",)), "scalar", "--muon-exclude *fc1*"),
        (facts(use_muon=True), RoutingRules(exclude=("*fc1*",)), "scalar", "--muon-exclude *fc1*"),
        (facts(), RoutingRules(exclude=("*fc2*",)), "muon", "matrix"),
        (
            facts(use_muon=False, is_embedding_or_output=True),
            RoutingRules(include=("*fc1*",), exclude=("*",)),
            "muon",
            "--muon-include *fc1*",
        ),
        (facts(name="A.weight"), RoutingRules(exclude=("a.*",)), "muon", "matrix"),
    ],
)
def test_first_rule_that_applies_decides(given, rules, optimizer, reason):
    assert decide(given, rules) == (optimizer, reason)


@pytest.mark.parametrize(
    ("given", "rules", "message"),
    [
        (facts(shape=(8,)), RoutingRules(include=("*",)), r"--muon-include \*: decoder.* \(8,\)"),
        (facts(shape=(8,), use_muon=True), NONE, r"use_muon=True: decoder.* \(8,\)"),
        (facts(shape=(0, 8), use_muon=True), NONE, r"use_muon=True: decoder.* \(0, 8\)"),
    ],
)
def test_muon_on_no_matrix_is_an_error_that_names_the_parameter(given, rules, message):
    with pytest.raises(ConfigurationError, match=message):
        decide(given, rules)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("decoder.layers.0.mlp.router.weight", "router of experts"),
        ("mtp.layers.0.transformer_layer.mlp.router.bias", "router of experts"),
        ("decoder.layers.0.mlp.shared_experts.gate_weight", "gate of shared experts"),
        ("decoder.layers.0.mlp.experts.linear_fc1.bias", "bias of experts"),
        ("decoder.layers.0.mlp.experts.3.linear_fc2.bias", "bias of experts"),
        ("embedding.position_embeddings.weight", "position embedding"),
        ("position_embeddings.weight", "position embedding"),
        ("vision_model.position_embeddings", "position embedding"),
        ("embedding.tokentype_embeddings.weight", "token type embedding"),
    ],
)
def test_what_is_no_hidden_matrix_by_name_is_left_alone_but_can_be_asked_for(name, reason):
    given = facts(name=name)
    assert decide(given, NONE) == ("scalar", reason)
    glob = f"*{name[-12:]}"
    assert decide(given, RoutingRules(include=(glob,))) == ("muon", f"--muon-include {glob}")
    assert decide(facts(name=name, use_muon=True), NONE)[0] == "muon"
    with pytest.raises(ConfigurationError, match="two dimensions only"):
        decide(facts(name=name, shape=(8,)), RoutingRules(include=(glob,)))


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mlp.experts.3.linear_fc1.weight",
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.0.mlp.router.projection.weight",
        "decoder.layers.0.my_router.weight",
        "decoder.layers.0.gate_weight.weight",
    ],
)
def test_names_that_only_look_alike_are_matrices(name):
    assert decide(facts(name=name), NONE) == ("muon", "matrix")


def test_a_split_that_splits_nothing_is_an_error_that_names_the_flag():
    every = SplitRules(qkv=True, gated_fc1=True, heads=True)
    check_splits_apply(["whole", "gate", "up", "k head"], every)
    check_splits_apply([], SplitRules())
    with pytest.raises(ConfigurationError, match="--muon-split-heads has no effect"):
        check_splits_apply(["whole", "gate", "up", "q", "k"], every)
    with pytest.raises(ConfigurationError, match="--muon-split-gated-fc1 has no effect"):
        check_splits_apply(["q head", "k head", "gate"], every)


def test_pattern_that_matches_nothing_is_an_error():
    names = ["embedding.weight", "layer.weight"]
    check_rules_match(names, RoutingRules(exclude=("emb*",), include=("*layer*",)))
    with pytest.raises(ConfigurationError, match=r"--muon-exclude 'fc\*' .* embedding.weight"):
        check_rules_match(names, RoutingRules(exclude=("emb*", "fc*")))
    with pytest.raises(ConfigurationError, match="--muon-include"):
        check_rules_match([], RoutingRules(include=("*",)))
