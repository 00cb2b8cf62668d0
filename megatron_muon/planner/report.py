"""The numbers of a planned job: balance, padding, bytes, memory and predicted shares of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron_muon.bookkeeping.costs import (
    Hardware,
    LayoutCosts,
    Work,
    assumptions,
    of_worst,
)
from megatron_muon.bookkeeping.stage import (
    Buffer,
    Memory,
    RankLoads,
    StageCosts,
    max_over_mean,
    padding_of,
    stage_costs,
    whole_gather_nbytes,
)
from megatron_muon.bookkeeping.units import units_of
from megatron_muon.planner.job import JobPlan, StagePlan

AROUND_THE_OPTIMIZER = ("gradient_reduce", "weight_gather")
"""Parts of a predicted step that a run overlaps with the backward and the forward pass."""

MAX_PLANS_TO_FINGERPRINT = 64
"""A job with more different plans is given a fingerprint only where it is asked for."""


@dataclass(frozen=True, slots=True)
class StageNumbers:
    """The numbers of one pipeline stage.

    Attributes:
        stage: Its plan.
        costs: What a step takes.
    """

    stage: StagePlan
    costs: StageCosts

    @property
    def work(self) -> Work:
        """The work of the busiest rank."""
        return self.costs.work

    @property
    def seconds(self) -> dict[str, float]:
        """Predicted seconds by part."""
        return self.costs.seconds

    @property
    def loads(self) -> RankLoads:
        """The loads of every rank."""
        return self.costs.loads

    @property
    def memory(self) -> Memory:
        """Bytes on the worst rank."""
        return self.costs.memory

    @property
    def whole_gather_nbytes(self) -> int:
        """Bytes that a rank would receive if buckets were gathered whole, without the exchange."""
        return whole_gather_nbytes(self.stage.buffers)

    @property
    def over_perfect(self) -> float:
        """The busiest rank's flops over an even share of the stage's."""
        return max_over_mean(self.loads.flops)

    @property
    def over_bound(self) -> float:
        """The busiest rank's flops over what it bears at least: a matrix, or a part of one."""
        return self.over_perfect / max(self.largest_over_mean, 1.0)

    @property
    def largest_over_mean(self) -> float:
        """The flops of the largest matrix, or part of a shared one, over an even share."""
        flops = self.loads.flops
        largest = max(unit.flops for unit in units_of(self.stage.first_plan.matrices))
        return largest * len(flops) / sum(flops)

    @property
    def num_shared(self) -> int:
        """Matrices that several ranks work on together."""
        return sum(len(planned.homes) > 1 for planned in self.stage.first_plan.matrices)

    @property
    def num_waiting(self) -> int:
        """Ranks with less Newton-Schulz work than the busiest."""
        return len(self.loads.flops) - self.loads.flops.count(max(self.loads.flops))

    @property
    def optimizer_seconds(self) -> float:
        """Predicted seconds without the reduction of gradients and the gather of weights."""
        return sum(s for part, s in self.seconds.items() if part not in AROUND_THE_OPTIMIZER)

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
                "optimizer_seconds": self.optimizer_seconds,
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
    def left_nbytes(self) -> int:
        """Memory of the machine that the fullest rank leaves; below 0 the job does not fit."""
        return self.machine.memory_nbytes - max(stage.memory.total for stage in self.stages)

    @property
    def padding(self) -> float:
        """Elements of the matrices' buffers over those of the matrices, over the whole job."""
        return padding_of(
            [b for stage in self.stages for b in stage.stage.buffers if b.of_matrices]
        )

    @property
    def costs(self) -> LayoutCosts:
        """What the layout costs, to compare it with another."""
        layout = self.job.settings.layout
        return of_worst([stage.costs.in_all(layout) for stage in self.stages])

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
                **{
                    name: max(stage.memory.to_dict()[name] for stage in self.stages)
                    for name in self.stages[0].memory.to_dict()
                },
                "machine_bytes": self.machine.memory_nbytes,
                "left_bytes": self.left_nbytes,
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


def job_assumptions(job: JobPlan) -> list[str]:
    """Return what the numbers of a job take for granted, for the reader."""
    settings, said = job.settings, []
    stages = "stage 0 only" if settings.wrapping == "builder" else "every stage"
    said.append(
        "a distributed optimizer, "
        + (
            f"--overlap-grad-reduce, --wrapping {settings.wrapping} (buckets on {stages})"
            if settings.overlap
            else "no --overlap-grad-reduce (no buckets by size)"
        )
    )
    said.append("memory: no activations, workspaces or NCCL buffers")
    said.append(
        f"modules of --transformer-impl {job.model.transformer_impl}; weights of "
        f"{settings.param_nbytes} bytes an element, gradients of {settings.grad_nbytes}"
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
    return StageNumbers(stage, stage_costs(stage.stage, job.settings, machine))
