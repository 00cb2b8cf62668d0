"""Measure balance, padding and exchange of the plans of known models, from shapes alone.

    .venv/bin/python scripts/bench_balance.py [--quick] [--json FILE] [--markdown]

- Work: the busiest rank's Newton-Schulz flops over an even share of all.
- Padding: elements of the matrices' buffers over those of the matrices. In the owner layout it has
  a limit wherever a buffer has two matrices or more for each rank, in the flat one everywhere.
- Exchange, of the flat layout: the bytes that the busiest rank sends between data-parallel ranks
  over those of gathering whole buckets in fp32, and over the mean of all ranks; the latter has a
  limit where there is a matrix for every rank, since a rank without one has less to send.

Where the limit is out of reach for any layout of whole matrices, since ranks times the largest one
is more, the row says so and has that bound for its limit. The exit status is 1 if a limit is not
met.
"""

import sys
from collections.abc import Iterator
from functools import cache

import benchlib
from benchlib import Row, rows_of

from megatron_muon.bookkeeping.costs import HARDWARE
from megatron_muon.bookkeeping.stage import Buffer, max_over_mean, padding_of
from megatron_muon.planner.job import PlanSettings, plan_job
from megatron_muon.planner.models import BUILT_IN
from megatron_muon.planner.report import JobReport, make_report
from megatron_muon.planner.sizes import ParallelSizes

LAYOUTS = ("owner", "flat")
Case = tuple[str, int, int]
"""Model, tensor- and data-parallel size."""

WORK = 1.05
EVEN: list[Case] = [
    ("llama3-8b", 4, 4), ("llama3-8b", 8, 8), ("llama3-70b", 8, 8), ("llama3-70b", 8, 16),
    ("qwen3-32b", 8, 16),
]  # fmt: skip
"""No matrix is larger than an even share, so that whole matrices come out even."""

LARGE: list[Case] = [("llama3-8b", 1, 256), ("llama3-70b", 8, 32), ("qwen3-32b", 8, 32)]
"""One matrix is more than an even share, so that only shared blocks (``--muon-share-blocks``) come
out even; without them it is shown and has no limit."""
SHARED_WORK = 1.30

OWNER_PADDING, FLAT_PADDING = 1.05, 1.02
PADDED: list[Case] = [
    (name, tp, dp)
    for name in ("gpt2-124m", "llama3-8b", "llama3-70b", "qwen3-32b")
    for tp in (1, 4, 8)
    for dp in (2, 4, 8, 16, 32, 64, 128)
    if name != "gpt2-124m" or tp < 8  # twelve heads
]
STAGE = {"pp": 8, "ep": 64, "dp": 128, "last_layers": 5}
"""Sizes for models of experts."""

EXCHANGE = {8: 0.26, 64: 0.05}
EXCHANGE_MAX_OVER_MEAN = 1.2
EXCHANGED: list[Case] = [
    (name, tp, dp)
    for name in ("llama3-8b", "llama3-70b", "qwen3-32b")
    for tp in (1, 8)
    for dp in EXCHANGE
]


@cache
def report_of(name: str, layout: str, share_blocks: bool = False, **sizes: int) -> JobReport:
    """Plan a job and add up its numbers."""
    settings = PlanSettings(layout=layout, share_blocks=share_blocks)
    job = plan_job(BUILT_IN[name], ParallelSizes(**sizes), settings)
    return make_report(job, HARDWARE["h100"], with_fingerprint=False)


def said(case: Case) -> str:
    """Name a case."""
    name, tp, dp = case
    return f"{name} TP{tp} DP{dp}"


def work_rows() -> Iterator[Row]:
    """Yield the busiest rank's work over an even share."""
    for cases, shared, limit in (
        (EVEN, False, WORK), (LARGE, False, None), (LARGE, True, SHARED_WORK),
    ):  # fmt: skip
        for case in cases:
            name, tp, dp = case
            for layout in LAYOUTS:
                report = report_of(name, layout, shared, tp=tp, dp=dp)
                what = f"work{', shared blocks' * shared}, {said(case)}, {layout}"
                yield from rows_of(what, report.worst.over_perfect, limit)


def padding_rows(cases: list[Case]) -> Iterator[Row]:
    """Yield the padding of the buffers of matrices."""
    for case in cases:
        name, tp, dp = case
        for layout in LAYOUTS:
            (buffer,) = buffers_of(report_of(name, layout, tp=tp, dp=dp))
            yield from _padding_row(f"padding, {said(case)}, {layout}", layout, buffer)
    for name in ("deepseek-v3", "kimi-k2"):
        for layout in LAYOUTS:
            buffers = buffers_of(report_of(name, layout, **STAGE))
            for is_expert in (False, True):
                kind = "experts" if is_expert else "others"
                worst = max((b for b in buffers if b.is_expert == is_expert), key=padding_of_one)
                row = f"padding, {name} PP8 EP64 DP128, worst stage, {kind}, {layout}"
                yield from _padding_row(row, layout, worst)


def padding_of_one(buffer: Buffer) -> float:
    """Return the padding of one buffer."""
    return padding_of([buffer])


def buffers_of(report: JobReport) -> list[Buffer]:
    """Return the buffers of matrices."""
    return [b for stage in report.stages for b in stage.stage.buffers if b.of_matrices]


def _padding_row(name: str, layout: str, buffer: Buffer) -> Iterator[Row]:
    if layout == "flat":
        yield from rows_of(name, padding_of_one(buffer), FLAT_PADDING)
        return
    numels = [end - start for start, end, _ in buffer.layout.places]
    if len(numels) < 2 * buffer.num_shards:
        return
    least = buffer.num_shards * max(numels) / sum(numels)
    if least > OWNER_PADDING:
        name = f"{name} (at least {least:.3f})"
    limit = max(OWNER_PADDING, round(least + 5e-4, 3))
    yield from rows_of(name, padding_of_one(buffer), limit)


def exchange_rows() -> Iterator[Row]:
    """Yield the bytes of the flat layout's exchange."""
    for case in EXCHANGED:
        name, tp, dp = case
        stage = report_of(name, "flat", tp=tp, dp=dp).worst
        share = stage.work.data_nbytes / stage.whole_gather_nbytes
        yield from rows_of(f"exchange of whole gather, {said(case)}", share, EXCHANGE[dp])
        is_idle = len(stage.stage.first_plan.matrices) < tp * dp
        yield from rows_of(
            f"exchange, max over mean, {said(case)}",
            max_over_mean(stage.loads.data_numel),
            reach=None if is_idle else EXCHANGE_MAX_OVER_MEAN,
        )


def measure(quick: bool) -> Iterator[Row]:
    """Yield the rows of everything."""
    yield from work_rows()
    yield from padding_rows([case for case in PADDED if not quick or case[1] != 4])
    yield from exchange_rows()


if __name__ == "__main__":
    sys.exit(benchlib.main(measure, __doc__, "padding for fewer sizes"))
