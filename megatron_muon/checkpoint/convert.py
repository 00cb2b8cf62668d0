"""Conversions of saved state: between momentum conventions, and from older versions.

Two conventions of momentum are in use. Megatron's Muon, and this package inside Megatron, keep an
average, ``m = mu m + (1 - mu) g`` (:data:`EMA`); :class:`megatron_muon.Muon` and Megatron-LM #1428
keep a sum, ``m = mu m + g`` (:data:`SUM`). The directions are the same and the sizes are not:
a momentum that moves as it is weighs the past ``1 / (1 - mu)`` times too much or too little against
new gradients, 20 times at 0.95.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from megatron_muon.errors import CheckpointError, ConfigurationError
from megatron_muon.orthogonalize.update import MOMENTUM

VERSION: Final = 1
"""Version of the record that a checkpoint has of this optimizer; it rises when an older reader
could not understand a checkpoint any more."""

MIGRATIONS: Final[dict[int, Callable[[dict[str, Any]], dict[str, Any]]]] = {}
"""What turns a record of a version into one of the next, for every version below
:data:`VERSION`."""

Convention = Literal["ema", "sum"]

EMA: Final[Convention] = "ema"
"""``m = mu m + (1 - mu) g``, Megatron's."""
SUM: Final[Convention] = "sum"
"""``m = mu m + g``, that of Megatron-LM #1428."""

_MEAN, _SQUARE = "exp_avg", "exp_avg_sq"

_PR_NAMES: Final = {
    "muon_buffer": MOMENTUM,
    "adamw_exp_avg": _MEAN,
    "adamw_exp_avg_sq": _SQUARE,
}
"""Names of state in Megatron-LM #1428, and here."""


def migrate(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's record in the form of this version; the given one is not changed.

    Raises:
        CheckpointError: Another version of this package wrote it that this one cannot read.
    """
    current = dict(record)
    version = current.get("version")
    if type(version) is not int or version < 1:
        raise CheckpointError(
            f"The checkpoint's record of Muon has the version {version!r}: expected a number from "
            f"1 to {VERSION}. It was not written by this package, or is damaged."
        )
    if version > VERSION:
        raise CheckpointError(
            f"The checkpoint's record of Muon has version {version}, this megatron-muon reads "
            f"versions up to {VERSION}. Load it with the megatron-muon that wrote it, or a newer "
            "one."
        )
    while version < VERSION:
        current = {**MIGRATIONS[version](current), "version": version + 1}
        version += 1
    return current


def momentum_factor(source: Convention, target: Convention, mu: float) -> float:
    """Return by what a momentum is multiplied where it moves from one convention to another.

    Args:
        source: :data:`EMA` or :data:`SUM`.
        target: The same.
        mu: Momentum of its parameter group, in [0, 1).

    Raises:
        ConfigurationError: ``mu`` is outside of its range, or there is no such convention.
    """
    for name in (source, target):
        if name not in (EMA, SUM):
            raise ConfigurationError(
                f"{name!r} is no convention of momentum: expected {EMA!r} or {SUM!r}."
            )
    if not 0 <= mu < 1:
        raise ConfigurationError(f"momentum is {mu!r}: expected a factor in [0, 1).")
    if source == target:
        return 1.0
    return 1 - mu if target == EMA else 1 / (1 - mu)


def convert_momentum(
    state_dict: Mapping[str, Any], source: Convention, target: Convention
) -> dict[str, Any]:
    """Return a torch optimizer's state dict with its momentum in another convention.

    Each group's momentum is converted with the group's own factor; a group without ``momentum`` has
    none. Nothing else changes, and the given dict and its tensors are not written.

    Args:
        state_dict: Of ``torch.optim.Optimizer.state_dict()``: of :class:`megatron_muon.Muon`
            (:data:`SUM`), or of the torch optimizer in Megatron's wrapper (:data:`EMA`). Momentum
            lies under ``momentum_buffer``, any shape and floating dtype.
        source: Convention it has.
        target: Convention it is to have.

    Raises:
        ConfigurationError: A group's momentum is out of its range, or a group with
            ``momentum_buffer`` has none.
    """
    state = dict(state_dict["state"])
    for number, group in enumerate(state_dict["param_groups"]):
        for key in group["params"]:
            if MOMENTUM not in state.get(key, {}):
                continue
            if "momentum" not in group:
                raise ConfigurationError(
                    f"Group {number} has no 'momentum', and parameter {key} of it has a "
                    f"{MOMENTUM}: the factor of a conversion is not known. Put the momentum it "
                    "was trained with into the group."
                )
            factor = momentum_factor(source, target, float(group["momentum"]))
            if factor != 1.0:
                state[key] = {**state[key], MOMENTUM: state[key][MOMENTUM] * factor}
    return {**state_dict, "state": state}


def from_pull_request(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of Megatron-LM #1428's ``Muon`` as :class:`megatron_muon.Muon` has it.

    Momentum is a sum in both. #1428 calls it ``muon_buffer`` and AdamW's moments ``adamw_exp_avg``
    and ``adamw_exp_avg_sq``; a group without ``use_muon`` is AdamW's, and counts its steps in
    ``step``, as here. A state dict of this package is returned as it is, and none is written.

    Raises:
        ConfigurationError: A parameter has a state under both names, or a group's moments have no
            count of steps.
    """
    saved: Mapping[Any, Mapping[str, Any]] = state_dict["state"]
    if not any(_PR_NAMES.keys() & of_param.keys() for of_param in saved.values()):
        return dict(state_dict)
    state = {key: _renamed(key, of_param) for key, of_param in saved.items()}
    groups = [{"use_muon": False, **group} for group in state_dict["param_groups"]]
    for number, group in enumerate(groups):
        moved = [key for key in group["params"] if _MEAN in state.get(key, {})]
        if moved and "step" not in group:
            raise ConfigurationError(
                f"Group {number} has AdamW's moments, of parameter {moved[0]}, and no 'step': the "
                "bias correction is not known. Put the number of steps it was trained for into "
                "the group."
            )
    return {**state_dict, "state": state, "param_groups": groups}


def _renamed(key: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for name, value in state.items():
        ours = _PR_NAMES.get(name, name)
        if ours in renamed:
            raise ConfigurationError(
                f"Parameter {key} has {ours} twice in the state: as {name} too."
            )
        renamed[ours] = value
    return renamed
