"""The optimizer's state as Megatron's sharded tensors, in the shape and under the key of the model.

Nothing is gathered and nothing copied: a rank saves what it holds, as rectangles of the parameter,
and loads into the very memory that it steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from megatron_muon.checkpoint.boxes import Box, boxes, intersection, whole
from megatron_muon.checkpoint.keys import alone, state_key
from megatron_muon.errors import CheckpointError
from megatron_muon.optimizer.state.held import Held

type ModelShard = ShardedTensor | ShardedTensorFactory


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a parameter that lies under one key of the model.

    Attributes:
        template: The model's sharded tensor, without data.
        box: Which part of the parameter on this rank it is.
    """

    template: ShardedTensor
    box: Box


def shards_of_model(model_sharded_state_dict: Any) -> dict[int, ModelShard]:
    """Return the model's sharded tensors by the identity of their parameter."""
    sharded, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    return {id(shard.data): shard for shard in nested_values(sharded)}


def parts_of(held: Held, shards: Mapping[int, ModelShard]) -> list[Part]:
    """Return under which keys of the model a parameter lies, and where.

    Raises:
        CheckpointError: The model has no sharded tensor of the parameter, or one that is no
            rectangle of it.
    """
    shard = shards.get(id(held.param))
    if shard is None:
        raise CheckpointError(
            f"{held.name} is trained but is not in the model's sharded state dict. The model's "
            "sharded_state_dict() has to return the parameters themselves."
        )
    if isinstance(shard, ShardedTensor):
        return [Part(_without_data(shard), whole(held.shape))]
    # A factory cuts the weight by views, of which a tensor without memory tells the places.
    probe = torch.empty(held.shape, device="meta")
    built = shard.build_fn(shard.key, probe, shard.replica_id, None)
    return [Part(_without_data(part), _place(part, held)) for part in nested_values(built)]


def _without_data(shard: ShardedTensor) -> ShardedTensor:
    without: ShardedTensor = shard.without_data()
    return without


def _place(part: ShardedTensor, held: Held) -> Box:
    """Return which rectangle of a parameter a view of it is."""
    view = part.data
    strides = torch.empty(held.shape, device="meta").stride()
    if view is None or view.dim() != len(strides) or view.stride() != strides:
        raise CheckpointError(
            f"{held.name}: the model saves it under {part.key} in another form than parts of its "
            "rows and columns, which the optimizer's state cannot follow."
        )
    rest, start = view.storage_offset(), []
    for stride in strides:
        first, rest = divmod(rest, stride)
        start.append(first)
    return Box(tuple(start), tuple(view.shape))


def sharded(
    held: Held, state: str, tensor: torch.Tensor, parts: Iterable[Part], is_replicated: bool
) -> Iterator[ShardedTensor]:
    """Yield a state of a parameter as sharded tensors, which share memory with it.

    Args:
        held: What this rank holds of the parameter.
        state: Name of the state.
        tensor: The state, whole or flat.
        parts: Under which keys of the model the parameter lies.
        is_replicated: Whether all data-parallel ranks hold the same, and one of them writes;
            otherwise each writes what it holds.
    """
    for part in parts:
        template = part.template
        replica = template.replica_id
        if not is_replicated:
            # (pipeline copy, tensor copy, data-parallel rank): the rank that holds it writes it.
            replica = 0 if isinstance(replica, int) else (*replica[:-1], 0)
        for box, data in _pieces(held, tensor, part.box):
            first = template.prepend_axis_num
            inner = zip(template.global_offset[first:], box.start, part.box.start, strict=True)
            piece = replace(
                template,
                key=state_key(state, template.key),
                data=data,
                dtype=data.dtype,
                local_shape=box.shape,
                global_offset=(
                    *template.global_offset[:first],
                    *(offset + at - part_at for offset, at, part_at in inner),
                ),
                axis_fragmentations=None if held.range else template.axis_fragmentations,
                replica_id=replica,
            )
            yield _off_grid(piece) if held.range else piece


def _off_grid(piece: ShardedTensor) -> ShardedTensor:
    """Return a piece of a byte-sharded parameter in the form that needs no regular grid.

    All pieces of a tensor have to have it. Megatron's saving of them (0.19.2,
    strategies/checkpointable.py) does not know of axes that the model puts before a parameter's
    own, such as that of its layers.
    """
    first = piece.prepend_axis_num
    return replace(
        piece,
        data=piece.data[(None,) * first],
        local_shape=(*(1,) * first, *piece.local_shape),
        prepend_axis_num=0,
    )


def num_outer_axes(piece: ShardedTensor, held: Held) -> int:
    """Return how many axes the model puts before a parameter's own, such as that of its layers."""
    return len(piece.global_shape) - len(held.shape)


def alone_piece(piece: ShardedTensor, held: Held) -> ShardedTensor:
    """Return a piece under a key of its parameter's own, without the model's axes.

    Source: :func:`~megatron_muon.checkpoint.keys.alone`.
    """
    outer = num_outer_axes(piece, held)
    shape = piece.local_shape[outer - piece.prepend_axis_num :]
    return replace(
        piece,
        key=alone(piece.key, piece.global_offset[:outer]),
        data=piece.data.view(shape),
        local_shape=shape,
        global_shape=piece.global_shape[outer:],
        global_offset=piece.global_offset[outer:],
        axis_fragmentations=None,
        prepend_axis_num=0,
    )


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a saved tensor a rank writes.

    Attributes:
        numel: Elements that it writes.
        of: Elements of the whole.
        on_grid: Whether its pieces make up a regular grid.
    """

    numel: int
    of: int
    on_grid: bool


def coverage(pieces: Iterable[tuple[Held, ShardedTensor]]) -> dict[str, Coverage]:
    """Return what this rank writes of each tensor that stands for several parameters."""
    found: dict[str, Coverage] = {}
    for held, piece in pieces:
        if num_outer_axes(piece, held):
            before = found.get(piece.key)
            numel = piece.data.numel() if is_main_replica(piece.replica_id) else 0
            found[piece.key] = Coverage(
                numel=numel + (before.numel if before else 0),
                of=prod(piece.global_shape),
                on_grid=piece.has_regular_grid and (before is None or before.on_grid),
            )
    return found


def incomplete(of_ranks: Sequence[Mapping[str, Coverage]]) -> set[str]:
    """Return the tensors that the ranks together do not fill, or fill in two forms."""
    every: dict[str, list[Coverage]] = defaultdict(list)
    for of_rank in of_ranks:
        for key, part in of_rank.items():
            every[key].append(part)
    return {
        key
        for key, parts in every.items()
        if sum(part.numel for part in parts) != parts[0].of
        or len({part.on_grid for part in parts}) > 1
    }


def _pieces(held: Held, tensor: torch.Tensor, part: Box) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the rectangles of a part that this rank holds, as views of its state."""
    strides = torch.empty(held.shape, device="meta").stride()
    start, end = held.range or (0, held.param.numel())
    for box in boxes(held.shape, start, end):
        found = intersection(box, part)
        if found is not None:
            at = sum(first * stride for first, stride in zip(found.start, strides, strict=True))
            yield (
                found,
                tensor.as_strided(found.shape, strides, tensor.storage_offset() + at - start),
            )
