"""One rank's part of the regression: a small Megatron model is fitted in fp16 and in bf16.

Two tensor-parallel linear layers in ``Float16Module`` and DDP, Megatron's schedule, the optimizer
of Megatron's factory and its scheduler, stepped as Megatron's training loop does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_muon.testing.law import build
from megatron_muon.testing.law.backward import this_replica
from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.mutants import SCALE_MUTANTS, SKIP_MUTANTS

BREAKS = {None: contextlib.nullcontext, **SCALE_MUTANTS, **SKIP_MUTANTS}
"""What breaks a step, by the name of the fault; ``None`` breaks nothing."""

STEPS = 60
SAMPLES, WIDTH_IN, HIDDEN, WIDTH_OUT = 256, 24, 48, 16
LR = 0.02


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One run.

    Attributes:
        fp16: Whether the model is in fp16; else in bf16.
        micro_batches: Micro-batches of each step.
        initial_scale: Loss scale at the start.
        window: Good steps after which it doubles.
        steps: Iterations, skipped ones included.
        layout: ``--muon-layout``.
        mutant: How the run is broken on purpose.
    """

    fp16: bool = True
    micro_batches: int = 1
    initial_scale: float = 2.0**12
    window: int = 15
    steps: int = STEPS
    layout: str = "owner"
    mutant: str | None = None


@dataclass
class Fitted:
    """What a rank saw of a run.

    Attributes:
        losses: Loss of the whole batch before each step, and after the last.
        scales: Loss scale of each step.
        norms: Norm of the gradients of each step, ``None`` where it was skipped.
        weights: The model's weights at the end.
        masters: Pieces of fp32 masters at the end, by name.
    """

    losses: list[float]
    scales: list[float]
    norms: list[float | None]
    weights: dict[str, torch.Tensor]
    masters: dict[str, torch.Tensor]

    @property
    def num_skipped(self) -> int:
        """Steps that were skipped."""
        return self.norms.count(None)


def run_fits(fits: Sequence[Fit]) -> list[Fitted]:
    """Fit one after the other on this rank."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    with build.parallel_state(1):
        fitted = []
        for fit in fits:
            with BREAKS[fit.mutant]():
                fitted.append(_fit(fit))
        return fitted


def run_settled(fits: Sequence[Fit]) -> list[tuple[Fitted, Fitted]]:
    """Fit, and fit again from the scale of the first good step, so many steps fewer."""
    pairs = []
    for fit, first in zip(fits, run_fits(fits), strict=True):
        skipped = first.num_skipped
        scale = first.scales[skipped]
        (later,) = run_fits([replace(fit, initial_scale=scale, steps=fit.steps - skipped)])
        pairs.append((first, later))
    return pairs


def run_all(
    fits: Sequence[Fit], settling: Sequence[Fit]
) -> tuple[list[Fitted], list[tuple[Fitted, Fitted]]]:
    """Run :func:`run_fits` and :func:`run_settled`."""
    return run_fits(fits), run_settled(settling)


def _model(config: Any) -> Any:
    """Return the model; its weights are exact in fp16 and in bf16."""
    from megatron.core.enums import ModelType
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.module import Float16Module, MegatronModule

    class Regressor(MegatronModule):  # type: ignore[misc]
        """Two layers."""

        def __init__(self) -> None:
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            options = dict(
                config=config, init_method=config.init_method, bias=True, skip_bias_add=False
            )
            self.linear_fc1 = ColumnParallelLinear(WIDTH_IN, HIDDEN, gather_output=False, **options)
            self.linear_fc2 = RowParallelLinear(
                HIDDEN, WIDTH_OUT, input_is_parallel=True, **options
            )

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            """Return the outputs, ``(samples, WIDTH_OUT)``."""
            hidden, _ = self.linear_fc1(inputs)
            outputs: torch.Tensor = self.linear_fc2(torch.nn.functional.gelu(hidden))[0]
            return outputs

        def set_input_tensor(self, tensor: Any) -> None:
            """Take what an earlier pipeline stage gives: nothing."""

    model = Regressor()
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        param.data.copy_(torch.randint(-32, 33, param.shape, generator=generator) / 256)
    return Float16Module(config, model)


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs, and outputs of unit size that two other layers make of them."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    inputs = draw(SAMPLES, WIDTH_IN)
    outputs = torch.tanh(inputs @ draw(WIDTH_IN, HIDDEN) / 5) @ draw(HIDDEN, WIDTH_OUT) / 5
    return inputs, outputs


def _fit(fit: Fit) -> Fitted:
    from megatron.core.utils import get_model_config

    case = Case(
        fp16=fit.fp16, bf16=not fit.fp16, lr=LR, weight_decay=0.0, layout=fit.layout, clip=1.0,
        grads_in_fp32=not fit.fp16, precision="medium", nesterov=True,
    )  # fmt: skip
    (chunk,) = build.wrap(case, [_model(build.transformer_config(case))])
    optimizer, scheduler = _optimizer(fit, case, chunk)
    get_model_config(chunk).grad_scale_func = optimizer.scale_loss
    losses, scales, norms = [], [], []
    for _ in range(fit.steps):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        scales.append(float(optimizer.get_loss_scale()))
        losses.append(_forward_and_backward(fit, chunk, forward_only=False))
        success, norm, _ = optimizer.step()
        norms.append(norm)
        if success:
            scheduler.step(increment=1)
    losses.append(_forward_and_backward(fit, chunk, forward_only=True))
    return Fitted(
        losses=losses,
        scales=scales,
        norms=norms,
        weights={name: param.detach().clone() for name, param in chunk.named_parameters()},
        masters={member.name: member.master.detach().clone() for member in optimizer.members},
    )


def _optimizer(fit: Fit, case: Case, chunk: Any) -> tuple[Any, Any]:
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    config = build.optimizer_config(case)
    config.min_lr = 0.0
    config.initial_loss_scale, config.loss_scale_window = fit.initial_scale, fit.window
    optimizer = get_megatron_optimizer(config, [chunk])
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, LR, 0.0, 2, STEPS, "linear", 0.0, 0.0, STEPS, "constant"
    )
    return optimizer, scheduler


def _forward_and_backward(fit: Fit, chunk: Any, forward_only: bool) -> float:
    """Run Megatron's schedule over this rank's samples; return the loss of all ranks' samples."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    replica = this_replica()
    own = [whole.chunk(replica.size)[replica.rank] for whole in _data()]
    batches = zip(*(part.chunk(fit.micro_batches) for part in own), strict=True)
    losses = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=batches,
        model=[chunk],
        num_microbatches=fit.micro_batches,
        seq_length=1,
        micro_batch_size=len(own[0]) // fit.micro_batches,
        forward_only=forward_only,
    )
    if not forward_only:
        chunk.finish_grad_sync()
    total = torch.stack([loss["loss"] for loss in losses]).mean()
    torch.distributed.all_reduce(total)
    return float(total) / replica.size


def _forward_step(batches: Iterator[Sequence[torch.Tensor]], model: Any) -> Any:
    inputs, expected = next(batches)

    def loss(outputs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        error = (outputs - expected).square().sum(-1).mean()
        return error, {"loss": error.detach().clone()}

    return model(inputs), loss
