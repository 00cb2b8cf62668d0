"""``megatron-muon inspect`` shows what a checkpoint holds, and finds every difference of two."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import weakref

import pytest
import torch

from megatron_muon.checkpoint.comparison import compare
from megatron_muon.checkpoint.contents import family, flatten, read_contents
from megatron_muon.errors import CheckpointError
from megatron_muon.testing.ranks import run_ranks
from megatron_muon.tools import cli
from tests.unit_tests import inspect_job
from tests.unit_tests.inspect_job import (
    MASTER,
    MOMENTUM,
    NORM,
    NORM_COPIED,
    NORM_MASTER,
    NORM_MEAN,
    WEIGHT,
    Saved,
    common,
    tensors,
)

# A file is written through to the disk for every rank and checkpoint.
pytestmark = pytest.mark.timeout(300)


def changed(key, index, value):
    """Return all tensors with one element changed."""
    values = tensors()
    values[key].view(-1)[index] = value
    return values


def stock_form(values):
    """Return the tensors under the names that Megatron's own chain gives them."""
    names = {
        MOMENTUM: f"chained_0.{MOMENTUM}",
        MASTER: f"chained_0.{MASTER}",
        NORM_MASTER: NORM_MASTER.replace(".param.", ".fp32_param."),
        NORM_MEAN: f"chained_1.{NORM_MEAN}",
    }
    return {names.get(key, key): value for key, value in values.items()}


def with_scaler(scale):
    state = common()
    for part in state["optimizer"].values():
        part["grad_scaler"] = {"scale": torch.tensor([scale]), "growth_tracker": 3}
    return state


def with_step(step):
    state = common()
    state["optimizer"][1]["optimizer"]["state"]["common_step"] = torch.tensor(float(step))
    return state


def without(key):
    return {name: value for name, value in tensors().items() if name != key}


def twice(second=None):
    """Return all tensors, with a scalar's master under both of its names."""
    master = tensors()[NORM_MASTER]
    return tensors() | {NORM_MASTER: master if second is None else second, NORM_COPIED: master}


def one_by_one(*layers, states=(MOMENTUM,)):
    """Return all tensors, with states of these layers under keys of their own."""
    values = tensors()
    for key in states:
        whole = values.pop(key)
        values |= {f"{key}.at_{layer}": whole[layer] for layer in layers}
    return values


def worse():
    """Return tensors of which one is another shape, one NaN, and two differ by little and much."""
    values = tensors()
    values[NORM] = torch.zeros(5, dtype=torch.bfloat16)
    values[MASTER][0, 0, 0] = math.nan
    values[MOMENTUM] *= 1.001
    values[NORM_MEAN] *= -1
    return values


CHECKPOINTS = {
    "base": {},
    "again": {},
    "momentum": {"tensors": changed(MOMENTUM, 13, 4.5)},
    "nan": {"tensors": changed(MOMENTUM, 13, math.nan)},
    "zero": {"tensors": changed(NORM_MEAN, 2, 0.0)},
    "negative_zero": {"tensors": changed(NORM_MEAN, 2, -0.0)},
    "infinite": {"tensors": changed(MASTER, 5, math.inf)},
    "fewer": {"tensors": without(NORM_MEAN)},
    "shape": {"tensors": tensors() | {NORM: torch.zeros(5, dtype=torch.bfloat16)}},
    "dtype": {"tensors": tensors() | {WEIGHT: tensors()[MASTER]}},
    "stock": {"tensors": stock_form(tensors())},
    "iteration": {"common": common() | {"iteration": 8}},
    "samples": {"common": common(consumed_train_samples=32)},
    "scheduler": {"common": common() | {"opt_param_scheduler": {"num_steps": 29}}},
    "step": {"common": with_step(6)},
    "scaler": {"common": with_scaler(1024.0)},
    "other_scaler": {"common": with_scaler(512.0)},
    "seed": {"seed": 4},
    "set_up": {"common": common(tensor_model_parallel_size=1, lr=1.0)},
    "twice": {"tensors": twice()},
    "twice_unlike": {"tensors": twice(torch.zeros(4))},
    "layer_1": {"tensors": one_by_one(1)},
    "both_layers": {"tensors": one_by_one(0, 1, states=(MOMENTUM, MASTER))},
    "worse": {"tensors": worse()},
    "no_optimizer": {
        "tensors": {key: tensors()[key] for key in (WEIGHT, NORM)},
        "common": {
            key: value for key, value in common(no_save_optim=True).items() if key != "optimizer"
        },
    },
    "one_generator": {"rng_ranks": 1, "common": common(tensor_model_parallel_size=1)},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Give the folder of all checkpoints, each saved by Megatron on two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    checkpoints = [
        Saved(folder=str(folder / name / "iter_0000007"), **changes)
        for name, changes in CHECKPOINTS.items()
    ]
    run_ranks(inspect_job.save, 2, *checkpoints, timeout_s=240)
    for name in CHECKPOINTS:
        (folder / name / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def comparison(saved, here, there):
    return compare(read_contents(saved / here), read_contents(saved / there))


def unlike(found):
    """Return what is not equal, by family and name."""
    return {(t.family, t.name): t for t in found.tensors if t.verdict != "equal"}


class TestAComparison:
    def test_a_checkpoint_equals_itself_and_one_saved_alike(self, saved):
        for name in ("base", "again"):
            found = comparison(saved, "base", name)
            assert found.is_equal
            assert (found.state, found.described, found.of_other_ranks) == ((), (), ())
            assert len(found.tensors) == len(tensors())
            assert found.num_alike > 0
        assert comparison(saved, "nan", "nan").is_equal

    @pytest.mark.parametrize(("name", "key"), [("momentum", MOMENTUM), ("infinite", MASTER)])
    def test_one_changed_element_is_found_and_measured(self, saved, name, key):
        found = comparison(saved, "base", name)
        assert not found.is_equal
        (item,) = unlike(found).values()
        before, after = tensors()[key].double(), CHECKPOINTS[name]["tensors"][key].double()
        assert (item.here, item.there, item.verdict) == (key, key, "different")
        assert (item.num_different, item.numel) == (1, before.numel())
        assert item.max_abs == (before - after).abs().max()
        assert item.max_value == max(before.abs().max(), after.abs().max())

    @pytest.mark.parametrize("names", [("base", "nan"), ("nan", "base")])
    def test_nan_on_one_side_is_a_difference_that_is_nan(self, saved, names):
        (item,) = unlike(comparison(saved, *names)).values()
        assert item.num_different == 1
        assert math.isnan(item.max_abs)

    def test_zeros_of_both_signs_are_not_equal(self, saved):
        (item,) = unlike(comparison(saved, "zero", "negative_zero")).values()
        assert (item.num_different, item.max_abs) == (1, 0.0)

    def test_what_one_has_alone_is_named(self, saved):
        for names, verdict in ((("base", "fewer"), "only here"), (("fewer", "base"), "only there")):
            found = unlike(comparison(saved, *names))
            assert {key: item.verdict for key, item in found.items()} == {
                ("exp_avg", NORM): verdict
            }

    def test_another_shape_or_dtype_is_named(self, saved):
        (item,) = unlike(comparison(saved, "base", "shape")).values()
        assert (item.name, item.verdict) == (NORM, "other shape")
        (item,) = unlike(comparison(saved, "base", "dtype")).values()
        assert (item.name, item.verdict) == (WEIGHT, "other dtype")
        weight, master = tensors()[WEIGHT].double(), tensors()[MASTER].double()
        assert item.num_different == (weight != master).sum()
        assert item.max_abs == (weight - master).abs().max()

    def test_state_is_matched_by_parameter_whatever_form_it_is_in(self, saved):
        found = comparison(saved, "base", "stock")
        assert found.is_equal
        (momentum,) = (item for item in found.tensors if item.family == "momentum_buffer")
        assert (momentum.here, momentum.there) == (MOMENTUM, f"chained_0.{MOMENTUM}")
        (master,) = (t for t in found.tensors if (t.family, t.name) == ("fp32_param", NORM))
        assert (master.here, master.there) == (
            NORM_MASTER,
            NORM_MASTER.replace("param", "fp32_param", 1),
        )

    @pytest.mark.parametrize(
        ("here", "there", "expected"),
        [
            ("base", "iteration", {"iteration": ("7", "8")}),
            ("base", "samples", {"consumed_train_samples": ("28", "32")}),
            (
                "base",
                "scheduler",
                {
                    "opt_param_scheduler.num_steps": ("28", "29"),
                    "opt_param_scheduler.lr_decay_style": ("'linear'", None),
                },
            ),
            ("base", "step", {"scalar optimizer.step": ("7", "6")}),
            ("scaler", "other_scaler", {"loss scaler.scale": ("1024.0", "512.0")}),
            ("base", "scaler", {"loss scaler.scale": (None, "1024.0"),
                                "loss scaler.growth_tracker": (None, "3")}),
        ],
    )  # fmt: skip
    def test_every_other_difference_of_state_is_found(self, saved, here, there, expected):
        found = comparison(saved, here, there)
        assert {item.name: (item.here, item.there) for item in found.state} == expected
        assert not found.is_equal
        assert unlike(found) == {}

    def test_another_state_of_the_generators_is_found(self, saved):
        found = comparison(saved, "base", "seed")
        assert [item.name.partition(" ")[0] for item in found.state] == [
            "rng_state/shard_0.0_1.2",
            "rng_state/shard_0.1_1.2",
        ]
        assert not found.is_equal

    def test_how_a_run_was_set_up_is_told_and_does_not_count(self, saved):
        found = comparison(saved, "base", "set_up")
        assert found.is_equal
        assert {item.name: (item.here, item.there) for item in found.described} == {
            "args.lr": ("0.002", "1.0"),
            "args.tensor_model_parallel_size": ("2", "1"),
        }

    def test_generators_of_other_numbers_of_ranks_are_told_and_do_not_count(self, saved):
        found = comparison(saved, "base", "one_generator")
        assert found.is_equal
        assert found.of_other_ranks == ("rng_state",)

    def test_a_second_copy_of_a_master_is_compared_apart(self, saved):
        found = comparison(saved, "twice", "twice_unlike")
        (item,) = unlike(found).values()
        assert (item.family, item.name, item.here) == ("param", NORM, NORM_MASTER)
        masters = [t for t in found.tensors if t.family == "fp32_param"]
        assert [(t.name, t.here) for t in masters] == [(NORM, NORM_COPIED), (WEIGHT, MASTER)]

    @pytest.mark.parametrize("names", [("twice", "base"), ("base", "twice")])
    def test_a_second_copy_is_compared_with_the_only_one_of_another(self, saved, names):
        found = comparison(saved, *names)
        assert found.is_equal
        (item,) = (t for t in found.tensors if t.family == "param")
        assert (item.here, item.there) == (NORM_MASTER, NORM_MASTER)
        assert [key for key, _ in unlike(comparison(saved, "base", "twice_unlike"))] == ["param"]

    def test_states_of_single_layers_are_compared_with_those_of_all(self, saved):
        assert comparison(saved, "layer_1", "layer_1").is_equal
        for names in (("base", "both_layers"), ("both_layers", "base")):
            found = comparison(saved, *names)
            assert found.is_equal
            assert len(found.tensors) == len(tensors()) + 2
        found = comparison(saved, "momentum", "both_layers")
        (item,) = unlike(found).values()
        assert (item.family, item.name) == ("momentum_buffer", f"{WEIGHT}.at_0")
        assert (item.here, item.there) == (MOMENTUM, f"{MOMENTUM}.at_0")
        assert (item.num_different, item.numel) == (1, 24)

    def test_a_layer_that_only_one_has_the_state_of_is_named(self, saved):
        for names, verdict in (
            (("base", "layer_1"), "only here"),
            (("layer_1", "both_layers"), "only there"),
        ):
            found = unlike(comparison(saved, *names))
            assert {name: item.verdict for name, item in found.items()} == {
                ("momentum_buffer", f"{WEIGHT}.at_0"): verdict
            }

    def test_one_pair_of_tensors_is_in_memory_at_a_time(self, saved):
        alive, most = weakref.WeakSet(), []

        def spied(contents):
            def read(key):
                tensor = contents.read(key)
                alive.add(tensor)
                most.append(len(alive))
                return tensor

            return dataclasses.replace(contents, read=read)

        compare(spied(read_contents(saved / "base")), spied(read_contents(saved / "momentum")))
        assert len(most) == 2 * len(tensors())
        assert max(most) == 2


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (WEIGHT, "weights"),
        ("output_layer.weight", "weights"),
        (MOMENTUM, "momentum_buffer"),
        (f"chained_0.{MASTER}", "fp32_param"),
        (NORM_MASTER, "fp32_param"),
        (
            "chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, "
            "torch.float32).bucket_idx_0.exp_avg_sq",
            "exp_avg_sq",
        ),
        (
            "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, "
            "torch.float32).bucket_idx_0.param",
            "fp32_param",
        ),
        ("mp_rank_00/layer_wise_optimizer_0.pt/state.output_layer.weight.exp_avg", "exp_avg"),
        ("mp_rank_00/model_optim_rng.pt/model.output_layer.weight", "weights"),
        ("optimizer.something.else", "other"),
    ],
)
def test_the_kind_of_a_tensor_is_told_from_its_key(key, expected):
    assert family(key) == expected


def test_equal_texts_are_equal_values_and_others_are_not():
    first = torch.arange(12.0)
    second = first.clone()
    second[7] = torch.nextafter(second[7], torch.tensor(9.0))
    values = [first, second, first.double(), first.view(3, 4), list(range(12)), [*range(11), 12]]
    texts = [dict(flatten(value, "x"))["x"] for value in values]
    assert len(set(texts)) == len(values)
    assert texts == [dict(flatten(value, "x"))["x"] for value in values]
    assert dict(flatten({"a": [1, {"b": None}], 2: {}})) == {
        "a.0": "1",
        "a.1.b": "None",
        "2": "{}",
    }


def inspect(capsys, *line):
    """Run the command; return its code, output and errors."""
    code = cli.main(["inspect", *map(str, line)])
    return code, *capsys.readouterr()


class TestTheCommand:
    def test_a_summary_says_whence_a_checkpoint_is_and_what_it_holds(self, saved, capsys):
        code, shown, error = inspect(capsys, saved / "base")
        assert (code, error) == (0, "")
        for line in (
            rf"checkpoint +{re.escape(str(saved))}/base/iter_0000007",
            r"format +torch_dist, 4 files, [\d,]+ bytes, all there",
            r"iteration +7, 28 samples",
            r"precision +bf16",
            r"ran on +TP 2, PP 1, DP 1, ranks 2",
            r"optimizer +version 1, precision bf16, plan 0123abcd",
            r"settings +layout flat",
            r"scalar optimizer +7 steps",
            r"schedule +num_steps 28, lr_decay_style 'linear'",
            r" +tensors +elements +bytes +dtypes",
            r"weights +2 +52 +104 +bfloat16",
            r"fp32_param +2 +52 +208 +float32",
            r"momentum_buffer +1 +48 +192 +float32",
            r"exp_avg +1 +4 +16 +float32",
            r"all +6 +156 +520 +bfloat16, float32",
        ):
            assert re.search(rf"^{line}", shown, re.MULTILINE), line
        assert len(shown.splitlines()) < 24
        assert max(map(len, shown.splitlines())) <= 100 + len(str(saved))

    def test_keys_are_listed_with_shape_dtype_and_bytes(self, saved, capsys):
        _, shown, _ = inspect(capsys, saved / "base", "--keys", "*linear_fc1*")
        listed = shown.partition("\nkey ")[2].splitlines()[1:]
        assert [line.split() for line in listed] == [
            [WEIGHT, "2x6x4", "bfloat16", "96"],
            [MOMENTUM, "2x6x4", "float32", "192"],
            [MASTER, "2x6x4", "float32", "192"],
        ]
        _, shown, _ = inspect(capsys, saved / "base", "--keys", "nothing")
        assert "no key matches 'nothing'" in shown

    def test_a_key_without_wildcards_is_found_by_a_part_of_it(self, saved, capsys):
        lists = [
            inspect(capsys, saved / "base", "--keys", pattern)[1].partition("\nkey ")[2]
            for pattern in ("linear_fc1", "*linear_fc1*")
        ]
        assert lists[0] == lists[1] != ""
        _, shown, _ = inspect(capsys, saved / "base", "--keys", "linear_fc?")
        assert "no key matches 'linear_fc?'" in shown
        line = (saved / "base", "--diff", saved / "again", "--keys")
        _, shown, _ = inspect(capsys, *line, "linear_fc1")
        assert f"  momentum_buffer {WEIGHT}: equal" in shown
        _, shown, _ = inspect(capsys, *line, "linear_fc3")
        assert "no key matches 'linear_fc3'" in shown

    def test_a_checkpoint_without_optimizer_says_so(self, saved, capsys):
        _, shown, _ = inspect(capsys, saved / "no_optimizer")
        assert re.search(r"^optimizer +none: saved with --no-save-optim$", shown, re.MULTILINE)
        _, shown, _ = inspect(capsys, saved / "base")
        assert "no-save-optim" not in shown

    def test_each_master_counts_once_and_its_second_copy_apart(self, saved, capsys):
        _, shown, _ = inspect(capsys, saved / "twice")
        for line in (
            r"fp32_param +2 +52 +208 +float32",
            r"param +1 +4 +16 +float32",
            r"all +7 +160 +536 ",
        ):
            assert re.search(rf"^{line}", shown, re.MULTILINE), line
        _, shown, _ = inspect(capsys, saved / "layer_1", "--keys", "at_")
        assert re.search(r"^momentum_buffer +1 +24 +96 +float32", shown, re.MULTILINE)
        assert re.search(rf"^{re.escape(MOMENTUM)}.at_1 +6x4 ", shown, re.MULTILINE)

    def test_the_worst_differences_are_shown_first(self, saved, capsys):
        _, shown, _ = inspect(capsys, saved / "base", "--diff", saved / "worse")
        assert re.findall(r"^  (.+): (?:other shape|different)", shown, re.MULTILINE) == [
            f"weights {NORM}",
            f"fp32_param {WEIGHT}",
            f"exp_avg {NORM}",
            f"momentum_buffer {WEIGHT}",
        ]

    def test_a_file_is_said_to_be_one(self, saved, capsys):
        file = saved / "base" / "iter_0000007" / "metadata.json"
        code, _, error = inspect(capsys, file)
        assert code == 2
        assert f"{file}: this is a file, expected a folder" in error

    def test_the_help_tells_the_exit_codes(self, capsys):
        with pytest.raises(SystemExit):
            inspect(capsys, "-h")
        assert "2 if there is no checkpoint" in " ".join(capsys.readouterr().out.split())

    def test_a_reader_that_has_enough_is_no_error(self, saved, tmp_path):
        report = tmp_path / "report.json"
        line = [str(saved / "base"), "--diff", str(saved / "momentum"), "--json", str(report)]
        read, write = os.pipe()
        os.close(read)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "megatron_muon", "inspect", *line],
                stdout=write, stderr=subprocess.PIPE, text=True, timeout=100, check=False,
            )  # fmt: skip
        finally:
            os.close(write)
        assert (done.returncode, done.stderr) == (1, "")
        assert report.exists()

    def test_the_exit_code_says_whether_two_are_equal(self, saved, capsys):
        code, shown, _ = inspect(capsys, saved / "base", "--diff", saved / "again")
        assert code == 0
        assert shown.splitlines()[-1] == "equal"
        code, shown, _ = inspect(capsys, saved / "base", "--diff", saved / "momentum")
        assert code == 1
        assert shown.splitlines()[-1] == "different"
        before = tensors()[MOMENTUM].view(-1)[13]
        assert (
            f"  momentum_buffer {WEIGHT}: different, 1 of 48 elements, by up to "
            f"{4.5 - before:.3g} of 4.5"
        ) in shown

    def test_all_of_it_is_in_the_json(self, saved, capsys, tmp_path):
        file = tmp_path / "report.json"
        line = (saved / "base", "--diff", saved / "nan", "--json", file)
        assert inspect(capsys, *line)[0] == 1

        def refuse(word):
            raise AssertionError(f"{word} is no JSON")

        report = json.loads(file.read_text(), parse_constant=refuse)
        assert report["iteration"] == 7
        assert report["sizes"]["TP"] == 2
        assert report["record"]["plan"] == ["0123abcd"]
        assert {t["key"]: (t["shape"], t["nbytes"]) for t in report["tensors"]} == {
            key: (list(value.shape), value.numel() * value.element_size())
            for key, value in tensors().items()
        }
        assert report["comparison"]["is_equal"] is False
        (item,) = (t for t in report["comparison"]["tensors"] if t["verdict"] != "equal")
        assert (item["name"], item["max_abs"]) == (WEIGHT, "nan")
        code, _, error = inspect(capsys, saved / "base", "--json", tmp_path / "absent" / "x.json")
        assert code == 2
        assert "--json" in error

    @pytest.mark.parametrize("line", ["{bad}", "{good} --diff {bad}", "{bad} --diff {good}"])
    def test_a_torn_checkpoint_is_one_message_and_exit_code_2(self, saved, capsys, tmp_path, line):
        bad = shutil.copytree(saved / "base", tmp_path / "bad")
        os.truncate(bad / "iter_0000007" / "__0_0.distcp", 100)
        words = line.format(good=saved / "again", bad=bad).split()
        code, shown, error = inspect(capsys, *words)
        assert (code, shown) == (2, "")
        assert error.count("\n") == 1
        assert "__0_0.distcp has 100 bytes" in error

    def test_nothing_is_said_but_the_summary(self, saved):
        command = [sys.executable, "-m", "megatron_muon", "inspect", str(saved / "base")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        assert done.stderr == ""
        assert done.stdout.startswith("checkpoint")


class TestTheFormatOfRanks:
    """``--ckpt-format torch``: each rank's own files, in the form that the optimizer writes."""

    @staticmethod
    def write(folder, momentum=1.0, step=7, file="layer_wise_optimizer_0.pt"):
        ranks = folder / "iter_0000007"
        for rank in range(2):
            place = ranks / f"mp_rank_0{rank}"
            place.mkdir(parents=True)
            state = common()
            del state["optimizer"]
            model = {"output_layer.weight": torch.full((4, 2), rank + 0.5), "_extra_state": None}
            optimizer = {
                "muon": {"version": 1, "settings": {"layout": "none"}},
                "param_groups": [{"lr": 0.1}],
                "grad_scaler": {"scale": torch.tensor([8.0])},
                "step": step,
                "ranges": {"output_layer.weight": None},
                "state": {"output_layer.weight": {"momentum_buffer": torch.full((4, 2), momentum)}},
            }
            # Megatron writes that of data-parallel rank 0 into both.
            torch.save(
                {
                    **state,
                    "model": model,
                    "optimizer": optimizer,
                    "rng_state": [{"torch": torch.arange(9)}],
                },
                place / "model_optim_rng.pt",
            )
            torch.save(optimizer, place / file)
        (folder / "latest_checkpointed_iteration.txt").write_text("7")
        return folder

    def test_a_summary_counts_what_all_ranks_have(self, tmp_path, capsys):
        code, shown, _ = inspect(capsys, self.write(tmp_path), "--keys", "mp_rank_01*momentum*")
        assert code == 0
        for line in (
            r"format +torch, 4 files",
            r"iteration +7, 28 samples",
            r"optimizer +version 1",
            r"settings +layout none",
            r"scalar optimizer +7 steps",
            r"loss scaler +scale 8.0",
            r"weights +2 +16 +64 +float32",
            r"momentum_buffer +2 +16 +64 +float32",
            r"mp_rank_01/layer_wise_optimizer_0\.pt/state\.output_layer\.weight\.momentum_buffer +"
            r"4x2 +float32 +32",
        ):
            assert re.search(rf"^{line}", shown, re.MULTILINE), line

    def test_differences_are_found(self, tmp_path):
        base = read_contents(self.write(tmp_path / "base"))
        assert compare(base, read_contents(self.write(tmp_path / "again"))).is_equal
        found = compare(base, read_contents(self.write(tmp_path / "momentum", momentum=3.0)))
        assert [item.max_abs for item in unlike(found).values()] == [2.0, 2.0]
        assert (found.state, found.described) == ((), ())
        found = compare(base, read_contents(self.write(tmp_path / "step", step=8)))
        assert {item.name for item in found.state} == {
            "scalar optimizer.step",
            "mp_rank_00/layer_wise_optimizer_0.pt/step",
            "mp_rank_01/layer_wise_optimizer_0.pt/step",
        }

    def test_a_torn_or_missing_file_is_said(self, tmp_path):
        folder = self.write(tmp_path / "torn")
        path = folder / "iter_0000007" / "mp_rank_01" / "layer_wise_optimizer_0.pt"
        os.truncate(path, path.stat().st_size - 50)
        with pytest.raises(CheckpointError, match=r"mp_rank_01/layer_wise.*cannot be read"):
            read_contents(folder)
        folder = self.write(tmp_path / "missing")
        (folder / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt").unlink()
        with pytest.raises(CheckpointError, match=r"mp_rank_01.*no model_optim_rng\.pt"):
            read_contents(folder)

    def test_another_format_cannot_be_compared(self, saved, tmp_path, capsys):
        code, _, error = inspect(capsys, saved / "base", "--diff", self.write(tmp_path))
        assert code == 2
        assert "only checkpoints of one format" in error
