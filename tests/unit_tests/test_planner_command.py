"""``megatron-muon plan``: text, JSON, a picture, and exit codes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_muon.tools import cli


def plan(line, capsys):
    code = cli.main(["plan", *line.split()])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_plan_is_printed(capsys):
    code, out, err = plan("llama3-8b --tp 8 --dp 8", capsys)
    assert (code, err) == (0, "")
    assert out.startswith("llama3-8b: 8.03 B parameters on 64 ranks (TP8 PP1 DP8), layout owner\n")


@pytest.mark.parametrize(
    ("line", "work", "said"),
    [
        ("llama3-8b --tp 8 --dp 8", "1.025", ()),
        ("llama3-70b --tp 8 --dp 1", "", ("39.51 GiB too much",)),
        ("llama3-70b --tp 8 --dp 1 --pp 4", "", ("46.39 GiB left for activations",)),
        (
            "llama3-70b --tp 8 --dp 64",
            "3.303",
            ("optimizer alone 205.26 ms", "exchange, data 29.88 ms"),
        ),
        (
            "llama3-70b --tp 8 --dp 64 -- --muon-share-blocks",
            "1.266",
            ("optimizer alone 140.73 ms",),
        ),
        (
            "llama3-70b --tp 8 --dp 64 -- --muon-exchange-dtype bf16",
            "",
            ("optimizer alone 186.44 ms", "exchange, data 14.94 ms"),
        ),
    ],
)
def test_the_page_of_planning_says_what_the_command_says(capsys, line, work, said):
    page = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text()
    out = plan(line, capsys)[1]
    for part in said:
        assert part in " ".join(out.split())
        assert part in page
    if work:
        assert re.search(rf"^0 +0-\d+ +\d+ +{work} ", out, re.MULTILINE)
        assert f"work/mean {work}" in page


def test_json_is_printed_alone_or_written(capsys, tmp_path):
    _, out, _ = plan("gpt2-124m --dp 4 --json -", capsys)
    path = tmp_path / "plan.json"
    _, text, _ = plan(f"gpt2-124m --dp 4 --json {path}", capsys)
    assert json.loads(out) == json.loads(path.read_text())
    assert text.startswith("gpt2-124m: 124.44 M parameters on 4 ranks")


def test_the_layout_is_chosen_with_a_reason_unless_one_is_asked_for(capsys):
    line = "deepseek-v3 --pp 8 --last-stage-layers 5 --dp 128 --ep 64"
    out = plan(line, capsys)[1]
    assert ", layout flat\nlayout flat: it alone fits into 80.00 GiB" in out
    assert "\nplan: no fingerprint" in out
    assert ", layout flat\nlayout flat: its step" in plan("llama3-8b --dp 64", capsys)[1]
    assert ", layout owner\nplan" in plan("llama3-8b --dp 64 --layout owner", capsys)[1]
    alone = plan("gpt2-124m --dp 1", capsys)[1]
    assert ", layout owner\nlayout owner: one data-parallel rank holds every matrix\n" in alone
    assert ", layout flat\n" in plan("gpt2-124m -- --muon-layout flat", capsys)[1]
    assert ", layout flat\n" in plan("gpt2-124m --layout flat -- --muon-layout flat", capsys)[1]


def test_the_machine_can_be_described(capsys):
    line = "gpt2-124m --dp 16 --json - --hardware h100"
    slow = json.loads(plan(f"{line} --link 1 --flops 1 --memory 4", capsys)[1])
    fast = json.loads(plan(line, capsys)[1])
    for part, ratio in (("newton_schulz", 495), ("gradient_reduce", 40)):
        seconds = [told["stages"][0]["step"]["seconds"][part] for told in (slow, fast)]
        assert seconds[0] == pytest.approx(ratio * seconds[1])
    assert "1 TFLOP/s" in slow["assumptions"][0]


def test_the_machine_can_be_a_file_that_changes_some_numbers(capsys, tmp_path):
    path = tmp_path / "slow.json"
    path.write_text('{"link_nbytes_per_s": 1e9, "memory_nbytes": 8589934592}')
    told = [
        json.loads(plan(f"gpt2-124m --dp 16 --json - {flags}", capsys)[1])
        for flags in ("--link 1", f"--hardware {path}", f"-- --muon-hardware {path}")
    ]
    steps = [each["stages"][0]["step"] for each in told]
    assert steps[0] == steps[1] == steps[2]
    assert told[1]["assumptions"][0].startswith("slow: Newton-Schulz at 495 TFLOP/s")
    only_flat_fits = f"deepseek-v3 --pp 8 --last-stage-layers 5 --dp 128 --ep 64 --hardware {path}"
    assert "none fits into 8.00 GiB" in plan(f"{only_flat_fits} --rows 0", capsys)[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "no object; expected an object of name, flops_per_s"),
        ('{"flops": 1}', "['flops']; expected an object of"),
        ('{"flops_per_s": 0}', "flops_per_s is 0; expected a number above 0"),
        ('{"ranks_per_node": 1.5}', "ranks_per_node is 1.5; expected an integer above 0"),
        ('{"memory_nbytes": true}', "memory_nbytes is True; expected an integer above 0"),
        ('{"latency_s": NaN}', "latency_s is nan; expected a number above 0"),
        ('{"name": 3}', "name is 3; expected a name"),
    ],
)
def test_a_file_that_is_no_machine_is_refused(capsys, tmp_path, text, said):
    path = tmp_path / "machine.json"
    path.write_text(text)
    code, _, err = plan(f"gpt2-124m --hardware {path}", capsys)
    assert code == 2
    assert f"--hardware {path}: " in err
    assert said in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "no model: give one of"),
        ("llama5", "llama5: no such file"),
        ("llama3-8b --tp 3", "--tp 3 does not fit llama3-8b"),
        ("llama3-8b --stage 1", "--stage is 1: expected 0, the only stage"),
        ("llama3-8b --hardware abacus", "--hardware abacus: no machine of that name (h100,"),
        ("llama3-8b --link 0", "--link is 0.0: expected a number from 1e-06"),
        ("llama3-8b --json /no/such/folder/x", "--json /no/such/folder/x: cannot be written"),
        ("llama3-8b -- --muon-layout square", "--muon-layout is 'square'"),
    ],
)
def test_what_cannot_be_planned_is_said_and_ends_with_2(capsys, line, said):
    code, out, err = plan(line, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("megatron-muon: error: ")
    assert said in err
    assert err.count("\n") == 1


def test_a_bad_option_ends_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "llama3-8b", "--layout", "square"])
    assert caught.value.code == 2
    assert "usage: megatron-muon plan [SOURCE]" in capsys.readouterr().err


def test_a_picture_is_drawn_or_the_missing_package_is_named(capsys, tmp_path):
    path = tmp_path / "plan.png"
    code, _, err = plan(f"gpt2-124m --tp 2 --dp 4 --picture {path}", capsys)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert code == 2
        assert "needs matplotlib: install it with `pip install '.[report]'` in the checkout" in err
        assert not path.exists()
    else:
        assert code == 0
        assert path.read_bytes().startswith(b"\x89PNG")


def test_neither_torch_nor_megatron_is_imported():
    program = (
        "import sys\nfrom megatron_muon.tools import cli\n"
        "cli.main(['plan', 'llama3-8b', '--tp', '8', '--dp', '8'])\n"
        "print([name for name in ('torch', 'megatron', 'numpy') if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout.endswith("\n[]\n")


@pytest.mark.parametrize(
    ("option", "flag"),
    [
        ("--tp 8", "--tensor-model-parallel-size 4"),
        ("--pp 2", "--pipeline-model-parallel-size 4"),
        ("--cp 2", "--context-parallel-size 4"),
        ("--ep 2", "--expert-model-parallel-size 4"),
        ("--etp 2", "--expert-tensor-parallel-size 4"),
        ("--vpp 2", "--num-virtual-stages-per-pipeline-rank 4"),
        ("--first-stage-layers 2", "--decoder-first-pipeline-num-layers 4"),
        ("--last-stage-layers 2", "--decoder-last-pipeline-num-layers 4"),
        ("--layout owner", "--muon-layout flat"),
        ("--layout auto", "--muon-layout flat"),
        ("--hardware h100", "--muon-hardware cpu-gloo"),
    ],
)
def test_an_option_that_a_flag_contradicts_is_refused(capsys, option, flag):
    code, out, err = plan(f"llama3-8b {option} -- {flag}", capsys)
    assert (code, out) == (2, "")
    assert f"{option} and {flag} (behind `--`) contradict each other" in err


def test_an_option_may_change_what_a_file_of_flags_says_and_repeat_a_flag(capsys, tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(
        "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --vocab-size 1024 "
        "--position-embedding-type rope --tensor-model-parallel-size 4 --muon-layout flat"
    )
    assert "(TP2 PP1 DP2), layout owner" in plan(f"{path} --tp 2 --dp 2 --layout owner", capsys)[1]
    same = "llama3-8b --tp 8 -- --tensor-model-parallel-size 8"
    assert "(TP8 PP1 DP1)" in plan(same, capsys)[1]


def test_flags_in_the_place_of_options_are_shown_their_place(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "llama3-8b", "--muon-share-blocks", "--num-layers", "3"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "stand behind `--`, as in: -- --muon-share-blocks --num-layers 3\n" in said
    assert "usage: megatron-muon plan [SOURCE]" in said


def test_the_stage_of_the_table_is_the_one_that_is_asked_for(capsys):
    out = plan("llama3-8b --pp 4 --stage 2 --rows 1", capsys)[1]
    assert "matrices of stage 2, by name" in out
    assert "decoder.layers.16.mlp.linear_fc1.weight" in out
    assert "and 31 more" in out
