"""Several ranks on one machine, forked from a process that has imported everything.

Starting a rank that imports Megatron takes seconds; forking one takes milliseconds. The ranks
meet through a file, so no port is ever taken. A rank that fails ends the others at once, and a
job that takes longer than its timeout is ended too.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

StartMethod = Literal["fork", "forkserver"]

PRELOADED = ("megatron_muon.testing.preload",)
"""Imported once by the fork server, so that each rank starts with it."""


_POLL_S = 0.25


class RankFailedError(RuntimeError):
    """A rank raised, exited or ran out of time; the message holds its traceback or its exit."""


def run_ranks[T](
    function: Callable[..., T],
    num_ranks: int,
    *arguments: Any,
    timeout_s: float = 60.0,
    start_method: StartMethod = "forkserver",
    environment: Mapping[str, str] | None = None,
    logs: Path | None = None,
    process_group: bool = True,
    while_waiting: Callable[[], None] | None = None,
) -> list[T]:
    """Run ``function(*arguments)`` on each rank of a new job; return the results in rank order.

    Args:
        function: Importable function; it finds its rank in ``torch.distributed`` or ``RANK``.
        num_ranks: Number of ranks.
        arguments: Its arguments, pickled.
        timeout_s: Seconds after which every rank is killed.
        start_method: ``forkserver`` forks from a clean server process; ``fork`` forks from this
            one, which must not have run OpenMP or autograd threads.
        environment: Variables to set in the ranks.
        logs: Folder for the standard output and error of each rank; ``None`` shows them.
        process_group: Whether to start a gloo process group over a file.
        while_waiting: Called a few times a second until the ranks have ended, and once after.

    Raises:
        RankFailedError: A rank failed, or time ran out.
    """
    context: Any = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(list(PRELOADED))
    with tempfile.TemporaryDirectory(prefix="megatron_muon_ranks_") as folder:
        shared = Path(folder)
        ranks: list[BaseProcess] = [
            context.Process(
                target=_rank_main,
                args=(function, arguments, rank, num_ranks, shared, dict(environment or {}), logs,
                      process_group, timeout_s),
                name=f"rank{rank}",
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        try:
            for process in ranks:
                process.start()
            _await(ranks, shared, timeout_s, while_waiting or (lambda: None))
        finally:
            _end(ranks)
        return [pickle.loads((shared / f"result{rank}").read_bytes()) for rank in range(num_ranks)]


def _await(
    ranks: Sequence[BaseProcess],
    shared: Path,
    timeout_s: float,
    while_waiting: Callable[[], None],
) -> None:
    deadline = time.monotonic() + timeout_s
    alive = dict(enumerate(ranks))
    while alive:
        ready = wait([p.sentinel for p in alive.values()], _POLL_S)
        while_waiting()
        if not ready and time.monotonic() > deadline:
            raise RankFailedError(
                f"after {timeout_s:g} s rank(s) {', '.join(map(str, alive))} of {len(ranks)} had "
                "not ended"
            )
        for rank, process in list(alive.items()):
            if process.sentinel in ready:
                process.join()
                del alive[rank]
                if process.exitcode != 0:
                    raise RankFailedError(_story(rank, process.exitcode, shared))


def _story(rank: int, exitcode: int | None, shared: Path) -> str:
    """Tell what happened to a rank, and to any other that had left a traceback by then."""
    stories = [f"rank {rank} ended with exit code {exitcode}"]
    stories += [f"{p.name}:\n{p.read_text()}" for p in sorted(shared.glob("error*"))]
    return "\n".join(stories)


def _end(ranks: Sequence[BaseProcess]) -> None:
    for process in ranks:
        if process.pid is not None and process.is_alive():
            process.kill()
    for process in ranks:
        if process.pid is not None:
            process.join()


def _rank_main(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    num_ranks: int,
    shared: Path,
    environment: dict[str, str],
    logs: Path | None,
    process_group: bool,
    timeout_s: float,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The server's start method must not become that of the rank's own data loader workers.
    multiprocessing.set_start_method(None, force=True)
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), OMP_NUM_THREADS="1"
    )
    if logs is not None:
        _redirect(logs / f"rank{rank}.log")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if process_group:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{shared / 'rendezvous'}",
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=timeout_s),
            )
        result = _call(function, arguments)
        (shared / f"result{rank}").write_bytes(pickle.dumps(result))
        if process_group and dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        (shared / f"error{rank}").write_text(traceback.format_exc())
        raise


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call the function; a program that exits with success, as Megatron's may, returns nothing."""
    try:
        return function(*arguments)
    except SystemExit as exit_:
        if exit_.code not in (0, None):
            raise
        return None


def _redirect(path: Path) -> None:
    """Send what this process and its libraries print to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
