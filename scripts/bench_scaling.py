"""Hold what ``megatron-muon plan`` predicts against what is counted and measured on 1 to 8 ranks.

    .venv/bin/python scripts/bench_scaling.py [--quick] [--json FILE] [--markdown]

A small GPT is planned from Megatron's flags, and then stepped by gloo ranks on the same grid, in
both layouts, with both exchanges and with a small budget. Newton-Schulz flops (in the standard
form), bytes sent over the data- and tensor-parallel groups and the most collectives of a rank have
to be those of the plan: rows count the ranks, or grids, where they are not. Bytes and calls are
counted by wrapping ``torch.distributed``.

The predicted time is that of the plan's parts that an optimizer step has: all but the reduction of
gradients. The rates are measured by the same ranks in turn with steps, in CPU time, since ranks
share cores: Newton-Schulz on the model's own blocks, momentum and master of one matrix, bytes and
calls of a collective. The prediction is held against the CPU time of the busiest rank, less what
its idle threads take while it waits: a row is the larger of predicted over measured and measured
over predicted. The exit status is 1 if a limit is not met.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import benchlib
import benchmodel
import torch
import torch.distributed as dist
from benchlib import Row, rows_of
from benchmodel import Size, Way

from megatron_muon.bookkeeping.costs import HARDWARE, Hardware
from megatron_muon.bookkeeping.matrix import step_flops
from megatron_muon.orthogonalize.newton_schulz import Orthogonalization
from megatron_muon.orthogonalize.update import advance_momentum, apply_update
from megatron_muon.planner.job import plan_job
from megatron_muon.planner.report import StageNumbers, make_report
from megatron_muon.planner.sizes import ParallelSizes
from megatron_muon.planner.sources import read_source
from megatron_muon.testing.law.build import find_muons
from megatron_muon.testing.ranks import run_ranks

FLAGS = """--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn}
--num-attention-heads {heads} --normalization RMSNorm --position-embedding-type rope
--untie-embeddings-and-output-weights --disable-bias-linear --bf16 --vocab-size {vocab}
--make-vocab-size-divisible-by 1 --transformer-impl local --optimizer muon
--use-distributed-optimizer --muon-layout {layout} --muon-exchange-dtype {exchange}
--muon-gather-budget-mib {budget}"""

COUNTED = Size(hidden=128, layers=8)
"""The model of which work is counted."""

GRIDS = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (4, 2), (2, 4), (1, 8))
"""Tensor- and data-parallel sizes."""

QUICK_GRIDS = ((1, 1), (2, 1), (1, 4), (2, 4))

CASES = (("owner", "fp32", 64.0), ("flat", "fp32", 64.0), ("flat", "bf16", 64.0),
         ("flat", "fp32", 0.25))  # fmt: skip
"""Layout, exchange and budget in MiB of each counted run."""

TIME_LIMIT = 1.25


@dataclass(frozen=True)
class Counted:
    """What a rank did in a step.

    Attributes:
        flops: Newton-Schulz flops.
        data_nbytes: Bytes sent over the data-parallel group.
        tensor_nbytes: Bytes sent over the tensor-parallel group.
        collectives: Collectives of the exchange.
    """

    flops: int
    data_nbytes: int
    tensor_nbytes: int
    collectives: int


# --------------------------------------------------------------------------------------------
# On a rank
# --------------------------------------------------------------------------------------------


def count(ways: Sequence[Way], size: Size, tp: int) -> list[Counted]:
    """Count a step of each optimizer."""
    with benchmodel.built_ways(ways, size, tp) as built:
        found = []
        for each in built:
            calls, _ = each.step_with(benchmodel.watched())
            exchange = [call for call in calls if call.name == "all_to_all_single"]
            sent = {group: sum(c.sent_nbytes for c in exchange if c.group == group)
                    for group in ("dp", "tp")}  # fmt: skip
            flops = sum(muon.account.newton_schulz_flops for muon in find_muons(each.optimizer))
            found.append(Counted(flops, sent["dp"], sent["tp"], len(exchange)))
        return found


@dataclass(frozen=True)
class Timed:
    """What a rank has measured.

    Attributes:
        seconds: CPU seconds of each step, less those of idle threads.
        machines: Rates measured before each step.
    """

    seconds: list[float]
    machines: list[Hardware]


def take_steps(way: Way, size: Size, tp: int, num_rounds: int) -> Timed:
    """Measure rates and steps in turn; a step before warms up."""
    with benchmodel.built_ways([way], size, tp) as (built,):
        built.step()
        idle = idle_share()
        found = Timed([], [])
        for _ in range(num_rounds):
            found.machines.append(rates(size, way.precision))
            start = time.perf_counter()
            seconds = built.step()
            found.seconds.append(seconds - idle * (time.perf_counter() - start))
        return found


def idle_share(wall_s: float = 0.3) -> float:
    """Return the CPU seconds that this process takes in a second in which it does nothing."""
    dist.barrier()
    start = time.perf_counter(), time.process_time()
    time.sleep(wall_s)
    return (time.process_time() - start[1]) / (time.perf_counter() - start[0])


def rates(size: Size, precision: str) -> Hardware:
    """Measure this rank while all others do the same, in CPU time."""
    hidden = size.hidden
    generator = torch.Generator().manual_seed(0)
    # A layer's: q, k, v and the output projection, and both of the MLP.
    shapes = [(hidden, hidden)] * 4 + [(4 * hidden, hidden), (hidden, 4 * hidden)]
    blocks = [torch.randn(shape, generator=generator) for shape in shapes]
    muon = Orthogonalization(
        num_steps=5, coefficient_type="quintic", scale_mode="spectral", extra_scale_factor=1.0,
        matmul_precision=precision,
    )  # fmt: skip
    flops = sum(5 * step_flops(*shape) for shape in shapes)
    master, momentum, grad = (torch.randn(4 * hidden * hidden) for _ in range(3))

    def elementwise() -> None:
        update = advance_momentum(momentum, grad, 0.9, nesterov=False).clone()
        apply_update(master, update, 0.01, 0.1)

    num_ranks = dist.get_world_size()
    sent, received = torch.ones(3 * 2**20), torch.ones(3 * 2**20)
    small = torch.ones(num_ranks), torch.ones(num_ranks)
    sent_nbytes = sent.nbytes * max(1, num_ranks - 1) / num_ranks
    dist.barrier()
    return replace(
        HARDWARE["cpu-gloo"],
        name="measured",
        flops_per_s=flops / cpu_seconds(lambda: muon.blocks(blocks, blocks)),
        # As many bytes as the planner counts: two of momentum and master, gradient and update.
        memory_nbytes_per_s=24 * master.numel() / cpu_seconds(elementwise),
        node_nbytes_per_s=sent_nbytes
        / cpu_seconds(lambda: dist.all_to_all_single(received, sent)),
        latency_s=cpu_seconds(lambda: dist.all_to_all_single(*small)),
    )  # fmt: skip


def cpu_seconds(run: Callable[[], object], num_rounds: int = 3) -> float:
    """Return the median CPU seconds of a call."""
    run()
    found = []
    for _ in range(num_rounds):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return max(median(found), 1e-7)


# --------------------------------------------------------------------------------------------
# All ranks
# --------------------------------------------------------------------------------------------


def plan(
    size: Size, tp: int, dp: int, layout: str, exchange: str, budget: float, machine: Hardware
) -> StageNumbers:
    """Plan the model from flags, as the command does."""
    flags = FLAGS.format(
        layers=size.layers, hidden=size.hidden, ffn=4 * size.hidden,
        heads=max(4, size.hidden // 64), vocab=size.vocab, layout=layout, exchange=exchange,
        budget=budget,
    )  # fmt: skip
    source = read_source(None, flags.split())
    settings = replace(source.settings, layout=layout, wrapping="provider")
    job = plan_job(source.model, ParallelSizes(tp=tp, dp=dp), settings)
    (stage,) = make_report(job, machine, with_fingerprint=False).stages
    return stage


def measure(quick: bool) -> Iterator[Row]:
    """Yield the rows of everything."""
    differences: dict[str, int] = {}
    for tp, dp in QUICK_GRIDS if quick else GRIDS:
        for what, number in unlike(tp, dp).items():
            differences[what] = differences.get(what, 0) + number
    for what, number in differences.items():
        yield from rows_of(f"unlike the plan on 1 to 8 ranks: {what}", number, 0)
    for products, precision in (("bf16", "medium"), ("fp32", "highest")):
        if not quick or products == "bf16":
            yield from times(products, precision, quick)


def unlike(tp: int, dp: int) -> dict[str, int]:
    """Return by quantity how many numbers of one grid are not those planned, and say which."""
    ways = [
        Way(f"{layout}, {exchange}, {budget:g} MiB", "owner", "medium", exchange=exchange,
            layout=layout, more=(("muon_gather_budget_mib", budget),))
        for layout, exchange, budget in CASES
    ]  # fmt: skip
    ranks = run_ranks(count, tp * dp, ways, COUNTED, tp)
    differences: dict[str, int] = {}
    for i, (way, case) in enumerate(zip(ways, CASES, strict=True)):
        stage = plan(COUNTED, tp, dp, *case, HARDWARE["cpu-gloo"])
        for what, found, planned in pairs_of(stage, [rank[i] for rank in ranks], way):
            wrong = sum(f != p for f, p in zip(found, planned, strict=True))
            differences[what] = differences.get(what, 0) + wrong
            if wrong:
                print(f"{what}, TP{tp}xDP{dp}, {way.name}: counted {found}, planned {planned}")
    return differences


def pairs_of(
    stage: StageNumbers, counted: Sequence[Counted], way: Way
) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yield what was counted beside what was planned, by rank or of the busiest one."""
    itemsize = 2 if way.exchange == "bf16" else 4
    loads = stage.loads
    yield "flops", [each.flops for each in counted], loads.flops
    for what, numels in (("data", loads.data_numel), ("tensor", loads.tensor_numel)):
        found = [getattr(each, f"{what}_nbytes") for each in counted]
        yield f"{what}-parallel bytes", found, [numel * itemsize for numel in numels]
    most = max(each.collectives for each in counted)
    yield "collectives", [most], [stage.work.collectives]


def times(products: str, precision: str, quick: bool) -> Iterator[Row]:
    """Yield predicted against measured CPU time on 1, 2 and 4 ranks."""
    size = Size()
    for tp, dp in GRIDS:
        if tp * dp > 4:
            continue
        way = Way("ours", "owner", precision)
        ranks = run_ranks(take_steps, tp * dp, way, size, tp, 2 if quick else 7, timeout_s=600)
        measured = median(max(step) for step in zip(*(r.seconds for r in ranks), strict=True))
        machine = median_of([each for rank in ranks for each in rank.machines])
        parts = plan(size, tp, dp, "owner", "fp32", 64.0, machine).seconds
        predicted = sum(seconds for part, seconds in parts.items() if part != "gradient_reduce")
        grid = f"TP{tp}xDP{dp}, {products} products"
        print(f"{grid}: {in_words(machine)}")
        yield from rows_of(f"CPU ms of a step, predicted, {grid}", 1e3 * predicted)
        yield from rows_of(f"CPU ms of a step, measured, {grid}", 1e3 * measured)
        off = max(predicted / measured, measured / predicted)
        yield from rows_of(f"predicted against measured, {grid}", off, TIME_LIMIT)


def median_of(machines: Sequence[Hardware]) -> Hardware:
    """Return the median of each measured rate."""
    names = ("flops_per_s", "memory_nbytes_per_s", "node_nbytes_per_s", "latency_s")
    return replace(
        machines[0], **{name: median(getattr(m, name) for m in machines) for name in names}
    )


def in_words(machine: Hardware) -> str:
    """Name the rates."""
    return (
        f"{machine.flops_per_s / 1e9:.0f} GFLOP/s in the standard form, "
        f"{machine.memory_nbytes_per_s / 1e9:.0f} GB/s of memory, "
        f"{machine.node_nbytes_per_s / 1e9:.2f} GB/s and {machine.latency_s * 1e6:.0f} us of gloo"
    )


if __name__ == "__main__":
    sys.exit(
        benchlib.main(measure, __doc__, "fewer grids and rounds, time with bf16 products only")
    )
