"""Measure an optimizer step on four ranks: its CPU time and traffic over those of Megatron's Muon.

    .venv/bin/python scripts/bench_step.py [--quick] [--json FILE] [--markdown]

A GPT of 8 layers of 512, bf16 weights and fp32 gradients, on four gloo ranks of one thread each.
Megatron's own Muon and this package's are built by ``get_megatron_optimizer`` over layer-wise DDP
and take steps in turn on the same gradients; Megatron's is built and stepped with none of this
package's names in Megatron. A step is all of ``optimizer.step()``, with the gather of weights. Its
time is the CPU time of the busiest rank, gloo's threads included, and a ratio is the median over
rounds of ours over the other's of the same round.

Traffic is counted by wrapping ``torch.distributed``: the collectives over the tensor-parallel group
and the bytes that a rank has to receive in them. In a flat layout the exchange is held against a
gather of whole buckets in fp32 to every rank. With ``--muon-ns-kernel exact``, where there is such
a flag, every master has to be bit for bit that of Megatron's ``duplicated``. The exit status is 1
if a limit is not met; limits to reach do not decide it.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import benchlib
import benchmodel
import torch.distributed as dist
from benchlib import Row, rows_of
from benchmodel import Call, Size, Way, stock

from megatron_muon.orthogonalize.arithmetic import choose_arithmetic
from megatron_muon.testing.ranks import run_ranks

NUM_RANKS = 4
PRECISIONS = {"bf16": "medium", "fp32": "highest"}
"""``--muon-fp32-matmul-prec`` by what products are computed in."""

EXACT_LIMIT = 0.30


@dataclass(frozen=True)
class Limits:
    """Largest ratios that are accepted, and those to reach.

    Attributes:
        duplicated: Of Megatron's ``duplicated``.
        reach_duplicated: The same, to reach.
        distributed: Of Megatron's ``distributed``, ``None`` for any.
        reach_distributed: The same, to reach.
    """

    duplicated: float
    reach_duplicated: float
    distributed: float | None = None
    reach_distributed: float | None = None


LIMITS = {
    (4, "bf16"): Limits(0.23, 0.20, 0.33, 0.30),
    (4, "fp32"): Limits(0.23, 0.20, 0.33, 0.30),
    (2, "bf16"): Limits(0.43, 0.40),
    (2, "fp32"): Limits(0.43, 0.40),
    (1, "bf16"): Limits(0.79, 0.75),
    (1, "fp32"): Limits(0.69, 0.66),
}
"""By tensor-parallel size and products."""


@dataclass(frozen=True)
class Timed:
    """What a rank has measured.

    Attributes:
        seconds: CPU seconds of each round by optimizer.
        differing: Parameters of the exact optimizer that are not bit for bit those of Megatron's
            ``duplicated``; ``None`` without such an optimizer.
    """

    seconds: dict[str, list[float]]
    differing: list[str] | None


# --------------------------------------------------------------------------------------------
# On a rank
# --------------------------------------------------------------------------------------------


def take_steps(ways: Sequence[Way], size: Size, tp: int, num_rounds: int) -> Timed:
    """Step all optimizers in turn; the first round warms up."""
    with benchmodel.built_ways(ways, size, tp) as built:
        seconds: dict[str, list[float]] = {way.name: [] for way in ways}
        for round_ in range(num_rounds + 1):
            for each in built:
                taken = each.step()
                if round_:
                    seconds[each.way.name].append(taken)
        by_name = {each.way.name: each for each in built}
        exact = by_name.get("exact")
        if exact is None:
            return Timed(seconds, None)
        return Timed(seconds, benchmodel.differing(by_name["stock duplicated"], exact))


def count(ways: Sequence[Way], size: Size, tp: int) -> dict[str, list[Call]]:
    """Return the collectives of the second step of each optimizer."""
    with benchmodel.built_ways(ways, size, tp) as built:
        found = {}
        for each in built:
            each.step()
            found[each.way.name], _ = each.step_with(benchmodel.watched())
        return found


def count_flat(way: Way, size: Size) -> tuple[int, int]:
    """Return the bytes this rank receives in the exchange, and in a gather of whole buckets."""
    with benchmodel.built_ways([way], size, 1) as (built,):
        calls, _ = built.step_with(benchmodel.watched())
        nbytes = sum(call.nbytes for call in calls if call.name == "all_to_all_single")
        numel = sum(
            param.numel()
            for name, param in built.chunk.named_parameters()
            if "linear" in name and param.ndim == 2
        )
        share = dist.get_world_size() - 1, dist.get_world_size()
        return nbytes, 4 * numel * share[0] // share[1]


# --------------------------------------------------------------------------------------------
# All ranks
# --------------------------------------------------------------------------------------------


def measure(quick: bool) -> Iterator[Row]:
    """Yield the rows of everything."""
    for products, precision in PRECISIONS.items():
        if choose_arithmetic(precision, "cpu").rounds:
            print(f"{products} left out: this processor has no bf16 products, so that those of "
                  "emerging-optimizers run at a thirtieth of the rate")  # fmt: skip
            continue
        for tp in (1,) if quick and products == "fp32" else (4, 2, 1):
            yield from times(tp, products, quick)
    yield from traffic()
    for num_ranks in (8,) if quick else (4, 8):
        yield from flat_traffic(num_ranks)


def ways_of(tp: int, products: str, quick: bool) -> list[Way]:
    """Return the optimizers that take turns."""
    precision = PRECISIONS[products]
    ways = [stock("duplicated", precision)]
    if tp > 1 and not quick:
        ways += [stock("distributed", precision), stock("blockwise", precision)]
    ways.append(Way("ours", "owner", precision))
    if not quick:
        ways.append(Way("ours, bf16 exchange", "owner", precision, exchange="bf16"))
    if tp == NUM_RANKS:
        ways.append(Way("exact", "owner", precision, more=(("muon_ns_kernel", "exact"),)))
    return ways


def times(tp: int, products: str, quick: bool) -> Iterator[Row]:
    """Yield the CPU time of a step on one grid."""
    grid = f"TP{tp}xDP{NUM_RANKS // tp}, {products} products"
    ways = ways_of(tp, products, quick)
    size, num_rounds = Size(layers=4 if quick else 8), 2 if quick else 9
    ranks = run_ranks(take_steps, NUM_RANKS, ways, size, tp, num_rounds, timeout_s=1200)
    busiest = {
        way.name: [max(all_) for all_ in zip(*(r.seconds[way.name] for r in ranks), strict=True)]
        for way in ways
    }
    for name, seconds in busiest.items():
        yield from rows_of(f"CPU ms of a step, {name}, {grid}", 1e3 * median(seconds))
    limits = LIMITS[tp, products]
    for name in busiest:
        if name.startswith("ours"):
            own = limits if name == "ours" else None
            yield from _ratios(name, busiest, grid, own)
    if "exact" in busiest:
        yield from rows_of(f"exact over duplicated, {grid}", ratio("exact", busiest), EXACT_LIMIT)
        num_differing = len({name for rank in ranks for name in rank.differing or ()})
        yield from rows_of(f"exact: parameters unlike duplicated's, {grid}", num_differing, 0)


def _ratios(
    name: str, busiest: dict[str, list[float]], grid: str, limits: Limits | None
) -> Iterator[Row]:
    duplicated = (limits.duplicated, limits.reach_duplicated) if limits else ()
    yield from rows_of(f"{name} over duplicated, {grid}", ratio(name, busiest), *duplicated)
    if "stock distributed" in busiest:
        distributed = (limits.distributed, limits.reach_distributed) if limits else ()
        value = ratio(name, busiest, "stock distributed")
        yield from rows_of(f"{name} over distributed, {grid}", value, *distributed)
    if "stock blockwise" in busiest:
        value = ratio(name, busiest, "stock blockwise")
        yield from rows_of(f"{name} over blockwise, {grid}", value)


def ratio(
    name: str, busiest: dict[str, list[float]], other: str = "stock duplicated"
) -> float:  # fmt: skip
    """Return the median over rounds of one optimizer's time over another's."""
    pairs = zip(busiest[name], busiest[other], strict=True)
    return median(mine / its for mine, its in pairs)


def traffic() -> Iterator[Row]:
    """Yield the tensor-parallel collectives and bytes of a step with fp32 products.

    With bf16 products Megatron's ``distributed`` reduces half the bytes.
    """
    ways = [
        stock("duplicated", "highest"), stock("distributed", "highest"),
        Way("ours", "owner", "highest"),
        Way("ours, bf16 exchange", "owner", "highest", exchange="bf16"),
    ]  # fmt: skip
    calls: dict[tuple[int, int], dict[str, int]] = {}
    nbytes: dict[str, float] = {}
    for tp, layers in ((4, 4), (4, 8), (1, 4)):
        ranks = run_ranks(count, NUM_RANKS, ways, Size(hidden=128, layers=layers), tp)
        calls[tp, layers] = {
            way.name: max(sum(c.group == "tp" for c in rank[way.name]) for rank in ranks)
            for way in ways
        }
        if (tp, layers) == (4, 8):
            nbytes = {
                way.name: max(sum(c.nbytes for c in r[way.name] if c.group == "tp") for r in ranks)
                for way in ways
            }
    for (tp, layers), numbers in calls.items():
        for name, number in numbers.items():
            limit = None if name.startswith("stock") else 2 if tp > 1 else 0
            what = f"tensor-parallel collectives, {name}, TP{tp}, {layers} layers"
            yield from rows_of(what, number, limit)
    for name in ("ours", "ours, bf16 exchange"):
        halves = name != "ours"
        for other, limit in (("duplicated", 0.26), ("distributed", 0.11)):
            value = nbytes[name] / nbytes[f"stock {other}"]
            what = f"tensor-parallel bytes, {name}, over {other}, TP4"
            yield from rows_of(what, value, limit if halves else None)


def flat_traffic(num_ranks: int) -> Iterator[Row]:
    """Yield the bytes of the exchange of a flat layout over those of a gather of whole buckets."""
    way = Way("flat", "owner", "medium", layout="flat")
    # Buckets of one matrix or two: every rank has a piece of every matrix.
    size = Size(hidden=128, layers=8, bucket_numel=60_000)
    ranks = run_ranks(count_flat, num_ranks, way, size)
    own, whole = (sum(each) for each in zip(*ranks, strict=True))
    limit = 0.26 if num_ranks == 8 else None
    yield from rows_of(
        f"flat: exchange over a gather of buckets, DP{num_ranks}", own / whole, limit
    )
    busiest = max(each[0] / each[1] for each in ranks)
    yield from rows_of(f"flat: the same of the busiest rank, DP{num_ranks}", busiest)


if __name__ == "__main__":
    sys.exit(
        benchlib.main(
            measure,
            __doc__,
            "4 layers, 2 rounds, one of Megatron's modes, fp32 products on one grid",
        )
    )
