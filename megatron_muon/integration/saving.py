"""Saving: a save that is cut off or fails leaves the last whole checkpoint as it was.

What Megatron does not do: write beside a checkpoint that is already there, replace the tracker
file at once, tell all ranks of a failure of the first, and copy what lies in the CPU's memory
before ``--async-save`` trains on.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import queue
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_muon.checkpoint.files import TRACKER
from megatron_muon.checkpoint.folders import (
    drop_replaced,
    holds_anything,
    placed,
    put_in_place,
    replaced_folders,
    settle,
    staging_folder,
    sync_file,
    sync_folder,
    write_whole,
)
from megatron_muon.collectives.agreement import gather
from megatron_muon.errors import CheckpointError
from megatron_muon.integration.checkpointing import is_local, is_ours, together, world
from megatron_muon.integration.ddp import megatron_args
from megatron_muon.integration.patching import Patch


class _TrackerError(CheckpointError):
    """The tracker file could not be written: the checkpoint is whole, and nothing names it."""


@dataclass
class _Saves:
    """What is under way in this process.

    Attributes:
        staged: The iteration's folder that is not to be written over, if there is one.
        failures: What could not be written of a folder that other ranks wait for.
        copies: Whether tensors in the CPU's memory are copied before they are written.
        is_in_process: Whether this very process writes.
        finalize_fns: What ends the asynchronous save that is being started.
    """

    staged: Path | None = None
    finalize_fns: list[Callable[[], None]] = field(default_factory=list)
    failures: dict[str, OSError] = field(default_factory=dict)
    copies: bool = False
    is_in_process: bool = False


_saves = _Saves()


# --------------------------------------------------------------------------------------------
# megatron.training
# --------------------------------------------------------------------------------------------


def keeps_last_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``save_checkpoint``: write beside a folder that holds anything, and fail on all ranks.

    A restarted run comes to an iteration that it had saved, or had begun to.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        flags, group = megatron_args(), world()
        given = signature.bind(*args, **kwargs).arguments
        if not is_ours() or not is_local(flags.save) or given.get("non_persistent_ckpt"):
            return original(*args, **kwargs)
        save = Path(flags.save)
        name = "release" if given.get("release") else f"iter_{given['iteration']:07d}"
        is_staged = together(lambda: _prepare(save / name, group), group)
        if group is not None:
            is_staged = gather(is_staged, group)[0]
        failure: Exception | None = None
        _saves.staged = save / name if is_staged else None
        _saves.finalize_fns = []
        try:
            original(*args, **kwargs)
        except _TrackerError as error:
            if flags.async_save:
                raise
            failure = CheckpointError(str(error))
            if group is not None:
                # The others wait at the end of the save, checkpointing.py:1136.
                dist.barrier()
        except (OSError, RuntimeError) as error:
            if isinstance(error, CheckpointError) or not _is_write_error(error):
                raise
            raise _cannot_write(save / name, error) from error
        finally:
            _saves.staged = None
        if flags.async_save:
            _fail_together(_saves.finalize_fns)
        else:
            together(lambda: _raise(failure), group)

    return save_checkpoint


def _fail_together(steps: list[Callable[[], None]]) -> None:
    """Turn a failure of the first rank at the end of an asynchronous save into one of all ranks.

    Args:
        steps: What Megatron does on this rank when all have written, in order; changed in place.
    """
    every = list(steps)

    def finalize() -> None:
        failure: Exception | None = None
        try:
            for step in every:
                step()
        except _TrackerError as error:
            failure = CheckpointError(str(error))
        together(lambda: _raise(failure), world())

    # Empty if Megatron has handed them over to another request.
    steps[:] = [finalize] if every else []


def writes_beside(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_checkpoint_name``: name the folder beside the one that is kept, while saving."""

    @functools.wraps(original)
    def get_checkpoint_name(checkpoints_path: Any, *args: Any, **kwargs: Any) -> Any:
        name = original(checkpoints_path, *args, **kwargs)
        kept = _saves.staged
        if kept is None or not Path(name).is_relative_to(kept):
            return name
        return str(staging_folder(kept) / Path(name).relative_to(kept))

    return get_checkpoint_name


def names_place_to_wandb(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``on_save_checkpoint_success`` of wandb: what was written beside is in its place now."""

    @functools.wraps(original)
    def on_save_checkpoint_success(
        checkpoint_path: Any, tracker_filename: Any, save_dir: Any, iteration: Any
    ) -> Any:
        if is_local(save_dir):
            checkpoint_path = str(placed(Path(checkpoint_path), Path(save_dir)))
        return original(checkpoint_path, tracker_filename, save_dir, iteration)

    return on_save_checkpoint_success


def writes_whole_trackers(original: Any) -> Any:
    """Wrap ``maybe_msc``, through which Megatron opens files: the tracker is written at once."""
    return _WholeTrackers(original)


class _WholeTrackers:
    """Megatron's ``maybe_msc`` but for one file, which the first rank writes last of all."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file as before, a tracker that is to be written as one that is replaced."""
        if mode == "w" and os.path.basename(str(path)) == TRACKER and is_local(path) and is_ours():
            return _Tracker(Path(path))
        return self._storage.open(path, mode, *args, **kwargs)


class _Tracker(io.StringIO):
    """The text of a tracker file, written when it is closed.

    By then all ranks have written: what was written beside an older folder takes its place first.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._commit(self.getvalue())
        super().__exit__(kind, error, traceback)

    def _commit(self, text: str) -> None:
        name = text if text == "release" else f"iter_{int(text):07d}"
        try:
            put_in_place(self._path.parent / name)
            write_whole(self._path, text)
        except OSError as error:
            raise _TrackerError(
                f"{self._path}: it could not be written ({error.strerror}), so the last "
                f"checkpoint is still the one it names; {name} is whole too."
            ) from error


def _prepare(folder: Path, group: dist.ProcessGroup | None) -> bool:
    """Make ready to write an iteration's folder; return whether it holds anything to be kept.

    Raises:
        OSError: Nothing can be written there.
    """
    save = folder.parent
    if group is None or group.rank() == 0:
        try:
            save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"--save {save}: it cannot be made: {error.strerror}.") from error
        for replaced in replaced_folders(save):
            settle(replaced)
            drop_replaced(replaced)
        if staging_folder(folder).exists():
            shutil.rmtree(staging_folder(folder))
    if save.exists() and not os.access(save, os.W_OK | os.X_OK):
        raise CheckpointError(f"--save {save}: nothing can be written there.")
    return holds_anything(folder)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _is_write_error(error: Exception) -> bool:
    # torch.save tells of a full disk in its own words.
    return isinstance(error, OSError) or "PytorchStreamWriter" in str(error)


# --------------------------------------------------------------------------------------------
# megatron.core.dist_checkpointing
# --------------------------------------------------------------------------------------------


def saves_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``dist_checkpointing.save``: fail on all ranks, and write the state of this moment."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours() or not is_local(checkpoint_dir):
            return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        folder = Path(checkpoint_dir)
        given = signature.bind(sharded_state_dict, checkpoint_dir, *args, **kwargs).arguments
        _saves.failures.pop(str(folder), None)
        if not given.get("async_sharded_save"):
            with _fails_on_all_ranks(folder), _set("is_in_process"):
                return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        with _set("copies"):
            request = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        steps = list(request.finalize_fns)

        def finalize() -> None:
            with _fails_on_all_ranks(folder):
                for step in steps:
                    step()

        # In place: others add to this very list, and ours has to come before theirs.
        request.finalize_fns[:] = [finalize]
        _saves.finalize_fns = request.finalize_fns
        return request

    return save


def keeps_failure_of_index(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FileSystemWriterAsync.finish``, which the first rank calls while others wait."""

    @functools.wraps(original)
    def finish(self: Any, metadata: Any, results: Any) -> None:
        _attempt(self.checkpoint_dir, lambda: original(self, metadata, results))

    return finish


def keeps_failure_of_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``save_config``, which the first rank calls while others wait.

    The file says that a checkpoint is whole, so it is on the disk before the tracker names it.
    """

    @functools.wraps(original)
    def save_config(config: Any, checkpoint_dir: Any) -> None:
        def write() -> None:
            original(config, checkpoint_dir)
            if is_local(checkpoint_dir) and is_ours():
                from megatron.core.dist_checkpointing.core import CONFIG_FNAME

                sync_file(Path(checkpoint_dir) / CONFIG_FNAME)
                sync_folder(Path(checkpoint_dir))

        _attempt(checkpoint_dir, write)

    return save_config


def copies_for_async(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``MCoreSavePlanner.transform_object``, which hands over each tensor that is written.

    Of a tensor in the CPU's memory Megatron hands over the live one, if it is no view: the process
    that writes shares its memory, and would write what training has made of it by then. Objects
    have been turned to bytes by now.
    """

    @functools.wraps(original)
    def transform_object(self: Any, write_item: Any, object: Any) -> Any:
        found = original(self, write_item, object)
        if _saves.copies and isinstance(found, torch.Tensor) and found.device.type == "cpu":
            return found.detach().clone()
        return found

    return transform_object


def answers_in_process(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_write_results_queue``: who writes in this process answers in this process.

    Megatron starts another process for the queue, which imports the program again, takes seconds
    for it, and outlives a rank that is killed: whoever reads the job's output waits for it.
    """

    @functools.wraps(original)
    def get_write_results_queue(*args: Any, **kwargs: Any) -> Any:
        return queue.Queue() if _saves.is_in_process else original(*args, **kwargs)

    return get_write_results_queue


@contextmanager
def _set(name: Literal["copies", "is_in_process"]) -> Iterator[None]:
    setattr(_saves, name, True)
    try:
        yield
    finally:
        setattr(_saves, name, False)


def _attempt(checkpoint_dir: Any, write: Callable[[], None]) -> None:
    """Write on the first rank, and keep its failure until all ranks can be told.

    After a failure nothing else is written: the folder must not look whole.
    """
    failures, folder = _saves.failures, str(checkpoint_dir)
    if not is_ours() or not is_local(folder):
        write()
    elif folder not in failures:
        try:
            write()
        except OSError as error:
            failures[folder] = error


@contextmanager
def _fails_on_all_ranks(folder: Path) -> Iterator[None]:
    """Turn what goes wrong with a folder into one error on all ranks; collective.

    Raises:
        CheckpointError: The folder could not be written.
    """
    group = world()
    try:
        yield
    except CheckpointException as error:
        # All ranks have it, and the first knows whose failure it is.
        told = _cannot_write(folder, error)
        together(lambda: _raise(told), group)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    failure = _saves.failures.pop(str(folder), None)
    together(lambda: _raise(failure and _cannot_write(folder, failure)), group)


def _cannot_write(folder: Path, error: BaseException) -> CheckpointError:
    reason = f"{error.strerror}" if isinstance(error, OSError) else _of_ranks(error)
    free = [
        f"{shutil.disk_usage(path).free:,}" for path in (folder, folder.parent) if path.exists()
    ]
    room = f" {free[0]} bytes are free there." if free else ""
    return CheckpointError(
        f"{folder}: the checkpoint could not be written: {reason}.{room} The last whole checkpoint "
        "is as it was."
    )


def _of_ranks(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    if not failures:
        return f"{error}".strip().rpartition("\n")[2].rstrip(".") or type(error).__name__
    first, _ = failures[min(failures)]
    return f"on rank {', '.join(map(str, sorted(failures)))}, {first}".rstrip(".")


# --------------------------------------------------------------------------------------------
# The writer's process on a CPU
# --------------------------------------------------------------------------------------------


def writer_row() -> Patch:
    """Return the row of the CPU stand-in for the process that ``--async-save`` writes with.

    It is another process, where nothing is installed and the CUDA device it asks for is missing;
    its main function is found there by name.
    """
    return Patch(
        module="megatron.core.dist_checkpointing.strategies.async_utils",
        name="PersistentAsyncCaller.async_loop",
        replace=lambda original: write_on_cpu,
        why="the process that writes asks for a CUDA device, and training waits for it for ever",
        needed_by="core/dist_checkpointing/strategies/async_utils.py:PersistentAsyncCaller",
    )


def write_on_cpu(*args: Any, **kwargs: Any) -> None:
    """Be the process that writes checkpoints on a machine without CUDA."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    PersistentAsyncCaller.async_loop(*args, **kwargs)
