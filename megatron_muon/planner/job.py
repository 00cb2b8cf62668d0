"""The plans of a whole job: the code that a run plans with, on names and shapes alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_muon.bookkeeping.layout import LayoutItem
from megatron_muon.bookkeeping.matrix import LogicalMatrix
from megatron_muon.bookkeeping.plan import (
    Grid,
    GridSize,
    OwnedMatrix,
    Plan,
    PlannedMatrix,
    fingerprint_of,
    make_plan,
)
from megatron_muon.bookkeeping.routing import (
    ParamFacts,
    RoutingRules,
    SplitRules,
    check_rules_match,
    check_splits_apply,
    decide,
)
from megatron_muon.bookkeeping.stage import (
    LAYOUTS,
    Member,
    Stage,
    StepSettings,
    bucket_numel_of,
    lay_out,
)
from megatron_muon.errors import ConfigurationError
from megatron_muon.integration.fused import logical_matrix
from megatron_muon.planner.models import ModelParam, ModelSpec, chunk_params
from megatron_muon.planner.sizes import ParallelSizes, check_sizes, stage_layers

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings(StepSettings):
    """What of a run's flags the plan depends on, besides model and sizes.

    Attributes:
        layout: ``owner`` or ``flat``.
        splits: Which fused weights are orthogonalized part by part.
        rules: The user's rules of routing.
        overlap: Whether gradients are reduced during the backward pass, hence in buckets.
        bucket_numel: Elements of a bucket, ``None`` for Megatron's default.
        wrapping: How the script has its model wrapped in DDP: ``builder`` (a model config, 0.19.2,
            training/models/dist_utils.py:326) makes buckets on the first pipeline stage alone,
            ``provider`` (a model provider, training/training.py:1672) on all.
        high_busbw: Whether buckets are padded for the network.
    """

    layout: str = "owner"
    splits: SplitRules = field(default_factory=SplitRules)
    rules: RoutingRules = field(default_factory=RoutingRules)
    overlap: bool = True
    bucket_numel: int | None = None
    wrapping: str = "builder"
    high_busbw: bool = False

    def bucket_of(self, sizes: ParallelSizes, pp_rank: int, chunk: int) -> int | None:
        """Return the elements of a bucket, ``None`` where all of a buffer is one."""
        return bucket_numel_of(
            self.bucket_numel,
            overlap=self.overlap,
            dp_cp=sizes.dp_cp,
            has_buckets=pp_rank == 0 or self.wrapping != "builder",
            chunk=chunk,
        )


class StagePlan:
    """The plan of one pipeline stage.

    Attributes:
        pp_rank: Which stage.
        sizes: Parallel sizes.
        layers: Layers of each model chunk.
        names: Name of each parameter of the ranks with the first experts.
        blocks: Names of the blocks of their matrices.
        buffers: DDP's buffers, in their order.
        grids: Sizes of the data x tensor grids.
    """

    def __init__(
        self, model: ModelSpec, sizes: ParallelSizes, settings: PlanSettings, pp_rank: int
    ) -> None:
        """Lay out the parameters and plan the dense matrices.

        Args:
            model: The model.
            sizes: Parallel sizes, checked.
            settings: The settings.
            pp_rank: Which stage.
        """
        self.pp_rank, self.sizes = pp_rank, sizes
        self.layers = stage_layers(model, sizes, pp_rank)
        self.names: list[str] = []
        self.blocks: set[str] = set()
        self._settings = settings
        self.grids = {
            Grid(apart, expert_tp): GridSize(
                sizes.expert_dp if apart else sizes.dp_cp,
                sizes.expert_tp if expert_tp else sizes.tp,
            )
            for apart in (False, True)
            for expert_tp in (False, True)
        }
        self.buffers, owned = lay_out(
            (
                (self._members(model, chunk), settings.bucket_of(sizes, pp_rank, chunk))
                for chunk in range(sizes.vpp)
            ),
            settings.layout,
            (sizes.dp_cp, sizes.expert_dp if sizes.experts_apart else 1),
            settings.high_busbw,
        )
        self._shared = self._plan([o for o in owned if not o.matrix.expert_parallel])
        self._experts = [o for o in owned if o.matrix.expert_parallel]

    def _members(self, model: ModelSpec, chunk: int) -> Iterator[Member]:
        sizes = self.sizes
        experts_apart = sizes.experts_apart
        params = _params_of_chunk(model, sizes, self.pp_rank, chunk, self.layers[chunk])
        has_rules = self._settings.rules != RoutingRules()
        alike: dict[tuple[object, ...], Member] = {}
        for param in params:
            # Experts are alike but for their names, which only the user's rules tell apart.
            key = (param.name.rpartition(".experts.")[2].partition(".")[2], param.shape)
            self.names.append(param.name)
            first = None if has_rules or param.expert < 0 else alike.get(key)
            if first is not None:
                matrix = None if first.matrix is None else first.matrix.renamed(param.name)
                yield Member(first.item, matrix, first.is_expert)
                continue
            matrix, item = _route(model, sizes, self._settings, param)
            alike[key] = Member(item, matrix, experts_apart and param.expert >= 0)
            self.blocks.update(block.name for block in (matrix.blocks if matrix else ()))
            yield alike[key]

    def _plan(self, owned: list[OwnedMatrix]) -> Plan:
        numel = sum(buffer.layout.numel for buffer in self.buffers if buffer.of_matrices)
        settings = self._settings
        return make_plan(
            owned, self.grids, settings.num_ns_steps, numel, share_blocks=settings.share_blocks
        )

    @property
    def ep_ranks(self) -> range:
        """Expert-parallel ranks whose plans differ."""
        return range(self.sizes.ep if self._experts else 1)

    @property
    def shared(self) -> tuple[PlannedMatrix, ...]:
        """Matrices that every rank of the stage plans alike."""
        return self._shared.matrices

    def experts(self, ep_rank: int) -> tuple[PlannedMatrix, ...]:
        """Return the planned matrices of the routed experts of an expert-parallel rank.

        They have the shapes and places of the first rank's, and names of their own.
        """
        if ep_rank == 0:
            return self._first_experts
        offset = ep_rank * self._num_local_experts
        owned = [replace(o, matrix=_renamed(o.matrix, offset)) for o in self._experts]
        return self._plan(owned).matrices

    @cached_property
    def _first_experts(self) -> tuple[PlannedMatrix, ...]:
        return self._plan(self._experts).matrices

    @cached_property
    def _num_local_experts(self) -> int:
        return len({_EXPERT.search(o.matrix.name)[0] for o in self._experts})  # type: ignore[index]

    def plan(self, ep_rank: int) -> Plan:
        """Return the plan that the ranks of an expert-parallel rank make."""
        matrices = [*self.shared, *self.experts(ep_rank)]
        matrices.sort(key=lambda planned: planned.matrix.name)
        return Plan(
            matrices=tuple(matrices), grids=self.grids, buffer_numel=self._shared.buffer_numel
        )

    @cached_property
    def first_plan(self) -> Plan:
        """The plan of the ranks with the first experts."""
        return self.plan(0)

    @cached_property
    def stage(self) -> Stage:
        """What loads and memory follow from, with the first experts."""
        sizes = self.sizes
        return Stage(
            buffers=self.buffers,
            grids=self.grids,
            shared=self.shared,
            experts=self.experts(0),
            num_ranks=sizes.num_stage_ranks,
            tp=sizes.tp,
            expert_tp=sizes.expert_tp,
        )

    def fingerprint(self, ep_rank: int) -> str:
        """Return the fingerprint of that plan; what all ranks share is written once."""
        rows = [*self._shared_rows, *_named_rows(self.experts(ep_rank))]
        return fingerprint_of(row for _, row in sorted(rows))

    @cached_property
    def _shared_rows(self) -> list[tuple[str, str]]:
        return _named_rows(self.shared)


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The plans of all pipeline stages.

    Attributes:
        model: The model.
        sizes: Parallel sizes.
        settings: The settings.
        stages: One a pipeline stage.
    """

    model: ModelSpec
    sizes: ParallelSizes
    settings: PlanSettings
    stages: tuple[StagePlan, ...]

    def fingerprint(self) -> str:
        """Return the fingerprint that a run prints: of its plan, or of all that differ, joined.

        They are in the order of the first rank that makes each.
        """
        prints = [stage.fingerprint(r) for stage in self.stages for r in stage.ep_ranks]
        return prints[0] if len(prints) == 1 else fingerprint_of(prints)


def plan_job(model: ModelSpec, sizes: ParallelSizes, settings: PlanSettings) -> JobPlan:
    """Plan every pipeline stage.

    Raises:
        ConfigurationError: Sizes do not fit the model, or a rule or split applies to nothing.
    """
    if settings.layout not in LAYOUTS:
        raise ConfigurationError(
            f"--layout {settings.layout!r}: expected one of {', '.join(LAYOUTS)}."
        )
    check_sizes(model, sizes)
    stages = tuple(StagePlan(model, sizes, settings, pp_rank) for pp_rank in range(sizes.pp))
    names = [name for stage in stages for name in stage.names]
    check_rules_match(names, settings.rules)
    if not any(stage.blocks for stage in stages):
        raise ConfigurationError(
            f"{model.name}: none of its {len(names)} parameters is a matrix for Muon. Check "
            "--muon-exclude."
        )
    check_splits_apply((name for stage in stages for name in stage.blocks), settings.splits)
    return JobPlan(model, sizes, settings, stages)


def _params_of_chunk(
    model: ModelSpec, sizes: ParallelSizes, pp_rank: int, chunk: int, layers: range
) -> Iterator[ModelParam]:
    experts = range(model.num_moe_experts // sizes.ep)
    return chunk_params(
        model,
        layers,
        experts,
        pp_rank == 0 and chunk == 0,
        pp_rank == sizes.pp - 1 and chunk == sizes.vpp - 1,
        model.padded_vocab(sizes.tp),
        tied_apart=sizes.pp > 1,
    )


def _route(
    model: ModelSpec, sizes: ParallelSizes, settings: PlanSettings, param: ModelParam
) -> tuple[LogicalMatrix | None, LayoutItem]:
    """Decide where one parameter goes, as :func:`.names.route_parameter` does."""
    is_expert = param.expert >= 0
    tp_size = sizes.expert_tp if is_expert else sizes.tp
    facts = ParamFacts(
        name=param.name,
        shape=param.shape,
        is_embedding_or_output=param.is_embedding_or_output,
    )
    optimizer, _ = decide(facts, settings.rules)
    matrix: LogicalMatrix | None = None
    if optimizer == "muon":
        matrix, _ = logical_matrix(
            param.name,
            param.shape,
            model,
            settings.splits,
            tp_dim=param.dim,
            tp_size=1 if param.dim is None else tp_size,
            tp_stride=param.stride,
            expert_tp=is_expert,
            expert_parallel=is_expert and sizes.experts_apart,
        )
    numel = 1
    for n in param.shape:
        numel *= n
    numel //= 1 if param.dim is None else tp_size
    flops = 0 if matrix is None else matrix.ns_flops(1)
    return matrix, LayoutItem(numel, flops, param.is_shared)


def _named_rows(matrices: Iterable[PlannedMatrix]) -> list[tuple[str, str]]:
    return [(planned.matrix.name, planned.row()) for planned in matrices]


def _renamed(matrix: LogicalMatrix, offset: int) -> LogicalMatrix:
    name = _EXPERT.sub(lambda found: str(int(found[0]) + offset), matrix.name)
    return matrix.renamed(name)
