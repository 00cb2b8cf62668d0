"""Measure Newton-Schulz: its time over that of its peers, and its errors against fp64.

    .venv/bin/python scripts/bench_newton_schulz.py [--quick] [--json FILE] [--markdown]

One thread. A ratio is the median over rounds of our processor time over that of a peer; each round
runs all in turn, so that a busy machine slows all. Peers, all called block by block: emerging-
optimizers' ``newton_schulz`` (stock), torch's, and the text-book lines (three temporaries a step).
A whole step (momentum, Newton-Schulz, size, weights) is held against that of their optimizers. An
error is the Frobenius norm of the difference to the same polynomial in fp64, over that of the
latter, beside that of emerging-optimizers on the same input.

The exit status is 1 if a limit is not met; a limit to reach does not decide it. On a processor
without bf16 products those of the peers run at a thirtieth of the rate of fp32: cases that would
then take too long are left out, and named.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import benchlib
import torch
from benchlib import Row, rows_of
from emerging_optimizers import orthogonalized_optimizers
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from emerging_optimizers.utils import fp32_matmul_precision
from torch.optim._muon import _zeropower_via_newtonschulz

from megatron_muon import Muon
from megatron_muon.bookkeeping.matrix import step_flops
from megatron_muon.orthogonalize.arithmetic import choose_arithmetic
from megatron_muon.orthogonalize.kernels import choose_kernel
from megatron_muon.orthogonalize.newton_schulz import Orthogonalization
from megatron_muon.testing.oracle import COEFFICIENTS, orthogonalize, relative_error

PRECISIONS = {"fp32": "highest", "bf16": "medium"}
LONGEST_ROUND_SECONDS = 3.0
SETTINGS = {"num_steps": 5, "coefficient_type": "quintic"}
STEPS = COEFFICIENTS["quintic"]
SPECTRA = ("random", "decaying", "power law", "rank one")

Blocks = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Blocks of one shape, and the largest ratios that are accepted.

    Attributes:
        rows: Rows of a block.
        columns: Columns of a block.
        count: Number of blocks.
        limits: Largest time over that of emerging-optimizers, by arithmetic.
        reach: What is aimed at, by arithmetic.
    """

    rows: int
    columns: int
    count: int
    limits: dict[str, float]
    reach: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        shape = f"{self.rows} x {self.columns}"
        return f"{self.count} blocks of {shape}" if self.count > 1 else shape

    def draw(self) -> list[torch.Tensor]:
        """Return the blocks, random."""
        generator = torch.Generator().manual_seed(0)
        return [
            torch.randn(self.rows, self.columns, generator=generator) for _ in range(self.count)
        ]


CASES = (
    Case(512, 2048, 1, {"fp32": 0.54, "bf16": 0.65}, {"fp32": 0.50}),
    Case(1024, 4096, 1, {"fp32": 0.49, "bf16": 0.58}, {"fp32": 0.45}),
    Case(1024, 1024, 1, {"fp32": 0.79, "bf16": 0.82}, {"fp32": 0.75}),
    Case(256, 1024, 1, {"fp32": 0.8, "bf16": 0.95}),
    Case(128, 128, 64, {"fp32": 1.05, "bf16": 0.45}),
    Case(32, 64, 256, {"fp32": 0.6, "bf16": 0.12}),
)
WHOLE_STEP = CASES[-1]
WHOLE_STEP_LIMIT = 0.10
LARGE = 1024 * 1024
"""Elements from which a case is timed in fewer rounds, and only against emerging-optimizers."""


def ours(xs: Blocks, precision: str, kernel: str = "auto") -> Blocks:
    """Orthogonalize blocks with this package, not scaled."""
    settings = Orthogonalization(
        **SETTINGS,
        scale_mode="shape_scaling",  # 1 for the blocks here, none of which is tall
        extra_scale_factor=1.0,
        matmul_precision=precision,
        kernel=kernel,
    )
    return settings.blocks(xs)


def stock(xs: Blocks, precision: str) -> Blocks:
    """Orthogonalize blocks with emerging-optimizers."""
    with fp32_matmul_precision(precision):
        return [newton_schulz(x, SETTINGS["num_steps"], SETTINGS["coefficient_type"]) for x in xs]


def of_torch(xs: Blocks, precision: str) -> Blocks:
    """Orthogonalize blocks with torch's Muon, which always multiplies in bf16."""
    assert precision == "medium"
    return [_zeropower_via_newtonschulz(x, (3.4445, -4.775, 2.0315), 5, 1e-7) for x in xs]


def text_book(xs: Blocks, precision: str) -> Blocks:
    """Orthogonalize blocks by the lines of https://kellerjordan.github.io/posts/muon/."""
    results = []
    for x in xs:
        X = x.bfloat16() if precision == "medium" else x
        X = X / (X.norm() + 1e-7)
        for a, b, c in STEPS:
            A = X @ X.T
            B = b * A + c * A @ A
            X = a * X + B @ X
        results.append(X)
    return results


def seconds(run: Callable[[], object]) -> float:
    """Time one call: this process's processor time, which other processes take least from."""
    start = time.process_time()
    run()
    return time.process_time() - start


def time_all(runs: dict[str, Callable[[], object]], num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each run in each round, after one that warms up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(num_rounds + 1):
        for name, run in runs.items():
            times[name].append(seconds(run))
    return {name: values[1:] for name, values in times.items()}


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of our time over theirs."""
    return statistics.median(m / t for m, t in zip(mine, theirs, strict=True))


def spectrum(kind: str, rows: int, columns: int) -> torch.Tensor:
    """Return a matrix, ``(rows, columns)`` fp32, whose singular values fall as asked."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if kind == "random":
        return draw(rows, columns).float()
    count = min(rows, columns)
    values = {
        "decaying": torch.logspace(0, -6, count, dtype=torch.float64),
        "power law": torch.arange(1, count + 1).double() ** -2,
        "rank one": (torch.arange(count) == 0).double(),
    }[kind]
    left, right = (torch.linalg.qr(draw(side, count))[0] for side in (rows, columns))
    return ((left * values) @ right.T).float()


def error_limit(kind: str, arithmetic: str, stock_error: float) -> float:
    """Return the largest error that is accepted of an input.

    On random matrices, whose error in bf16 is the smallest, the Gram form may double it.
    """
    if arithmetic == "fp32":
        return {"random": 2e-5, "rank one": 1e-3}.get(kind, 1e-4)
    return (2.5 if kind == "random" else 1.1) * stock_error


def affordable(precision: str) -> list[Case]:
    """Return the cases whose rounds emerging-optimizers can run in time, and name the others."""
    probe = Case(128, 128, 2, {})
    xs = probe.draw()
    stock(xs, precision)
    rate = probe.count * step_flops(128, 128) / seconds(lambda: stock(xs, precision))
    cases = []
    for case in CASES:
        estimate = case.count * step_flops(case.rows, case.columns) / rate
        if estimate < LONGEST_ROUND_SECONDS:
            cases.append(case)
        else:
            print(f"{case} left out: stock would take about {estimate:.0f} s with {precision}")
    return cases


def measure_times(case: Case, arithmetic: str, num_rounds: int) -> Iterator[Row]:
    """Time a case against every peer."""
    precision = PRECISIONS[arithmetic]
    kernel = choose_kernel(case.rows, case.columns, choose_arithmetic(precision, "cpu"), "cpu")
    peers = {"stock": stock}
    is_large = case.rows * case.columns >= LARGE
    if not is_large:
        peers |= {"text book": text_book}
        peers |= {"torch": of_torch} if arithmetic == "bf16" else {}
    xs = case.draw()
    runs = {name: (lambda peer=peer: peer(xs, precision)) for name, peer in peers.items()}
    runs["ours"] = lambda: ours(xs, precision)
    times = time_all(runs, max(5, num_rounds // 3) if is_large else num_rounds)
    note = (
        f"{1e3 * statistics.median(times['ours']):.1f} ms; {kernel.form}, {kernel.symmetric}, "
        f"{'batched' if kernel.batched else 'one by one'}"
    )
    over = ratio(times["ours"], times["stock"])
    name = f"time over stock, {arithmetic}, {case}"
    yield from rows_of(name, over, case.limits[arithmetic], case.reach.get(arithmetic), note)
    for peer in peers:
        if peer != "stock":
            value = ratio(times["ours"], times[peer])
            yield from rows_of(f"time over {peer}, {arithmetic}, {case}", value)


def measure_errors(case: Case, arithmetic: str) -> Iterator[Row]:
    """Compare a case with the polynomial in fp64, on spectra from easy to hard."""
    precision = PRECISIONS[arithmetic]
    for kind in SPECTRA:
        x = spectrum(kind, case.rows, case.columns)
        expected = orthogonalize(x.double(), STEPS)
        (got,), (other,) = ours([x], precision), stock([x], precision)
        stock_error = relative_error(other, expected)
        name = f"error, {arithmetic}, {kind}, {case.rows} x {case.columns}"
        limit = error_limit(kind, arithmetic, stock_error)
        note = f"stock {stock_error:.2e}"
        yield from rows_of(name, relative_error(got, expected), limit, note=note)


def measure_whole_step(num_rounds: int) -> Iterator[Row]:
    """Time a step of this package's ``Muon`` over those of the peers' optimizers."""

    def params() -> list[torch.nn.Parameter]:
        weights = [torch.nn.Parameter(x) for x in WHOLE_STEP.draw()]
        for weight, grad in zip(weights, reversed(WHOLE_STEP.draw()), strict=True):
            weight.grad = grad
        return weights

    groups = [{"params": params(), "use_muon": True}]
    runs = {
        "ours": Muon(groups, lr=1e-2).step,
        "stock's": orthogonalized_optimizers.Muon(params(), lr=1e-2, nesterov=True).step,
        "torch.optim.Muon's": torch.optim.Muon(params(), lr=1e-2).step,
    }
    times = time_all(runs, num_rounds)
    note = f"{1e3 * statistics.median(times['ours']):.1f} ms"
    for peer in runs:
        if peer != "ours":
            over = ratio(times["ours"], times[peer])
            name = f"whole step over {peer}, bf16, {WHOLE_STEP}"
            yield from rows_of(name, over, WHOLE_STEP_LIMIT, note=note)


def measure(quick: bool) -> Iterator[Row]:
    """Yield the rows of everything."""
    torch.set_num_threads(1)
    num_rounds = 7 if quick else 21
    print(f"one thread, bf16 as {choose_arithmetic('medium', 'cpu').name}")
    for arithmetic, precision in PRECISIONS.items():
        cases = affordable(precision)
        for case in cases:
            yield from measure_times(case, arithmetic, num_rounds)
        if WHOLE_STEP in cases and arithmetic == "bf16":
            yield from measure_whole_step(num_rounds)
        for case in cases:
            # In fp64 a large case takes as long as all its rounds.
            if not (quick and case.rows * case.columns >= LARGE):
                yield from measure_errors(case, arithmetic)


if __name__ == "__main__":
    quick = "7 rounds in place of 21, and no errors of the largest"
    sys.exit(benchlib.main(measure, __doc__, quick))
