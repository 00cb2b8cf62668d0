"""Norm, zeros and non-finite numbers of all gradients of a job, in one reduction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from megatron.core.optimizer import optimizer as host

from megatron_muon.collectives.span import Span
from megatron_muon.errors import ConfigurationError

_PIECE_NUMEL = 1 << 17
"""Elements that are measured at a time on a CPU: 1 MiB in fp64."""


def norm_groups() -> tuple[str | None, ...]:
    """Return the groups of gradients that have a norm of their own; ``None`` is the main one.

    Megatron's constant is read when it is needed, since others may add to it.
    """
    return (None, *host.SEPARATE_GRAD_NORM_GROUPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One fp32 master, or piece of one, that this rank steps.

    Attributes:
        name: Name of the model parameter.
        order: Its place in the model.
        master: The master; its ``grad`` is the fp32 main gradient.
        norm_group: One of :func:`norm_groups`.
        is_counted: Whether its elements count here; those of a copy count on another rank.
        is_matrix: Whether Muon steps it.
    """

    name: str
    order: int
    master: torch.Tensor
    norm_group: str | None
    is_counted: bool
    is_matrix: bool

    def __post_init__(self) -> None:
        """Refuse a norm group that nobody would measure or clip."""
        if self.norm_group not in norm_groups():
            raise ConfigurationError(
                f"{self.name} has grad_norm_group {self.norm_group!r}, which is none of Megatron's "
                f"{host.SEPARATE_GRAD_NORM_GROUPS}. Add it to SEPARATE_GRAD_NORM_GROUPS of "
                "megatron.core.optimizer.optimizer, or remove the attribute."
            )

    @property
    def grad(self) -> torch.Tensor | None:
        """The main gradient, ``None`` if there is none."""
        return self.master.grad


@dataclass(frozen=True, slots=True)
class GradStatistics:
    """What is known of one step's unscaled gradients; the same on all ranks.

    Attributes:
        is_finite: Whether every gradient is finite, also those that are not counted.
        norms: 2-norm of each group that has parameters, and of the main one.
        num_zeros: Zeros, ``None`` if they were not asked for.
    """

    is_finite: bool
    norms: Mapping[str | None, float]
    num_zeros: int | None


def squares(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sum of squares of each tensor, in fp64.

    In fp64 no square of an fp32 number overflows or underflows, so it is not finite only where an
    element is not, and the order of summation shows in the last bits of fp64 only.
    """
    if not tensors:
        return []
    pieces = [_pieces(x) for x in tensors]
    norms = torch._foreach_norm(list(chain(*pieces)), 2, dtype=torch.float64)
    if len(norms) == len(tensors):
        return list(torch._foreach_mul(norms, norms))
    of_pieces = torch.split(torch.stack(norms).square_(), [len(each) for each in pieces])
    return [each.sum() for each in of_pieces]


def _pieces(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the parts of a tensor that are measured one by one.

    On a CPU torch copies what it measures to fp64: pieces take less memory, and half the time
    where the copy stays in the second-level cache.
    """
    if x.device.type != "cpu" or x.numel() <= _PIECE_NUMEL:
        return (x,)
    return torch.split(x.reshape(-1), _PIECE_NUMEL)


def measure(members: Sequence[Member], span: Span, count_zeros: bool) -> GradStatistics:
    """Measure the unscaled main gradients of all ranks in one reduction; collective.

    Args:
        members: What this rank steps.
        span: All ranks.
        count_zeros: Whether to count zeros.
    """
    present = [(member, member.grad) for member in members if member.grad is not None]
    sums = squares([grad for _, grad in present])
    num_bad: float | torch.Tensor = 0.0
    if sums:
        num_bad = torch.stack(sums).isfinite().logical_not().sum()
    values: list[float | torch.Tensor] = [num_bad]
    for norm_group in norm_groups():
        counted = [
            total
            for (member, _), total in zip(present, sums, strict=True)
            if member.norm_group == norm_group and member.is_counted
        ]
        values += [torch.stack(counted).sum() if counted else 0.0,
                   float(any(member.norm_group == norm_group for member in members))]  # fmt: skip
    if count_zeros:
        zeros = [grad.numel() - torch.count_nonzero(grad)
                 for member, grad in present if member.is_counted]  # fmt: skip
        values.append(torch.stack(zeros).sum() if zeros else 0)
    total_bad, *rest = span.sum(values)
    norms = {
        norm_group: math.sqrt(rest[2 * i]) if math.isfinite(rest[2 * i]) else math.inf
        for i, norm_group in enumerate(norm_groups())
        if norm_group is None or rest[2 * i + 1]
    }
    return GradStatistics(total_bad == 0, norms, int(rest[-1]) if count_zeros else None)


def first_non_finite(members: Sequence[Member], stage: int, span: Span) -> str:
    """Name the first parameter, in the model's order, whose gradient is not finite; collective.

    Args:
        members: What this rank steps.
        stage: Its pipeline stage.
        span: All ranks.

    Returns:
        Its name, with "and others" if it is not the only one.
    """
    present = [member for member in members if member.grad is not None]
    sums = squares([member.grad for member in present if member.grad is not None])
    are_finite = torch.stack(sums).isfinite().tolist() if sums else []
    bad = [
        (stage, member.order, member.name)
        for member, is_finite in zip(present, are_finite, strict=True)
        if not is_finite
    ]
    own = (min(bad), len({name for *_, name in bad})) if bad else None
    found = [each for each in span.gather(own) if each is not None]
    first = min(place for place, _ in found)
    is_alone = all(place == first and count == 1 for place, count in found)
    return first[2] if is_alone else f"{first[2]} and others"


def clip(members: Sequence[Member], max_norm: float, norms: Mapping[str | None, float]) -> None:
    """Scale the main gradients of members whose group's norm is above ``max_norm``, in place.

    The factor is ``max_norm / (norm + 1e-6)``, Megatron's (0.19.2, optimizer/clip_grads.py:180).

    Args:
        members: What is scaled.
        max_norm: Largest norm that is left as it is.
        norms: Norm of each group.
    """
    for norm_group, norm in norms.items():
        factor = max_norm / (norm + 1.0e-6)
        grads = [
            member.grad
            for member in members
            if member.norm_group == norm_group and member.grad is not None
        ]
        if factor < 1.0 and grads:
            torch._foreach_mul_(grads, factor)
