"""Torn checkpoints are one error on all ranks; a failed save leaves the last whole one."""

import os
import signal
import sys

import pytest

from megatron_muon.checkpoint.folders import put_in_place, settle, staging_folder, write_whole
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests import checkpoint_safety_job as jobs

# Ranks that import Megatron, some of which start others.
DISTRIBUTED = (pytest.mark.distributed, pytest.mark.timeout(300))


def distributed(test):
    for mark in DISTRIBUTED:
        test = mark(test)
    return test


def run_job(function, folder, *arguments, timeout_s=200.0):
    logs = folder / "logs"
    logs.mkdir()
    with jobs.socket_port() as port:
        return run_ranks(
            function, 2, str(folder), *arguments, timeout_s=timeout_s, logs=logs,
            process_group=False,
            environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        )  # fmt: skip


def error_on_all(results, *parts):
    """Assert that all ranks had the same error of ours, which names its parts."""
    errors = {result.error for result in results}
    assert len(errors) == 1, errors
    (error,) = errors
    assert error is not None
    assert error[0] == "CheckpointError", error
    for part in parts:
        assert part in error[1]


NAMES = {
    # what is torn: what the message has to name
    "no metadata.json": ["iter_0000002/metadata.json"],
    "empty metadata.json": ["iter_0000002/metadata.json"],
    "no index": ["iter_0000002/.metadata"],
    "torn index": ["iter_0000002/.metadata"],
    "no data file": ["iter_0000002", "__1_0.distcp is missing"],
    "torn data file": ["iter_0000002", "__1_0.distcp has"],
    "no common state": ["iter_0000002", "common_state"],
    "no momentum": ["iter_0000002", "momentum_buffer", "linear_fc1"],
    "no weight": ["iter_0000002", "linear_fc2.weight"],
    "no tracker": ["no latest_checkpointed_iteration.txt", "iter_0000002"],
    "empty tracker": ["latest_checkpointed_iteration.txt", "iter_0000002"],
    "foreign tracker": ["latest_checkpointed_iteration.txt", "'two'"],
    "tracker of no folder": ["latest_checkpointed_iteration.txt", "iter_0000099"],
    "nothing in the folder": ["iter_0000002", "no checkpoint"],
    "without optimizer": ["iter_0000002", "--no-save-optim", "--no-load-optim", "--finetune"],
    "will not save optimizer": ["iter_0000002", "--no-save-optim", "--no-load-optim"],
    "no such iteration": ["--ckpt-step 7", "iter_0000007"],
    "must be there": ["none", "--exit-on-missing-checkpoint"],
    "lost tracker, pretrained": ["no latest_checkpointed_iteration.txt"],
}


@pytest.fixture(scope="module")
def torn(tmp_path_factory):
    return run_job(jobs.load_torn, tmp_path_factory.mktemp("torn"))


@distributed
@pytest.mark.parametrize("what", NAMES)
def test_a_torn_checkpoint_is_one_error_on_all_ranks(torn, what):
    results = [found[what] for found in torn]
    error_on_all(results, *NAMES[what])
    assert all(result.is_untouched for result in results)


@distributed
def test_every_way_to_tear_has_its_message(torn):
    assert set(jobs.TORN) <= set(NAMES) <= set(torn[0])


@distributed
@pytest.mark.parametrize(
    ("what", "iteration"),
    [("need not be there", 0), ("without optimizer, asked for", 2), ("whole", 2)],
)
def test_what_is_legal_loads(torn, what, iteration):
    assert [(r.error, r.iteration) for r in (found[what] for found in torn)] == [
        (None, iteration)
    ] * 2


@distributed
def test_megatron_alone_starts_anew_or_ends_well(tmp_path):
    for found in run_job(jobs.load_torn_alone, tmp_path):
        assert (found["no tracker"].error, found["no tracker"].iteration) == (None, 0)
        # The exit code of which is 0.
        assert found["foreign tracker"].error == ("SystemExit", "")
        assert found["must be there"].error == ("SystemExit", "")


RANK_FILES = {
    "no rank file": ["mp_rank_00/model_optim_rng.pt"],
    "torn rank file": ["mp_rank_00/model_optim_rng.pt"],
    "without optimizer": ["--no-save-optim", "--no-load-optim"],
    "no such iteration": ["--ckpt-step 7"],
    "must be there": ["--exit-on-missing-checkpoint"],
}


@distributed
def test_torn_files_of_ranks_are_one_error_on_all_ranks(tmp_path):
    torn = run_job(jobs.load_torn, tmp_path, *RANK_FORMAT)
    for what, parts in RANK_FILES.items():
        error_on_all([found[what] for found in torn], *parts)
    assert [found["whole"].iteration for found in torn] == [2, 2]


RANK_FORMAT = ("--ckpt-format", "torch", "--no-use-layer-wise-param-layout")


@distributed
def test_a_save_that_fails_is_one_error_on_all_ranks_and_leaves_the_last_one(tmp_path):
    failed = run_job(jobs.fail_saves, tmp_path)
    for what, parts in {
        "data of rank 1": ["iter_0000002", "could not be written", "rank 1"],
        "data of rank 0": ["iter_0000003", "could not be written", "rank 0"],
        "data over a whole one": ["iter_0000001", "could not be written", "rank 1"],
        "index": ["iter_0000004", "could not be written", "File too large"],
        "metadata.json": ["iter_0000005", "could not be written", "File too large"],
        "tracker": ["latest_checkpointed_iteration.txt", "File too large", "iter_0000006"],
        "no folder": ["--save", "a_file/checkpoints"],
    }.items():
        results = [found[what] for found in failed]
        error_on_all(results, *parts)
        for result in results:
            assert (result.tracker, result.iteration, result.values) == ("1", 1, {1.0}), what
    for found in failed:
        nothing = found["nothing"]
        assert (nothing.error, nothing.iteration, nothing.values) == (None, 8, {2.0})


def kill_saves(folder, seed, num_kills, is_stock=False, timeout_s=280.0):
    (outcomes,) = run_ranks(
        jobs.kill_saves, 1, str(folder), seed, num_kills, is_stock, timeout_s=timeout_s,
        process_group=False,
    )  # fmt: skip
    return outcomes


@distributed
def test_the_last_checkpoint_survives_a_kill_at_any_moment(tmp_path):
    whole = {2: [2.0]}
    last = 2
    for outcome in kill_saves(tmp_path, seed=6, num_kills=10):
        kill = outcome.kill
        assert outcome.was_killed, outcome
        # The checkpoint before, or the one that was being saved; never a mixture.
        assert outcome.iteration in (last, kill.iteration), outcome
        new = [kill.value] if outcome.iteration == kill.iteration else []
        assert outcome.values in (new, whole.get(outcome.iteration)), outcome
        last = outcome.iteration
        whole[last] = outcome.values


@distributed
def test_megatrons_own_save_over_a_checkpoint_does_not_survive_a_kill(tmp_path):
    (outcome,) = kill_saves(tmp_path, seed=0, num_kills=1, is_stock=True)
    assert outcome.was_killed
    assert outcome.values not in ([2.0], [outcome.kill.value]), outcome


@distributed
@pytest.mark.parametrize("copies", [True, False])
def test_an_asynchronous_save_is_of_the_moment_it_was_called(tmp_path, copies):
    for found in run_job(jobs.save_while_training, tmp_path, copies):
        assert found.saved != found.trained
        assert not found.was_written
        assert found.iteration == 1
        assert (found.loaded == found.saved) == copies


# Files, in one process.


def is_killed_at(moment, work, *arguments):
    """Do something in a process that is killed at its n-th call to the file system."""
    child = os.fork()
    if child == 0:
        left = moment

        def audit(event, args):
            nonlocal left
            if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.truncate"):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(audit)
        work(*arguments)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_a_tracker_is_old_or_new_at_every_moment(tmp_path):
    tracker, moment = tmp_path / "tracker.txt", 0
    tracker.write_text("4")
    while is_killed_at(moment, write_whole, tracker, "10"):
        assert tracker.read_text() in ("4", "10")
        moment += 1
    assert moment > 2
    assert tracker.read_text() == "10"


def folder_of(path, text):
    path.mkdir()
    for name in ("a", "b"):
        (path / name).write_text(text)


def read(folder):
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_a_folder_is_old_or_new_at_every_moment(tmp_path):
    moment = -1
    is_killed = True
    while is_killed:
        moment += 1
        folder = tmp_path / f"{moment}" / "iter_0000004"
        folder.parent.mkdir()
        folder_of(folder, "old")
        folder_of(staging_folder(folder), "new")
        is_killed = is_killed_at(moment, put_in_place, folder)
        settle(folder)
        assert read(folder) in ({"a": "old", "b": "old"}, {"a": "new", "b": "new"})
    assert moment > 3
    assert read(folder)["a"] == "new"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_without_settling_a_moment_has_no_folder(tmp_path):
    seen = set()
    for moment in range(6):
        folder = tmp_path / f"{moment}" / "iter_0000004"
        folder.parent.mkdir()
        folder_of(folder, "old")
        folder_of(staging_folder(folder), "new")
        is_killed_at(moment, put_in_place, folder)
        seen.add(folder.is_dir())
    assert seen == {True, False}
