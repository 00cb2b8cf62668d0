"""The settings that a run prints at start-up are a command line: it has the same settings again."""

from __future__ import annotations

import dataclasses
import shlex

import pytest

from megatron_muon.integration.start import SETTING_FLAGS, settings_as_flags
from megatron_muon.optimizer.config import MuonSettings, resolve
from tests.unit_tests.command_line import parser


@pytest.fixture
def parse(monkeypatch):
    """Return a function that parses and validates a command line as Megatron does."""
    with parser(monkeypatch, "--optimizer", "muon", "--use-distributed-optimizer") as parse:
        yield parse


@pytest.mark.parametrize(
    "given",
    [
        "",
        "--muon-split-heads --muon-share-blocks --muon-exclude *fc1* --muon-exclude *proj*",
        "--muon-no-split-qkv --muon-split-gated-fc1 --swiglu --muon-nesterov --muon-layout flat",
        "--muon-match-adamw-rms 0.2 --muon-scalar-lr 1e-4 --muon-scalar-min-lr 0",
        "--muon-momentum 0.12345678 --muon-gather-budget-mib 0.5 --muon-max-skipped-steps 0",
        "--muon-hardware cpu-gloo --muon-momentum-dtype bf16 --muon-clip scalar-only",
        "--muon-tp-mode duplicated --muon-ns-kernel gram --muon-report r.json",
        "--overlap-param-gather --overlap-grad-reduce --muon-overlap-param-gather",
    ],
)
def test_what_is_printed_gives_the_same_settings(parse, given):
    before = parse(*given.split())
    settings = resolve(before, None)
    printed = list(settings_as_flags(settings, before))
    kept = [word for word in given.split() if not word.startswith("--muon")
            and ("overlap" in word or word == "--swiglu")]  # fmt: skip
    words = [word for flag in printed for word in shlex.split(flag)]
    assert resolve(parse(*kept, *words), None) == settings
    flags = [word.partition(" ")[0] for word in printed]
    assert {word for word in given.split() if word.startswith("--muon")} <= set(flags)
    assert not any("None" in flag or "False" in flag for flag in printed)


def test_every_setting_has_a_flag():
    fields = {field.name for field in dataclasses.fields(MuonSettings)}
    named = set(SETTING_FLAGS) - {"match_adamw_rms", "gather_budget_mib"}
    assert fields == named | {"layout_why", "gather_budget_nbytes"}


def test_what_is_unset_is_not_printed(parse):
    args = parse()
    printed = " ".join(settings_as_flags(resolve(args, None), args))
    for absent in ("hardware", "scalar-lr", "report", "exclude", "no-split-qkv", "use-syrk"):
        assert absent not in printed
    assert "--lr 0.001" in printed
