"""The plan: the frozen answer to who owns what and where each matrix is orthogonalized.

A pure function of names, shapes, ranges and group sizes, the same on every rank. Its fingerprint
is compared across ranks before the first collective.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from megatron_muon.bookkeeping.matrix import LogicalMatrix

EVERY_OWNER = -1
"""Owner of a matrix that every data-parallel rank steps, without a distributed optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedMatrix:
    """A matrix and the rank of its data-parallel group that steps it.

    Attributes:
        matrix: The logical matrix.
        owner: Group-local data-parallel rank, or :data:`EVERY_OWNER`.
        buffer_idx: DDP buffer, -1 without a layout.
        bucket_idx: Bucket in the buffer, -1 without a layout.
        range: ``(start, end)`` in the buffer frame, ``None`` without a layout.
    """

    matrix: LogicalMatrix
    owner: int
    buffer_idx: int = -1
    bucket_idx: int = -1
    range: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMatrix:
    """An owned matrix with its home.

    Attributes:
        owned: The matrix and its owner.
        home: Rank of its tensor-parallel group that orthogonalizes it.
        flops: Newton-Schulz flops of its blocks.
    """

    owned: OwnedMatrix
    home: int
    flops: int

    @property
    def matrix(self) -> LogicalMatrix:
        """The logical matrix."""
        return self.owned.matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every matrix of one pipeline stage, ordered by name.

    Attributes:
        matrices: The matrices with owners and homes.
        num_owners: Ranks of the data-parallel group, 1 without a distributed optimizer.
        padding_ratio: Buffer elements over parameter elements of the matrices' buffers.
    """

    matrices: tuple[PlannedMatrix, ...]
    num_owners: int
    padding_ratio: float

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the plan, shortened."""
        return hashlib.sha256("\n".join(self.rows()).encode()).hexdigest()[:16]

    def rows(self) -> list[str]:
        """One canonical line a matrix, for the fingerprint and for naming a difference."""
        return [json.dumps(asdict(planned), sort_keys=True) for planned in self.matrices]

    def owned_by(self, owner: int) -> tuple[PlannedMatrix, ...]:
        """Matrices that a data-parallel rank steps, in the plan's order."""
        return tuple(m for m in self.matrices if m.owned.owner in (owner, EVERY_OWNER))

    def balance(self) -> dict[str, Any]:
        """Max over mean, across the data x tensor grid, of Newton-Schulz flops and of elements."""
        flops: dict[tuple[int, int], int] = {}
        numel: dict[tuple[int, int], int] = {}
        num_tp = max((m.matrix.tp_size for m in self.matrices), default=1)
        for owner in range(self.num_owners):
            for rank in range(num_tp):
                flops[owner, rank] = numel[owner, rank] = 0
        for planned in self.matrices:
            owner = max(planned.owned.owner, 0)
            flops[owner, planned.home] += planned.flops
            for rank in range(num_tp):
                numel[owner, rank] += planned.matrix.local_numel
        return {
            "flops_max_over_mean": _max_over_mean(flops.values()),
            "numel_max_over_mean": _max_over_mean(numel.values()),
        }


def make_plan(
    owned: Iterable[OwnedMatrix], num_owners: int, padding_ratio: float, num_steps: int
) -> Plan:
    """Order the matrices by name and give each a home in its tensor-parallel group.

    Among an owner's matrices the costliest goes first, each to the rank with the least
    Newton-Schulz work so far.

    Args:
        owned: The matrices of one pipeline stage, in any order.
        num_owners: Ranks of the data-parallel group.
        padding_ratio: Of the matrices' buffers.
        num_steps: Newton-Schulz steps.
    """
    ordered = sorted(owned, key=lambda o: o.matrix.name)
    homes: dict[str, int] = {}
    work: dict[tuple[int, bool], list[int]] = {}
    for item in sorted(ordered, key=lambda o: (-o.matrix.ns_flops(num_steps), o.matrix.name)):
        key = (item.owner, item.matrix.expert_tp)
        loads = work.setdefault(key, [0] * item.matrix.tp_size)
        loads.extend([0] * (item.matrix.tp_size - len(loads)))
        home = min(range(item.matrix.tp_size), key=lambda rank: (loads[rank], rank))
        loads[home] += item.matrix.ns_flops(num_steps)
        homes[item.matrix.name] = home
    return Plan(
        matrices=tuple(
            PlannedMatrix(
                owned=item,
                home=homes[item.matrix.name],
                flops=item.matrix.ns_flops(num_steps),
            )
            for item in ordered
        ),
        num_owners=num_owners,
        padding_ratio=padding_ratio,
    )


def _max_over_mean(loads: Iterable[int]) -> float:
    values = list(loads)
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
