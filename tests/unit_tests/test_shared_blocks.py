"""Shared blocks on real ranks: every rank iterates on the same sums, bit for bit, in any line."""

from __future__ import annotations

from itertools import product
from unittest import mock

import pytest
import torch

from megatron_muon.bookkeeping.matrix import LogicalMatrix, whole
from megatron_muon.bookkeeping.plan import Grid, GridSize, OwnedMatrix, held_by, make_plan
from megatron_muon.bookkeeping.units import units_of
from megatron_muon.collectives.arena import Arena
from megatron_muon.optimizer.account import StepAccount
from megatron_muon.optimizer.shared import SharedBlocks
from megatron_muon.optimizer.station import EngineSettings, Station
from megatron_muon.orthogonalize.newton_schulz import Orthogonalization
from megatron_muon.orthogonalize.parts import BlockPart
from megatron_muon.testing.oracle import COEFFICIENTS, orthogonalize, relative_error
from megatron_muon.testing.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

NUM_RANKS = 4
SHAPES = {"a": (96, 403), "b": (211, 80)}
"""Long sides that four does not divide, of two matrices that are added in one micro-group."""
LINES = ("row", "column")
PRECISIONS = ("highest", "medium")
BUDGETS = (4096, 2**24)
BOUNDS = {"highest": 5e-6, "medium": 1.5e-2}


def matrix_of(name):
    seed = sum(map(ord, name))
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def orthogonalized(line, precision, budget_nbytes):
    """This rank's parts of the updates, the Gram matrices it iterated on, and its account."""
    import torch.distributed as dist

    world, alone = dist.group.WORLD, None
    dp, tp = (1, NUM_RANKS) if line == "row" else (NUM_RANKS, 1)
    settings = EngineSettings(
        orthogonalization=Orthogonalization(
            num_steps=5, coefficient_type="quintic", scale_mode="shape_scaling",
            extra_scale_factor=0.5, matmul_precision=precision,
        ),
        budget_nbytes=budget_nbytes,
    )  # fmt: skip
    groups = (alone, world) if line == "row" else (world, alone)
    station = Station(*groups, settings, Arena(), StepAccount(), torch.device("cpu"))
    owned = [
        OwnedMatrix(matrix=matrix, pieces=held_by(0, matrix))
        for name, shape in SHAPES.items()
        for matrix in (LogicalMatrix(name, shape, whole(shape[0])),)
    ]
    plan = make_plan(owned, {Grid(): GridSize(dp, tp)}, 5, share_blocks=True).matrices
    assert all(len(planned.homes) > 1 for planned in plan)
    units = units_of(plan)
    parts = {}
    for i, unit in enumerate(units):
        if (unit.home.dp, unit.home.tp) == (station.position.dp, station.position.tp):
            dim = 0 if unit.whole.matrix.shape[0] > unit.whole.matrix.shape[1] else 1
            start, end = unit.lines
            parts[i] = matrix_of(unit.whole.matrix.name).narrow(dim, start, end - start).clone()
    grams, take = [], BlockPart.take_segment

    def look(part):
        grams.append(part.gram.clone())
        take(part)

    indices = tuple(range(len(units)))
    with mock.patch.object(BlockPart, "take_segment", look):
        SharedBlocks(units, [indices], station).orthogonalize(indices, parts)
    assert station.wire.arena.lent_nbytes == 0
    found = {(units[i].whole.matrix.name, units[i].number): x for i, x in parts.items()}
    return found, grams, station.account


def compute():
    return {key: orthogonalized(*key) for key in product(LINES, PRECISIONS, BUDGETS)}


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    return run_ranks(compute, NUM_RANKS, timeout_s=90, logs=tmp_path_factory.mktemp("ranks"))


def update_of(computed, key, name):
    parts = {}
    for results in computed:
        parts |= {number: x for (of, number), x in results[key][0].items() if of == name}
    dim = 0 if SHAPES[name][0] > SHAPES[name][1] else 1
    return torch.cat([parts[number] for number in sorted(parts)], dim)


KEYS = list(product(LINES, PRECISIONS, BUDGETS))


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_updates_are_those_of_the_oracle(computed, key):
    for name, (rows, columns) in SHAPES.items():
        size = 0.5 * max(1.0, rows / columns) ** 0.5
        expected = size * orthogonalize(matrix_of(name).double(), COEFFICIENTS["quintic"])
        error = relative_error(update_of(computed, key, name), expected)
        assert error < BOUNDS[key[1]]
        assert error > 0


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_rank_iterates_on_the_same_bits(computed, key):
    """And on symmetric ones: of as many matrices as it has parts, one after the other."""
    by_shape = {}
    for results in computed:
        _, grams, _ = results[key]
        for rows in {gram.shape[0] for gram in grams}:
            mine = [gram for gram in grams if gram.shape[0] == rows]
            theirs = by_shape.setdefault(rows, mine)
            assert len(mine) == len(theirs) > 1
            assert all(map(torch.equal, mine, theirs))
            assert all(torch.equal(gram, gram.mT) for gram in mine)
    assert sorted(by_shape) == [80, 96]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_line_and_budget_change_no_bit(computed, precision, name):
    updates = [
        update_of(computed, (line, precision, budget), name)
        for line, budget in product(LINES, BUDGETS)
    ]
    assert all(torch.equal(update, updates[0]) for update in updates[1:])


def test_all_matrices_are_added_in_the_same_collectives(computed):
    """One for the sizes and two for each sum: two sums in fp32, three in bf16 for long blocks."""
    calls = {key: results[key][2].traffic.calls for results in computed for key in KEYS}
    for line in LINES:
        assert calls[line, "highest", 2**24] == 1 + 2 * 2
        assert calls[line, "highest", 4096] > 20
        # The block of 211 x 80 is not long enough for the Gram form in bf16.
        assert calls[line, "medium", 2**24] == 1 + 2 * 5
    assert sum(results[KEYS[0]][2].newton_schulz_calls for results in computed) == len(SHAPES)
