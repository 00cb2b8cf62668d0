"""How jobs end whose checkpoint is torn, cannot be written, or loses a rank while it is written."""

import shutil

import pytest

from tests.functional.jobs import MODEL, MUON, STOCK_STYLE, launch, run_on, torchrun

HANG_S = 60
TRACKER = "latest_checkpointed_iteration.txt"
LINE = [*MODEL, *MUON, "--mock-data", "--train-iters", "2", "--num-workers", "0"]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of a run of two steps that saved after the first and after the last."""
    folder = tmp_path_factory.mktemp("saved")
    save = folder / "checkpoints"
    job = launch(
        run_on(2, STOCK_STYLE, *LINE, "--save", str(save), "--save-interval", "1"),
        folder / "logs",
        timeout_s=200,
    )
    assert job.code == 0, job.said
    assert (save / TRACKER).read_text() == "2"
    return save


def refused(job, *parts):
    assert job.code == 2, job.said
    assert len(job.errors) == 1, job.said
    for part in parts:
        assert part in job.errors[0]
    assert "Traceback" not in job.said, job.said
    assert job.seconds < HANG_S


@pytest.mark.parametrize(
    ("lost", "parts"),
    [
        ("iter_0000002/metadata.json", ["iter_0000002/metadata.json", "Take an earlier iteration"]),
        (TRACKER, [TRACKER, "iter_0000001, iter_0000002"]),
    ],
)
def test_a_torn_checkpoint_ends_the_job(tmp_path, saved, lost, parts):
    load = tmp_path / "load"
    shutil.copytree(saved, load)
    (load / lost).unlink()
    line = run_on(2, STOCK_STYLE, *LINE, "--load", str(load))
    refused(launch(line, tmp_path / "logs", timeout_s=100), *parts)


def test_a_folder_that_cannot_be_made_ends_the_job(tmp_path):
    (tmp_path / "file").write_text("this is no folder")
    save = str(tmp_path / "file" / "checkpoints")
    line = run_on(2, STOCK_STYLE, *LINE, "--save", save, "--save-interval", "1")
    refused(launch(line, tmp_path / "logs", timeout_s=100), f"--save {save}", "Not a directory")


KILLED = """
import os, runpy, signal, sys

def killed(event, args):
    if event == "open" and str(args[0]).endswith("iter_{iteration:07d}/__1_0.distcp"):
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        sys.addaudithook(killed)
    runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize("iteration", [1, 2])
def test_a_job_that_loses_a_rank_in_a_save_ends_and_can_be_resumed(tmp_path, iteration):
    script, save = tmp_path / "killed.py", tmp_path / "checkpoints"
    script.write_text(KILLED.format(iteration=iteration, script=STOCK_STYLE))
    line = run_on(1, str(script), *LINE, "--save", str(save), "--save-interval", "1")[0]
    job = torchrun(2, "megatron_muon", *line, timeout_s=200)
    assert job.code == 1, job.said
    assert "Signal 9 (SIGKILL)" in job.said
    torn = f"iter_{iteration:07d}"
    if iteration == 1:
        assert not (save / TRACKER).exists()
    else:
        assert (save / TRACKER).read_text() == "1"
    assert (save / torn).is_dir()
    assert not (save / torn / "metadata.json").exists()
    line = run_on(2, STOCK_STYLE, *LINE, "--save", str(save), "--load", str(save),
                  "--save-interval", "1")  # fmt: skip
    job = launch(line, tmp_path / "logs", timeout_s=200)
    assert job.code == 0, job.said
    assert "iteration        2/       2" in job.said
    assert ("iteration        1/       2" in job.said) == (iteration == 1)
    assert ("there is no whole checkpoint" in job.said) == (iteration == 1)
    assert (save / TRACKER).read_text() == "2"
    assert {path.name for path in save.iterdir() if path.is_dir()} == {
        "iter_0000001",
        "iter_0000002",
    }
    assert all((save / f"iter_000000{i}" / "metadata.json").exists() for i in (1, 2))
