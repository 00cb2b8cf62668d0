"""The cases of the law: every cell of the axes, a small cover of them, and what cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from megatron_muon.testing.law.case import Case

MAX_RANKS = 8
"""Ranks that one machine starts."""

KINDS: Mapping[str, tuple[dict[str, Any], str]] = {
    "mha": ({"groups": 8, "gated": False}, r"self_attention\.linear_qkv"),
    "gqa": ({"gated": False}, r"self_attention\.linear_proj"),
    "gated": ({}, r"mlp\.linear_fc1"),
    "gated split": ({"split_gated_fc1": True}, r"mlp\.linear_fc1"),
    "heads": ({"split_heads": True}, r"self_attention\.linear_qkv"),
    "output gate": ({"output_gate": True}, r"self_attention\.linear_qkv"),
    "moe": ({"experts": 4}, r"mlp\.experts\.local_experts\.1\.linear_fc2"),
}
"""Kinds of models: fields of the case, and the matrix that is left where there is only one."""

_SCALARS = r"bias|norm|embedding|output_layer|router"

_BUCKETS = {"none": None, "small": 6000, "one matrix": 1}


def num_layers(dp: int) -> int:
    """Return layers with which equal shards cut a matrix: no border is a border of layers."""
    return 2 if dp % 3 == 0 else 3


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One cell of the matrix: a value on each axis.

    Attributes:
        tp: Tensor-parallel size.
        dp: Data-parallel size.
        layout: Layout of the matrices.
        bucket: How buckets are closed: never, at a small size, after each parameter.
        overlap: What overlaps: nothing, the gradient reduction, the parameter gather too.
        micro_batches: Micro-batches of a step.
        kind: Kind of model, of :data:`KINDS`.
        matrices: ``all``, or ``one`` where ranks outnumber them.
    """

    tp: int
    dp: int
    layout: str
    bucket: str
    overlap: str
    micro_batches: int
    kind: str
    matrices: str

    def __str__(self) -> str:
        return (
            f"TP{self.tp} DP{self.dp} {self.layout}, bucket {self.bucket}, overlap {self.overlap}, "
            f"{self.micro_batches} micro-batches, {self.kind}, {self.matrices} matrices"
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the run."""
        return self.tp * self.dp

    @property
    def why_not(self) -> str | None:
        """Why the cell cannot run, ``None`` if it can."""
        return next((reason for reason, is_hit in CANNOT_RUN.items() if is_hit(self)), None)

    def case(self) -> Case:
        """Return the run of this cell."""
        kind, matrix = KINDS[self.kind]
        is_moe = "experts" in kind
        return Case(
            tp=self.tp,
            layers=num_layers(self.dp),
            layout=self.layout,
            bucket_size=_BUCKETS[self.bucket],
            overlap_grad=self.overlap != "none",
            overlap_param=self.overlap == "grad and param",
            micro_batches=self.micro_batches,
            trained=rf"layers\.0\.{matrix}\.weight|{_SCALARS}" if self.matrices == "one" else None,
            ep=2 if is_moe and self.dp % 2 == 0 else 1,
            bias=not is_moe or self.tp == 1,
            **kind,
        )

    def one_process(self) -> Case:
        """Return the run of the same model on one process."""
        return replace(
            self.case(), tp=1, ep=1, layout="owner", bucket_size=None, overlap_grad=False,
            overlap_param=False, micro_batches=1,
        )  # fmt: skip


AXES: Mapping[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "dp": (1, 2, 3, 4),
    "layout": ("owner", "flat"),
    "bucket": tuple(_BUCKETS),
    "overlap": ("none", "grad", "grad and param"),
    "micro_batches": (1, 4),
    "kind": tuple(KINDS),
    "matrices": ("all", "one"),
}
"""Every axis and its values."""

TRIPLES = (
    ("tp", "dp", "layout"),
    ("dp", "layout", "matrices"),
    ("tp", "layout", "kind"),
    ("dp", "layout", "kind"),
    ("layout", "bucket", "overlap"),
    ("layout", "overlap", "micro_batches"),
)
"""Axes whose values are all tried together also in the small cover."""

CANNOT_RUN: Mapping[str, Callable[[Cell], bool]] = {
    f"more than {MAX_RANKS} ranks are too many for one machine": (
        lambda cell: cell.num_ranks > MAX_RANKS
    ),
    "Megatron makes one bucket where reduction does not overlap": (
        lambda cell: cell.overlap == "none" and cell.bucket != "none"
    ),
}
"""Why some cells cannot run, and which."""

REFUSED: Mapping[str, tuple[int, Case, str]] = {
    "MoE trains with tensor parallelism": (
        2,
        Case(tp=2, experts=4, bias=False, backward=True),
        "without also enabling sequence parallelism",
    ),
    "biases of experts that are cut": (
        2, Case(tp=2, experts=4), "Bias in Moe is only supported when ETP==1",
    ),
    "heads without qkv": (
        2, Case(split_heads=True, split_qkv=False), "--muon-split-heads has no effect",
    ),
    "query groups that shards cut, shard by shard": (
        4, Case(tp=4, tp_mode="distributed"), "cannot be cut over 4",
    ),
    "query groups that shards cut, blockwise": (
        4, Case(tp=4, tp_mode="blockwise"), "cannot be cut over 4",
    ),
    "exchange dtype where nothing is exchanged": (
        2, Case(tp=2, tp_mode="blockwise", exchange_dtype="bf16"),
        "--muon-exchange-dtype bf16 has no effect",
    ),
    "no matrix left": (
        2, Case(exclude="*linear_*.weight"), "none of the model's",
    ),
}  # fmt: skip
"""Other runs that cannot be, with their ranks and what is said of each."""


def cells() -> Iterator[Cell]:
    """Yield every cell of the axes, also those that cannot run."""
    for values in product(*AXES.values()):
        yield Cell(**dict(zip(AXES, values, strict=True)))


def runnable() -> list[Cell]:
    """Return every cell that can run."""
    return [cell for cell in cells() if cell.why_not is None]


def combined(cell: Cell) -> frozenset[tuple[tuple[str, Any], ...]]:
    """Return every two values that a cell has together, and three of each of :data:`TRIPLES`."""
    axes = [*combinations(AXES, 2), *TRIPLES]
    return frozenset(tuple((axis, getattr(cell, axis)) for axis in names) for names in axes)


def cover(candidates: Sequence[Cell]) -> list[Cell]:
    """Return a few cells that have all values together that matter together.

    These are every two values that some candidate has, and every three on the axes of
    :data:`TRIPLES`. Greedy: each next cell has the most that none before it has, and of those with
    as many the one with the fewest ranks is taken. The result depends on the candidates alone.
    """
    has = {cell: combined(cell) for cell in candidates}
    missing = set().union(*has.values())
    chosen: list[Cell] = []
    while missing:
        best = max(candidates, key=lambda cell: (len(has[cell] & missing), -cell.num_ranks))
        chosen.append(best)
        missing -= has[best]
    return chosen


def by_ranks(cells: Iterable[Cell]) -> dict[int, list[Cell]]:
    """Return the cells of each number of ranks."""
    found: dict[int, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.num_ranks, []).append(cell)
    return found
