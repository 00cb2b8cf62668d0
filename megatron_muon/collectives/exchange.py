"""Movement of matrices' pieces between the ranks of one group, in bounded scratch.

:class:`Exchange` carries out the rounds of a schedule: one all-to-all each, in which a piece goes
from the rank that has it to the rank that needs it and to no other, launched now and waited for
when it is needed. :func:`gather_flat` is the plain way, an all-gather to everyone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_muon.bookkeeping.schedule import Round, Transfer
from megatron_muon.collectives.arena import Arena


@dataclass(slots=True)
class Traffic:
    """What one step moved, counted where it happens.

    Attributes:
        calls: Collectives entered.
        nbytes: Bytes received from other ranks.
        peak_scratch_nbytes: Most bytes of scratch in use at one time: here those of the buffers of
            one collective. An optimizer that takes all of it from an arena writes the most that
            the arena had lent: these buffers, what is orthogonalized, shards and matrices that are
            put together, and what Newton-Schulz of whole matrices works in, but in its own kernels.
    """

    calls: int = 0
    nbytes: int = 0
    peak_scratch_nbytes: int = 0

    def count(self, received_nbytes: int, scratch_nbytes: int) -> None:
        """Count one collective."""
        self.calls += 1
        self.nbytes += received_nbytes
        self.peak_scratch_nbytes = max(self.peak_scratch_nbytes, scratch_nbytes)

    def clear(self) -> None:
        """Start again from zero."""
        self.calls = self.nbytes = self.peak_scratch_nbytes = 0

    def add(self, other: Traffic) -> None:
        """Add another count of the same step."""
        self.calls += other.calls
        self.nbytes += other.nbytes
        self.peak_scratch_nbytes = max(self.peak_scratch_nbytes, other.peak_scratch_nbytes)


@dataclass(frozen=True, slots=True)
class Wire:
    """How data travels.

    Attributes:
        dtype: Dtype of what is sent.
        device: Device of the buffers.
        arena: Where the buffers come from.
        traffic: Where collectives are counted.
        budget_nbytes: Bytes that a rank may send and receive in one collective.
    """

    dtype: torch.dtype
    device: torch.device
    arena: Arena
    traffic: Traffic
    budget_nbytes: int

    @property
    def budget_numel(self) -> int:
        """The budget in elements."""
        return self.budget_nbytes // self.dtype.itemsize


Pack = Callable[[Transfer, torch.Tensor], None]
"""Fills a flat buffer with what a transfer sends."""

Unpack = Callable[[Transfer, torch.Tensor], None]
"""Stores what a transfer brought."""


class Exchange:
    """Carries out rounds of transfers over one group.

    Every rank of the group starts the same rounds in the same order, with its part in each.
    """

    def __init__(self, group: dist.ProcessGroup | None, wire: Wire) -> None:
        """Exchange over ``group``; ``None`` is a group of one rank, which has no rounds."""
        self.group = group
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.wire = wire

    def start(
        self,
        rounds: Sequence[Round],
        pack: Pack,
        packed: Callable[[], None] = lambda: None,
        at_once: bool = True,
    ) -> Flight:
        """Send transfers on their way.

        Args:
            rounds: This rank's part in each collective.
            pack: Called for each transfer that this rank sends.
            packed: Called when all are packed: what they were packed from is not read again.
            at_once: Whether to launch every round now; else one, and each other when the one before
                has landed, so that the buffers of one are lent at a time.
        """
        return Flight(self, rounds, pack, packed, len(rounds) if at_once else 1)

    def run(self, rounds: Sequence[Round], pack: Pack, unpack: Unpack) -> None:
        """Send and receive transfers, one round at a time.

        Args:
            rounds: This rank's part in each collective.
            pack: Called for each transfer that this rank sends.
            unpack: Called for each transfer that this rank receives, see :meth:`Flight.land`.
        """
        with self.start(rounds, pack, at_once=False) as flight:
            flight.land(unpack)


@dataclass(slots=True)
class _Launched:
    """A round that was launched.

    Attributes:
        round_: The round.
        receive: What is received into.
        under_way: What is waited for and what is sent, ``None`` once it has been waited for: the
            first holds the second.
    """

    round_: Round
    receive: torch.Tensor
    under_way: tuple[dist.Work, torch.Tensor] | None


class Flight:
    """Transfers on their way; made by :meth:`Exchange.start`.

    A buffer goes back to the arena when its collective has ended and not before. Leaving the
    context with some under way, as an error does, waits for none, since other ranks may never enter
    it: their buffers are given up and never lent again.
    """

    def __init__(
        self,
        exchange: Exchange,
        rounds: Sequence[Round],
        pack: Pack,
        packed: Callable[[], None],
        num_at_once: int,
    ) -> None:
        """Launch the first rounds, at most ``num_at_once`` of them."""
        self._group, self._wire = exchange.group, exchange.wire
        self._pack, self._packed = pack, packed
        self._waiting, self._launched = deque(rounds), deque[_Launched]()
        if not rounds:
            packed()
        try:
            self._launch(num_at_once)
        except BaseException:
            self.give_up()
            raise

    def wait(self) -> None:
        """Wait for the rounds that are under way; what they sent from goes back to the arena."""
        for launched in self._launched:
            if launched.under_way is not None:
                work, send = launched.under_way
                work.wait()
                launched.under_way = None
                self._wire.arena.give_back(send)

    def land(self, unpack: Unpack) -> None:
        """Wait for every transfer.

        Args:
            unpack: Called for each transfer that this rank receives; the buffer it is given is
                scratch, so it copies.
        """
        while self._launched:
            if self._launched[0].under_way is not None:
                self.wait()
            landed = self._launched.popleft()
            try:
                for transfer, part in _parts(landed.round_.incoming, landed.receive):
                    unpack(transfer, part)
            finally:
                self._wire.arena.give_back(landed.receive)
            self._launch(1)

    def __enter__(self) -> Flight:
        return self

    def __exit__(self, *error: object) -> None:
        self.give_up()

    def give_up(self) -> None:
        """Forget what is under way."""
        while self._launched:
            launched = self._launched.popleft()
            if launched.under_way is not None:
                self._wire.arena.give_up(launched.under_way[1])
            self._wire.arena.give_up(launched.receive)

    def _launch(self, number: int) -> None:
        """Pack the next rounds and launch them.

        What is received into is taken after all are packed: if nothing waits any more, what they
        were packed from may be free by then.
        """
        packed: deque[tuple[Round, torch.Tensor]] = deque()
        arena = self._wire.arena
        try:
            while self._waiting and len(packed) < number:
                round_ = self._waiting.popleft()
                send = arena.take(sum(round_.sent), self._wire.dtype, self._wire.device)
                packed.append((round_, send))
                for transfer, part in _parts(round_.outgoing, send):
                    self._pack(transfer, part)
            if packed and not self._waiting:
                self._packed()
            while packed:
                self._launch_packed(*packed[0])
                packed.popleft()
        except BaseException:
            for _, send in packed:
                arena.give_up(send)
            raise

    def _launch_packed(self, round_: Round, send: torch.Tensor) -> None:
        wire = self._wire
        receive = wire.arena.take(sum(round_.received), wire.dtype, wire.device)
        try:
            work = dist.all_to_all_single(
                receive, send, list(round_.received), list(round_.sent), group=self._group,
                async_op=True,
            )  # fmt: skip
        except BaseException:
            wire.arena.give_up(receive)
            raise
        assert work is not None
        self._launched.append(_Launched(round_, receive, (work, send)))
        wire.traffic.count(receive.nbytes, send.nbytes + receive.nbytes)


def _parts(
    transfers: Sequence[Transfer], buffer: torch.Tensor
) -> list[tuple[Transfer, torch.Tensor]]:
    parts = torch.split(buffer, [transfer.range.numel for transfer in transfers])
    return list(zip(transfers, parts, strict=True)) if transfers else []


def gather_flat(
    group: dist.ProcessGroup,
    own: torch.Tensor | None,
    numels: Sequence[int],
    write: Callable[[int, int, torch.Tensor], None],
    wire: Wire,
) -> None:
    """All-gather a flat tensor of each rank to every rank of a group, chunk by chunk.

    Args:
        group: The group; every rank enters with the same sizes.
        own: This rank's tensor, flat; ``None`` if it has none.
        numels: Elements of each rank's tensor.
        write: Called with a rank, the first element and the chunk of its tensor from there on, for
            this rank's own too; the chunk is scratch.
        wire: How it travels; a chunk is as large as the budget allows.
    """
    size, longest = group.size(), max(numels)
    chunk = max(1, min(longest, wire.budget_numel // (size + 1)))
    with (
        wire.arena.borrow(chunk, wire.dtype, wire.device) as send,
        wire.arena.borrow(chunk * size, wire.dtype, wire.device) as receive,
    ):
        for start in range(0, longest, chunk):
            if own is not None and start < own.numel():
                part = own[start : start + chunk]
                send[: part.numel()].copy_(part)
            dist.all_gather_into_tensor(receive, send, group=group)
            wire.traffic.count(receive.nbytes - send.nbytes, send.nbytes + receive.nbytes)
            for rank, numel in enumerate(numels):
                length = min(chunk, numel - start)
                if length > 0:
                    write(rank, start, receive[rank * chunk : rank * chunk + length])


def reduce_flat(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    wire: Wire,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """All-reduce a flat contiguous tensor in place, chunk by chunk within the budget."""
    chunk = max(1, wire.budget_nbytes // (2 * x.element_size()))
    for start in range(0, x.numel(), chunk):
        part = x[start : start + chunk]
        dist.all_reduce(part, op=op, group=group)
        wire.traffic.count(part.nbytes, 2 * part.nbytes)
