"""The command line: our options before SCRIPT, the script's behind it, errors in one message."""

import os
import subprocess
import sys

import pytest

from megatron_muon import __version__
from megatron_muon.integration import launch
from megatron_muon.testing.training import golden_folder
from megatron_muon.tools import cli


@pytest.fixture
def started(monkeypatch):
    """Record what would have been started."""
    calls = []

    def record(script, arguments, device, optimizer):
        calls.append((script, arguments, device, optimizer))
        return 0

    monkeypatch.setattr(launch, "run_script", record)
    return calls


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("run s.py", ("s.py", [], "auto", True)),
        ("run --device cpu s.py --lr 1", ("s.py", ["--lr", "1"], "cpu", True)),
        ("run --device=cpu s.py", ("s.py", [], "cpu", True)),
        ("run --no-optimizer s.py a b", ("s.py", ["a", "b"], "auto", False)),
        # What looks like ours behind SCRIPT is the script's.
        ("run s.py --device cuda", ("s.py", ["--device", "cuda"], "auto", True)),
        ("run --device cpu s.py --device=tpu", ("s.py", ["--device=tpu"], "cpu", True)),
        ("run s.py --no-optimizer -h", ("s.py", ["--no-optimizer", "-h"], "auto", True)),
        ("run s.py --help --version", ("s.py", ["--help", "--version"], "auto", True)),
        ("run s.py -- x -- y", ("s.py", ["--", "x", "--", "y"], "auto", True)),
        ("run s.py run --device cpu", ("s.py", ["run", "--device", "cpu"], "auto", True)),
        ("run s.py -1 -", ("s.py", ["-1", "-"], "auto", True)),
        ("run -- s.py --device cpu", ("s.py", ["--device", "cpu"], "auto", True)),
    ],
)
def test_only_what_comes_before_the_script_is_ours(started, line, expected):
    assert cli.main(line.split()) == 0
    assert started == [expected]


def test_arguments_with_spaces_and_empty_ones_stay_as_they_are(started):
    cli.main(["run", "s.py", "", "a b", "*"])
    assert started[0][1] == ["", "a b", "*"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "COMMAND"),
        ("frobnicate", "frobnicate"),
        ("run", "SCRIPT"),
        ("run --device cpu", "SCRIPT"),
        ("run --device gpu s.py", "gpu"),
        ("run --dev cpu s.py", "--dev"),
        ("run --muon s.py", "--muon"),
        ("golden", "ACTION"),
    ],
)
def test_a_bad_command_line_is_said_and_ends_with_2(started, capsys, line, said):
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("megatron-muon: error: ")
    assert said in error
    assert "usage: megatron-muon" in error
    assert started == []


@pytest.mark.parametrize("line", ["--version", "--help", "run --help", "seams -h", "golden -h"])
def test_what_a_reader_asks_for_ends_with_0(capsys, line):
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 0
    assert (__version__ if line == "--version" else "usage:") in capsys.readouterr().out


def test_without_torch_one_message_says_so(monkeypatch, started, capsys):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["run", "s.py"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "torch is not installed" in said
    assert sys.executable in said
    assert started == []


def test_seams_shows_every_name_why_and_how_it_is_checked(capsys):
    assert cli.main(["seams", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "# CPU stand-in:",
        "# optimizer:",
        "torch.cuda.current_device\n",
        "megatron.training.models.dist_utils._ddp_wrap\n",
        "why: 0.19.2 has no layer-wise branch on the ModelBuilder path",
        "needed by: training/models/dist_utils.py",
        "checked: takes (parser)",
        "uninstall() puts the very objects back",
    ):
        assert part in shown
    assert cli.main(["seams", "--device", "cpu", "--no-optimizer"]) == 0
    assert "# optimizer:" not in capsys.readouterr().out


def test_golden_is_a_command(tmp_path, capsys):
    assert cli.main(["golden", "show", str(tmp_path / "absent.json")]) == 2
    assert "absent.json" in capsys.readouterr().err


READ_BY_NOBODY = [
    ("seams --device cpu", 141),
    ("golden show {golden}", 141),
    ("--help", 141),
    ("run --help", 141),
    # These go on: their exit code or their --json file says more than their output.
    ("plan llama3-8b --tp 8 --dp 8", 0),
    ("inspect {absent}", 2),
]


@pytest.mark.parametrize(("line", "code"), READ_BY_NOBODY, ids=[row[0] for row in READ_BY_NOBODY])
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path, line, code):
    golden = next(golden_folder().glob("*/*.json"))
    arguments = line.format(golden=golden, absent=tmp_path / "absent").split()
    ended = run_without_a_reader(["-m", "megatron_muon", *arguments])
    assert (ended.returncode, "Traceback" in ended.stderr) == (code, False), ended.stderr
    assert "BrokenPipeError" not in ended.stderr


def test_a_script_keeps_its_own_broken_pipe(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('x', flush=True)")
    ended = run_without_a_reader(
        ["-m", "megatron_muon", "run", "--device", "cpu", "--no-optimizer", str(script)]
    )
    assert ended.returncode not in (0, 141)
    assert "Traceback" in ended.stderr
    assert "BrokenPipeError" in ended.stderr


def run_without_a_reader(arguments):
    """Run Python, which keeps its output together as it does by default, into a closed pipe."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            stdout=writer, stderr=subprocess.PIPE, text=True, timeout=100, check=False,
            env=environment,
        )  # fmt: skip
    finally:
        os.close(writer)
