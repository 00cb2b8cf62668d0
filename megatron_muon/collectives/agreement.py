"""Comparing what ranks believe before they act on it together, and collecting what differs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import cast

import torch.distributed as dist

from megatron_muon.errors import MuonError, PlanError


def gather[T](value: T, group: dist.ProcessGroup) -> list[T]:
    """Return every rank's value, in rank order; collective."""
    values: list[T | None] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return cast(list[T], values)


def raise_together[T](work: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Do something that may fail on some ranks only, and fail on all if on one; collective.

    Otherwise the others would wait in the next collective for a rank that has given up.

    Args:
        work: What each rank does; not collective.
        group: All ranks that enter.

    Returns:
        What ``work`` returned.

    Raises:
        MuonError: The error of the first rank that has one, the same on every rank; an error of
            another kind as a :class:`PlanError` that names the rank.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    shared = error
    if error is not None and not isinstance(error, MuonError):
        shared = PlanError(f"Rank {dist.get_rank()}: {type(error).__name__}: {error}")
    first = next((each for each in gather(shared, group) if each is not None), None)
    if first is not None:
        raise first from error
    return cast(T, result)


def first_difference(
    rows: Sequence[str], key: object, group: dist.ProcessGroup
) -> tuple[int, int, str, str] | None:
    """Compare rows among the ranks of ``group`` that have the same ``key``; collective.

    Their hashes are compared first; the rows travel only if some differ.

    Args:
        rows: What this rank believes, in canonical order.
        key: Ranks are compared with those of equal key only, a pipeline stage for example.
        group: All ranks that enter.

    Returns:
        ``(rank, other_rank, row, other_row)`` of the first difference, the same on every rank, or
        ``None``. A row that one side lacks is the empty string.
    """
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    digests = gather((key, digest), group)
    first: dict[object, int] = {}
    for rank, (rank_key, rank_digest) in enumerate(digests):
        reference = first.setdefault(rank_key, rank)
        if digests[reference][1] != rank_digest:
            everything = gather(list(rows), group)
            return reference, rank, *_differing_rows(everything[reference], everything[rank])
    return None


def gather_distinct[T](value: T, key: object, group: dist.ProcessGroup) -> list[T]:
    """Return one value for each key, from the first rank that has it, in rank order; collective.

    Args:
        value: What this rank has.
        key: Equal where the values are; what travels is a hash of its ``repr``.
        group: All ranks that enter.
    """
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    is_first = digest not in gather(digest, group)[: group.rank()]
    values = gather((value,) if is_first else (), group)
    return [item for items in values for item in items]


def _differing_rows(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return mine, other
    shorter = min(len(ours), len(theirs))
    return (
        ours[shorter] if len(ours) > shorter else "",
        theirs[shorter] if len(theirs) > shorter else "",
    )
