"""Measure how fast a model of a trillion parameters is planned in one grid of ranks.

    .venv/bin/python scripts/bench_planning.py [--quick] [--json FILE] [--markdown]

Kimi-K2's 46,507 matrices are planned in both layouts, each time by several processes whose hashes
are seeded apart, as those of a job are. Shown are the seconds of processor time of the fastest, the
largest rank's Newton-Schulz work over the mean, the padding of the matrices' buffers, the most
memory that a process took, and how many different plans there were. The exit status is 1 if a limit
is not met.
"""

import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import benchlib
from benchlib import Row, rows_of

from megatron_muon.bookkeeping.stage import padding_of
from megatron_muon.planner.job import PlanSettings, plan_job
from megatron_muon.planner.models import BUILT_IN
from megatron_muon.planner.sizes import ParallelSizes

MODEL = "kimi-k2"
SECONDS = {1024: 1.0, 4096: 5.0}
MAX_OVER_MEAN = 1.01
PADDING = {"flat": 1.02, "owner": 1.05}

PEAK_MIB = 1024


def plan(layout: str, ranks: int) -> dict[str, float | str]:
    """Plan in this process, and return what was measured."""
    gc.disable()  # as the command does
    start = time.process_time()
    job = plan_job(BUILT_IN[MODEL], ParallelSizes(dp=ranks), PlanSettings(layout=layout))
    matrices = job.stages[0].first_plan.matrices
    seconds = time.process_time() - start
    loads = [0] * ranks
    for planned in matrices:
        loads[planned.home.dp] += planned.flops
    return {
        "seconds": seconds,
        "max_over_mean": max(loads) * ranks / sum(loads),
        "padding": padding_of([b for b in job.stages[0].buffers if b.of_matrices]),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "fingerprint": job.fingerprint(),
    }


def plan_apart(layout: str, ranks: int, seed: int) -> dict[str, float | str]:
    """Plan in a process of its own."""
    told = subprocess.run(
        [sys.executable, __file__, "--one", layout, str(ranks)],
        env={**os.environ, "PYTHONHASHSEED": str(seed)}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return json.loads(told.stdout)


def of_layout(layout: str, ranks: int, processes: int) -> Iterator[Row]:
    """Measure one layout on that many ranks."""
    told = [plan_apart(layout, ranks, seed) for seed in range(1, processes + 1)]
    name = f"{layout}, {ranks} ranks: "
    # On four thousand ranks the largest matrix is more than an even share, of work and of elements.
    is_even = ranks == min(SECONDS)
    balance, padding = (MAX_OVER_MEAN, PADDING[layout]) if is_even else (None, None)
    yield from rows_of(f"{name}seconds", min(each["seconds"] for each in told), SECONDS[ranks])
    yield from rows_of(f"{name}work, max over mean", told[0]["max_over_mean"], balance)
    yield from rows_of(f"{name}padding", told[0]["padding"], padding)
    yield from rows_of(f"{name}peak MiB", max(each["peak_mib"] for each in told), PEAK_MIB)
    yield from rows_of(f"{name}different plans", len({each["fingerprint"] for each in told}), 1)


def measure(quick: bool) -> Iterator[Row]:
    """Yield the rows of everything."""
    for ranks in SECONDS:
        for layout in ("flat", "owner"):
            yield from of_layout(layout, ranks, 2 if quick else 5)


if __name__ == "__main__":
    if "--one" in sys.argv:  # a process that plan_apart() starts
        print(json.dumps(plan(sys.argv[2], int(sys.argv[3]))))
    else:
        sys.exit(benchlib.main(measure, __doc__, "two processes each, not five"))
