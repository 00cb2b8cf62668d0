"""The software pipeline: the steps of several micro-groups, interleaved in a fixed order."""

from __future__ import annotations

from collections.abc import Generator, Sequence

Life = Generator[None]
"""The step of one micro-group. It stops after each hop's launch before Newton-Schulz, when its
matrices have arrived, after Newton-Schulz, and after each hop's launch after it."""


def step_one_by_one(lives: Sequence[Life]) -> None:
    """Step each micro-group to its end before the next."""
    for life in lives:
        for _ in life:
            pass


def step_overlapped(lives: Sequence[Life], num_in: int, num_out: int) -> None:
    """Step micro-groups so that the exchanges of some run under the Newton-Schulz of another.

    In turn ``k`` group ``k`` arrives, the ``num_in`` groups after it launch a hop each, group ``k``
    is orthogonalized, the ``num_out`` groups before it launch their next hop or end, and group
    ``k`` launches its first hop back. So each hop of every exchange but the first in and the last
    out lies in a turn in which a group is orthogonalized, ``1 + num_in + num_out`` groups are under
    way at most, and none is at the end.

    The order is that of the turns and depends on the plan alone. Every rank goes through the same
    turns, also where it has no part in a hop, so that what one waits for the others have launched
    or will launch without waiting for anything later.

    Args:
        lives: The steps, none begun.
        num_in: Hops before Newton-Schulz.
        num_out: Hops after it.
    """
    num_lives = len(lives)
    for turn in range(-num_in, num_lives + num_out):
        for place in range(turn, turn + num_in + 1):
            if 0 <= place < num_lives:
                next(lives[place])
        if 0 <= turn < num_lives:
            next(lives[turn])
        for place in range(turn - num_out, turn + 1):
            if 0 <= place < num_lives:
                next(lives[place], None)
