"""What a run asks of a checkpoint, and from which of its tensors that comes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_muon.checkpoint.files import CheckpointIndex, StoredTensor
from megatron_muon.checkpoint.keys import MASTER, MASTERS, canonical
from megatron_muon.errors import CheckpointError
from megatron_muon.optimizer.state.held import Held
from megatron_muon.optimizer.state.shards import Part, alone_piece, sharded
from megatron_muon.optimizer.state.stock import BucketPlace, InBuckets

STATE = "state"
"""Where the sharded tensors lie in the optimizer's sharded state dict."""

type Piece = tuple[torch.Tensor, ShardedTensor]
"""Where a piece goes, and what is asked for it."""

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Wanted:
    """One state of one parameter.

    Attributes:
        held: What this rank holds of the parameter.
        state: Name of the state.
        tensor: Where it goes.
        targets: The same piece by piece.
        shards: The same pieces as sharded tensors.
    """

    held: Held
    state: str
    tensor: torch.Tensor
    targets: tuple[torch.Tensor, ...]
    shards: tuple[ShardedTensor, ...]


def want(
    held: Held, state: str, tensor: torch.Tensor, *, parts: Sequence[Part], is_replicated: bool
) -> Wanted:
    """Ask for a state of a parameter, to be loaded in place; arguments as for saving."""
    shards = tuple(sharded(held, state, tensor, parts, is_replicated))
    return Wanted(held, state, tensor, tuple(_view(shard) for shard in shards), shards)


def _view(shard: ShardedTensor) -> torch.Tensor:
    data: torch.Tensor = shard.data
    return data


def _model_key(shard: ShardedTensor) -> str:
    found = canonical(shard.key)
    assert found is not None
    return found[1]


class StateRequest(dict[str, Any]):
    """The optimizer's part of a sharded state dict to load.

    As it is, it asks for what this package saves of the same kind of run. Once :meth:`resolve` has
    seen the checkpoint, it asks for what that has.
    """

    def __init__(
        self,
        wanted: Iterable[Wanted],
        of_weights: Iterable[Wanted],
        find_in_buckets: Callable[[CheckpointIndex], InBuckets | None],
    ) -> None:
        """Ask for state.

        Args:
            wanted: What has to be there.
            of_weights: Masters of weights that are their own: a checkpoint of such a run has
                none, and one of a 16-bit run has more exact ones than its weights.
            find_in_buckets: Finds scalar state that Megatron has saved by bucket.
        """
        super().__init__()
        self._wanted, self._of_weights = tuple(wanted), tuple(of_weights)
        self._find_in_buckets = find_in_buckets
        self._pieces: dict[tuple[str, str, int], Piece] = {}
        self.apart: list[ShardedTensor] = []
        self.step: int | None = None
        self.padded: tuple[str, ...] = ()
        self._late: list[Piece] = []
        for item in self._wanted:
            self._ask(item, zip(item.targets, item.shards, strict=True))

    def _ask(self, item: Wanted, pieces: Iterable[Piece]) -> None:
        """Ask for a state in pieces, in the place of what was asked for it before."""
        asked = {}
        for place, (target, shard) in enumerate(pieces):
            self._pieces[item.held.name, item.state, place] = target, shard
            asked[place] = shard
        self.setdefault(STATE, {}).setdefault(item.held.name, {})[item.state] = asked

    def resolve(self, index: CheckpointIndex) -> None:
        """Ask for what a checkpoint has, under the names that it has there.

        Afterwards :attr:`apart` is what has to be read apart from the rest: weights that are read
        for the model and once more as masters. :attr:`step` is the scalar optimizer's count of
        steps, where Megatron keeps that apart too.

        Raises:
            CheckpointError: Something is missing or has another shape.
        """
        self.padded = tuple(_tell_padding(self._wanted, index))
        there = {name: key for key in index.tensors if (name := canonical(key)) is not None}
        in_buckets = self._find_in_buckets(index)
        places = {} if in_buckets is None else in_buckets.places
        self.step = None if in_buckets is None else in_buckets.step
        missing: dict[str, list[str]] = defaultdict(list)
        for item in self._wanted:
            flat = item.tensor.view(-1)
            piece = _in_bucket(places.get(item.held.param), item, flat, index)
            if piece is not None:
                self._drop(item)
                self._ask(item, [(flat, piece)])
                continue
            for place, (target, shard) in enumerate(zip(item.targets, item.shards, strict=True)):
                model_key = _model_key(shard)
                found = _found(item, shard, there)
                stored = index.tensors.get(model_key)
                if found is not None:
                    _check_shape(item, found, index.tensors[found.key])
                    self[STATE][item.held.name][item.state][place] = found
                elif item.state in MASTERS and stored is not None and stored.dtype == torch.float32:
                    shard.key = model_key
                    _check_shape(item, shard, stored)
                    del self[STATE][item.held.name][item.state][place]
                    del self._pieces[item.held.name, item.state, place]
                    self._read_apart(target, shard)
                else:
                    missing[_family(item.state)].append(item.held.name)
        if missing:
            raise CheckpointError(_tell_missing(missing, index))
        for item in self._of_weights:
            # The weight itself is read at the same time, and rounded.
            flat = item.tensor.view(-1)
            piece = _in_bucket(places.get(item.held.param), item, torch.empty_like(flat), index)
            if piece is not None:
                self._read_apart(flat, piece)
                continue
            for target, shard in zip(item.targets, item.shards, strict=True):
                found = _found(item, shard, there)
                if found is not None:
                    _check_shape(item, found, index.tensors[found.key])
                    found.data = torch.empty_like(found.data)
                    self._read_apart(target, found)

    def _drop(self, item: Wanted) -> None:
        for place in range(len(item.shards)):
            del self._pieces[item.held.name, item.state, place]

    def _read_apart(self, target: torch.Tensor, shard: ShardedTensor) -> None:
        self.apart.append(shard)
        self._late.append((target, shard))

    @torch.no_grad()
    def finish(self, loaded: Mapping[str, Any]) -> None:
        """Put what was loaded where it belongs, if it is not there yet.

        Args:
            loaded: The optimizer's part of what was loaded.

        Raises:
            CheckpointError: Something that was asked for was not loaded.
        """
        for (name, state, place), (target, _) in self._pieces.items():
            found = loaded.get(STATE, {}).get(name, {}).get(state, {})
            if place not in found:
                raise CheckpointError(f"{state} of {name} was not loaded.")
            _put(target, found[place])
        for target, shard in self._late:
            _put(target, _view(shard))


def _found(
    item: Wanted, shard: ShardedTensor, there: Mapping[tuple[str, str], str]
) -> ShardedTensor | None:
    """Return a piece under the name that the checkpoint has for it, ``None`` if it has none.

    Args:
        item: What it is a piece of.
        shard: The piece, by our own name.
        there: The names in the checkpoint, by state and the model's key.
    """
    state, model_key = _family(item.state), _model_key(shard)
    key = there.get((state, model_key))
    if key is not None:
        return replace(shard, key=key)
    piece = alone_piece(shard, item.held)
    key = there.get((state, _model_key(piece)))
    return None if key is None else replace(piece, key=key)


def _in_bucket(
    bucket: BucketPlace | None, item: Wanted, target: torch.Tensor, index: CheckpointIndex
) -> ShardedTensor | None:
    """Return a state as a piece of a bucket of the checkpoint, ``None`` if it lies in none."""
    held = item.held.range
    if bucket is None or held is None or bucket.key(item.state) not in index.tensors:
        return None
    return bucket.shard(item.state, target, held[0])


def _put(target: torch.Tensor, value: torch.Tensor) -> None:
    if value.data_ptr() != target.data_ptr():
        target.copy_(value.reshape(target.shape))


def _family(state: str) -> str:
    return MASTER if state in MASTERS else state


def _check_shape(item: Wanted, shard: ShardedTensor, stored: StoredTensor) -> None:
    if tuple(shard.global_shape) != tuple(stored.shape) and not shard.allow_shape_mismatch:
        raise CheckpointError(
            f"{item.held.name}: the checkpoint has {item.state} of shape {tuple(stored.shape)}, "
            f"this model's is {tuple(shard.global_shape)}. It is of another model."
        )


def _tell_padding(wanted: Iterable[Wanted], index: CheckpointIndex) -> Iterator[str]:
    """Say where the vocabulary is padded to another size, whose new rows join the softmax."""
    for item in wanted:
        if item.state not in MASTERS:
            continue
        for shard in item.shards:
            stored = index.tensors.get(_model_key(shard))
            if stored is not None and stored.shape[0] != shard.global_shape[0]:
                yield (
                    f"{item.held.name} has {stored.shape[0]} rows in the checkpoint and "
                    f"{shard.global_shape[0]} here: the vocabulary is padded otherwise, and rows "
                    "of padding count in the loss. Keep them with --make-vocab-size-divisible-by."
                )
                break


def _tell_missing(missing: Mapping[str, Sequence[str]], index: CheckpointIndex) -> str:
    """Say which states are missing, of which parameters."""
    told = []
    for state, names in missing.items():
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        told.append(f"{state} of {len(names)} parameters ({shown})")
    return (
        f"The checkpoint {index.path} has no {'; no '.join(told)}. It is not whole, or of another "
        "model or optimizer. Load another one, or take its weights alone with --no-load-optim, "
        "which starts the optimizer anew."
    )
