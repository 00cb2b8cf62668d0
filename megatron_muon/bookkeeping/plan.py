"""The plan: the frozen answer to who holds each matrix and where it is orthogonalized.

A pure function of names, shapes, ranges and group sizes, the same on every rank. Its fingerprint
is compared across ranks before the first collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain, pairwise
from typing import overload

from megatron_muon.bookkeeping.dist_meta import ParamRange
from megatron_muon.bookkeeping.homes import EvenlyHeld, Home, HomeItem, choose_sharers
from megatron_muon.bookkeeping.matrix import LogicalMatrix
from megatron_muon.bookkeeping.parts import max_sharers
from megatron_muon.errors import PlanError


@dataclass(frozen=True, slots=True, order=True)
class Grid:
    """Which data and tensor parallel groups a matrix lies in.

    Attributes:
        expert_parallel: Whether its data-parallel group is that of experts.
        expert_tp: Whether its tensor-parallel group is that of experts.
        gtp: Whether generalized tensor parallelism cuts it too: a row of the grid then has the
            ranks of both.
    """

    expert_parallel: bool = False
    expert_tp: bool = False
    gtp: bool = False


@dataclass(frozen=True, slots=True)
class GridSize:
    """Sizes of the two groups of a grid.

    Attributes:
        dp: Ranks of the data-parallel group, 1 where every rank steps every matrix.
        tp: Ranks of the tensor-parallel group, or of a row that is more.
    """

    dp: int = 1
    tp: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """What one data-parallel rank holds of a matrix, on each tensor-parallel rank.

    Attributes:
        rank: Rank in the data-parallel group.
        range: Flat elements of the local shard, with those that fill it up.
    """

    rank: int
    range: ParamRange


class Slices(Sequence[Piece]):
    """The pieces of a matrix that lies in equal shards, each made when it is looked at.

    A plan of a thousand ranks has a million of them, and few are ever looked at.

    Attributes:
        ranks: Data-parallel ranks that hold the matrix, in the order of its elements.
        head: Elements of the matrix in the first one's shard.
        shard: Elements of a shard.
        numel: Elements of the matrix.
    """

    __slots__ = ("head", "numel", "ranks", "shard")

    def __init__(self, first: int, head: int, shard: int, numel: int) -> None:
        """Cut a matrix.

        Args:
            first: Data-parallel rank that holds the matrix's first element.
            head: Elements of the matrix in that rank's shard.
            shard: Elements of a shard.
            numel: Elements of the matrix.
        """
        num_more = -((head - numel) // shard) if numel > head else 0
        self.ranks = range(first, first + 1 + num_more)
        self.head, self.shard, self.numel = head, shard, numel

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Piece, ...]: ...
    def __getitem__(self, index: int | slice) -> Piece | tuple[Piece, ...]:
        positions = range(len(self))[index]
        if isinstance(positions, range):
            return tuple(map(self._piece, positions))
        return self._piece(positions)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def _piece(self, position: int) -> Piece:
        start = self.head + (position - 1) * self.shard if position else 0
        end = min(self.head + position * self.shard, self.numel)
        return Piece(self.ranks[position], ParamRange(start, end))

    def of(self, rank: int) -> Piece | None:
        """Return what a data-parallel rank holds."""
        return self._piece(rank - self.ranks[0]) if rank in self.ranks else None

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield rank, start and end of each."""
        cuts = range(self.head, self.numel, self.shard)
        return zip(self.ranks, chain((0,), cuts), chain(cuts, (self.numel,)), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedMatrix:
    """A matrix and who holds its masters and momentum.

    Attributes:
        matrix: The logical matrix.
        pieces: What each data-parallel rank holds, in rank order: one piece in the owner layout,
            several where the flat layout's shards cut the matrix.
        buffer_idx: DDP buffer, -1 without a layout.
        bucket_idx: Bucket in the buffer, -1 without a layout.
        range: ``(start, end)`` in the buffer frame, ``None`` without a layout.
    """

    matrix: LogicalMatrix
    pieces: Sequence[Piece]
    buffer_idx: int = -1
    bucket_idx: int = -1
    range: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.pieces, Slices):  # of one another's ends by the way they are made
            is_covered = self.pieces.numel == self.matrix.local_numel
        else:
            spans = list(self.spans())
            starts = [*(start for _, start, _ in spans), self.matrix.local_numel]
            is_covered = starts == [0, *(end for _, _, end in spans)]
        if not is_covered:
            raise PlanError(
                f"{self.matrix.name}: {self.pieces} do not cover its {self.matrix.local_numel} "
                "elements once."
            )

    @property
    def owner(self) -> int | None:
        """The data-parallel rank that holds all of it, ``None`` if it is cut."""
        pieces = self.pieces
        if isinstance(pieces, Slices):
            return pieces.ranks[0] if len(pieces.ranks) == 1 else None
        return pieces[0].rank if len(pieces) == 1 else None

    @property
    def grid(self) -> Grid:
        """The groups it lies in."""
        matrix = self.matrix
        return Grid(matrix.expert_parallel, matrix.expert_tp, matrix.gtp_size > 1)

    def piece_of(self, rank: int) -> Piece | None:
        """Return what a data-parallel rank holds."""
        if isinstance(self.pieces, Slices):
            return self.pieces.of(rank)
        return next((piece for piece in self.pieces if piece.rank == rank), None)

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield rank, start and end of each piece."""
        if isinstance(self.pieces, Slices):
            return self.pieces.spans()
        return ((piece.rank, piece.range.start, piece.range.end) for piece in self.pieces)

    def held_range(self, piece: Piece, tp: int) -> ParamRange:
        """Return which elements of the matrix a piece has on a rank of the row; may be empty.

        They are the first ones of the piece: what fills a shard up lies at its end.
        """
        end = min(piece.range.end, self.matrix.held_numel(tp))
        return ParamRange(min(piece.range.start, end), end)

    def range_on(self, dp: int, tp: int) -> ParamRange | None:
        """Return which elements of the matrix a rank of the grid holds, ``None`` for none."""
        piece = self.piece_of(dp)
        held = None if piece is None else self.held_range(piece, tp)
        return held if held is not None and held.numel else None


def held_by(owner: int, matrix: LogicalMatrix) -> tuple[Piece, ...]:
    """Return the one piece of a matrix that a rank holds whole."""
    return (Piece(owner, ParamRange(0, matrix.local_numel)),)


def held_by_slices(range_: tuple[int, int], bucket: tuple[int, int], size: int) -> Slices:
    """Return the pieces of a matrix whose bucket is cut into equal shards.

    Args:
        range_: The matrix's ``(start, end)`` in the buffer frame.
        bucket: The bucket's, a multiple of ``size`` long.
        size: Ranks that have one shard each.
    """
    start, end = range_
    shard = (bucket[1] - bucket[0]) // size
    first = (start - bucket[0]) // shard
    head = min(bucket[0] + (first + 1) * shard, end) - start
    return Slices(first, head, shard, end - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMatrix:
    """An owned matrix with its home.

    Attributes:
        owned: The matrix and who holds it.
        home: Rank of the data x tensor grid that orthogonalizes it, the first of several.
        flops: Newton-Schulz flops of its blocks.
        sharers: Where several ranks work on it together the home of each of its parts, in order;
            empty where one does.
    """

    owned: OwnedMatrix
    home: Home
    flops: int
    sharers: tuple[Home, ...] = ()

    @property
    def matrix(self) -> LogicalMatrix:
        """The logical matrix."""
        return self.owned.matrix

    @property
    def homes(self) -> tuple[Home, ...]:
        """The ranks that work on it: its home, or the homes of its parts."""
        return self.sharers or (self.home,)

    def row(self) -> str:
        """Return the whole record as one canonical line that starts with the name."""
        matrix, owned = self.matrix, self.owned
        values = {key: getattr(matrix, key) for key in _MATRIX_FIELDS}
        values["blocks"] = " ".join(map(str, matrix.blocks))
        values |= {key: getattr(owned, key) for key in _OWNED_FIELDS}
        values["pieces"] = " ".join(
            [f"{rank}[{start}:{end}]" for rank, start, end in owned.spans()]
        )
        values |= {"flops": self.flops, "home": f"{self.home.dp},{self.home.tp}"}
        if self.sharers:
            values["sharers"] = " ".join(f"{home.dp},{home.tp}" for home in self.sharers)
        return f"{matrix.name}: " + ", ".join(f"{key} {value}" for key, value in values.items())


_MATRIX_FIELDS = tuple(f.name for f in fields(LogicalMatrix) if f.name != "name")
_OWNED_FIELDS = tuple(f.name for f in fields(OwnedMatrix) if f.name != "matrix")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every matrix of one pipeline stage, ordered by name.

    Attributes:
        matrices: The matrices with holders and homes.
        grids: Sizes of the grids they lie in.
        buffer_numel: Elements of the buffers that hold the matrices on one rank, padding
            included; without a layout those of the matrices.
    """

    matrices: tuple[PlannedMatrix, ...]
    grids: Mapping[Grid, GridSize]
    buffer_numel: int

    @property
    def num_owners(self) -> int:
        """Data-parallel ranks that share the dense matrices."""
        return self.grids.get(Grid(), GridSize()).dp

    @property
    def param_numel(self) -> int:
        """Elements of the matrices on one rank."""
        return sum(planned.matrix.local_numel for planned in self.matrices)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the plan, shortened."""
        return fingerprint_of(self.rows())

    def rows(self) -> list[str]:
        """One canonical line a matrix, for the fingerprint and for naming a difference."""
        return [planned.row() for planned in self.matrices]

    def on(self, grid: Grid) -> list[PlannedMatrix]:
        """Return the matrices of one grid, ordered by name."""
        return [planned for planned in self.matrices if planned.owned.grid == grid]


def fingerprint_of(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines, shortened: of a plan's, or of several plans' fingerprints."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def make_plan(
    owned: Iterable[OwnedMatrix],
    grids: Mapping[Grid, GridSize],
    num_steps: int,
    buffer_numel: int | None = None,
    one_rank_each: bool = True,
    share_blocks: bool = False,
) -> Plan:
    """Order the matrices by name and give each a home in its grid.

    Args:
        owned: The matrices of one pipeline stage, in any order.
        grids: Sizes of the grids; one that is missing has one rank.
        num_steps: Newton-Schulz steps.
        buffer_numel: Elements of the matrices' buffers, ``None`` without a layout.
        one_rank_each: Whether one rank alone works on each matrix. If not, all ranks of the home's
            row do, and a matrix that one row holds stays there.
        share_blocks: Whether several ranks work together on a matrix that is one block and more
            than the share of one; only with ``one_rank_each``.

    Raises:
        PlanError: Two matrices have one name.
    """
    ordered = sorted(owned, key=lambda o: o.matrix.name)
    names = [item.matrix.name for item in ordered]
    for name, following in pairwise(names):
        if name == following:
            raise PlanError(
                f"Two matrices are named {name}. Muon plans by name: give the modules "
                "of each model chunk names of their own, or a layer_number where they are "
                "numbered layers."
            )
    homes: dict[str, tuple[Home, ...]] = {}
    flops = {name: o.matrix.ns_flops(num_steps) for name, o in zip(names, ordered, strict=True)}
    for size, members in _by_ranks(ordered, grids):
        if not one_rank_each:
            homes |= {o.matrix.name: (Home(o.owner, 0),) for o in members if o.owner is not None}
            members = [item for item in members if item.owner is None]
        is_shared = share_blocks and one_rank_each
        items = [_home_item(o, flops[o.matrix.name], is_shared) for o in members]
        homes |= choose_sharers(items, size.dp, size.tp)
    return Plan(
        matrices=tuple(
            PlannedMatrix(
                owned=item, home=at[0], flops=flops[name], sharers=at if len(at) > 1 else ()
            )
            for name, item in zip(names, ordered, strict=True)
            for at in (homes[name],)
        ),
        grids=dict(grids),
        buffer_numel=sum(item.matrix.local_numel for item in ordered)
        if buffer_numel is None
        else buffer_numel,
    )


def _by_ranks(
    ordered: Iterable[OwnedMatrix], grids: Mapping[Grid, GridSize]
) -> list[tuple[GridSize, list[OwnedMatrix]]]:
    """Return the matrices whose homes are chosen together: of grids that are the same ranks.

    Experts that are not reduced apart lie in the groups of the dense matrices, since Megatron cuts
    them over as many ranks then (0.19.2, core/tensor_parallel/layers.py:961).
    """
    by_grid: dict[tuple[bool, bool, bool], list[OwnedMatrix]] = {}
    for item in ordered:
        matrix = item.matrix
        kind = (matrix.expert_parallel, matrix.expert_tp, matrix.gtp_size > 1)
        by_grid.setdefault(kind, []).append(item)
    together: dict[tuple[bool, bool, bool, GridSize], list[OwnedMatrix]] = {}
    for (expert_parallel, expert_tp, gtp), members in by_grid.items():
        size = grids.get(Grid(expert_parallel, expert_tp, gtp), GridSize())
        key = (expert_parallel, expert_parallel and expert_tp, gtp, size)
        together.setdefault(key, []).extend(members)
    return [(key[-1], members) for key, members in together.items()]


def _home_item(owned: OwnedMatrix, flops: int, may_be_shared: bool) -> HomeItem:
    matrix, owner = owned.matrix, owned.owner
    row_size = matrix.row_size if matrix.is_cut else 1
    return HomeItem(
        name=matrix.name,
        flops=flops,
        numel=matrix.numel,
        owner=owner,
        held={} if owner is not None else _held(owned, row_size),
        tp_size=row_size,
        max_sharers=max_sharers(matrix) if may_be_shared else 1,
    )


def _held(owned: OwnedMatrix, row_size: int) -> Mapping[int, int]:
    """Return how much each data-parallel rank holds of a matrix that is cut."""
    if owned.matrix.gtp_size > 1:  # the last ranks of a row are filled up: the mean of all
        return {
            piece.rank: sum(owned.held_range(piece, tp).numel for tp in range(row_size)) // row_size
            for piece in owned.pieces
        }
    if isinstance(owned.pieces, Slices):
        slices = owned.pieces
        return EvenlyHeld(slices.ranks, slices.head, slices.shard, slices.numel)
    return {rank: end - start for rank, start, end in owned.spans()}
