"""Measure how fast a model of a trillion parameters is planned in one grid of ranks.

    .venv/bin/python scripts/bench_planning.py [--quick] [--json FILE]

Kimi-K2's 46,507 matrices are planned in both layouts, each time by several processes whose hashes
are seeded apart, as those of a job are. Shown are the seconds of processor time of the fastest, the
largest rank's Newton-Schulz work over the mean, the most memory that a process took, and how many
different plans there were. The exit status is 1 if a limit is not met.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from bench_rows import Row, finish

from megatron_muon.planner.job import PlanSettings, plan_job
from megatron_muon.planner.models import BUILT_IN
from megatron_muon.planner.sizes import ParallelSizes

MODEL = "kimi-k2"
SECONDS = {1024: 1.0, 4096: 5.0}
MAX_OVER_MEAN = {"flat": 1.01, "owner": 1.05}
"""In the owner layout a matrix stays where it lies while that costs no rank more than that."""

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


def rows_of(layout: str, ranks: int, processes: int) -> list[Row]:
    """Measure one layout on that many ranks."""
    told = [plan_apart(layout, ranks, seed) for seed in range(1, processes + 1)]
    name = f"{layout}, {ranks} ranks: "
    # A rank of four thousand has eleven matrices, which need not come out even.
    balance = MAX_OVER_MEAN[layout] if ranks == min(SECONDS) else None
    return [
        Row(f"{name}seconds", min(each["seconds"] for each in told), SECONDS[ranks]),
        Row(f"{name}work, max over mean", told[0]["max_over_mean"], balance),
        Row(f"{name}peak MiB", max(each["peak_mib"] for each in told), PEAK_MIB),
        Row(f"{name}different plans", len({each["fingerprint"] for each in told}), 1),
    ]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two processes each, not five")
    parser.add_argument("--json", type=Path, help="write the rows to a file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        layout, ranks = options.one
        print(json.dumps(plan(layout, int(ranks))))
        return 0
    rows = [
        row
        for ranks in SECONDS
        for layout in ("flat", "owner")
        for row in rows_of(layout, ranks, 2 if options.quick else 5)
    ]
    return finish(rows, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
