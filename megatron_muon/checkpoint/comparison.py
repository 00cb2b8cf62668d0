"""Two checkpoints compared, key by key, whatever ranks and package wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

import torch

from megatron_muon.checkpoint.contents import Contents, Name, names_of, place_of
from megatron_muon.checkpoint.keys import MASTER, SHARDED_MASTER, alone
from megatron_muon.errors import CheckpointError

Verdict = Literal["equal", "different", "other shape", "other dtype", "only here", "only there"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

_BLOCK_NUMEL = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorComparison:
    """One tensor of two checkpoints.

    Attributes:
        family: ``weights``, or the name of the optimizer's state.
        name: The model's key, with a place (:func:`~.keys.alone`) for one of several layers, or
            the key in the file of what lies by no model's key.
        here: Key in the first checkpoint, of which it may be a part.
        there: Key in the second.
        verdict: Equal is to the last bit.
        num_different: Elements whose bits, or values if dtypes differ, are not equal.
        numel: Elements.
        max_abs: Largest absolute difference, in fp64; NaN if one has NaN where the other has not.
        max_value: Largest absolute value of the two.
    """

    family: str
    name: str
    here: str | None
    there: str | None
    verdict: Verdict
    num_different: int = 0
    numel: int = 0
    max_abs: float = 0.0
    max_value: float = 0.0


@dataclass(frozen=True, slots=True)
class TextComparison:
    """A leaf that is not alike; ``None`` where a checkpoint has none."""

    name: str
    here: str | None
    there: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two checkpoints have alike.

    Attributes:
        tensors: Every tensor of either.
        num_alike: Leaves of the rest of the state that are alike.
        state: Those that are not.
        of_other_ranks: Objects that each rank has its own of, not compared since the numbers of
            ranks differ.
        described: How the runs were set up, where that differs; it makes no difference here.
    """

    tensors: tuple[TensorComparison, ...]
    num_alike: int
    state: tuple[TextComparison, ...]
    of_other_ranks: tuple[str, ...]
    described: tuple[TextComparison, ...]

    @property
    def is_equal(self) -> bool:
        """Whether a run continues from both in the same way."""
        return not self.state and all(item.verdict == "equal" for item in self.tensors)


def compare(here: Contents, there: Contents) -> Comparison:
    """Compare two checkpoints; one pair of tensors is in memory at a time.

    Optimizer state is matched by parameter and kind (:func:`~.contents.names_of`), so that one of
    Megatron's own is compared with one of this package. Where one has the state of all layers
    under one key and the other that of some, it is matched layer by layer. The second copy of a
    master is matched with the master where the other has no second copy.

    Raises:
        CheckpointError: They are of different formats, or one cannot be read.
    """
    if here.format != there.format:
        raise CheckpointError(
            f"{here.path} is of --ckpt-format {here.format}, {there.path} of {there.format}: only "
            "checkpoints of one format can be compared."
        )
    state = tuple(_unlike(here.state, there.state))
    grids = _grids(here.state), _grids(there.state)
    other = {n for n in grids[0].keys() & grids[1].keys() if grids[0][n] != grids[1][n]}
    compared = tuple(item for item in state if _object_of(item.name)[0] not in other)
    return Comparison(
        tensors=tuple(_tensors(here, there)),
        num_alike=len(here.state.keys() | there.state.keys()) - len(state),
        state=compared,
        of_other_ranks=tuple(sorted(other)),
        described=tuple(_unlike(here.described, there.described)),
    )


def _object_of(name: str) -> tuple[str, str]:
    """Return the object that a leaf belongs to and the grid of ranks it is sharded over.

    Source: ``ShardedObject.unique_key``, core/dist_checkpointing/mapping.py:397 of megatron-core
    0.19.2: ``rng_state/shard_0.1_1.2`` is place (0, 1) of (1, 2).
    """
    key = name.partition(" ")[0]
    base, _, shard = key.partition("/shard_")
    return base, shard.partition("_")[2]


def _grids(state: Mapping[str, str]) -> dict[str, str]:
    return {base: grid for base, grid in map(_object_of, state) if grid}


def _unlike(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[TextComparison]:
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            yield TextComparison(name, here.get(name), there.get(name))


@dataclass(frozen=True, slots=True)
class _Part:
    """A whole tensor of a checkpoint, or what of it is at a place on its first axes."""

    contents: Contents
    key: str
    place: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.contents.tensors[self.key].shape[len(self.place) :]

    @property
    def dtype(self) -> torch.dtype:
        return self.contents.tensors[self.key].dtype

    def read(self) -> torch.Tensor:
        whole = self.contents.read(self.key)
        return whole[self.place] if self.place else whole


class _Names:
    """The tensors of a checkpoint by what they are."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.keys = {name: key for key, name in names_of(contents.tensors).items()}
        self._num_axes: dict[Name, int] = {}
        for state, model_key in self.keys:
            whole, place = place_of(model_key)
            if place:
                self._num_axes[state, whole] = len(place)

    def as_there(self, there: _Names) -> Iterator[Name]:
        """Yield the names, of the layers one by one where the other has them so."""
        for name, key in self.keys.items():
            num_axes = 0 if name in there.keys else there._num_axes.get(name, 0)
            if not num_axes:
                yield name
                continue
            for place in product(*map(range, self.contents.tensors[key].shape[:num_axes])):
                yield name[0], alone(name[1], place)

    def find(self, name: Name) -> _Part | None:
        """Return a tensor by its name, or the part of the common one that it is."""
        state, model_key = name
        if name in self.keys:
            return _Part(self.contents, self.keys[name], ())
        whole, place = place_of(model_key)
        key = self.keys.get((state, whole)) if place else None
        if key is not None:
            shape = self.contents.tensors[key].shape
            if len(place) <= len(shape) and all(i < n for i, n in zip(place, shape, strict=False)):
                return _Part(self.contents, key, place)
        return self.find((MASTER, model_key)) if state == SHARDED_MASTER else None


def _tensors(here: Contents, there: Contents) -> Iterator[TensorComparison]:
    left, right = _Names(here), _Names(there)
    for name in sorted({*left.as_there(right), *right.as_there(left)}):
        yield _compare_tensor(left.find(name), right.find(name), name)


def _compare_tensor(here: _Part | None, there: _Part | None, name: Name) -> TensorComparison:
    told = TensorComparison(
        family=name[0],
        name=name[1],
        here=None if here is None else here.key,
        there=None if there is None else there.key,
        verdict="only there" if here is None else "only here",
    )
    if here is None or there is None:
        return told
    if here.shape != there.shape:
        return replace(told, verdict="other shape")
    found = _measure(here.read(), there.read())
    verdict: Verdict = "equal" if found.num_different == 0 else "different"
    return replace(
        told,
        verdict=verdict if here.dtype == there.dtype else "other dtype",
        num_different=found.num_different,
        numel=found.numel,
        max_abs=found.max_abs,
        max_value=found.max_value,
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    num_different: int
    numel: int
    max_abs: float
    max_value: float


def _measure(a: torch.Tensor, b: torch.Tensor) -> _Measured:
    """Compare two tensors of one shape, block by block, so that fp64 copies stay small."""
    num_different, max_abs, max_value = 0, 0.0, 0.0
    for left, right in zip(
        *(torch.split(tensor.flatten(), _BLOCK_NUMEL) for tensor in (a, b)), strict=True
    ):
        if left.dtype == right.dtype and torch.equal(_bits(left), _bits(right)):
            continue
        x, y = left.double(), right.double()
        unlike = _bits(left) != _bits(right) if left.dtype == right.dtype else x != y
        num_different += int(unlike.sum())
        if unlike.any():
            # Python's max() drops NaN or not by its place; torch's keeps it.
            max_abs = float(torch.tensor([max_abs, float((x - y)[unlike].abs().max())]).max())
            max_value = max(max_value, float(x.abs().max()), float(y.abs().max()))
    return _Measured(num_different, a.numel(), max_abs, max_value)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements' bits, so that NaN equals itself and -0 is not 0."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(whole[tensor.element_size()])
