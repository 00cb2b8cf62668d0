"""What the ranks of :class:`~megatron_muon.optimizer.flat.Muon` tell each other before they step.

Each knows the records of its own shards only. All are compared, so that what is wrong on one rank
is the same error on every rank, and no rank waits for another that has given up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from operator import index

import torch.distributed as dist

from megatron_muon.bookkeeping.dist_meta import MuonDistMeta
from megatron_muon.bookkeeping.matrix import LogicalMatrix, whole
from megatron_muon.bookkeeping.plan import OwnedMatrix, held_by_slices
from megatron_muon.collectives.agreement import gather
from megatron_muon.errors import ConfigurationError, MuonError, PlanError

BufferSizes = Sequence[Sequence[tuple[int, int]]]
"""``(size, offset)`` in elements by buffer and bucket."""

EXCHANGES = ("homes", "gather")


@dataclass(frozen=True, slots=True, order=True)
class Record:
    """What ranks tell each other of a matrix."""

    buffer_idx: int
    bucket_idx: int
    global_range: tuple[int, int]
    shape: tuple[int, int]
    tp_split_dim: int
    ns_steps: int
    options: tuple[float, ...] = ()
    """Learning rate and the like, which every rank has to apply alike."""

    @property
    def bucket(self) -> tuple[int, int]:
        """The bucket it lies in."""
        return self.buffer_idx, self.bucket_idx

    @property
    def name(self) -> str:
        """The matrix, for errors."""
        start, end = self.global_range
        return f"buffer {self.buffer_idx} bucket {self.bucket_idx} [{start:012d}:{end:012d}]"


@dataclass(frozen=True, slots=True)
class Options:
    """What every rank has to be given alike: the rounds of the exchange follow from it."""

    exchange: str
    gather_budget_nbytes: int
    itemsize: int
    global_buffer_sizes: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank tells the others before they plan together.

    Attributes:
        options: What it was given, ``None`` if that is wrong.
        rows: The matrices that it holds a part of.
        error: What it found wrong.
    """

    options: Options | None
    rows: list[Record]
    error: MuonError | None


@dataclass(frozen=True, slots=True)
class Planned:
    """What one rank tells the others once it has planned.

    Attributes:
        fingerprints: Of each plan, by Newton-Schulz steps.
        error: What went wrong.
    """

    fingerprints: dict[int, str]
    error: MuonError | None


type ByRank[T] = list[list[T]]
"""One value of each rank, by tensor-parallel and data-parallel rank."""


def make_options(
    exchange: str,
    gather_budget_nbytes: object,
    itemsize: int,
    global_buffer_sizes: BufferSizes,
    size: int,
    tp_size: int,
) -> Options:
    """Check what this rank was given, and return it.

    Args:
        exchange: See :meth:`~megatron_muon.optimizer.flat.Muon.enable_distributed_mode`.
        gather_budget_nbytes: See there.
        itemsize: Bytes of an element that travels.
        global_buffer_sizes: See there.
        size: Ranks of the data-parallel group.
        tp_size: Ranks of the tensor-parallel group.

    Raises:
        ConfigurationError: An option is out of its range, or a bucket cannot be cut equally.
        Exception: The sizes are no pairs of integers.
    """
    if exchange not in EXCHANGES:
        raise ConfigurationError(f"exchange is {exchange!r}: expected homes or gather.")
    # A gather moves an element of each rank at the least, and this rank's own.
    least = max(64, (max(size, tp_size) + 1) * itemsize)
    if not isinstance(gather_budget_nbytes, int) or gather_budget_nbytes < least:
        raise ConfigurationError(
            f"gather_budget_nbytes is {gather_budget_nbytes!r}: expected an integer of {least} or "
            "more."
        )
    sizes = tuple(
        tuple((index(numel), index(offset)) for numel, offset in buckets)
        for buckets in global_buffer_sizes
    )
    for buffer_idx, buckets in enumerate(sizes):
        for bucket_idx, (numel, _) in enumerate(buckets):
            if numel % size:
                raise ConfigurationError(
                    f"bucket {bucket_idx} of buffer {buffer_idx} has {numel} elements, no multiple "
                    f"of the {size} ranks of dist_group. Pad it."
                )
    return Options(exchange, gather_budget_nbytes, itemsize, sizes)


def complete(meta: MuonDistMeta, numel: int, options: Options, group: dist.ProcessGroup) -> None:
    """Put this rank's slice of the buffer into a record, and check the record."""
    if len(meta.shape) != 2:
        raise PlanError(
            f"{meta} is no matrix. Give parameters of other shapes to a group without use_muon."
        )
    buffers = options.global_buffer_sizes
    if not (0 <= meta.buffer_idx < len(buffers)) or not (
        0 <= meta.bucket_idx < len(buffers[meta.buffer_idx])
    ):
        raise PlanError(f"global_buffer_sizes has no bucket of {meta}.")
    bucket_numel, offset = buffers[meta.buffer_idx][meta.bucket_idx]
    if not offset <= meta.global_range[0] <= meta.global_range[1] <= offset + bucket_numel:
        raise PlanError(
            f"{meta} does not lie in its bucket, which is {bucket_numel} elements from {offset} on."
        )
    shard_numel = bucket_numel // group.size()
    start = offset + group.rank() * shard_numel
    meta.set_local_buffer_range((start, start + shard_numel))
    low, high = meta.local_range or (start, start)
    if numel != high - low:
        raise PlanError(
            f"the shard has {numel} elements, this rank's slice [{start}:{start + shard_numel}] of "
            f"the buffer has {high - low} of {meta}."
        )


def gather_grid[T](
    value: T, dist_group: dist.ProcessGroup, tp_group: dist.ProcessGroup | None
) -> ByRank[T]:
    """Return every rank's value; collective over both groups."""
    column = gather(value, dist_group)
    return [column] if tp_group is None else gather(column, tp_group)


def check_places(ranks: ByRank[int]) -> None:
    """Check that the two groups span a grid: every place in it is another rank.

    Raises:
        ConfigurationError: One rank has two places, as with one group given twice.
    """
    everyone = [rank for column in ranks for rank in column]
    if len(set(everyone)) != len(everyone):
        raise ConfigurationError(
            f"enable_distributed_mode: dist_group x tp_group has the ranks {everyone}, some of "
            "them twice. Give two groups that have one rank in common; tp_group=None for none."
        )


def to_tell(error: Exception | None) -> MuonError | None:
    """Return an error of this rank as one that can be told to the others."""
    if error is None or isinstance(error, MuonError):
        return error
    return PlanError(f"{type(error).__name__}: {error}")


@contextmanager
def caused_by(error: Exception | None) -> Iterator[None]:
    """Chain what all ranks are told to the error that this rank found, if it found one."""
    try:
        yield
    except MuonError as told:
        raise told from error


def raise_alike(call: str, errors: ByRank[MuonError | None]) -> None:
    """Raise on every rank what one found, a wrong option first.

    Args:
        call: What the ranks have called, for the message.
        errors: What each of them found.
    """
    wrong = [(where, error) for where, error in _by_place(errors).items() if error is not None]
    for where, error in wrong:
        if isinstance(error, ConfigurationError):
            raise ConfigurationError(f"{call}, {where}: {error}")
    for where, error in wrong:
        raise PlanError(f"{call}, {where}: {error}")


def _by_place[T](values: ByRank[T]) -> dict[str, T]:
    return {
        f"data-parallel rank {rank}, tensor-parallel rank {tp_rank}": value
        for tp_rank, column in enumerate(values)
        for rank, value in enumerate(column)
    }


def _check_reports(reports: ByRank[Report]) -> Options:
    """Raise on every rank what one found, a wrong option first and a wrong record last."""
    call, everyone = "enable_distributed_mode", _by_place(reports)
    raise_alike(call, [[r.error if r.options is None else None for r in col] for col in reports])
    options = reports[0][0].options
    for where, report in everyone.items():
        if report.options != options:
            raise PlanError(
                f"{call}, {where} was given {report.options}, rank 0 of both groups {options}. "
                "Give every rank the same."
            )
    raise_alike(call, [[report.error for report in column] for column in reports])
    assert options is not None
    return options


def agree(reports: ByRank[Report], size: int, tp_size: int) -> dict[Record, OwnedMatrix]:
    """Return the matrices of all ranks.

    Args:
        reports: What the ranks tell.
        size: Ranks of the data-parallel group.
        tp_size: Ranks of the tensor-parallel group.

    Raises:
        MuonError: A rank found an error, two ranks were given different options or records, or a
            rank lacks a shard.
    """
    options = _check_reports(reports)
    # Each matrix has a set of data-parallel ranks for each tensor-parallel rank.
    holders: dict[Record, list[set[int]]] = {}
    for tp_rank, column in enumerate(reports):
        for rank, report in enumerate(column):
            for row in report.rows:
                holders.setdefault(row, [set() for _ in reports])[tp_rank].add(rank)
    rows = sorted(holders)
    for row, following in pairwise(rows):
        if row.name == following.name:
            raise PlanError(
                f"enable_distributed_mode: ranks have two records of one matrix, {row} and "
                f"{following}. Give every rank the same."
            )
        if row.bucket == following.bucket and following.global_range[0] < row.global_range[1]:
            raise PlanError(
                f"enable_distributed_mode: {row} and {following} overlap. Give each matrix a range "
                "of its own."
            )
    return {row: _owned(row, options, holders[row], size, tp_size) for row in rows}


def _owned(
    row: Record, options: Options, holders: Sequence[set[int]], size: int, tp_size: int
) -> OwnedMatrix:
    """Return who holds a matrix, once all of them have said so."""
    numel, offset = options.global_buffer_sizes[row.buffer_idx][row.bucket_idx]
    pieces = held_by_slices(row.global_range, (offset, offset + numel), size)
    expected = {piece.rank for piece in pieces}
    for tp_rank, found in enumerate(holders):
        if found != expected:
            raise PlanError(
                f"enable_distributed_mode: {row.name}, shape {row.shape}, tp_split_dim "
                f"{row.tp_split_dim}, {row.ns_steps} Newton-Schulz steps, lies on data-parallel "
                f"ranks {sorted(expected)}, but of tensor-parallel rank {tp_rank} the ranks "
                f"{sorted(found)} have it. Give every rank the records of all its shards."
            )
    return OwnedMatrix(
        matrix=_logical(row, tp_size), pieces=pieces, buffer_idx=row.buffer_idx,
        bucket_idx=row.bucket_idx, range=row.global_range,
    )  # fmt: skip


def check_plans(everyones: ByRank[Planned]) -> None:
    """Check that all ranks have planned alike, since they would wait for each other forever.

    Raises:
        MuonError: A rank found an error, or planned otherwise than another.
    """
    call, first = "enable_distributed_mode", everyones[0][0]
    raise_alike(call, [[planned.error for planned in column] for column in everyones])
    for where, planned in _by_place(everyones).items():
        if planned.fingerprints != first.fingerprints:
            raise PlanError(
                f"{call}: {where} has planned {planned.fingerprints}, rank 0 of both groups "
                f"{first.fingerprints} (Newton-Schulz steps: fingerprint) from the same records. "
                "Run the same version on every rank."
            )


def _logical(row: Record, tp_size: int) -> LogicalMatrix:
    rows, columns = row.shape
    if row.tp_split_dim == -1:
        return LogicalMatrix(row.name, row.shape, whole(rows))
    if row.tp_split_dim == 0:
        rows *= tp_size
    else:
        columns *= tp_size
    return LogicalMatrix(
        row.name, (rows, columns), whole(rows), tp_dim=row.tp_split_dim, tp_size=tp_size
    )
