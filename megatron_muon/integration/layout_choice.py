"""The layout of a run's matrices: chosen before DDP makes buffers, and the same on every rank.

Ranks of other pipeline stages have other matrices, and one layout is for all of them, so that each
stage adds up what either layout costs it and all ranks take the choice of the worst of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_muon.bookkeeping.costs import (
    ON_CPU,
    ON_CUDA,
    ONE_RANK,
    LayoutChoice,
    LayoutCosts,
    choose_layout,
    find_hardware,
    of_worst,
)
from megatron_muon.bookkeeping.layout import LayoutItem
from megatron_muon.bookkeeping.plan import Grid, GridSize
from megatron_muon.bookkeeping.routing import Route
from megatron_muon.bookkeeping.stage import (
    LAYOUTS,
    Member,
    StepSettings,
    bucket_numel_of,
    lay_out,
    plan_stage,
    stage_costs,
)
from megatron_muon.collectives.agreement import gather_distinct, raise_together
from megatron_muon.integration.install import installation
from megatron_muon.optimizer.chain import ranks_of
from megatron_muon.optimizer.config import MuonSettings, resolve
from megatron_muon.optimizer.param_layout import LAYOUT

_NBYTES = {"fp32": 4, "bf16": 2}


def layout_of_run(
    args: Any,
    model_chunks: Sequence[torch.nn.Module],
    routes: Mapping[torch.nn.Parameter, Route],
    groups: Any,
) -> LayoutChoice:
    """Return the layout that was asked for, or choose one; collective where it is chosen.

    Args:
        args: Megatron's arguments, ``None`` where the program has none: it then names a layout to
            ``install()``, or has ``owner``.
        model_chunks: Model chunks of this rank, not wrapped yet.
        routes: Route of each of their trainable parameters.
        groups: Process groups of the model, ``None`` for Megatron's global ones.
    """
    state = installation()
    installed = state.layout if state else None
    given = getattr(args, "muon_layout", None) or installed
    if given not in (None, "auto"):
        return LayoutChoice(given)
    if not hasattr(args, "muon_layout"):
        why = "without Megatron's arguments there is nothing to choose by" if given else ""
        return LayoutChoice("owner", why)
    settings = resolve(args, installed)
    if settings.layout != "auto":
        return LayoutChoice(settings.layout or "owner", settings.layout_why)
    return choose_together(args, model_chunks, routes, settings, groups)


def choose_together(
    args: Any,
    model_chunks: Sequence[torch.nn.Module],
    routes: Mapping[torch.nn.Parameter, Route],
    settings: MuonSettings,
    groups: Any,
) -> LayoutChoice:
    """Choose the layout by what it costs the worst rank of the job; collective.

    Args:
        args: Megatron's arguments.
        model_chunks: Model chunks of this rank, not wrapped yet.
        routes: Route of each of their trainable parameters.
        settings: The resolved settings.
        groups: Process groups of the model, ``None`` for Megatron's global ones.
    """
    if groups is None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups = ProcessGroupCollection.use_mpu_process_groups()
    sizes = _Sizes.of(groups)
    if max(sizes.dp, sizes.expert_dp) == 1:
        return ONE_RANK
    if sizes.gtp:
        return LayoutChoice("owner", "costs of rows that are cut once more are not known")
    if settings.tp_mode != "owner":
        return LayoutChoice("owner", f"costs of --muon-tp-mode {settings.tp_mode} are not known")
    state = installation()
    device = ON_CPU if state is not None and state.on_cpu else ON_CUDA
    ranks = ranks_of(groups)

    def own_costs() -> tuple[list[LayoutCosts], int]:
        machine = find_hardware(settings.hardware, device, "--muon-hardware")
        chunks = [_members(chunk, routes) for chunk in model_chunks]
        numel = sum(p.data.nelement() for chunk in model_chunks for p in chunk.parameters())
        return _costs(args, chunks, numel, settings, sizes, machine), machine.memory_nbytes

    own = raise_together(own_costs, ranks)
    # Of each stage the first rank's, as the plan command's: names of experts decide between equals.
    stages = gather_distinct(own, sizes.pp_rank, ranks)
    kinds = zip(*(costs for costs, _ in stages), strict=True)
    return choose_layout([of_worst(kind) for kind in kinds], stages[0][1])


def remember(model_chunks: Sequence[torch.nn.Module], choice: LayoutChoice) -> None:
    """Leave the choice on model chunks; one without parameters has no other place for it."""
    for chunk in model_chunks:
        setattr(chunk, LAYOUT, choice)


def remembered(model_chunks: Sequence[Any]) -> LayoutChoice | None:
    """Return the choice that was left on a model chunk or on what its wrappers hold."""
    for chunk in model_chunks:
        module = chunk
        while module is not None:
            choice = vars(module).get(LAYOUT)
            if choice is not None:
                return choice  # type: ignore[no-any-return]
            module = getattr(module, "module", None)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Ranks of the groups of a model.

    Attributes:
        dp: Ranks that share dense matrices.
        expert_dp: Ranks that share an expert's.
        tp: Ranks of a tensor-parallel row.
        expert_tp: Ranks that cut an expert's matrices.
        pp_rank: Which pipeline stage.
        gtp: Whether generalized tensor parallelism cuts rows.
    """

    dp: int
    expert_dp: int
    tp: int
    expert_tp: int
    pp_rank: int
    gtp: bool

    @classmethod
    def of(cls, groups: Any) -> _Sizes:
        def size(*names: str) -> int:
            found = (getattr(groups, name, None) for name in names)
            return next((int(group.size()) for group in found if group is not None), 1)

        stages = getattr(groups, "pp", None)
        return cls(
            dp=size("intra_dp_cp", "dp_cp"),
            expert_dp=size("intra_expt_dp", "expt_dp"),
            tp=size("tp"),
            expert_tp=size("expt_tp", "tp"),
            pp_rank=0 if stages is None else stages.rank(),
            gtp=max(size("gtp_remat"), size("expt_gtp_remat")) > 1,
        )

    def grids(self) -> dict[Grid, GridSize]:
        """Return the sizes of the data x tensor grids."""
        return {
            Grid(apart, expert_tp): GridSize(
                self.expert_dp if apart else self.dp, self.expert_tp if expert_tp else self.tp
            )
            for apart in (False, True)
            for expert_tp in (False, True)
        }


def _members(chunk: torch.nn.Module, routes: Mapping[torch.nn.Parameter, Route]) -> list[Member]:
    members = []
    for param in chunk.parameters():
        if not param.requires_grad:
            continue
        matrix = routes[param].matrix
        item = LayoutItem(
            numel=param.data.nelement(),
            flops=0 if matrix is None else matrix.ns_flops(1),
            alone=getattr(param, "shared_embedding", False),
        )
        members.append(Member(item, matrix, not getattr(param, "allreduce", True)))
    return members


def _costs(
    args: Any,
    chunks: Sequence[Sequence[Member]],
    numel: int,
    settings: MuonSettings,
    sizes: _Sizes,
    machine: Any,
) -> list[LayoutCosts]:
    """Return what each layout costs the worst rank of this pipeline stage."""
    param_nbytes = 2 if args.bf16 or args.fp16 else 4
    step = StepSettings(
        num_ns_steps=settings.num_ns_steps,
        param_nbytes=param_nbytes,
        grad_nbytes=4 if args.accumulate_allreduce_grads_in_fp32 else param_nbytes,
        momentum_nbytes=_NBYTES[settings.momentum_dtype],
        exchange_nbytes=_NBYTES[settings.exchange_dtype],
        budget_nbytes=settings.gather_budget_nbytes,
        share_blocks=settings.share_blocks,
        by_bucket=settings.gathers_early,
        products_nbytes=2 if settings.matmul_precision == "medium" else 4,
    )
    given = args.ddp_bucket_size
    if args.ddp_num_buckets is not None:  # 0.19.2, training/models/dist_utils.py:280
        given = numel // args.ddp_num_buckets
    with_buckets = [
        (
            members,
            bucket_numel_of(
                given, overlap=args.overlap_grad_reduce, dp_cp=sizes.dp,
                has_buckets=sizes.pp_rank == 0, chunk=chunk,
            ),
        )
        for chunk, members in enumerate(chunks)
    ]  # fmt: skip
    found = []
    for layout in LAYOUTS:
        buffers, owned = lay_out(
            with_buckets, layout, (sizes.dp, sizes.expert_dp),
            args.ddp_pad_buckets_for_high_nccl_busbw,
        )  # fmt: skip
        stage = plan_stage(
            owned, buffers, sizes.grids(), step,
            tp=sizes.tp, expert_tp=sizes.expert_tp, num_ranks=sizes.dp * sizes.tp,
        )  # fmt: skip
        found.append(stage_costs(stage, step, machine).in_all(layout))
    return found
