"""The schedule: which stretches of which matrices move between which ranks, in which order.

A pure function of the plan. Matrices are worked on in *micro-groups*. Around the Newton-Schulz of
each there are up to four hops::

    pieces -> shards at the home's data-parallel rank        (data-parallel group)
    shards -> the whole at the home                          (tensor-parallel group)
    the update -> its shards                                 (tensor-parallel group)
    shards -> pieces                                         (data-parallel group)

A hop is cut into *rounds*, one collective each, in which no rank sends and receives more than the
budget. Every rank of a group computes the same rounds and keeps its own part of each.

Where the budget has room for it micro-groups overlap: while one is orthogonalized, the next ones
come in and the ones before go out.
Which hops there are (:class:`Stages`), and so which groups are under way together, is the same on
every rank of the grid: all launch their collectives in one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_muon.bookkeeping.dist_meta import ParamRange
from megatron_muon.bookkeeping.plan import PlannedMatrix
from megatron_muon.bookkeeping.units import PlannedPart

_GRAMS_IN_THE_MAKING = 4
"""Matrices as large as its Gram matrix that the iteration on a block works in."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A stretch of one shard that travels between two ranks of a group.

    Attributes:
        index: The matrix, as its place in the plan's list.
        shard: Rank of the row whose shard it is a part of.
        range: Flat elements of the shard.
        src: Rank of the group that sends.
        dst: Rank of the group that receives, not ``src``.
    """

    index: int
    shard: int
    range: ParamRange
    src: int
    dst: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One rank's part in one collective of its group; it enters also where it has none.

    Attributes:
        outgoing: What it sends, by receiver.
        incoming: What it receives, by sender, in the order in which that one sends.
        sent: Elements that it sends to each rank of the group.
        received: Elements that it receives from each.
    """

    outgoing: tuple[Transfer, ...]
    incoming: tuple[Transfer, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroGroup:
    """The schedule of one rank for one micro-group.

    Attributes:
        indices: Its matrices.
        held: Those of which this rank holds a piece.
        in_row: Those whose home is in this rank's row.
        to_row: Rounds over the data-parallel group, pieces to shards.
        to_home: Rounds over the tensor-parallel group, shards to the whole.
        from_home: Rounds over the tensor-parallel group, the update to its shards.
        from_row: Rounds over the data-parallel group, shards to pieces.
    """

    indices: tuple[int, ...]
    held: tuple[int, ...]
    in_row: tuple[int, ...]
    to_row: tuple[Round, ...]
    to_home: tuple[Round, ...]
    from_home: tuple[Round, ...]
    from_row: tuple[Round, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Which hops micro-groups of a grid have, on any of its ranks.

    Attributes:
        to_row: Whether pieces move over the data-parallel group; updates then do too.
        to_home: Whether shards move over the tensor-parallel group to become the whole.
        from_home: Whether the update's shards move over the tensor-parallel group.
    """

    to_row: bool
    to_home: bool
    from_home: bool

    @property
    def num_in(self) -> int:
        """Hops before Newton-Schulz."""
        return self.to_row + self.to_home

    @property
    def num_out(self) -> int:
        """Hops after Newton-Schulz."""
        return self.from_home + self.to_row

    @property
    def share(self) -> int:
        """Into how many parts micro-groups that overlap cut the budget.

        One group is worked on while ``num_in`` come and ``num_out`` go. Unpipelined, whole matrices
        and the buffers of a hop take up to the budget each; ``1 + num_in + num_out`` groups of such
        a part each take no more than both.
        """
        return 1 + max(self.num_in, self.num_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A rank's place in its grid.

    Attributes:
        dp: Rank in the data-parallel group.
        tp: Rank in the row: the tensor-parallel group, or that and the ranks which cut rows.
        dp_size: Ranks of the data-parallel group.
        tp_size: Ranks of the row.
    """

    dp: int
    tp: int
    dp_size: int
    tp_size: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Which tensor-parallel ranks work on a matrix once its shards are at the home's row.

    Attributes:
        whole: Whether ranks work on the whole matrix and not on their shards.
        everywhere: Whether every rank of the row works, and not the home alone.
    """

    whole: bool
    everywhere: bool


def make_schedule(
    plan: Sequence[PlannedMatrix],
    position: Position,
    spread: Spread,
    budget_numel: int,
    held_numel: int | None = None,
    by_bucket: bool = False,
    overlapped: bool = False,
) -> list[MicroGroup]:
    """Return one rank's schedule of the matrices of one grid.

    Args:
        plan: The matrices of the grid, ordered by name; parts in the place of shared ones.
        position: The rank.
        spread: Where Newton-Schulz runs.
        budget_numel: Elements that a rank may send and receive in one collective.
        held_numel: Elements that a rank may hold to work on at a time, as many if ``None``.
        by_bucket: Whether all matrices of a bucket are done before those of the next.
        overlapped: Whether micro-groups overlap, see :func:`overlaps`: they are then cut smaller,
            so that those under way share the budget.
    """
    tp_size = position.tp_size

    def over_data(transfers: list[Transfer]) -> tuple[Round, ...]:
        rounds = cut_into_rounds(transfers, budget_numel)
        return tuple(round_of(moves, position.dp, position.dp_size) for moves in rounds)

    def over_tensor(transfers: list[Transfer]) -> tuple[Round, ...]:
        rounds = cut_into_rounds(transfers, budget_numel)
        return tuple(round_of(moves, position.tp, tp_size) for moves in rounds)

    schedule = []
    for indices in micro_groups_of(
        plan, tp_size, spread, budget_numel, held_numel, by_bucket, overlapped
    ):
        hops = Hops(position, spread)
        for index in indices:
            hops.add(index, plan[index])
        schedule.append(
            MicroGroup(
                indices=indices,
                held=tuple(i for i in indices if plan[i].owned.range_on(position.dp, position.tp)),
                in_row=tuple(i for i in indices if plan[i].home.dp == position.dp),
                to_row=over_data(hops.to_row),
                to_home=over_tensor(hops.to_home),
                from_home=over_tensor(hops.from_home),
                from_row=over_data(hops.from_row),
            )
        )
    return schedule


def micro_groups_of(
    plan: Sequence[PlannedMatrix],
    tp_size: int,
    spread: Spread,
    budget_numel: int,
    held_numel: int | None = None,
    by_bucket: bool = False,
    overlapped: bool = False,
) -> list[tuple[int, ...]]:
    """Return the micro-groups of :func:`make_schedule`, whose arguments these are."""
    share = stages_of(plan, tp_size, spread).share if overlapped else 1
    held_numel = budget_numel if held_numel is None else held_numel
    return cut_into_micro_groups(
        plan, tp_size, spread, budget_numel // share, held_numel // share, by_bucket
    )


def overlaps(
    plan: Sequence[PlannedMatrix],
    tp_size: int,
    spread: Spread,
    budget_numel: int,
    held_numel: int | None = None,
    by_bucket: bool = False,
) -> bool:
    """Whether micro-groups overlap: there are several, and the budget has room for those under way.

    Where it has not, one after the other takes the least memory: twice what the largest matrix has.

    Args:
        plan: See :func:`make_schedule`, like the others.
        tp_size: Ranks of a row.
        spread: Where Newton-Schulz runs.
        budget_numel: Elements that a rank may send and receive in one collective.
        held_numel: Elements that a rank may hold to work on at a time.
        by_bucket: Whether all matrices of a bucket are done before those of the next.
    """
    held_numel = budget_numel if held_numel is None else held_numel
    moved, held = room_to_overlap(plan, tp_size, spread)
    if not 0 < moved <= budget_numel or held > held_numel:
        return False
    groups = cut_into_micro_groups(plan, tp_size, spread, budget_numel, held_numel, by_bucket)
    return len(groups) > 1


def room_to_overlap(plan: Sequence[PlannedMatrix], tp_size: int, spread: Spread) -> tuple[int, int]:
    """Return the budgets, in elements moved and held, that micro-groups need to overlap.

    Each of those under way then has room for the largest matrix of every home. 0 if nothing moves.

    Args:
        plan: The matrices of the grid.
        tp_size: Ranks of a row.
        spread: Where Newton-Schulz runs.
    """
    costs = (_cost_of_all(bundle, tp_size, spread) for bundle in _bundles(plan))
    needs = _needs(costs, tp_size, spread)
    share = stages_of(plan, tp_size, spread).share
    moved = max(needs["row"], needs["home"]) if share > 1 else 0
    return share * moved, share * max(needs["held"], needs["read"])


def stages_of(plan: Sequence[PlannedMatrix], tp_size: int, spread: Spread) -> Stages:
    """Return the hops that the micro-groups of a grid have, the same on every rank.

    Args:
        plan: The matrices of the grid.
        tp_size: Ranks of a row.
        spread: Where Newton-Schulz runs.
    """
    gathers = spread.whole and tp_size > 1
    return Stages(
        to_row=any(
            piece.rank != planned.home.dp for planned in plan for piece in planned.owned.pieces
        ),
        to_home=gathers and any(planned.matrix.is_cut for planned in plan),
        from_home=gathers and not spread.everywhere and bool(plan),
    )


def cut_into_micro_groups(
    plan: Sequence[PlannedMatrix],
    tp_size: int,
    spread: Spread,
    budget_numel: int,
    held_numel: int | None = None,
    by_bucket: bool = False,
) -> list[tuple[int, ...]]:
    """Cut the matrices into runs that every rank of the grid works on at the same time.

    Homes take turns, so that each has work in every run as long as it has matrices left. A run ends
    before a rank would read, hold what it works on, or send and receive in one hop beyond the
    budget, or beyond what every home needs for the largest matrix if that is more: however small
    the budget, homes do not wait for another to be done, but where one rank has pieces of several
    homes' matrices, and at the end of a bucket. The parts of a shared matrix are in one run.

    Args:
        plan: The matrices of the grid, ordered by name; parts in the place of shared ones.
        tp_size: Ranks of a row.
        spread: Where Newton-Schulz runs.
        budget_numel: Elements that a rank may send and receive in one hop.
        held_numel: Elements that a rank may hold at a time, as many if ``None``.
        by_bucket: Whether all matrices of a bucket come before those of the next.
    """
    order = _in_turns(plan, spread, by_bucket)
    costs = [_cost_of_all((plan[i] for i in together), tp_size, spread) for together in order]
    held_numel = budget_numel if held_numel is None else held_numel
    limits = {"read": held_numel, "held": held_numel, "row": budget_numel, "home": budget_numel}
    for kind, needed in _needs(costs, tp_size, spread).items():
        limits[kind] = max(limits[kind], needed)
    groups: list[tuple[int, ...]] = []
    run: list[int] = []
    load: _Cost = Counter()
    for together, cost in zip(order, costs, strict=True):
        if run and any(load[place] + numel > limits[place[0]] for place, numel in cost.items()):
            groups.append(tuple(run))
            run = []
            load.clear()
        run.extend(together)
        load.update(cost)
    if run:
        groups.append(tuple(run))
    return groups


_Cost = Counter[tuple[str, int, int]]
"""Elements by kind (read and sent away, held to work on, moved in a hop over the data-parallel or
over the tensor-parallel group) and rank."""


def _needs(costs: Iterable[_Cost], tp_size: int, spread: Spread) -> dict[str, int]:
    """Return what a rank needs, by kind, where every home has the costliest matrix at a time.

    A home that receives its own matrix sends as much of the others', and has read it too; a
    data-parallel rank moves its shards for every home of its row.
    """
    most = Counter[str]()
    for cost in costs:
        for (kind, *_), numel in cost.items():
            most[kind] = max(most[kind], numel)
    homes_in_row = 1 if spread.everywhere else tp_size
    return {
        "read": max(most["read"], 2 * most["held"]),
        "held": most["held"],
        "row": 2 * homes_in_row * most["row"],
        "home": 2 * most["home"],
    }


def _cost_of_all(together: Iterable[PlannedMatrix], tp_size: int, spread: Spread) -> _Cost:
    cost: _Cost = Counter()
    for planned in together:
        cost.update(_cost(planned, tp_size, spread))
    return cost


def _bundles(plan: Sequence[PlannedMatrix]) -> Iterator[Sequence[PlannedMatrix]]:
    """Yield each matrix alone, and all parts of a shared one together."""
    for index, planned in enumerate(plan):
        if not isinstance(planned, PlannedPart):
            yield (planned,)
        elif planned.number == 0:
            yield plan[index : index + planned.count]


def _in_turns(
    plan: Sequence[PlannedMatrix], spread: Spread, by_bucket: bool
) -> list[tuple[int, ...]]:
    """Order the matrices: the costliest of each home, then the second of each, and so on.

    Where every rank of a row works, the row is the home. The parts of a matrix come together, at
    the latest turn of their homes. Buckets are taken in the order in which a forward pass needs
    them: Megatron numbers those of a buffer from the last layer on.
    """
    turn: Counter[tuple[int, int, int, int]] = Counter()
    order = []
    for index in sorted(range(len(plan)), key=lambda i: (-plan[i].flops, plan[i].matrix.name)):
        planned = plan[index]
        together: tuple[int, ...] = (index,)
        if isinstance(planned, PlannedPart):
            if planned.number:
                continue  # it came with the first part
            together = tuple(range(index, index + planned.count))
        owned = planned.owned
        bucket = (owned.buffer_idx, -owned.bucket_idx) if by_bucket else (0, 0)
        homes = (plan[i].home for i in together)
        places = [(*bucket, home.dp, 0 if spread.everywhere else home.tp) for home in homes]
        now = max(turn[place] for place in places)
        order.append((*bucket, now, *places[0], together))
        for place in places:
            turn[place] = now + 1
    return [together for *_, together in sorted(order)]


def _cost(planned: PlannedMatrix, tp_size: int, spread: Spread) -> _Cost:
    """Return the elements a matrix adds to each rank: held to work on, and moved in either hop."""
    matrix, home = planned.matrix, planned.home
    cost: _Cost = Counter()
    for tp in range(tp_size) if spread.everywhere else [home.tp]:
        cost["held", home.dp, tp] = matrix.numel if spread.whole else matrix.local_numel
    if isinstance(planned, PlannedPart):  # all parts of a run are in the making at a time
        cost["held", home.dp, home.tp] += (
            _GRAMS_IN_THE_MAKING * min(planned.whole.matrix.shape) ** 2
        )
    held = [matrix.held_numel(tp) for tp in range(tp_size)]
    for rank, start, end in planned.owned.spans():
        is_away = rank != home.dp
        for tp in range(tp_size):
            numel = min(end, held[tp]) - min(start, held[tp])
            cost["read", rank, tp] += numel * (1 + is_away)  # what is sent lies beside it
            if is_away:
                cost["row", rank, tp] += numel
                cost["row", home.dp, tp] += numel
    if not spread.whole:
        return cost
    if spread.everywhere:  # each rank sends its shard to all others
        if matrix.is_cut:
            for tp in range(tp_size):
                cost["home", home.dp, tp] = (tp_size - 2) * held[tp] + sum(held)
        return cost
    for tp in range(tp_size):
        cost["home", home.dp, tp] = sum(held) - held[tp] if tp == home.tp else held[tp]
    return cost


class Hops:
    """Collects the transfers that one rank's groups make for a micro-group.

    Attributes:
        to_row: Pieces to shards, over the data-parallel group.
        to_home: Shards to the whole, over the tensor-parallel group.
        from_home: The update to its shards.
        from_row: Shards to pieces.
    """

    def __init__(self, position: Position, spread: Spread) -> None:
        """Collect for the groups of a rank.

        Args:
            position: The rank.
            spread: Where Newton-Schulz runs.
        """
        self._at, self._spread = position, spread
        self.to_row: list[Transfer] = []
        self.to_home: list[Transfer] = []
        self.from_home: list[Transfer] = []
        self.from_row: list[Transfer] = []

    def add(self, index: int, planned: PlannedMatrix) -> None:
        """Add the transfers of one matrix, by its place in the plan."""
        self.add_over_data(index, planned)
        self.add_over_tensor(index, planned)

    def add_over_data(self, index: int, planned: PlannedMatrix) -> None:
        """Add those over the rank's data-parallel group alone."""
        at, home = self._at, planned.home
        is_cut = planned.matrix.is_cut
        one_copy = not is_cut and not self._spread.everywhere
        for piece in planned.owned.pieces:
            if piece.rank == home.dp:
                continue
            shard = at.tp if is_cut else 0
            range_ = planned.owned.held_range(piece, at.tp)
            if not one_copy or at.tp == home.tp:
                self.to_row.append(Transfer(index, shard, range_, piece.rank, home.dp))
            self.from_row.append(Transfer(index, shard, range_, home.dp, piece.rank))

    def add_over_tensor(self, index: int, planned: PlannedMatrix) -> None:
        """Add those over the rank's tensor-parallel group alone."""
        if self._at.dp != planned.home.dp or not self._spread.whole:
            return
        ranks, home = range(self._at.tp_size), planned.home.tp
        is_cut = planned.matrix.is_cut
        held = [ParamRange(0, planned.matrix.held_numel(tp)) for tp in ranks]
        targets = ranks if self._spread.everywhere else [home]
        if is_cut:
            self.to_home += [
                Transfer(index, tp, held[tp], tp, target)
                for target in targets
                for tp in ranks
                if tp != target
            ]
        if not self._spread.everywhere:
            self.from_home += [
                Transfer(index, tp if is_cut else 0, held[tp], home, tp)
                for tp in ranks
                if tp != home
            ]


def cut_into_rounds(
    transfers: Iterable[Transfer], budget_numel: int
) -> tuple[tuple[Transfer, ...], ...]:
    """Cut the transfers of one hop into rounds within the budget.

    A transfer that does not fit is cut; what is left of it waits for the next round, while later
    ones that fit still go.

    Args:
        transfers: All transfers of the group, the same on every rank.
        budget_numel: Elements that a rank may send and receive together in a round, at least 2.

    Returns:
        The transfers of each round.
    """
    waiting = [transfer for transfer in transfers if transfer.range.numel]
    rounds: list[tuple[Transfer, ...]] = []
    while waiting:
        moved: Counter[int] = Counter()
        going: list[Transfer] = []
        left: list[Transfer] = []
        for transfer in waiting:
            free = budget_numel - max(moved[transfer.src], moved[transfer.dst])
            now, later = _split(transfer, free)
            going += now
            left += later
            for part in now:
                moved[transfer.src] += part.range.numel
                moved[transfer.dst] += part.range.numel
        rounds.append(tuple(going))
        waiting = left
    return tuple(rounds)


def round_of(transfers: Sequence[Transfer], rank: int, size: int) -> Round:
    """Return a rank's part in a round.

    Args:
        transfers: All transfers of the round.
        rank: The rank.
        size: Ranks of the group.
    """
    outgoing = sorted((t for t in transfers if t.src == rank), key=lambda t: t.dst)
    incoming = sorted((t for t in transfers if t.dst == rank), key=lambda t: t.src)
    sent, received = [0] * size, [0] * size
    for transfer in outgoing:
        sent[transfer.dst] += transfer.range.numel
    for transfer in incoming:
        received[transfer.src] += transfer.range.numel
    return Round(
        outgoing=tuple(outgoing),
        incoming=tuple(incoming),
        sent=tuple(sent),
        received=tuple(received),
    )


def _split(transfer: Transfer, numel: int) -> Iterator[list[Transfer]]:
    """Yield what goes now, at most ``numel`` elements, and what is left."""
    if numel <= 0:
        yield from ([], [transfer])
    elif transfer.range.numel <= numel:
        yield from ([transfer], [])
    else:
        start, end = transfer.range.start, transfer.range.end
        middle = start + numel
        for low, high in ((start, middle), (middle, end)):
            yield [
                Transfer(
                    transfer.index, transfer.shard, ParamRange(low, high), transfer.src,
                    transfer.dst,
                )
            ]  # fmt: skip
