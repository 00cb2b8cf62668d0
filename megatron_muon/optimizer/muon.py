"""Muon over the matrices this rank steps, inside Megatron's mixed-precision wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.bookkeeping.plan import Grid, OwnedMatrix, Plan, PlannedMatrix
from megatron_muon.collectives.arena import Arena
from megatron_muon.errors import ConfigurationError, PlanError
from megatron_muon.optimizer.account import StepAccount
from megatron_muon.optimizer.config import MuonSettings
from megatron_muon.optimizer.engine import Done, Engine, run_engines
from megatron_muon.optimizer.station import EngineSettings, Station
from megatron_muon.orthogonalize.blocks import give_up_scratch
from megatron_muon.orthogonalize.newton_schulz import Orthogonalization
from megatron_muon.orthogonalize.update import MOMENTUM, advance_momentum, apply_update

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What ``--muon-exchange-dtype`` and ``--muon-momentum-dtype`` stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups of one grid.

    Attributes:
        dp: Data-parallel group, ``None`` where every rank steps every matrix.
        tp: Ranks of a row: the tensor-parallel group, or that and those which cut rows; ``None``
            for one rank.
    """

    dp: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """This rank's piece of one matrix.

    Attributes:
        param: Its master: the whole shard in its shape, or a flat piece.
        group: Its parameter group.
        numel: Elements that are of the matrix, the first ones. The others fill up what generalized
            tensor parallelism cuts: they are zero and stay so, since nothing touches them.
    """

    param: torch.Tensor
    group: dict[str, Any]
    numel: int

    def grad(self) -> torch.Tensor:
        """Return the gradient, flat, zero if there is none."""
        grad = self.param.grad
        return self.flat(torch.zeros_like(self.param) if grad is None else grad.contiguous())

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of a tensor like the master that are of the matrix, flat."""
        return tensor.view(-1)[: self.numel]


class OwnedMuon(torch.optim.Optimizer):
    """Muon over whole shards of matrices, or over flat pieces of them.

    Megatron's factory makes it over all matrices of the model, the layer-wise optimizer narrows it
    to what this rank owns, and Megatron's wrappers put fp32 masters in their place. :meth:`bind`
    then tells it the plan.

    Attributes:
        done: Called in a step with the names of the matrices that are done, if anything is to
            follow them at once.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
        settings: MuonSettings,
    ) -> None:
        """Make the optimizer.

        Args:
            params: Parameters or groups.
            settings: The resolved settings.
        """
        super().__init__(
            params,
            dict(lr=settings.lr, weight_decay=settings.weight_decay, momentum=settings.momentum),
        )
        self.settings = settings
        self.momentum_dtype = _DTYPES[settings.momentum_dtype]
        self.account = StepAccount()
        self.arena = Arena()
        self.engines: list[Engine] = []
        self.done: Done | None = None
        self._bound: dict[str, torch.Tensor] = {}

    def bind(
        self,
        plan: Plan,
        groups: Mapping[Grid, Groups],
        masters: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """Tell the plan, make the momentum and the schedule.

        Args:
            plan: The plan of this pipeline stage; every rank has the same.
            groups: Process groups of each grid that this optimizer steps.
            masters: What this rank holds of each matrix, by the matrix's name.
            device: Where the matrices are.

        Raises:
            PlanError: A parameter is in no plan, or has another size there.
            ConfigurationError: The tensor-parallel mode cannot step a matrix.
        """
        settings = EngineSettings(
            orthogonalization=Orthogonalization(
                num_steps=self.settings.num_ns_steps,
                coefficient_type=self.settings.coefficient_type,
                scale_mode=self.settings.scale_mode,
                extra_scale_factor=self.settings.extra_scale_factor,
                matmul_precision=self.settings.matmul_precision,
                use_syrk=self.settings.use_syrk,
                kernel=self.settings.ns_kernel,
            ),
            mode=self.settings.tp_mode,
            budget_nbytes=self.settings.gather_budget_nbytes,
            exchange_dtype=_DTYPES[self.settings.exchange_dtype],
            by_bucket=self.settings.gathers_early,
        )
        self.engines = [
            Engine(
                plan.on(grid),
                Station(
                    groups[grid].dp, groups[grid].tp, settings, self.arena, self.account, device
                ),
            )
            for grid in sorted(groups)
        ]
        self._bound = dict(masters)
        self._check_masters()
        self.init_state()

    @torch.no_grad()
    def init_state(self) -> None:
        """Make the momentum of every parameter that has none, zero."""
        for group in self.param_groups:
            for param in group["params"]:
                if MOMENTUM not in self.state[param]:
                    self.state[param][MOMENTUM] = torch.zeros_like(param, dtype=self.momentum_dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Advance every momentum, orthogonalize, and move every master.

        A parameter without a gradient counts as one with a zero gradient: who takes part in an
        exchange must not depend on the data. A rank that holds nothing takes part too.

        Args:
            closure: Not supported.
        """
        if closure is not None:
            raise ConfigurationError("OwnedMuon.step(closure=...) is not supported.")
        if not self.engines and any(group["params"] for group in self.param_groups):
            raise PlanError(
                "A Muon of Megatron's factory belongs to no plan. Build the optimizer with "
                "megatron.core.optimizer.get_megatron_optimizer."
            )
        work = self._work()

        def read(planned: PlannedMatrix, out: torch.Tensor) -> None:
            item = work[planned.matrix.name]
            kept = item.flat(self.state[item.param][MOMENTUM])
            momentum = kept.to(torch.float32)
            advance_momentum(
                momentum, item.grad(), item.group["momentum"], self.settings.nesterov, out
            )
            if momentum is not kept:
                kept.copy_(momentum)

        def apply(planned: PlannedMatrix, update: torch.Tensor) -> None:
            item = work[planned.matrix.name]
            master, group = item.flat(item.param), item.group
            apply_update(master, update, group["lr"], group["weight_decay"])

        run_engines(self.engines, self.account, self.arena, read, apply, self.done)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; not once the plan is made."""
        if getattr(self, "engines", None):
            raise ConfigurationError(
                "Parameters cannot be added to Muon once it is built: train them from the start."
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned.

        Raises:
            ConfigurationError: A parameter's momentum is missing or has another shape; nothing is
                loaded then.
        """
        if self.engines:
            params = [p for group in self.param_groups for p in group["params"]]
            saved = [key for group in state_dict["param_groups"] for key in group["params"]]
            for param, key in zip(params, saved, strict=False):
                momentum = state_dict["state"].get(key, {}).get(MOMENTUM)
                if momentum is None or momentum.shape != param.shape:
                    found = "no momentum" if momentum is None else tuple(momentum.shape)
                    raise ConfigurationError(
                        f"The state has {found} for parameter {key}, a matrix or piece of shape "
                        f"{tuple(param.shape)}. It is of another model or number of ranks."
                    )
        super().load_state_dict(state_dict)
        for state in self.state.values():
            # torch casts what it loads to the dtype of the parameter.
            state[MOMENTUM] = state[MOMENTUM].to(self.momentum_dtype)

    def close(self) -> None:
        """Give up all scratch. May be called twice; a later step takes new scratch."""
        self.arena.close()
        give_up_scratch()

    def own_load(self) -> tuple[int, int]:
        """Return the Newton-Schulz flops and the elements that the plan gives to this rank.

        In owner mode a matrix costs its home alone, or each home of its parts an equal share; in
        the other modes every tensor-parallel rank of the home's row works on it, counted as the
        whole.
        """
        flops = sum(
            planned.flops
            for engine in self.engines
            for planned in engine.plan
            if engine.is_home(planned)
        )
        return flops, sum(p.numel() for group in self.param_groups for p in group["params"])

    def _work(self) -> dict[str, Work]:
        """Return what this rank holds, by name, with the groups as they are now."""
        groups = {param: group for group in self.param_groups for param in group["params"]}
        numels = {name: n for engine in self.engines for name, n in engine.held_numel().items()}
        return {
            name: Work(param, groups[param], numels[name])
            for name, param in self._bound.items()
            if name in numels
        }

    def _check_masters(self) -> None:
        """Check that this rank steps what the plan says it holds, and nothing else."""
        stepped = {param for group in self.param_groups for param in group["params"]}
        for param in stepped - set(self._bound.values()):
            raise PlanError(
                f"A matrix of shape {tuple(param.shape)} belongs to Muon but is in no plan. Build "
                "the optimizer with megatron.core.optimizer.get_megatron_optimizer."
            )
        for engine in self.engines:
            for planned in engine.matrices:
                self._check_master(planned.owned, engine.position.dp, stepped)

    def _check_master(self, owned: OwnedMatrix, dp_rank: int, stepped: set[torch.Tensor]) -> None:
        name, piece = owned.matrix.name, owned.piece_of(dp_rank)
        master = self._bound.get(name)
        held = None if master is None or master not in stepped else master.numel()
        planned = None if piece is None else piece.range.numel
        if held != planned:
            raise PlanError(
                f"{name}: this rank steps {held or 'none'} of its elements, the plan gives "
                f"{planned or 'none'} to data-parallel rank {dp_rank}."
            )
