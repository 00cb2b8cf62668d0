"""`megatron-muon run` gives a script what python gives it, and its ends are the script's own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.functional.jobs import ROOT, end_tree, launch, start_torchrun

pytestmark = pytest.mark.distributed

SHOW = """
import json, os, pickle, sys

class Thing:
    pass

pickle.dumps(Thing())
assert sys.modules["__main__"].Thing is Thing
print(json.dumps({
    "name": __name__,
    "file": __file__,
    "argv": sys.argv,
    "path": sys.path[0],
    "cwd on path": os.getcwd() in sys.path,
    "package": __package__,
    "spec": __spec__,
    "globals": sorted(set(globals()) - {"__annotations__"}),
}))
"""

RAISE = """
import sys

def fail_below_megatron(parser):
    raise KeyError("from the script")

def main():
    try:
        raise ValueError("the first")
    except ValueError as error:
        raise RuntimeError("the second") from error

if sys.argv[1] == "exit":
    sys.exit(3)
if sys.argv[1] == "say":
    sys.exit("some words")
if sys.argv[1] == "chain":
    main()
if sys.argv[1] == "megatron":
    from megatron.training.arguments import parse_args
    parse_args(fail_below_megatron)
if sys.argv[1] == "ours":
    from megatron_muon.errors import PlanError
    raise PlanError("one of ours")
"""


def scripted(tmp_path, name, source):
    path = tmp_path / name
    path.write_text(source)
    return path


def run_alone(tmp_path, script, *arguments):
    """Run a script through the launcher in one forked rank; return the job."""
    line = ["run", "--device", "cpu", str(script), *arguments]
    return launch([line], tmp_path / "logs")


def test_a_script_finds_what_python_would_give_it(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    scripted(folder, "show.py", SHOW)
    environment = {"PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}

    def shown(*command):
        ended = subprocess.run(
            [sys.executable, *command, "scripts/show.py", "--device", "x", "--", "a b", ""],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        return ended.stdout.splitlines()[-1]

    assert shown("-m", "megatron_muon", "run", "--device", "cpu", "--no-optimizer") == shown()


@pytest.mark.parametrize(("way", "code"), [("exit", 3), ("say", 1)])
def test_exit_codes_and_words_pass_through(tmp_path, way, code):
    job = run_alone(tmp_path, scripted(tmp_path, "ends.py", RAISE), way)
    assert job.code == code
    assert ("some words" in job.said) == (way == "say")
    assert "Traceback" not in job.said


def test_a_traceback_shows_the_script_s_frames_and_its_causes_alone(tmp_path):
    script = scripted(tmp_path, "ends.py", RAISE)
    job = run_alone(tmp_path, script, "chain")
    assert job.code == 1
    assert "ValueError: the first" in job.said
    assert "RuntimeError: the second" in job.said
    assert job.said.count(f'File "{script}", line ') == 3
    assert "in <module>" in job.said
    assert job.said.count("in main") == 2
    assert "megatron_muon/" not in job.said


def test_a_traceback_through_megatron_keeps_megatron_s_frames_and_none_of_ours(tmp_path):
    script = scripted(tmp_path, "ends.py", RAISE)
    job = run_alone(tmp_path, script, "megatron")
    assert job.code == 1
    assert "KeyError: 'from the script'" in job.said
    assert "in fail_below_megatron" in job.said
    assert "megatron/training/arguments.py" in job.said
    assert "megatron_muon/" not in job.said


def test_a_syntax_error_shows_the_line_and_no_frame(tmp_path):
    job = run_alone(tmp_path, scripted(tmp_path, "broken.py", "x = 1\nif x\n    pass\n"))
    assert job.code == 1
    assert 'broken.py", line 2' in job.said
    assert "SyntaxError" in job.said
    assert "launch.py" not in job.said


def test_one_of_our_errors_is_one_line(tmp_path):
    job = run_alone(tmp_path, scripted(tmp_path, "ends.py", RAISE), "ours")
    assert job.code == 2
    assert job.errors == ["one of ours"]
    assert "Traceback" not in job.said


def test_the_script_s_futures_are_its_own(tmp_path):
    script = scripted(tmp_path, "plain.py", "def f(x: 1 + 1): pass\nprint(f.__annotations__)\n")
    assert "{'x': 2}" in run_alone(tmp_path, script).said


FLAGS = """
from megatron.training.arguments import parse_args
args = parse_args()
print("got", args.transformer_impl, args.apply_rope_fusion, args.distributed_backend)
"""


def test_on_the_cpu_one_line_says_which_flags_are_set(tmp_path):
    script = scripted(tmp_path, "flags.py", FLAGS)
    job = run_alone(tmp_path, script)
    (line,) = [line for line in job.said.splitlines() if "on the CPU, so set" in line]
    assert "--transformer-impl local" in line
    assert "--no-rope-fusion" in line
    assert "got local False gloo" in job.said


def test_a_flag_of_the_user_is_left_alone(tmp_path):
    script = scripted(tmp_path, "flags.py", FLAGS)
    job = run_alone(tmp_path, script, "--transformer-impl", "transformer_engine")
    (line,) = [line for line in job.said.splitlines() if "on the CPU, so set" in line]
    assert "--transformer-impl" not in line
    assert "got transformer_engine False gloo" in job.said


TRAIN_FOR_EVER = """
import atexit, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
atexit.register((folder / f"ended{rank}").touch)
ones = torch.ones(8)
dist.all_reduce(ones)
(folder / f"started{rank}").write_text(str(os.getpid()))
if rank == 0:
    dist.all_reduce(ones, async_op=True)  # never joined by the other, which sleeps
    dist.barrier()
time.sleep(1000)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks_at_once(tmp_path, sent):
    """Also the one that waits in a collective, with a second one under way."""
    script = scripted(tmp_path, "for_ever.py", TRAIN_FOR_EVER)
    command = ["run", "--device", "cpu", "--no-optimizer", str(script), str(tmp_path)]
    process = start_torchrun(2, "megatron_muon", *command)
    try:
        ranks = await_ranks(tmp_path, process)
        os.killpg(process.pid, sent)
        said, _ = process.communicate(timeout=20)
    finally:
        end_tree(process)
    assert process.returncode != 0
    assert [rank for rank in ranks if psutil.pid_exists(rank)] == []
    assert "megatron_muon/" not in said
    assert "KeyboardInterrupt" not in said
    if sent == signal.SIGINT:
        assert (tmp_path / "ended0").exists()
        assert (tmp_path / "ended1").exists()


def await_ranks(folder: Path, process) -> list[int]:
    """Wait until both ranks are at work; return their process ids."""
    deadline = time.monotonic() + 80
    while time.monotonic() < deadline and process.poll() is None:
        started = [path.read_text() for path in folder.glob("started*")]
        if len(started) == 2 and all(started):
            time.sleep(0.5)
            return [int(text) for text in started]
        time.sleep(0.1)
    end_tree(process)
    raise AssertionError(f"the ranks did not start: {process.communicate()[0]}")


def test_an_interrupted_run_ends_by_the_signal(tmp_path):
    """As python does, so that a shell loop around it stops too."""
    script = scripted(tmp_path, "interrupted.py", "raise KeyboardInterrupt\n")
    job = run_alone(tmp_path, script)
    assert job.code == -signal.SIGINT
    assert "Traceback" not in job.said
