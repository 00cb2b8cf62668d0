"""All ranks of a job that step a part of one model, as one group or as a product of groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_muon.collectives.agreement import gather
from megatron_muon.errors import UnsupportedError


def grid_row(
    tensor: dist.ProcessGroup, cut: dist.ProcessGroup | None, everyone: dist.ProcessGroup
) -> dist.ProcessGroup:
    """Return the group of the ranks that have the parts of one matrix; collective over all ranks.

    Args:
        tensor: The tensor-parallel group.
        cut: Ranks over which each of its shards is cut once more, ``None`` if over none. Their
            tensor-parallel groups are the whole row; rank ``c * tensor.size() + t`` is the one
            with tensor-parallel rank ``t`` that has part ``c``.
        everyone: All ranks of the job.

    Raises:
        UnsupportedError: ``everyone`` is a part of the job, or ranks do not count up in that order;
            the same error on every rank.
    """
    if cut is None or cut.size() == 1:
        return tensor
    own = tuple(dist.get_process_group_ranks(group) for group in (tensor, cut))
    places = dict(gather((dist.get_rank(), own), everyone))
    rows = sorted(
        {tuple(rank for other in cutting if other in places for rank in places[other][0])
         for _, cutting in places.values()}
    )  # fmt: skip
    in_rows = [rank for row in rows for rank in row]
    if any(list(row) != sorted(row) for row in rows) or (
        sorted(in_rows) != list(range(dist.get_world_size()))
    ):
        raise UnsupportedError(
            "Generalized tensor parallelism: the ranks that cut one weight have to count up, those "
            "of tensor parallelism first, and every rank of the job has to build the optimizer. "
            f"The process groups say {rows} of {dist.get_world_size()} ranks: make them in "
            "Megatron's own order, for one model."
        )
    # Every rank of the job makes every group: torch numbers groups by how many there were.
    groups = {row: dist.new_group(list(row)) for row in rows}
    mine: dist.ProcessGroup = next(g for row, g in groups.items() if dist.get_rank() in row)
    return mine


class Span:
    """All ranks that step a part of a model.

    Attributes:
        groups: Process groups that span them: one, or several whose product they are, such as the
            model-parallel and then the data-parallel group. Groups of one rank are left out.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        """Name the groups, and where reductions run."""
        self.groups = [group for group in groups if group.size() > 1]
        self._device = device

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank."""
        return all(group.rank() == 0 for group in self.groups)

    def sum(self, values: Sequence[float | torch.Tensor]) -> list[float]:
        """Sum numbers over all ranks, in fp64; collective."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float | torch.Tensor]) -> list[float]:
        """Return the largest of all ranks for each number, in fp64; collective."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def gather[T](self, value: T) -> list[T]:
        """Return the value of every rank, any object; collective."""
        values = [value]
        for group in self.groups:
            parts: list[list[T] | None] = [None] * group.size()
            dist.all_gather_object(parts, values, group=group)
            values = [item for part in parts if part is not None for item in part]
        return values

    def _reduced(
        self, values: Sequence[float | torch.Tensor], op: dist.ReduceOp.RedOpType
    ) -> list[float]:
        # Filled and not copied: a copy of a number from the host would wait for the device.
        total = torch.stack(
            [
                value.to(self._device, torch.float64).view(())
                if isinstance(value, torch.Tensor)
                else torch.full((), value, dtype=torch.float64, device=self._device)
                for value in values
            ]
        )
        for group in self.groups:
            dist.all_reduce(total, op=op, group=group)
        if len(self.groups) > 1:
            # Different groups may have summed in different orders: all ranks take one result.
            for group in self.groups:
                dist.all_reduce(total, op=dist.ReduceOp.MAX, group=group)
        return [float(value) for value in total.tolist()]
