"""Muon over the matrices this rank steps, inside Megatron's mixed-precision wrapper."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz_tp
from emerging_optimizers.utils import fp32_matmul_precision

from megatron_muon.bookkeeping.matrix import LogicalBlock, LogicalMatrix
from megatron_muon.bookkeeping.plan import PlannedMatrix
from megatron_muon.collectives.exchange import ShardExchange, Traffic
from megatron_muon.collectives.shards import assemble, cut
from megatron_muon.errors import ConfigurationError, PlanError
from megatron_muon.optimizer.config import MuonSettings
from megatron_muon.orthogonalize.newton_schulz import Orthogonalization, block_rows
from megatron_muon.orthogonalize.update import advance_momentum, apply_update

MOMENTUM = "momentum_buffer"
"""State key of the momentum: the name Megatron's own Muon uses."""

MICRO_GROUP_NBYTES = 64 * 2**20
"""Matrices are exchanged and orthogonalized together up to this many bytes of local shards."""


@dataclass(slots=True)
class StepAccount:
    """What one step of this rank did, counted where it happens.

    Attributes:
        newton_schulz_calls: Blocks orthogonalized.
        newton_schulz_flops: Their flops in the standard form.
        traffic: Collectives and bytes.
        seconds: Wall-clock seconds by phase.
    """

    newton_schulz_calls: int = 0
    newton_schulz_flops: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, other: StepAccount) -> None:
        """Add what another optimizer of this rank did in the same step."""
        self.newton_schulz_calls += other.newton_schulz_calls
        self.newton_schulz_flops += other.newton_schulz_flops
        self.traffic.add(other.traffic)
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class OwnedMuon(torch.optim.Optimizer):
    """Muon over whole matrices or their tensor-parallel shards.

    Megatron's factory makes it over all matrices of the model, the layer-wise optimizer narrows it
    to those this rank owns, and the mixed-precision wrapper puts fp32 masters in their place.
    :meth:`bind` then tells it the plan.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
        settings: MuonSettings,
        tp_group: dist.ProcessGroup | None = None,
        expert_tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Make the optimizer.

        Args:
            params: Parameters or groups.
            settings: The resolved settings.
            tp_group: Tensor-parallel group of dense matrices.
            expert_tp_group: Tensor-parallel group of experts.
        """
        super().__init__(
            params,
            dict(lr=settings.lr, weight_decay=settings.weight_decay, momentum=settings.momentum),
        )
        self.settings = settings
        self.orthogonalization = Orthogonalization(
            num_steps=settings.num_ns_steps,
            coefficient_type=settings.coefficient_type,
            scale_mode=settings.scale_mode,
            extra_scale_factor=settings.extra_scale_factor,
            matmul_precision=settings.matmul_precision,
        )
        self.account = StepAccount()
        self.groups = {False: tp_group, True: expert_tp_group}
        self._bound: Mapping[torch.Tensor, PlannedMatrix] | None = None

    def bind(self, plan: Mapping[torch.nn.Parameter, PlannedMatrix]) -> None:
        """Tell which planned matrix each model parameter is, and make the momentum.

        Args:
            plan: By model parameter; the masters are found through ``param.main_param``.

        Raises:
            PlanError: A parameter is in no plan, or has another shape there.
            ConfigurationError: The tensor-parallel mode cannot step a matrix.
        """
        for planned in plan.values():  # on every rank, or those that own none would wait
            self._check(planned.matrix)
        self._bound = {getattr(p, "main_param", p): planned for p, planned in plan.items()}
        for group in self.param_groups:
            for param in group["params"]:
                planned = self._planned(param)
                if tuple(param.shape) != planned.matrix.local_shape:
                    raise PlanError(
                        f"{planned.matrix.name} has shape {tuple(param.shape)} on this rank, the "
                        f"plan expects {planned.matrix.local_shape} of {planned.matrix.shape}."
                    )
        self.init_state()

    @torch.no_grad()
    def init_state(self) -> None:
        """Make the momentum of every parameter that has none, zero, in the master's dtype."""
        for group in self.param_groups:
            for param in group["params"]:
                if MOMENTUM not in self.state[param]:
                    self.state[param][MOMENTUM] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Advance every momentum, orthogonalize, and move every master.

        A parameter without a gradient counts as one with a zero gradient: who takes part in an
        exchange must not depend on the data.

        Args:
            closure: Not supported.
        """
        if closure is not None:
            raise ConfigurationError("OwnedMuon.step(closure=...) is not supported.")
        self.account = StepAccount()
        work = self.work()
        for is_expert in (False, True):
            exchange = ShardExchange(self.groups[is_expert], self.account.traffic)
            mine = [item for item in work if item.planned.matrix.expert_tp == is_expert]
            for group in _micro_groups(mine):
                self._step_group(group, exchange)

    def _step_group(self, items: Sequence[Work], exchange: ShardExchange) -> None:
        with self.account.phase("momentum"):
            inputs = [
                advance_momentum(
                    self.state[item.param][MOMENTUM],
                    item.grad(),
                    item.group["momentum"],
                    self.settings.nesterov,
                )
                for item in items
            ]
        mode = _MODES[self.settings.tp_mode]
        updates = mode([item.planned for item in items], inputs, exchange, self)
        with self.account.phase("update"):
            for item, update in zip(items, updates, strict=True):
                apply_update(item.param, update, item.group["lr"], item.group["weight_decay"])

    def orthogonalize(self, x: torch.Tensor, blocks: Sequence[LogicalBlock]) -> torch.Tensor:
        """Orthogonalize a matrix block by block, counted."""
        with self.account.phase("newton_schulz"):
            update = self.orthogonalization.matrix(x, blocks)
        self._count(blocks, x.shape[1])
        return update

    def orthogonalize_together(
        self, x: torch.Tensor, matrix: LogicalMatrix, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Orthogonalize a shard with the other ranks of the group, which hold the rest."""
        update = torch.empty_like(x)
        settings = self.orthogonalization
        assert matrix.tp_dim is not None
        with self.account.phase("newton_schulz"), fp32_matmul_precision(settings.matmul_precision):
            for block, local in zip(matrix.blocks, local_blocks(matrix), strict=True):
                rows = block_rows(x, local)
                orthogonal = newton_schulz_tp(
                    rows.reshape(local.num_rows, -1),
                    settings.num_steps,
                    settings.coefficient_type,
                    group,
                    matrix.tp_dim,
                    "distributed",
                )
                orthogonal = orthogonal * settings.scale(block.num_rows, matrix.shape[1])
                block_rows(update, local).copy_(orthogonal.view(rows.shape))
                gram = matrix.shape[1] if matrix.tp_dim == 0 else block.num_rows
                nbytes = gram * gram * (2 if settings.matmul_precision == "medium" else 4)
                # The norm, then one Gram matrix a step.
                self.account.traffic.count_reductions(
                    1 + settings.num_steps, 4 + settings.num_steps * nbytes
                )
        self._count(local_blocks(matrix), x.shape[1])
        return update

    def _check(self, matrix: LogicalMatrix) -> None:
        """Check that the tensor-parallel group and mode fit a matrix."""
        group = self.groups[matrix.expert_tp]
        size = 1 if group is None else group.size()
        if matrix.tp_dim is not None and matrix.tp_size != size:
            raise PlanError(
                f"{matrix.name} is cut over {matrix.tp_size} ranks, the "
                f"{'expert ' if matrix.expert_tp else ''}tensor-parallel group of the optimizer "
                f"has {size}. Give the optimizer the process groups of the model."
            )
        if self.settings.tp_mode in ("distributed", "blockwise"):
            local_blocks(matrix)

    def _count(self, blocks: Sequence[LogicalBlock], num_columns: int) -> None:
        counted = LogicalMatrix("", (sum(b.num_rows for b in blocks), num_columns), tuple(blocks))
        self.account.newton_schulz_calls += len(blocks)
        self.account.newton_schulz_flops += counted.ns_flops(self.settings.num_ns_steps)

    def _planned(self, param: torch.Tensor) -> PlannedMatrix:
        if self._bound is None or param not in self._bound:
            raise PlanError(
                f"A matrix of shape {tuple(param.shape)} belongs to Muon but is in no plan. Build "
                "the optimizer with megatron.core.optimizer.get_megatron_optimizer."
            )
        return self._bound[param]

    def work(self) -> list[Work]:
        """Return this rank's parameters in the plan's order, the same on all tensor ranks."""
        work = [
            Work(self._planned(param), param, group)
            for group in self.param_groups
            for param in group["params"]
        ]
        return sorted(work, key=lambda item: item.planned.matrix.name)


@dataclass(frozen=True, slots=True)
class Work:
    """One matrix to step.

    Attributes:
        planned: Its plan.
        param: Its master.
        group: Its parameter group.
    """

    planned: PlannedMatrix
    param: torch.Tensor
    group: dict[str, Any]

    def grad(self) -> torch.Tensor:
        """Return the gradient, zero if there is none."""
        return torch.zeros_like(self.param) if self.param.grad is None else self.param.grad


def own_load(muons: Iterable[OwnedMuon]) -> tuple[int, int]:
    """Return the Newton-Schulz flops and the elements that the plan gives to this rank.

    A matrix costs its home alone in owner mode; in the other modes every tensor-parallel rank
    works on it, counted as the whole.
    """
    flops = numel = 0
    for muon in muons:
        for item in muon.work():
            group = muon.groups[item.planned.matrix.expert_tp]
            is_home = item.planned.home == (0 if group is None else group.rank())
            flops += item.planned.flops if is_home or muon.settings.tp_mode != "owner" else 0
            numel += item.param.numel()
    return flops, numel


def _micro_groups(work: Sequence[Work]) -> Iterator[list[Work]]:
    """Cut the work into runs of at most :data:`MICRO_GROUP_NBYTES`, at least one matrix each."""
    run: list[Work] = []
    nbytes = 0
    for item in work:
        size = item.planned.matrix.local_numel * item.param.element_size()
        if run and nbytes + size > MICRO_GROUP_NBYTES:
            yield run
            run, nbytes = [], 0
        run.append(item)
        nbytes += size
    if run:
        yield run


class _Mode(Protocol):
    """From the local shards of what is orthogonalized to the local shards of the updates."""

    def __call__(
        self,
        planned: Sequence[PlannedMatrix],
        inputs: Sequence[torch.Tensor],
        exchange: ShardExchange,
        muon: OwnedMuon,
    ) -> Sequence[torch.Tensor]: ...


def _at_owner(
    planned: Sequence[PlannedMatrix],
    inputs: Sequence[torch.Tensor],
    exchange: ShardExchange,
    muon: OwnedMuon,
) -> Sequence[torch.Tensor]:
    """Orthogonalize each matrix once, on its home."""
    sharded = [i for i, p in enumerate(planned) if p.matrix.tp_dim is not None]
    homes = [p.home for p in planned]
    arrived: list[list[torch.Tensor]] = [[] for _ in planned]
    with muon.account.phase("exchange"):
        if sharded:
            parts = exchange.to_homes([inputs[i] for i in sharded], [homes[i] for i in sharded])
            for i, shards in zip(sharded, parts, strict=True):
                arrived[i] = shards
    updates: list[list[torch.Tensor]] = []
    for p, own, shards in zip(planned, inputs, arrived, strict=True):
        if p.home != exchange.rank:
            updates.append([])
        elif p.matrix.tp_dim is None:
            updates.append([muon.orthogonalize(own, p.matrix.blocks)] * exchange.size)
        else:
            whole = assemble(shards, p.matrix.tp_dim, p.matrix.tp_stride)
            update = muon.orthogonalize(whole, p.matrix.blocks)
            updates.append(cut(update, p.matrix.tp_dim, p.matrix.tp_stride, exchange.size))
    with muon.account.phase("exchange"):
        return exchange.from_homes(updates, homes, [x.shape for x in inputs], inputs[0])


def _duplicated(
    planned: Sequence[PlannedMatrix],
    inputs: Sequence[torch.Tensor],
    exchange: ShardExchange,
    muon: OwnedMuon,
) -> Sequence[torch.Tensor]:
    """Orthogonalize each matrix whole, on every rank of the group."""
    updates = []
    for p, own in zip(planned, inputs, strict=True):
        matrix = p.matrix
        if matrix.tp_dim is None:
            updates.append(muon.orthogonalize(own, matrix.blocks))
            continue
        with muon.account.phase("exchange"):
            (shards,) = exchange.gather([own])
        whole = assemble(shards, matrix.tp_dim, matrix.tp_stride)
        update = muon.orthogonalize(whole, matrix.blocks)
        updates.append(cut(update, matrix.tp_dim, matrix.tp_stride, exchange.size)[exchange.rank])
    return updates


def _distributed(
    planned: Sequence[PlannedMatrix],
    inputs: Sequence[torch.Tensor],
    exchange: ShardExchange,
    muon: OwnedMuon,
) -> Sequence[torch.Tensor]:
    """Orthogonalize each matrix in place, with an all-reduce in every Newton-Schulz step."""
    return [
        muon.orthogonalize(own, p.matrix.blocks)
        if p.matrix.tp_dim is None or exchange.group is None or exchange.size == 1
        else muon.orthogonalize_together(own, p.matrix, exchange.group)
        for p, own in zip(planned, inputs, strict=True)
    ]


def _blockwise(
    planned: Sequence[PlannedMatrix],
    inputs: Sequence[torch.Tensor],
    exchange: ShardExchange,
    muon: OwnedMuon,
) -> Sequence[torch.Tensor]:
    """Orthogonalize each shard as if it were a matrix: another optimizer at every TP size."""
    return [
        muon.orthogonalize(own, local_blocks(p.matrix))
        for p, own in zip(planned, inputs, strict=True)
    ]


_MODES: dict[str, _Mode] = {
    "owner": _at_owner,
    "duplicated": _duplicated,
    "distributed": _distributed,
    "blockwise": _blockwise,
}


def local_blocks(matrix: LogicalMatrix) -> tuple[LogicalBlock, ...]:
    """Return the blocks' rows inside one shard; each shard must hold whole runs of each.

    Raises:
        ConfigurationError: A shard cuts a run (a query group): only whole matrices can be split.
    """
    if matrix.tp_dim != 0:
        return matrix.blocks
    if len(matrix.blocks) == 1:
        (block,) = matrix.blocks
        rows = matrix.local_shape[0]
        return (LogicalBlock(block.name, 0, rows, rows, 1),)
    if any(block.count % matrix.tp_size for block in matrix.blocks):
        raise ConfigurationError(
            f"{matrix.name}: {matrix.blocks[0].count} query groups cannot be cut over "
            f"{matrix.tp_size} tensor-parallel ranks shard by shard. Use --muon-tp-mode owner or "
            "duplicated."
        )
    return tuple(
        LogicalBlock(b.name, b.start, b.run, b.period, b.count // matrix.tp_size)
        for b in matrix.blocks
    )
