"""What one rank may do wrong in ``enable_distributed_mode``, and what all ranks are told."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
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
    sizes: Any
    metas: Any
    exchange: Any = "homes"
    budget_nbytes: Any = 64 * 2**20

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
    "other rate": (
        lambda arguments: arguments.groups[0].update(lr=0.5),
        "two records of one matrix",
    ),
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
    "no exchange": (_set(exchange=[lambda: None]), "exchange is .*expected homes or gather"),
    "fractional budget": (_set(budget_nbytes=4096.5), "gather_budget_nbytes is 4096.5"),
    "budget in words": (_set(budget_nbytes="64 MiB"), "gather_budget_nbytes is '64 MiB'"),
    "no sizes": (_set(sizes=None), "rank {rank}: TypeError: .*not iterable"),
    "sizes of three": (_set(sizes=[[(8, 0, 0)]]), "rank {rank}: ValueError: too many values"),
    "fractional sizes": (_set(sizes=[[(8.0, 0)]]), "rank {rank}: TypeError: .*integer"),
    "no records": (_set(metas=None), "rank {rank}: TypeError: .*not iterable"),
    "another record": (
        lambda arguments: arguments.metas.update({arguments.first: (0, 0)}),
        "rank {rank}: AttributeError: .*shape",
    ),
}
"""What one rank does wrong, and what all are told; ``{rank}`` is its tensor-parallel rank."""

OPTIONS = (
    "uneven bucket", "unknown exchange", "tiny budget", "no exchange", "fractional budget",
    "budget in words",
)  # fmt: skip
"""Those of which all are told by a ``ConfigurationError``."""

CAUSES = {
    "no sizes": "TypeError", "sizes of three": "ValueError", "fractional sizes": "TypeError",
    "no records": "TypeError", "another record": "AttributeError", "no plan": "KeyError",
    "no state": "KeyError", "a list": "TypeError",
}  # fmt: skip
"""What the rank that is wrong chains, where it is no error of ours."""

State = dict[str, Any]


def _change_state(state: State, **values: Any) -> None:
    state["state"][state["param_groups"][0]["params"][0]].update(values)


LOADS: dict[str, tuple[Callable[[State], object], str]] = {
    "no momentum": (
        lambda state: state["state"].clear(),
        r"rank {rank}: parameter 0 of group 0, shape \(\d+,\), has no momentum_buffer in the state",
    ),
    "momentum of another size": (
        lambda state: _change_state(state, momentum_buffer=torch.ones(1000)),
        r"has a momentum_buffer of shape \(1000,\) in the state",
    ),
    "other planned steps": (
        lambda state: state["param_groups"][0].update(ns_steps=4),
        r"ns_steps of group 0 is 4 in the state, and \d is planned for",
    ),
    "planned for AdamW": (
        lambda state: state["param_groups"][0].update(use_muon=False),
        "use_muon of group 0 is False in the state",
    ),
    "a group less": (
        lambda state: state["param_groups"].pop(),
        "the state has groups of",
    ),
    "wrong option": (lambda state: state["param_groups"][0].update(lr=-1), "lr is -1"),
    "no state": (lambda state: state.pop("param_groups"), "rank {rank}: KeyError: 'param_groups'"),
    "a list": (lambda state: state.update(param_groups=3), "rank {rank}: TypeError: "),
}
"""What one rank loads, and what all are told."""


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

    def no_plan(owned: Any, grids: Any, num_steps: int) -> Any:
        raise KeyError("no plan")

    changes = {"other homes": other_homes, "other order": other_order, "no plan": no_plan}
    if name not in changes or dist.get_rank() != rank:
        return contextlib.nullcontext()
    return mock.patch.object(flat, "make_plan", changes[name])


@dataclass(frozen=True)
class Told:
    """What one rank was told in one case.

    Attributes:
        kind: Type of the error.
        message: Its text.
        cause: Type of the error that it chains.
    """

    kind: str
    message: str
    cause: str


@contextlib.contextmanager
def _listen(told: list[Told]) -> Iterator[None]:
    from megatron_muon.errors import MuonError

    try:
        yield
        told.append(Told("", "", ""))
    except MuonError as error:
        cause = error.__cause__
        told.append(
            Told(type(error).__name__, str(error), "" if cause is None else type(cause).__name__)
        )


def run_refusals(
    scenario: Scenario, cases: Sequence[tuple[str, int]], file: Path
) -> tuple[list[Told], Result]:
    """Give wrong arguments on one rank, case by case, and step the scenario after all of them.

    Args:
        scenario: The grid and the matrices.
        cases: Name and the global rank that is wrong.
        file: What :func:`write_expected` saved.

    Returns:
        What this rank was told in each case, and the last step's result.
    """
    from megatron_muon import Muon

    groups = make_groups(scenario.dp, scenario.tp)
    assert groups is not None
    told: list[Told] = []
    for name, rank in cases:
        local = Local(scenario, groups[0].rank(), groups[1].rank())
        arguments = Arguments(
            local.groups(), [list(buckets) for buckets in local.sizes], local.metas
        )
        is_wrong = dist.get_rank() == rank
        if is_wrong and name in REFUSALS:
            REFUSALS[name][0](arguments)
        optimizer = Muon(arguments.groups, **options(scenario))
        with contextlib.nullcontext() if name in LOADS else _listen(told), refuse(name, rank):
            optimizer.enable_distributed_mode(
                arguments.sizes, *groups, arguments.metas, exchange=arguments.exchange,
                gather_budget_nbytes=arguments.budget_nbytes,
            )  # fmt: skip
        if name in LOADS:
            before = optimizer.state_dict()
            state = copy.deepcopy(before)
            if is_wrong:
                LOADS[name][0](state)
            with _listen(told):
                optimizer.load_state_dict(state)
            # Nothing was loaded anywhere.
            after = optimizer.state_dict()
            assert after["param_groups"] == before["param_groups"]
            for key, value in before["state"].items():
                assert after["state"][key]["momentum_buffer"] is value["momentum_buffer"]
        else:
            assert not optimizer.distributed_mode
    return told, run_grid(scenario, torch.load(file)[scenario.model], *groups)
