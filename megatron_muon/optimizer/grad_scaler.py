"""The loss scale of a job: one scaler at the top, which the optimizers below it only read."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.grad_scaler import (
    ConstantGradScaler,
    DynamicGradScaler,
    MegatronGradScaler,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig


def make_grad_scaler(config: OptimizerConfig) -> MegatronGradScaler | None:
    """Return the scaler that a config asks for, as Megatron chooses it for AdamW.

    ``loss_scale`` gives a constant scale in every precision, fp16 without it a dynamic one; bf16
    and fp32 have none.
    """
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        # Megatron's factors (0.19.2, optimizer/__init__.py:655): powers of two round nothing.
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


def can_fall(scaler: MegatronGradScaler | None) -> bool:
    """Whether a lower scale is still to be tried, so that an overflow may be its fault alone."""
    if not isinstance(scaler, DynamicGradScaler):
        return False
    return bool(scaler.scale.isfinite() & (scaler.scale > scaler.min_scale))


class SharedGradScaler(MegatronGradScaler):
    """What an optimizer below the top has in the place of a scaler of its own.

    Scalers of their own would drift apart, since each would see the overflows of its own
    gradients only; one scaler updated by each of them would grow several times a step. So this
    one reads the top's scale, and its ``update`` does nothing. Its state is that of the top: every
    optimizer saves the same and loads the same.
    """

    def __init__(self, top: MegatronGradScaler) -> None:
        """Read the scale of ``top``."""
        self._top = top

    @property
    def scale(self) -> torch.Tensor:
        """The loss scale, fp32 of shape (1,)."""
        scale: torch.Tensor = self._top.scale
        return scale

    @property
    def inv_scale(self) -> torch.Tensor:
        """One over the loss scale, fp32 of shape (1,)."""
        inverse: torch.Tensor = self._top.inv_scale
        return inverse

    def update(self, found_inf: bool) -> None:
        """Do nothing: the top updates its scaler once a step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the top scaler's state."""
        return dict(self._top.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the top scaler's state."""
        self._top.load_state_dict(state_dict)


def shared(top: MegatronGradScaler | None) -> SharedGradScaler | None:
    """Return what the optimizers below the top have of its scaler."""
    return None if top is None else SharedGradScaler(top)
