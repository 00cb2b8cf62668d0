"""``Muon`` without Megatron: a torch optimizer over whole matrices, or over flat shards of them.

The interface of Megatron-LM #1428: momentum as a sum, AdamW for every group without ``use_muon``,
updates of the size of AdamW's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_muon.bookkeeping.dist_meta import MuonDistMeta
from megatron_muon.bookkeeping.matrix import LogicalMatrix, whole
from megatron_muon.bookkeeping.plan import (
    Grid,
    GridSize,
    OwnedMatrix,
    Plan,
    PlannedMatrix,
    held_by,
    make_plan,
)
from megatron_muon.collectives.arena import Arena
from megatron_muon.errors import ConfigurationError, MuonError, PlanError
from megatron_muon.optimizer.account import StepAccount
from megatron_muon.optimizer.engine import Engine
from megatron_muon.optimizer.flat_records import (
    BufferSizes,
    Options,
    Record,
    Report,
    agree,
    check_options,
    check_plans,
    complete,
    gather_grid,
)
from megatron_muon.optimizer.station import EngineSettings, Station
from megatron_muon.orthogonalize.newton_schulz import Orthogonalization
from megatron_muon.orthogonalize.update import accumulate_momentum, apply_update

MOMENTUM, MEAN, SQUARE = "momentum_buffer", "exp_avg", "exp_avg_sq"
"""Keys of the optimizer's state."""

DEFAULT_BUDGET_NBYTES = 64 * 2**20
_WIRE_DTYPE = torch.bfloat16


class _Unscaled(Orthogonalization):
    """Newton-Schulz without the update's size.

    The size is given where the update is applied, so that what travels are bf16 numbers.
    """

    def scale(self, rows: int, columns: int) -> float:
        del rows, columns
        return 1.0


def _orthogonalization(ns_steps: int) -> Orthogonalization:
    return _Unscaled(
        num_steps=ns_steps,
        coefficient_type="simple",
        scale_mode="spectral",
        extra_scale_factor=1.0,
        matmul_precision="medium",
    )


def zeropower_via_newtonschulz5(G: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return the nearest semi-orthogonal matrix, roughly: singular values come near one.

    Args:
        G: A matrix ``(M, N)``, any floating dtype.
        steps: Newton-Schulz steps, with the coefficients (3.4445, -4.7750, 2.0315).

    Returns:
        ``(M, N)`` bf16.

    Source: https://kellerjordan.github.io/posts/muon/
    """
    if G.ndim != 2:
        raise ConfigurationError(
            f"zeropower_via_newtonschulz5 takes a matrix, got shape {tuple(G.shape)}."
        )
    return _orthogonalization(steps).block(G.bfloat16().float()).bfloat16()


def adjust_lr_wd_for_muon(lr: float, matched_adamw_rms: float, param_shape: Sequence[int]) -> float:
    """Return the learning rate at which an orthogonal update has the size of one of AdamW.

    An orthogonal ``(A, B)`` matrix has root mean square ``1 / sqrt(max(A, B))``. The decay is
    not adjusted: it goes with ``lr`` itself.

    Args:
        lr: Learning rate.
        matched_adamw_rms: Root mean square of AdamW's update at learning rate one.
        param_shape: Shape of the whole matrix.

    Source: https://arxiv.org/abs/2502.16982, equation 4.
    """
    rows, columns = param_shape[:2]
    return lr * matched_adamw_rms * math.sqrt(max(rows, columns))


class Muon(torch.optim.Optimizer):
    """Muon for the groups with ``use_muon``, AdamW for all others.

    On one process parameters are whole. :meth:`enable_distributed_mode` makes it step flat shards
    of them, with the same results to the last bit.
    """

    def __init__(
        self,
        param_groups: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 2e-2,
        weight_decay: float = 0.1,
        matched_adamw_rms: float = 0.2,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adamw_betas: tuple[float, float] = (0.95, 0.95),
        adamw_eps: float = 1e-8,
    ) -> None:
        """Make the optimizer; a group's own value of any option wins.

        Args:
            param_groups: Parameters or groups; ``use_muon`` in a group gives it to Muon.
            lr: Learning rate.
            weight_decay: Decoupled decay, ``p *= 1 - lr * weight_decay``.
            matched_adamw_rms: Root mean square of an update at learning rate one.
            momentum: Factor ``mu`` of ``m = mu m + g``.
            nesterov: Orthogonalize ``g + mu m`` in place of ``m``.
            ns_steps: Newton-Schulz steps.
            adamw_betas: AdamW's factors.
            adamw_eps: AdamW's epsilon, added before the bias correction.

        Raises:
            ConfigurationError: An option is out of its range.
        """
        super().__init__(
            param_groups,
            dict(
                lr=lr, weight_decay=weight_decay, matched_adamw_rms=matched_adamw_rms,
                momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, adamw_betas=adamw_betas,
                adamw_eps=adamw_eps, use_muon=False,
            ),
        )  # fmt: skip
        self._start()

    def _start(self) -> None:
        self.account = StepAccount()
        self.arena = Arena()
        self.distributed_mode = False
        self._engines: list[Engine] | None = None
        self._params: dict[str, torch.Tensor] = {}

    def enable_distributed_mode(
        self,
        global_buffer_sizes: BufferSizes,
        dist_group: dist.ProcessGroup,
        tp_group: dist.ProcessGroup | None,
        dist_metas: Mapping[torch.Tensor, MuonDistMeta],
        *,
        exchange: Literal["homes", "gather"] = "homes",
        gather_budget_nbytes: int = DEFAULT_BUDGET_NBYTES,
    ) -> None:
        """Step flat shards from now on; collective over both groups.

        Each bucket of a buffer is cut in equal shards, one for each rank of ``dist_group``. A rank
        holds its part of a matrix as a flat tensor, or nothing of it.

        Args:
            global_buffer_sizes: ``(size, offset)`` of each bucket of each buffer, in elements.
            dist_group: Data-parallel group.
            tp_group: Tensor-parallel group, ``None`` for one rank.
            dist_metas: Record of each local shard that Muon steps; this rank's slices of the
                buffers are put into them.
            exchange: ``homes`` sends each matrix to one rank that orthogonalizes it; ``gather``
                all-gathers it to every rank that holds a part of it.
            gather_budget_nbytes: Bytes that a rank may send and receive in one collective.

        Raises:
            ConfigurationError: A bucket's size is no multiple of the group's, or an option is
                wrong.
            PlanError: Ranks disagree, or a shard is not what its record says; on every rank.
        """
        size, tp_size = dist_group.size(), 1 if tp_group is None else tp_group.size()
        options = Options(
            exchange, gather_budget_nbytes, _WIRE_DTYPE.itemsize,
            tuple(tuple((n, start) for n, start in buckets) for buckets in global_buffer_sizes),
        )  # fmt: skip
        rows: list[Record] = []
        error = None
        try:
            check_options(options, size, tp_size)
            rows = self._own_rows(options, dist_group, dist_metas)
        except MuonError as own_error:
            # The others wait for this rank's report, and raise the same.
            error = own_error
        reports = gather_grid(Report(options, rows, error), dist_group, tp_group)
        owned = agree(reports, size, tp_size)
        self._params = {row.name: param for param, row in self._rows(dist_metas)}
        sizes = {Grid(): GridSize(size, tp_size)}
        plans = {
            steps: make_plan(
                [item for row, item in owned.items() if row.ns_steps == steps], sizes, steps
            )
            for steps in sorted({row.ns_steps for row in owned})
        }
        check_plans(gather_grid({s: p.fingerprint for s, p in plans.items()}, dist_group, tp_group))
        settings = EngineSettings(
            orthogonalization=_orthogonalization(1),
            exchange=exchange,
            budget_nbytes=gather_budget_nbytes,
            exchange_dtype=_WIRE_DTYPE,
        )
        self._make_engines(plans, dist_group, tp_group, settings, self._device(dist_group))
        self.distributed_mode = True
        self._init_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter; in distributed mode collective over both groups.

        A matrix without a gradient counts as one with a zero gradient, since the other ranks wait
        for it; AdamW leaves such a parameter alone.

        Args:
            closure: Computes the loss again.

        Returns:
            The closure's loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._engines is None:
            self._plan_whole_matrices()
        self.account.clear()
        self.arena.restart_peak()
        groups = {p: group for group in self.param_groups for p in group["params"]}
        for engine in self._engines or []:
            engine.step(
                lambda planned: self._input(planned, groups),
                lambda planned, update: self._apply(planned, update, groups),
            )
        self.account.traffic.peak_scratch_nbytes = self.arena.peak_lent_nbytes
        for group in self.param_groups:
            if not group["use_muon"]:
                self._adamw(group)
        return loss

    def close(self) -> None:
        """Give up all scratch. May be called twice; a later step takes new scratch."""
        self.arena.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; not in distributed mode, whose plan is made once."""
        if getattr(self, "distributed_mode", False):
            raise ConfigurationError("Add parameter groups before enable_distributed_mode().")
        super().add_param_group(param_group)
        _check_group(self.param_groups[-1])
        self._engines = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned; the momentum stays fp32 for every dtype."""
        super().load_state_dict(state_dict)
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for param, key in zip(params, saved, strict=True):
            momentum = state_dict["state"].get(key, {}).get(MOMENTUM)
            if momentum is not None:
                # torch has cast it to the dtype of the parameter.
                self.state[param][MOMENTUM] = momentum.to(param.device, torch.float32, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what was pickled, copied or loaded; a copy is not in distributed mode."""
        super().__setstate__(state)
        if "arena" not in self.__dict__:
            self._start()
        elif not self.distributed_mode:
            # Groups may have other options than those that were planned for.
            self._engines = None

    def _input(
        self, planned: PlannedMatrix, groups: Mapping[torch.Tensor, dict[str, Any]]
    ) -> torch.Tensor:
        param = self._params[planned.matrix.name]
        group = groups[param]
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        ahead = accumulate_momentum(
            self.state[param][MOMENTUM].view(-1), grad.reshape(-1).float(), group["momentum"],
            group["nesterov"],
        )  # fmt: skip
        return ahead if group["nesterov"] else ahead.clone()

    def _apply(
        self,
        planned: PlannedMatrix,
        update: torch.Tensor,
        groups: Mapping[torch.Tensor, dict[str, Any]],
    ) -> None:
        param = self._params[planned.matrix.name]
        group = groups[param]
        lr = adjust_lr_wd_for_muon(group["lr"], group["matched_adamw_rms"], planned.matrix.shape)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        apply_update(param, update.view(param.shape), lr, 0.0)

    def _adamw(self, group: dict[str, Any]) -> None:
        """Step one group as Megatron-LM #1428 does: epsilon before the bias correction."""
        group["step"] = group.get("step", 0) + 1
        beta1, beta2 = group["adamw_betas"]
        size = math.sqrt(1 - beta2 ** group["step"]) / (1 - beta1 ** group["step"])
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if MEAN not in state:
                state[MEAN], state[SQUARE] = torch.zeros_like(param), torch.zeros_like(param)
            state[MEAN].lerp_(param.grad, 1 - beta1)
            state[SQUARE].lerp_(param.grad.square(), 1 - beta2)
            update = state[MEAN] / (state[SQUARE].sqrt() + group["adamw_eps"])
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(update, alpha=-group["lr"] * size)

    def _plan_whole_matrices(self) -> None:
        """Plan for one process: every matrix whole, nothing moves."""
        self._params = {}
        by_steps: dict[int, list[OwnedMatrix]] = {}
        for group in self.param_groups:
            for param in group["params"] if group["use_muon"] else []:
                if param.ndim != 2:
                    raise ConfigurationError(
                        f"A parameter of shape {tuple(param.shape)} is in a group with use_muon: "
                        "Muon takes matrices. Give the others to a group without it, and flat "
                        "shards to enable_distributed_mode()."
                    )
                if not param.numel():
                    continue
                name = f"matrix {len(self._params):08d}"
                self._params[name] = param
                matrix = LogicalMatrix(name, tuple(param.shape), whole(param.shape[0]))
                by_steps.setdefault(group["ns_steps"], []).append(
                    OwnedMatrix(matrix=matrix, pieces=held_by(0, matrix))
                )
        plans = {steps: make_plan(items, {}, steps) for steps, items in sorted(by_steps.items())}
        settings = EngineSettings(
            orthogonalization=_orthogonalization(1), exchange_dtype=_WIRE_DTYPE
        )
        device = next((param.device for param in self._params.values()), torch.device("cpu"))
        self._make_engines(plans, None, None, settings, device)
        self._init_state()

    def _make_engines(
        self,
        plans: Mapping[int, Plan],
        dist_group: dist.ProcessGroup | None,
        tp_group: dist.ProcessGroup | None,
        settings: EngineSettings,
        device: torch.device,
    ) -> None:
        """Make one engine for each number of Newton-Schulz steps."""
        self._engines = []
        for steps, plan in plans.items():
            own = replace(settings, orthogonalization=_orthogonalization(steps))
            station = Station(dist_group, tp_group, own, self.arena, self.account, device)
            self._engines.append(Engine(plan.matrices, station))

    def _init_state(self) -> None:
        for param in self._params.values():
            if MOMENTUM not in self.state[param]:
                self.state[param][MOMENTUM] = torch.zeros_like(
                    param, dtype=torch.float32, memory_format=torch.contiguous_format
                )

    def _rows(
        self, dist_metas: Mapping[torch.Tensor, MuonDistMeta]
    ) -> list[tuple[torch.Tensor, Record]]:
        return [
            (
                param,
                Record(
                    meta.buffer_idx, meta.bucket_idx, meta.global_range,
                    (meta.shape[0], meta.shape[1]), meta.tp_split_dim, group["ns_steps"],
                ),
            )
            for group in self.param_groups
            for param in (group["params"] if group["use_muon"] else [])
            if (meta := dist_metas[param]).local_range is not None and param.numel()
        ]  # fmt: skip

    def _own_rows(
        self,
        options: Options,
        group: dist.ProcessGroup,
        dist_metas: Mapping[torch.Tensor, MuonDistMeta],
    ) -> list[Record]:
        """Complete the records and return this rank's rows."""
        for param_group in self.param_groups:
            for param in param_group["params"] if param_group["use_muon"] else []:
                if param not in dist_metas:
                    raise PlanError(
                        f"a shard of {param.numel()} elements is in a group with use_muon and has "
                        "no MuonDistMeta. Give dist_metas one for each shard that Muon steps."
                    )
                complete(dist_metas[param], param.numel(), options, group)
        rows = [row for _, row in self._rows(dist_metas)]
        for row, following in pairwise(sorted(rows)):
            if row.global_range == following.global_range and row.name == following.name:
                raise PlanError(
                    f"two shards have a MuonDistMeta of {row.name}. Give each matrix a range of "
                    "its own."
                )
        return rows

    def _device(self, group: dist.ProcessGroup) -> torch.device:
        """Where the shards are; a rank without one goes by the group's backend."""
        for param in self._params.values():
            return param.device
        if dist.get_backend(group) == "gloo":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())


def _check_group(group: Mapping[str, Any]) -> None:
    beta1, beta2 = group["adamw_betas"]
    for name, value, is_legal, expected in (
        ("lr", group["lr"], group["lr"] >= 0, "0 or more"),
        ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0, "0 or more"),
        ("momentum", group["momentum"], 0 <= group["momentum"] < 1, "a factor in [0, 1)"),
        ("ns_steps", group["ns_steps"], group["ns_steps"] >= 1, "1 or more"),
        ("adamw_betas", group["adamw_betas"], 0 <= beta1 < 1 and 0 <= beta2 < 1, "in [0, 1)"),
        ("adamw_eps", group["adamw_eps"], group["adamw_eps"] >= 0, "0 or more"),
    ):
        if not is_legal:
            raise ConfigurationError(f"{name} is {value}: expected {expected}.")
