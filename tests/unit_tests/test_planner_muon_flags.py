"""``megatron-muon plan`` takes the Muon flags that a run takes, and refuses the others alike."""

from __future__ import annotations

import argparse
from itertools import combinations

import pytest

from megatron_muon.bookkeeping.costs import ON_CUDA, find_hardware
from megatron_muon.errors import ConfigurationError, UnsupportedError
from megatron_muon.integration.install import install, uninstall
from megatron_muon.optimizer import config
from megatron_muon.planner.megatron_flags import from_flags
from megatron_muon.planner.muon_flags import LATER_FLAG, MUON_FLAGS
from megatron_muon.planner.sources import read_source
from tests.unit_tests.command_line import parser
from tests.unit_tests.test_flag_pairs import CHOICES, fields, resolved
from tests.unit_tests.test_preflight import MUON, SMALL

WORDS = {
    "--muon-hardware": "--muon-hardware cpu-gloo",
    "--muon-gather-budget-mib": "--muon-gather-budget-mib 1",
    "--muon-ns-kernel eigh": "--muon-ns-kernel eigh --muon-fp32-matmul-prec highest",
    "--no-overlap-param-gather": "",
}
"""Choices of a config that a command line spells otherwise."""

PLANNED = [choice for choice in CHOICES if choice != "--no-use-distributed-optimizer"]


@pytest.fixture(scope="module")
def actions():
    """The real parser's actions, by their flags without dashes."""
    real = argparse.ArgumentParser(allow_abbrev=False)
    install(device="cpu")
    try:
        from megatron.training.arguments import add_megatron_arguments

        add_megatron_arguments(real)
    finally:
        uninstall()
    return {
        option.removeprefix("--"): action
        for action in real._actions
        for option in action.option_strings
    }


@pytest.fixture
def parse(monkeypatch):
    """Return a function that parses and validates a command line as Megatron does."""
    with parser(monkeypatch, *MUON) as parse:
        yield parse


def planned(*words):
    return read_source(None, [*SMALL, *MUON, *words])


def refusal(function, *args):
    try:
        function(*args)
    except UnsupportedError:
        return None  # a run takes it
    except ConfigurationError as error:
        return str(error)
    return None


def test_flags_and_what_they_take_are_those_of_the_command_line(actions):
    """The planner imports neither Megatron nor what declares our flags."""
    assert {flag for flag in actions if flag.startswith("muon-")} == set(MUON_FLAGS)
    for flag, takes in MUON_FLAGS.items():
        action = actions[flag]
        assert (action.nargs == 0) == (takes.kind is None), flag
        if takes.kind is not None:
            assert (action.type or str) is takes.kind, flag
            choices = action.choices
            if flag == "muon-coefficient-type":
                choices = config._coefficient_types()
            assert tuple(choices or ()) == takes.choices or set(choices) == set(takes.choices), flag
    assert LATER_FLAG in actions


@pytest.mark.parametrize(
    "pair",
    [pair for pair in combinations(PLANNED, 2) if not fields(pair[0]) & fields(pair[1])],
    ids=" ".join,
)
def test_each_pair_is_refused_where_a_run_refuses_it_and_by_the_same_words(pair):
    words = " ".join(WORDS.get(choice, choice) for choice in pair).split()
    if "--no-overlap-param-gather" not in pair:
        words.append("--overlap-param-gather")
    assert refusal(read_source, "llama3-8b", words) == refusal(lambda: resolved(*pair))


@pytest.mark.parametrize(
    "flags",
    [
        "--muon-momentum 1.5", "--muon-momentum nan", "--muon-num-ns-steps 0",
        "--muon-extra-scale-factor 0", "--muon-match-adamw-rms 0", "--muon-scalar-lr -1",
        "--muon-match-adamw-rms 0.2 --muon-scale-mode shape_scaling",
        "--muon-match-adamw-rms 0.2 --muon-extra-scale-factor 2",
        "--muon-scalar-min-lr nan", "--min-lr 1e-4 --muon-scalar-lr 1e-5",
        "--muon-scalar-min-lr 1", "--muon-max-skipped-steps -1", "--muon-gather-budget-mib -1",
        "--muon-report=", "--muon-clip scalar-only --clip-grad 0", "--clip-grad -1",
        "--muon-ns-kernel eigh", "--muon-coefficient-type custom",
        "--lr-warmup-iters 2 --lr-warmup-init 5e-4 --muon-scalar-lr 1e-4",
        "--lr-decay-style constant --muon-scalar-min-lr 0", "--fp16",
        "--use-precision-aware-optimizer", "--layer-wise-param-layout decoupled",
        "--layer-wise-param-layout padded --muon-layout flat",
        "--layer-wise-param-layout padded --no-use-layer-wise-param-layout",
        "--muon-layout flat --no-use-layer-wise-param-layout",
        "--overlap-param-gather-with-optimizer-step", "--muon-hardware abacus",
    ],
)  # fmt: skip
def test_a_value_is_refused_by_the_words_of_a_run(parse, flags):
    with pytest.raises(ConfigurationError) as of_run:
        parse(*flags.split())
    with pytest.raises(ConfigurationError) as of_plan:
        _with_machine(planned, *flags.split())
    assert str(of_plan.value) == str(of_run.value)


def _with_machine(planned, *flags):
    """Read flags and look for the machine that they name, as the command does."""
    find_hardware(planned(*flags).hardware, ON_CUDA, "--muon-hardware")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--muon-share-blocks 3", "--muon-share-blocks is 3: expected no value"),
        ("--muon-momentum high", "--muon-momentum is 'high': expected a factor in [0, 1)"),
        ("--muon-ns-kernel fast", "--muon-ns-kernel is 'fast': expected one of auto, standard"),
        ("--muon-exclude a b", "--muon-exclude is a b: expected one glob"),
        ("--muon-exclude a --muon-exclude", "--muon-exclude is nothing: expected one glob"),
        ("--muon_share_blocks", "there is no flag --muon_share_blocks. Did you mean --muon-share"),
        ("--num_layers 2", "there is no flag --num_layers. Did you mean --num-layers?"),
        ("--tensor-model-paralell-size 2", "Did you mean --tensor-model-parallel-size?"),
        ("--optimizer adam", "--optimizer is adam: expected muon"),
    ],
)
def test_what_a_run_cannot_parse_is_refused(flags, said):
    with pytest.raises(ConfigurationError) as caught:
        planned(*flags.split())
    assert said in str(caught.value)


def test_no_flag_of_megatrons_is_taken_for_a_misspelt_one(actions):
    for flag in actions:
        known = refusal(from_flags, {flag: ["1"]}, "x") or ""
        assert "there is no flag" not in known, flag


def test_a_later_megatrons_name_of_the_layout_is_understood():
    assert planned("--layer-wise-param-layout", "padded").layout == "owner"
    for flag in ("--layer-wise-param-layout legacy", "--no-use-layer-wise-param-layout"):
        with pytest.raises(UnsupportedError, match=flag):
            planned(*flag.split())


def test_latent_attention_has_the_defaults_of_the_command_line(actions):
    words = "--multi-latent-attention --position-embedding-type rope".split()
    for source in (planned(*words), read_source("llama3-8b", words)):
        for name in ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "v-head-dim"):
            expected = actions[name].default or 0
            assert getattr(source.model, name.replace("-", "_")) == expected
    assert source.model.num_parameters > 0
