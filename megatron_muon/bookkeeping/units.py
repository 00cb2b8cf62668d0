"""What an engine moves and works on: matrices, and parts of those that several ranks share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_muon.bookkeeping.parts import part_lines, part_matrix, part_range
from megatron_muon.bookkeeping.plan import OwnedMatrix, Piece, PlannedMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPart(PlannedMatrix):
    """A part of a shared matrix, with the home of the part and its share of the flops.

    Attributes:
        whole: The matrix.
        number: Which part.
        lines: Its lines of a shard's long side.
    """

    whole: PlannedMatrix
    number: int
    lines: tuple[int, int]

    @property
    def count(self) -> int:
        """Parts of the matrix."""
        return len(self.whole.sharers)

    @property
    def is_in_row(self) -> bool:
        """Whether the ranks that share the matrix are of one row of the grid, else of a column."""
        first, second, *_ = self.whole.sharers
        return first.dp == second.dp


def units_of(plan: Iterable[PlannedMatrix]) -> tuple[PlannedMatrix, ...]:
    """Return the matrices, in the place of each shared one its parts, in order."""
    return tuple(unit for planned in plan for unit in (_parts(planned) or (planned,)))


def _parts(planned: PlannedMatrix) -> tuple[PlannedPart, ...]:
    count, owned, matrix = len(planned.sharers), planned.owned, planned.matrix

    def pieces(lines: tuple[int, int]) -> Iterator[Piece]:
        for piece in owned.pieces:
            range_ = part_range(matrix, lines, piece.range)
            if range_.numel:
                yield Piece(piece.rank, range_)

    return tuple(
        PlannedPart(
            owned=OwnedMatrix(
                matrix=part_matrix(matrix, number, count),
                pieces=tuple(pieces(lines)),
                buffer_idx=owned.buffer_idx,
                bucket_idx=owned.bucket_idx,
            ),
            home=home,
            flops=(number + 1) * planned.flops // count - number * planned.flops // count,
            whole=planned,
            number=number,
            lines=lines,
        )
        for number, home in enumerate(planned.sharers)
        for lines in (part_lines(matrix, number, count),)
    )
