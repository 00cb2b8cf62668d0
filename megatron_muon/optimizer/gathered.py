"""The plain exchange: all-gather each matrix over data and then tensor ranks.

That of Megatron-LM #1428. Every rank that holds a part of a matrix orthogonalizes it, so work and
bytes are a multiple of those of the exchange with homes; the updates are the same.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from megatron_muon.bookkeeping.dist_meta import ParamRange
from megatron_muon.bookkeeping.matrix import LogicalMatrix
from megatron_muon.bookkeeping.plan import PlannedMatrix
from megatron_muon.collectives.exchange import gather_flat
from megatron_muon.optimizer.station import Station


def gathered_update(
    station: Station,
    planned: PlannedMatrix,
    range_: ParamRange | None,
    own: torch.Tensor | None,
    scratch: ExitStack,
) -> torch.Tensor | None:
    """Return the update of this rank's piece of a matrix; every rank of the grid enters.

    Ranks that hold nothing of it enter the gather over the data-parallel group and no more.

    Args:
        station: This rank.
        planned: The matrix.
        range_: Elements of its shard that this rank holds; ``None`` if it has none.
        own: What is orthogonalized of them, flat scratch; ``None`` if it has none.
        scratch: What is borrowed until.
    """
    with station.account.phase("exchange"):
        shard = _gather_pieces(station, planned, own, scratch)
        if shard is None or range_ is None:
            return None
        whole = _gather_shards(station, planned.matrix, shard, scratch)
    station.orthogonalize([(whole, whole, planned.matrix.blocks)])
    update = station.borrow(range_.numel, scratch)
    whole = station.round_(whole)
    station.read_shard(planned.matrix, whole, station.position.tp, range_, update)
    return update


def _gather_pieces(
    station: Station, planned: PlannedMatrix, own: torch.Tensor | None, scratch: ExitStack
) -> torch.Tensor | None:
    """Return this rank's shard of a matrix, flat; ``None`` where it holds none of it."""
    if planned.owned.owner is not None:
        return own
    assert station.rows.group is not None
    ranges = {piece.rank: piece.range for piece in planned.owned.pieces}
    shard = None if own is None else station.borrow(planned.matrix.local_numel, scratch)

    def write(rank: int, start: int, part: torch.Tensor) -> None:
        if shard is not None:
            low = ranges[rank].start + start
            shard[low : low + part.numel()].copy_(part)

    sizes = [ranges[rank].numel if rank in ranges else 0 for rank in range(station.rows.size)]
    gather_flat(station.rows.group, own, sizes, write, station.wire)
    return shard


def _gather_shards(
    station: Station, matrix: LogicalMatrix, shard: torch.Tensor, scratch: ExitStack
) -> torch.Tensor:
    """Return the whole matrix."""
    if not station.is_cut(matrix):
        return shard.view(matrix.shape)
    assert station.columns.group is not None
    whole = station.borrow(matrix.numel, scratch).view(matrix.shape)

    def write(rank: int, start: int, part: torch.Tensor) -> None:
        station.write_shard(matrix, whole, rank, ParamRange(start, start + part.numel()), part)

    sizes = [matrix.local_numel] * station.columns.size
    gather_flat(station.columns.group, shard, sizes, write, station.wire)
    return whole
