"""Torn checkpoints are one error on all ranks; a failed save leaves the last whole one."""

import logging
import os
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest

from megatron_muon.checkpoint import folders
from megatron_muon.checkpoint.folders import (
    drop_replaced,
    placed,
    put_in_place,
    replaced_folders,
    settle,
    staging_folder,
    write_whole,
)
from megatron_muon.errors import CheckpointError
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
    "no gated weight": ["iter_0000002", "linear_fc1.weight", "another model"],
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
    return run_job(jobs.load_torn, tmp_path_factory.mktemp("torn"), "--swiglu")


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
    [
        ("need not be there", 0),
        ("first save cut off", 0),
        ("without optimizer, asked for", 2),
        ("non-persistent alone", 2),
        ("whole", 2),
    ],
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
    results = run_job(jobs.save_while_training, tmp_path, copies)
    error_on_all(results, "latest_checkpointed_iteration.txt", "File too large", "iter_0000002")
    for found in results:
        assert found.saved != found.trained
        assert not found.was_written
        assert found.iteration == 1
        assert (found.loaded == found.saved) == copies


@pytest.mark.parametrize(
    ("found", "given", "expected"),
    [
        ("torch", {}, "was saved with --ckpt-format torch: give that flag"),
        ("torch_dist", {"ckpt_format": "torch"}, "torch_dist: drop --ckpt-format torch"),
        ("torch", {"ckpt_format": "torch"}, None),
        ("torch", {"no_load_optim": True}, None),
        ("torch", {"use_layer_wise_distributed_optimizer": False}, None),
        ("torch_dist", {}, None),
        ("torch_dist", {"ckpt_format": "torch", "auto_detect_ckpt_format": True}, None),
    ],
)
def test_a_folder_of_the_other_format_is_refused(tmp_path, found, given, expected):
    from megatron_muon.integration.checkpointing import _check_format as check

    flags = {
        "ckpt_format": "torch_dist",
        "use_layer_wise_distributed_optimizer": True,
        "no_load_optim": False,
        "finetune": False,
        "auto_detect_ckpt_format": False,
    }
    args = SimpleNamespace(**(flags | given))
    if expected is None:
        check(tmp_path, found, args)
    else:
        with pytest.raises(CheckpointError, match=expected):
            check(tmp_path, found, args)


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


def between_renames(parent, is_written=True):
    """Make what a process leaves that ends between the two renames."""
    parent.mkdir()
    folder = parent / "iter_0000004"
    old = parent / "replaced_iter_0000004"
    folder_of(old, "old")
    if is_written:
        folder_of(staging_folder(folder), "new")
    return folder, old


def interleaved(line, work):
    """Do something; at its n-th line another process does the same. Return whether it had one."""
    left = line

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename != folders.__file__:
            return None
        if event == "line":
            left -= 1
            if left == -1:
                work()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return left < 0


@pytest.mark.parametrize(("is_written", "text"), [(True, "new"), (False, "old")])
def test_several_processes_settle_at_once(tmp_path, is_written, text):
    line, met = 0, True
    while met:
        folder, old = between_renames(tmp_path / f"{line}", is_written)
        met = interleaved(line, lambda: settle(folder))  # noqa: B023
        assert read(folder) == {"a": text, "b": text}
        assert not is_written or read(old)["a"] == "old"
        line += 1
    assert line > 5


def test_settling_leaves_what_is_in_place_and_the_next_save_removes_the_old(tmp_path):
    folder, old = between_renames(tmp_path / "saved")
    drop_replaced(folder)
    assert old.is_dir()  # as long as it is the only one with a name
    assert replaced_folders(folder.parent) == [folder]
    settle(folder)
    folder_of(staging_folder(folder), "torn")
    settle(folder)
    assert read(folder)["a"] == "new"
    drop_replaced(folder)
    assert (old.exists(), replaced_folders(folder.parent)) == (False, [])
    assert read(folder)["a"] == "new"


def look(load, **changed):
    """Look at a folder as ``--use-checkpoint-args`` does, before there is a process group."""
    from megatron_muon.integration.checkpointing import finds_whole_checkpoint

    args = {
        "optimizer": "muon", "auto_detect_ckpt_format": False, "ckpt_format": "torch_dist",
        "ckpt_step": None, "non_persistent_ckpt_type": None, "non_persistent_global_ckpt_dir": None,
        "exit_on_missing_checkpoint": False,
    }  # fmt: skip
    reads = finds_whole_checkpoint(lambda *of: (None, "", False, None))
    return reads(str(load), SimpleNamespace(**args | changed), True)


@pytest.mark.parametrize("rank", ["0", "1", None])
def test_before_there_is_a_group_each_rank_settles(tmp_path, monkeypatch, rank):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    folder, old = between_renames(tmp_path / "saved")
    (folder.parent / jobs.TRACKER).write_text("4")
    with pytest.raises(CheckpointError, match="iter_0000004"):
        look(folder.parent)
    assert read(folder) == {"a": "new", "b": "new"}
    assert old.is_dir()


def test_a_first_save_that_was_cut_off_is_told_of_once(tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    torn = tmp_path / "iter_0000004"
    torn.mkdir()
    (torn / ".metadata").touch()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            look(tmp_path)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"{tmp_path}" in warning
    assert "iter_0000004 is torn" in warning
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        look(tmp_path, exit_on_missing_checkpoint=True)
    (torn / "metadata.json").touch()
    with pytest.raises(CheckpointError, match=f"there is no {jobs.TRACKER}"):
        look(tmp_path)


@pytest.mark.parametrize("is_given", [False, True])
def test_the_folder_that_is_looked_at_is_the_one_that_is_loaded(tmp_path, monkeypatch, is_given):
    monkeypatch.delenv("RANK", raising=False)
    load = tmp_path / "saved"
    beside = tmp_path / "given" if is_given else load / "non_persistent"
    for base, iteration in ((load, 4), (beside, 6)):
        (base / f"iter_{iteration:07d}").mkdir(parents=True)
        (base / jobs.TRACKER).write_text(f"{iteration}")
    flags = {"non_persistent_ckpt_type": "global"}
    if is_given:
        flags["non_persistent_global_ckpt_dir"] = str(beside)

    def looked_at(**more):
        with pytest.raises(CheckpointError) as error:
            look(load, **flags | more)
        return str(error.value)

    assert f"{beside}/iter_0000006: this is no checkpoint" in looked_at()
    assert "--ckpt-step 7" in looked_at(ckpt_step=7)
    (load / jobs.TRACKER).write_text("10")
    assert f"{load}/{jobs.TRACKER}: it names iter_0000010" in looked_at()
    (load / jobs.TRACKER).unlink()
    assert f"{beside}/iter_0000006: this is no checkpoint" in looked_at()
    for file in (".metadata", "metadata.json"):
        (load / "iter_0000004" / file).touch()
    assert f"{load}: there is no {jobs.TRACKER}" in looked_at()
    shutil.rmtree(load / "iter_0000004")
    (beside / jobs.TRACKER).write_text("")
    assert f"{beside}/{jobs.TRACKER}: it holds ''" in looked_at()


def test_an_error_of_the_file_system_is_one_of_the_checkpoint():
    from megatron_muon.integration.checkpointing import together

    def fail(error):
        raise error

    for error, told in (
        (OSError("no space"), "no space."),
        (FileNotFoundError(2, "No such file", "a.pt"), "a.pt: No such file."),
    ):
        with pytest.raises(CheckpointError) as raised:
            together(lambda: fail(error), None)  # noqa: B023
        assert str(raised.value) == told


def test_wandb_is_told_where_a_checkpoint_lies(tmp_path, monkeypatch):
    from megatron.training import wandb_utils

    from megatron_muon.integration.saving import names_place_to_wandb

    references = []

    class Writer(SimpleNamespace):
        def Artifact(self, *of, **more):  # noqa: N802
            return SimpleNamespace(
                add_reference=lambda name, checksum: references.append(name),
                add_file=lambda name: None,
            )

    run = SimpleNamespace(log_artifact=lambda artifact, aliases: references.append(*aliases),
                          entity="", project="")  # fmt: skip
    monkeypatch.setattr(wandb_utils, "get_wandb_writer", lambda: Writer(run=run))
    original = getattr(
        wandb_utils.on_save_checkpoint_success, "__wrapped__",
        wandb_utils.on_save_checkpoint_success,
    )  # fmt: skip
    folder = tmp_path / "iter_0000004"
    for staged in (True, False):
        references.clear()
        path = staging_folder(folder) if staged else folder
        names_place_to_wandb(original)(str(path), "tracker", str(tmp_path), 4)
        assert references == [f"file://{folder}", folder.name]
    file = staging_folder(folder) / "mp_rank_00" / "model_optim_rng.pt"
    assert placed(file, tmp_path) == folder / "mp_rank_00" / "model_optim_rng.pt"
    assert placed(file, tmp_path / "elsewhere") == file


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
