"""What one rank of a data x tensor grid works with: place, groups, scratch and mathematics."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from megatron_muon.bookkeeping.dist_meta import ParamRange
from megatron_muon.bookkeeping.matrix import LogicalBlock, LogicalMatrix, step_flops
from megatron_muon.bookkeeping.schedule import Position, Spread
from megatron_muon.bookkeeping.stage import DEFAULT_BUDGET_NBYTES
from megatron_muon.collectives.arena import Arena, Loans
from megatron_muon.collectives.exchange import Exchange, Wire
from megatron_muon.collectives.shards import read_stretch, shard_view, write_stretch
from megatron_muon.optimizer.account import StepAccount
from megatron_muon.orthogonalize.newton_schulz import Orthogonalization
from megatron_muon.orthogonalize.views import as_matrix, block_views

SPREADS = {
    "owner": Spread(whole=True, everywhere=False),
    "duplicated": Spread(whole=True, everywhere=True),
    "distributed": Spread(whole=False, everywhere=True),
    "blockwise": Spread(whole=False, everywhere=True),
}
"""Where Newton-Schulz runs, by ``--muon-tp-mode``."""

BlockWork = tuple[torch.Tensor, torch.Tensor, Sequence[LogicalBlock]]
"""A matrix, where its update goes (the matrix itself or other memory), and its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How an engine works.

    Attributes:
        orthogonalization: The mathematics.
        mode: Where Newton-Schulz runs: a key of :data:`SPREADS`.
        exchange: ``homes`` sends each piece to its matrix's home and the update's pieces back;
            ``gather`` all-gathers every matrix over data and then tensor ranks, and every rank
            that holds a part of it orthogonalizes it.
        budget_nbytes: Bytes that a rank may send and receive in one collective.
        exchange_dtype: Dtype in which momentum and updates travel. One that is narrower than fp32
            rounds both on every rank, also where nothing travels, so that the update still does
            not depend on the grid.
        by_bucket: Whether all matrices of a bucket are done before those of the next.
    """

    orthogonalization: Orthogonalization
    mode: str = "owner"
    exchange: Literal["homes", "gather"] = "homes"
    budget_nbytes: int = DEFAULT_BUDGET_NBYTES
    exchange_dtype: torch.dtype = torch.float32
    by_bucket: bool = False

    @property
    def spread(self) -> Spread:
        """Which ranks of a row work on what."""
        return SPREADS[self.mode]


class Station:
    """One rank of a grid.

    Attributes:
        settings: How the engine works.
        account: Where work is counted.
        rows: Exchange over the data-parallel group, between the rows of the grid.
        columns: Exchange inside a row.
        position: The rank's place.
        wire: How data travels.
    """

    def __init__(
        self,
        dp_group: dist.ProcessGroup | None,
        tp_group: dist.ProcessGroup | None,
        settings: EngineSettings,
        arena: Arena,
        account: StepAccount,
        device: torch.device,
    ) -> None:
        """Take a place in the grid.

        Args:
            dp_group: Data-parallel group, ``None`` where every rank steps every matrix.
            tp_group: Ranks of a row: the tensor-parallel group, or that and those which cut rows.
            settings: How to work.
            arena: Where scratch comes from.
            account: Where work is counted.
            device: Where the matrices are.
        """
        self.settings, self.account = settings, account
        account.is_on_cuda = device.type == "cuda"
        self.wire = Wire(
            settings.exchange_dtype, device, arena, account.traffic, settings.budget_nbytes
        )
        self.rows, self.columns = Exchange(dp_group, self.wire), Exchange(tp_group, self.wire)
        self.position = Position(
            dp=self.rows.rank,
            tp=self.columns.rank,
            dp_size=self.rows.size,
            tp_size=self.columns.size,
        )

    def loans(self) -> Loans:
        """Return a place for the tensors of a micro-group, empty."""
        return Loans(self.wire.arena, self.wire.device)

    def borrow(self, numel: int, scratch: ExitStack) -> torch.Tensor:
        """Borrow a flat fp32 tensor until ``scratch`` closes."""
        lent = self.wire.arena.borrow(numel, torch.float32, self.wire.device)
        return scratch.enter_context(lent)

    def round_(self, x: torch.Tensor) -> torch.Tensor:
        """Round fp32 scratch in place to what the wire carries, and return it."""
        return x if self.wire.dtype == torch.float32 else x.copy_(x.to(self.wire.dtype))

    def read_shard(
        self, matrix: LogicalMatrix, whole: torch.Tensor, rank: int, range_: ParamRange,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Copy flat elements of the shard of a rank of the row from a whole matrix."""
        first = matrix.first_held(rank)
        view = self._tp_view(matrix, whole, rank)
        read_stretch(view, first + range_.start, first + range_.end, out)

    def write_shard(
        self, matrix: LogicalMatrix, whole: torch.Tensor, rank: int, range_: ParamRange,
        source: torch.Tensor,
    ) -> None:  # fmt: skip
        """Copy flat elements of the shard of a rank of the row to a whole matrix."""
        first = matrix.first_held(rank)
        view = self._tp_view(matrix, whole, rank)
        write_stretch(view, first + range_.start, first + range_.end, source)

    def _tp_view(self, matrix: LogicalMatrix, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """View the tensor-parallel shard that a rank of the row has rows of."""
        tp_rank = rank % matrix.tp_size
        return shard_view(whole, matrix.tp_dim, matrix.tp_stride, matrix.tp_size, tp_rank)

    def is_cut(self, matrix: LogicalMatrix) -> bool:
        """Whether no rank of a row holds a whole matrix."""
        return matrix.is_cut and self.position.tp_size > 1

    def orthogonalize(self, work: Sequence[BlockWork]) -> None:
        """Orthogonalize the blocks of several matrices, those of equal shape together.

        A matrix that lies in one run of lines is read and written where it is. One scattered over
        several runs is copied together: as many at a time as make a batch and as the budget has
        room for, or one.
        """
        in_place: list[tuple[torch.Tensor, torch.Tensor]] = []
        scattered: list[tuple[torch.Tensor, torch.Tensor, LogicalBlock]] = []
        for x, out, blocks in work:
            for block in blocks:
                views = block_views(x, block)
                targets = views if out is x else block_views(out, block)
                for view, target in zip(views, targets, strict=True):
                    if view.ndim == 2:
                        in_place.append((view, target))
                    else:
                        scattered.append((view, target, block))
                for shape in block.matrix_shapes((x.shape[0], x.shape[1])):
                    self.count(shape)
        with self.account.phase("newton_schulz"):
            self.settings.orthogonalization.blocks(
                [view for view, _ in in_place], [target for _, target in in_place], self.wire.arena
            )
            self._orthogonalize_copies(scattered)

    def _orthogonalize_copies(
        self, scattered: list[tuple[torch.Tensor, torch.Tensor, LogicalBlock]]
    ) -> None:
        """Orthogonalize matrices by way of copies, in runs of a batch, or of one matrix.

        Args:
            scattered: The view of a matrix, where its update goes, and the block it is of.
        """
        if not scattered:
            return
        scattered.sort(key=lambda item: (item[0].numel(), item[0].shape))  # equal ones together
        numels = [view.numel() for view, _, _ in scattered]
        budget_numel = self.settings.budget_nbytes // torch.float32.itemsize
        batch_numel = self.settings.orthogonalization.batch_nbytes // torch.bfloat16.itemsize
        room = max(numels[-1], min(sum(numels), budget_numel, batch_numel))
        with ExitStack() as scratch:
            memory = self.borrow(room, scratch)
            first = 0
            while first < len(scattered):
                end, copies, used = first, [], 0
                while end < len(scattered) and used + numels[end] <= room:
                    view, _, block = scattered[end]
                    copy = memory[used : used + numels[end]].view(view.shape).copy_(view)
                    copies.append(as_matrix(copy, block))
                    used += numels[end]
                    end += 1
                self.settings.orthogonalization.blocks(copies, copies, self.wire.arena)
                for (_, target, _), copy in zip(scattered[first:end], copies, strict=True):
                    target.copy_(copy.view(target.shape))
                first = end

    def count(self, shape: Sequence[int]) -> None:
        """Count the Newton-Schulz of one block."""
        num_steps = self.settings.orthogonalization.num_steps
        self.account.newton_schulz_calls += 1
        self.account.newton_schulz_flops += num_steps * step_flops(shape[0], shape[1])
