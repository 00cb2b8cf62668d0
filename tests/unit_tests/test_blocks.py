"""Logical blocks: of Megatron's fused weights, of tensor-parallel shards, and as views.

What a block holds is written out here as lists of rows, by hand or from the definition, and not
asked of the descriptor that is tested.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.bookkeeping.matrix import (
    LogicalBlock,
    LogicalMatrix,
    interleaved,
    stacked,
    step_flops,
    whole,
)
from megatron_muon.bookkeeping.routing import SplitRules
from megatron_muon.errors import ConfigurationError, PlanError
from megatron_muon.integration.fused import blocks_of_weight
from megatron_muon.orthogonalize.views import as_matrix, block_views

ALL = SplitRules(qkv=True, gated_fc1=True, heads=True)


def lines_of(block):
    """Lines of each of a block's matrices, from its definition."""
    lines = [
        block.start + i * block.period + j for i in range(block.count) for j in range(block.run)
    ]
    length = len(lines) // block.batch
    return [lines[i : i + length] for i in range(0, len(lines), length)]


def named_lines(blocks):
    return {block.name: lines_of(block) for block in blocks}


def config(**changes):
    """A config of four heads of two channels in two query groups."""
    return SimpleNamespace(
        **{"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 2} | changes
    )


@st.composite
def attention(draw):
    """Blocks of q, maybe a gate, k and v of query groups, maybe by heads, and the groups."""
    groups, per_group, head = (draw(st.integers(1, n)) for n in (6, 4, 3))
    gate = {"gate": per_group * head} if draw(st.booleans()) else {}
    widths = {"q": per_group * head, **gate, "k": head, "v": head}
    num_rows = groups * sum(widths.values())
    head_rows = head if draw(st.booleans()) else None
    return interleaved(widths, num_rows, "w", head_rows), num_rows, groups


@st.composite
def experts(draw):
    """Blocks of stacked experts, whole or gate and up, and their tensor-parallel stride."""
    size, half = draw(st.integers(1, 4)), draw(st.integers(1, 4)) * 4
    if draw(st.booleans()):
        one = (
            LogicalBlock("gate", 0, half, 2 * half, 1),
            LogicalBlock("up", half, half, 2 * half, 1),
        )
        return stacked(one, 2 * half, size), 2 * half * size, 2 * size
    return stacked(whole(2 * half), 2 * half, size), 2 * half * size, size


def of_columns(blocks, is_columns):
    return tuple(replace(block, dim=int(is_columns)) for block in blocks)


def oriented(num_lines, others, is_columns):
    return (others, num_lines) if is_columns else (num_lines, others)


# Megatron's fused weights.


def test_query_groups_are_split_as_their_rows_lie():
    blocks, warning = blocks_of_weight("a.linear_qkv.weight", (16, 3), config(), SplitRules(), None)
    assert named_lines(blocks) == {
        "q": [[0, 1, 2, 3, 8, 9, 10, 11]],
        "k": [[4, 5, 12, 13]],
        "v": [[6, 7, 14, 15]],
    }
    assert warning == ""


def test_heads_of_gated_attention_are_split_as_their_rows_lie():
    gated = config(attention_output_gate=True)
    blocks, _ = blocks_of_weight("linear_qkv.weight", (24, 3), gated, ALL, None)
    assert named_lines(blocks) == {
        "q head": [[0, 1], [2, 3], [12, 13], [14, 15]],
        "gate head": [[4, 5], [6, 7], [16, 17], [18, 19]],
        "k head": [[8, 9], [20, 21]],
        "v head": [[10, 11], [22, 23]],
    }


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(("heads", "groups", "head"), [(4, 2, 3), (4, 4, 2), (6, 1, 2)])
def test_heads_are_those_that_megatron_reads(heads, groups, head, gate):
    """Megatron's own reading of the projection's output, fed with the numbers of its rows."""
    from megatron.core.transformer.attention import SelfAttention

    given_config = config(
        num_attention_heads=heads, num_query_groups=groups, kv_channels=head,
        attention_output_gate=gate, test_mode=False,
    )  # fmt: skip
    num_rows = (heads * (2 if gate else 1) + 2 * groups) * head
    rows = torch.arange(num_rows).view(1, 1, -1)
    reader = SimpleNamespace(
        linear_qkv=_Module(rows),
        num_attention_heads_per_partition=heads, num_query_groups_per_partition=groups,
        hidden_size_per_attention_head=head, config=given_config, world_size=1,
        q_layernorm=None, k_layernorm=None,
    )  # fmt: skip
    query, key, value, *gates = SelfAttention.get_query_key_value_tensors(
        reader, torch.zeros(1), output_gate=gate
    )
    read = {"q head": query, "k head": key, "v head": value}
    read |= {"gate head": gates[0]} if gate else {}
    blocks, _ = blocks_of_weight("linear_qkv.weight", (num_rows, 5), given_config, ALL, None)
    assert named_lines(blocks) == {name: part[0, 0].tolist() for name, part in read.items()}


class _Module(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def forward(self, hidden):
        return self.rows, None


@pytest.mark.parametrize("num_rows", [15, 8, 32])  # no group, one group, four groups
def test_rows_that_the_config_does_not_confirm_are_an_error(num_rows):
    with pytest.raises(ConfigurationError) as caught:
        blocks_of_weight("a.linear_qkv.weight", (num_rows, 3), config(), SplitRules(), None)
    for part in ("a.linear_qkv.weight", f"{num_rows} rows", "expected 16", "--muon-no-split-qkv"):
        assert part in str(caught.value)


def test_a_fused_projection_stays_whole_where_it_is_not_to_be_split():
    unsplit = SplitRules(qkv=False)
    blocks, _ = blocks_of_weight("linear_qkv.weight", (15, 3), config(), unsplit, None)
    assert blocks == whole(15)


def test_gate_and_up_are_two_halves():
    gated = config(gated_linear_unit=True)
    blocks, _ = blocks_of_weight("mlp.linear_fc1.weight", (6, 3), gated, ALL, None)
    assert named_lines(blocks) == {"gate": [[0, 1, 2]], "up": [[3, 4, 5]]}
    for untouched in (
        blocks_of_weight("mlp.linear_fc1.weight", (6, 3), gated, SplitRules(), None),
        blocks_of_weight("mlp.linear_fc1.weight", (6, 3), config(), ALL, None),
        blocks_of_weight("mlp.linear_fc2.weight", (6, 3), gated, ALL, None),
    ):
        assert untouched == (whole(6), "")


def test_gate_and_up_of_grouped_experts_may_alternate():
    gated = config(gated_linear_unit=True)
    blocks, _ = blocks_of_weight("m.experts.0.linear_fc1.weight", (8, 3), gated, ALL, 2)
    assert named_lines(blocks) == {"gate": [[0, 1, 4, 5]], "up": [[2, 3, 6, 7]]}


def test_stacked_experts_are_a_matrix_each():
    moe = config(gated_linear_unit=True, moe_ffn_hidden_size=2)
    name = "mlp.experts.linear_fc1.weight"
    blocks, _ = blocks_of_weight(name, (3, 4, 5), moe, SplitRules(), None)
    assert named_lines(blocks) == {"expert": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]}
    blocks, _ = blocks_of_weight(name, (2, 4, 5), moe, ALL, None)
    assert named_lines(blocks) == {"gate": [[0, 1], [4, 5]], "up": [[2, 3], [6, 7]]}
    blocks, _ = blocks_of_weight(name, (2, 4, 5), moe, ALL, 1)
    assert named_lines(blocks) == {"gate": [[0, 2], [4, 6]], "up": [[1, 3], [5, 7]]}
    blocks, warning = blocks_of_weight(name, (2, 5, 4), moe, ALL, None)
    assert named_lines(blocks) == {"expert": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]}
    assert "--muon-split-gated-fc1" in warning


def test_what_is_split_in_one_matrix_is_split_in_a_stack_of_them():
    heads = stacked(interleaved({"q": 4, "k": 2}, 6, "w", 2), 6, 2)
    assert named_lines(heads) == {
        "q head": [[0, 1], [2, 3], [6, 7], [8, 9]],
        "k head": [[4, 5], [10, 11]],
    }


def test_heads_of_cross_attention_are_split_as_their_rows_lie():
    blocks, _ = blocks_of_weight("x.linear_q.weight", (8, 3), config(), ALL, None)
    assert named_lines(blocks) == {"q head": [[0, 1], [2, 3], [4, 5], [6, 7]]}
    blocks, _ = blocks_of_weight("x.linear_kv.weight", (16, 3), config(), ALL, None)
    assert named_lines(blocks) == {
        "k head": [[0, 1], [4, 5], [8, 9], [12, 13]],
        "v head": [[2, 3], [6, 7], [10, 11], [14, 15]],
    }
    assert blocks_of_weight("x.linear_q.weight", (8, 3), config(), SplitRules(), None) == (
        whole(8), ""
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj",
     "linear_kv_up_proj", "linear_qkv_down_proj", "in_proj", "linear_wq_b", "linear_q"],
)  # fmt: skip
def test_weights_whose_heads_are_unknown_stay_whole_and_say_so(name):
    blocks, warning = blocks_of_weight(f"a.{name}.weight", (18, 3), config(), ALL, None)
    assert blocks == whole(18)
    assert warning.startswith("WARNING: whole")
    assert "--muon-split-heads" in warning
    assert blocks_of_weight(f"a.{name}.weight", (18, 3), config(), SplitRules(), None)[1] == ""


def test_the_output_projection_is_no_weight_of_heads():
    assert blocks_of_weight("linear_proj.weight", (8, 8), config(), ALL, None) == (whole(8), "")


# The descriptor.


@given(st.one_of(attention(), experts()), st.integers(1, 5), st.booleans())
def test_every_matrix_of_every_block_covers_the_lines_once(blocks_and_lines, others, is_columns):
    blocks, num_lines, _ = blocks_and_lines
    blocks = of_columns(blocks, is_columns)
    shape = oriented(num_lines, others, is_columns)
    matrix = LogicalMatrix("w", shape, blocks)
    matrices = [lines for block in blocks for lines in lines_of(block)]
    assert sorted(line for lines in matrices for line in lines) == list(range(num_lines))
    shapes = [oriented(len(lines), others, is_columns) for lines in matrices]
    assert matrix.block_shapes() == shapes
    assert matrix.ns_flops(3) == sum(3 * step_flops(*shape) for shape in shapes)
    for block in blocks:
        parts = [(m, *range(start, end)) for m, start, end in block.parts()]
        assert [line for _, *lines in parts for line in lines] == joined(lines_of(block))
        for number, *lines in parts:
            assert set(lines) <= set(lines_of(block)[number])


def test_lines_that_are_covered_twice_or_never_are_refused():
    q, k = LogicalBlock("q", 0, 2, 3, 2, batch=2), LogicalBlock("k", 2, 1, 3, 2)
    LogicalMatrix("w", (6, 4), (q, k))
    columns = replace(k, dim=1)
    for blocks in ((q,), (q, k, k), (q, replace(k, start=1)), (q, columns)):
        with pytest.raises(PlanError, match="do not cover its 6 rows once"):
            LogicalMatrix("w", (6, 4), blocks)
    with pytest.raises(PlanError, match="do not cover its 4 columns once"):
        LogicalMatrix("w", (6, 4), (columns,))


@pytest.mark.parametrize(
    "wrong",
    [{"batch": 4}, {"batch": 9}, {"batch": 0}, {"dim": 2}, {"count": 0}, {"run": 0}],
    ids=str,
)
def test_a_block_is_equal_matrices(wrong):
    """Six runs of four lines: six matrices, twelve, three, but not four or nine."""
    fine = LogicalBlock("b", 0, 4, 5, 6)
    for batch in (1, 2, 3, 6, 12, 24):
        replace(fine, batch=batch)
    with pytest.raises(PlanError):
        replace(fine, **wrong)


def test_blocks_that_differ_are_written_differently():
    block = LogicalBlock("b", 0, 4, 4, 2)
    others = [replace(block, **c) for c in ({"batch": 2}, {"dim": 1}, {"period": 5}, {"start": 1})]
    assert len({str(b) for b in (block, *others)}) == 5


# Tensor-parallel shards.


def shards_of(matrix, dim):
    """Numbers of the lines that each rank holds, in its order: its piece of every part."""
    part = matrix.shape[dim] // matrix.tp_stride
    piece = part // matrix.tp_size
    return [
        [i * part + rank * piece + j for i in range(matrix.tp_stride) for j in range(piece)]
        for rank in range(matrix.tp_size)
    ]


def joined(lists):
    return list(chain.from_iterable(lists))


def assert_put_together(matrix, dim):
    """The local blocks of all ranks hold what the logical blocks hold, matrix by matrix."""
    shards = shards_of(matrix, dim)
    for block, local in zip(matrix.blocks, matrix.local_blocks(), strict=True):
        assert (block.name, block.dim) == (local.name, local.dim)
        held = [[[shard[i] for i in lines] for lines in lines_of(local)] for shard in shards]
        if local.batch == block.batch:
            together = [joined(pieces) for pieces in zip(*held, strict=True)]
        else:
            assert local.batch * matrix.tp_size == block.batch
            together = joined(held)
        assert [sorted(lines) for lines in together] == [sorted(x) for x in lines_of(block)]
    LogicalMatrix("local", matrix.local_shape, matrix.local_blocks())


@given(attention(), st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_shards_of_whole_query_groups_make_up_the_blocks(parts, size, others, is_columns):
    blocks, num_lines, groups = parts
    if num_lines % size:
        return
    shape = oriented(num_lines, others, is_columns)
    matrix = LogicalMatrix("w", shape, of_columns(blocks, is_columns), int(is_columns), size)
    if groups % size == 0:
        assert_put_together(matrix, int(is_columns))
        return
    with pytest.raises(ConfigurationError) as caught:
        matrix.local_blocks()
    assert str(caught.value).startswith(
        f"w: {groups} query groups cannot be cut over {size} tensor-parallel ranks shard by shard"
    )
    assert str(caught.value).endswith("Use --muon-tp-mode owner or duplicated.")


@given(experts(), st.sampled_from([1, 2, 4]), st.integers(1, 5), st.booleans())
def test_shards_of_each_expert_make_up_the_blocks(parts, size, others, is_columns):
    blocks, num_lines, stride = parts
    shape = oriented(num_lines, others, is_columns)
    matrix = LogicalMatrix(
        "w", shape, of_columns(blocks, is_columns), int(is_columns), size, stride
    )
    assert_put_together(matrix, int(is_columns))
    assert [b.batch for b in matrix.local_blocks()] == [b.batch for b in blocks]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_shards_of_a_whole_matrix_are_whole(size, stride, rows):
    num_rows = size * stride * rows
    matrix = LogicalMatrix("w", (num_rows, 3), whole(num_rows), 0, size, stride)
    assert matrix.local_blocks() == whole(stride * rows)
    assert_put_together(matrix, 0)


@given(st.one_of(attention(), experts()), st.integers(1, 4))
def test_a_shard_across_the_blocks_holds_all_their_lines(parts, size):
    blocks, num_lines, _ = parts
    for matrix in (
        LogicalMatrix("w", (num_lines, 3 * size), blocks, 1, size),
        LogicalMatrix("w", (3 * size, num_lines), of_columns(blocks, True), 0, size),
        LogicalMatrix("w", (num_lines, 3), blocks, None, size),
    ):
        assert matrix.local_blocks() == matrix.blocks
        LogicalMatrix("local", matrix.local_shape, matrix.blocks)


def test_interleaved_gate_and_up_are_cut_without_a_stride():
    blocks, _ = blocks_of_weight(
        "experts.0.linear_fc1.weight", (16, 3), config(gated_linear_unit=True), ALL, 2
    )
    matrix = LogicalMatrix("w", (16, 3), blocks, 0, 2)
    assert named_lines(matrix.local_blocks()) == {"gate": [[0, 1, 4, 5]], "up": [[2, 3, 6, 7]]}


def test_ranks_that_share_heads_in_pairs_are_refused():
    """Two heads over four ranks: each rank has a half of one, and all look alike."""
    blocks = interleaved({"q": 4}, 8, "w", 4)
    LogicalMatrix("w", (8, 3), blocks, 0, 2).local_blocks()
    with pytest.raises(ConfigurationError, match="--muon-tp-mode owner or duplicated"):
        LogicalMatrix("w", (8, 3), blocks, 0, 4).local_blocks()


# Views.


@given(st.one_of(attention(), experts()), st.integers(1, 4), st.booleans(), st.booleans())
def test_views_partition_the_matrix(parts, others, is_columns, transposed):
    blocks, num_lines, _ = parts
    dim = int(is_columns)
    shape = oriented(num_lines, others, is_columns)
    # Inside a larger tensor, of unusual strides, as shards in a buffer are.
    memory = torch.zeros(*(n + 3 for n in shape)).mT.contiguous().mT if transposed else (
        torch.zeros(*(n + 3 for n in shape))
    )  # fmt: skip
    x = memory[2 : 2 + shape[0], 1 : 1 + shape[1]]
    numbers = torch.arange(num_lines * others).view(shape)
    for block in of_columns(blocks, is_columns):
        views, expected = block_views(x, block), lines_of(block)
        assert len(views) == block.batch
        for view, known, lines in zip(views, block_views(numbers, block), expected, strict=True):
            picked = numbers.index_select(dim, torch.tensor(lines))
            assert torch.equal(as_matrix(known, block), picked)
            if not is_columns:
                assert torch.equal(known.reshape(-1, known.shape[-1]), picked)
            assert as_matrix(view, block).shape == block.matrix_shape(shape)
            view.add_(torch.ones_like(as_matrix(view, block)).view(view.shape))
    assert torch.equal(x, torch.ones(shape))
    assert memory.sum() == x.numel()


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.integers(1, 5),
    st.sampled_from([0, 1]),
)  # fmt: skip
def test_lines_with_gaps_are_a_view(count, run, gap, start, others, dim):
    """Runs that begin, lie and end anywhere, in memory of any strides and offset."""
    block = LogicalBlock("b", start, run, run + gap, count, dim)
    lines = torch.tensor(joined(lines_of(block)))
    shape = oriented(int(lines[-1]) + 1, others, bool(dim))
    numel = shape[0] * shape[1]
    for x in (
        torch.arange(numel).view(shape),
        torch.arange(numel).view(shape[::-1]).T,
        torch.arange(2 * numel).view(2 * shape[0], shape[1])[shape[0] :],
    ):
        (view,) = block_views(x, block)
        assert torch.equal(as_matrix(view, block), x.index_select(dim, lines))
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_a_view_of_one_run_is_no_copy():
    x = torch.zeros(24, 3)
    gated = config(attention_output_gate=True)
    blocks, _ = blocks_of_weight("linear_qkv.weight", (24, 3), gated, ALL, None)
    for block in blocks:
        for view in block_views(x, block):
            assert view.shape == (2, 3)
            assert as_matrix(view, block).data_ptr() == view.data_ptr()
