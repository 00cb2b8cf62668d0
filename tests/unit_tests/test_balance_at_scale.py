"""Balance, padding and movement on models and grids of the sizes in use, from shapes alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from megatron_muon.bookkeeping.homes import HomeItem, choose_homes, lower_bound, moved_numel
from megatron_muon.bookkeeping.layout import LayoutItem, compute_owner_layout
from megatron_muon.bookkeeping.matrix import LogicalMatrix, interleaved, whole
from megatron_muon.bookkeeping.stage import max_over_mean, padding_of, stage_loads
from megatron_muon.planner.job import PlanSettings, plan_job
from megatron_muon.planner.models import BUILT_IN
from megatron_muon.planner.sizes import ParallelSizes

NUM_STEPS = 5
DDP_CONFIG = SimpleNamespace(pad_buckets_for_high_nccl_busbw=False, grad_reduce_in_fp32=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a grid, and what is promised for the buckets Megatron uses with overlap.

    Attributes:
        gated: Whether gate and up projection are stacked in fc1, which stays one block.
        padding: Buffer elements over parameter elements.
        owner_flops: Flops of the busiest data-parallel rank over the mean.
        owner_moved: Share of the elements that leave their owner's row.
        flat_moved: The same where matrices straddle.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_groups: int
    ffn: int
    gated: bool
    tp_size: int
    dp_size: int
    padding: float
    owner_flops: float
    owner_moved: float
    flat_moved: float

    def matrices(self):
        """Matrices in forward order. Embeddings, output layer and norms are not Muon's."""
        group = {"q": self.hidden // self.num_groups}
        group |= dict.fromkeys("kv", self.hidden // self.num_heads)
        qkv_rows = sum(group.values()) * self.num_groups
        fc1_rows = self.ffn * (1 + self.gated)
        for i in range(self.num_layers):
            for name, shape, tp_dim in (
                ("self_attention.linear_proj", (self.hidden, self.hidden), 1),
                ("self_attention.linear_qkv", (qkv_rows, self.hidden), 0),
                ("mlp.linear_fc1", (fc1_rows, self.hidden), 0),
                ("mlp.linear_fc2", (self.hidden, self.ffn), 1),
            ):
                blocks = interleaved(group, qkv_rows, name) if "qkv" in name else whole(shape[0])
                yield LogicalMatrix(
                    f"decoder.layers.{i}.{name}.weight", shape, blocks, tp_dim=tp_dim,
                    tp_size=self.tp_size,
                )  # fmt: skip


LLAMA_8B = {"num_layers": 32, "hidden": 4096, "num_heads": 32, "num_groups": 8, "ffn": 14336}
LLAMA_70B = {"num_layers": 80, "hidden": 8192, "num_heads": 64, "num_groups": 8, "ffn": 28672}
CASES = {
    "GPT-2 124M, TP2 DP4": Case(
        num_layers=12, hidden=768, num_heads=12, num_groups=12, ffn=3072, gated=False,
        tp_size=2, dp_size=4, padding=1.001, owner_flops=1.001, owner_moved=0, flat_moved=0.08,
    ),
    "Llama-3-8B, TP2 DP16": Case(
        **LLAMA_8B, gated=True, tp_size=2, dp_size=16,
        padding=1.04, owner_flops=1.02, owner_moved=0, flat_moved=0.94,
    ),
    "Llama-3-8B, TP1 DP64": Case(
        **LLAMA_8B, gated=True, tp_size=1, dp_size=64,
        padding=1.08, owner_flops=1.03, owner_moved=0, flat_moved=0.985,
    ),
    "Llama-3-70B, TP4 DP32": Case(
        **LLAMA_70B, gated=True, tp_size=4, dp_size=32,
        padding=1.03, owner_flops=1.02, owner_moved=0.01, flat_moved=0.97,
    ),
}  # fmt: skip
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
with_overlap = pytest.mark.parametrize("overlap", [True, False], ids=["buckets", "one bucket"])


def bucket_size(case, overlap):
    """Elements of a bucket that Megatron's training uses, and its one bucket without overlap."""
    return max(40_000_000, 1_000_000 * case.dp_size) if overlap else None


def megatron_layout(case, overlap, optimizer):
    """The layout of one of Megatron's optimizers, and its range of each matrix."""
    import torch

    from megatron_muon.integration.cpu import import_megatron

    import_megatron()
    from megatron.core.optimizer import distrib_optimizer, layer_wise_optimizer

    stock = {
        "owner": layer_wise_optimizer.LayerWiseDistributedOptimizer,
        "flat": distrib_optimizer.DistributedOptimizer,
    }[optimizer]
    assert stock.__module__.startswith("megatron.core")
    params = [torch.nn.Parameter(torch.empty(matrix.local_shape, device="meta"))
              for matrix in case.matrices()]  # fmt: skip
    for param in params:
        param.is_managed_by_layer_wise_optimizer = True
    full = stock.compute_full_param_layout(
        params, bucket_size(case, overlap), case.dp_size, DDP_CONFIG
    )
    (layout,) = full.layouts.values()
    return layout, [layout.param_index_map[param] for param in params]


def owner_layout(case, overlap):
    items = [LayoutItem(m.local_numel, m.ns_flops(NUM_STEPS)) for m in case.matrices()]
    return compute_owner_layout(items, bucket_size(case, overlap), case.dp_size, 64)


def home_items(case, holders):
    return [
        HomeItem(
            name=matrix.name, flops=matrix.ns_flops(NUM_STEPS), numel=matrix.numel,
            tp_size=case.tp_size, **held,
        )
        for matrix, held in zip(case.matrices(), holders, strict=True)
    ]  # fmt: skip


def assert_balanced(case, items, homes):
    """Flops within 5 % of the bound and elements within 10 %, on every rank of the grid."""
    for size, tolerance in (("flops", 1.05), ("numel", 1.10)):
        loads = Counter()
        for item in items:
            loads[homes[item.name]] += getattr(item, size)
        bound = lower_bound([getattr(item, size) for item in items], case.dp_size * case.tp_size)
        assert max(loads.values()) <= tolerance * bound, size


def moved_share(items, homes):
    return moved_numel(items, homes) / sum(item.numel for item in items)


@cases
@with_overlap
def test_owner_layout_is_padded_less_than_megatron_and_balanced(case, overlap):
    layout = owner_layout(case, overlap)
    stock, _ = megatron_layout(case, overlap, "owner")
    assert layout.numel <= stock.bucket_indices[-1][1]
    assert layout.padding_ratio <= case.padding
    work = [0] * case.dp_size
    for matrix, placement in zip(case.matrices(), layout.placements, strict=True):
        work[placement.owner] += matrix.ns_flops(NUM_STEPS)
    assert max(work) * case.dp_size <= case.owner_flops * sum(work)


@cases
@with_overlap
def test_homes_from_the_owner_layout_balance_the_grid_and_move_next_to_nothing(case, overlap):
    placements = owner_layout(case, overlap).placements
    items = home_items(case, [{"owner": placement.owner} for placement in placements])
    homes = choose_homes(items, case.dp_size, case.tp_size)
    assert_balanced(case, items, homes)
    assert moved_share(items, homes) <= case.owner_moved


@cases
@with_overlap
def test_homes_from_the_flat_layout_balance_the_grid_without_padding(case, overlap):
    layout, ranges = megatron_layout(case, overlap, "flat")
    matrices = list(case.matrices())
    numel = sum(matrix.local_numel for matrix in matrices)
    assert layout.bucket_indices[-1][1] - numel < 128 * case.dp_size * len(layout.bucket_indices)
    holders = []
    for (start, end, bucket_idx), matrix in zip(ranges, matrices, strict=True):
        bucket_start, bucket_end = layout.bucket_indices[bucket_idx]
        shard = (bucket_end - bucket_start) // case.dp_size
        starts = [bucket_start + rank * shard for rank in range(case.dp_size)]
        pieces = [min(end, s + shard) - max(start, s) for s in starts]
        held = {rank: piece for rank, piece in enumerate(pieces) if piece > 0}
        assert sum(held.values()) == matrix.local_numel
        holders.append({"held": held})
    items = home_items(case, holders)
    homes = choose_homes(items, case.dp_size, case.tp_size)
    assert_balanced(case, items, homes)
    assert moved_share(items, homes) <= case.flat_moved


@pytest.mark.parametrize(("layout", "padding"), [("owner", 1.05), ("flat", 1.001)])
def test_a_trillion_parameters_come_out_even_on_a_thousand_ranks(layout, padding):
    """Kimi-K2's first layer has a matrix of half a rank's work, at the end of the last bucket."""
    stage = plan_job(
        BUILT_IN["kimi-k2"], ParallelSizes(dp=1024), PlanSettings(layout=layout)
    ).stages[0]
    planned = stage.first_plan.matrices
    assert max_over_mean(stage_loads(stage.stage).flops) <= 1.01
    assert padding_of([buffer for buffer in stage.buffers if buffer.of_matrices]) <= padding
    if layout == "owner":
        assert all(each.home.dp == each.owned.owner for each in planned)


SHARED_CASES = {
    # model, TP, DP: the busiest rank's flops over an even share, without and with sharing
    ("llama3-8b", 1, 256): (4.0, 1.10),
    ("llama3-70b", 8, 32): (1.6, 1.17),
    ("llama3-70b", 4, 64): (1.6, 1.17),
    ("llama3-70b", 8, 64): (3.3, 1.28),
    ("qwen3-32b", 8, 32): (2.0, 1.04),
}


@pytest.mark.parametrize("layout", ["owner", "flat"])
@pytest.mark.parametrize("case", SHARED_CASES, ids=str)
def test_shared_blocks_balance_the_grid(case, layout):
    """Where a block is more than a rank's share; each of its parts on a rank of its own."""
    model, tp_size, dp_size = case
    alone, most = SHARED_CASES[case]

    def stage_of(**changes):
        settings = PlanSettings(layout=layout, **changes)
        return plan_job(BUILT_IN[model], ParallelSizes(tp=tp_size, dp=dp_size), settings).stages[0]

    stage, shared = stage_of(), stage_of(share_blocks=True)
    loads = Counter()
    for planned in shared.first_plan.matrices:
        assert len(set(planned.homes)) == len(planned.homes) <= 8
        for home in planned.homes:
            loads[home] += planned.flops / len(planned.homes)
    busiest = max(loads.values()) * dp_size * tp_size / sum(loads.values())
    assert busiest <= most
    assert max_over_mean(stage_loads(stage.stage).flops) >= alone
    assert max_over_mean(stage_loads(shared.stage).flops) == pytest.approx(busiest)
    assert not any(planned.sharers for planned in stage.first_plan.matrices)


@pytest.mark.parametrize(
    ("model", "tp_size", "dp_size"), [("llama3-8b", 8, 8), ("gpt2-124m", 1, 64)]
)
def test_nothing_is_shared_where_it_would_not_help(model, tp_size, dp_size):
    """Work is even, or the largest block is one that cannot be shared: the fused projection."""
    sizes = ParallelSizes(tp=tp_size, dp=dp_size)
    job, shared = (
        plan_job(BUILT_IN[model], sizes, PlanSettings(share_blocks=share))
        for share in (False, True)
    )
    assert shared.fingerprint() == job.fingerprint()
