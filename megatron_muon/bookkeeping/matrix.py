"""A logical matrix: its whole shape, how tensor parallelism cuts it, and its logical blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from megatron_muon.errors import PlanError


@dataclass(frozen=True, slots=True)
class LogicalBlock:
    """Rows of a logical matrix that are orthogonalized as a matrix of their own.

    The rows are ``count`` runs of ``run`` rows, the first at ``start``, one every ``period``
    rows. With query groups of q, k and v rows, for example, k is one run in each group::

        |q q q q k v|q q q q k v|      k: start 4, run 1, period 6, count 2

    Attributes:
        name: What the rows are, for the report.
        start: First row of the first run.
        run: Rows of a run.
        period: Rows from one run's start to the next.
        count: Number of runs.
    """

    name: str
    start: int
    run: int
    period: int
    count: int

    @property
    def num_rows(self) -> int:
        """Rows of the block."""
        return self.run * self.count

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.start + self.run}]/{self.period}x{self.count}"

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield each run's half-open range of rows."""
        for i in range(self.count):
            start = self.start + i * self.period
            yield start, start + self.run


@dataclass(frozen=True, slots=True)
class LogicalMatrix:
    """One weight before any sharding, and the shard of it that a tensor-parallel rank holds.

    Attributes:
        name: Name of the parameter, wrapper prefixes removed.
        shape: Whole shape ``(M, N)``.
        blocks: The parts that are orthogonalized apart; one for a plain matrix.
        tp_dim: Dimension tensor parallelism cuts, ``None`` if every rank holds the whole.
        tp_size: Ranks of the tensor-parallel group that cuts it.
        tp_stride: Parts stacked along ``tp_dim`` that are cut one by one: a rank's shard of
            stacked gate and up projections (stride 2) is its rows of each.
        expert_tp: Whether the expert tensor-parallel group cuts it.
        expert_parallel: Whether it is reduced over the expert data-parallel group.
    """

    name: str
    shape: tuple[int, int]
    blocks: tuple[LogicalBlock, ...]
    tp_dim: int | None = None
    tp_size: int = 1
    tp_stride: int = 1
    expert_tp: bool = False
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        runs = sorted(run for block in self.blocks for run in block.runs())
        if [*(start for start, _ in runs), self.shape[0]] != [0, *(end for _, end in runs)]:
            raise PlanError(
                f"{self.name}: blocks {self.blocks} do not cover its {self.shape[0]} rows once."
            )
        if self.tp_dim is not None and self.shape[self.tp_dim] % (self.tp_size * self.tp_stride):
            raise PlanError(
                f"{self.name}: dimension {self.tp_dim} of {self.shape} cannot be cut into "
                f"{self.tp_size} ranks x {self.tp_stride} parts."
            )

    @property
    def local_shape(self) -> tuple[int, int]:
        """Shape of one tensor-parallel shard."""
        if self.tp_dim is None:
            return self.shape
        rows, columns = self.shape
        return (
            (rows // self.tp_size, columns) if self.tp_dim == 0 else (rows, columns // self.tp_size)
        )

    @property
    def numel(self) -> int:
        """Elements of the whole matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def local_numel(self) -> int:
        """Elements of one shard."""
        rows, columns = self.local_shape
        return rows * columns

    def ns_flops(self, num_steps: int) -> int:
        """Flops of Newton-Schulz on every block, in the standard form."""
        return sum(num_steps * step_flops(block.num_rows, self.shape[1]) for block in self.blocks)


def step_flops(rows: int, columns: int) -> int:
    """Flops of one Newton-Schulz step on a ``(rows, columns)`` block: ``4 a^2 b + 2 a^3``."""
    short, long = sorted((rows, columns))
    return 4 * short * short * long + 2 * short**3


def whole(num_rows: int) -> tuple[LogicalBlock, ...]:
    """Return the one block of a plain matrix."""
    return (LogicalBlock("whole", 0, num_rows, num_rows, 1),)


def interleaved(widths: Mapping[str, int], num_rows: int, matrix: str) -> tuple[LogicalBlock, ...]:
    """Return one block for each part of a projection whose rows repeat ``widths`` in order.

    Args:
        widths: Rows of each part in one repetition (a query group), by the part's name, in order.
        num_rows: Rows of the logical matrix.
        matrix: Name of the parameter, for the error.

    Raises:
        PlanError: The rows are not a whole number of repetitions.
    """
    period = sum(widths.values())
    if num_rows % period:
        raise PlanError(
            f"{matrix}: {num_rows} rows are not a whole number of query groups of "
            f"{'+'.join(map(str, widths.values()))} rows ({', '.join(widths)}). Check the numbers "
            "of heads and groups, or give --muon-no-split-qkv."
        )
    starts = accumulate(widths.values(), initial=0)
    return tuple(
        LogicalBlock(name, start, width, period, num_rows // period)
        for start, (name, width) in zip(starts, widths.items(), strict=False)
    )
