"""Bad input: one clear message a job, a non-zero exit, no hang and no traceback of ours."""

import os
import shlex
import shutil
import subprocess
import sys
import venv

import pytest

from tests.functional.jobs import MODEL, MUON, ROOT, STOCK_STYLE, launch, run_on, torchrun

HANG_S = 60
DATA = ["--mock-data"]

pytestmark = pytest.mark.distributed


def refused(job, *parts):
    """Assert that the job ended as bad input has to end, and return its message."""
    assert job.code == 2, job.said
    assert job.seconds < HANG_S
    assert len(job.errors) == 1, job.said
    for part in parts:
        assert part in job.errors[0]
    assert "Traceback" not in job.said, job.said
    return job.errors[0]


@pytest.mark.parametrize(
    ("num_ranks", "flags", "parts"),
    [
        pytest.param(
            2, [*MUON, *DATA, "--muon-momentun", "0.9"],
            ["unrecognized arguments: --muon-momentun", "Did you mean --muon-momentum?"],
            id="unknown Muon flag",
        ),
        pytest.param(
            4, [*MUON, *DATA, "--tensor-model-parallel-size", "3"],
            ["4 ranks cannot be divided", "--tensor-model-parallel-size 3"],
            id="four ranks with TP3",
        ),
        pytest.param(
            2, [*MUON, "--data-path", "no/such/text", "--split", "100,0,0"],
            ["--data-path no/such/text", "there is no file no/such/text.idx"],
            id="no such data",
        ),
        pytest.param(
            2, [*MUON, *DATA, "--muon-exclude", "*"],
            ["--optimizer muon", "is a matrix for Muon", "--muon-exclude"],
            id="no matrix",
        ),
        pytest.param(
            2, [*MUON, *DATA, "--muon-exclude", "*.no_such_layer.*"],
            ["--muon-exclude", "'*.no_such_layer.*'", "matches no parameter"],
            id="pattern that matches nothing",
        ),
        pytest.param(
            2, [*MUON, *DATA, "--muon-report", "no/such/folder/r.json"],
            ["--muon-report no/such/folder/r.json", "there is no folder"],
            id="report into no folder",
        ),
        pytest.param(
            2, ["--optimizer", "adam", *DATA, "--muon-report", "r.json"],
            ["--muon-report has no effect with --optimizer adam"],
            id="report without Muon",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(tmp_path, num_ranks, flags, parts):
    refused(launch(run_on(num_ranks, STOCK_STYLE, *MODEL, *flags), tmp_path / "logs"), *parts)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--lr", "1e-3"], ["rank 0 has --lr 0.002, rank 1 has --lr 0.001"]),
        (["--tensor-model-parallel-size", "2"],
         ["--tensor-model-parallel-size 1", "--tensor-model-parallel-size 2"]),
        (["--muon-momentum", "0.8"], ["--muon-momentum 0.9", "--muon-momentum 0.8"]),
        (["--muon-no-split-qkv"],
         ["muon_split_qkv = True", "muon_split_qkv = False", "(--muon-no-split-qkv)"]),
    ],
)  # fmt: skip
def test_ranks_with_different_flags(tmp_path, flags, parts):
    first, second = run_on(2, STOCK_STYLE, *MODEL, *MUON, *DATA)
    job = launch([first, [*second, *flags]], tmp_path / "logs")
    refused(job, "ranks 0 and 1", "Start every rank with the same command.", *parts)


def test_one_rank_with_a_bad_flag_ends_the_others(tmp_path):
    first, second = run_on(2, STOCK_STYLE, *MODEL, *MUON, *DATA)
    job = launch([first, [*second, "--muon-nesterow"]], tmp_path / "logs")
    refused(job, "--muon-nesterow", "Did you mean --muon-nesterov?")


def test_a_model_without_a_matrix(tmp_path):
    script = tmp_path / "pretrain_nothing.py"
    script.write_text(MODEL_WITHOUT_A_MATRIX)
    job = launch(
        run_on(2, str(script), *MODEL, *MUON, *DATA, "--use-model-provider"), tmp_path / "logs"
    )
    refused(job, "--optimizer muon", "is a matrix for Muon", "Use --optimizer adam")


MODEL_WITHOUT_A_MATRIX = f"""
import runpy
from megatron.core.models.gpt import gpt_model

build = gpt_model.GPTModel.__init__

def keep_from_muon(self, *args, **kwargs):
    build(self, *args, **kwargs)
    for param in self.parameters():
        param.use_muon = False

gpt_model.GPTModel.__init__ = keep_from_muon
runpy.run_path({STOCK_STYLE!r}, run_name="__main__")
"""


def test_a_script_that_does_not_exist(tmp_path):
    job = launch(run_on(2, "no_such_script.py", *MODEL), tmp_path / "logs")
    refused(job, "no_such_script.py", "megatron-muon run")


# Under the real torchrun, whose own report follows the message.


def said_once_under_torchrun(job, *parts):
    assert job.code == 1, job.said
    assert len(job.errors) == 1, job.said
    for part in parts:
        assert part in job.errors[0]
    assert "megatron_muon/" not in job.said, job.said


def test_an_unknown_flag_under_torchrun():
    command = run_on(1, STOCK_STYLE, *MODEL, *MUON, *DATA, "--muon-ns-steps", "5")[0]
    job = torchrun(2, "megatron_muon", *command)
    said_once_under_torchrun(job, "--muon-ns-steps", "Did you mean --muon-num-ns-steps?")


def test_two_ranks_with_different_flags_under_torchrun(tmp_path):
    wrapper = tmp_path / "start_rank.sh"
    wrapper.write_text(
        f'#!/bin/bash\nextra=""\n[ "$RANK" = 1 ] && extra="--lr 1e-3"\n'
        f'exec {shlex.quote(sys.executable)} -m megatron_muon "$@" $extra\n'
    )
    wrapper.chmod(0o755)
    command = run_on(1, STOCK_STYLE, *MODEL, *MUON, *DATA)[0]
    job = torchrun(2, str(wrapper), *command, module=False)
    said_once_under_torchrun(job, "rank 0 has --lr 0.002, rank 1 has --lr 0.001")


def test_an_unknown_megatron_core_under_torchrun(unknown_megatron):
    job = torchrun(2, "megatron_muon", "run", STOCK_STYLE, environment=unknown_megatron)
    said_once_under_torchrun(job, "megatron-core 0.99.0", "0.19.2", "pip install")


@pytest.fixture
def unknown_megatron(tmp_path):
    """Return an environment in which another megatron-core is installed."""
    folder = tmp_path / "megatron_core-0.99.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: megatron-core\nVersion: 0.99.0\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


# One process, no Megatron: what is missing from the machine.


def run(*command, environment=None, cwd=ROOT):
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def one_line(ended, code, *parts):
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith("megatron-muon: error: ")
    for part in parts:
        assert part in ended.stderr


def test_an_unknown_megatron_core(unknown_megatron):
    ended = run(
        sys.executable, "-m", "megatron_muon", "run", STOCK_STYLE, environment=unknown_megatron
    )
    one_line(ended, 2, "megatron-core 0.99.0", "0.19.2", "Nothing was changed")


def test_an_unknown_megatron_core_in_a_script_that_installs(tmp_path, unknown_megatron):
    script = tmp_path / "own.py"
    script.write_text("import megatron_muon\nmegatron_muon.install()\nprint('went on')\n")
    ended = run(sys.executable, str(script), environment=unknown_megatron)
    one_line(ended, 1, "megatron-core 0.99.0", "0.19.2")
    assert "went on" not in ended.stdout


def old_python():
    """Return a Python that is too old and starts, ``None`` if there is none on the path."""
    for minor in (11, 10, 9, 8):
        found = shutil.which(f"python3.{minor}")
        if found and run(found, "-c", "").returncode == 0:
            return found
    return None


def test_a_python_that_is_too_old():
    python = old_python()
    if python is None:
        pytest.skip("no Python older than 3.12 on the path")
    ended = run(python, "-m", "megatron_muon", "run", STOCK_STYLE)
    one_line(ended, 2, "needs Python 3.12 or newer", "this is Python 3.")
    imported = run(python, "-c", "import megatron_muon")
    assert imported.returncode == 1
    assert "ImportError: megatron-muon needs Python 3.12 or newer" in imported.stderr


def test_no_torch(tmp_path):
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    ended = run(python, "-m", "megatron_muon", "run", STOCK_STYLE)
    one_line(ended, 2, "torch is not installed", "pip install")
    script = tmp_path / "own.py"
    script.write_text("import megatron_muon\nmegatron_muon.install()\n")
    installed = run(python, str(script), environment={"PYTHONPATH": str(ROOT)})
    one_line(installed, 1, "torch is not installed", "torch>=2.13")
