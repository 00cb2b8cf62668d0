"""Exchange with homes: a matrix's shards travel to its one home, the update's shards back.

One all-to-all carries the shards of a whole micro-group of matrices. No rank but the home
receives a whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(slots=True)
class Traffic:
    """Collectives entered and bytes received from other ranks, counted where they happen."""

    calls: int = 0
    nbytes: int = 0
    peak_scratch_nbytes: int = 0

    def count(self, received: torch.Tensor, own_numel: int, scratch_nbytes: int) -> None:
        """Count one collective."""
        self.calls += 1
        self.nbytes += (received.numel() - own_numel) * received.element_size()
        self.peak_scratch_nbytes = max(self.peak_scratch_nbytes, scratch_nbytes)

    def count_reductions(self, calls: int, nbytes: int) -> None:
        """Count all-reduces by what they sum up."""
        self.calls += calls
        self.nbytes += nbytes

    def add(self, other: Traffic) -> None:
        """Add another count of the same step."""
        self.calls += other.calls
        self.nbytes += other.nbytes
        self.peak_scratch_nbytes = max(self.peak_scratch_nbytes, other.peak_scratch_nbytes)


class ShardExchange:
    """Moves flat shards between the ranks of one tensor-parallel group.

    Every rank of the group enters every call with the same homes and sizes, which come from the
    plan alone.
    """

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic) -> None:
        """Exchange over ``group``; ``None`` or a group of one rank moves nothing."""
        self.group = group
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self._traffic = traffic

    def to_homes(
        self, shards: Sequence[torch.Tensor], homes: Sequence[int]
    ) -> list[list[torch.Tensor]]:
        """Send each shard to its matrix's home.

        Args:
            shards: This rank's shard of each matrix, same shape on all ranks.
            homes: Rank of the group that each matrix goes to.

        Returns:
            For each matrix, the shards of all ranks in rank order where this rank is the home,
            else an empty list.
        """
        if self.size == 1:
            return [[shard] for shard in shards]
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        for shard, home in zip(shards, homes, strict=True):
            outgoing[home].append(shard)
        mine = [shard for shard, home in zip(shards, homes, strict=True) if home == self.rank]
        incoming = self._all_to_all(outgoing, [[s.shape for s in mine]] * self.size, shards[0])
        arrived = iter(zip(*incoming, strict=True))
        return [list(next(arrived)) if home == self.rank else [] for home in homes]

    def from_homes(
        self,
        updates: Sequence[Sequence[torch.Tensor]],
        homes: Sequence[int],
        shapes: Sequence[torch.Size | tuple[int, ...]],
        like: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Send each rank its shard of every update.

        Args:
            updates: For each matrix, one shard a rank where this rank is the home, else empty.
            homes: Rank of the group that holds each update.
            shapes: Shape of this rank's shard of each matrix.
            like: Tensor whose dtype and device the shards have.

        Returns:
            This rank's shard of each update.
        """
        if self.size == 1:
            return [shards[0] for shards in updates]
        outgoing = [
            [shards[rank] for shards, home in zip(updates, homes, strict=True)
             if home == self.rank]
            for rank in range(self.size)
        ]  # fmt: skip
        incoming_shapes: list[list[torch.Size | tuple[int, ...]]] = [[] for _ in range(self.size)]
        for shape, home in zip(shapes, homes, strict=True):
            incoming_shapes[home].append(shape)
        incoming = [iter(part) for part in self._all_to_all(outgoing, incoming_shapes, like)]
        return [next(incoming[home]) for home in homes]

    def gather(self, shards: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return for each matrix the shards of all ranks, on every rank."""
        if self.size == 1:
            return [[shard] for shard in shards]
        shapes = [shard.shape for shard in shards]
        incoming = self._all_to_all([list(shards)] * self.size, [shapes] * self.size, shards[0])
        return [list(parts) for parts in zip(*incoming, strict=True)]

    def _all_to_all(
        self,
        outgoing: Sequence[Sequence[torch.Tensor]],
        incoming_shapes: Sequence[Sequence[torch.Size | tuple[int, ...]]],
        like: torch.Tensor,
    ) -> list[list[torch.Tensor]]:
        """Send ``outgoing[r]`` to rank ``r``; return what came from each rank, as views."""
        sent = [sum(t.numel() for t in part) for part in outgoing]
        numels = [[math.prod(shape) for shape in part] for part in incoming_shapes]
        received = [sum(part) for part in numels]
        send = like.new_empty(sum(sent))
        offset = 0
        for part in outgoing:
            for tensor in part:
                send[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
                offset += tensor.numel()
        receive = like.new_empty(sum(received))
        dist.all_to_all_single(receive, send, received, sent, group=self.group)
        self._traffic.count(
            receive,
            received[self.rank],
            (send.numel() + receive.numel()) * receive.element_size(),
        )
        return [
            [flat.view(shape) for flat, shape in zip(torch.split(part, sizes), shapes, strict=True)]
            for part, sizes, shapes in zip(
                torch.split(receive, received), numels, incoming_shapes, strict=True
            )
        ]
