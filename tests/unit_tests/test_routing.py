"""Which optimizer a parameter belongs to: one decision, by logical shape and rules."""

from __future__ import annotations

import pytest

from megatron_muon.bookkeeping.routing import ParamFacts, RoutingRules, check_rules_match, decide
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


def test_pattern_that_matches_nothing_is_an_error():
    names = ["embedding.weight", "layer.weight"]
    check_rules_match(names, RoutingRules(exclude=("emb*",), include=("*layer*",)))
    with pytest.raises(ConfigurationError, match=r"--muon-exclude 'fc\*' .* embedding.weight"):
        check_rules_match(names, RoutingRules(exclude=("emb*", "fc*")))
    with pytest.raises(ConfigurationError, match="--muon-include"):
        check_rules_match([], RoutingRules(include=("*",)))
