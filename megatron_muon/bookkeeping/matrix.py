"""A logical matrix: its whole shape, how tensor parallelism cuts it, and its logical blocks.

What a fused weight consists of is always said in the same words, those of :class:`LogicalBlock`:
q, k, v and an output gate in every query group, gate and up, single heads, stacked experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from megatron_muon.errors import ConfigurationError, PlanError

HEAD_SUFFIX = " head"
"""Ends the name of a block whose matrices are single heads."""


@dataclass(frozen=True, slots=True)
class LogicalBlock:
    """Rows or columns of a logical matrix that are orthogonalized apart from the rest.

    The block's lines (rows for ``dim`` 0, columns for ``dim`` 1) are ``count`` runs of ``run``
    lines, the first at ``start``, one every ``period`` lines. With query groups of q, k and v rows,
    for example, k is one run in each group::

        |q q q q k v|q q q q k v|      k: start 4, run 1, period 6, count 2

    The block's lines in their order are ``batch`` equal matrices, each of which is orthogonalized
    by itself. With heads of two rows, q of the same example is four of them::

        |A A B B k v|C C D D k v|      q: start 0, run 4, period 6, count 2, batch 4

    Attributes:
        name: What the lines are, for the report.
        start: First line of the first run.
        run: Lines of a run.
        period: Lines from one run's start to the next.
        count: Number of runs.
        dim: Dimension of the matrix that is cut: 0 for rows, 1 for columns.
        batch: Matrices that the lines are; a run has a whole number of them, or each of them a
            whole number of runs.
    """

    name: str
    start: int
    run: int
    period: int
    count: int
    dim: int = 0
    batch: int = 1

    def __post_init__(self) -> None:
        if self.dim not in (0, 1) or min(self.run, self.count, self.batch) < 1:
            raise PlanError(f"{self!r}: dim is 0 or 1, run, count and batch are positive.")
        if self.count % self.batch and (self.batch % self.count or self.run % self.matrices_a_run):
            raise PlanError(
                f"{self}: {self.count} runs of {self.run} lines are not {self.batch} equal "
                "matrices, each a part of one run or a number of whole runs."
            )

    @property
    def num_lines(self) -> int:
        """Rows, or columns for ``dim`` 1, of the block's matrices together."""
        return self.run * self.count

    @property
    def matrices_a_run(self) -> int:
        """Matrices that a run is cut into, 1 where a matrix has one run or several."""
        return max(1, self.batch // self.count)

    @property
    def runs_a_matrix(self) -> int:
        """Runs that a matrix consists of, 1 where it is a run or a part of one."""
        return max(1, self.count // self.batch)

    def __str__(self) -> str:
        columns = "columns " if self.dim else ""
        batch = f"={self.batch}" if self.batch > 1 else ""
        runs = f"[{self.start}:{self.start + self.run}]/{self.period}x{self.count}"
        return f"{self.name}{columns}{runs}{batch}"

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield each run's half-open range of lines."""
        for i in range(self.count):
            start = self.start + i * self.period
            yield start, start + self.run

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Yield ``(matrix, start, end)``: each unbroken range of lines of one of the matrices."""
        length = self.run // self.matrices_a_run
        starts = (s for start, end in self.runs() for s in range(start, end, length))
        for i, start in enumerate(starts):
            yield i // self.runs_a_matrix, start, start + length

    def matrix_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of each of the ``batch`` matrices inside a matrix of ``shape``."""
        length = self.num_lines // self.batch
        return (length, shape[1]) if self.dim == 0 else (shape[0], length)

    def matrix_shapes(self, shape: tuple[int, int]) -> list[tuple[int, int]]:
        """Return one shape for each Newton-Schulz call that the block is."""
        return [self.matrix_shape(shape)] * self.batch


@dataclass(frozen=True)
class LogicalMatrix:
    """One weight before any sharding, and the shard of it that a rank holds.

    Tensor parallelism cuts it along ``tp_dim``. Generalized tensor parallelism (GTP) then cuts the
    rows of each of these shards over ``gtp_size`` ranks more, ``gtp_rows`` each; the last of them
    are filled up with rows of zeros, which are no part of the matrix. The two together are one axis
    of ranks, the row of the grid: rank ``gtp * tp_size + tp``.

    Attributes:
        name: Name of the parameter, wrapper prefixes removed.
        shape: Whole shape ``(M, N)``; a stack of matrices ``(E, m, N)`` is seen as ``(E m, N)``.
        blocks: The parts that are orthogonalized apart; one for a plain matrix.
        tp_dim: Dimension tensor parallelism cuts, ``None`` if every rank holds the whole.
        tp_size: Ranks of the tensor-parallel group that cuts it.
        tp_stride: Parts stacked along ``tp_dim`` that are cut one by one: a rank's shard of
            stacked gate and up projections (stride 2) is its rows of each.
        expert_tp: Whether the expert tensor-parallel group cuts it.
        expert_parallel: Whether it is reduced over the expert data-parallel group.
        gtp_size: Ranks that cut the rows of each tensor-parallel shard once more.
        gtp_rows: Rows of what each of them holds, with those that fill it up; unused for one.
    """

    name: str
    shape: tuple[int, int]
    blocks: tuple[LogicalBlock, ...]
    tp_dim: int | None = None
    tp_size: int = 1
    tp_stride: int = 1
    expert_tp: bool = False
    expert_parallel: bool = False
    gtp_size: int = 1
    gtp_rows: int = 0

    def __post_init__(self) -> None:
        check_cover(self.name, self.shape, self.blocks)
        if self.tp_dim is not None and self.shape[self.tp_dim] % (self.tp_size * self.tp_stride):
            raise PlanError(
                f"{self.name}: dimension {self.tp_dim} of {self.shape} cannot be cut into "
                f"{self.tp_size} ranks x {self.tp_stride} parts."
            )
        rows, _ = self.tp_shape
        if self.gtp_size > 1 and self.gtp_size * self.gtp_rows < rows:
            raise PlanError(
                f"{self.name}: {self.gtp_size} ranks with {self.gtp_rows} rows each do not hold "
                f"the {rows} rows of a tensor-parallel shard."
            )

    def renamed(self, name: str) -> LogicalMatrix:
        """Return the same matrix under another name, with what is known of it: all but its name."""
        same = object.__new__(LogicalMatrix)
        vars(same).update(vars(self), name=name)
        return same

    @property
    def is_cut(self) -> bool:
        """Whether the ranks of a row hold different parts of it, and no copies."""
        return self.tp_dim is not None or self.gtp_size > 1

    @property
    def row_size(self) -> int:
        """Ranks of the row that cuts it."""
        return self.tp_size * self.gtp_size

    @cached_property
    def tp_shape(self) -> tuple[int, int]:
        """Shape of one tensor-parallel shard, before its rows are cut."""
        if self.tp_dim is None:
            return self.shape
        rows, columns = self.shape
        return (
            (rows // self.tp_size, columns) if self.tp_dim == 0 else (rows, columns // self.tp_size)
        )

    @property
    def local_shape(self) -> tuple[int, int]:
        """Shape of what one rank holds, with rows that fill it up."""
        rows, columns = self.tp_shape
        return (rows, columns) if self.gtp_size == 1 else (self.gtp_rows, columns)

    @property
    def numel(self) -> int:
        """Elements of the whole matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def local_numel(self) -> int:
        """Elements of what one rank holds, with those that fill it up."""
        rows, columns = self.local_shape
        return rows * columns

    def held_numel(self, rank: int) -> int:
        """Return the elements of the matrix that a rank of the row holds: its first ones."""
        rows, columns = self.tp_shape
        if self.gtp_size == 1:
            return rows * columns
        return min(max(rows - self._first_row(rank), 0), self.gtp_rows) * columns

    def first_held(self, rank: int) -> int:
        """Return where a rank's elements start in the flat tensor-parallel shard."""
        return self._first_row(rank) * self.tp_shape[1]

    def _first_row(self, rank: int) -> int:
        return 0 if self.gtp_size == 1 else rank // self.tp_size * self.gtp_rows

    def block_shapes(self) -> list[tuple[int, int]]:
        """Return the shape of each matrix that is orthogonalized apart, block by block."""
        return [shape for block in self.blocks for shape in block.matrix_shapes(self.shape)]

    def ns_flops(self, num_steps: int) -> int:
        """Flops of Newton-Schulz on every block, in the standard form."""
        return num_steps * self._step_flops

    @cached_property
    def _step_flops(self) -> int:
        return sum(
            block.batch * step_flops(*block.matrix_shape(self.shape)) for block in self.blocks
        )

    def local_blocks(self) -> tuple[LogicalBlock, ...]:
        """Return the blocks inside one shard, the same on every rank of the group.

        A shard has its equal piece of each of a block's matrices (``batch`` as in the whole), or
        an equal number of them whole (``batch / tp_size``), as heads.

        Raises:
            ConfigurationError: The shards differ, since one cuts a query group or a head or rows
                are cut once more: only the whole matrix can be split.
        """
        if self.gtp_size > 1:
            raise ConfigurationError(
                f"{self.name}: its rows are cut over {self.gtp_size} ranks more by generalized "
                "tensor parallelism, so there is no orthogonalization shard by shard. Use "
                "--muon-tp-mode owner or duplicated."
            )
        if self.tp_dim is None or self.tp_size == 1:
            return self.blocks
        return tuple(
            self._local_block(block) if block.dim == self.tp_dim else block for block in self.blocks
        )

    def _local_block(self, block: LogicalBlock) -> LogicalBlock:
        shards = self._cut(block)
        local = _as_block(block, shards[0])
        is_even = all(_numbered(shard) == _numbered(shards[0]) for shard in shards[1:])
        if local is None or not is_even:
            kind = "query groups" if block.name.split()[0] in ("q", "k", "v") else "runs"
            raise ConfigurationError(
                f"{self.name}: {block.count} {kind} cannot be cut over {self.tp_size} "
                f"tensor-parallel ranks shard by shard (block {block.name}). Use --muon-tp-mode "
                "owner or duplicated."
            )
        return local

    def _cut(self, block: LogicalBlock) -> list[list[tuple[int, int, int]]]:
        """Return, for each rank, the parts of a block in its shard, in the shard's lines."""
        shards: list[list[tuple[int, int, int]]] = [[] for _ in range(self.tp_size)]
        length = self.shape[block.dim] // (self.tp_size * self.tp_stride)
        for matrix, start, end in block.parts():
            for piece in range(start // length, (end - 1) // length + 1):
                stacked, rank = divmod(piece, self.tp_size)
                shift = (stacked - piece) * length
                low, high = max(start, piece * length), min(end, (piece + 1) * length)
                shards[rank].append((matrix, low + shift, high + shift))
        return shards


def check_cover(name: str, shape: tuple[int, int], blocks: Sequence[LogicalBlock]) -> None:
    """Check that the blocks of a matrix cover its rows, or its columns, once.

    Raises:
        PlanError: A line is in no block or in two, or some blocks are rows and others columns.
    """
    if len(blocks) == 1:
        (block,) = blocks
        if (block.start, block.run, block.count) == (0, shape[block.dim], 1):
            return  # a plain matrix, of which there may be thousands
    dims = {block.dim for block in blocks}
    (dim,) = dims if len(dims) == 1 else (0,)
    runs = sorted(run for block in blocks for run in block.runs())
    starts, ends = [start for start, _ in runs], [end for _, end in runs]
    if len(dims) > 1 or [*starts, shape[dim]] != [0, *ends]:
        raise PlanError(
            f"{name}: blocks {blocks} do not cover its {shape[dim]} "
            f"{'columns' if dim else 'rows'} once."
        )


def step_flops(rows: int, columns: int) -> int:
    """Flops of one Newton-Schulz step on a ``(rows, columns)`` block: ``4 a^2 b + 2 a^3``."""
    short, long = sorted((rows, columns))
    return 4 * short * short * long + 2 * short**3


def whole(num_rows: int) -> tuple[LogicalBlock, ...]:
    """Return the one block of a plain matrix."""
    return (LogicalBlock("whole", 0, num_rows, num_rows, 1),)


def interleaved(
    widths: Mapping[str, int], num_rows: int, matrix: str, head_rows: int | None = None
) -> tuple[LogicalBlock, ...]:
    """Return one block for each part of a projection whose rows repeat ``widths`` in order.

    Args:
        widths: Rows of each part in one repetition (a query group), by the part's name, in order.
        num_rows: Rows of the logical matrix.
        matrix: Name of the parameter, for the error.
        head_rows: Rows of a head; each head of each part is then a matrix of its own.

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
    count = num_rows // period
    starts = accumulate(widths.values(), initial=0)
    return tuple(
        LogicalBlock(
            name if head_rows is None else name + HEAD_SUFFIX,
            start, width, period, count,
            batch=1 if head_rows is None else count * width // head_rows,
        )
        for start, (name, width) in zip(starts, widths.items(), strict=False)
    )  # fmt: skip


def stacked(blocks: Iterable[LogicalBlock], num_rows: int, size: int) -> tuple[LogicalBlock, ...]:
    """Return the blocks of ``size`` equal matrices, one below the other.

    Args:
        blocks: Blocks of rows of one matrix. One of several runs repeats to the matrix's end.
        num_rows: Rows of one matrix.
        size: Number of matrices (experts).
    """
    return tuple(
        replace(
            block,
            period=num_rows if block.count == 1 else block.period,
            count=size * block.count,
            batch=size * block.batch,
        )
        for block in blocks
    )


def _numbered(parts: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Number the matrices of parts anew, from 0 in order, and join parts of one that touch."""
    names: dict[int, int] = {}
    joined: list[tuple[int, int, int]] = []
    for matrix, start, end in parts:
        number = names.setdefault(matrix, len(names))
        if joined and joined[-1][0] == number and joined[-1][2] == start:
            start = joined.pop()[1]
        joined.append((number, start, end))
    return joined


def _as_block(block: LogicalBlock, parts: list[tuple[int, int, int]]) -> LogicalBlock | None:
    """Return the parts of a block in one shard as a block, ``None`` if they are none."""
    if not parts:
        return None
    runs: list[tuple[int, int]] = []
    for _, start, end in parts:
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, end))
    start, end = runs[0]
    batch = len({matrix for matrix, _, _ in parts})
    if len(runs) > 1:
        period = runs[1][0] - start
    else:
        period = block.period if end - start == block.run else end - start
    try:
        local = replace(
            block, start=start, run=end - start, period=period, count=len(runs), batch=batch
        )
    except PlanError:
        return None
    # Two ranks of four that have a half of one head each would agree on the rest.
    in_pieces = batch == block.batch
    in_wholes = local.num_lines * block.batch == block.num_lines * batch
    fits = (in_pieces or in_wholes) and _numbered(local.parts()) == _numbered(parts)
    return local if fits else None
