"""Measure a training step with Muon over one with AdamW: the quickstart's model, CPU time.

    .venv/bin/python scripts/bench_training.py [--quick] [--json FILE] [--markdown]

Both are runs of ``pretrain_gpt.py`` under ``megatron-muon run`` on four CPU ranks with the
quickstart's flags and mock data, and differ in ``--optimizer``. They take turns. A step lasts from
one call of Megatron's ``train_step`` to the next; its time is the CPU time of the busiest rank,
gloo's threads included: of each rank's median over the steps of all runs, the largest. The first
steps of a run warm up. The exit status is 1 if the limit is not met.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import benchlib
from benchlib import Row, rows_of

from megatron_muon.testing.golden import read_case
from megatron_muon.testing.ranks import run_ranks
from megatron_muon.testing.training import case_flags, golden_folder, num_ranks_of
from megatron_muon.tools.quickstart import CASE

SCRIPT = Path(__file__).with_name("pretrain_gpt.py")
WARM_UP, NUM_STEPS = 4, 12
"""Steps that are not measured, and all steps of a run."""

LIMIT = 1.10


def pretrain(flags: Sequence[str]) -> list[float]:
    """Train on this rank; return the CPU seconds of each step but the first and the last."""
    from megatron_muon.integration.install import install
    from megatron_muon.integration.launch import run_script

    install(device="cpu")
    from megatron.training import training

    begun: list[float] = []
    training.train_step = _noting(begun, training.train_step)
    code = run_script(str(SCRIPT), flags, "cpu", True)
    if code:
        raise SystemExit(code)
    seconds = [later - earlier for earlier, later in pairwise(begun)]
    return seconds[WARM_UP:]


def _noting(begun: list[float], train_step: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        begun.append(time.process_time())
        return train_step(*args, **kwargs)

    return noted


def flags_of(optimizer: str, folder: Path) -> list[str]:
    """Return the quickstart's flags with mock data."""
    flags = case_flags(read_case(golden_folder() / CASE), "unused", folder)
    at = flags.index("--data-path")
    flags[at : at + 2] = ["--mock-data"]
    flags[flags.index("--train-iters") + 1] = str(NUM_STEPS + 1)
    flags[flags.index("--optimizer") + 1] = optimizer
    return flags


def measure(quick: bool) -> Iterator[Row]:
    """Yield the rows of everything."""
    num_ranks = num_ranks_of(read_case(golden_folder() / CASE))
    seconds: dict[str, list[list[float]]] = {
        optimizer: [[] for _ in range(num_ranks)] for optimizer in ("adam", "muon")
    }
    for _ in range(2 if quick else 5):
        for optimizer, found in seconds.items():
            with tempfile.TemporaryDirectory(prefix="megatron_muon_bench_") as folder:
                ranks = run_ranks(
                    pretrain, num_ranks, flags_of(optimizer, Path(folder)), logs=Path(folder),
                    timeout_s=300,
                )  # fmt: skip
            for rank, steps in zip(found, ranks, strict=True):
                rank += steps
    busiest = {optimizer: max(map(median, found)) for optimizer, found in seconds.items()}
    for optimizer, value in busiest.items():
        yield from rows_of(f"CPU ms of a training step, {optimizer}", 1e3 * value)
    ratio = busiest["muon"] / busiest["adam"]
    yield from rows_of("training step, Muon over AdamW", ratio, LIMIT)


if __name__ == "__main__":
    sys.exit(benchlib.main(measure, __doc__, "two runs of each in place of five"))
