"""``Muon`` without Megatron: a torch optimizer over whole matrices, or over flat shards of them.

The interface of Megatron-LM #1428: momentum as a sum, AdamW for every group without ``use_muon``,
updates of the size of AdamW's.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from numbers import Real
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._utils import _unflatten_dense_tensors

from megatron_muon.bookkeeping.dist_meta import MuonDistMeta
from megatron_muon.bookkeeping.matrix import step_flops
from megatron_muon.bookkeeping.plan import (
    Grid,
    GridSize,
    Plan,
    PlannedMatrix,
    make_plan,
)
from megatron_muon.bookkeeping.stage import DEFAULT_BUDGET_NBYTES
from megatron_muon.checkpoint.convert import from_pull_request
from megatron_muon.collectives.arena import Arena
from megatron_muon.errors import ConfigurationError, PlanError
from megatron_muon.optimizer.account import StepAccount
from megatron_muon.optimizer.engine import Engine, run_engines
from megatron_muon.optimizer.flat_records import (
    BufferSizes,
    Options,
    Planned,
    Record,
    Report,
    agree,
    caused_by,
    check_places,
    check_plans,
    complete,
    gather_grid,
    make_options,
    raise_alike,
    to_tell,
)
from megatron_muon.optimizer.station import EngineSettings, Station
from megatron_muon.orthogonalize.blocks import give_up_scratch
from megatron_muon.orthogonalize.newton_schulz import Orthogonalization
from megatron_muon.orthogonalize.update import MOMENTUM, accumulate_momentum, apply_update

MEAN, SQUARE = "exp_avg", "exp_avg_sq"
"""Keys of AdamW's moments in the state."""

_WIRE_DTYPE = torch.bfloat16

_APPLIED_ALIKE = ("lr", "weight_decay", "matched_adamw_rms", "momentum", "nesterov")
"""Options of a group that the pieces of one matrix must have alike."""


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
        self._planned_for: object = None
        self._params: dict[str, torch.Tensor] = {}
        self._groups: tuple[dist.ProcessGroup, dist.ProcessGroup | None] | None = None

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
                wrong; on every rank.
            PlanError: Ranks disagree, a shard is not what its record says, or a rank met any other
                exception, which it chains; on every rank.
        """
        check_places(gather_grid(dist.get_rank(), dist_group, tp_group))
        size, tp_size = dist_group.size(), 1 if tp_group is None else tp_group.size()
        options: Options | None = None
        rows: list[Record] = []
        error: Exception | None = None
        try:
            options = make_options(
                exchange, gather_budget_nbytes, _WIRE_DTYPE.itemsize, global_buffer_sizes, size,
                tp_size,
            )  # fmt: skip
            rows = self._own_rows(options, dist_group, dist_metas)
        except Exception as own_error:
            # The others wait for this rank's report, and raise the same.
            error = own_error
        reports = gather_grid(Report(options, rows, to_tell(error)), dist_group, tp_group)
        with caused_by(error):
            owned = agree(reports, size, tp_size)
        plans: dict[int, Plan] = {}
        params: dict[str, torch.Tensor] = {}
        engines: list[Engine] = []
        try:
            sizes = {Grid(): GridSize(size, tp_size)}
            for steps in sorted({row.ns_steps for row in owned}):
                items = [item for row, item in owned.items() if row.ns_steps == steps]
                plans[steps] = make_plan(items, sizes, steps)
            params = {row.name: param for param, row in self._rows(dist_metas)}
            settings = EngineSettings(
                orthogonalization=_orthogonalization(1),
                exchange=exchange,
                budget_nbytes=gather_budget_nbytes,
                exchange_dtype=_WIRE_DTYPE,
            )
            device = _device(params.values(), dist_group)
            engines = self._make_engines(plans, dist_group, tp_group, settings, device)
            self._init_state()
        except Exception as own_error:
            error = own_error
        fingerprints = {steps: plan.fingerprint for steps, plan in plans.items()}
        everyones = gather_grid(Planned(fingerprints, to_tell(error)), dist_group, tp_group)
        with caused_by(error):
            check_plans(everyones)
        self._params, self._engines, self._groups = params, engines, (dist_group, tp_group)
        self.distributed_mode = True
        self._planned_for = self._what_is_planned()

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
        self._keep_plan()
        groups: dict[torch.Tensor, dict[str, Any]] = {}
        if self.distributed_mode:
            groups = {p: group for group in self.param_groups for p in group["params"]}
        run_engines(
            self._engines or [],
            self.account,
            self.arena,
            lambda planned, out: self._read(planned, out, groups),
            lambda planned, update: self._apply(planned, update, groups),
        )
        if not self.distributed_mode:
            self._step_whole_matrices()
            self.account.settle()
        for group in self.param_groups:
            if not group["use_muon"]:
                self._adamw(group)
        return loss

    def close(self) -> None:
        """Give up all scratch. May be called twice; a later step takes new scratch."""
        self.arena.close()
        give_up_scratch()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; not in distributed mode, whose plan is made once."""
        if getattr(self, "distributed_mode", False):
            raise ConfigurationError("Add parameter groups before enable_distributed_mode().")
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ConfigurationError:
            del self.param_groups[-1]
            raise
        self._engines = None

    def _what_is_planned(self) -> object:
        """What the plan depends on, to see that it has changed."""
        return [
            (
                group["use_muon"], group["ns_steps"],
                [(id(p), self.distributed_mode or _moves(p)) for p in group["params"]],
            )
            for group in self.param_groups
        ]  # fmt: skip

    def _keep_plan(self) -> None:
        """Plan again if groups have changed; in distributed mode, where all ranks plan, refuse."""
        if self._engines is not None and self._planned_for == self._what_is_planned():
            return
        if self.distributed_mode:
            raise ConfigurationError(
                "Parameters, use_muon or ns_steps of a group have changed in distributed mode. "
                "Call enable_distributed_mode() again on every rank."
            )
        self._plan_whole_matrices()
        self._planned_for = self._what_is_planned()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the momentum of every matrix also before the first step.

        Momentum is not made with the optimizer: shards may take the place of its parameters.
        """
        self._init_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned; in distributed mode collective over both groups.

        A state dict of Megatron-LM #1428's own ``Muon`` is taken too
        (:func:`~megatron_muon.checkpoint.convert.from_pull_request`). The options of the state win
        over those of the groups here. The momentum stays fp32 for every dtype.

        Raises:
            ConfigurationError: The state is of other groups, lacks the momentum of a matrix or has
                one of another shape, or has other options than those that are planned for; in
                distributed mode on every rank. Nothing is loaded then.
            PlanError: In distributed mode, a rank met any other exception.
        """
        momenta: dict[torch.Tensor, torch.Tensor] = {}
        error: Exception | None = None
        try:
            state_dict = from_pull_request(state_dict)
            momenta = self._check_state(state_dict)
        except Exception as own_error:
            if self._groups is None:
                raise
            error = own_error
        if self._groups is not None:
            with caused_by(error):
                raise_alike("load_state_dict", gather_grid(to_tell(error), *self._groups))
        super().load_state_dict(state_dict)
        for param, momentum in momenta.items():
            # torch has cast it to the dtype of the parameter.
            self.state[param][MOMENTUM] = momentum.to(
                param.device, torch.float32, copy=True, memory_format=torch.contiguous_format
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what was pickled, copied or loaded; a copy is not in distributed mode."""
        super().__setstate__(state)
        if "arena" not in self.__dict__:
            self._start()
        elif not self.distributed_mode:
            # Groups may have other options than those that were planned for.
            self._engines = None

    def _read(
        self,
        planned: PlannedMatrix,
        out: torch.Tensor,
        groups: Mapping[torch.Tensor, dict[str, Any]],
    ) -> None:
        param = self._params[planned.matrix.name]
        group = groups[param]
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        accumulate_momentum(
            self.state[param][MOMENTUM].view(-1), grad.reshape(-1).float(), group["momentum"],
            group["nesterov"], out,
        )  # fmt: skip

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

    def _check_state(self, state_dict: Mapping[str, Any]) -> dict[torch.Tensor, torch.Tensor]:
        """Check that a state fits, and return the momentum of each parameter."""
        saved_groups = state_dict["param_groups"]
        own, theirs = (
            [len(group["params"]) for group in groups]
            for groups in (self.param_groups, saved_groups)
        )
        if own != theirs:
            raise ConfigurationError(
                f"the state has groups of {theirs} parameters, the optimizer of {own}."
            )
        momenta: dict[torch.Tensor, torch.Tensor] = {}
        for number, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            _check_group(saved)
            if self.distributed_mode:
                _check_planned(number, group, saved)
            for position, (param, key) in enumerate(
                zip(group["params"], saved["params"], strict=True)
            ):
                if saved["use_muon"] and param.numel():
                    momenta[param] = momentum = state_dict["state"].get(key, {}).get(MOMENTUM)
                    if not isinstance(momentum, torch.Tensor) or momentum.shape != param.shape:
                        raise ConfigurationError(
                            f"parameter {position} of group {number}, shape {tuple(param.shape)}, "
                            f"has {_in_words(momentum)} in the state: expected the momentum of a "
                            "parameter that Muon steps. Load a state of the same parameters."
                        )
        return momenta

    def _plan_whole_matrices(self) -> None:
        """Check the matrices of one process, where nothing moves."""
        for param in self._muon_params():
            if param.ndim != 2:
                raise ConfigurationError(
                    f"A parameter of shape {tuple(param.shape)} is in a group with use_muon: "
                    "Muon takes matrices. Give the others to a group without it, and flat "
                    "shards to enable_distributed_mode()."
                )
        self._engines = []
        self._init_state()

    def _step_whole_matrices(self) -> None:
        """Step the matrices of one process, as many together as the exchange would bring."""
        for group in self.param_groups:
            some: list[torch.Tensor] = []
            room = DEFAULT_BUDGET_NBYTES
            for param in group["params"] if group["use_muon"] else []:
                if param.numel() and _moves(param):
                    nbytes = param.numel() * torch.float32.itemsize
                    if some and nbytes > room:
                        self._step_together(some, group)
                        some, room = [], DEFAULT_BUDGET_NBYTES
                    some.append(param)
                    room -= nbytes
            if some:
                self._step_together(some, group)

    def _step_together(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Do for whole matrices what :meth:`_read`, the engine and :meth:`_apply` do, all at once.

        Calls for each small matrix would take longer than its Newton-Schulz.
        """
        with self.account.phase("momentum"):
            momenta = [self.state[param][MOMENTUM] for param in params]
            grads = [(torch.zeros_like(p) if p.grad is None else p.grad).float() for p in params]
            mu = float(group["momentum"])
            _multiply(momenta, mu)
            torch._foreach_add_(momenta, grads)
            ahead, outs = momenta, None
            if group["nesterov"]:
                ahead = outs = list(torch._foreach_add(grads, momenta, alpha=mu))
        with self.account.phase("newton_schulz"):
            updates = _orthogonalization(group["ns_steps"]).blocks(_rounded(ahead), outs)
        with self.account.phase("update"):
            self._apply_together(params, updates, group)

    def _apply_together(
        self, params: list[torch.Tensor], updates: Sequence[torch.Tensor], group: dict[str, Any]
    ) -> None:
        _multiply(params, float(1 - group["lr"] * group["weight_decay"]))
        by_shape: dict[torch.Size, list[int]] = {}
        for i, param in enumerate(params):
            by_shape.setdefault(param.shape, []).append(i)
        for (rows, columns), members in by_shape.items():
            lr = adjust_lr_wd_for_muon(group["lr"], group["matched_adamw_rms"], (rows, columns))
            torch._foreach_add_(
                [params[i] for i in members], [updates[i] for i in members], alpha=-float(lr)
            )
            self.account.newton_schulz_calls += len(members)
            flops = group["ns_steps"] * step_flops(rows, columns)
            self.account.newton_schulz_flops += len(members) * flops

    def _make_engines(
        self,
        plans: Mapping[int, Plan],
        dist_group: dist.ProcessGroup | None,
        tp_group: dist.ProcessGroup | None,
        settings: EngineSettings,
        device: torch.device,
    ) -> list[Engine]:
        """Make one engine for each number of Newton-Schulz steps."""
        engines = []
        for steps, plan in plans.items():
            own = replace(settings, orthogonalization=_orthogonalization(steps))
            station = Station(dist_group, tp_group, own, self.arena, self.account, device)
            engines.append(Engine(plan.matrices, station))
        return engines

    def _muon_params(self) -> Iterator[torch.Tensor]:
        """Every parameter that Muon steps."""
        for group in self.param_groups:
            yield from group["params"] if group["use_muon"] else []

    def _init_state(self) -> None:
        """Make the momentum of every parameter that has none."""
        for param in self._muon_params():
            if param.numel() and MOMENTUM not in self.state[param]:
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
                    tuple(float(group[name]) for name in _APPLIED_ALIKE),
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
        for param in self._muon_params():
            if param not in dist_metas:
                raise PlanError(
                    f"a shard of {param.numel()} elements is in a group with use_muon and has no "
                    "MuonDistMeta. Give dist_metas one for each shard that Muon steps."
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


def _device(params: Iterable[torch.Tensor], group: dist.ProcessGroup) -> torch.device:
    """Where the shards are; a rank without one goes by the group's backend."""
    for param in params:
        return param.device
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _rounded(xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return tensors in the dtype of the wire, all in one piece of memory if on one device."""
    if len({x.device for x in xs}) > 1:
        return [x.to(_WIRE_DTYPE) for x in xs]
    flat = torch.empty(sum(x.numel() for x in xs), dtype=_WIRE_DTYPE, device=xs[0].device)
    rounded: Sequence[torch.Tensor] = _unflatten_dense_tensors(flat, xs)  # type: ignore[no-untyped-call]
    torch._foreach_copy_(list(rounded), list(xs))
    return rounded


def _multiply(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply in place.

    Of a number torch makes a tensor for each product, which takes longer than to multiply a small
    matrix. With fp32 tensors on a CPU one made beforehand gives the same bits.
    """
    if all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors):
        torch._foreach_mul_(tensors, torch.tensor(factor, dtype=torch.float32))
    else:
        torch._foreach_mul_(tensors, factor)


def _moves(param: torch.Tensor) -> bool:
    """Whether a matrix is stepped: a frozen one without a gradient stays where it is."""
    return param.requires_grad or param.grad is not None


def _check_group(group: Mapping[str, Any]) -> None:
    """Check the options of a group."""
    factor, amount = "a factor in [0, 1)", "a finite number of 0 or more"
    checks: tuple[tuple[str, Callable[[object], bool], str], ...] = (
        ("lr", _is_amount, amount),
        ("weight_decay", _is_amount, amount),
        ("matched_adamw_rms", _is_amount, amount),
        ("momentum", _is_factor, factor),
        ("ns_steps", _is_count, "an integer of 1 or more"),
        ("adamw_betas", _are_betas, "two factors in [0, 1)"),
        ("adamw_eps", _is_amount, amount),
        ("nesterov", _is_given, "a truth value"),
        ("use_muon", _is_given, "a truth value"),
    )
    for name, is_legal, expected in checks:
        value = group.get(name)
        if not is_legal(value):
            raise ConfigurationError(f"{name} is {value!r}: expected {expected}.")
    parts = [p for p in group["params"] if getattr(p, "is_gtp_weight_remat", False)]
    if parts and group["use_muon"]:
        raise ConfigurationError(
            f"use_muon: a parameter of shape {tuple(parts[0].shape)} has some of the rows that "
            "generalized tensor parallelism cuts, which this optimizer does not put together. "
            "Use --optimizer muon of Megatron, or drop --tensor-parallel-num-weight-shards."
        )
    known = [name for name, *_ in checks]
    for key in group:  # schedulers and scripts put keys of their own into groups
        meant = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if key not in known and meant:
            raise ConfigurationError(f"A group has the unknown key {key!r}: is {meant[0]} meant?")


def _is_amount(value: object, below: float = math.inf) -> bool:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return isinstance(value, Real) and 0 <= float(value) < below


def _is_factor(value: object) -> bool:
    return _is_amount(value, below=1.0)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _are_betas(value: object) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(map(_is_factor, value))


def _is_given(value: object) -> bool:
    return value is not None


def _check_planned(number: int, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Check that a saved group has the options on which the plan of distributed mode depends."""
    for name in ("use_muon", "ns_steps") if group["use_muon"] else ("use_muon",):
        if saved[name] != group[name]:
            raise ConfigurationError(
                f"{name} of group {number} is {saved[name]} in the state, and {group[name]} is "
                "planned for. Give the group the state's before enable_distributed_mode()."
            )


def _in_words(momentum: object) -> str:
    if momentum is None:
        return f"no {MOMENTUM}"
    if isinstance(momentum, torch.Tensor):
        return f"a {MOMENTUM} of shape {tuple(momentum.shape)}"
    return f"a {MOMENTUM} of type {type(momentum).__name__}"
