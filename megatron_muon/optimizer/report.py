"""The JSON report: settings, routing, plan, and one row a step."""

from __future__ import annotations

import atexit
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_muon.bookkeeping.plan import GridSize, Plan, fingerprint_of
from megatron_muon.bookkeeping.routing import Route
from megatron_muon.collectives.span import Span
from megatron_muon.errors import ConfigurationError
from megatron_muon.optimizer.account import PHASES, StepAccount
from megatron_muon.optimizer.config import MuonSettings
from megatron_muon.optimizer.memory import Memory
from megatron_muon.optimizer.muon import OwnedMuon

logger = logging.getLogger(__name__)

GROWTH_BETWEEN_WRITES = 0.02
"""The file is written again when the steps have grown by this share: each of the first steps at
once, and in all about fifty times its final size."""


def routing_rows(routes: Iterable[Route], plan: Plan) -> list[dict[str, Any]]:
    """Return one row a parameter: where it goes, why, in which blocks, and who owns it."""
    planned = {item.matrix.name: item for item in plan.matrices}
    rows = []
    for route in routes:
        item = planned.get(route.facts.name)
        row: dict[str, Any] = {
            "name": route.facts.name,
            "logical_shape": list(route.facts.shape),
            "optimizer": route.optimizer,
            "reason": route.reason,
            "blocks": [],
            "owner_ranks": [],
            "home": None,
            "shared_by": 0,
            "homes": [],
            "expert_parallel": False,
            "flops": 0,
        }
        if item is not None:
            row["blocks"] = [
                {"name": block.name, "shape": list(shape)}
                for block in item.matrix.blocks
                for shape in block.matrix_shapes(item.matrix.shape)
            ]
            tensor_ranks = range(plan.grids.get(item.owned.grid, GridSize()).tp)
            row["owner_ranks"] = [
                {"data": piece.rank, "tensor": rank}
                for piece in item.owned.pieces
                for rank in tensor_ranks
            ]
            row["expert_parallel"] = item.matrix.expert_parallel
            homes = [{"data": home.dp, "tensor": home.tp} for home in item.homes]
            row["home"], row["shared_by"], row["homes"] = homes[0], len(homes), homes
            row["flops"] = item.flops
        rows.append(row)
    return rows


def plan_summary(plans: Sequence[Plan], loads: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return fingerprint, balance and padding of the whole job.

    Args:
        plans: The different plans of the job, one for each pipeline stage.
        loads: Newton-Schulz flops and elements of every rank.
    """
    flops, numel = zip(*loads, strict=True)
    fingerprints = [plan.fingerprint for plan in plans]
    param_numel = sum(plan.param_numel for plan in plans)
    return {
        "fingerprint": fingerprints[0] if len(plans) == 1 else fingerprint_of(fingerprints),
        "flops_max_over_mean": _max_over_mean(flops),
        "numel_max_over_mean": _max_over_mean(numel),
        "padding_ratio": sum(plan.buffer_numel for plan in plans) / param_numel
        if param_numel
        else 1.0,
    }


def _max_over_mean(values: Sequence[int]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


@dataclass(slots=True)
class Report:
    """Collects rows on every rank; one rank writes them.

    Attributes:
        path: The file.
        head: Everything but the steps.
        writes: Whether this rank writes the file.
        steps: One row a step.
    """

    path: Path
    head: dict[str, Any]
    writes: bool
    steps: list[dict[str, Any]] = field(default_factory=list)
    _num_written: int = 0
    _num_complete: int = 0

    @classmethod
    def open(
        cls,
        settings: MuonSettings,
        routing: Sequence[dict[str, Any]],
        plan: dict[str, Any],
        memory: Memory,
        writes: bool,
    ) -> Report:
        """Make the report and write its head.

        Args:
            settings: The resolved settings.
            routing: One row a parameter of the whole model.
            plan: Fingerprint, balance and padding.
            memory: The most that one rank keeps.
            writes: Whether this rank writes the file.

        Raises:
            ConfigurationError: The file cannot be written.
        """
        assert settings.report is not None
        path = Path(settings.report).resolve()
        if path.exists() and not path.is_file():
            raise ConfigurationError(
                f"--muon-report {settings.report}: is there and is no file. Give another name."
            )
        report = cls(
            path,
            {
                "resolved": settings.to_dict(),
                "routing": list(routing),
                "plan": plan,
                "memory": memory.to_dict(),
            },
            writes,
        )
        try:
            report.write()
        except OSError as error:
            raise ConfigurationError(
                f"--muon-report {settings.report}: cannot be written ({error}). Give a file in a "
                "folder that exists."
            ) from None
        atexit.register(report._write_or_stop)
        return report

    def add_step(self, account: StepAccount, skipped: bool, span: Span) -> None:
        """Sum what all ranks did in a step and add the row; collective over ``span``."""
        traffic = account.traffic
        calls, flops, collectives, nbytes = map(
            int,
            span.sum(
                [account.newton_schulz_calls, account.newton_schulz_flops, traffic.calls,
                 traffic.nbytes]
            ),
        )  # fmt: skip
        peak, *seconds = span.max(
            [traffic.peak_scratch_nbytes, *(account.seconds.get(name, 0.0) for name in PHASES)]
        )
        self.steps.append(
            {
                "newton_schulz_calls": calls,
                "newton_schulz_flops": flops,
                "collectives": {"calls": collectives, "bytes": nbytes},
                "peak_scratch_bytes": int(peak),
                "seconds": dict(zip(PHASES, seconds, strict=True)),
                "skipped": skipped,
            }
        )
        if len(self.steps) >= self._num_written * (1 + GROWTH_BETWEEN_WRITES):
            self._write_or_stop()

    def _write_or_stop(self) -> None:
        """Write the file; if that fails, say so once and train on without it."""
        try:
            self.write()
        except OSError as error:
            self.writes = False
            logger.warning(
                "--muon-report %s: cannot be written any more (%s). It holds the first %d steps; "
                "training goes on.",
                self.path,
                error,
                self._num_complete,
            )

    def write(self) -> None:
        """Write the file, whole or not at all."""
        if not self.writes:
            return
        self._num_written = len(self.steps)
        partial = self.path.with_name(self.path.name + ".partial")
        try:
            partial.write_text(json.dumps({**self.head, "steps": self.steps}, indent=1) + "\n")
            partial.replace(self.path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self._num_complete = len(self.steps)


def record_steps(optimizer: Any, muons: Sequence[OwnedMuon], report: Report) -> None:
    """Make each ``optimizer.step()`` add a row to the report.

    Args:
        optimizer: Megatron's outermost optimizer.
        muons: The Muons inside it.
        report: Where the rows go.
    """
    step = optimizer.step
    for muon in muons:
        muon.account.is_read = True

    def recorded_step(*args: Any, **kwargs: Any) -> Any:
        for muon in muons:
            muon.account.clear()
        result = step(*args, **kwargs)
        account = StepAccount()
        for muon in muons:
            account.add(muon.account)
        report.add_step(account, not result[0], optimizer.span)
        return result

    optimizer.step = recorded_step
