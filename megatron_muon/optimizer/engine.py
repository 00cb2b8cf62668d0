"""The engine: momentum on pieces in, updates on the same pieces out, each matrix whole in between.

Both layouts and the plain :class:`~megatron_muon.optimizer.flat.Muon` step through it. What moves
is decided by the schedule, how by the collectives; here both meet the mathematics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Literal

import torch

from megatron_muon.bookkeeping.dist_meta import ParamRange
from megatron_muon.bookkeeping.parts import long_dim
from megatron_muon.bookkeeping.plan import PlannedMatrix
from megatron_muon.bookkeeping.schedule import (
    MicroGroup,
    Round,
    Stages,
    Transfer,
    make_schedule,
    overlaps,
    room_to_overlap,
    stages_of,
)
from megatron_muon.bookkeeping.units import PlannedPart, units_of
from megatron_muon.collectives.arena import Arena, Loans
from megatron_muon.collectives.exchange import Flight, Pack
from megatron_muon.collectives.shards import part_of_piece
from megatron_muon.errors import PlanError
from megatron_muon.optimizer.account import StepAccount
from megatron_muon.optimizer.gathered import gathered_update
from megatron_muon.optimizer.pipeline import Life, step_one_by_one, step_overlapped
from megatron_muon.optimizer.shared import SharedBlocks
from megatron_muon.optimizer.station import Station
from megatron_muon.optimizer.together import orthogonalize_together

Read = Callable[[PlannedMatrix, torch.Tensor], None]
"""Writes what is orthogonalized of this rank's piece of a matrix to a flat fp32 tensor."""

Apply = Callable[[PlannedMatrix, torch.Tensor], None]
"""Takes the update of this rank's piece of a matrix, flat, fp32; it is scratch."""

Done = Callable[[Sequence[str]], None]
"""Takes names of matrices whose updates all ranks of the grid have applied, on every rank and in
the order of the schedule."""

Hop = Literal["to_row", "to_home", "from_home", "from_row"]
"""One of the hops of a :class:`MicroGroup`."""


class Engine:
    """Orthogonalizes the matrices of one data x tensor grid; every rank of the grid steps it.

    Micro-groups may overlap: each is a generator that stops while its data is under way
    (:mod:`~megatron_muon.optimizer.pipeline`). All collectives are launched from one thread, in the
    order of the plan.

    Attributes:
        matrices: The matrices of the grid.
        plan: What it moves and works on: the matrices, in the place of each shared one its parts.
        station: This rank.
        position: Its place.
        schedule: What it moves.
        stages: The hops of the grid.
        is_pipelined: Whether micro-groups overlap.
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
        wire, settings, tp_size = station.wire, station.settings, self.position.tp_size
        held_numel = settings.budget_nbytes // torch.float32.itemsize
        self.is_pipelined = overlaps(
            self.plan, tp_size, self._spread, wire.budget_numel, held_numel, settings.by_bucket
        )
        self.schedule: list[MicroGroup] = make_schedule(
            self.plan,
            self.position,
            self._spread,
            wire.budget_numel,
            held_numel,
            by_bucket=settings.by_bucket,
            overlapped=self.is_pipelined,
        )
        self._shared = SharedBlocks(self.plan, [g.indices for g in self.schedule], station)
        self.stages: Stages = stages_of(self.plan, tp_size, self._spread)

    def budget_to_overlap(self) -> int | None:
        """Return the least budget, in bytes, with which micro-groups overlap.

        ``None`` if there is none: nothing moves, or with so much room all is one micro-group.
        """
        tp_size, itemsize = self.position.tp_size, self.station.wire.dtype.itemsize
        moved, held = room_to_overlap(self.plan, tp_size, self._spread)
        nbytes = max(moved * itemsize, held * torch.float32.itemsize)
        budgets = nbytes // itemsize, nbytes // torch.float32.itemsize
        by_bucket = self.station.settings.by_bucket
        do_overlap = overlaps(self.plan, tp_size, self._spread, *budgets, by_bucket)
        return nbytes if do_overlap else None

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
            for i in range(len(self.plan)):  # nothing is shared then
                with ExitStack() as scratch:
                    self._step_by_gather(i, read, apply, scratch)
            return
        with ExitStack() as lives:
            steps = [
                lives.enter_context(closing(self._step(number, read, apply, done)))
                for number in range(len(self.schedule))
            ]
            if self.is_pipelined:
                step_overlapped(steps, self.stages.num_in, self.stages.num_out)
            else:
                step_one_by_one(steps)

    def _step_by_gather(self, i: int, read: Read, apply: Apply, scratch: ExitStack) -> None:
        planned, range_ = self.plan[i], self._ranges.get(i)
        own = None if range_ is None else self.station.borrow(range_.numel, scratch)
        if own is not None:
            with self.station.account.phase("momentum"):
                self._read_one(planned, own, read)
        update = gathered_update(self.station, planned, range_, own, scratch)
        if update is not None:
            with self.station.account.phase("update"):
                apply(planned, update)

    def _step(self, number: int, read: Read, apply: Apply, done: Done | None) -> Life:
        """Step one micro-group, by its number; where it stops, see :data:`Life`."""
        group, account = self.schedule[number], self.station.account
        with ExitStack() as scratch:
            inputs, shards, updates, pieces = (
                scratch.enter_context(self.station.loans()) for _ in range(4)
            )
            with account.phase("momentum"):
                self._read(group, read, inputs)
            yield from self._to_row(number, inputs, shards)
            if self._spread.whole:
                yield from self._at_home(number, shards, updates)
            else:
                yield
                account.note("newton_schulz starts", number)
                self._on_shards(group, shards, updates)
                account.note("newton_schulz ends", number)
                yield
            yield from self._from_row(number, updates, pieces)
            with account.phase("update"):
                self._apply(pieces, apply)
        if done is not None:
            done(self._names_of(group))

    def _names_of(self, group: MicroGroup) -> list[str]:
        """Return the matrices of a micro-group, which has all parts of a shared one."""
        planned = [self.plan[i] for i in group.indices]
        return [(p.whole if isinstance(p, PlannedPart) else p).matrix.name for p in planned]

    def _read(self, group: MicroGroup, read: Read, inputs: Loans) -> None:
        """Read what is orthogonalized of this rank's pieces; one of a shared matrix is cut."""
        with self.station.loans() as wholes:
            for i in group.held:
                planned = self.plan[i]
                place = inputs.borrow(i, self._ranges[i].numel)
                if not isinstance(planned, PlannedPart):
                    self._read_one(planned, place, read)
                    continue
                first = i - planned.number
                if first not in wholes:
                    name = planned.whole.matrix.name
                    whole = wholes.borrow(first, self._held[name].numel)
                    self._read_one(planned.whole, whole, read)
                views = self._views(planned, wholes[first])
                for part, view in zip(_like(views, place), views, strict=True):
                    part.copy_(view)

    def _read_one(self, planned: PlannedMatrix, out: torch.Tensor, read: Read) -> None:
        read(planned, out)
        self.station.round_(out)

    def _apply(self, pieces: Loans, apply: Apply) -> None:
        """Apply the updates of this rank's pieces; of a shared matrix, that of all its parts."""
        wholes: dict[str, PlannedMatrix] = {}
        with self.station.loans() as updates:
            for i, update in pieces.items():
                planned = self.plan[i]
                if not isinstance(planned, PlannedPart):
                    apply(planned, update)
                    continue
                name = planned.whole.matrix.name
                first = i - planned.number
                if first not in updates:
                    wholes[name] = planned.whole
                    updates.borrow(first, self._held[name].numel)
                views = self._views(planned, updates[first])
                for part, view in zip(_like(views, update), views, strict=True):
                    view.copy_(part)
            for planned, update in zip(wholes.values(), updates.values(), strict=True):
                apply(planned, update)

    def _views(self, part: PlannedPart, piece: torch.Tensor) -> list[torch.Tensor]:
        """View the elements of a part in this rank's piece of the whole matrix."""
        matrix = part.whole.matrix
        _, columns = matrix.local_shape
        start = self._held[matrix.name].start
        return list(part_of_piece(piece, start, columns, long_dim(matrix), part.lines))

    def _to_row(self, number: int, inputs: Loans, shards: Loans) -> Life:
        """Bring the pieces of each matrix to its home's data-parallel rank, a flat shard each."""
        group, account = self.schedule[number], self.station.account

        def pack(transfer: Transfer, out: torch.Tensor) -> None:
            start = self._ranges[transfer.index].start
            out.copy_(_stretch_of(inputs[transfer.index], transfer.range, start))

        def packed() -> None:
            for i in inputs.keys() - set(group.in_row):
                inputs.drop(i)

        def unpack(transfer: Transfer, part: torch.Tensor) -> None:
            _stretch_of(shards[transfer.index], transfer.range).copy_(part)

        with self._launch("to_row", number, pack, packed) as flight:
            if self.stages.to_row:
                yield
            with account.phase("exchange"):
                flight.wait()
                for i in group.in_row:
                    planned = self.plan[i]
                    if not planned.matrix.is_cut and not self.is_home(planned):
                        continue  # this rank's copy of it is not needed
                    if planned.owned.owner == self.position.dp and i in inputs:
                        inputs.pass_on(i, shards, (-1,))
                        continue
                    shards.borrow(i, self._shard_numel(planned))
                    if i in inputs:
                        _stretch_of(shards[i], self._ranges[i]).copy_(inputs[i])
                flight.land(unpack)
            account.note("to_row ends", number)
        inputs.drop_all()

    def _from_row(self, number: int, updates: Loans, pieces: Loans) -> Life:
        """Send each data-parallel rank its piece of every update's shard."""
        group, account = self.schedule[number], self.station.account

        def pack(transfer: Transfer, out: torch.Tensor) -> None:
            out.copy_(_stretch_of(updates[transfer.index], transfer.range))

        def packed() -> None:
            for i in updates.keys() - set(group.held):
                updates.drop(i)

        def unpack(transfer: Transfer, part: torch.Tensor) -> None:
            start = self._ranges[transfer.index].start
            _stretch_of(pieces[transfer.index], transfer.range, start).copy_(part)

        with self._launch("from_row", number, pack, packed) as flight:
            if self.stages.to_row:
                yield
            with account.phase("exchange"):
                flight.wait()
                for i in group.held:
                    range_ = self._ranges[i]
                    if self.plan[i].home.dp == self.position.dp:
                        pieces[i] = _stretch_of(updates[i], range_)
                    else:
                        pieces.borrow(i, range_.numel)
                flight.land(unpack)
            account.note("from_row ends", number)

    def _at_home(self, number: int, shards: Loans, updates: Loans) -> Life:
        """From the shards of a row to the shards of its updates, by way of the whole matrices."""
        group, account = self.schedule[number], self.station.account
        with self.station.loans() as wholes:
            yield from self._to_home(number, shards, wholes)
            yield
            account.note("newton_schulz starts", number)
            self._shared.orthogonalize(group.indices, wholes)
            self.station.orthogonalize(
                [
                    (whole, whole, self.plan[i].matrix.blocks)
                    for i, whole in wholes.items()
                    if not isinstance(self.plan[i], PlannedPart)
                ]
            )
            for i in wholes:
                self.station.round_(wholes[i])
            account.note("newton_schulz ends", number)
            yield
            yield from self._from_home(number, wholes, updates)

    def _to_home(self, number: int, shards: Loans, wholes: Loans) -> Life:
        """Put the shards of each matrix together at its home."""
        group, account = self.schedule[number], self.station.account
        at_home = [i for i in group.in_row if self.is_home(self.plan[i])]

        def pack(transfer: Transfer, out: torch.Tensor) -> None:
            out.copy_(_stretch_of(shards[transfer.index], transfer.range))

        def packed() -> None:
            for i in shards.keys() - set(at_home):
                shards.drop(i)

        def unpack(transfer: Transfer, part: torch.Tensor) -> None:
            matrix = self.plan[transfer.index].matrix
            whole = wholes[transfer.index]
            self.station.write_shard(matrix, whole, transfer.shard, transfer.range, part)

        with self._launch("to_home", number, pack, packed) as flight:
            if self.stages.to_home:
                yield
            with account.phase("exchange"):
                flight.wait()
                for i in at_home:
                    matrix = self.plan[i].matrix
                    if not self.station.is_cut(matrix):
                        shards.pass_on(i, wholes, matrix.shape)
                        continue
                    wholes.borrow(i, matrix.numel)
                    wholes[i] = wholes[i].view(matrix.shape)
                    held = ParamRange(0, shards[i].numel())
                    self.station.write_shard(matrix, wholes[i], self.position.tp, held, shards[i])
                flight.land(unpack)
            account.note("to_home ends", number)
        shards.drop_all()

    def _from_home(self, number: int, results: Loans, updates: Loans) -> Life:
        """Cut each update into the shards of its row."""
        group, account = self.schedule[number], self.station.account
        for i in results:
            matrix = self.plan[i].matrix
            if self.station.is_cut(matrix):
                updates.borrow(i, self._shard_numel(self.plan[i]))
                held = ParamRange(0, updates[i].numel())
                self.station.read_shard(matrix, results[i], self.position.tp, held, updates[i])
            else:
                updates[i] = results[i].view(-1)

        def pack(transfer: Transfer, out: torch.Tensor) -> None:
            matrix = self.plan[transfer.index].matrix
            whole = results[transfer.index]
            self.station.read_shard(matrix, whole, transfer.shard, transfer.range, out)

        def packed() -> None:
            for i in list(results):
                if self.station.is_cut(self.plan[i].matrix):
                    results.drop(i)
                else:
                    results.pass_on(i, updates, (-1,))

        def unpack(transfer: Transfer, part: torch.Tensor) -> None:
            _stretch_of(updates[transfer.index], transfer.range).copy_(part)

        with self._launch("from_home", number, pack, packed) as flight:
            if self.stages.from_home:
                yield
            with account.phase("exchange"):
                flight.wait()
                for i in group.in_row:
                    if i not in updates:
                        updates.borrow(i, self._shard_numel(self.plan[i]))
                flight.land(unpack)
            account.note("from_home ends", number)

    def _on_shards(self, group: MicroGroup, shards: Loans, updates: Loans) -> None:
        """From shards to shards of updates without bringing the whole together."""
        for i in group.in_row:
            matrix, station = self.plan[i].matrix, self.station
            x = shards[i].view(matrix.local_shape)
            if station.settings.mode == "blockwise":
                station.orthogonalize([(x, x, matrix.local_blocks())])
            elif not station.is_cut(matrix):
                station.orthogonalize([(x, x, matrix.blocks)])
            else:
                orthogonalize_together(station, x, matrix)
            station.round_(x)
            shards.pass_on(i, updates, (-1,))

    def _launch(
        self, hop: Hop, number: int, pack: Pack, packed: Callable[[], None] = lambda: None
    ) -> Flight:
        """Launch a hop of a micro-group, all of its rounds.

        One after the other would not take less memory: nothing that a rank packs from is free
        before the last of them is packed.
        """
        exchange = self.station.rows if hop.endswith("row") else self.station.columns
        rounds: tuple[Round, ...] = getattr(self.schedule[number], hop)
        with self.station.account.phase("exchange"):
            flight = exchange.start(rounds, pack, packed)
        self.station.account.note(f"{hop} starts", number)
        return flight

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


def _like(views: Sequence[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """View a flat tensor as tensors of the shapes of some views, one after the other."""
    parts = torch.split(flat, [view.numel() for view in views])
    return [part.view(view.shape) for part, view in zip(parts, views, strict=True)]


def _stretch_of(flat: torch.Tensor, range_: ParamRange, start: int = 0) -> torch.Tensor:
    """View the elements of a range in a flat tensor whose first element is ``start``."""
    return flat[range_.start - start : range_.end - start]


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
    account.settle()
