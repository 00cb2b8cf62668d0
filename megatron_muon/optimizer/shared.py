"""Blocks that several ranks orthogonalize together, each a part of the long side.

What moves is decided by the plan, how by the collectives; here both meet the mathematics. All
shared blocks of a micro-group whose ranks lie in one line go through it together: one hop for their
sizes, and two for each sum of their Gram matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from megatron_muon.bookkeeping.gram_sums import (
    SIZE_NUMEL,
    LineRounds,
    SharedMatrix,
    SumRounds,
    shared_matrices,
    strip_numel,
)
from megatron_muon.bookkeeping.plan import PlannedMatrix
from megatron_muon.bookkeeping.schedule import Transfer
from megatron_muon.bookkeeping.units import PlannedPart
from megatron_muon.collectives.exchange import Exchange
from megatron_muon.collectives.shards import read_stretch, write_stretch
from megatron_muon.optimizer.station import Station
from megatron_muon.orthogonalize.arithmetic import choose_arithmetic, products_in
from megatron_muon.orthogonalize.coefficients import coefficients
from megatron_muon.orthogonalize.parts import BlockPart, part_segments

_InTheMaking = Mapping[int, BlockPart]
"""This rank's parts, by :attr:`.SharedMatrix.index`."""


class SharedBlocks:
    """Orthogonalizes this rank's parts of shared blocks with the ranks that have the others."""

    def __init__(
        self, units: Sequence[PlannedMatrix], groups: Sequence[Sequence[int]], station: Station
    ) -> None:
        """Make the rounds.

        Args:
            units: What the engine works on.
            groups: Places among them of the members of each micro-group.
            station: This rank.
        """
        self._lines: dict[tuple[int, ...], list[_Line]] = {}
        if not any(isinstance(unit, PlannedPart) for unit in units):
            return
        for indices in map(tuple, groups):
            for in_row in (True, False):
                shared = shared_matrices(units, indices, station.position, in_row)
                if shared:
                    line = _Line(shared, in_row, station)
                    self._lines.setdefault(indices, []).append(line)

    def orthogonalize(self, indices: Sequence[int], parts: Mapping[int, torch.Tensor]) -> None:
        """Orthogonalize the shared blocks of a micro-group in place; every rank of the grid enters.

        Args:
            indices: Places of the micro-group's members.
            parts: What this rank is the home of, by its place, fp32; parts become their updates.
        """
        # All ranks of a row are done with what it shares before one enters what its column shares.
        for line in self._lines.get(tuple(indices), ()):
            line.run(parts)


class _Line:
    """Shared blocks of a micro-group whose ranks lie in this rank's row, or in its column."""

    def __init__(self, shared: Sequence[SharedMatrix], in_row: bool, station: Station) -> None:
        self._station, self._shared = station, shared
        self._settings = station.settings.orthogonalization
        wire, group = station.wire, (station.columns if in_row else station.rows).group
        self._arithmetic = choose_arithmetic(self._settings.matmul_precision, wire.device.type)
        self._coefficients = coefficients(self._settings.coefficient_type, self._settings.num_steps)
        # Lossless whatever momentum travels in: products in bf16 are numbers of bf16.
        dtype = torch.bfloat16 if self._arithmetic.rounds else self._arithmetic.dtype
        size_wire, gram_wire = replace(wire, dtype=torch.float32), replace(wire, dtype=dtype)
        self._sizes, self._grams = Exchange(group, size_wire), Exchange(group, gram_wire)
        rounds = LineRounds(self._sizes.rank, self._sizes.size)
        self._size_rounds = rounds.sizes(shared, size_wire.budget_numel)
        self._dtype = dtype
        numbers = [
            len(part_segments(*m.shape, self._coefficients, self._arithmetic, wire.device.type))
            for m in shared
        ]
        self._sums: list[tuple[list[SharedMatrix], SumRounds]] = []
        for number in range(max(numbers)):
            summed = [m for m, count in zip(shared, numbers, strict=True) if number < count]
            self._sums.append((summed, rounds.sums(summed, gram_wire.budget_numel)))

    def run(self, parts: Mapping[int, torch.Tensor]) -> None:
        """Orthogonalize the blocks; the argument is that of :meth:`SharedBlocks.orthogonalize`."""
        account = self._station.account
        mine = [(m, m.own) for m in self._shared if m.own is not None]
        with products_in(self._settings.matmul_precision):
            with account.phase("newton_schulz"):
                making = {
                    m.index: BlockPart(
                        parts[m.index + own], m.shape, self._coefficients, self._arithmetic
                    )
                    for m, own in mine
                }
            self._normalize(making)
            for summed, rounds in self._sums:
                here = [m for m in summed if m.own is not None]
                with account.phase("newton_schulz"):
                    for matrix in here:
                        making[matrix.index].multiply()
                self._add(here, making, rounds)
                with account.phase("newton_schulz"):
                    for matrix in here:
                        making[matrix.index].take_segment()
        for matrix, own in mine:
            update = parts[matrix.index + own]
            making[matrix.index].write(update)
            update.mul_(self._settings.scale(*matrix.shape))
            account.newton_schulz_calls += own == 0
            account.newton_schulz_flops += matrix.parts[own].flops

    def _normalize(self, making: _InTheMaking) -> None:
        """Tell the sizes of all parts to each other, and divide by the norms of the wholes."""
        sizes: dict[int, torch.Tensor] = {}
        numbers: dict[int, dict[int, int]] = {}
        for matrix in self._shared:
            numbers[matrix.index] = {rank: part for part, rank in enumerate(matrix.ranks)}
            if matrix.own is not None:
                own = making[matrix.index].size()
                sizes[matrix.index] = own.new_empty(len(matrix.parts), SIZE_NUMEL)
                sizes[matrix.index][matrix.own] = own

        def pack(transfer: Transfer, out: torch.Tensor) -> None:
            out.copy_(sizes[transfer.index][transfer.shard])

        def unpack(transfer: Transfer, part: torch.Tensor) -> None:
            sizes[transfer.index][transfer.shard].copy_(part)

        with self._station.account.phase("exchange"):
            self._sizes.run(self._size_rounds, pack, unpack)
        for index, block in making.items():
            block.normalize(sizes[index])

    def _add(self, here: Sequence[SharedMatrix], making: _InTheMaking, rounds: SumRounds) -> None:
        """Put the sum of all parts' Gram matrices in the place of each part's.

        Args:
            here: The matrices of which this rank has a part.
            making: The parts.
            rounds: The rounds of all matrices that are added now.
        """
        matrices = {matrix.index: matrix for matrix in here}
        arena, device = self._station.wire.arena, self._station.wire.device

        def strip_of(index: int, number: int) -> torch.Tensor:
            start, end = matrices[index].strips[number]
            return making[index].gram[start:end, :end].unsqueeze(0)

        def read(transfer: Transfer, out: torch.Tensor) -> None:
            view = strip_of(transfer.index, transfer.shard)
            read_stretch(view, transfer.range.start, transfer.range.end, out)

        def write(transfer: Transfer, part: torch.Tensor) -> None:
            view = strip_of(transfer.index, transfer.shard)
            write_stretch(view, transfer.range.start, transfer.range.end, part)

        with self._station.account.phase("exchange"), ExitStack() as scratch:
            strips: dict[int, torch.Tensor] = {}
            for index, matrix in matrices.items():
                assert matrix.own is not None
                numel = strip_numel(matrix.strips[matrix.own])
                lent = arena.borrow(len(matrix.parts) * numel, self._dtype, device)
                strips[index] = scratch.enter_context(lent).view(len(matrix.parts), numel)
                read_stretch(strip_of(index, matrix.own), 0, numel, strips[index][matrix.own])

            def keep(transfer: Transfer, part: torch.Tensor) -> None:
                number = matrices[transfer.index].ranks.index(transfer.src)
                strips[transfer.index][number, transfer.range.start : transfer.range.end].copy_(
                    part
                )

            self._grams.run(rounds.gather, read, keep)
            for index, matrix in matrices.items():
                assert matrix.own is not None
                total = strips[index][0].to(torch.float32, copy=True)
                for other in strips[index][1:]:
                    total.add_(other)
                total = total.to(self._dtype)
                write_stretch(strip_of(index, matrix.own), 0, total.numel(), total)
            self._grams.run(rounds.spread, read, write)
        for index, matrix in matrices.items():
            gram = making[index].gram
            for start, end in matrix.strips:
                gram[:start, start:end].copy_(gram[start:end, :start].mT)
