"""Flat ranges as rectangles, and state as Megatron's sharded tensors of the model's shape.

What the rectangles say is written into a whole tensor by their offsets, and has to give what was
cut: every element, from one writer.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from megatron_muon.checkpoint.boxes import Box, boxes, intersection, whole
from megatron_muon.checkpoint.keys import STATES, canonical, state_key
from megatron_muon.errors import CheckpointError
from megatron_muon.optimizer.state.held import Held
from megatron_muon.optimizer.state.shards import parts_of, sharded, shards_of_model

# --------------------------------------------------------------------------------------------
# Boxes
# --------------------------------------------------------------------------------------------


@st.composite
def ranges(draw):
    """A shape and a range of its elements."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


def elements(shape, box):
    """Flat numbers of the elements of a rectangle, in order."""
    numbers = torch.arange(prod(shape)).view(shape)
    return numbers[tuple(slice(s, e) for s, e in zip(box.start, box.end, strict=True))].flatten()


@given(ranges())
def test_boxes_are_the_range_in_order(case):
    shape, start, end = case
    found = [elements(shape, box) for box in boxes(shape, start, end)]
    assert all(len(part) for part in found)
    assert torch.equal(torch.cat([torch.arange(0), *found]), torch.arange(start, end))


@given(ranges())
def test_boxes_are_few(case):
    """Two more with each dimension: three for a matrix."""
    shape, start, end = case
    assert len(boxes(shape, start, end)) <= max(2 * len(shape) - 1, 1)


def test_boxes_of_a_matrix():
    assert boxes((4, 6), 0, 24) == [whole((4, 6))] == [Box((0, 0), (4, 6))]
    assert boxes((4, 6), 6, 18) == [Box((1, 0), (2, 6))]
    assert boxes((4, 6), 8, 10) == [Box((1, 2), (1, 2))]
    assert boxes((4, 6), 4, 9) == [Box((0, 4), (1, 2)), Box((1, 0), (1, 3))]
    assert boxes((4, 6), 4, 22) == [
        Box((0, 4), (1, 2)), Box((1, 0), (2, 6)), Box((3, 0), (1, 4)),
    ]  # fmt: skip
    assert boxes((4, 6), 7, 7) == []
    assert boxes((5,), 1, 4) == [Box((1,), (3,))]
    assert boxes((), 0, 1) == [Box((), ())]


@st.composite
def two_boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))

    def box():
        start = tuple(draw(st.integers(0, size - 1)) for size in shape)
        sizes = zip(shape, start, strict=True)
        return Box(start, tuple(draw(st.integers(1, size - at)) for size, at in sizes))

    return shape, box(), box()


@given(two_boxes())
def test_intersection_is_what_both_have(case):
    shape, one, other = case
    both = set(elements(shape, one).tolist()) & set(elements(shape, other).tolist())
    found = intersection(one, other)
    assert found == intersection(other, one)
    assert (found is None) == (not both)
    assert both == (set() if found is None else set(elements(shape, found).tolist()))


# --------------------------------------------------------------------------------------------
# Sharded tensors
# --------------------------------------------------------------------------------------------

KEY = "decoder.layers.mlp.linear_fc1.weight"


def model_shard(param, *, layer, num_layers, axis, tp_rank, tp_size, is_gated, dp_rank):
    """The model's sharded tensor of one rank's shard, as its modules make it."""
    of_layer = ((0, layer, num_layers),) if num_layers else ()
    is_cut = axis is not None
    of_tp = ((len(of_layer) + axis, tp_rank, tp_size),) if is_cut else ()
    shard = ShardedTensor.from_rank_offsets(
        KEY, param, *of_layer, *of_tp, replica_id=(0, 0 if is_cut else tp_rank, dp_rank),
        prepend_axis_num=len(of_layer),
    )  # fmt: skip
    return apply_swiglu_sharded_factory(shard, of_layer) if is_gated else shard


def cut(tensor, tp_rank, tp_size, axis, is_gated):
    """One rank's shard of a whole parameter; a gated one is cut in each of its halves."""
    if axis is None:
        return tensor
    if is_gated:
        return torch.cat([half.chunk(tp_size)[tp_rank] for half in tensor.chunk(2)])
    return tensor.chunk(tp_size, axis)[tp_rank]


@st.composite
def saves(draw):
    """A parameter of several layers, how tensor parallelism cuts it, and the flat shards of it."""
    tp_size, num_layers = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    local = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    is_gated = draw(st.booleans())
    axis = 0 if is_gated else draw(st.sampled_from([None, *range(len(local))]))
    if is_gated:
        local[0] *= 2
    shape = [size * tp_size if i == axis else size for i, size in enumerate(local)]
    numel = prod(local)
    borders = sorted(draw(st.lists(st.integers(0, numel), max_size=3)))
    flat = draw(st.sampled_from([None, list(pairwise([0, *borders, numel]))]))
    return tp_size, num_layers, tuple(shape), axis, is_gated, flat


@given(saves())
def test_every_element_is_written_once_and_where_it_belongs(case):
    tp_size, num_layers, shape, axis, is_gated, flat = case
    layers = num_layers or 1
    everything = torch.arange(1.0, 1 + layers * prod(shape)).view(layers, *shape)
    written = torch.zeros_like(everything)
    times = torch.zeros_like(everything, dtype=torch.int)
    shards = flat or [None, None]  # else two data-parallel ranks have copies
    for layer in range(layers):
        for tp_rank in range(tp_size):
            local = cut(everything[layer], tp_rank, tp_size, axis, is_gated).contiguous()
            for dp_rank, place in enumerate(shards):
                tensor = local if place is None else local.flatten()[slice(*place)].clone()
                param = torch.nn.Parameter(torch.zeros_like(local))
                model = model_shard(
                    param, layer=layer, num_layers=num_layers, axis=axis, tp_rank=tp_rank,
                    tp_size=tp_size, is_gated=is_gated, dp_rank=dp_rank,
                )  # fmt: skip
                held = Held(
                    name="fc1", param=param, tensors={"exp_avg": tensor}, range=place,
                    has_own_master=True, master=tensor,
                )  # fmt: skip
                parts = parts_of(held, shards_of_model({"model": {"x": model}}))
                for piece in sharded(held, "exp_avg", tensor, parts, flat is None):
                    piece.validate_metadata_integrity()
                    assert piece.key == f"optimizer.state.exp_avg.{KEY}"
                    assert tuple(piece.global_shape) == (
                        (num_layers, *shape) if num_layers else shape
                    )
                    assert same_memory(piece.data, tensor)
                    if not is_main_replica(piece.replica_id):
                        continue
                    at = piece.global_offset if num_layers else (0, *piece.global_offset)
                    box = tuple(slice(o, o + n) for o, n in
                                zip(at, (1,) * (len(at) - piece.data.dim()) + piece.data.shape,
                                    strict=True))  # fmt: skip
                    written[box] = piece.data
                    times[box] += 1
    assert torch.equal(written, everything)
    assert torch.equal(times, torch.ones_like(times))


def same_memory(one, other):
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def holding(param, tensor):
    return Held(
        name="decoder.layers.0.weight", param=param, tensors={}, range=None, has_own_master=True,
        master=tensor,
    )  # fmt: skip


def test_loading_into_a_piece_is_loading_into_the_state():
    param, state = torch.nn.Parameter(torch.zeros(4, 3)), torch.zeros(5)
    held = Held(
        name="w", param=param, tensors={"exp_avg": state}, range=(2, 7), has_own_master=True,
        master=state,
    )  # fmt: skip
    shard = ShardedTensor.from_rank_offsets("w", param, replica_id=(0, 0, 0))
    parts = parts_of(held, shards_of_model({"w": shard}))
    for number, piece in enumerate(sharded(held, "exp_avg", state, parts, False)):
        piece.data.fill_(number + 1)
    assert state.tolist() == [1, 2, 2, 2, 3]


def test_parameter_that_the_model_does_not_save_is_named():
    param = torch.nn.Parameter(torch.zeros(4, 3))
    other = ShardedTensor.from_rank_offsets("w", param.detach().clone(), replica_id=(0, 0, 0))
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.0\.weight is trained but is not"):
        parts_of(holding(param, param.detach()), shards_of_model({"w": other}))


@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t.flatten(), lambda t: t[:, ::2]])
def test_model_that_saves_no_rectangle_is_refused(view):
    param = torch.nn.Parameter(torch.zeros(4, 6))

    def build(key, data, replica_id, flattened_range):
        return [ShardedTensor.from_rank_offsets(key, view(data), replica_id=replica_id)]

    factory = ShardedTensorFactory("w", param, build, lambda parts: parts, (0, 0, 0))
    with pytest.raises(CheckpointError, match="another form than parts of its rows and columns"):
        parts_of(holding(param, param.detach()), shards_of_model({"w": factory}))


# --------------------------------------------------------------------------------------------
# Keys
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("prefix", ["", "chained_0.", "chained_1.", "chained_0.chained_1."])
def test_key_says_state_and_model_key(prefix, state):
    family = "fp32_param" if state == "param" else state
    assert canonical(prefix + state_key(state, KEY)) == (family, KEY)


@pytest.mark.parametrize(
    "key",
    [KEY, f"optimizer.state.step.{KEY}", "optimizer.state.exp_avg",
     "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.exp_avg",
     f"xoptimizer.state.exp_avg.{KEY}"],
)  # fmt: skip
def test_other_keys_are_no_state(key):
    assert canonical(key) is None
