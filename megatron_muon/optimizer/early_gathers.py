"""Gathers of new weights that begin inside the optimizer's step, each when its last matrix is done.

With ``--overlap-param-gather`` alone, the first gather begins in the next forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_muon.optimizer.masters import WholeFP32Optimizer, masters_of


@dataclass(frozen=True, slots=True)
class GatheredGroup:
    """One of DDP's bucket groups, all of matrices.

    Attributes:
        group: Megatron's bucket group.
        matrices: Names of all matrices in it, whoever steps them.
        masters: fp32 masters that this rank steps, or pieces of them.
        places: Where each goes in the buffer that is gathered, flat. Masters that are the weights
            themselves are in neither list.
    """

    group: Any
    matrices: frozenset[str]
    masters: list[torch.Tensor]
    places: list[torch.Tensor]

    @torch.no_grad()
    def start(self) -> None:
        """Write the masters into the buffer and start the gather."""
        if self.places:
            masters = [master.detach().view(-1) for master in self.masters]
            torch._foreach_copy_(self.places, masters)
        self.group.start_param_sync()


class EarlyGathers:
    """Starts the gathers of a step.

    Matrices are done in the order of the schedule, which is the same on every rank; so all ranks of
    a data-parallel group start the same gathers in the same order, between the same exchanges.
    """

    def __init__(
        self,
        matrix_leaves: Sequence[Any],
        model_chunks: Sequence[DistributedDataParallel],
        names: Mapping[torch.nn.Parameter, str],
    ) -> None:
        """Find the bucket groups of matrices, and tell DDP that nobody else starts a gather.

        Args:
            matrix_leaves: Megatron's wrappers of the Muons of this rank.
            model_chunks: DDP-wrapped chunks with a layout and with ``overlap_param_gather``.
            names: Name of every matrix of this pipeline stage.
        """
        held = {
            param: (leaf, master)
            for leaf in matrix_leaves
            for param, master in masters_of(leaf).items()
        }
        self._all = [
            group
            for chunk in model_chunks
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
        ]
        self._of_matrices = [
            _gathered(group, held, names)
            for group in self._all
            if all(param in names for bucket in group.buckets for param in bucket.params_list)
        ]
        self._is_stepping = False
        self._left: list[set[str]] = []
        for leaf in matrix_leaves:
            if not isinstance(leaf, WholeFP32Optimizer):
                copy = leaf._copy_main_params_to_model_params
                leaf._copy_main_params_to_model_params = self._unless_stepping(copy)
        for chunk in model_chunks:
            # DDP's hooks then wait, and neither they nor the schedule start the next gather
            # (0.19.2, distributed_data_parallel.py:460 and :550).
            chunk.overlap_param_gather_with_optimizer_step = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """Start every gather within a ``with`` block in which all optimizers step; collective.

        None is under way when it begins.
        """
        for group in self._all:
            group.param_gather_dispatched = False
        self._left = [set(gathered.matrices) for gathered in self._of_matrices]
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False
        for group in self._all:
            if not group.param_gather_dispatched:
                group.start_param_sync()

    def done(self, names: Sequence[str]) -> None:
        """Say that matrices are done on every rank that holds a part of them; collective."""
        finished = set(names)
        for gathered, left in zip(self._of_matrices, self._left, strict=True):
            if left and left <= finished:
                gathered.start()
            left -= finished

    def _unless_stepping(self, copy: Callable[[], None]) -> Callable[[], None]:
        """Leave out the copy of all weights at the end of a step: gathers are reading them."""

        def copy_between_steps() -> None:
            if not self._is_stepping:
                copy()

        return copy_between_steps


def _gathered(
    group: Any,
    held: Mapping[torch.nn.Parameter, tuple[Any, torch.Tensor]],
    names: Mapping[torch.nn.Parameter, str],
) -> GatheredGroup:
    params = [param for bucket in group.buckets for param in bucket.params_list]
    gathered = GatheredGroup(group, frozenset(names[param] for param in params), [], [])
    for param in params:
        if param not in held:
            continue
        leaf, master = held[param]
        place = param.data.view(-1)
        if isinstance(leaf, DistributedOptimizer):
            range_ = leaf._get_model_param_range_map(param)["param"]
            place = place[range_.start : range_.end]
        if place.data_ptr() != master.data_ptr():
            gathered.masters.append(master)
            gathered.places.append(place)
    return gathered
