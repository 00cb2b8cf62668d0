"""Logical matrices: what a shard is, and blocks that cover the rows once."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.bookkeeping.matrix import (
    LogicalBlock,
    LogicalMatrix,
    interleaved,
    step_flops,
    whole,
)
from megatron_muon.errors import PlanError


def rows_of(block: LogicalBlock) -> list[int]:
    return [row for start, end in block.runs() for row in range(start, end)]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 5))
def test_interleaved_blocks_cover_every_row_once(widths, groups, columns):
    named = {f"part{i}": width for i, width in enumerate(widths)}
    num_rows = groups * sum(widths)
    blocks = interleaved(named, num_rows, "w")
    rows = [rows_of(block) for block in blocks]
    assert sorted(chain(*rows)) == list(range(num_rows))
    assert [block.num_lines for block in blocks] == [groups * width for width in widths]
    assert [block.name for block in blocks] == list(named)
    LogicalMatrix("w", (num_rows, columns), blocks)


def test_interleaved_blocks_are_those_of_the_query_groups():
    q, k, v = interleaved({"q": 4, "k": 1, "v": 1}, 12, "w")
    assert rows_of(q) == [0, 1, 2, 3, 6, 7, 8, 9]
    assert rows_of(k) == [4, 10]
    assert rows_of(v) == [5, 11]


def test_rows_that_are_no_whole_number_of_groups_are_refused():
    with pytest.raises(PlanError, match=r"w\.qkv: 13 rows .* 4\+1\+1 .* --muon-no-split-qkv"):
        interleaved({"q": 4, "k": 1, "v": 1}, 13, "w.qkv")


@pytest.mark.parametrize(
    "blocks",
    [
        (),
        whole(5),
        whole(7),
        (*whole(3), *whole(3)),  # the first rows twice
        (LogicalBlock("a", 0, 2, 2, 1), LogicalBlock("b", 3, 3, 3, 1)),  # a gap
        (LogicalBlock("a", 0, 3, 2, 2), LogicalBlock("b", 5, 1, 1, 1)),  # overlapping runs
        (LogicalBlock("a", 1, 6, 6, 1),),
        # As many rows as there are and the right ends, but some twice and some never.
        (LogicalBlock("a", 0, 2, 1, 1), LogicalBlock("b", 1, 2, 2, 1),
         LogicalBlock("c", 4, 2, 2, 1)),
    ],
)  # fmt: skip
def test_blocks_must_cover_the_rows_once(blocks):
    with pytest.raises(PlanError, match=r"w\.qkv: blocks .* do not cover its 6 rows once"):
        LogicalMatrix("w.qkv", (6, 4), blocks)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_shards_are_equal_parts_of_the_whole(size, stride, rows, columns, by_rows):
    dim = 0 if by_rows else 1
    shape = [rows, columns]
    shape[dim] *= size * stride
    matrix = LogicalMatrix("w", tuple(shape), whole(shape[0]), dim, size, stride)
    assert matrix.local_numel * size == matrix.numel
    assert matrix.local_shape[1 - dim] == shape[1 - dim]
    replicated = LogicalMatrix("w", tuple(shape), whole(shape[0]), None, size)
    assert replicated.local_shape == replicated.shape


@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 9), st.integers(0, 3), st.booleans())
def test_rows_that_are_cut_again_are_held_once(tp, size, rows, more, by_rows):
    """The parts of each tensor-parallel shard follow each other; what fills them up is no part."""
    columns, part = 2 * tp, -(-rows // size) + more
    shape = (rows * tp, columns) if by_rows else (rows, columns)
    matrix = LogicalMatrix(
        "w", shape, whole(shape[0]), 0 if by_rows else 1, tp, gtp_size=size, gtp_rows=part
    )
    width = columns if by_rows else 2
    assert matrix.local_shape == (part, width)
    assert matrix.is_cut
    assert matrix.row_size == tp * size
    for tp_rank in range(tp):
        ranks = [gtp_rank * tp + tp_rank for gtp_rank in range(size)]
        held = [
            element
            for rank in ranks
            for element in range(
                matrix.first_held(rank), matrix.first_held(rank) + matrix.held_numel(rank)
            )
        ]
        assert held == list(range(rows * width))


def test_parts_too_small_for_the_rows_are_refused():
    with pytest.raises(PlanError, match="w: 2 ranks with 3 rows each do not hold the 7 rows"):
        LogicalMatrix("w", (7, 2), whole(7), gtp_size=2, gtp_rows=3)


def test_uneven_shards_are_refused():
    with pytest.raises(PlanError, match=r"fc1: dimension 0 .* 4 ranks x 2 parts"):
        LogicalMatrix("fc1", (12, 4), whole(12), 0, 4, 2)


@given(st.integers(1, 99), st.integers(1, 99))
def test_flops_are_those_of_the_three_products(rows, columns):
    short, long = min(rows, columns), max(rows, columns)
    gram, square, product = 2 * short**2 * long, 2 * short**3, 2 * short**2 * long
    assert step_flops(rows, columns) == gram + square + product
    matrix = LogicalMatrix("w", (rows, columns), whole(rows))
    assert matrix.ns_flops(5) == 5 * step_flops(rows, columns)


def test_flops_of_split_matrices_are_those_of_their_blocks():
    blocks = interleaved({"q": 4, "k": 2, "v": 2}, 16, "w")
    split = LogicalMatrix("w", (16, 4), blocks)
    assert split.ns_flops(1) == step_flops(8, 4) + 2 * step_flops(4, 4)
