"""A station orthogonalizes the blocks of whole matrices, each as if it were alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_muon.bookkeeping.matrix import LogicalBlock, interleaved, step_flops, whole
from megatron_muon.collectives.arena import Arena
from megatron_muon.optimizer.account import StepAccount
from megatron_muon.optimizer.station import EngineSettings, Station
from megatron_muon.orthogonalize.newton_schulz import Orthogonalization
from megatron_muon.testing.oracle import relative_error

SETTINGS = Orthogonalization(
    num_steps=5,
    coefficient_type="quintic",
    scale_mode="spectral",
    extra_scale_factor=1.0,
    matmul_precision="highest",
)
BLOCKS = {
    "whole": whole(32),
    "q, k and v": interleaved({"q": 4, "k": 2, "v": 2}, 32, "w"),
    "heads": interleaved({"q": 4, "k": 2, "v": 2}, 32, "w", 2),
    "runs that touch": (LogicalBlock("all", 0, 8, 8, 4),),
    "gates of two experts": (LogicalBlock("gate", 0, 4, 8, 4, batch=2),
                             LogicalBlock("up", 4, 4, 8, 4, batch=2)),
}  # fmt: skip


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def station(budget_nbytes=2**20):
    settings = EngineSettings(orthogonalization=SETTINGS, budget_nbytes=budget_nbytes)
    return Station(None, None, settings, Arena(), StepAccount(), torch.device("cpu"))


def lines_of(block):
    """Lines of each of a block's matrices, from its definition."""
    lines = [
        block.start + i * block.period + j for i in range(block.count) for j in range(block.run)
    ]
    length = len(lines) // block.batch
    return [lines[i : i + length] for i in range(0, len(lines), length)]


def expected_of(x, blocks):
    """The update, with every matrix picked by its lines and computed alone."""
    update = torch.full_like(x, math.nan)
    for block in blocks:
        for lines in map(torch.tensor, lines_of(block)):
            update.index_copy_(
                block.dim, lines, SETTINGS.block(x.index_select(block.dim, lines))
            )  # fmt: skip
    return update


@pytest.mark.parametrize("budget_nbytes", [64, 1024, 2**20])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("name", BLOCKS)
def test_each_block_is_orthogonalized_by_itself(name, dim, budget_nbytes):
    """Into other memory or in place, among other matrices, and whatever is copied at a time."""
    blocks = tuple(replace(block, dim=dim) for block in BLOCKS[name])
    xs = [draw(32, 12, seed=seed) if dim == 0 else draw(12, 32, seed=seed) for seed in range(3)]
    kept, expected = [x.clone() for x in xs], [expected_of(x, blocks) for x in xs]
    outs = [torch.full_like(x, math.nan) for x in xs]
    at = station(budget_nbytes)
    at.orthogonalize([(x, out, blocks) for x, out in zip(xs, outs, strict=True)])
    assert all(map(torch.equal, outs, expected))
    assert all(map(torch.equal, xs, kept))
    at.orthogonalize([(x, x, blocks) for x in xs])
    assert all(map(torch.equal, xs, expected))
    if name != "whole":
        is_whole = expected_of(kept[0], (replace(whole(32)[0], dim=dim),))
        assert (relative_error(is_whole, expected[0]) > 0.1) == (name != "runs that touch")
    assert at.wire.arena.lent_nbytes == 0


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_is_counted(name):
    at = station()
    at.orthogonalize([(draw(32, 12), torch.empty(32, 12), BLOCKS[name])] * 2)
    sizes = [len(lines) for block in BLOCKS[name] for lines in lines_of(block)]
    assert at.account.newton_schulz_calls == 2 * len(sizes)
    assert at.account.newton_schulz_flops == 2 * 5 * sum(step_flops(size, 12) for size in sizes)


def test_nothing_to_do_is_done():
    station().orthogonalize([])
