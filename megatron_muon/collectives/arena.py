"""Scratch memory that is used again from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import torch

CACHE_NBYTES = 256 * 2**20
"""Default for the bytes an arena keeps between uses."""

_Key = tuple[int, torch.dtype, torch.device]


class Arena:
    """Lends flat tensors and keeps those that came back, the least recently used given up first.

    A tensor that is lent is nobody else's until it comes back, so a live result is never written
    over. What is kept is within a cap, and together with what is lent never more than the most that
    was lent at one time: keeping costs no memory beyond that. Who borrows bounds what is lent, by
    working in chunks.

    Attributes:
        cached_nbytes: Bytes kept now.
        lent_nbytes: Bytes lent now.
        peak_lent_nbytes: Most bytes lent at one time since :meth:`restart_peak`.
    """

    def __init__(self, cache_nbytes: int = CACHE_NBYTES) -> None:
        """Make an arena that keeps at most ``cache_nbytes`` bytes; a larger tensor is not kept."""
        self.cache_nbytes = cache_nbytes
        self.cached_nbytes = self.lent_nbytes = self.peak_lent_nbytes = 0
        self._most_lent_nbytes = 0
        # For each key what came back and when, the oldest first.
        self._cached: dict[_Key, list[tuple[int, torch.Tensor]]] = {}
        self._clock = count()

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Lend a flat tensor of ``numel`` elements whose content is undefined."""
        key = (numel, dtype, device)
        kept = self._cached.get(key)
        if kept:
            _, tensor = kept.pop()
            self.cached_nbytes -= tensor.nbytes
            if not kept:
                del self._cached[key]
        else:
            nbytes = numel * dtype.itemsize
            self._make_room(max(self._most_lent_nbytes, self.lent_nbytes + nbytes) - nbytes)
            tensor = torch.empty(numel, dtype=dtype, device=device)
        self.lent_nbytes += tensor.nbytes
        self.peak_lent_nbytes = max(self.peak_lent_nbytes, self.lent_nbytes)
        self._most_lent_nbytes = max(self._most_lent_nbytes, self.lent_nbytes)
        return tensor

    def give_back(self, tensor: torch.Tensor) -> None:
        """Take back a tensor that :meth:`take` lent; its borrower must not use it again."""
        self.lent_nbytes -= tensor.nbytes
        if tensor.nbytes > self.cache_nbytes:
            return
        key = (tensor.numel(), tensor.dtype, tensor.device)
        self._cached.setdefault(key, []).append((next(self._clock), tensor))
        self.cached_nbytes += tensor.nbytes
        while self.cached_nbytes > self.cache_nbytes:
            self._give_up_oldest()

    def give_up(self, tensor: torch.Tensor) -> None:
        """No longer count a tensor as lent, and never lend it again: others may still use it."""
        self.lent_nbytes -= tensor.nbytes

    @contextmanager
    def borrow(
        self, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[torch.Tensor]:
        """Lend a flat tensor for the time of a ``with`` block."""
        tensor = self.take(numel, dtype, device)
        try:
            yield tensor
        finally:
            self.give_back(tensor)

    def restart_peak(self) -> None:
        """Count :attr:`peak_lent_nbytes` from what is lent now."""
        self.peak_lent_nbytes = self.lent_nbytes

    def close(self) -> None:
        """Give up everything kept. May be called twice; the arena can be used again after."""
        self._cached.clear()
        self.cached_nbytes = 0
        self._most_lent_nbytes = self.lent_nbytes

    def _make_room(self, most_nbytes: int) -> None:
        """Give up what is kept, the oldest first, until all is at most so many bytes."""
        while self.cached_nbytes and self.lent_nbytes + self.cached_nbytes > most_nbytes:
            self._give_up_oldest()

    def _give_up_oldest(self) -> None:
        key, kept = min(self._cached.items(), key=lambda item: item[1][0][0])
        self.cached_nbytes -= kept.pop(0)[1].nbytes
        if not kept:
            del self._cached[key]


class Loans(dict[int, torch.Tensor]):
    """Tensors by number, of which those that an arena has lent go back as soon as they are dropped.

    As a context manager it drops all that is left.
    """

    def __init__(self, arena: Arena, device: torch.device) -> None:
        """Borrow from an arena, for a device."""
        super().__init__()
        self._arena, self._device = arena, device
        self._lent: dict[int, torch.Tensor] = {}

    def borrow(self, key: int, numel: int) -> torch.Tensor:
        """Borrow and hold a flat fp32 tensor whose content is undefined."""
        self[key] = self._lent[key] = self._arena.take(numel, torch.float32, self._device)
        return self[key]

    def drop(self, key: int) -> None:
        """Let go of a tensor; it must not be used again."""
        del self[key]
        if key in self._lent:
            self._arena.give_back(self._lent.pop(key))

    def drop_all(self) -> None:
        """Let go of every tensor."""
        for key in list(self):
            self.drop(key)

    def pass_on(self, key: int, to: Loans, shape: Sequence[int]) -> None:
        """Let another hold a tensor, in another shape of as many elements."""
        to[key] = self.pop(key).view(*shape)
        if key in self._lent:
            to._lent[key] = self._lent.pop(key)

    def __enter__(self) -> Loans:
        return self

    def __exit__(self, *error: object) -> None:
        self.drop_all()
