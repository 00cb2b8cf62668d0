"""What cannot run is refused before any work, and what can run is let through."""

import argparse
import re
import sys

import pytest

from megatron_muon.errors import ConfigurationError
from megatron_muon.integration import arguments, preflight
from megatron_muon.integration.install import install, uninstall

SMALL = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3
--bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 256""".split()

MUON = ["--optimizer", "muon", "--use-distributed-optimizer"]


@pytest.fixture(scope="module", autouse=True)
def installed():
    uninstall()
    install(device="cpu")
    yield
    uninstall()


@pytest.fixture
def parse(monkeypatch, capsys):
    """Return a function that parses and validates a command line as Megatron does."""
    from megatron.training.arguments import parse_args, validate_args

    def of(*flags, world_size=4, rank=0, validate=True, **options):
        monkeypatch.setattr(sys, "argv", ["pretrain.py", *SMALL, *flags])
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("RANK", str(rank))
        args = parse_args(**options)
        if validate:
            validate_args(args)
        return args

    return of


def test_what_can_run_is_let_through(parse):
    assert parse(*MUON).muon_tp_mode == "owner"
    assert parse(*MUON, "--tensor-model-parallel-size", "4").data_parallel_size == 1
    assert parse("--optimizer", "adam").optimizer == "adam"
    assert parse("--optimizer", "dist_muon").optimizer == "muon"
    assert parse(*MUON, "--muon-tp-mode", "blockwise").muon_tp_mode == "blockwise"
    assert parse(*MUON, "--muon-exclude", "a*", "--muon-exclude", "b").muon_exclude == ["a*", "b"]


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--tensor-model-parallel-size", "3"],
         ["4 ranks", "groups of 3", "--tensor-model-parallel-size 3", "multiple of 3"]),
        (["--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "2"],
         ["groups of 8", "--tensor-model-parallel-size 4 x --pipeline-model-parallel-size 2"]),
        (["--optimizer", "adam", "--muon-report", "r.json"], ["--muon-report", "adam", "drop it"]),
        (["--optimizer", "adam", "--muon-exclude", "x"], ["--muon-exclude", "adam"]),
        (["--optimizer", "sgd", "--muon-layout", "owner"], ["--muon-layout", "sgd"]),
        (["--optimizer", "muon", "--muon-layout", "owner"],
         ["--muon-layout owner", "--use-distributed-optimizer"]),
        ([*MUON, "--muon-layout", "owner", "--no-use-layer-wise-param-layout"],
         ["--muon-layout owner", "--no-use-layer-wise-param-layout"]),
        ([*MUON, "--muon-report", "no/such/folder/r.json"], ["--muon-report", "no/such/folder"]),
        ([*MUON, "--muon-momentum", "1.5"], ["--muon-momentum", "1.5", "[0, 1)"]),
        ([*MUON, "--muon-num-ns-steps", "0"], ["--muon-num-ns-steps", "0"]),
        ([*MUON, "--muon-coefficient-type", "custom"], ["--muon-coefficient-type", "custom"]),
        ([*MUON, "--muon-match-adamw-rms", "0"], ["--muon-match-adamw-rms is 0.0", "above 0"]),
        ([*MUON, "--muon-match-adamw-rms", "0.2", "--muon-scale-mode", "shape_scaling"],
         ["--muon-match-adamw-rms", "drop --muon-scale-mode"]),
        ([*MUON, "--muon-clip", "scalar-only", "--clip-grad", "0"],
         ["--muon-clip scalar-only has no effect with --clip-grad 0"]),
        ([*MUON, "--muon-max-skipped-steps", "-1"], ["--muon-max-skipped-steps is -1", "0 or"]),
        ([*MUON, "--muon-scalar-lr", "-1"], ["--muon-scalar-lr is -1.0", "0 or more"]),
        ([*MUON, "--muon-scalar-min-lr", "nan"], ["--muon-scalar-min-lr is nan"]),
        ([*MUON, "--min-lr", "1e-4", "--muon-scalar-lr", "1e-5"],
         ["from 1e-05 (--muon-scalar-lr) to 0.0001 (--min-lr)", "give --muon-scalar-min-lr"]),
        ([*MUON, "--layer-wise-param-layout", "decoupled"],
         ["--layer-wise-param-layout decoupled", "--muon-layout flat"]),
        ([*MUON, "--layer-wise-param-layout", "padded", "--muon-layout", "flat"],
         ["padded is --muon-layout owner", "--muon-layout flat was given"]),
        ([*MUON, "--layer-wise-param-layout", "padded", "--no-use-layer-wise-param-layout"],
         ["padded is --muon-layout owner", "--no-use-layer-wise-param-layout was given"]),
        ([*MUON, "--layer-wise-param-layout", "legacy", "--muon-layout", "owner"],
         ["legacy is --no-use-layer-wise-param-layout", "--muon-layout owner has no effect"]),
        (["--optimizer", "muon", "--layer-wise-param-layout", "legacy"],
         ["--layer-wise-param-layout legacy has no effect", "--use-distributed-optimizer"]),
        (["--optimizer", "adam", "--layer-wise-param-layout", "padded"],
         ["--layer-wise-param-layout has no effect with --optimizer adam"]),
        # One of Megatron's own refusals.
        (["--overlap-param-gather"], ["Megatron refuses the arguments", "--overlap-param-gather"]),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_with_the_flag_to_change(parse, flags, parts):
    with pytest.raises(ConfigurationError) as caught:
        parse(*flags)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "layout", "is_laid_out"),
    [
        ("--layer-wise-param-layout padded", "owner", True),
        ("--layer-wise-param-layout padded --muon-layout owner", "owner", True),
        ("--layer-wise-param-layout legacy", None, False),
        ("--layer-wise-param-layout legacy --no-use-layer-wise-param-layout", None, False),
        ("--muon-layout flat", "flat", True),
    ],
)
def test_later_names_of_layouts_are_turned_into_ours(parse, flags, layout, is_laid_out):
    args = parse(*MUON, *flags.split())
    assert (args.muon_layout, args.use_layer_wise_param_layout) == (layout, is_laid_out)


def test_megatrons_gather_inside_the_step_is_turned_into_ours(parse):
    overlapped = ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
                  "--overlap-param-gather-with-optimizer-step").split()  # fmt: skip
    args = parse(*MUON, *overlapped)
    assert args.muon_overlap_param_gather
    assert not args.overlap_param_gather_with_optimizer_step
    with pytest.raises(ConfigurationError, match="without --overlap-param-gather: "):
        parse(*MUON, "--overlap-param-gather-with-optimizer-step")
    with pytest.raises(ConfigurationError, match="Megatron refuses the arguments"):
        parse("--optimizer", "adam", *overlapped)


def test_a_later_megatrons_own_flag_is_left_alone():
    parser = argparse.ArgumentParser()
    parser.add_argument(arguments.LATER_FLAG, choices=["legacy", "padded", "another"])
    arguments.adds_muon_arguments(lambda parser: parser)(parser)
    assert parser.parse_args([arguments.LATER_FLAG, "another"]).layer_wise_param_layout == "another"


@pytest.mark.parametrize("precision", [["--fp16"], ["--fp16", "--loss-scale", "128"], []], ids=str)
def test_every_precision_is_let_through(parse, monkeypatch, precision):
    monkeypatch.setattr(sys.modules[__name__], "SMALL", [f for f in SMALL if f != "--bf16"])
    args = parse(*MUON, *precision)
    assert args.fp16 is bool(precision)
    assert not args.bf16


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (MUON, False),
        ([*MUON, "--muon-max-skipped-steps", "3"], False),
        ([*MUON, "--muon-max-skipped-steps", "0"], True),
        ([*MUON, "--muon-max-skipped-steps", "0", "--no-check-for-nan-in-loss-and-grad"], False),
        (["--optimizer", "adam"], True),
    ],
    ids=str,
)
def test_megatron_does_not_end_training_at_what_is_to_be_skipped(parse, flags, expected):
    """Its own check raises at the first NaN, before the optimizer is asked."""
    assert parse(*flags).check_for_nan_in_loss_and_grad is expected


def test_a_rank_that_does_not_write_the_report_does_not_look_for_its_folder(parse):
    parse(*MUON, "--muon-report", "no/such/folder/r.json", rank=1)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--muon-momentun", "0.9"], ["--muon-momentun", "Did you mean --muon-momentum?"]),
        (["--muon_momentum=0.9"], ["--muon_momentum=0.9", "--muon-momentum?"]),
        (["--muon-tp-mode", "sharded"], ["--muon-tp-mode", "sharded", "owner", "blockwise"]),
        (["--muon-layout", "diagonal"], ["--muon-layout", "diagonal"]),
        (["--layer-wise-param-layout", "flat"], ["--layer-wise-param-layout", "padded", "legacy"]),
        (["--muon-momentum", "high"], ["--muon-momentum", "high"]),
        (["--muon-fp32-matmul-prec", "low"], ["low", "medium", "high", "highest"]),
        (["--muon-momentum-dtype", "fp16"], ["--muon-momentum-dtype", "fp16", "fp32", "bf16"]),
        (["--muon-clip", "matrices"], ["--muon-clip", "matrices", "global", "scalar-only"]),
        (["--muon-scalar-lr", "small"], ["--muon-scalar-lr", "small"]),
        (["--muon-scalar-min-lr"], ["--muon-scalar-min-lr", "expected one argument"]),
        (["--muon-match-adamw-rms", "x"], ["--muon-match-adamw-rms", "x"]),
        (["--muon-max-skipped-steps", "1.5"], ["--muon-max-skipped-steps", "1.5"]),
        (["--muon-report"], ["--muon-report", "expected one argument"]),
        (["--optimizer", "moun"], ["--optimizer", "moun", "muon"]),
        (["--nonsense"], ["--nonsense"]),
    ],
)
def test_a_flag_that_does_not_parse_is_one_line(parse, capsys, flags, parts):
    with pytest.raises(SystemExit) as caught:
        parse(*MUON, *flags)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("megatron-muon: error: ")
    assert said.count("\n") == 1
    for part in parts:
        assert part in said


def test_an_unknown_muon_flag_is_an_error_where_unknown_ones_are_ignored(parse, capsys):
    parse(*MUON, "--of-another-program", "1", ignore_unknown_args=True)
    with pytest.raises(SystemExit):
        parse(*MUON, "--muon-momentun", "0.9", ignore_unknown_args=True)
    assert "Did you mean --muon-momentum?" in capsys.readouterr().err


def test_a_flag_that_the_script_adds_is_known(parse):
    def adds(parser):
        parser.add_argument("--muon-of-the-script", type=int)
        return parser

    assert parse("--muon-of-the-script", "3", extra_args_provider=adds).muon_of_the_script == 3


def test_the_command_line_is_kept_as_given(parse):
    def adds(parser):
        parser.add_argument("--of-the-script", default="x")
        return parser

    args = parse(*MUON, extra_args_provider=adds)
    line = arguments.command_line()
    assert args.use_distributed_optimizer is False  # Megatron turned it into another setting
    assert line.values["use_distributed_optimizer"] is True
    assert line.spellings["tensor_model_parallel_size"] == "--tensor-model-parallel-size"
    assert "of_the_script" not in line.values


def test_arguments_that_were_parsed_without_our_flags_are_refused(parse):
    args = parse(*MUON, validate=False)
    del args.muon_layout
    assert "after Megatron had parsed its command line" in next(preflight.problems(args))


def test_an_assertion_without_words_is_told_by_its_line():
    def validate_args(args, defaults):
        raise AssertionError

    args = argparse.Namespace(
        optimizer="adam",
        world_size=1,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        fp8=None,
        save=None,
    )
    with pytest.raises(ConfigurationError, match="arguments: raise AssertionError"):
        preflight.checks_arguments(validate_args)(args)


def test_a_missing_data_file_is_named(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    with pytest.raises(ConfigurationError) as caught:
        IndexedDataset(str(tmp_path / "absent"))
    assert f"--data-path {tmp_path / 'absent'}" in str(caught.value)
    assert f"there is no file {tmp_path / 'absent.idx'}" in str(caught.value)
    (tmp_path / "half.idx").touch()
    with pytest.raises(ConfigurationError, match=r"there is no file .*half\.bin"):
        IndexedDataset(str(tmp_path / "half"))


def test_another_fault_of_the_data_keeps_its_traceback(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    (tmp_path / "odd.idx").write_bytes(b"not an index at all")
    (tmp_path / "odd.bin").write_bytes(b"tokens")
    with pytest.raises(AssertionError):
        IndexedDataset(str(tmp_path / "odd"))


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ("lr=0.001", "--lr 0.001"),
        ("muon_split_qkv=True", "muon_split_qkv = True (--muon-no-split-qkv)"),
        ("data_path=['a', 'b']", "--data-path ['a', 'b']"),
        ("", "nothing"),
    ],
)
def test_a_flag_is_shown_as_it_is_spelt(parse, row, shown):
    parse(*MUON)
    assert preflight._as_flag(row, arguments.command_line()) == shown


def test_only_values_that_print_the_same_everywhere_are_compared():
    assert preflight._is_plain([1, ("a", None), 2.5])
    assert not preflight._is_plain(lambda: None)
    assert not preflight._is_plain([object()])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fp16", "--loss-scale", "-5"], "--loss-scale is -5.0: expected a number above 0"),
        (["--fp16", "--loss-scale", "0"], "--loss-scale is 0.0: expected a number above 0"),
        (["--fp16", "--loss-scale", "nan"], "--loss-scale is nan"),
        (["--fp16", "--initial-loss-scale", "inf"], "--initial-loss-scale is inf"),
        (["--fp16", "--initial-loss-scale", "1e39"], "--initial-loss-scale is 1e+39"),
        (["--fp16", "--min-loss-scale", "0"], "--min-loss-scale is 0.0"),
        (
            ["--fp16", "--initial-loss-scale", "1", "--min-loss-scale", "1024"],
            "--initial-loss-scale is 1.0, below --min-loss-scale 1024.0",
        ),
        (["--fp16", "--hysteresis", "0"], "--hysteresis is 0: expected 1 or more"),
        (["--fp16", "--loss-scale-window", "0"], "--loss-scale-window is 0"),
        (["--clip-grad", "-1"], "--clip-grad is -1.0: expected a number of 0 or more"),
        (["--clip-grad", "nan"], "--clip-grad is nan"),
        (["--fp16", "--bf16"], "--fp16 and --bf16 are both given"),
        (["--lr", "-1"], "Megatron refuses the arguments: "),
        (["--use-precision-aware-optimizer"], "--use-precision-aware-optimizer does not work"),
        (
            ["--lr-warmup-iters", "2", "--lr-warmup-init", "5e-4", "--muon-scalar-lr", "1e-4"],
            "--lr-warmup-init is 0.0005, above --muon-scalar-lr 0.0001",
        ),
        (
            ["--lr-decay-style", "constant", "--muon-scalar-min-lr", "0"],
            "--muon-scalar-min-lr has no effect with --lr-decay-style constant",
        ),
        (["--muon-report", "/tmp"], "--muon-report /tmp is a folder"),
    ],
)
def test_values_without_a_meaning_are_refused(parse, flags, message, monkeypatch):
    if "--fp16" in flags and "--bf16" not in flags:
        monkeypatch.setattr(sys.modules[__name__], "SMALL", [f for f in SMALL if f != "--bf16"])
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        parse(*MUON, *flags)
