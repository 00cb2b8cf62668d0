"""One rank's part of the interchange tests: stock Megatron's Muon, or ours, trains and loads.

The stock side is in processes of its own, with the CPU stand-in alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from megatron_muon.errors import CheckpointError
from megatron_muon.testing.law import build
from megatron_muon.testing.law.backward import _mask, _positions, forward_and_backward, this_replica
from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.model import tokens

STEPS, STEPS_AFTER = 3, 5


@dataclass(frozen=True, kw_only=True)
class Run:
    """Train and save, or load; and train on.

    Attributes:
        case: Sizes, precision and the way to DDP.
        sharding: ``distrib_optim_sharding_type`` that Megatron would save with, ``None`` without
            any distributed optimizer.
        counts_in_group: Whether stock's AdamW counts its steps in the group.
        is_adamw: Whether stock trains with AdamW alone, as Megatron does without ``--optimizer``.
        load: Folder to load from; everything is garbage before.
        save: Folder to save to, after :data:`STEPS`.
        fault: What is broken after the load, a key of :data:`FAULTS`.
        steps_after: Steps after the save or the load.
    """

    case: Case
    sharding: str | None = "dp_reshardable"
    counts_in_group: bool = True
    is_adamw: bool = False
    load: str | None = None
    save: str | None = None
    fault: str | None = None
    steps_after: int = STEPS_AFTER


@dataclass
class Kept:
    """What a rank holds where it saved, or when it has loaded.

    Attributes:
        tp_rank: Tensor-parallel rank.
        masters: Flat pieces of its masters with where each starts, by name.
        states: State of the same pieces.
        steps: Counts of steps that AdamW has.
        losses: Loss of the whole batch before each of the steps after, and behind the last.
        refusal: Why it did not load.
    """

    tp_rank: int = 0
    masters: dict[str, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    states: dict[str, list[tuple[int, dict[str, torch.Tensor]]]] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    losses: list[float] = field(default_factory=list)
    refusal: str = ""


def run_stock(jobs: Sequence[Run]) -> list[Kept]:
    """Run Megatron's own Muon, one job after the other on this rank."""
    from megatron_muon.integration.install import install

    install(device="cpu", optimizer=False)
    return [
        _run(
            job,
            _stock_adamw if job.is_adamw else _stock_optimizer,
            _stock_on_cpu(job.counts_in_group),
        )
        for job in jobs
    ]


def run_ours(jobs: Sequence[Run]) -> list[Kept]:
    """Run this package's Muon, one job after the other on this rank."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    return [_run(job, build.build_optimizer, contextlib.nullcontext()) for job in jobs]


def _run(job: Run, make: Callable[[Case, list[Any]], Any], surroundings: Any) -> Kept:
    from megatron.core import parallel_state as state

    with build.parallel_state(*job.case.grid), surroundings:
        wrap = _wrap_for_adamw if job.is_adamw else build.wrap
        chunks = wrap(job.case, build.build_model(job.case))
        optimizer = make(job.case, chunks)
        scheduler = _scheduler(job.case, optimizer)
        kept = Kept(state.get_tensor_model_parallel_rank())
        if job.load is not None:
            _poison(optimizer, chunks)
            try:
                _load(job.load, chunks, optimizer, scheduler)
            except CheckpointError as error:
                kept.refusal = str(error)
                return kept
            FAULTS[job.fault](optimizer)
        else:
            for _ in range(STEPS):
                _step(job.case, chunks, optimizer, scheduler)
        if job.save is not None:
            _save(job, chunks, optimizer, scheduler)
        kept.masters, _ = build.masters(optimizer, chunks)
        kept.states = build.states(optimizer, chunks)
        kept.steps = set(_counts(optimizer))
        kept.losses = [_loss(chunks[0])]
        for _ in range(job.steps_after):
            _step(job.case, chunks, optimizer, scheduler)
            kept.losses.append(_loss(chunks[0]))
        return kept


# --------------------------------------------------------------------------------------------
# Stock Megatron on a CPU
# --------------------------------------------------------------------------------------------


class GroupAdamW(torch.optim.Optimizer):
    """torch's AdamW, which counts its steps in the group as Transformer Engine's and Apex's do."""

    def __init__(self, params: Any, adam_w_mode: bool, capturable: bool, **options: Any) -> None:
        assert adam_w_mode
        assert not capturable
        super().__init__(params, options)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                for key in ("exp_avg", "exp_avg_sq"):
                    self.state[p].setdefault(key, torch.zeros_like(p))
            beta1, beta2 = group["betas"]
            adamw(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [torch.tensor(group["step"] - 1.0) for _ in params],
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                maximize=False,
            )


@contextlib.contextmanager
def _stock_on_cpu(counts_in_group: bool) -> Iterator[None]:
    """Let stock Megatron train, save and load here.

    gloo refuses the uneven gather of its layer-wise optimizer, which has a second method that sends
    weights one by one. Its byte-sharded optimizer neither loads its default form whole nor the
    other at all unless AdamW counts in the group (0.19.2, distrib_optimizer.py:839 and 1223).
    """
    import megatron.core.optimizer as host
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer as Stock

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Stock, "allgather_params", Stock.broadcast_params))
        if counts_in_group:
            for module, name, value in (
                (host, "USING_PYTORCH_OPTIMIZER", False),
                (host, "Adam", GroupAdamW),
                (distrib_optimizer, "Adam", GroupAdamW),
                (distrib_optimizer, "HAVE_APEX_OR_TE", True),
                (distrib_optimizer, "USING_APEX_OPTIMIZER", True),
            ):
                stack.enter_context(mock.patch.object(module, name, value))
        yield


def _stock_optimizer(case: Case, chunks: list[Any]) -> Any:
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    ours = build.optimizer_config(case)
    values = {f.name: getattr(ours, f.name) for f in fields(OptimizerConfig) if f.init}
    # Stock's name of a way to step whole matrices.
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**{**values, "muon_tp_mode": "duplicated"}), chunks
    )
    assert not list(build.find_muons(optimizer)), "this is not stock Megatron"
    return optimizer


def _wrap_for_adamw(case: Case, chunks: list[Any]) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.training import training

    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=case.grads_in_fp32, use_distributed_optimizer=True
    )
    wrapped: list[Any] = training.wrap_model_chunks_with_ddp(
        chunks, build.transformer_config(case), ddp_config
    )
    return wrapped


def _stock_adamw(case: Case, chunks: list[Any]) -> Any:
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=case.lr, min_lr=case.lr, weight_decay=case.weight_decay,
            bf16=case.bf16, params_dtype=case.dtype, use_distributed_optimizer=True,
        ),
        chunks,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------
# Training, saving and loading, as megatron.training does
# --------------------------------------------------------------------------------------------


def _scheduler(case: Case, optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer, case.lr, case.lr, case.lr, 0, 100, "constant", case.weight_decay,
        case.weight_decay, 100, "constant",
    )  # fmt: skip


def _step(case: Case, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    forward_and_backward(case, chunks[0], optimizer)
    success, _, _ = optimizer.step()
    assert success
    scheduler.step(increment=1)


@torch.no_grad()
def _loss(chunk: Any) -> float:
    replica = this_replica()
    inputs, labels = (whole.chunk(replica.size)[replica.rank] for whole in tokens())
    mean = chunk(inputs, _positions(len(inputs)), _mask(), labels=labels).float().mean()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def _state(chunks: list[Any], optimizer: Any, scheduler: Any, metadata: Any, **how: Any) -> Any:
    """Return the state as ``generate_state_dict`` of megatron.training.checkpointing does."""
    from megatron.core.utils import unwrap_model

    model = {"model": unwrap_model(chunks[0]).sharded_state_dict(metadata=metadata)}
    return {
        **model,
        "optimizer": optimizer.sharded_state_dict(dict(model), metadata=metadata, **how),
        "opt_param_scheduler": scheduler.state_dict(),
    }


def _dp_cp_group() -> Any:
    from megatron.core import parallel_state as state

    return state.get_data_parallel_group(with_context_parallel=True)


def _save(job: Run, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
    from megatron.core import dist_checkpointing
    from megatron.training.checkpointing import _clean_metadata_for_serialization

    # As _build_sharded_state_dict_metadata of megatron.training.checkpointing.
    metadata = {
        **({} if job.sharding is None else {"distrib_optim_sharding_type": job.sharding}),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": _dp_cp_group(),
    }
    state = _state(chunks, optimizer, scheduler, metadata)
    dist_checkpointing.save(
        state, job.save, content_metadata=_clean_metadata_for_serialization(metadata)
    )


def _load(folder: str, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    metadata = dist_checkpointing.load_content_metadata(folder)
    metadata["dp_cp_group"] = _dp_cp_group()
    wanted = _state(chunks, optimizer, scheduler, metadata, is_loading=True)
    found = dist_checkpointing.load(wanted, folder)
    unwrap_model(chunks[0]).load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    scheduler.load_state_dict(found["opt_param_scheduler"])


# --------------------------------------------------------------------------------------------
# What an optimizer holds
# --------------------------------------------------------------------------------------------


def _tensors(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield everything an optimizer would go on from: masters and state."""
    for leaf in build.leaves(optimizer):
        for group in leaf.optimizer.param_groups:
            for master in group["params"]:
                yield "master", master
                for key, value in leaf.optimizer.state.get(master, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield key, value


def _counts(optimizer: Any) -> Iterator[int]:
    for leaf in build.leaves(optimizer):
        for group in leaf.optimizer.param_groups:
            if "step" in group and group["params"]:
                yield int(group["step"])
    yield from (int(value) for key, value in _tensors(optimizer) if key == "step")


@torch.no_grad()
def _poison(optimizer: Any, chunks: list[Any]) -> None:
    for _, tensor in _tensors(optimizer):
        tensor.fill_(11)
    for chunk in chunks:
        for param in chunk.parameters():
            param.fill_(0.5)


def _scale_momentum(factor: float) -> Callable[[Any], None]:
    def scale(optimizer: Any) -> None:
        with torch.no_grad():
            for key, tensor in _tensors(optimizer):
                if key == "momentum_buffer":
                    tensor.mul_(factor)

    return scale


FAULTS: dict[str | None, Callable[[Any], None]] = {
    None: lambda optimizer: None,
    "momentum is not loaded": _scale_momentum(0.0),
    # 1 / (1 - mu) at the 0.9 of a Case.
    "momentum is a sum": _scale_momentum(10.0),
}
"""What is broken in what was loaded."""
