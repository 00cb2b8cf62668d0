"""Whole training runs of the recorded cases, and of their mutants, on forked CPU ranks."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_muon.errors import ConfigurationError
from megatron_muon.testing.golden import (
    FunctionalCase,
    MetricSeries,
    Mutant,
    Precision,
    read_case,
    read_tensorboard,
)
from megatron_muon.testing.mutants import break_step, mutant_flags
from megatron_muon.testing.ranks import StartMethod, run_ranks

GOLDEN_NAME = "golden_values_dev_cpu.json"
NUM_RANKS_VARIABLE = "GPUS_PER_NODE"
"""Variable of a case that holds its number of ranks, named as in Megatron's functional tests."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Parallel sizes of a run.

    Attributes:
        tp: Tensor-parallel size.
        dp: Data-parallel size.
    """

    tp: int
    dp: int

    def __str__(self) -> str:
        return f"TP{self.tp}xDP{self.dp}"

    @property
    def num_ranks(self) -> int:
        """Ranks of the run."""
        return self.tp * self.dp


def golden_folder() -> Path:
    """Return the folder of the recorded cases: in the installed package or in the checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "golden_values", package.parent / "golden_values"):
        if any(folder.glob("*/model_config.yaml")):
            return folder
    raise ConfigurationError(
        f"no recorded case under {package / 'golden_values'}: install the package again"
    )


def case_flags(
    case: FunctionalCase, data_prefix: str, work_dir: Path, grid: Grid | None = None
) -> list[str]:
    """Return the command line of a case, at its own parallel sizes or at others.

    Args:
        case: The case.
        data_prefix: Indexed dataset of bytes, without its endings.
        work_dir: Folder for the dataset cache and the curves.
        grid: Other parallel sizes; each rank then takes its samples in one micro-batch.
    """
    flags = list(case.command_line({"DATA_PATH": data_prefix, "WORK_DIR": str(work_dir)}))
    if grid is not None:
        samples = int(flags[flags.index("--global-batch-size") + 1])
        flags[flags.index("--tensor-model-parallel-size") + 1] = str(grid.tp)
        flags[flags.index("--micro-batch-size") + 1] = str(samples // grid.dp)
    return flags


def num_ranks_of(case: FunctionalCase) -> int:
    """Return the number of ranks a case runs on."""
    return int(case.env_vars[NUM_RANKS_VARIABLE])


def precision_of(case: FunctionalCase) -> Precision:
    """Return the precision a case trains in."""
    if case.model_args.get("--fp8-recipe") == "mxfp8":
        return "mxfp8"
    for precision in ("bf16", "fp16"):
        if case.model_args.get(f"--{precision}"):
            return precision
    return "fp32"


def train(
    flags: Sequence[str],
    num_ranks: int,
    work_dir: Path,
    *,
    mutant: Mutant | None = None,
    timeout_s: float = 120.0,
    start_method: StartMethod = "forkserver",
    while_waiting: Callable[[], None] | None = None,
    resumes: bool = False,
) -> MetricSeries:
    """Train and return the loss of every step as float32.

    Args:
        flags: Command line of the pretraining program.
        num_ranks: Ranks of the job.
        work_dir: Folder for logs and curves; earlier curves in it are removed.
        mutant: How the run is broken on purpose.
        timeout_s: Seconds after which the ranks are killed.
        start_method: How the ranks are forked.
        while_waiting: Called while the ranks run.
        resumes: Whether the run goes on from one whose curves are in the folder; they stay.

    Raises:
        RankFailedError: A rank failed or time ran out; its log is in ``work_dir / "logs"``.
    """
    curves, logs = work_dir / "tensorboard", work_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if not resumes:
        for stale in curves.glob("events.*"):
            stale.unlink()
    run_ranks(
        _pretrain,
        num_ranks,
        [*mutant_flags(mutant, flags), "--tensorboard-dir", str(curves)],
        mutant,
        timeout_s=timeout_s,
        start_method=start_method,
        logs=logs,
        while_waiting=while_waiting,
    )
    return read_tensorboard(curves)


def train_case(
    name: str, data_prefix: str, work_dir: Path, *, grid: Grid | None = None,
    mutant: Mutant | None = None, timeout_s: float = 120.0, on_resume: Sequence[str] = (),
) -> MetricSeries:  # fmt: skip
    """Train a recorded case; see :func:`train`.

    A case of the type ``ckpt-resume`` is stopped halfway and goes on in new processes from what it
    saved, with ``on_resume`` added to its flags. Its curve has the steps of both.
    """
    case = read_case(golden_folder() / name)
    flags = case_flags(case, data_prefix, work_dir, grid)
    num_ranks = grid.num_ranks if grid is not None else num_ranks_of(case)
    run = functools.partial(
        train, num_ranks=num_ranks, work_dir=work_dir, mutant=mutant, timeout_s=timeout_s
    )
    if case.test_type == "regular":
        return run(flags)
    halfway = str(int(flags[flags.index("--train-iters") + 1]) // 2)
    saved = work_dir / "checkpoints"
    shutil.rmtree(saved, ignore_errors=True)
    flags += ["--ckpt-format", "torch_dist", "--save-interval", halfway]
    run([*flags, "--save", str(saved), "--exit-interval", halfway])
    return run([*flags, "--load", str(saved), *on_resume], resumes=True)


def _pretrain(flags: list[str], mutant: Mutant | None) -> None:
    """Be one rank: what ``megatron-muon run pretrain_gpt.py`` does after its imports."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    break_step(mutant)
    from megatron_muon.tools.pretrain_gpt import main

    sys.argv = ["pretrain_gpt.py", *flags]
    main()
