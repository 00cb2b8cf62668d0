"""Measure the peak scratch of an optimizer step over that of Megatron's ``duplicated`` Muon.

    .venv/bin/python scripts/bench_memory.py [--quick] [--json FILE] [--markdown]

Scratch is the most bytes that torch's allocator had handed out at one moment of a step above what
there was before it, on the busiest rank: the profiler's allocation events, added up. State is made
by a step before, and what this package keeps from step to step to use again is given up first, so
that it counts. gloo's threads hold a buffer until they get a core again after its collective; they
are given time for it. Weights are gathered later, as ``--overlap-param-gather`` does: that takes
the same of both, and no part of it is the optimizer's.
The model and the optimizers are those of ``bench_step.py``; its largest matrix has 2^20 elements,
so that MiB are also bytes for each of these.

``--muon-gather-budget-mib`` bounds scratch, so three budgets are measured: that of one largest
matrix, as is the default of 64 MiB for one of 4096 x 4096; one from which micro-groups overlap; and
the default, which has room for all matrices of the model here. The limit is that of the first.
Scratch must not depend on the number of matrices: of the first, that of twice the layers is held
against it. The exit status is 1 if a limit is not met; a limit to reach does not decide it.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from unittest import mock

import benchlib
import benchmodel
import torch.distributed as dist
from benchlib import Row, rows_of
from benchmodel import Size, Way, stock
from torch.profiler import ProfilerActivity, profile

from megatron_muon.testing.law.build import find_muons
from megatron_muon.testing.ranks import run_ranks

NUM_RANKS = 4
PRECISIONS = {"bf16": "medium", "fp32": "highest"}
HIDDEN = 512
PATIENCE_S = 0.01
LIMIT, REACH = 0.65, 0.5
GROWTH_LIMIT = 1.05
"""Largest accepted ratio of the scratch of twice the layers."""

MIB = 2**20
LARGEST_MIB = 4 * HIDDEN * 4 * HIDDEN / MIB
"""The largest matrix in fp32."""
OVERLAPPED_MIB = 4 * LARGEST_MIB
"""Of two micro-groups that share the budget each sends and receives such a matrix on every rank."""


@contextlib.contextmanager
def allocations() -> Iterator[list[int]]:
    """Yield a list that in the end has the bytes of each allocation and, negative, of each free."""
    found: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    found += [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def peak_of(nbytes: Sequence[int]) -> int:
    """Return the largest sum of the first allocations and frees, 0 if there are none."""
    live = peak = 0
    for each in nbytes:
        live += each
        peak = max(peak, live)
    return peak


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """After each exchange let gloo's threads go on until they have let go of its buffers."""
    wait = dist.Work.wait

    def wait_longer(work: dist.Work, *args: object) -> bool:
        done: bool = wait(work, *args)
        time.sleep(PATIENCE_S)
        return done

    with mock.patch.object(dist.Work, "wait", wait_longer):
        yield


def scratch(ways: Sequence[Way], size: Size, tp: int) -> dict[str, int]:
    """Return the peak scratch of a step of each optimizer on this rank."""
    with benchmodel.built_ways(ways, size, tp) as built:
        found = {}
        for each in built:
            each.step()
            for muon in find_muons(each.optimizer):
                muon.close()
            with patient():
                nbytes, _ = each.step_with(allocations())
            found[each.way.name] = peak_of(nbytes)
        return found


def measure(quick: bool) -> Iterator[Row]:
    """Yield the rows of everything."""
    for products in ("bf16",) if quick else PRECISIONS:
        for tp in (4, 1) if quick else (4, 2, 1):
            yield from of_grid(tp, products, quick)


def of_grid(tp: int, products: str, quick: bool) -> Iterator[Row]:
    """Yield the rows of one grid."""
    precision = PRECISIONS[products]
    least, overlapped, default = (
        Way(f"ours, {name}", "owner", precision, more=(("muon_gather_budget_mib", mib),))
        for name, mib in (
            ("one matrix", LARGEST_MIB), ("overlapped", OVERLAPPED_MIB), ("default", None),
        )
    )  # fmt: skip
    ways = [stock("duplicated", precision), least, overlapped, default]
    layers = (4, 8) if quick else (8, 16)
    found = {}
    for count in layers:
        size = Size(HIDDEN, count, gathers_later=True)
        ranks = run_ranks(scratch, NUM_RANKS, ways, size, tp, timeout_s=600)
        found[count] = {way.name: max(rank[way.name] for rank in ranks) for way in ways}
    grid = f"TP{tp}xDP{NUM_RANKS // tp}, {products} products"
    fewer, more = (found[count] for count in layers)
    for name, nbytes in fewer.items():
        yield from rows_of(f"scratch MiB, {name}, {grid}", nbytes / MIB)
    for way in (least, overlapped, default):
        limits = (LIMIT, REACH) if way is least else ()
        value = fewer[way.name] / fewer["stock duplicated"]
        yield from rows_of(f"scratch over duplicated, {way.name}, {grid}", value, *limits)
    growth = more[least.name] / fewer[least.name]
    what = f"scratch of {layers[1]} over {layers[0]} layers, {least.name}, {grid}"
    yield from rows_of(what, growth, GROWTH_LIMIT)


if __name__ == "__main__":
    sys.exit(benchlib.main(measure, __doc__, "4 and 8 layers in place of 8 and 16; bf16 products"))
