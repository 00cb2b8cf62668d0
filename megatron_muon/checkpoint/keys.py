"""Names of the optimizer's state in a checkpoint, all in one place.

Every state of a parameter lies under the model's own key ``K`` of that parameter, in the model's
shape: ``optimizer.state.<state>.K``, whatever ranks, layout and buckets were.
"""

from __future__ import annotations

import re
from typing import Final

from megatron_muon.orthogonalize.update import MOMENTUM

PREFIX: Final = "optimizer.state"

# Always saved.
MASTER: Final = "fp32_param"
"""fp32 master of a matrix; without a parameter layout that of every parameter."""
SHARDED_MASTER: Final = "param"
"""The same of a parameter of Megatron's ``DistributedOptimizer``, by its own name (0.19.2,
``DistributedOptimizer.sharded_param_state_fully_reshardable``)."""
MOMENTUM_BUFFER: Final = MOMENTUM
"""Muon's momentum of a matrix, unscaled, ``m = mu m + (1 - mu) g``."""
EXP_AVG: Final = "exp_avg"
"""First moment of the scalar optimizer."""

# Saved if the scalar optimizer has it.
EXP_AVG_SQ: Final = "exp_avg_sq"
"""Second moment of AdamW; Lion has none."""

# Never saved with a parameter.
STEP: Final = "step"
"""The scalar optimizer's count of steps, one for all of its parameters."""
NEVER: Final = (STEP,)

MASTERS: Final = (MASTER, SHARDED_MASTER)
STATES: Final = (*MASTERS, MOMENTUM_BUFFER, EXP_AVG, EXP_AVG_SQ)

_KEY = re.compile(
    rf"(?:chained_\d+\.)*{re.escape(PREFIX)}\.(?P<state>{'|'.join(STATES)})\.(?P<key>.+)"
)


def state_key(state: str, model_key: str) -> str:
    """Return the name under which a state of a parameter is saved."""
    return f"{PREFIX}.{state}.{model_key}"


def alone(key: str, outer: tuple[int, ...]) -> str:
    """Return the name of one parameter's state out of those that the model saves under one key.

    The model puts equal layers, and experts, under one key with axes of their own. Where not all of
    them have a state (some are frozen, or belong to the other optimizer), each that has it lies
    under a key of its own.

    Args:
        key: The common name.
        outer: The parameter's place on the model's axes.
    """
    return f"{key}.at_{'_'.join(map(str, outer))}"


def canonical(key: str) -> tuple[str, str] | None:
    """Return ``(state, model key)`` of a saved tensor, ``None`` for what is no optimizer state.

    Megatron puts ``chained_N.`` before the names of its optimizers' states in some of its forms,
    and calls masters :data:`MASTER` or :data:`SHARDED_MASTER`: both are :data:`MASTER` here.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    state = match["state"]
    return MASTER if state in MASTERS else state, match["key"]
