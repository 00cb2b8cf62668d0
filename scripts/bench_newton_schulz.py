"""Measure Newton-Schulz: its time over that of emerging-optimizers, and its errors in fp64.

    .venv/bin/python scripts/bench_newton_schulz.py [--quick] [--json FILE]

A ratio is the median over rounds of our time over that of ``newton_schulz`` of emerging-optimizers,
called block by block; each round times both in turn, so that a busy machine slows both. An error is
the Frobenius norm of the difference to the same polynomial in fp64, over that of the latter. Both
are shown for fp32 (``highest``) and bf16 (``medium``) products, and the errors beside those of
emerging-optimizers on the same input. The exit status is 1 if a limit is not met.

On a processor without bf16 products those of emerging-optimizers run at a thirtieth of the rate of
fp32. Cases that would then take too long are left out, and named.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from emerging_optimizers.utils import fp32_matmul_precision

from megatron_muon.bookkeeping.matrix import step_flops
from megatron_muon.orthogonalize.arithmetic import choose_arithmetic
from megatron_muon.orthogonalize.kernels import choose_kernel
from megatron_muon.orthogonalize.newton_schulz import Orthogonalization
from megatron_muon.testing.oracle import COEFFICIENTS, orthogonalize, relative_error

PRECISIONS = {"fp32": "highest", "bf16": "medium"}
LONGEST_ROUND_SECONDS = 3.0
SETTINGS = {"num_steps": 5, "coefficient_type": "quintic"}


@dataclass(frozen=True)
class Case:
    """Blocks of one shape, and the largest ratio that is accepted.

    Attributes:
        rows: Rows of a block.
        columns: Columns of a block.
        count: Number of blocks.
        limits: Largest ratio by arithmetic.
    """

    rows: int
    columns: int
    count: int
    limits: dict[str, float]

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
    Case(512, 2048, 1, {"fp32": 0.65, "bf16": 0.85}),
    Case(1024, 1024, 1, {"fp32": 0.85, "bf16": 0.9}),
    Case(256, 1024, 1, {"fp32": 0.8, "bf16": 0.95}),
    Case(128, 128, 64, {"fp32": 1.05, "bf16": 0.65}),
    Case(32, 64, 256, {"fp32": 0.6, "bf16": 0.2}),
)


@dataclass(frozen=True)
class Row:
    """One measured value.

    Attributes:
        name: What was measured.
        value: The value.
        limit: Largest value that is accepted.
        met: Whether it is.
    """

    name: str
    value: float
    limit: float
    met: bool


def ours(xs: Sequence[torch.Tensor], precision: str) -> list[torch.Tensor]:
    """Orthogonalize blocks with this package, not scaled."""
    settings = Orthogonalization(
        **SETTINGS,
        scale_mode="shape_scaling",  # 1 for the blocks here, none of which is tall
        extra_scale_factor=1.0,
        matmul_precision=precision,
    )
    return settings.blocks(xs)


def stock(xs: Sequence[torch.Tensor], precision: str) -> list[torch.Tensor]:
    """Orthogonalize blocks with emerging-optimizers."""
    with fp32_matmul_precision(precision):
        return [newton_schulz(x, SETTINGS["num_steps"], SETTINGS["coefficient_type"]) for x in xs]


def seconds(run: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def time_ratio(case: Case, precision: str, num_rounds: int) -> tuple[float, float]:
    """Return the median of our time over stock's, and our median seconds."""
    xs = case.draw()
    pairs = []
    for _ in range(num_rounds + 1):
        mine = seconds(lambda: ours(xs, precision))
        pairs.append((mine, seconds(lambda: stock(xs, precision))))
    pairs = pairs[1:]  # the first round warms up
    return statistics.median(m / s for m, s in pairs), statistics.median(m for m, _ in pairs)


def spectrum(kind: str, rows: int, columns: int) -> torch.Tensor:
    """Return a matrix, ``(rows, columns)`` fp32, whose singular values fall as asked."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if kind == "random":
        return draw(rows, columns).float()
    count = min(rows, columns)
    values = torch.logspace(0, -6, count, dtype=torch.float64)
    if kind == "rank one":
        values[1:] = 0
    left, right = (torch.linalg.qr(draw(side, count))[0] for side in (rows, columns))
    return ((left * values) @ right.T).float()


def error_limit(kind: str, arithmetic: str, stock_error: float) -> float:
    """Return the largest error that is accepted of an input.

    On random matrices, whose error in bf16 is the smallest, the Gram form may double it.
    """
    if arithmetic == "fp32":
        return 2e-5 if kind == "random" else 1e-3
    return (2.5 if kind == "random" else 1.02) * stock_error


def report(name: str, value: float, limit: float, note: str) -> Row:
    """Print a row and return it."""
    row = Row(name, value, limit, value <= limit)
    verdict = "met" if row.met else "NOT MET"
    print(f"{name:48} {value:9.2e}  limit {limit:8.2e}  {verdict:8} {note}", flush=True)
    return row


def affordable(precision: str, num_rounds: int) -> list[Case]:
    """Return the cases whose rounds emerging-optimizers can run in time, and name the others."""
    probe = CASES[3]
    xs = probe.draw()[:2]
    stock(xs, precision)
    rate = len(xs) * step_flops(probe.rows, probe.columns) / seconds(lambda: stock(xs, precision))
    cases = []
    for case in CASES:
        estimate = num_rounds * case.count * step_flops(case.rows, case.columns) / rate
        if estimate < num_rounds * LONGEST_ROUND_SECONDS:
            cases.append(case)
        else:
            print(f"{case} left out: stock would take about {estimate:.0f} s with {precision}")
    return cases


def measure(num_rounds: int) -> list[Row]:
    """Measure everything, printing each row."""
    rows = []
    for arithmetic, precision in PRECISIONS.items():
        product = choose_arithmetic(precision, "cpu")
        cases = affordable(precision, num_rounds)
        for case in cases:
            ratio, median = time_ratio(case, precision, num_rounds)
            kernel = choose_kernel(case.rows, case.columns, product, "cpu")
            note = (
                f"{1e3 * median:.1f} ms; {kernel.form}, {kernel.symmetric}, "
                f"{'batched' if kernel.batched else 'one by one'}"
            )
            name = f"time over stock, {arithmetic}, {case}"
            rows.append(report(name, ratio, case.limits[arithmetic], note))
        for case in cases:
            for kind in ("random", "decaying", "rank one"):
                x = spectrum(kind, case.rows, case.columns)
                expected = orthogonalize(x.double(), COEFFICIENTS[SETTINGS["coefficient_type"]])
                (got,), (other,) = ours([x], precision), stock([x], precision)
                stock_error = relative_error(other, expected)
                name = f"error, {arithmetic}, {kind}, {case.rows} x {case.columns}"
                limit = error_limit(kind, arithmetic, stock_error)
                note = f"stock {stock_error:.2e}"
                rows.append(report(name, relative_error(got, expected), limit, note))
    return rows


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="7 rounds in place of 21")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    args = parser.parse_args()
    arithmetic = choose_arithmetic("medium", "cpu").name
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, bf16 as {arithmetic}")
    rows = measure(7 if args.quick else 21)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
