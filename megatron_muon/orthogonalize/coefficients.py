"""Newton-Schulz coefficients, from emerging-optimizers' tables."""

from __future__ import annotations

from functools import cache

from emerging_optimizers.orthogonalized_optimizers import muon_utils

from megatron_muon.errors import ConfigurationError

type Coefficients = tuple[tuple[float, float, float], ...]
"""One ``(a, b, c)`` for each step ``X <- a X + b (X X^T) X + c (X X^T)^2 X``."""

_REPEATS_LAST = frozenset({"polar_express", "cans", "deepseekv4"})
"""Sets whose last triple is repeated when there are more steps than triples; the others start over.
emerging-optimizers 0.3 says so inside ``newton_schulz``, where nothing can be imported from."""


@cache
def coefficients(coefficient_type: str, num_steps: int) -> Coefficients:
    """Return the triples of ``num_steps`` steps.

    Args:
        coefficient_type: Name of a set, as in emerging-optimizers.
        num_steps: Number of steps, at least 1. Fewer steps than triples take the first ones.

    Raises:
        ConfigurationError: There is no such set, or no step.
    """
    sets = muon_utils._COEFFICIENT_SETS
    if coefficient_type not in sets:
        raise ConfigurationError(
            f"Newton-Schulz coefficients {coefficient_type!r} are none of {', '.join(sets)}. Give "
            "one of these to --muon-coefficient-type."
        )
    if num_steps < 1:
        raise ConfigurationError(
            f"--muon-num-ns-steps is {num_steps}, but Newton-Schulz takes at least 1 step."
        )
    mode = "repeat_last" if coefficient_type in _REPEATS_LAST else "cycle"
    triples = muon_utils.get_coefficient_iterator(num_steps, sets[coefficient_type], mode=mode)
    return tuple((float(a), float(b), float(c)) for a, b, c in triples)
