"""Muon's phases among the timers that Megatron's training loop prints and writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from megatron_muon.optimizer.account import PHASES, TIMER_LEVEL, label_of

_OF_THE_STEP = "optimizer-inner-step"
"""A timer that Megatron names where it names those of the optimizer's step."""


def shows_phases(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``Timers.log`` or ``Timers.write`` by one that is told Muon's timers too.

    The training loop names the timers it knows. Names that no rank has a timer of show nothing.
    """

    @functools.wraps(original)
    def shown(timers: Any, names: Iterable[str], *args: Any, **kwargs: Any) -> Any:
        names = list(names)
        # The same on every rank, which gather all that are named.
        if _OF_THE_STEP in names and timers._log_level >= TIMER_LEVEL:
            names += map(label_of, PHASES)
        return original(timers, names, *args, **kwargs)

    return shown
