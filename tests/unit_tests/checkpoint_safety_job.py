"""Ranks of a real training program, stopped where training would begin and put to other use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.testing.ranks import RankFailedError, run_ranks

FLAGS = """--num-layers 1 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 2
--normalization RMSNorm --position-embedding-type rope --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2 --train-iters 100
--lr 2e-3 --bf16 --seed 7 --tokenizer-type NullTokenizer --vocab-size 63 --log-interval 1
--eval-iters 0 --eval-interval 1000 --save-interval 1000 --mock-data --optimizer muon
--use-distributed-optimizer --num-workers 0""".split()
TRACKER = "latest_checkpointed_iteration.txt"


class _ReachedError(Exception):
    """Training would begin now."""


@dataclass
class Run:
    """A training run that does what it is told."""

    model: Any
    optimizer: Any
    scheduler: Any
    forward_step: Any = None
    iterator: Any = None
    config: Any = None

    def step(self) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.training.training import train_step

        train_step(self.forward_step, self.iterator, self.model, self.optimizer, self.scheduler,
                   self.config, get_forward_backward_func(), iteration=1)  # fmt: skip

    def save(self, iteration: int) -> None:
        from megatron.training import training

        training.save_checkpoint(iteration, self.model, self.optimizer, self.scheduler, 0)

    def load(self, **changed: Any) -> int:
        """Load with some of Megatron's arguments changed; return the iteration."""
        from megatron.training import get_args, training

        args = get_args()
        before = {name: getattr(args, name) for name in changed}
        vars(args).update(changed)
        try:
            return int(training.load_checkpoint(self.model, self.optimizer, self.scheduler)[0])
        finally:
            vars(args).update(before)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield weights, masters and their state on this rank, in a fixed order."""
        for chunk in self.model:
            yield from (p.data for p in chunk.parameters())
        for leaf in leaves(self.optimizer):
            for group in leaf.optimizer.param_groups:
                for param in group["params"]:
                    yield param.data
                    state = leaf.optimizer.state[param]
                    yield from (state[k] for k in sorted(state) if torch.is_tensor(state[k]))

    def digest(self) -> str:
        digest = hashlib.sha256()
        for tensor in self.tensors():
            flat = tensor.detach().reshape(-1).contiguous()
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def fill(self, value: float) -> None:
        """Set everything that is saved to one number."""
        for tensor in self.tensors():
            tensor.detach().fill_(value)

    def values(self) -> set[float]:
        """Return the numbers that are anywhere in the state of any rank."""
        own = {float(x) for tensor in self.tensors() for x in tensor.detach().unique()}
        every: list[set[float]] = [set() for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, own)
        return set().union(*every)


def leaves(optimizer: Any) -> Iterator[Any]:
    children = getattr(optimizer, "chained_optimizers", None)
    if children is None:
        yield optimizer
    for child in children or ():
        yield from leaves(child)


def as_run[T](
    use: Callable[[Run], T],
    *flags: str,
    prepare: Callable[[], None] = lambda: None,
    has_data: bool = False,
) -> T:
    """Be one rank: start Megatron's training, and use the run where the first step would be."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    from megatron.training import training

    prepare()
    reached: list[T] = []
    set_up = training.setup_model_and_optimizer

    def once_built(*args: Any, **kwargs: Any) -> Any:
        built = set_up(*args, **kwargs)
        if not has_data:
            reached.append(use(Run(*built[:3])))
            raise _ReachedError
        return built

    def instead(
        forward_step: Any, model: Any, optimizer: Any, scheduler: Any, iterator: Any, _valid: Any,
        _process: Any, config: Any, *rest: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        reached.append(use(Run(model, optimizer, scheduler, forward_step, iterator, config)))
        raise _ReachedError

    training.setup_model_and_optimizer, training.train = once_built, instead
    from megatron_muon.tools.pretrain_gpt import main

    sys.argv = ["pretrain_gpt.py", *FLAGS, *flags]
    with contextlib.suppress(_ReachedError):
        main()
    return reached[0]


# --------------------------------------------------------------------------------------------
# Torn folders
# --------------------------------------------------------------------------------------------

ITERATION = 2


def _without(folder: Path, matches: Callable[[str], bool]) -> None:
    """Drop tensors or objects from an index."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    for key in [key for key in index.state_dict_metadata if matches(key)]:
        del index.state_dict_metadata[key]
    index.storage_data = {k: v for k, v in index.storage_data.items() if not matches(k.fqn)}
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def _halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


TORN: dict[str, Callable[[Path, Path], object]] = {
    # What is broken, given the --load folder and the iteration's.
    "no metadata.json": lambda load, folder: (folder / "metadata.json").unlink(),
    "empty metadata.json": lambda load, folder: os.truncate(folder / "metadata.json", 0),
    "no index": lambda load, folder: (folder / ".metadata").unlink(),
    "torn index": lambda load, folder: _halve(folder / ".metadata"),
    "no data file": lambda load, folder: (folder / _file_of(1)).unlink(),
    "torn data file": lambda load, folder: _halve(folder / _file_of(1)),
    "no common state": lambda load, folder: _without(folder, lambda k: "common_state" in k),
    "no momentum": lambda load, folder: _without(
        folder, lambda k: "momentum_buffer" in k and "linear_fc1" in k
    ),
    "no weight": lambda load, folder: _without(
        folder, lambda k: not k.startswith("optimizer.") and "linear_fc2.weight" in k
    ),
    "no gated weight": lambda load, folder: _without(
        folder, lambda k: not k.startswith("optimizer.") and "linear_fc1.weight" in k
    ),
    "no tracker": lambda load, folder: (load / TRACKER).unlink(),
    "empty tracker": lambda load, folder: os.truncate(load / TRACKER, 0),
    "foreign tracker": lambda load, folder: (load / TRACKER).write_text("two"),
    "tracker of no folder": lambda load, folder: (load / TRACKER).write_text("99"),
    "nothing in the folder": lambda load, folder: (shutil.rmtree(folder), folder.mkdir()),
}

TORN_FILES: dict[str, Callable[[Path, Path], object]] = {
    # Of --ckpt-format torch.
    "no rank file": lambda load, folder: (folder / "mp_rank_00" / "model_optim_rng.pt").unlink(),
    "torn rank file": lambda load, folder: _halve(folder / "mp_rank_00" / "model_optim_rng.pt"),
}


@dataclass(frozen=True)
class Loaded:
    """What became of a load.

    Attributes:
        error: Kind and message of the error; ``None`` if there was none.
        iteration: What was loaded.
        is_untouched: Whether the run's state is what it was.
    """

    error: tuple[str, str] | None
    iteration: int | None
    is_untouched: bool


def try_load(run: Run, load: Path, **changed: Any) -> Loaded:
    before = run.digest()
    error = iteration = None
    try:
        iteration = run.load(load=str(load), **changed)
    except BaseException as raised:
        error = (type(raised).__name__, str(raised))
    return Loaded(error, iteration, run.digest() == before)


def load_torn(folder: str, *flags: str) -> dict[str, Loaded]:
    """Save, break copies of the checkpoint, and load each of them."""
    root = Path(folder)

    def use(run: Run) -> dict[str, Loaded]:
        from megatron.training import get_args

        args, is_first = get_args(), dist.get_rank() == 0
        run.fill(1.0)
        run.save(1)
        run.save(ITERATION)
        args.save, args.no_save_optim = str(root / "without"), True
        run.save(ITERATION)
        args.no_save_optim = False
        run.fill(3.0)
        found = {}
        for what, tear in (TORN if args.ckpt_format == "torch_dist" else TORN_FILES).items():
            load = root / what.replace(" ", "_")
            if is_first:
                shutil.copytree(root / "whole", load)
                tear(load, load / f"iter_{ITERATION:07d}")
            dist.barrier()
            found[what] = try_load(run, load)
        found["without optimizer"] = try_load(run, root / "without")
        found["will not save optimizer"] = try_load(run, root / "whole", no_save_optim=True)
        found["no such iteration"] = try_load(run, root / "whole", ckpt_step=7)
        found["must be there"] = try_load(run, root / "none", exit_on_missing_checkpoint=True)
        found["need not be there"] = try_load(run, root / "none")
        if args.ckpt_format == "torch_dist":
            found["lost tracker, pretrained"] = try_load(
                run, root / "no_tracker", pretrained_checkpoint=str(root / "whole")
            )
            found["without optimizer, asked for"] = try_load(
                run, root / "without", no_load_optim=True
            )
            other = root / "other" / "non_persistent"
            if is_first:
                shutil.copytree(root / "whole", other)
                shutil.copytree(root / "no_metadata.json", root / "cut_off")
                (root / "cut_off" / TRACKER).unlink()
                shutil.rmtree(root / "cut_off" / "iter_0000001")
            dist.barrier()
            found["first save cut off"] = try_load(run, root / "cut_off")
            found["non-persistent alone"] = try_load(
                run, root / "other", non_persistent_ckpt_type="global",
                exit_on_missing_checkpoint=True,
            )  # fmt: skip
        found["whole"] = try_load(run, root / "whole")
        assert run.values() == {1.0}
        return found

    return as_run(use, "--save", str(root / "whole"), *flags)


def load_torn_alone(folder: str) -> dict[str, Loaded]:
    """Load some torn checkpoints as Megatron does without this package's look at them."""
    root = Path(folder)

    def use(run: Run) -> dict[str, Loaded]:
        from megatron.training import checkpointing, training

        run.save(ITERATION)
        for name in ("_load_base_checkpoint", "checkpoint_exists"):
            setattr(checkpointing, name, getattr(checkpointing, name).__wrapped__)
        training.load_checkpoint = training.load_checkpoint.__wrapped__
        found = {}
        for what in ("no tracker", "foreign tracker"):
            load = root / what.replace(" ", "_")
            if dist.get_rank() == 0:
                shutil.copytree(root / "whole", load)
                TORN[what](load, load / f"iter_{ITERATION:07d}")
            dist.barrier()
            found[what] = try_load(run, load)
        found["must be there"] = try_load(run, root / "none", exit_on_missing_checkpoint=True)
        return found

    return as_run(use, "--save", str(root / "whole"))


# --------------------------------------------------------------------------------------------
# Saves that fail
# --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    """Let no file of this process grow over a size: writing to it fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@dataclass(frozen=True)
class Failed:
    """A save that failed.

    Attributes:
        error: Kind and message of the error.
        tracker: What the tracker says after it.
        iteration: What was loaded after it.
        values: What the loaded state consists of.
    """

    error: tuple[str, str] | None
    tracker: str
    iteration: int
    values: set[float]


def fail_saves(folder: str, *flags: str) -> dict[str, Failed]:
    """Save once, then fail to save in several ways; load after each."""
    save = Path(folder)

    def use(run: Run) -> dict[str, Failed]:
        from megatron.core.dist_checkpointing import serialization
        from megatron.core.dist_checkpointing.strategies.filesystem_async import (
            FileSystemWriterAsync,
        )
        from megatron.training import get_args

        rank, found = dist.get_rank(), {}
        run.fill(1.0)
        run.save(1)

        def attempt(what: str, iteration: int, limit: contextlib.AbstractContextManager) -> None:
            run.fill(2.0)
            error = None
            try:
                with limit:
                    run.save(iteration)
            except BaseException as raised:
                error = (type(raised).__name__, str(raised))
            tracker = (save / TRACKER).read_text()
            loaded = run.load(load=str(save))
            found[what] = Failed(error, tracker, loaded, run.values())

        def full_on(failing: int) -> contextlib.AbstractContextManager:
            if rank != failing:
                return contextlib.nullcontext()
            return limited(FileSystemWriterAsync, "write_preloaded_data_multithread", 4096)

        attempt("data of rank 1", 2, full_on(1))
        attempt("data of rank 0", 3, full_on(0))
        attempt("data over a whole one", 1, full_on(1))
        with limited(FileSystemWriterAsync, "finish", 16):
            attempt("index", 4, contextlib.nullcontext())
        with limited(serialization, "save_config", 16):
            attempt("metadata.json", 5, contextlib.nullcontext())
        with limited(_tracker_files(), "write_whole", 0):
            attempt("tracker", 6, contextlib.nullcontext())
        file = save / "a_file"
        if rank == 0:
            file.write_text("not a folder")
        dist.barrier()
        args = get_args()
        before, args.save = args.save, str(file / "checkpoints")
        attempt("no folder", 7, contextlib.nullcontext())
        args.save = before
        attempt("nothing", 8, contextlib.nullcontext())
        return found

    return as_run(use, "--save", str(save), *flags)


def _tracker_files() -> Any:
    from megatron_muon.integration import saving

    return saving


@contextlib.contextmanager
def limited(holder: Any, name: str, nbytes: int) -> Iterator[None]:
    """Let what one function writes hit the limit of a file's size.

    The limit holds for all files of the process, its log among them.
    """
    original = vars(holder)[name]
    function = getattr(holder, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with file_limit(nbytes):
            return function(*args, **kwargs)

    setattr(holder, name, staticmethod(call) if isinstance(original, staticmethod) else call)
    try:
        yield
    finally:
        setattr(holder, name, original)


# --------------------------------------------------------------------------------------------
# Killed
# --------------------------------------------------------------------------------------------


class Moments:
    """Counts what a process does to the files of a folder, and kills it at one of them.

    Two kinds: ``write`` are the writes to data files, of which the last is half done; ``name`` is
    everything that the file system orders, opening, renaming, removing and syncing.
    """

    def __init__(self, folder: str, tombstone: str | None = None) -> None:
        self._folder, self._tombstone = folder, tombstone
        self.counts: Counter[str] = Counter()
        self.fatal: tuple[str, int] | None = None
        self.is_on = False
        self._watch()

    def meet(self, kind: str, before: Callable[[], object] = lambda: None) -> None:
        if not self.is_on:
            return
        self.counts[kind] += 1
        if self.fatal == (kind, self.counts[kind]):
            before()
            Path(f"{self._tombstone}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def _watch(self) -> None:
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        events = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}

        def audit(event: str, args: tuple[Any, ...]) -> None:
            if event not in events or not args or self._folder not in str(args[0]):
                return
            if event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR):
                self.meet("name")

        sys.addaudithook(audit)
        fsync = os.fsync

        def counted_fsync(descriptor: int) -> None:
            self.meet("name")
            fsync(descriptor)

        os.fsync = counted_fsync
        moments = self

        class Stream:
            def __init__(self, stream: Any) -> None:
                self._stream = stream

            def __getattr__(self, name: str) -> Any:
                return getattr(self._stream, name)

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *raised: object) -> None:
                self._stream.close()

            def write(self, data: Any) -> Any:
                def half() -> None:
                    self._stream.write(bytes(data)[: len(data) // 2])
                    self._stream.flush()

                moments.meet("write", half)
                return self._stream.write(data)

        filesystem_async.open = lambda *of: Stream(open(*of))  # type: ignore  # noqa: SIM115


def save_and_count(folder: str) -> list[dict[str, int]]:
    """Save two checkpoints, the second twice; count what these two saves took."""

    def use(run: Run) -> list[dict[str, int]]:
        run.fill(1.0)
        run.save(1)
        moments, counts = Moments(folder), []
        moments.is_on = True
        run.fill(2.0)
        for _ in range(2):
            moments.counts.clear()
            run.save(2)
            counts.append(dict(moments.counts))
        return counts

    return as_run(use, "--save", folder)


@dataclass(frozen=True)
class Kill:
    """A save that a rank does not survive.

    Attributes:
        rank: Who is killed.
        kind: What it was about to do.
        number: For the how-manieth time.
        iteration: What is saved.
        value: What it consists of.
        is_stock: Whether it is Megatron's own ``save_checkpoint``.
    """

    rank: int
    kind: str
    number: int
    iteration: int
    value: float
    is_stock: bool = False


def load_then_die(folder: str, told: str, kill: Kill | None) -> None:
    """Load the last checkpoint, tell what it is, and be killed in the next save."""

    def use(run: Run) -> None:
        run.fill(-1.0)
        iteration, values = run.load(load=folder), run.values()
        Path(f"{told}{dist.get_rank()}").write_text(json.dumps([iteration, sorted(values)]))
        if kill is None:
            return
        run.fill(kill.value)
        moments = Moments(folder, f"{told}_killed")
        moments.fatal = (kill.kind, kill.number)
        moments.is_on = dist.get_rank() == kill.rank
        if kill.is_stock:
            from megatron.training import training

            training.save_checkpoint = training.save_checkpoint.__wrapped__
        run.save(kill.iteration)

    as_run(use, "--save", folder, "--load", folder)


@dataclass(frozen=True)
class Outcome:
    """What was found after a kill.

    Attributes:
        kill: The kill.
        was_killed: Whether it came to it.
        iteration: What the next job loaded, ``None`` if it could load nothing.
        values: What that consists of.
    """

    kill: Kill
    was_killed: bool
    iteration: int | None
    values: list[float]


def kill_saves(folder: str, seed: int, num_kills: int, is_stock: bool) -> list[Outcome]:
    """Kill a rank in each of several saves; the next job loads. Forks all from one process."""
    import megatron_muon.tools.pretrain_gpt  # noqa: F401
    from megatron_muon.integration.install import install

    install(device="cpu")
    root, draw = Path(folder), random.Random(seed)
    save, told, logs = str(root / "saved"), str(root / "told"), root / "logs"
    logs.mkdir(exist_ok=True)

    def job[T](function: Callable[..., T], *arguments: Any) -> list[T]:
        with socket_port() as port:
            return run_ranks(
                function, 2, *arguments, start_method="fork", process_group=False, logs=logs,
                timeout_s=60.0,
                environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            )  # fmt: skip

    def load(kill: Kill | None) -> tuple[int | None, list[float], bool]:
        """Load what there is, then save and be killed; return what was loaded, and whether."""
        for file in root.glob("told*"):
            file.unlink()
        with contextlib.suppress(RankFailedError):
            job(load_then_die, save, told, kill)
        if not Path(f"{told}0").exists():
            return None, [], False
        iteration, values = json.loads(Path(f"{told}0").read_text())
        return iteration, values, Path(f"{told}_killed").exists()

    counts = job(save_and_count, save)
    kills, found = [], []
    for number in range(num_kills):
        rank, kind = draw.randrange(2), draw.choice(["write", "name"])
        # Every other one over a checkpoint that is whole.
        is_over = number % 2
        moment = draw.randint(1, counts[rank][is_over][kind])
        kill = Kill(rank, kind, moment, 2 if is_over else 3, number + 10.0)
        if is_stock:
            kill = Kill(1, "write", counts[1][1]["write"] // 2, 2, number + 10.0, is_stock=True)
        kills.append(kill)
        found.append(load(kills[-1]))
    found.append(load(None))
    return [
        Outcome(kill, was_killed, iteration, values)
        for kill, (_, _, was_killed), (iteration, values, _) in zip(
            kills, found, found[1:], strict=False
        )
    ]


@contextlib.contextmanager
def socket_port() -> Iterator[int]:
    """Give a port that was free a moment ago."""
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = int(listening.getsockname()[1])
    yield port


# --------------------------------------------------------------------------------------------
# Asynchronous
# --------------------------------------------------------------------------------------------

GATE = "CHECKPOINT_SAFETY_GATE"


def write_when_told(*args: Any, **kwargs: Any) -> None:
    """Be the process that writes; open no file before the gate is opened."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron_muon.integration.saving import write_on_cpu

    def gated_open(*of: Any) -> Any:
        with open(os.environ[GATE] + str(args[0])):  # a pipe: waits for who opens it to write
            pass
        return open(*of)

    filesystem_async.open = gated_open  # type: ignore[attr-defined]
    write_on_cpu(*args, **kwargs)


@dataclass(frozen=True)
class Asynchronous:
    """An asynchronous save.

    Attributes:
        saved: Digest of the state when it was called.
        trained: Digest after the steps that followed.
        was_written: Whether it was whole before it was finalized.
        loaded: Digest of what was loaded.
        iteration: What was loaded.
        error: Of a second save, whose tracker file cannot be written.
    """

    saved: str
    trained: str
    was_written: bool
    loaded: str
    iteration: int
    error: tuple[str, str] | None


def save_while_training(folder: str, copies: bool) -> Asynchronous:
    """Save asynchronously, train five steps before the first byte is written, finalize, load.

    Save once more, to a disk that is full when the tracker file is written.
    """
    rank = os.environ["RANK"]
    os.environ[GATE] = f"{folder}/gate"
    os.mkfifo(f"{folder}/gate{rank}")
    save = f"{folder}/saved"

    def prepare() -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
        from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

        PersistentAsyncCaller.async_loop = staticmethod(write_when_told)
        if not copies:
            MCoreSavePlanner.transform_object = MCoreSavePlanner.transform_object.__wrapped__

    def use(run: Run) -> Asynchronous:
        from megatron.training.async_utils import maybe_finalize_async_save

        run.step()
        saved = run.digest()
        run.save(1)
        for _ in range(5):
            run.step()
        trained = run.digest()
        was_written = (Path(save) / TRACKER).exists()
        with open(f"{folder}/gate{rank}", "w"):
            pass
        maybe_finalize_async_save(blocking=True)
        iteration = run.load(load=save)
        loaded = run.digest()
        run.save(2)
        with open(f"{folder}/gate{rank}", "w"):
            pass
        error = None
        try:
            with limited(_tracker_files(), "write_whole", 0):
                maybe_finalize_async_save(blocking=True)
        except Exception as raised:
            error = (type(raised).__name__, str(raised))
        maybe_finalize_async_save(blocking=True, terminate=True)
        return Asynchronous(saved, trained, was_written, loaded, iteration, error)

    return as_run(
        use, "--save", save, "--async-save", "--use-persistent-ckpt-worker", "--async-strategy",
        "mcore", prepare=prepare, has_data=True,
    )  # fmt: skip
