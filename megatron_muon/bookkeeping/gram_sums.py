"""How the ranks that share a matrix sum its Gram matrix, and tell each other its size.

A pure function of the plan. The Gram matrix is symmetric, so that its part below the diagonal is
enough: it is cut into as many *strips* of rows as there are ranks, of about equal size, each from
the first column to the end of its block on the diagonal::

    |0        |
    |0        |
    |1 1 1    |
    |2 2 2 2 2|

A rank receives its strip from all others, adds them in the order of the parts, and sends the sum to
all: every rank then has the same bits, however the transfers are cut into rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_muon.bookkeeping.dist_meta import ParamRange
from megatron_muon.bookkeeping.plan import PlannedMatrix
from megatron_muon.bookkeeping.schedule import (
    Position,
    Round,
    Transfer,
    cut_into_rounds,
    round_of,
)
from megatron_muon.bookkeeping.units import PlannedPart

SIZE_NUMEL = 2
"""Numbers that a part tells the others for the norm of the whole: its largest, and its norm."""


def strips_of(num_rows: int, count: int) -> list[tuple[int, int]]:
    """Return the rows of each strip of a Gram matrix; some are empty if it is small.

    With edges ``r`` the strips have ``(r' - r) r'`` elements, all equal but for rounding.

    Args:
        num_rows: Rows of the matrix.
        count: Strips.
    """
    edges = [0.0]
    for _ in range(count):
        edges.append((edges[-1] + math.sqrt(edges[-1] ** 2 + 4)) / 2)
    rows = [round(num_rows * edge / edges[-1]) for edge in edges]
    return list(pairwise(rows))


def strip_numel(strip: tuple[int, int]) -> int:
    """Return the elements of a strip: its rows from the first column to its last row's."""
    start, end = strip
    return (end - start) * end


@dataclass(frozen=True, slots=True)
class SharedMatrix:
    """A shared matrix of a micro-group, as the ranks of one line see it.

    Attributes:
        parts: Its parts, in order.
        ranks: Rank in the line of the home of each.
        own: The part whose home is the rank that asks, ``None`` if it has none.
        index: Place of the first part among the units: its name in transfers.
    """

    parts: tuple[PlannedPart, ...]
    ranks: tuple[int, ...]
    own: int | None
    index: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix."""
        return self.parts[0].whole.matrix.shape

    @property
    def strips(self) -> list[tuple[int, int]]:
        """Strips of its Gram matrix: the one of a number is added by the home of that part."""
        return strips_of(min(self.shape), len(self.parts))


def shared_matrices(
    units: Sequence[PlannedMatrix], indices: Sequence[int], position: Position, in_row: bool
) -> list[SharedMatrix]:
    """Return the matrices that ranks of one of this rank's lines share, in the order of the plan.

    Args:
        units: What the engine works on.
        indices: Those of a micro-group.
        position: This rank.
        in_row: Whether the line is the rank's row, else its column.
    """
    found = []
    for index in sorted(indices):
        first = units[index]
        if not isinstance(first, PlannedPart) or first.number or first.is_in_row != in_row:
            continue
        homes = first.whole.sharers
        if (homes[0].dp != position.dp) if in_row else (homes[0].tp != position.tp):
            continue
        ranks = tuple(home.tp if in_row else home.dp for home in homes)
        here = position.tp if in_row else position.dp
        parts = [units[index + number] for number in range(len(homes))]
        found.append(
            SharedMatrix(
                parts=tuple(part for part in parts if isinstance(part, PlannedPart)),
                ranks=ranks,
                own=ranks.index(here) if here in ranks else None,
                index=index,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class SumRounds:
    """One rank's part in the sums of Gram matrices over one line.

    Attributes:
        gather: Rounds in which strips go to the ranks that add them.
        spread: Rounds in which the sums go to all.
    """

    gather: tuple[Round, ...]
    spread: tuple[Round, ...]


class LineRounds:
    """Makes the rounds of one rank in one line.

    Attributes:
        rank: The rank in the line.
        size: Ranks of the line.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Name the place."""
        self.rank, self.size = rank, size

    def sizes(self, shared: Sequence[SharedMatrix], budget_numel: int) -> tuple[Round, ...]:
        """Return the rounds in which each part's size goes to the homes of all others."""
        return self._rounds(shared, budget_numel, lambda matrix, src, dst: (src, SIZE_NUMEL))

    def sums(self, shared: Sequence[SharedMatrix], budget_numel: int) -> SumRounds:
        """Return the rounds that add the Gram matrices."""

        def strip(matrix: SharedMatrix, number: int) -> tuple[int, int]:
            return number, strip_numel(matrix.strips[number])

        return SumRounds(
            gather=self._rounds(shared, budget_numel, lambda matrix, _, dst: strip(matrix, dst)),
            spread=self._rounds(shared, budget_numel, lambda matrix, src, _: strip(matrix, src)),
        )

    def _rounds(
        self,
        shared: Sequence[SharedMatrix],
        budget_numel: int,
        stretch: Callable[[SharedMatrix, int, int], tuple[int, int]],
    ) -> tuple[Round, ...]:
        """Return the rounds of transfers between the homes of all parts of each matrix.

        Args:
            shared: The matrices.
            budget_numel: Elements that a rank may send and receive in one collective.
            stretch: Number and elements of what one part's home sends another's.
        """
        transfers = []
        for matrix in shared:
            for dst, receiver in enumerate(matrix.ranks):
                for src, sender in enumerate(matrix.ranks):
                    if src != dst:
                        number, numel = stretch(matrix, src, dst)
                        range_ = ParamRange(0, numel)
                        transfers.append(Transfer(matrix.index, number, range_, sender, receiver))
        rounds = cut_into_rounds(transfers, budget_numel)
        return tuple(round_of(moves, self.rank, self.size) for moves in rounds)
