"""One rank's part of the tests of the flat ``Muon``, and what one process must end with."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.unit_tests.flat_mutants import broken

LR, DECAY, MOMENTUM, RMS = 0.1, 0.1, 0.9, 0.2

type Shape = tuple[tuple[int, int], int]
"""Shape of a whole matrix and the dimension that tensor parallelism cuts, -1 for none."""

# Shapes and tensor-parallel dimensions of Megatron-LM #1428's own test.
LARGE: tuple[Shape, ...] = (
    ((100, 100), 0),
    ((124, 324), 1),
    ((456, 124), -1),
    ((676, 876), 1),
    ((128, 128), 0),
)
# Every dimension that is cut divides by 2 and by 4.
ODD: tuple[Shape, ...] = (
    ((12, 7), 0),
    ((3, 20), 1),
    ((1, 9), -1),
    ((11, 1), -1),
    ((28, 44), 0),
    ((13, 36), 1),
    ((5, 5), -1),
    ((8, 3), 0),
)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The matrices of one bucket, and the elements before each and after the last no one uses."""

    buffer: int
    members: tuple[int, ...]
    gap: int = 3
    tail: int = 1


ODD_BUCKETS = (
    Bucket(buffer=0, members=(0, 1, 2)),
    Bucket(buffer=0, members=(3, 4)),
    Bucket(buffer=1, members=(5, 6)),
    Bucket(buffer=1, members=(7,)),
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model, how it lies in buffers, and how it is stepped.

    Attributes:
        adamw: Matrices that AdamW steps, by place in ``shapes``.
        without_gradient: Matrix and step of a gradient that is missing.
        reversed_on_rank: Global rank whose parameters are in reversed order.
        mutant: What is broken, see :mod:`flat_mutants`.
    """

    shapes: tuple[Shape, ...]
    buckets: tuple[Bucket, ...]
    dp: int
    tp: int
    exchange: str = "homes"
    budget_nbytes: int = 64 * 2**20
    ns_steps: tuple[int, ...] = (5,)
    nesterov: bool = True
    adamw: tuple[int, ...] = ()
    without_gradient: tuple[int, int] | None = None
    reversed_on_rank: int | None = None
    mutant: str | None = None
    steps: int = 10

    @property
    def model(self) -> tuple[object, ...]:
        """What the result on one process depends on."""
        return (
            self.shapes, self.ns_steps, self.nesterov, self.adamw, self.without_gradient, self.steps
        )  # fmt: skip

    def local_shape(self, index: int) -> tuple[int, int]:
        (rows, columns), dim = self.shapes[index]
        return (
            (rows // self.tp, columns) if dim == 0
            else (rows, columns // self.tp) if dim == 1 else (rows, columns)
        )  # fmt: skip

    def group(self, index: int, param: torch.nn.Parameter) -> dict[str, Any]:
        """The parameter group of one matrix."""
        steps = self.ns_steps[index % len(self.ns_steps)]
        return {"params": [param], "use_muon": index not in self.adamw, "ns_steps": steps}


@dataclass
class Result:
    """What one rank saw.

    Attributes:
        wrong: Where this rank differs from one process.
        error: Largest relative error of the update of one of its pieces in one step.
        num_pieces: Its pieces of matrices.
        num_straddling: Those that are not all of a matrix's shard.
        padding_numel: Elements of its buffers that no matrix uses.
        calls: Newton-Schulz calls of each step.
        flops: Of all steps.
        collectives: Of each step.
        largest_nbytes: Most bytes sent and received in one collective.
        received_nbytes: Bytes received from other ranks in all steps.
        lingering_nbytes: Scratch that is left when the optimizer has been closed.
    """

    wrong: list[str] = field(default_factory=list)
    error: float = 0.0
    num_pieces: int = 0
    num_straddling: int = 0
    padding_numel: int = 0
    calls: list[int] = field(default_factory=list)
    flops: int = 0
    collectives: list[int] = field(default_factory=list)
    largest_nbytes: int = 0
    received_nbytes: int = 0
    lingering_nbytes: int = -1


def odd_model(seed: int, tp: int, num: int = 12) -> tuple[tuple[Shape, ...], tuple[Bucket, ...]]:
    """Return random shapes in several buckets of two buffers."""
    rng = random.Random(seed)
    shapes: list[Shape] = []
    for _ in range(num):
        dim = rng.choice([-1, 0, 1])
        shape = [rng.randint(1, 30), rng.randint(1, 30)]
        if dim >= 0:
            shape[dim] = tp * rng.randint(1, 9)
        shapes.append(((shape[0], shape[1]), dim))
    places = [(rng.randint(0, 1), rng.randint(0, 1)) for _ in range(num)]
    buckets = [
        Bucket(
            buffer=place[0], members=tuple(i for i in range(num) if places[i] == place),
            gap=rng.randint(0, 4), tail=rng.randint(0, 9),
        )
        for place in sorted(set(places))
    ]  # fmt: skip
    return tuple(shapes), tuple(buckets)


def draw(*key: int, shape: tuple[int, int]) -> torch.Tensor:
    seed = sum(value * 1009**place for place, value in enumerate(key)) + 17
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(scenario: Scenario, index: int) -> torch.Tensor:
    return draw(0, index, shape=scenario.shapes[index][0])


def gradient(scenario: Scenario, index: int, step: int) -> torch.Tensor | None:
    """Gradients grow from step to step, so that an old momentum is not the new one."""
    if scenario.without_gradient == (index, step):
        return None
    return draw(1, index, step, shape=scenario.shapes[index][0]) * 2.0 ** (step - 5)


def options(scenario: Scenario) -> dict[str, Any]:
    return {
        "lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "nesterov": scenario.nesterov,
        "matched_adamw_rms": RMS,
    }  # fmt: skip


def one_process(scenario: Scenario) -> list[list[torch.Tensor]]:
    """Return every weight before the first and after every step of the undistributed optimizer."""
    from megatron_muon import Muon

    params = [torch.nn.Parameter(weight(scenario, i)) for i in range(len(scenario.shapes))]
    optimizer = Muon(
        [scenario.group(i, param) for i, param in enumerate(params)], **options(scenario)
    )
    states = [[param.detach().clone() for param in params]]
    for step in range(scenario.steps):
        for i, param in enumerate(params):
            param.grad = gradient(scenario, i, step)
        optimizer.step()
        states.append([param.detach().clone() for param in params])
    return states


def write_expected(scenarios: Sequence[Scenario], file: Path) -> None:
    """Save what :func:`one_process` returns for each model; in one process of one thread."""
    torch.save(
        {model: one_process(s) for model, s in {s.model: s for s in scenarios}.items()}, file
    )


def oracle_update(scenario: Scenario, index: int) -> torch.Tensor:
    """Return what the last step takes from a weight besides decay, in fp64, from the papers."""
    momentum = torch.zeros(scenario.shapes[index][0], dtype=torch.float64)
    x = momentum
    for step in range(scenario.steps):
        grad = gradient(scenario, index, step)
        assert grad is not None
        momentum = MOMENTUM * momentum + grad.double()
        x = grad.double() + MOMENTUM * momentum if scenario.nesterov else momentum
    flip = x.shape[0] > x.shape[1]
    x = (x.T if flip else x) / x.norm()
    for _ in range(scenario.ns_steps[index % len(scenario.ns_steps)]):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return LR * RMS * math.sqrt(max(x.shape)) * (x.T if flip else x)


def shard(whole: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    return whole if dim == -1 else whole.chunk(size, dim)[rank].contiguous()


def run(scenarios: Sequence[Scenario], file: Path) -> list[Result]:
    """Run scenarios one after the other; ranks that a grid does not use stay out of it.

    Args:
        scenarios: The scenarios.
        file: What :func:`write_expected` saved.
    """
    expected, results = torch.load(file), []
    for scenario in scenarios:
        groups = make_groups(scenario.dp, scenario.tp)
        results.append(
            Result() if groups is None else run_grid(scenario, expected[scenario.model], *groups)
        )
        dist.barrier()
    return results


def make_groups(dp: int, tp: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """Make the data and tensor parallel groups; tensor ranks are neighbours, as in Megatron."""
    mine: list[dist.ProcessGroup | None] = [None, None]
    grid = [[d * tp + t for t in range(tp)] for d in range(dp)]
    for kind, lists in ((0, zip(*grid, strict=True)), (1, grid)):
        for ranks in lists:
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                mine[kind] = group
    dp_group, tp_group = mine
    return None if dp_group is None or tp_group is None else (dp_group, tp_group)


class Local:
    """One rank's buffers, with NaN wherever no matrix lies, and its pieces in them.

    Attributes:
        sizes: ``(size, offset)`` by buffer and bucket.
        pieces: For each matrix the parameter and its range of the tensor-parallel shard.
        metas: Their records.
    """

    def __init__(self, scenario: Scenario, dp: int, tp: int) -> None:
        from megatron_muon import MuonDistMeta

        self.scenario, self.tp = scenario, tp
        self.sizes: list[list[tuple[int, int]]] = [[], []]
        self.pieces: dict[int, tuple[torch.nn.Parameter, int, int]] = {}
        self.metas: dict[torch.Tensor, MuonDistMeta] = {}
        self.num_straddling = self.padding_numel = 0
        self._buckets: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._grads: dict[int, torch.Tensor] = {}
        for bucket in scenario.buckets:
            self._lay_out(bucket, dp)

    def _lay_out(self, bucket: Bucket, dp: int) -> None:
        from megatron_muon import MuonDistMeta

        scenario, buckets = self.scenario, self.sizes[bucket.buffer]
        offset = cursor = sum(buckets[-1]) if buckets else 0
        ranges = {}
        for i in bucket.members:
            start = cursor + bucket.gap
            cursor = start + math.prod(scenario.local_shape(i))
            ranges[i] = start, cursor
        numel = -(-(cursor + bucket.tail - offset) // scenario.dp)
        buckets.append((numel * scenario.dp, offset))
        weights, grads = torch.full((numel,), torch.nan), torch.full((numel,), torch.nan)
        used = torch.zeros(numel, dtype=torch.bool)
        self._buckets.append((weights, grads, used))
        first = offset + dp * numel
        for i, (start, end) in ranges.items():
            low, high = max(start, first), min(end, first + numel)
            if low >= high:
                continue
            here = slice(low - first, high - first)
            used[here] = True
            param = torch.nn.Parameter(weights[here])
            self.pieces[i] = param, low - start, high - start
            param.data.copy_(self.cut(i, weight(scenario, i)))
            self._grads[i] = grads[here]
            self.metas[param] = MuonDistMeta(
                bucket.buffer, len(buckets) - 1, scenario.local_shape(i), (start, end),
                scenario.shapes[i][1],
            )  # fmt: skip
            self.num_straddling += (low, high) != (start, end)
        self.padding_numel += int((~used).sum())

    def cut(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of a whole matrix."""
        _, low, high = self.pieces[index]
        return shard(whole, self.scenario.shapes[index][1], self.tp, self.scenario.tp).reshape(-1)[
            low:high
        ]

    def groups(self, is_reversed: bool = False) -> list[dict[str, Any]]:
        """The parameter groups; a rank without a piece has an empty one."""
        order = sorted(self.pieces, reverse=is_reversed)
        groups = [self.scenario.group(i, self.pieces[i][0]) for i in order]
        return groups or [{"params": [], "use_muon": True}]

    def set_gradients(self, step: int) -> None:
        for i, (param, _, _) in self.pieces.items():
            whole = gradient(self.scenario, i, step)
            param.grad = None if whole is None else self._grads[i].copy_(self.cut(i, whole))

    def compare(
        self, result: Result, step: int, before: list[torch.Tensor], after: list[torch.Tensor]
    ) -> None:
        """Compare every piece with one process."""
        for i, (param, _, _) in self.pieces.items():
            want = self.cut(i, after[i])
            if not torch.equal(param.detach(), want):
                result.wrong.append(f"matrix {i} after step {step}")
                size = (want - self.cut(i, before[i])).norm()
                error = float((param.detach() - want).norm() / size)
                result.error = max(result.error, math.inf if math.isnan(error) else error)
        for number, (weights, _, used) in enumerate(self._buckets):
            if not weights[~used].isnan().all():
                result.wrong.append(f"padding of bucket {number} after step {step}")
            if weights[used].isnan().any():
                result.wrong.append(f"NaN in bucket {number} after step {step}")


def run_grid(
    scenario: Scenario,
    expected: list[list[torch.Tensor]],
    dp_group: dist.ProcessGroup,
    tp_group: dist.ProcessGroup,
) -> Result:
    """Step one scenario on this rank of its grid, and compare with one process all the way."""
    from megatron_muon import Muon

    dp, tp = dp_group.rank(), tp_group.rank()
    local = Local(scenario, dp, tp)
    result = Result(
        num_pieces=len(local.pieces), num_straddling=local.num_straddling,
        padding_numel=local.padding_numel,
    )  # fmt: skip
    optimizer = Muon(
        local.groups(scenario.reversed_on_rank == dist.get_rank()), **options(scenario)
    )
    optimizer.enable_distributed_mode(
        local.sizes, dp_group, tp_group, local.metas,
        exchange=scenario.exchange, gather_budget_nbytes=scenario.budget_nbytes,
    )  # fmt: skip
    with broken(scenario.mutant, dp):
        for step in range(scenario.steps):
            local.set_gradients(step)
            with _watched(result):
                optimizer.step()
            account = optimizer.account
            result.calls.append(account.newton_schulz_calls)
            result.flops += account.newton_schulz_flops
            if account.traffic.calls != result.collectives[-1]:
                result.wrong.append(f"count of collectives in step {step}")
            result.received_nbytes += account.traffic.nbytes
            local.compare(result, step, expected[step], expected[step + 1])
            if step == 0:
                # A closed optimizer takes new scratch, one that has loaded its state goes on.
                optimizer.close()
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.close()
    optimizer.close()
    result.lingering_nbytes = optimizer.arena.cached_nbytes + optimizer.arena.lent_nbytes
    return result


@contextlib.contextmanager
def _watched(result: Result) -> Iterator[None]:
    """See every collective of torch.distributed: what a rank sends and receives in it."""
    result.collectives.append(0)

    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
            assert len(tensors) == 2
            nbytes = sum(t.numel() * t.element_size() for t in tensors)
            result.collectives[-1] += 1
            result.largest_nbytes = max(result.largest_nbytes, nbytes)
            return original(*args, **kwargs)

        return call

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective that nobody counts")

    counted = "all_to_all_single", "all_gather_into_tensor"
    others = (
        "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast",
        "broadcast_object_list", "gather", "recv", "reduce", "reduce_scatter_tensor", "scatter",
        "send",
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name in counted:
            stack.enter_context(mock.patch.object(dist, name, watch(getattr(dist, name))))
        for name in others:
            stack.enter_context(mock.patch.object(dist, name, refuse))
        yield
