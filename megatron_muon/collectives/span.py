"""All ranks of a job that step a part of one model, as one group or as a product of groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


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
