"""What one rank may do wrong in ``enable_distributed_mode``, and what all ranks are told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.unit_tests.flat_job import Local, Result, Scenario, make_groups, options, run_grid


@dataclass
class Arguments:
    """What one rank gives to ``enable_distributed_mode``; a case changes it in place."""

    groups: list[dict[str, Any]]
    sizes: list[list[tuple[int, int]]]
    metas: dict[torch.Tensor, Any]
    exchange: Any = "homes"
    budget_nbytes: int = 64 * 2**20

    @property
    def first(self) -> torch.Tensor:
        return self.groups[0]["params"][0]

    def change(self, **fields: Any) -> None:
        """Change the record of the first shard."""
        from megatron_muon import MuonDistMeta

        old = self.metas[self.first]
        names = ("buffer_idx", "bucket_idx", "shape", "global_range", "tp_split_dim")
        self.metas[self.first] = MuonDistMeta(
            **({name: getattr(old, name) for name in names} | fields)
        )


def _drop_record(arguments: Arguments) -> None:
    del arguments.metas[arguments.first]


def _drop_shard(arguments: Arguments) -> None:
    del arguments.groups[0]


def _shorten_shard(arguments: Arguments) -> None:
    meta = arguments.metas.pop(arguments.first)
    shorter = torch.nn.Parameter(arguments.first.detach()[:-1].clone())
    arguments.groups[0]["params"] = [shorter]
    arguments.metas[shorter] = meta


def _shift(arguments: Arguments) -> None:
    start, end = arguments.metas[arguments.first].global_range
    arguments.change(global_range=(start - 1, end - 1))


def _other_split(arguments: Arguments) -> None:
    arguments.change(tp_split_dim=0 if arguments.metas[arguments.first].tp_split_dim == 1 else 1)


def _no_matrix(arguments: Arguments) -> None:
    arguments.change(shape=(1, *arguments.metas[arguments.first].shape))


def _far_range(arguments: Arguments) -> None:
    start, end = arguments.metas[arguments.first].global_range
    arguments.change(global_range=(start + 10**6, end + 10**6))


def _twice(arguments: Arguments) -> None:
    twin = torch.nn.Parameter(arguments.first.detach().clone())
    arguments.metas[twin] = arguments.metas[arguments.first]
    arguments.groups[0]["params"].append(twin)


def _uneven(arguments: Arguments) -> None:
    (size, offset), *rest = arguments.sizes[0]
    arguments.sizes[0] = [(size + 1, offset), *rest]


def _larger(arguments: Arguments) -> None:
    *rest, (size, offset) = arguments.sizes[1]
    arguments.sizes[1] = [*rest, (2 * size, offset)]


def _set(**values: Any) -> Callable[[Arguments], None]:
    def change(arguments: Arguments) -> None:
        for name, value in values.items():
            setattr(arguments, name, value)

    return change


REFUSALS: dict[str, tuple[Callable[[Arguments], None], str]] = {
    "uneven bucket": (_uneven, "bucket 0 of buffer 0 .* no multiple of the 2 ranks"),
    "other sizes": (_larger, "was given .*global_buffer_sizes"),
    "no record": (_drop_record, "no MuonDistMeta"),
    "wrong size": (_shorten_shard, r"the shard has \d+ elements"),
    "other split": (_other_split, "two records of one matrix"),
    "other steps": (
        lambda arguments: arguments.groups[0].update(ns_steps=4),
        "two records of one matrix",
    ),
    "missing shard": (_drop_shard, r"ranks \[0\] have it|ranks \[1\] have it|ranks \[\] have it"),
    "no matrix": (_no_matrix, "is no matrix"),
    "overlap": (_shift, "overlap|elements, this rank's slice"),
    "twice": (_twice, "two shards have a MuonDistMeta"),
    "no such buffer": (lambda arguments: arguments.change(buffer_idx=7), "has no bucket of"),
    "negative bucket": (lambda arguments: arguments.change(bucket_idx=-1), "has no bucket of"),
    "outside": (_far_range, "does not lie in its bucket"),
    "unknown exchange": (_set(exchange="all_to_all"), "exchange is 'all_to_all'"),
    "other exchange": (_set(exchange="gather"), "was given .*gather"),
    "tiny budget": (_set(budget_nbytes=63), "gather_budget_nbytes is 63"),
    "other budget": (_set(budget_nbytes=4096), "was given .*4096"),
}
"""What one rank does wrong, and what all are told."""


def refuse(name: str, rank: int) -> contextlib.AbstractContextManager[Any]:
    """Make one rank plan otherwise than the others."""
    from megatron_muon.optimizer import flat

    original = flat.make_plan

    def other_homes(owned: Any, grids: Any, num_steps: int) -> Any:
        plan = original(owned, grids, num_steps)
        size = next(iter(grids.values()))
        return replace(
            plan,
            matrices=tuple(
                replace(m, home=replace(m.home, dp=(m.home.dp + 1) % size.dp))
                for m in plan.matrices
            ),
        )

    def other_order(owned: Any, grids: Any, num_steps: int) -> Any:
        plan = original(owned, grids, num_steps)
        return replace(plan, matrices=plan.matrices[::-1])

    changes = {"other homes": other_homes, "other order": other_order}
    if name not in changes or dist.get_rank() != rank:
        return contextlib.nullcontext()
    return mock.patch.object(flat, "make_plan", changes[name])


def run_refusals(
    scenario: Scenario, cases: Sequence[tuple[str, int]], file: Path
) -> tuple[list[tuple[str, str]], Result]:
    """Give wrong arguments on one rank, case by case, and step the scenario after all of them.

    Args:
        scenario: The grid and the matrices.
        cases: Name and the global rank that is wrong.
        file: What :func:`write_expected` saved.

    Returns:
        Type and message of each error, and the last step's result.
    """
    from megatron_muon import Muon
    from megatron_muon.errors import MuonError

    groups = make_groups(scenario.dp, scenario.tp)
    assert groups is not None
    told = []
    for name, rank in cases:
        local = Local(scenario, groups[0].rank(), groups[1].rank())
        arguments = Arguments(
            local.groups(), [list(buckets) for buckets in local.sizes], local.metas
        )
        if dist.get_rank() == rank and name in REFUSALS:
            REFUSALS[name][0](arguments)
        optimizer = Muon(arguments.groups, **options(scenario))
        try:
            with refuse(name, rank):
                optimizer.enable_distributed_mode(
                    arguments.sizes, *groups, arguments.metas, exchange=arguments.exchange,
                    gather_budget_nbytes=arguments.budget_nbytes,
                )  # fmt: skip
            told.append(("", ""))
        except MuonError as error:
            told.append((type(error).__name__, str(error)))
    return told, run_grid(scenario, torch.load(file)[scenario.model], *groups)
