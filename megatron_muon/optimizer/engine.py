"""The engine: momentum on pieces in, updates on the same pieces out, each matrix whole in between.

Both layouts and the plain :class:`~megatron_muon.optimizer.flat.Muon` step through it. What moves
is decided by the schedule, how by the collectives; here both meet the mathematics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from megatron_muon.bookkeeping.dist_meta import ParamRange
from megatron_muon.bookkeeping.parts import long_dim
from megatron_muon.bookkeeping.plan import PlannedMatrix
from megatron_muon.bookkeeping.schedule import MicroGroup, Transfer, make_schedule
from megatron_muon.bookkeeping.units import PlannedPart, units_of
from megatron_muon.collectives.arena import Arena
from megatron_muon.collectives.shards import part_of_piece
from megatron_muon.errors import PlanError
from megatron_muon.optimizer.account import StepAccount
from megatron_muon.optimizer.gathered import gathered_update
from megatron_muon.optimizer.shared import SharedBlocks
from megatron_muon.optimizer.station import Station
from megatron_muon.optimizer.together import orthogonalize_together

Read = Callable[[PlannedMatrix], torch.Tensor]
"""Returns what is orthogonalized of this rank's piece of a matrix, flat, fp32; scratch."""

Apply = Callable[[PlannedMatrix, torch.Tensor], None]
"""Takes the update of this rank's piece of a matrix, flat, fp32; it is scratch."""

Done = Callable[[Sequence[str]], None]
"""Takes names of matrices whose updates all ranks of the grid have applied, on every rank and in
the order of the schedule."""

Tensors = dict[int, torch.Tensor]
"""By the matrix's place in the plan."""


class Engine:
    """Orthogonalizes the matrices of one data x tensor grid; every rank of the grid steps it.

    Attributes:
        matrices: The matrices.
        plan: What it moves and works on: the matrices, in the place of each shared one its parts.
        schedule: How.
    """

    def __init__(self, plan: Sequence[PlannedMatrix], station: Station) -> None:
        """Make the schedule.

        Args:
            plan: The matrices of the grid, ordered by name, the same on every rank.
            station: This rank.

        Raises:
            PlanError: A matrix is cut over another number of ranks than the group has.
            ConfigurationError: The mode cannot step a matrix.
        """
        self.matrices, self.plan, self.station = tuple(plan), units_of(plan), station
        self.position, self._spread = station.position, station.settings.spread
        self._held: dict[str, ParamRange] = {}
        for planned in self.matrices:
            self._check(planned)
            range_ = planned.owned.range_on(self.position.dp, self.position.tp)
            if range_ is not None:
                self._held[planned.matrix.name] = range_
        self._ranges: dict[int, ParamRange] = {}
        for i, planned in enumerate(self.plan):
            if isinstance(planned, PlannedPart):
                range_ = planned.owned.range_on(self.position.dp, self.position.tp)
            else:
                range_ = self._held.get(planned.matrix.name)
            if range_ is not None:
                self._ranges[i] = range_
        self.schedule: list[MicroGroup] = make_schedule(
            self.plan,
            self.position,
            self._spread,
            station.wire.budget_numel,
            station.settings.budget_nbytes // torch.float32.itemsize,
            station.settings.by_bucket,
        )
        self._shared = SharedBlocks(self.plan, [g.indices for g in self.schedule], station)

    def held_numel(self) -> dict[str, int]:
        """Return how many elements this rank has of each matrix that it has a piece of.

        They are the first ones of what it holds: what fills a shard up is never touched.
        """
        return {name: range_.numel for name, range_ in self._held.items()}

    def is_home(self, planned: PlannedMatrix) -> bool:
        """Whether this rank orthogonalizes a matrix, alone or with the others of its row."""
        if planned.home.dp != self.position.dp:
            return False
        return self._spread.everywhere or planned.home.tp == self.position.tp

    def step(self, read: Read, apply: Apply, done: Done | None = None) -> None:
        """Orthogonalize every matrix once.

        Args:
            read: Called once for each matrix that this rank has a piece of.
            apply: Called with the update of each such piece.
            done: Called after each micro-group.
        """
        if self.station.settings.exchange == "gather":
            for i in range(len(self.plan)):
                with ExitStack() as scratch:
                    self._step_by_gather(i, read, apply, scratch)
            return
        for group in self.schedule:
            with ExitStack() as scratch:
                self._step(group, read, apply, scratch)
            if done is not None:
                done(self._names_of(group))

    def _step_by_gather(self, i: int, read: Read, apply: Apply, scratch: ExitStack) -> None:
        planned, range_ = self.plan[i], self._ranges.get(i)
        own = None if range_ is None else self._input(planned, read)
        update = gathered_update(self.station, planned, range_, own, scratch)
        if update is not None:
            with self.station.account.phase("update"):
                apply(planned, update)

    def _step(self, group: MicroGroup, read: Read, apply: Apply, scratch: ExitStack) -> None:
        inputs = self._inputs(group, read, scratch)
        shards = self._to_row(group, inputs, scratch)
        inputs.clear()
        if self._spread.whole:
            updates = self._at_home(group, shards, scratch)
        else:
            updates = self._on_shards(group, shards)
        pieces = self._from_row(group, updates, scratch)
        with self.station.account.phase("update"):
            self._apply(pieces, apply, scratch)

    def _names_of(self, group: MicroGroup) -> list[str]:
        """Return the matrices of a micro-group, which has all parts of a shared one."""
        planned = [self.plan[i] for i in group.indices]
        return [(p.whole if isinstance(p, PlannedPart) else p).matrix.name for p in planned]

    def _inputs(self, group: MicroGroup, read: Read, scratch: ExitStack) -> Tensors:
        """Read what is orthogonalized of this rank's pieces; one of a shared matrix is cut."""
        inputs: Tensors = {}
        wholes: dict[str, torch.Tensor] = {}
        for i in group.held:
            planned = self.plan[i]
            if not isinstance(planned, PlannedPart):
                inputs[i] = self._input(planned, read)
                continue
            name = planned.whole.matrix.name
            if name not in wholes:
                wholes[name] = self._input(planned.whole, read)
            views = self._views(planned, wholes[name])
            if len(views) == 1 and views[0].is_contiguous():
                inputs[i] = views[0].flatten()
                continue
            inputs[i] = self.station.borrow(self._ranges[i].numel, scratch)
            for part, view in zip(_like(views, inputs[i]), views, strict=True):
                part.copy_(view)
        return inputs

    def _apply(self, pieces: Tensors, apply: Apply, scratch: ExitStack) -> None:
        """Apply the updates of this rank's pieces; of a shared matrix, that of all its parts."""
        wholes: dict[str, tuple[PlannedMatrix, torch.Tensor]] = {}
        for i, update in pieces.items():
            planned = self.plan[i]
            if not isinstance(planned, PlannedPart):
                apply(planned, update)
                continue
            name = planned.whole.matrix.name
            if name not in wholes:
                numel = self._held[name].numel
                wholes[name] = planned.whole, self.station.borrow(numel, scratch)
            views = self._views(planned, wholes[name][1])
            for part, view in zip(_like(views, update), views, strict=True):
                view.copy_(part)
        for planned, update in wholes.values():
            apply(planned, update)

    def _views(self, part: PlannedPart, piece: torch.Tensor) -> list[torch.Tensor]:
        """View the elements of a part in this rank's piece of the whole matrix."""
        matrix = part.whole.matrix
        _, columns = matrix.local_shape
        start = self._held[matrix.name].start
        return list(part_of_piece(piece, start, columns, long_dim(matrix), part.lines))

    def _input(self, planned: PlannedMatrix, read: Read) -> torch.Tensor:
        with self.station.account.phase("momentum"):
            return self.station.round_(read(planned))

    def _to_row(self, group: MicroGroup, inputs: Tensors, scratch: ExitStack) -> Tensors:
        """Bring the pieces of each matrix to its home's data-parallel rank, a flat shard each."""
        shards: Tensors = {}
        for i in group.in_row:
            planned = self.plan[i]
            if not planned.matrix.is_cut and not self.is_home(planned):
                continue  # this rank's copy of it is not needed
            if planned.owned.owner == self.position.dp and i in inputs:
                shards[i] = inputs[i]
                continue
            shards[i] = self.station.borrow(self._shard_numel(planned), scratch)
            if i in inputs:
                _stretch_of(shards[i], self._ranges[i]).copy_(inputs[i])

        def pack(transfer: Transfer, out: torch.Tensor) -> None:
            start = self._ranges[transfer.index].start
            out.copy_(_stretch_of(inputs[transfer.index], transfer.range, start))

        def unpack(transfer: Transfer, part: torch.Tensor) -> None:
            _stretch_of(shards[transfer.index], transfer.range).copy_(part)

        with self.station.account.phase("exchange"):
            self.station.rows.run(group.to_row, pack, unpack)
        return shards

    def _from_row(self, group: MicroGroup, updates: Tensors, scratch: ExitStack) -> Tensors:
        """Send each data-parallel rank its piece of every update's shard."""
        pieces: Tensors = {}
        for i in group.held:
            range_ = self._ranges[i]
            if self.plan[i].home.dp == self.position.dp:
                pieces[i] = _stretch_of(updates[i], range_)
            else:
                pieces[i] = self.station.borrow(range_.numel, scratch)

        def pack(transfer: Transfer, out: torch.Tensor) -> None:
            out.copy_(_stretch_of(updates[transfer.index], transfer.range))

        def unpack(transfer: Transfer, part: torch.Tensor) -> None:
            start = self._ranges[transfer.index].start
            _stretch_of(pieces[transfer.index], transfer.range, start).copy_(part)

        with self.station.account.phase("exchange"):
            self.station.rows.run(group.from_row, pack, unpack)
        return pieces

    def _at_home(self, group: MicroGroup, shards: Tensors, scratch: ExitStack) -> Tensors:
        """From the shards of a row to the shards of its updates, by way of the whole matrices."""
        wholes = self._to_home(group, shards, scratch)
        self._shared.orthogonalize(group.indices, wholes)
        self.station.orthogonalize(
            [
                (whole, whole, self.plan[i].matrix.blocks)
                for i, whole in wholes.items()
                if not isinstance(self.plan[i], PlannedPart)
            ]
        )
        results = {i: self.station.round_(whole) for i, whole in wholes.items()}
        return self._from_home(group, results, scratch)

    def _to_home(self, group: MicroGroup, shards: Tensors, scratch: ExitStack) -> Tensors:
        """Put the shards of each matrix together at its home."""
        wholes: Tensors = {}
        for i in filter(lambda i: self.is_home(self.plan[i]), group.in_row):
            matrix = self.plan[i].matrix
            if not self.station.is_cut(matrix):
                wholes[i] = shards[i].view(matrix.shape)
                continue
            wholes[i] = self.station.borrow(matrix.numel, scratch).view(matrix.shape)
            held = ParamRange(0, shards[i].numel())
            self.station.write_shard(matrix, wholes[i], self.position.tp, held, shards[i])

        def pack(transfer: Transfer, out: torch.Tensor) -> None:
            out.copy_(_stretch_of(shards[transfer.index], transfer.range))

        def unpack(transfer: Transfer, part: torch.Tensor) -> None:
            matrix = self.plan[transfer.index].matrix
            whole = wholes[transfer.index]
            self.station.write_shard(matrix, whole, transfer.shard, transfer.range, part)

        with self.station.account.phase("exchange"):
            self.station.columns.run(group.to_home, pack, unpack)
        return wholes

    def _from_home(self, group: MicroGroup, results: Tensors, scratch: ExitStack) -> Tensors:
        """Cut each update into the shards of its row."""
        updates: Tensors = {}
        for i in group.in_row:
            matrix = self.plan[i].matrix
            if i in results and not self.station.is_cut(matrix):
                updates[i] = results[i].view(-1)
                continue
            updates[i] = self.station.borrow(self._shard_numel(self.plan[i]), scratch)
            if i in results:
                held = ParamRange(0, updates[i].numel())
                self.station.read_shard(matrix, results[i], self.position.tp, held, updates[i])

        def pack(transfer: Transfer, out: torch.Tensor) -> None:
            matrix = self.plan[transfer.index].matrix
            whole = results[transfer.index]
            self.station.read_shard(matrix, whole, transfer.shard, transfer.range, out)

        def unpack(transfer: Transfer, part: torch.Tensor) -> None:
            _stretch_of(updates[transfer.index], transfer.range).copy_(part)

        with self.station.account.phase("exchange"):
            self.station.columns.run(group.from_home, pack, unpack)
        return updates

    def _on_shards(self, group: MicroGroup, shards: Tensors) -> Tensors:
        """From shards to shards of updates without bringing the whole together."""
        updates: Tensors = {}
        for i in group.in_row:
            matrix, station = self.plan[i].matrix, self.station
            x = shards[i].view(matrix.local_shape)
            if station.settings.mode == "blockwise":
                station.orthogonalize([(x, x, matrix.local_blocks())])
            elif not station.is_cut(matrix):
                station.orthogonalize([(x, x, matrix.blocks)])
            else:
                orthogonalize_together(station, x, matrix)
            updates[i] = station.round_(x).view(-1)
        return updates

    def _shard_numel(self, planned: PlannedMatrix) -> int:
        """Return the elements of this rank's shard that are of the matrix."""
        return planned.matrix.held_numel(self.position.tp)

    def _check(self, planned: PlannedMatrix) -> None:
        """Check that the group and the mode fit a matrix."""
        matrix = planned.matrix
        if matrix.is_cut and matrix.row_size != self.position.tp_size:
            raise PlanError(
                f"{matrix.name} is cut over {matrix.row_size} ranks, the "
                f"{'expert ' if matrix.expert_tp else ''}tensor-parallel group of the optimizer "
                f"has {self.position.tp_size}. Give the optimizer the process groups of the model."
            )
        if not self._spread.whole:
            matrix.local_blocks()


def _stretch_of(flat: torch.Tensor, range_: ParamRange, start: int = 0) -> torch.Tensor:
    """View the elements of a range in a flat tensor whose first element is ``start``."""
    return flat[range_.start - start : range_.end - start]


def _like(views: Sequence[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """View a flat tensor as tensors of the shapes of some views, one after the other."""
    parts = torch.split(flat, [view.numel() for view in views])
    return [part.view(view.shape) for part, view in zip(parts, views, strict=True)]


def run_engines(
    engines: Sequence[Engine],
    account: StepAccount,
    arena: Arena,
    read: Read,
    apply: Apply,
    done: Done | None = None,
) -> None:
    """Step every engine once; afterwards the account is of this step alone.

    Args:
        engines: Engines that share the account and the arena.
        account: Where work is counted.
        arena: Where scratch comes from.
        read: See :meth:`Engine.step`.
        apply: See :meth:`Engine.step`.
        done: See :meth:`Engine.step`.
    """
    account.clear()
    arena.restart_peak()
    for engine in engines:
        engine.step(read, apply, done)
    account.traffic.peak_scratch_nbytes = arena.peak_lent_nbytes
