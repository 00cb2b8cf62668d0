"""The block printed at start-up, and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_muon.bookkeeping.plan import Plan
from megatron_muon.bookkeeping.routing import Route
from megatron_muon.integration.capabilities import capabilities
from megatron_muon.integration.messages import is_first_rank
from megatron_muon.optimizer.config import MuonSettings
from megatron_muon.optimizer.muon import OwnedMuon
from megatron_muon.optimizer.report import Report, plan_summary, record_steps


def announce(
    optimizer: Any,
    routes: Mapping[torch.nn.Parameter, Route],
    plan: Plan,
    settings: MuonSettings,
    muons: list[OwnedMuon],
) -> None:
    """Print the start-up block on rank 0 and, if asked for, open the report.

    Args:
        optimizer: Megatron's outermost optimizer.
        routes: Route of each model parameter on this rank.
        plan: The plan of this pipeline stage.
        settings: The resolved settings.
        muons: The Muons inside ``optimizer``.
    """
    if is_first_rank():
        print("\n".join(_lines(list(routes.values()), plan, settings)), flush=True)
    if settings.report is not None:
        record_steps(optimizer, muons, Report.open(settings, list(routes.values()), plan))


def _lines(routes: list[Route], plan: Plan, settings: MuonSettings) -> Iterator[str]:
    summary = plan_summary(plan)
    yield "megatron-muon: Muon is on"
    values = settings.to_dict()
    yield "  settings: " + ", ".join(f"{name}={value}" for name, value in values.items())
    for optimizer, label in (("muon", "Muon"), ("scalar", settings.scalar_optimizer)):
        members = [route for route in routes if route.optimizer == optimizer]
        yield (
            f"  {label}: {len(members)} parameters, "
            f"{sum(_numel(route.facts.shape) for route in members)} elements (logical, this "
            "pipeline stage)"
        )
    yield (
        f"  plan {summary['fingerprint']}: {len(plan.matrices)} matrices over {plan.num_owners} "
        f"owners, Newton-Schulz work max/mean {summary['flops_max_over_mean']:.3f}, elements "
        f"max/mean {summary['numel_max_over_mean']:.3f}, padding {summary['padding_ratio']:.3f}"
    )
    if settings.tp_mode == "blockwise":
        yield (
            "  WARNING: --muon-tp-mode blockwise orthogonalizes each tensor-parallel shard by "
            "itself, so the optimizer changes with the tensor-parallel size; owner does not."
        )
    yield "  " + "; ".join(str(capability) for capability in capabilities())


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
