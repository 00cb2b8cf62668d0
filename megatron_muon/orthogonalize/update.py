"""Momentum, decay and the step on plain fp32 tensors."""

from __future__ import annotations

import torch

MOMENTUM = "momentum_buffer"
"""Key of the momentum in an optimizer's state: the name Megatron's own Muon uses."""


def advance_momentum(
    momentum: torch.Tensor,
    grad: torch.Tensor,
    mu: float,
    nesterov: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Blend the gradient into the momentum and return what is orthogonalized.

    ``m = mu m + (1 - mu) g``; the result is ``m`` itself, or ``mu m + (1 - mu) g`` once more
    with Nesterov (emerging-optimizers' and Megatron's convention). The gradient is not written.

    Args:
        momentum: Momentum, any shape, fp32; updated in place.
        grad: Raw unscaled gradient of the same shape and dtype.
        mu: EMA factor in [0, 1).
        nesterov: Whether to look ahead.
        out: Where the result goes, of the same shape and dtype, or the momentum itself.
    """
    momentum.lerp_(grad, 1 - mu)
    if nesterov:
        return torch.lerp(grad, momentum, mu, out=out)
    return momentum if out is None else out.copy_(momentum)


def accumulate_momentum(
    momentum: torch.Tensor,
    grad: torch.Tensor,
    mu: float,
    nesterov: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the gradient to the momentum and return what is orthogonalized.

    ``m = mu m + g``; the result is ``m`` itself, or ``g + mu m`` with Nesterov (the convention of
    Megatron-LM #1428 and of torch.optim.SGD). It is ``1 / (1 - mu)`` times that of
    :func:`advance_momentum`, so momentum does not move between the two as it is.

    Args:
        momentum: Momentum, any shape; updated in place.
        grad: Gradient of the same shape and dtype; not written.
        mu: Factor in [0, 1).
        nesterov: Whether to look ahead.
        out: As in :func:`advance_momentum`.
    """
    momentum.mul_(mu).add_(grad)
    if nesterov:
        return torch.add(grad, momentum, alpha=mu, out=out)
    return momentum if out is None else out.copy_(momentum)


def apply_update(
    weight: torch.Tensor, update: torch.Tensor, lr: float, weight_decay: float
) -> None:
    """Decay and move a master weight in place: ``w = (1 - lr wd) w - lr u``."""
    if weight_decay:
        weight.add_(weight, alpha=-lr * weight_decay)
    weight.add_(update, alpha=-lr)
