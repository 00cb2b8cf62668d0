"""What a checkpoint says of the optimizer besides tensors, in the form that Megatron's own has."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from megatron_muon.checkpoint.convert import EMA, VERSION, migrate
from megatron_muon.checkpoint.keys import STEP
from megatron_muon.errors import CheckpointError

logger = logging.getLogger(__name__)

RECORD = "muon"
"""Where a checkpoint keeps our record, in the state of Megatron's first optimizer."""

FULLY_RESHARDABLE = "fully_reshardable"
"""Megatron's name of the form in which scalar state is saved, for its own loader."""

_TOLD = ("momentum", "betas", "eps")
"""Hyper-parameters whose change is worth a warning: those of this run are used."""


def identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return by what Megatron knows a parameter group again."""
    return tuple(group.get(key) for key in param_group_identifier_keys)


def union(groups: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return every parameter group of any rank once: a pipeline stage need not have all."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for of_rank in groups:
        for group in of_rank:
            found.setdefault(identity(group), group)
    return list(found.values())


def common(
    muon: Sequence[dict[str, Any]],
    scalar: Sequence[dict[str, Any]],
    step: int | None,
    scaler: dict[str, Any] | None,
    record: Mapping[str, Any],
    *,
    counts_each: bool,
    is_fp32: bool,
) -> dict[Any, Any]:
    """Return the state that is the same on all ranks, in the form of Megatron's chain.

    Args:
        muon: Parameter groups of the matrices.
        scalar: Parameter groups of the scalar optimizer.
        step: Its count of steps.
        scaler: The loss scaler's state.
        record: What else is told of this run.
        counts_each: Whether the scalar optimizer counts the steps of each parameter, as torch's.
        is_fp32: Whether the weights are their own masters.
    """
    parts = []
    for groups, count in ((muon, None), (scalar, step)):
        if not groups:
            continue
        optimizer: dict[str, Any] = {"param_groups": [dict(group) for group in groups]}
        if count is not None:
            for group in optimizer["param_groups"]:
                group[STEP] = count
            if counts_each:
                # Where Megatron's layer-wise optimizer looks for it; its distributed one and
                # Transformer Engine's AdamW look in the groups.
                optimizer["state"] = {"common_step": torch.tensor(float(count))}
        # Megatron's fp32 optimizer has its state one level higher than the others.
        part: dict[str, Any] = {"optimizer": optimizer, **(optimizer if is_fp32 else {})}
        if groups is scalar:
            # Megatron's distributed optimizer asks the file in which form its tensors are.
            part["param_state_sharding_type"] = FULLY_RESHARDABLE
        if scaler is not None:
            part["grad_scaler"] = dict(scaler)
        parts.append(part)
    if parts:
        parts[0]["optimizer"][RECORD] = {"version": VERSION, **record}
    return dict(enumerate(parts)) if len(parts) > 1 else (parts[0] if parts else {})


def parts_of(state_dict: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Return the states of Megatron's optimizers in what was loaded, however it nests them."""
    if "optimizer" in state_dict:
        return [dict(state_dict)]
    if "param_groups" in state_dict:
        return [{"optimizer": dict(state_dict)}]
    return [
        part
        for key in sorted(key for key in state_dict if isinstance(key, int))
        for part in parts_of(state_dict[key])
    ]


def record_of(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return our record in the form of this version; ``None`` in a checkpoint of Megatron's own.

    Raises:
        CheckpointError: A newer version of this package wrote it.
    """
    for part in parts:
        if RECORD in part["optimizer"]:
            return checked(dict(part["optimizer"][RECORD]))
    return None


def checked(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record in the form of this version.

    Raises:
        CheckpointError: A newer version of this package wrote it, or momentum is none of Megatron's
            convention.
    """
    current = migrate(record)
    if current.get("momentum_convention", EMA) != EMA:
        raise CheckpointError(
            f"The checkpoint's momentum is of the convention {current['momentum_convention']!r}, "
            f"expected {EMA!r}: convert it with megatron_muon.checkpoint.convert."
        )
    return current


def step_in(parts: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the scalar optimizer's count of steps that a checkpoint has.

    Raises:
        CheckpointError: It has several.
    """
    steps = set()
    for part in parts:
        optimizer = part["optimizer"]
        if "common_step" in optimizer.get("state", {}):
            steps.add(int(optimizer["state"]["common_step"]))
        groups = optimizer.get("param_groups", ())
        steps |= {int(group[STEP]) for group in groups if group.get(STEP) is not None}
    if len(steps) > 1:
        raise CheckpointError(
            f"The checkpoint has several counts of steps of the scalar optimizer: {sorted(steps)}."
        )
    return next(iter(steps), None)


def scaler_in(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the loss scaler's state that a checkpoint has."""
    return next((part["grad_scaler"] for part in parts if part.get("grad_scaler")), None)


def tell_changes(saved: Iterable[Mapping[str, Any]], ours: Iterable[Mapping[str, Any]]) -> None:
    """Warn of hyper-parameters that are not those of the checkpoint; those of this run are used.

    Args:
        saved: Parameter groups in the checkpoint.
        ours: Those of this run.
    """
    saved, ours = list(saved), list(ours)
    for name in _TOLD:
        before, now = (
            sorted({repr(group[name]) for group in groups if name in group})
            for groups in (saved, ours)
        )
        if before and now and before != now:
            logger.warning(
                "The checkpoint was trained with %s %s, this run has %s, which is used.",
                name, ", ".join(before), ", ".join(now),
            )  # fmt: skip


def tell_other_scalar_optimizer(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Warn if other parameters than matrices were trained by another optimizer.

    Args:
        saved: The checkpoint's record.
        ours: That of this run.
    """
    before, now = (record.get("settings", {}).get("scalar_optimizer") for record in (saved, ours))
    if before and now and before != now:
        logger.warning(
            "The checkpoint was trained with --muon-scalar-optimizer %s, this run has %s, which "
            "takes over what both have.", before, now,
        )  # fmt: skip
