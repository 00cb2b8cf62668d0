"""Values of Megatron's own settings that it would take wrongly, or refuse without a word."""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron_muon.errors import ConfigurationError

_LARGEST = torch.finfo(torch.float32).max


def check_host_values(config: Any) -> None:
    """Check clipping and the loss scale.

    Args:
        config: Megatron's optimizer config, or its arguments.

    Raises:
        ConfigurationError: A value has no meaning; the message names the flag.
    """
    if not config.clip_grad >= 0:
        raise ConfigurationError(
            f"--clip-grad is {config.clip_grad}: expected a number of 0 or more; 0 clips nothing."
        )
    if config.loss_scale is not None:
        _check_scale("--loss-scale", config.loss_scale)
    elif config.fp16:
        _check_dynamic_scale(config)


def _check_dynamic_scale(config: Any) -> None:
    _check_scale("--initial-loss-scale", config.initial_loss_scale)
    _check_scale("--min-loss-scale", config.min_loss_scale)
    if config.initial_loss_scale < config.min_loss_scale:
        raise ConfigurationError(
            f"--initial-loss-scale is {config.initial_loss_scale}, below --min-loss-scale "
            f"{config.min_loss_scale}: raise the first or lower the second."
        )
    for flag, value in (
        ("--loss-scale-window", config.loss_scale_window),
        ("--hysteresis", config.hysteresis),
    ):
        if not value >= 1:
            raise ConfigurationError(f"{flag} is {value}: expected 1 or more.")


def _check_scale(flag: str, scale: float) -> None:
    if not (0 < scale <= _LARGEST and math.isfinite(scale)):
        raise ConfigurationError(
            f"{flag} is {scale}: expected a number above 0 that fp32 can hold, such as a power of "
            "two."
        )
