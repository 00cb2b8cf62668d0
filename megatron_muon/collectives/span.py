"""All ranks of a job that step a part of one model, as one group or as a product of groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Span:
    """All ranks that step a part of a model.

    Attributes:
        stages: Process groups that span them: one, or several whose product they are, such as the
            model-parallel and then the data-parallel group. Groups of one rank are left out.
    """

    def __init__(self, stages: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        """Name the groups, and where reductions run."""
        self.stages = [group for group in stages if group.size() > 1]
        self._device = device

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank."""
        return all(group.rank() == 0 for group in self.stages)

    def sum(self, values: Sequence[float | torch.Tensor]) -> list[float]:
        """Sum numbers over all ranks, in fp64; collective."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float | torch.Tensor]) -> list[float]:
        """Return the largest of all ranks for each number, in fp64; collective."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def gather[T](self, value: T) -> list[T]:
        """Return the value of every rank, any object; collective."""
        values = [value]
        for group in self.stages:
            parts: list[list[T] | None] = [None] * group.size()
            dist.all_gather_object(parts, values, group=group)
            values = [item for part in parts if part is not None for item in part]
        return values

    def _reduced(
        self, values: Sequence[float | torch.Tensor], op: dist.ReduceOp.RedOpType
    ) -> list[float]:
        total = torch.stack(
            [torch.as_tensor(value, dtype=torch.float64).to(self._device).view(())
             for value in values]
        )  # fmt: skip
        for group in self.stages:
            dist.all_reduce(total, op=op, group=group)
        return [float(value) for value in total.tolist()]
