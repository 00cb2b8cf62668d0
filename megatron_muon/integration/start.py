"""The block printed at start-up, and the report."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from megatron_muon.bookkeeping.costs import LayoutChoice
from megatron_muon.bookkeeping.plan import Plan
from megatron_muon.bookkeeping.routing import Route
from megatron_muon.collectives.agreement import gather, gather_distinct, raise_together
from megatron_muon.integration.capabilities import capabilities
from megatron_muon.integration.cpu_mxfp8 import is_cpu_fp8
from megatron_muon.optimizer.chain import MuonChain
from megatron_muon.optimizer.config import MuonSettings
from megatron_muon.optimizer.memory import Memory, largest, measure_memory
from megatron_muon.optimizer.muon import OwnedMuon
from megatron_muon.optimizer.param_layout import is_laid_out
from megatron_muon.optimizer.report import Report, plan_summary, record_steps, routing_rows

_WIDTH = 100
_NO_BREAK = "\N{NO-BREAK SPACE}"

_CPU_FP8 = (
    "the CPU's MXFP8 stands in for Transformer Engine's: weights are MXFP8, activations and "
    "gradients stay bf16"
)

SETTING_FLAGS = {
    "lr": "--lr",
    "weight_decay": "--weight-decay",
    "momentum": "--muon-momentum",
    "nesterov": "--muon-nesterov",
    "num_ns_steps": "--muon-num-ns-steps",
    "coefficient_type": "--muon-coefficient-type",
    "match_adamw_rms": "--muon-match-adamw-rms",
    "scale_mode": "--muon-scale-mode",
    "extra_scale_factor": "--muon-extra-scale-factor",
    "matmul_precision": "--muon-fp32-matmul-prec",
    "ns_kernel": "--muon-ns-kernel",
    "use_syrk": "--muon-use-syrk",
    "split_qkv": "--muon-no-split-qkv",
    "split_gated_fc1": "--muon-split-gated-fc1",
    "split_heads": "--muon-split-heads",
    "share_blocks": "--muon-share-blocks",
    "tp_mode": "--muon-tp-mode",
    "layout": "--muon-layout",
    "hardware": "--muon-hardware",
    "gather_budget_mib": "--muon-gather-budget-mib",
    "exchange_dtype": "--muon-exchange-dtype",
    "momentum_dtype": "--muon-momentum-dtype",
    "gathers_early": "--muon-overlap-param-gather",
    "clip": "--muon-clip",
    "max_skipped_steps": "--muon-max-skipped-steps",
    "scalar_optimizer": "--muon-scalar-optimizer",
    "scalar_lr": "--muon-scalar-lr",
    "scalar_min_lr": "--muon-scalar-min-lr",
    "exclude": "--muon-exclude",
    "include": "--muon-include",
    "report": "--muon-report",
}
"""The flag of each setting, in the order in which a reader looks for them."""


class MicroGroups(NamedTuple):
    """The micro-groups of a grid.

    Attributes:
        number: How many; 0 if nothing moves.
        overlap: Whether they overlap.
        budget_to_overlap: The least budget, in bytes, with which they would; 0 if there is none.
    """

    number: int
    overlap: bool
    budget_to_overlap: int


def announce(
    optimizer: MuonChain,
    routes: Sequence[Route],
    plan: Plan,
    settings: MuonSettings,
    muons: Sequence[OwnedMuon],
    model_chunks: Sequence[Any],
    ranks: dist.ProcessGroup,
) -> None:
    """Print the start-up block on the first rank and, if asked for, open the report; collective.

    Args:
        optimizer: Megatron's outermost optimizer.
        routes: Route of each model parameter on this rank.
        plan: The plan of this rank's pipeline stage.
        settings: The resolved settings.
        muons: The Muons inside ``optimizer``.
        model_chunks: Model chunks of this rank.
        ranks: All ranks of the model.
    """
    names = tuple(route.facts.name for route in routes)
    parts = gather_distinct((routing_rows(routes, plan), plan), (plan.fingerprint, names), ranks)
    # A tied embedding is on two pipeline stages.
    rows = list({row["name"]: row for part, _ in parts for row in part}.values())
    plans = [part for _, part in parts]
    loads = [muon.own_load() for muon in muons]
    own_load = (sum(flops for flops, _ in loads), sum(numel for _, numel in loads))
    summary = plan_summary(plans, gather(own_load, ranks))
    memory = largest(gather(measure(optimizer, model_chunks), ranks))
    exchanges = max(gather(_micro_groups(muons), ranks))
    if not is_laid_out(model_chunks):
        settings = replace(settings, layout=None, layout_why="")
    if ranks.rank() == 0:
        lines = _lines(rows, plans, summary, memory, settings, optimizer, exchanges)
        print("\n".join(lines), flush=True)
        if is_cpu_fp8() and any(map(_computes_in_fp8, model_chunks)):
            print(f"  {_CPU_FP8}", flush=True)
    if settings.report is not None:
        report = raise_together(
            lambda: Report.open(settings, rows, summary, memory, writes=ranks.rank() == 0), ranks
        )
        record_steps(optimizer, muons, report)


def _computes_in_fp8(chunk: Any) -> bool:
    return bool(getattr(getattr(chunk, "config", None), "fp8", None))


def measure(optimizer: MuonChain, model_chunks: Sequence[Any]) -> Memory:
    """Return what this rank keeps and what a gather of weights takes.

    Args:
        optimizer: Megatron's outermost optimizer.
        model_chunks: Model chunks of this rank.
    """
    gathers = (getattr(child, "gather_nbytes", 0) for child in optimizer.chained_optimizers)
    return measure_memory(model_chunks, optimizer.stagings, max(gathers, default=0))


def settings_as_flags(settings: MuonSettings, config: Any) -> Iterator[str]:
    """Yield every setting in use as a command line has it; what is unset or off is left out.

    Args:
        settings: The resolved settings.
        config: Megatron's optimizer config, which tells in which of two ways a size was given.
    """
    budget_mib = getattr(config, "muon_gather_budget_mib", None)
    if budget_mib is None:
        budget_mib = settings.gather_budget_nbytes / 2**20
    told = settings.to_dict() | {"gather_budget_mib": budget_mib}
    rms = getattr(config, "muon_match_adamw_rms", None)
    if rms is not None:
        told |= {"match_adamw_rms": rms, "scale_mode": None, "extra_scale_factor": None}
    for name, flag in SETTING_FLAGS.items():
        value = told.get(name)
        if isinstance(value, bool):
            is_given = not value if flag.startswith("--muon-no-") else value
            if is_given:
                yield flag
        elif isinstance(value, tuple):
            yield from (f"{flag} {shlex.quote(glob)}" for glob in value)
        elif isinstance(value, float):
            short = f"{value:g}"
            yield f"{flag} {short if float(short) == value else value}"
        elif value is not None:
            yield f"{flag} {value if isinstance(value, int) else shlex.quote(value)}"


def _lines(
    rows: Sequence[dict[str, Any]],
    plans: Sequence[Plan],
    summary: dict[str, Any],
    memory: Memory,
    settings: MuonSettings,
    optimizer: MuonChain,
    exchanges: MicroGroups,
) -> Iterator[str]:
    yield "megatron-muon: Muon is on"
    # A flag and its value stay on one line.
    flags = [flag.replace(" ", _NO_BREAK) for flag in settings_as_flags(settings, optimizer.config)]
    for line in textwrap.wrap(
        " ".join(flags), _WIDTH, initial_indent="  settings: ", subsequent_indent=12 * " ",
        break_long_words=False, break_on_hyphens=False,
    ):  # fmt: skip
        yield line.replace(_NO_BREAK, " ")
    if settings.layout is not None and settings.layout_why:
        choice = LayoutChoice(settings.layout, settings.layout_why)
        yield from textwrap.wrap(
            str(choice), _WIDTH, initial_indent="  ", subsequent_indent="    ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    for kind, label in (("muon", "Muon"), ("scalar", settings.scalar_optimizer)):
        members = [row for row in rows if row["optimizer"] == kind]
        numel = sum(math.prod(row["logical_shape"]) for row in members)
        yield f"  {label}: {len(members)} parameters, {numel} elements"
    num_matrices = sum(row["optimizer"] == "muon" for row in rows)
    yield (
        f"  plan {summary['fingerprint']}: {num_matrices} matrices, held by "
        f"{max(plan.num_owners for plan in plans)} data-parallel ranks; Newton-Schulz work "
        f"max/mean {summary['flops_max_over_mean']:.3f}, elements held max/mean "
        f"{summary['numel_max_over_mean']:.3f}, padding {summary['padding_ratio']:.3f}"
    )
    if settings.share_blocks:
        shared = sum(len(planned.homes) > 1 for plan in plans for planned in plan.matrices)
        yield f"  {shared} matrices are each shared by several ranks (--muon-share-blocks)"
    yield from _of_micro_groups(exchanges)
    yield f"  gradients: {_gradients(optimizer, settings)}"
    if memory.num_quantized:
        yield (
            f"  largest rank: {memory.num_quantized} MXFP8 weights of {memory.quantized_nbytes} "
            f"bytes in all, {memory.plain_nbytes} bytes of other weights, "
            f"{memory.gradients_nbytes} of gradient buffers; {memory.staging_nbytes} bytes are "
            f"staged before each gather, which takes {memory.gather_nbytes} of scratch"
        )
    if settings.tp_mode == "blockwise":
        yield (
            "  WARNING: --muon-tp-mode blockwise orthogonalizes each tensor-parallel shard by "
            "itself, so the optimizer changes with the tensor-parallel size; owner does not."
        )
    warned: dict[str, list[str]] = {}
    for row in rows:
        _, is_warning, text = row["reason"].partition("WARNING: ")
        if is_warning:
            warned.setdefault(text, []).append(row["name"])
    for text, names in warned.items():
        yield f"  WARNING: {names[0]} and {len(names) - 1} more: {text}"
    if not num_matrices:
        yield "  WARNING: every matrix is frozen, so Muon steps nothing."
    yield "  " + "; ".join(str(capability) for capability in capabilities())


def _micro_groups(muons: Sequence[OwnedMuon]) -> MicroGroups:
    """Return what is said of this rank's micro-groups: of the grid with the most, if of several."""
    engines = [e for muon in muons for e in muon.engines if e.stages.share > 1]
    if not engines:
        return MicroGroups(0, False, 0)
    engine = max(engines, key=lambda engine: len(engine.schedule))
    number, overlap = len(engine.schedule), engine.is_pipelined
    is_asked = number > 1 and not overlap  # finding the budget goes through all matrices
    return MicroGroups(number, overlap, (is_asked and engine.budget_to_overlap()) or 0)


def _of_micro_groups(groups: MicroGroups) -> Iterator[str]:
    if groups.overlap:
        yield f"  {groups.number} micro-groups, exchanged while another is orthogonalized"
    elif groups.number == 1:
        yield "  one micro-group: all matrices are exchanged at once"
    elif groups.number:
        least_mib = math.ceil(groups.budget_to_overlap / 2**20 * 1000) / 1000
        way = f"they overlap from --muon-gather-budget-mib {least_mib}"
        if not groups.budget_to_overlap:
            way = "with room for it to overlap the step would be one"
        yield f"  {groups.number} micro-groups one after the other, in the least memory; {way}"


def _gradients(optimizer: MuonChain, settings: MuonSettings) -> str:
    """Say how gradients are scaled, clipped and checked."""
    config, scale = optimizer.config, float(optimizer.get_loss_scale())
    is_dynamic = isinstance(optimizer.grad_scaler, DynamicGradScaler)
    scaling = "no loss scale"
    if optimizer.grad_scaler is not None:
        scaling = f"dynamic loss scale from {scale:g}" if is_dynamic else f"loss scale {scale:g}"
    clipping = f"clip {config.clip_grad:g} ({settings.clip})" if config.clip_grad else "no clip"
    limit = settings.max_skipped_steps
    skipping = "inf or NaN skips the step" if limit or is_dynamic else "inf or NaN ends training"
    if limit:
        skipping += f", {limit} times in a row at most"
    if is_dynamic:
        skipping += " at the lowest scale" if limit else " and ends training at the lowest scale"
    return f"{scaling}; {clipping}; {skipping}"
