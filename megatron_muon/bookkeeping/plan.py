"""The plan: the frozen answer to who owns what and where each matrix is orthogonalized.

A pure function of names, shapes, ranges and group sizes, the same on every rank. Its fingerprint
is compared across ranks before the first collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise

from megatron_muon.bookkeeping.matrix import LogicalMatrix
from megatron_muon.errors import PlanError

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

    def row(self) -> str:
        """Return the whole record as one canonical line that starts with the name."""
        matrix, owned = self.matrix, self.owned
        values = asdict(matrix) | asdict(owned) | {"home": self.home, "flops": self.flops}
        values["blocks"] = " ".join(map(str, matrix.blocks))
        for known in ("name", "matrix"):
            del values[known]
        return f"{matrix.name}: " + ", ".join(f"{key} {value}" for key, value in values.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every matrix of one pipeline stage, ordered by name.

    Attributes:
        matrices: The matrices with owners and homes.
        num_owners: Ranks of the data-parallel group, 1 without a distributed optimizer.
        buffer_numel: Elements of the buffers that hold the matrices on one rank, padding
            included; without a layout those of the matrices.
    """

    matrices: tuple[PlannedMatrix, ...]
    num_owners: int
    buffer_numel: int

    @property
    def param_numel(self) -> int:
        """Elements of the matrices on one rank."""
        return sum(planned.matrix.local_numel for planned in self.matrices)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the plan, shortened."""
        return hashlib.sha256("\n".join(self.rows()).encode()).hexdigest()[:16]

    def rows(self) -> list[str]:
        """One canonical line a matrix, for the fingerprint and for naming a difference."""
        return [planned.row() for planned in self.matrices]


def make_plan(
    owned: Iterable[OwnedMatrix],
    num_owners: int,
    num_steps: int,
    buffer_numel: int | None = None,
) -> Plan:
    """Order the matrices by name and give each a home in its tensor-parallel group.

    Among an owner's matrices the costliest goes first, each to the rank with the least
    Newton-Schulz work so far.

    Args:
        owned: The matrices of one pipeline stage, in any order.
        num_owners: Ranks of the data-parallel group.
        num_steps: Newton-Schulz steps.
        buffer_numel: Elements of the matrices' buffers, ``None`` without a layout.

    Raises:
        PlanError: Two matrices have one name.
    """
    ordered = sorted(owned, key=lambda o: o.matrix.name)
    for item, following in pairwise(ordered):
        if item.matrix.name == following.matrix.name:
            raise PlanError(
                f"Two matrices are named {item.matrix.name}. Muon plans by name: give the modules "
                "of each model chunk names of their own, or a layer_number where they are "
                "numbered layers."
            )
    homes: dict[str, int] = {}
    work: dict[tuple[int, bool], list[int]] = {}
    for item in sorted(ordered, key=lambda o: (-o.matrix.ns_flops(num_steps), o.matrix.name)):
        key = (item.owner, item.matrix.expert_tp)
        loads = work.setdefault(key, [])
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
        buffer_numel=sum(item.matrix.local_numel for item in ordered)
        if buffer_numel is None
        else buffer_numel,
    )
