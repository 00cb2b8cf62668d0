"""Settings, and pairs of settings: each works, or is an error that names the flag to change."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from megatron_muon import MuonConfig
from megatron_muon.bookkeeping.routing import SplitRules
from megatron_muon.errors import ConfigurationError
from megatron_muon.integration.install import install, installation, uninstall
from megatron_muon.optimizer.compatibility import PAIRS
from megatron_muon.optimizer.config import CLIPS, EXCHANGE_DTYPES, FLAGS, LAYOUTS, TP_MODES, resolve
from tests.unit_tests.command_line import parser

DISTRIBUTED = {"use_layer_wise_distributed_optimizer": True}

CHOICES = {
    "--muon-hardware": {"muon_hardware": "cpu-gloo"},
    "--muon-split-heads": {"muon_split_heads": True},
    "--muon-split-gated-fc1": {"muon_split_gated_fc1": True},
    "--muon-use-syrk": {"muon_use_syrk": True},
    "--muon-share-blocks": {"muon_share_blocks": True},
    **{f"--muon-ns-kernel {name}": {"muon_ns_kernel": name}
       for name in ("auto", "standard", "gram", "exact")},
    "--muon-ns-kernel eigh": {"muon_ns_kernel": "eigh", "muon_fp32_matmul_prec": "highest"},
    "--muon-no-split-qkv": {"muon_split_qkv": False},
    **{f"--muon-layout {layout}": {"muon_layout": layout} for layout in LAYOUTS},
    **{f"--muon-tp-mode {mode}": {"muon_tp_mode": mode} for mode in TP_MODES},
    **{f"--muon-exchange-dtype {dtype}": {"muon_exchange_dtype": dtype}
       for dtype in EXCHANGE_DTYPES},
    "--muon-gather-budget-mib": {"muon_gather_budget_mib": 1.0},
    "--muon-overlap-param-gather": {"muon_overlap_param_gather": True},
    "--overlap-param-gather": {"overlap_param_gather": True},
    "--no-overlap-param-gather": {"overlap_param_gather": False},
    "--reuse-grad-buf-for-mxfp8-param-ag": {"reuse_grad_buf_for_mxfp8_param_ag": True},
    "--muon-momentum-dtype bf16": {"muon_momentum_dtype": "bf16"},
    "--muon-match-adamw-rms 0.2": {"muon_match_adamw_rms": 0.2},
    **{f"--muon-clip {clip}": {"muon_clip": clip} for clip in CLIPS},
    "--clip-grad 0": {"clip_grad": 0.0},
    "--muon-scalar-lr 0": {"muon_scalar_lr": 0.0},
    "--muon-scalar-min-lr 0": {"muon_scalar_min_lr": 0.0},
    "--muon-max-skipped-steps 0": {"muon_max_skipped_steps": 0},
    "--fp16": {"fp16": True, "params_dtype": torch.float16},
    "--use-distributed-optimizer": DISTRIBUTED,
    "--no-use-distributed-optimizer": {"use_layer_wise_distributed_optimizer": False},
}  # fmt: skip
"""What a user can choose, and the fields of the config that it becomes."""

REFUSED = {
    ("--muon-clip scalar-only", "--clip-grad 0"),
    ("--muon-split-heads", "--muon-no-split-qkv"),
    ("--muon-use-syrk", "--muon-tp-mode duplicated"),
    ("--muon-use-syrk", "--muon-tp-mode distributed"),
    ("--muon-use-syrk", "--muon-tp-mode blockwise"),
    ("--muon-use-syrk", "--no-use-distributed-optimizer"),
    ("--muon-overlap-param-gather", "--no-use-distributed-optimizer"),
    ("--muon-overlap-param-gather", "--no-overlap-param-gather"),
    ("--muon-overlap-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"),
    ("--muon-share-blocks", "--muon-tp-mode duplicated"),
    ("--muon-share-blocks", "--muon-tp-mode distributed"),
    ("--muon-share-blocks", "--muon-tp-mode blockwise"),
    ("--muon-share-blocks", "--muon-ns-kernel standard"),
    ("--muon-share-blocks", "--muon-ns-kernel gram"),
    ("--muon-share-blocks", "--muon-ns-kernel eigh"),
    ("--muon-share-blocks", "--muon-ns-kernel exact"),
    ("--muon-use-syrk", "--muon-ns-kernel eigh"),
    ("--muon-use-syrk", "--muon-ns-kernel exact"),
    ("--muon-ns-kernel standard", "--muon-tp-mode distributed"),
    ("--muon-ns-kernel gram", "--muon-tp-mode distributed"),
    ("--muon-ns-kernel exact", "--muon-tp-mode distributed"),
    ("--muon-ns-kernel eigh", "--muon-tp-mode distributed"),
    ("--muon-layout owner", "--no-use-distributed-optimizer"),
    ("--muon-layout flat", "--no-use-distributed-optimizer"),
    ("--muon-layout auto", "--no-use-distributed-optimizer"),
    ("--muon-hardware", "--no-use-distributed-optimizer"),
    ("--muon-hardware", "--muon-layout owner"),
    ("--muon-hardware", "--muon-layout flat"),
}
"""The pairs that cannot work, written out once more by hand."""

REFUSED_IN_ONE_LAYOUT = {
    ("--muon-tp-mode distributed", "--muon-exchange-dtype bf16"): "flat",
    ("--muon-tp-mode blockwise", "--muon-exchange-dtype bf16"): "flat",
}
"""The pairs that work in one layout alone, which is then taken where none is asked for."""


def fields(choice):
    return set(CHOICES[choice])


def resolved(*choices, layout=None, **changes):
    # A layout is only there to be chosen with a distributed optimizer, and when a gather starts
    # only where it overlaps.
    values = {"optimizer": "muon", "lr": 0.1, "overlap_param_gather": True} | DISTRIBUTED
    for choice in choices:
        values |= CHOICES[choice]
    return resolve(MuonConfig(**values | changes), layout)


@pytest.mark.parametrize(
    "pair",
    [pair for pair in combinations(CHOICES, 2) if not fields(pair[0]) & fields(pair[1])],
    ids=" ".join,
)
def test_each_pair_works_or_names_the_flag(pair):
    if pair in REFUSED:
        with pytest.raises(ConfigurationError) as caught:
            resolved(*pair)
        for choice in pair:
            flag = "--" + choice.removeprefix("--no-").removeprefix("--")
            assert flag in str(caught.value)
        return
    settings = resolved(*pair)
    layouts = [choice.split()[-1] for choice in pair if choice.startswith("--muon-layout")]
    only = REFUSED_IN_ONE_LAYOUT.get(pair)
    if "--no-use-distributed-optimizer" in pair:
        assert settings.layout is None
    else:
        assert settings.layout == (only or (layouts or ["auto"])[0])
    assert bool(settings.layout_why) == (only is not None)


def test_every_row_of_the_table_is_tested():
    """The rows of a layout that DDP is not given can only be written on the command line.

    The precision that eigenvectors need is also among the choices' fields, and has its own test.
    """
    by_command_line = [pair for pair in PAIRS if "param-layout" in pair.second.phrase]
    of_precision = [pair for pair in PAIRS if "matmul-prec" in pair.second.phrase]
    assert (len(by_command_line), len(of_precision)) == (len(LAYOUTS) + 2, 1)
    left = len(REFUSED) + len(REFUSED_IN_ONE_LAYOUT)
    assert len(PAIRS) == left + len(by_command_line) + len(of_precision)


def test_eigenvectors_need_fp32_products():
    for precision in ("high", "highest"):
        assert resolved(muon_ns_kernel="eigh", muon_fp32_matmul_prec=precision).ns_kernel == "eigh"
    with pytest.raises(ConfigurationError, match="--muon-fp32-matmul-prec"):
        resolved(muon_ns_kernel="eigh", muon_fp32_matmul_prec="medium")
    with pytest.raises(ConfigurationError, match="--muon-ns-kernel is 'fast'"):
        resolved(muon_ns_kernel="fast")


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.first.phrase + pair.second.phrase)
def test_a_message_names_both_and_what_to_change(pair):
    assert pair.message().startswith(f"{pair.first.phrase} has no effect ")
    assert pair.second.phrase in pair.message()
    assert any(word in pair.advice for word in ("Drop", "Add"))


@pytest.mark.parametrize("mode", ["distributed", "blockwise"])
def test_pieces_of_the_flat_layout_travel_in_every_mode(mode):
    flags = (f"--muon-tp-mode {mode}", "--muon-exchange-dtype bf16")
    assert resolved(*flags, "--muon-layout flat").exchange_dtype == "bf16"
    assert resolved(*flags, layout="flat").layout == "flat"
    chosen = resolved(*flags)
    assert (chosen.layout, chosen.layout_why) == (
        "flat", f"--muon-exchange-dtype bf16 with {flags[0]} has no effect in layout owner"
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match="--muon-exchange-dtype bf16 has no effect"):
        resolved(*flags, "--muon-layout owner")
    with pytest.raises(ConfigurationError, match="--muon-exchange-dtype bf16 has no effect"):
        resolved(*flags, "--no-use-distributed-optimizer", layout="flat")


# Values.


def test_defaults():
    settings = resolved()
    assert (settings.layout, settings.layout_why, settings.hardware) == ("auto", "", None)
    assert settings.gather_budget_nbytes == 64 * 2**20
    assert settings.exchange_dtype == "fp32"
    assert settings.splits == SplitRules(qkv=True, gated_fc1=False, heads=False)
    assert (settings.momentum_dtype, settings.clip, settings.max_skipped_steps) == (
        "fp32", "global", 10,
    )  # fmt: skip
    assert (settings.scalar_lr, settings.scalar_min_lr) == (None, None)
    assert (settings.scale_mode, settings.extra_scale_factor) == ("spectral", 1.0)
    assert settings.ns_kernel == "auto"


def test_what_is_given_is_used():
    settings = resolved(
        "--muon-split-heads", "--muon-split-gated-fc1", "--muon-layout flat",
        "--muon-exchange-dtype bf16", muon_gather_budget_mib=0.00390625,
    )  # fmt: skip
    assert settings.layout == "flat"
    assert settings.gather_budget_nbytes == 4096
    assert settings.exchange_dtype == "bf16"
    assert settings.splits == SplitRules(qkv=True, gated_fc1=True, heads=True)
    values = settings.to_dict()
    assert (values["split_heads"], values["split_gated_fc1"]) == (True, True)
    assert (values["exchange_dtype"], values["gather_budget_nbytes"]) == ("bf16", 4096)


def test_precision_settings_that_are_given_are_used():
    settings = resolved(
        "--muon-momentum-dtype bf16", "--muon-match-adamw-rms 0.2", "--muon-clip scalar-only",
        "--fp16", muon_scalar_lr=0.01, muon_scalar_min_lr=0.001, muon_max_skipped_steps=3,
        muon_fp32_matmul_prec="highest",
    )  # fmt: skip
    values = settings.to_dict()
    assert values | {
        "momentum_dtype": "bf16", "extra_scale_factor": 0.2, "clip": "scalar-only",
        "scalar_lr": 0.01, "scalar_min_lr": 0.001, "max_skipped_steps": 3,
        "matmul_precision": "highest",
    } == values  # fmt: skip


def test_zeros_are_kept():
    settings = resolved(
        "--muon-scalar-lr 0", "--muon-scalar-min-lr 0", "--muon-max-skipped-steps 0",
        lr=0.0, weight_decay=0.0, muon_momentum=0.0,
    )  # fmt: skip
    assert (settings.scalar_lr, settings.scalar_min_lr, settings.max_skipped_steps) == (0.0, 0.0, 0)
    assert (settings.lr, settings.weight_decay, settings.momentum) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"min_lr": 0.01, "muon_scalar_lr": 0.001}, ["--muon-scalar-lr", "--min-lr", "0.001"]),
        ({"muon_scalar_min_lr": 0.2}, ["0.1 (--lr)", "0.2 (--muon-scalar-min-lr)"]),
        ({"muon_scalar_lr": 0.01, "muon_scalar_min_lr": 0.02}, ["0.01 (--muon-scalar-lr)"]),
    ],
    ids=str,
)
def test_a_rate_that_would_grow_is_refused(changes, parts):
    with pytest.raises(ConfigurationError, match="give --muon-scalar-min-lr of at most") as caught:
        resolved(**changes)
    for part in parts:
        assert part in str(caught.value)


def test_rates_of_megatron_alone_are_its_own_affair():
    """It asserts by itself that they fall; and without a rate there is nothing to compare."""
    assert resolved(min_lr=0.5).scalar_lr is None
    assert resolved(lr=None, muon_scalar_min_lr=0.5).scalar_min_lr == 0.5
    assert resolved(min_lr=0.1, muon_scalar_lr=0.1).scalar_lr == 0.1


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"muon_momentum_dtype": "fp16"}, ["--muon-momentum-dtype", "'fp16'", "fp32, bf16"]),
        ({"muon_clip": "none"}, ["--muon-clip", "'none'", "global, scalar-only"]),
        ({"muon_scalar_lr": -0.1}, ["--muon-scalar-lr", "-0.1", "0 or more"]),
        ({"muon_scalar_lr": float("inf")}, ["--muon-scalar-lr", "inf"]),
        ({"muon_scalar_min_lr": float("nan")}, ["--muon-scalar-min-lr", "nan"]),
        ({"muon_max_skipped_steps": -1}, ["--muon-max-skipped-steps", "-1", "0 or more"]),
        ({"muon_max_skipped_steps": 1.5}, ["--muon-max-skipped-steps", "1.5", "integer"]),
        ({"muon_max_skipped_steps": True}, ["--muon-max-skipped-steps", "True", "integer"]),
        ({"muon_fp32_matmul_prec": "low"}, ["--muon-fp32-matmul-prec", "'low'", "highest"]),
        ({"muon_gather_budget_mib": 0.0}, ["--muon-gather-budget-mib", "0.0", "4 KiB"]),
        ({"muon_gather_budget_mib": -1.0}, ["--muon-gather-budget-mib", "-1.0", "4 KiB"]),
        ({"muon_gather_budget_mib": 0.003}, ["--muon-gather-budget-mib", "0.003", "0.00390625"]),
        ({"muon_gather_budget_mib": float("nan")}, ["--muon-gather-budget-mib", "nan"]),
        ({"muon_gather_budget_mib": float("inf")}, ["--muon-gather-budget-mib", "inf"]),
        ({"muon_exchange_dtype": "fp16"}, ["--muon-exchange-dtype", "'fp16'", "fp32, bf16"]),
        ({"muon_hardware": "abacus"}, ["--muon-hardware abacus", "h100, cpu-gloo", "no file"]),
        ({"muon_layout": "diagonal"}, ["--muon-layout", "'diagonal'", "owner, flat"]),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_named_with_what_is_legal(changes, parts):
    with pytest.raises(ConfigurationError) as caught:
        resolved(**changes)
    for part in parts:
        assert part in str(caught.value)


def test_layouts_of_install_and_of_the_config_must_agree():
    assert resolved(layout="flat").layout == "flat"
    with pytest.raises(ConfigurationError, match=r"--muon-layout is owner.*layout='flat'"):
        resolved("--muon-layout owner", layout="flat")


def test_later_names_of_layouts():
    assert resolved(muon_layout="padded").layout == "owner"
    assert resolved(muon_layout="padded", layout="owner").layout == "owner"
    with pytest.raises(ConfigurationError, match="--use-distributed-optimizer"):
        resolved(muon_layout="padded", use_layer_wise_distributed_optimizer=False)
    with pytest.raises(ConfigurationError, match=r"--muon-layout decoupled: .* --muon-layout flat"):
        resolved(muon_layout="decoupled")
    with pytest.raises(ConfigurationError, match="--no-use-layer-wise-param-layout"):
        resolved(muon_layout="legacy")


@pytest.mark.parametrize("name", ["padded", "decoupled", "legacy"])
def test_install_takes_later_names_of_layouts(name):
    uninstall()
    try:
        if name == "padded":
            install(device="cpu", layout=name)
            install(device="cpu", layout="owner")
            state = installation()
            assert state is not None
            assert state.layout == "owner"
            return
        with pytest.raises(ConfigurationError, match=rf"install\(layout='{name}'\)"):
            install(device="cpu", layout=name)
        assert installation() is None
    finally:
        uninstall()


# The command line.


@pytest.fixture
def parse(monkeypatch):
    """Return a function that parses and validates a command line as Megatron does."""
    with parser(monkeypatch, "--optimizer", "muon") as parse:
        yield parse


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_says_what_it_does_and_has_a_field_of_the_config(flag):
    name = flag.removeprefix("--").replace("-", "_")
    assert FLAGS[flag]["help"].endswith((".", ")"))
    assert getattr(MuonConfig(optimizer="muon"), name) in (None, False, [])
    assert FLAGS[flag].get("default", False) in (None, False, [])


def test_the_flags_reach_the_arguments(parse):
    args = parse(
        *"--use-distributed-optimizer --muon-layout flat --muon-gather-budget-mib 0.5".split(),
        *"--muon-exchange-dtype bf16 --muon-split-gated-fc1 --muon-split-heads --swiglu".split(),
    )
    settings = resolve(args, None)
    assert settings.layout == "flat"
    assert settings.gather_budget_nbytes == 2**19
    assert settings.exchange_dtype == "bf16"
    assert settings.splits == SplitRules(qkv=True, gated_fc1=True, heads=True)
    plain = parse()
    assert plain.muon_gather_budget_mib is None
    assert not plain.muon_split_heads
    assert resolve(plain, None).splits == SplitRules()


def test_precision_flags_reach_the_config_of_the_optimizer(parse):
    from megatron.training.training import get_megatron_optimizer_config

    args = parse(
        *"--muon-momentum-dtype bf16 --muon-match-adamw-rms 0.2 --muon-clip scalar-only".split(),
        *"--muon-scalar-lr 0 --muon-scalar-min-lr 0 --muon-max-skipped-steps 0".split(),
        *"--muon-fp32-matmul-prec highest --decoupled-lr 0".split(),
    )
    config, overrides = get_megatron_optimizer_config(args)
    settings = resolve(config, None)
    assert settings == resolve(args, None)
    assert (settings.momentum_dtype, settings.clip, settings.extra_scale_factor) == (
        "bf16", "scalar-only", 0.2,
    )  # fmt: skip
    assert (settings.scalar_lr, settings.scalar_min_lr, settings.max_skipped_steps) == (0.0, 0.0, 0)
    assert settings.matmul_precision == "highest"
    assert {"max_lr": 0.0} in overrides.values()
    plain = resolve(get_megatron_optimizer_config(parse())[0], None)
    assert (plain.momentum_dtype, plain.clip, plain.scalar_lr) == ("fp32", "global", None)
    assert plain.matmul_precision == "medium"


@pytest.mark.parametrize(
    "flags",
    [
        "--use-distributed-optimizer --muon-layout flat --no-use-layer-wise-param-layout",
        "--use-distributed-optimizer --muon-layout owner --no-use-layer-wise-param-layout",
        "--muon-layout flat",
        "--muon-split-heads --muon-no-split-qkv",
        "--muon-tp-mode blockwise --muon-exchange-dtype bf16",
        "--muon-gather-budget-mib 0",
    ],
)
def test_a_command_line_that_cannot_work_is_refused_with_its_flags(parse, flags):
    with pytest.raises(ConfigurationError) as caught:
        parse(*flags.split())
    assert flags.split()[-1] in str(caught.value) or flags.split()[-2] in str(caught.value)


@pytest.mark.parametrize(
    "flag",
    ["--muon-split-heads", "--muon-split-gated-fc1", "--muon-exchange-dtype bf16",
     "--muon-share-blocks",
     "--muon-gather-budget-mib 3", "--muon-layout flat", "--muon-momentum-dtype fp32",
     "--muon-match-adamw-rms 0.2", "--muon-clip global", "--muon-scalar-lr 0",
     "--muon-scalar-min-lr 0", "--muon-max-skipped-steps 0"],
)  # fmt: skip
def test_our_flags_are_refused_with_another_optimizer(parse, flag):
    with pytest.raises(ConfigurationError, match=rf"{flag.split()[0]} has no effect with .* adam"):
        parse("--optimizer", "adam", *flag.split())
