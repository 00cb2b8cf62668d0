"""A pipeline stage in a layout: its buffers, who holds and works on what, and what a step costs.

From names, shapes and group sizes alone; what a run chooses its layout by, and what the ``plan``
command tells, is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from megatron_muon.bookkeeping.buffers import BufferLayout, flat_layout, owner_layout
from megatron_muon.bookkeeping.costs import Hardware, LayoutCosts, Work, predict_seconds
from megatron_muon.bookkeeping.gram_sums import strip_numel, strips_of
from megatron_muon.bookkeeping.layout import LayoutItem
from megatron_muon.bookkeeping.matrix import LogicalMatrix
from megatron_muon.bookkeeping.plan import (
    Grid,
    GridSize,
    OwnedMatrix,
    PlannedMatrix,
    held_by_slices,
    make_plan,
)
from megatron_muon.bookkeeping.step_collectives import (
    ExchangeSettings,
    collectives_of,
    overlap_of,
)
from megatron_muon.bookkeeping.units import PlannedPart, units_of

LAYOUTS = {"owner": owner_layout, "flat": flat_layout}
"""What lays a buffer of matrices out; all others are flat."""

DEFAULT_BUDGET_NBYTES = 64 * 2**20
"""What a rank may send and receive in one collective unless the user says otherwise."""

MIN_BUDGET_MIB = 4 / 1024
"""A page: below it even the smallest matrices would travel one by one."""

_FP32_NBYTES = 4
_ADAM_NBYTES = 8
_GRAM_SUMS = 2
"""Sums of the Gram matrix of a shared block in a step, as with quintic's products in fp32. In bf16
there are three, of half the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What of a run's flags the work of a step depends on.

    Attributes:
        num_ns_steps: Newton-Schulz steps.
        param_nbytes: Bytes of an element of a weight.
        grad_nbytes: Of a gradient.
        momentum_nbytes: Of momentum.
        exchange_nbytes: Of what travels.
        budget_nbytes: What a rank may send and receive in one collective.
        share_blocks: Whether several ranks work on a block together that is more than a rank's
            share.
        by_bucket: Whether all matrices of a bucket are done before those of the next.
        products_nbytes: Bytes of an element in Newton-Schulz's products.
    """

    num_ns_steps: int = 5
    param_nbytes: int = 2
    grad_nbytes: int = 4
    momentum_nbytes: int = 4
    exchange_nbytes: int = 4
    budget_nbytes: int = DEFAULT_BUDGET_NBYTES
    share_blocks: bool = False
    by_bucket: bool = False
    products_nbytes: int = 2

    @property
    def exchange(self) -> ExchangeSettings:
        """What the exchange depends on."""
        return {
            "exchange_nbytes": self.exchange_nbytes,
            "budget_nbytes": self.budget_nbytes,
            "by_bucket": self.by_bucket,
        }


def bucket_numel_of(
    given: int | None, *, overlap: bool, dp_cp: int, has_buckets: bool, chunk: int
) -> int | None:
    """Return the elements of a bucket, ``None`` where all of a buffer is one.

    Args:
        given: What the user gave, ``None`` for Megatron's default (0.19.2,
            training/models/dist_utils.py:292).
        overlap: Whether gradients are reduced during the backward pass.
        dp_cp: Ranks that share dense matrices.
        has_buckets: Whether the pipeline stage has several (0.19.2: the first alone).
        chunk: Which model chunk; only the first has several.
    """
    if not overlap or not has_buckets or chunk > 0:
        return None
    return given or max(40_000_000, 1_000_000 * dp_cp)


class Member(NamedTuple):
    """A parameter to lay out.

    Attributes:
        item: Its size and work.
        matrix: Its logical matrix, ``None`` for the scalar optimizer.
        is_expert: Whether it is reduced over the expert data-parallel group.
    """

    item: LayoutItem
    matrix: LogicalMatrix | None
    is_expert: bool


@dataclass(frozen=True, slots=True)
class Buffer:
    """One of DDP's buffers on a rank.

    Attributes:
        layout: What lies where.
        num_shards: Ranks that have one shard each.
        of_matrices: Whether it is Muon's.
        is_expert: Whether it is reduced over the expert data-parallel group.
    """

    layout: BufferLayout
    num_shards: int
    of_matrices: bool
    is_expert: bool


def lay_out(
    chunks: Iterable[tuple[Iterable[Member], int | None]],
    layout: str,
    num_shards: tuple[int, int],
    high_busbw: bool,
) -> tuple[list[Buffer], list[OwnedMatrix]]:
    """Return the buffers of a pipeline stage in DDP's order, and what lies in Muon's.

    Args:
        chunks: Of each model chunk the parameters in forward order and the elements of a bucket.
        layout: Of the matrices.
        num_shards: Ranks that share dense parameters, and those that share an expert's.
        high_busbw: Whether buckets are padded for the network.
    """
    buffers: list[Buffer] = []
    owned: list[OwnedMatrix] = []
    for params, bucket_numel in chunks:
        groups: dict[tuple[bool, bool], list[Member]] = {}
        for member in params:
            groups.setdefault((member.is_expert, member.matrix is not None), []).append(member)
        # DDP has the buffers of experts behind all others, each kind in order of appearance.
        for is_expert, of_matrices in sorted(groups, key=lambda key: key[0]):
            members = groups[is_expert, of_matrices]
            shards = num_shards[is_expert]
            placed = LAYOUTS[layout if of_matrices else "flat"](
                [member.item for member in members], bucket_numel, shards, high_busbw
            )
            owned += [
                OwnedMatrix(
                    matrix=member.matrix,
                    pieces=held_by_slices((start, end), placed.buckets[bucket], shards),
                    buffer_idx=len(buffers),
                    bucket_idx=bucket,
                    range=(start, end),
                )
                for member, (start, end, bucket) in zip(members, placed.places, strict=True)
                if member.matrix is not None
            ]
            buffers.append(Buffer(placed, shards, of_matrices, is_expert))
    return buffers, owned


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A pipeline stage as it is planned.

    Attributes:
        buffers: DDP's buffers.
        grids: Sizes of the data x tensor grids.
        shared: Matrices that every rank of the stage plans alike.
        experts: Those of the routed experts of one expert-parallel rank.
        num_ranks: Ranks of the stage.
        tp: Ranks of a tensor-parallel row.
        expert_tp: Ranks that cut an expert's matrices.
    """

    buffers: Sequence[Buffer]
    grids: Mapping[Grid, GridSize]
    shared: Sequence[PlannedMatrix]
    experts: Sequence[PlannedMatrix]
    num_ranks: int
    tp: int
    expert_tp: int

    @property
    def matrices(self) -> list[PlannedMatrix]:
        """All matrices of the stage, ordered by name; of the experts those of one rank."""
        return sorted(chain(self.shared, self.experts), key=lambda planned: planned.matrix.name)


def plan_stage(
    owned: Sequence[OwnedMatrix],
    buffers: Sequence[Buffer],
    grids: Mapping[Grid, GridSize],
    settings: StepSettings,
    *,
    tp: int,
    expert_tp: int,
    num_ranks: int,
) -> Stage:
    """Give the matrices of a stage their homes.

    Args:
        owned: The matrices, of the routed experts those of one expert-parallel rank.
        buffers: DDP's buffers.
        grids: Sizes of the data x tensor grids.
        settings: What the work of a step depends on.
        tp: Ranks of a tensor-parallel row.
        expert_tp: Ranks that cut an expert's matrices.
        num_ranks: Ranks of the stage.
    """
    plan = make_plan(
        owned,
        grids,
        settings.num_ns_steps,
        share_blocks=settings.share_blocks,
    )
    return Stage(
        buffers=buffers,
        grids=grids,
        shared=[p for p in plan.matrices if not p.matrix.expert_parallel],
        experts=[p for p in plan.matrices if p.matrix.expert_parallel],
        num_ranks=num_ranks,
        tp=tp,
        expert_tp=expert_tp,
    )


@dataclass(frozen=True, slots=True)
class RankLoads:
    """What each rank of a pipeline stage has to do, in rank order.

    Attributes:
        flops: Newton-Schulz flops.
        held: Elements of masters and momentum, with those that fill shards up.
        data_numel: Elements that it sends between data-parallel ranks in a step.
        tensor_numel: Elements that it sends inside its tensor-parallel row.
        worked: Elements of whole matrices of which it is the home.
    """

    flops: list[int]
    held: list[int]
    data_numel: list[int]
    tensor_numel: list[int]
    worked: list[int]

    @classmethod
    def of(cls, num_ranks: int) -> RankLoads:
        """Return loads of nothing."""
        return cls(*([0] * num_ranks for _ in range(5)))

    def add(
        self, planned: PlannedMatrix, row_size: int, rank_of: Callable[[int, int], int]
    ) -> None:
        """Add one matrix; the hops are those of :mod:`megatron_muon.bookkeeping.schedule`.

        Args:
            planned: The matrix, or a part of a shared one.
            row_size: Ranks of a row of its grid.
            rank_of: Rank of the stage at a place of the grid.
        """
        matrix, home = planned.matrix, planned.home
        at = rank_of(home.dp, home.tp)
        self.flops[at] += planned.flops
        self.worked[at] += matrix.numel
        for dp, start, end in planned.owned.spans():
            numel = end - start
            for tp in range(row_size):
                here, there = rank_of(dp, tp), rank_of(home.dp, tp)
                self.held[here] += numel
                if dp != home.dp:
                    # A matrix that is not cut travels once to its home, and to all its copies.
                    if matrix.is_cut or tp == home.tp:
                        self.data_numel[here] += numel
                    self.data_numel[there] += numel
        for tp in range(row_size):
            if tp != home.tp:
                if matrix.is_cut:
                    self.tensor_numel[rank_of(home.dp, tp)] += matrix.local_numel
                self.tensor_numel[at] += matrix.local_numel
        if isinstance(planned, PlannedPart):
            sent = self.tensor_numel if planned.is_in_row else self.data_numel
            sent[at] += _GRAM_SUMS * _sent_for_a_sum(planned)


def _sent_for_a_sum(part: PlannedPart) -> int:
    """Return what the home of a part sends: its own strips to the others, and its sum to each."""
    strips = strips_of(min(part.whole.matrix.shape), part.count)
    numels = [strip_numel(strip) for strip in strips]
    return sum(numels) + (part.count - 2) * numels[part.number]


def stage_loads(stage: Stage) -> RankLoads:
    """Return the loads of all ranks of a stage.

    Every expert-parallel rank is taken to have the first one's plan: shapes and places are the
    same, and names, which decide between equals, differ.
    """
    loads = RankLoads.of(stage.num_ranks)
    for planned in units_of(stage.shared):
        row = stage.grids[planned.owned.grid].tp
        loads.add(planned, row, lambda dp, tp, row=row: dp * row + tp)  # type: ignore[misc]
    if not stage.experts:
        return loads
    expert_dp = max(stage.grids[planned.owned.grid].dp for planned in stage.experts)
    own = RankLoads.of(expert_dp * stage.expert_tp)
    for planned in units_of(stage.experts):
        own.add(planned, stage.expert_tp, lambda dp, tp: dp * stage.expert_tp + tp)
    ep = stage.num_ranks // (expert_dp * stage.expert_tp)
    for rank in range(stage.num_ranks):
        rest, tp = divmod(rank, stage.expert_tp)
        place = rest // ep * stage.expert_tp + tp
        for total, part in zip(_lists(loads), _lists(own), strict=True):
            total[rank] += part[place]
    return loads


def _lists(loads: RankLoads) -> tuple[list[int], ...]:
    return loads.flops, loads.held, loads.data_numel, loads.tensor_numel, loads.worked


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the worst rank of a stage, each kind by itself.

    Attributes:
        parameters: Weights, with the padding of their buffers.
        gradients: DDP's gradient buffers.
        masters: fp32 masters of matrices and of the scalar optimizer's parameters.
        momentum: Muon's momentum, and the scalar optimizer's two moments.
        scratch: Exchange buffers, whole matrices and Newton-Schulz.
    """

    parameters: int
    gradients: int
    masters: int
    momentum: int
    scratch: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.masters + self.momentum + self.scratch

    def to_dict(self) -> dict[str, int]:
        """Return the report's form."""
        kinds = {f"{name}_bytes": getattr(self, name) for name in self.__slots__}
        return {**kinds, "total_bytes": self.total}


@dataclass(frozen=True, slots=True)
class StageCosts:
    """What a step of one pipeline stage takes.

    Attributes:
        loads: Of every rank.
        memory: Of the worst rank.
        work: Of the busiest rank.
        seconds: Predicted seconds by part.
    """

    loads: RankLoads
    memory: Memory
    work: Work
    seconds: dict[str, float]

    def in_all(self, layout: str) -> LayoutCosts:
        """Return what the layout of that name costs the stage, to compare it with another."""
        work = self.work
        return LayoutCosts(
            layout=layout,
            moved_nbytes=work.data_nbytes + work.tensor_nbytes + work.grad_nbytes
            + work.weight_nbytes,
            flops=work.flops,
            memory_nbytes=self.memory.total,
            seconds=sum(self.seconds.values()),
        )  # fmt: skip


def stage_costs(stage: Stage, settings: StepSettings, machine: Hardware) -> StageCosts:
    """Add up what a step of a stage takes, and predict its seconds on a machine."""
    loads = stage_loads(stage)
    scalars = [b for b in stage.buffers if not b.of_matrices]
    scalar_held = sum(b.layout.numel // b.num_shards for b in scalars)
    held = max(loads.held, default=0)
    work = Work(
        flops=max(loads.flops),
        data_nbytes=max(loads.data_numel) * settings.exchange_nbytes,
        tensor_nbytes=max(loads.tensor_numel) * settings.exchange_nbytes,
        grad_nbytes=_ring(stage.buffers, settings.grad_nbytes),
        weight_nbytes=_ring(stage.buffers, settings.param_nbytes),
        # Momentum and master are read and written, the gradient and the update are read.
        memory_nbytes=held * (2 * settings.momentum_nbytes + 4 * _FP32_NBYTES)
        + scalar_held * (3 * _FP32_NBYTES + 2 * _ADAM_NBYTES),
        collectives=collectives_of(stage.matrices, stage.grids, **settings.exchange),
    )
    return StageCosts(
        loads,
        _memory(stage, settings, loads, scalar_held),
        work,
        predict_seconds(work, machine, stage.num_ranks, stage.tp),
    )


def whole_gather_nbytes(buffers: Sequence[Buffer]) -> int:
    """Return what a rank would receive if Muon's buckets were gathered whole in fp32."""
    return _ring([buffer for buffer in buffers if buffer.of_matrices], _FP32_NBYTES)


def max_over_mean(values: Sequence[int]) -> float:
    """Return the largest value over the mean, 1 where all are zero."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def padding_of(buffers: Sequence[Buffer]) -> float:
    """Return the elements of buffers over those of what lies in them."""
    numel = sum(buffer.layout.param_numel for buffer in buffers)
    return sum(buffer.layout.numel for buffer in buffers) / numel if numel else 1.0


def _ring(buffers: Sequence[Buffer], nbytes: int) -> int:
    """Return what a rank sends if every buffer goes once around its group."""
    return sum(b.layout.numel * (b.num_shards - 1) // b.num_shards * nbytes for b in buffers)


def _hops(loads: RankLoads) -> int:
    """Return the hops of the exchange in one direction."""
    return any(loads.data_numel) + any(loads.tensor_numel)


def _memory(stage: Stage, settings: StepSettings, loads: RankLoads, scalar_held: int) -> Memory:
    numel = sum(buffer.layout.numel for buffer in stage.buffers)
    held = max(loads.held, default=0)
    # In fp32 the weights are their own masters.
    master = 0 if settings.param_nbytes == _FP32_NBYTES else _FP32_NBYTES
    return Memory(
        parameters=numel * settings.param_nbytes,
        gradients=numel * settings.grad_nbytes,
        masters=(held + scalar_held) * master,
        momentum=held * settings.momentum_nbytes + scalar_held * _ADAM_NBYTES,
        scratch=_scratch(stage, settings, loads),
    )


def _scratch(stage: Stage, settings: StepSettings, loads: RankLoads) -> int:
    """Return an estimate of the bytes that a step takes at a time.

    The whole matrices that a rank works on at a time are within its micro-group's part of the
    budget, or the largest matrix. Beside them there is either as much again of shards and what is
    received while they come together, or what Newton-Schulz of the largest block works in. Of
    groups that overlap, one is worked on while of one for each other hop lies there what is sent,
    what is received and what stays.
    """
    units = {
        (p.matrix.shape, p.matrix.blocks): p for p in units_of(chain(stage.shared, stage.experts))
    }
    if not units:
        return 0
    largest = max(unit.matrix.numel for unit in units.values())
    worked, budget = max(loads.worked), settings.budget_nbytes // _FP32_NBYTES
    work = max(
        _workspace(unit, shape, settings.products_nbytes)
        for unit in units.values()
        for shape in unit.matrix.block_shapes()
    )
    hops = _hops(loads)
    if not overlap_of(stage.matrices, stage.grids, **settings.exchange):
        whole = min(worked, max(budget, largest)) * _FP32_NBYTES
        return whole + max(work, whole if hops else 0)
    whole = budget // (1 + hops)
    moved = min(max(map(max, (loads.data_numel, loads.tensor_numel))), whole)
    flight = 2 * moved * settings.exchange_nbytes + (whole - moved) * _FP32_NBYTES
    return whole * _FP32_NBYTES + work + 2 * hops * flight


def _workspace(unit: PlannedMatrix, shape: tuple[int, int], products_nbytes: int) -> int:
    """Return about what Newton-Schulz of a block takes beside it, in bytes.

    In bf16 a copy, the rest lies in the matrix itself. In fp32 the block is worked on where it is,
    or in a copy if it is tall, with two squares of its short side, or with four in the Gram form.
    A part of a shared block has a copy and four squares.
    """
    numel, short = math.prod(shape), min(shape)
    if isinstance(unit, PlannedPart):
        return products_nbytes * (numel + 4 * min(unit.whole.matrix.shape) ** 2)
    if products_nbytes < _FP32_NBYTES:
        return products_nbytes * numel
    squares = 4 if numel >= 2 * short**2 else 2
    return products_nbytes * max(numel, squares * short**2)
