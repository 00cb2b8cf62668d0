"""Mutants of the flat ``Muon``: each breaks one thing in the process that enters it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

MUTANTS = (
    "update cut for the next tensor rank",
    "a straddling piece is left out",
    "scale from the shard's shape",
    "average momentum on one rank",
    "a flat view is orthogonalized",
    "decay goes with the update's rate",
    "no look-ahead on one rank",
    "the element beside a piece is read",
)


def broken(mutant: str | None, dp: int) -> contextlib.AbstractContextManager[Any]:
    """Break one thing in this process."""
    if mutant is None:
        return contextlib.nullcontext()
    return _BREAKS[MUTANTS.index(mutant)](dp)


@contextlib.contextmanager
def _update_cut_for_the_next_rank(dp: int) -> Iterator[None]:
    """Shards are put together right, and cut from the update wrong."""
    from megatron_muon.optimizer import engine, station

    view, orthogonalize = station.shard_view, station.Station.orthogonalize
    cutting = False

    def orthogonalize_and_cut(self: Any, work: Any) -> None:
        nonlocal cutting
        orthogonalize(self, work)
        cutting = True

    def restart(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal cutting
            cutting = False
            return original(*args)

        return call

    def next_view(whole: Any, dim: int | None, stride: int, size: int, rank: int) -> Any:
        return view(whole, dim, stride, size, (rank + cutting) % size)

    with (
        mock.patch.object(engine.Engine, "_read_one", restart(engine.Engine._read_one)),
        mock.patch.object(engine.Engine, "_to_home", restart(engine.Engine._to_home)),
        mock.patch.object(station.Station, "orthogonalize", orthogonalize_and_cut),
        mock.patch.object(station, "shard_view", next_view),
    ):
        yield


@contextlib.contextmanager
def _piece_left_out(dp: int) -> Iterator[None]:
    """What comes from another data-parallel rank is no part of a shard that straddles."""
    from megatron_muon.collectives import exchange
    from megatron_muon.optimizer import engine, gathered

    land, gather = exchange.Flight.land, gathered.gather_flat

    def to_row(self: Any, number: int, inputs: Any, shards: Any) -> Any:
        def land_blank(flight: Any, unpack: Any) -> None:
            def unpack_blank(transfer: Any, part: torch.Tensor) -> None:
                straddles = self.plan[transfer.index].owned.owner is None
                unpack(transfer, part.zero_() if straddles else part)

            land(flight, unpack_blank)

        with mock.patch.object(exchange.Flight, "land", land_blank):
            yield from original_to_row(self, number, inputs, shards)

    def gather_pieces(*args: Any) -> Any:
        def gather_blank(group: Any, own: Any, numels: Any, write: Any, wire: Any) -> None:
            gather(
                group, own, numels,
                lambda rank, start, part: write(rank, start, part if rank == dp else part.zero_()),
                wire,
            )  # fmt: skip

        with mock.patch.object(gathered, "gather_flat", gather_blank):
            return original_gather(*args)

    original_to_row, original_gather = engine.Engine._to_row, gathered._gather_pieces
    with (
        mock.patch.object(engine.Engine, "_to_row", to_row),
        mock.patch.object(gathered, "_gather_pieces", gather_pieces),
    ):
        yield


def _scale_of_the_shard(dp: int) -> contextlib.AbstractContextManager[Any]:
    from megatron_muon.optimizer import flat

    original, adjust = flat.Muon._apply, flat.adjust_lr_wd_for_muon

    def apply(self: Any, planned: Any, update: Any, groups: Any) -> None:
        local_shape = planned.matrix.local_shape
        with mock.patch.object(
            flat, "adjust_lr_wd_for_muon", lambda lr, rms, shape: adjust(lr, rms, local_shape)
        ):
            original(self, planned, update, groups)

    return mock.patch.object(flat.Muon, "_apply", apply)


def _momentum(dp: int, change: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    from megatron_muon.optimizer import flat

    original = flat.accumulate_momentum
    return mock.patch.object(
        flat,
        "accumulate_momentum",
        lambda m, g, mu, nesterov, out: out.copy_(change(original, m, g, mu, nesterov)),
    )


def _average_momentum(dp: int) -> contextlib.AbstractContextManager[Any]:
    def change(original: Any, m: Any, g: Any, mu: float, nesterov: bool) -> Any:
        return original(m, g * (1 - mu) if dp == 0 else g, mu, nesterov)

    return _momentum(dp, change)


def _no_look_ahead(dp: int) -> contextlib.AbstractContextManager[Any]:
    def change(original: Any, m: Any, g: Any, mu: float, nesterov: bool) -> Any:
        return original(m, g, mu, nesterov and dp != 0)

    return _momentum(dp, change)


def _reads_beside(dp: int) -> contextlib.AbstractContextManager[Any]:
    def change(original: Any, m: Any, g: Any, mu: float, nesterov: bool) -> Any:
        if g.storage_offset():
            g = g.as_strided(g.shape, g.stride(), g.storage_offset() - 1)
        return original(m, g, mu, nesterov)

    return _momentum(dp, change)


def _flat_view(dp: int) -> contextlib.AbstractContextManager[Any]:
    from megatron_muon.bookkeeping.matrix import whole
    from megatron_muon.optimizer import station

    original = station.Station.orthogonalize

    def orthogonalize(self: Any, work: Any) -> None:
        original(self, [(x.view(1, -1), out.view(1, -1), whole(1)) for x, out, _ in work])

    return mock.patch.object(station.Station, "orthogonalize", orthogonalize)


def _decay_of_the_update(dp: int) -> contextlib.AbstractContextManager[Any]:
    from megatron_muon.optimizer import flat
    from tests.unit_tests.flat_job import DECAY, LR

    original = flat.apply_update

    def apply(weight: Any, update: Any, lr: float, weight_decay: float) -> None:
        original(weight.div_(1 - LR * DECAY).mul_(1 - lr * DECAY), update, lr, weight_decay)

    return mock.patch.object(flat, "apply_update", apply)


_BREAKS = (
    _update_cut_for_the_next_rank,
    _piece_left_out,
    _scale_of_the_shard,
    _average_momentum,
    _flat_view,
    _decay_of_the_update,
    _no_look_ahead,
    _reads_beside,
)
