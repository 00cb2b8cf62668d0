"""The numbers of a planned job: balance, padding, bytes, memory and predicted shares of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron_muon.bookkeeping.gram_sums import strip_numel, strips_of
from megatron_muon.bookkeeping.plan import Plan, PlannedMatrix
from megatron_muon.bookkeeping.units import PlannedPart, units_of
from megatron_muon.planner.costs import (
    Hardware,
    LayoutCosts,
    Work,
    assumptions,
    predict_seconds,
)
from megatron_muon.planner.job import Buffer, JobPlan, PlanSettings, StagePlan

_FP32_NBYTES = 4
_ADAM_NBYTES = 8
_GRAM_SUMS = 2
"""Sums of the Gram matrix of a shared block in a step, as with quintic's products in fp32. In bf16
there are three, of half the bytes."""

MAX_PLANS_TO_FINGERPRINT = 64
"""A job with more different plans is given a fingerprint only where it is asked for."""


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
        for piece in planned.owned.pieces:
            numel = piece.range.numel
            for tp in range(row_size):
                here, there = rank_of(piece.rank, tp), rank_of(home.dp, tp)
                self.held[here] += numel
                if piece.rank != home.dp:
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


def stage_loads(stage: StagePlan) -> RankLoads:
    """Return the loads of all ranks of a stage.

    Every expert-parallel rank is taken to have the first one's plan: shapes and places are the
    same, and names, which decide between equals, differ.
    """
    sizes = stage.sizes
    loads = RankLoads.of(sizes.num_stage_ranks)
    for planned in units_of(stage.shared):
        row = stage.grids[planned.owned.grid].tp
        loads.add(planned, row, lambda dp, tp, row=row: dp * row + tp)  # type: ignore[misc]
    if not stage.has_experts_apart:
        return loads
    own = RankLoads.of(sizes.expert_dp * sizes.expert_tp)
    for planned in units_of(stage.experts(0)):
        own.add(planned, sizes.expert_tp, lambda dp, tp: dp * sizes.expert_tp + tp)
    for rank in range(sizes.num_stage_ranks):
        rest, tp = divmod(rank, sizes.expert_tp)
        place = rest // sizes.ep * sizes.expert_tp + tp
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
class StageNumbers:
    """The numbers of one pipeline stage.

    Attributes:
        stage: Its plan.
        loads: Of every rank.
        memory: Of the worst rank.
        work: Of the busiest rank.
        whole_gather_nbytes: Bytes that a rank would receive if buckets were gathered whole in fp32
            in the place of the exchange.
        seconds: Predicted seconds by part.
    """

    stage: StagePlan
    loads: RankLoads
    memory: Memory
    work: Work
    whole_gather_nbytes: int
    seconds: dict[str, float]

    @property
    def over_perfect(self) -> float:
        """The busiest rank's flops over an even share of the stage's."""
        return max_over_mean(self.loads.flops)

    @property
    def over_bound(self) -> float:
        """The busiest rank's flops over what it bears at least: a matrix, or a part of one."""
        flops = self.loads.flops
        largest = max(unit.flops for unit in units_of(self.stage.first_plan.matrices))
        return max(flops) / max(largest, sum(flops) / len(flops))

    @property
    def num_shared(self) -> int:
        """Matrices that several ranks work on together."""
        return sum(len(planned.homes) > 1 for planned in self.stage.first_plan.matrices)

    def to_dict(self) -> dict[str, Any]:
        """Return the report's form."""
        stage, loads = self.stage, self.loads
        total = sum(self.seconds.values()) or 1.0
        return {
            "pipeline_rank": stage.pp_rank,
            "layers": [[layers.start, layers.stop] for layers in stage.layers],
            "matrices": len(stage.first_plan.matrices),
            "shared_matrices": self.num_shared,
            "balance": {
                "flops_max_over_mean": max_over_mean(loads.flops),
                "flops_max_over_bound": self.over_bound,
                "elements_max_over_mean": max_over_mean(loads.held),
                "idle_ranks": loads.flops.count(0),
            },
            "buffers": [_buffer_dict(buffer) for buffer in stage.buffers],
            "bytes": {
                "data_exchange": self.work.data_nbytes,
                "tensor_exchange": self.work.tensor_nbytes,
                "gradient_reduce": self.work.grad_nbytes,
                "weight_gather": self.work.weight_nbytes,
                "whole_bucket_gather": self.whole_gather_nbytes,
            },
            "memory": self.memory.to_dict(),
            "step": {
                "seconds": self.seconds,
                "shares": {part: value / total for part, value in self.seconds.items()},
            },
        }


def _buffer_dict(buffer: Buffer) -> dict[str, Any]:
    return {
        "of": "matrices" if buffer.of_matrices else "scalars",
        "expert": buffer.is_expert,
        "shards": buffer.num_shards,
        "buckets": len(buffer.layout.buckets),
        "elements": buffer.layout.param_numel,
        "padded_elements": buffer.layout.numel,
        "padding": padding_of([buffer]),
    }


@dataclass(frozen=True, slots=True)
class JobReport:
    """A planned job and its numbers.

    Attributes:
        job: The plans.
        stages: Numbers of each pipeline stage.
        machine: What is predicted for.
        why: Why the layout was chosen, empty where it was given.
        fingerprint: What a run prints, ``None`` where it was not made.
    """

    job: JobPlan
    stages: tuple[StageNumbers, ...]
    machine: Hardware
    why: str = ""
    fingerprint: str | None = None

    @property
    def worst(self) -> StageNumbers:
        """The stage whose step takes longest."""
        return max(self.stages, key=lambda stage: sum(stage.seconds.values()))

    @property
    def padding(self) -> float:
        """Elements of the matrices' buffers over those of the matrices, over the whole job."""
        return padding_of(
            [b for stage in self.stages for b in stage.stage.buffers if b.of_matrices]
        )

    @property
    def costs(self) -> LayoutCosts:
        """What the layout costs, to compare it with another."""
        return LayoutCosts(
            layout=self.job.settings.layout,
            moved_nbytes=max(
                s.work.data_nbytes + s.work.tensor_nbytes + s.work.grad_nbytes
                + s.work.weight_nbytes
                for s in self.stages
            ),
            flops=max(s.work.flops for s in self.stages),
            memory_nbytes=max(s.memory.total for s in self.stages),
            seconds=sum(self.worst.seconds.values()),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        job = self.job
        every = list(chain.from_iterable(stage.loads.flops for stage in self.stages))
        held = list(chain.from_iterable(stage.loads.held for stage in self.stages))
        return {
            "model": {"name": job.model.name, "parameters": job.model.num_parameters},
            "sizes": {
                "tp": job.sizes.tp, "pp": job.sizes.pp, "dp": job.sizes.dp, "cp": job.sizes.cp,
                "ep": job.sizes.ep, "etp": job.sizes.expert_tp, "vpp": job.sizes.vpp,
                "ranks": job.sizes.world_size,
            },
            "layout": {"kind": job.settings.layout, "why": self.why},
            "fingerprint": self.fingerprint,
            "balance": {
                "flops_max_over_mean": max_over_mean(every),
                "elements_max_over_mean": max_over_mean(held),
            },
            "padding": self.padding,
            "memory": {
                name: max(stage.memory.to_dict()[name] for stage in self.stages)
                for name in self.stages[0].memory.to_dict()
            },
            "stages": [stage.to_dict() for stage in self.stages],
            "ownership": list(ownership_rows(job)),
            "assumptions": [*assumptions(self.machine), *job_assumptions(job)],
        }  # fmt: skip


def make_report(
    job: JobPlan, machine: Hardware, why: str = "", with_fingerprint: bool | None = None
) -> JobReport:
    """Add up the numbers of a job.

    Args:
        job: The plans.
        machine: What to predict for.
        why: Why the layout was chosen.
        with_fingerprint: Whether to make the fingerprint; ``None`` if there are few plans.
    """
    if with_fingerprint is None:
        num_plans = sum(len(stage.ep_ranks) for stage in job.stages)
        with_fingerprint = num_plans <= MAX_PLANS_TO_FINGERPRINT
    return JobReport(
        job,
        tuple(_stage_numbers(stage, job, machine) for stage in job.stages),
        machine,
        why,
        job.fingerprint() if with_fingerprint else None,
    )


def ownership_rows(job: JobPlan) -> Iterator[dict[str, Any]]:
    """Yield a row a matrix: shape, blocks, who holds it, its home, flops.

    Of routed experts those of the first expert-parallel rank.
    """
    for stage in job.stages:
        for planned in stage.first_plan.matrices:
            matrix = planned.matrix
            yield {
                "name": matrix.name,
                "pipeline_rank": stage.pp_rank,
                "shape": list(matrix.shape),
                "blocks": [str(block) for block in matrix.blocks],
                "expert_parallel": matrix.expert_parallel,
                "bucket": planned.owned.bucket_idx,
                "owners": [[p.rank, p.range.start, p.range.end] for p in planned.owned.pieces],
                "home": {"data": planned.home.dp, "tensor": planned.home.tp},
                "shared_by": len(planned.homes),
                "homes": [{"data": home.dp, "tensor": home.tp} for home in planned.homes],
                "flops": planned.flops,
            }


def max_over_mean(values: Sequence[int]) -> float:
    """Return the largest value over the mean, 1 where all are zero."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def padding_of(buffers: Sequence[Buffer]) -> float:
    """Return the elements of buffers over those of what lies in them."""
    numel = sum(buffer.layout.param_numel for buffer in buffers)
    return sum(buffer.layout.numel for buffer in buffers) / numel if numel else 1.0


def job_assumptions(job: JobPlan) -> list[str]:
    """Return what the numbers of a job take for granted, for the reader."""
    settings, said = job.settings, []
    buckets = "with --overlap-grad-reduce" if settings.overlap else "without --overlap-grad-reduce"
    said.append(f"buckets as {buckets}, wrapped by Megatron's {settings.wrapping} path")
    said.append(
        f"{job.model.transformer_impl} modules; weights of {settings.param_nbytes} bytes, "
        f"gradients of {settings.grad_nbytes}"
    )
    if settings.share_blocks:
        said.append(
            "a shared block's work is counted as split evenly: what each of its ranks repeats on "
            "the Gram matrix is left out, as are the savings of kernels"
        )
    if job.sizes.ep > 1:
        said.append("experts are shown for the first expert-parallel rank; the others' are alike")
    return said


def _stage_numbers(stage: StagePlan, job: JobPlan, machine: Hardware) -> StageNumbers:
    settings, sizes = job.settings, job.sizes
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
        collectives=_collectives(loads, settings),
    )
    return StageNumbers(
        stage,
        loads,
        _memory(stage, settings, loads, scalar_held),
        work,
        _ring([b for b in stage.buffers if b.of_matrices], _FP32_NBYTES),
        predict_seconds(work, machine, sizes.num_stage_ranks, sizes.tp),
    )


def _ring(buffers: Sequence[Buffer], nbytes: int) -> int:
    """Return what a rank sends if every buffer goes once around its group."""
    return sum(b.layout.numel * (b.num_shards - 1) // b.num_shards * nbytes for b in buffers)


def _hops(loads: RankLoads) -> int:
    """Return the hops of the exchange in one direction."""
    return any(loads.data_numel) + any(loads.tensor_numel)


def _group_numel(loads: RankLoads, settings: PlanSettings) -> int:
    """Return the elements that a micro-group may have: several overlap, and share the budget."""
    budget = settings.budget_nbytes // _FP32_NBYTES
    is_one = max(loads.worked, default=0) <= budget
    return budget if is_one else budget // (1 + _hops(loads))


def _collectives(loads: RankLoads, settings: PlanSettings) -> int:
    """Return the collectives of the exchange: a hop of a micro-group is at least one."""
    budget = settings.budget_nbytes // _FP32_NBYTES
    groups = math.ceil(max(loads.worked, default=0) / _group_numel(loads, settings))
    rounds = (max(numel, default=0) for numel in (loads.data_numel, loads.tensor_numel))
    return max(
        max(1, groups) * 2 * _hops(loads), sum(math.ceil(numel / budget) for numel in rounds)
    )


def _memory(stage: StagePlan, settings: PlanSettings, loads: RankLoads, scalar_held: int) -> Memory:
    numel = sum(buffer.layout.numel for buffer in stage.buffers)
    held = max(loads.held, default=0)
    # In fp32 the weights are their own masters.
    master = 0 if settings.param_nbytes == _FP32_NBYTES else _FP32_NBYTES
    return Memory(
        parameters=numel * settings.param_nbytes,
        gradients=numel * settings.grad_nbytes,
        masters=(held + scalar_held) * master,
        momentum=held * settings.momentum_nbytes + scalar_held * _ADAM_NBYTES,
        scratch=_scratch(stage.first_plan, settings, loads),
    )


def _gram_of(unit: PlannedMatrix, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of the block that a unit's block is a part of, or is."""
    return unit.whole.matrix.shape if isinstance(unit, PlannedPart) else shape


def _scratch(plan: Plan, settings: PlanSettings, loads: RankLoads) -> int:
    """Return an estimate of the bytes of a micro-group.

    The whole matrices that a rank works on at a time are within the budget, or one matrix; beside
    them lie the shards before and after, what is sent and received, of other groups too where there
    are several, and the workspace of Newton-Schulz on the largest block: a copy of it and three of
    its Gram matrix, in fp32.
    """
    if not plan.matrices:
        return 0
    units = units_of(plan.matrices)
    largest = max(unit.matrix.numel for unit in units)
    worked = max(loads.worked)
    whole = min(worked, max(largest, _group_numel(loads, settings)))
    moved = min(max(map(max, (loads.data_numel, loads.tensor_numel))), whole)
    hops_under_way = 2 * max(1, _hops(loads))
    shapes = {(*shape, min(_gram_of(unit, shape))) for unit in units
              for shape in set(unit.matrix.block_shapes())}  # fmt: skip
    block = max(rows * columns + 3 * short**2 for rows, columns, short in shapes)
    return (3 * whole + hops_under_way * moved + block) * _FP32_NBYTES
