"""One process, plain torch: what every distributed run must compute.

The reference of the law tests. It sees whole weights and whole gradients, knows no rank, layout,
buffer or shard, and imports nothing of this package, of Megatron or of emerging-optimizers, so that
a fault of theirs cannot be a fault of its too. It is written to be checked by eye, not to be fast.

References:
    Muon: https://kellerjordan.github.io/posts/muon/
    Size of the update: https://arxiv.org/abs/2502.16982, section 2.2.
    AdamW: https://arxiv.org/abs/1711.05101, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),) * 5,
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""Five steps ``X <- a X + b (X X^T) X + c (X X^T)^2 X`` as ``(a, b, c)``. ``simple`` is K. Jordan's
set, ``quintic`` the five of modded-nanogpt's train_gpt_medium.py."""


@dataclass(frozen=True, kw_only=True)
class OracleSettings:
    """Hyper-parameters of a reference run.

    Attributes:
        lr: Learning rate of matrices and of all other parameters.
        weight_decay: Decoupled decay of everything that has two dimensions.
        momentum: EMA factor of the matrices' momentum.
        nesterov: Whether to orthogonalize the look-ahead momentum.
        coefficients: Name of a set in :data:`COEFFICIENTS`.
        scale: Factor on top of the square root of a block's longer side.
        clip: Largest norm of all gradients together, ``None`` for no clipping.
        skip_above: Norm above which a step is skipped and changes nothing.
        betas: AdamW's factors.
        eps: AdamW's epsilon.
        dtype: Arithmetic of everything: fp64, or fp32 to see the size of rounding.
    """

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    coefficients: str = "quintic"
    scale: float = 1.0
    clip: float | None = None
    skip_above: float = math.inf
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    dtype: torch.dtype = torch.float64


@dataclass
class Oracle:
    """A model's weights and their optimizer state.

    Attributes:
        weights: Whole weights by name, replaced by each step.
        blocks: For each matrix that Muon steps, the lists of its rows that are orthogonalized
            apart. A name that is not here belongs to AdamW.
        settings: The hyper-parameters.
    """

    weights: dict[str, torch.Tensor]
    blocks: Mapping[str, Sequence[Sequence[int]]]
    settings: OracleSettings
    num_steps: int = 0
    grad_norm: float = 0.0
    _momentum: dict[str, torch.Tensor] = field(default_factory=dict)
    _square: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dtype = self.settings.dtype
        self.weights = {name: weight.to(dtype) for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            self._momentum[name] = torch.zeros_like(weight)
            self._square[name] = torch.zeros_like(weight)

    def step(self, replicas: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Step once on the mean of the replicas' gradients.

        Args:
            replicas: The gradients of each data-parallel rank, whole, by name.
        """
        grads = {
            name: torch.stack([grads[name].to(self.settings.dtype) for grads in replicas]).mean(0)
            for name in self.weights
        }
        self.grad_norm = math.sqrt(sum(float((grad * grad).sum()) for grad in grads.values()))
        if self.grad_norm > self.settings.skip_above:
            return
        if self.settings.clip is not None:
            factor = min(1.0, self.settings.clip / (self.grad_norm + 1e-6))
            grads = {name: grad * factor for name, grad in grads.items()}
        self.num_steps += 1
        for name, grad in grads.items():
            step = self._muon if name in self.blocks else self._adamw
            step(name, grad)

    def _muon(self, name: str, grad: torch.Tensor) -> None:
        settings, mu = self.settings, self.settings.momentum
        momentum = mu * self._momentum[name] + (1 - mu) * grad
        self._momentum[name] = momentum
        ahead = mu * momentum + (1 - mu) * grad if settings.nesterov else momentum
        update = torch.empty_like(ahead)
        for rows in self.blocks[name]:
            block = ahead[list(rows)]
            size = settings.scale * math.sqrt(max(block.shape))
            update[list(rows)] = size * orthogonalize(block, COEFFICIENTS[settings.coefficients])
        weight = self.weights[name]
        self.weights[name] = weight - settings.lr * (settings.weight_decay * weight + update)

    def _adamw(self, name: str, grad: torch.Tensor) -> None:
        settings, (beta1, beta2) = self.settings, self.settings.betas
        mean = beta1 * self._momentum[name] + (1 - beta1) * grad
        square = beta2 * self._square[name] + (1 - beta2) * grad * grad
        self._momentum[name], self._square[name] = mean, square
        mean = mean / (1 - beta1**self.num_steps)
        square = square / (1 - beta2**self.num_steps)
        weight = self.weights[name]
        decay = settings.weight_decay if weight.ndim >= 2 else 0.0
        update = decay * weight + mean / (square.sqrt() + settings.eps)
        self.weights[name] = weight - settings.lr * update


def orthogonalize(
    x: torch.Tensor, coefficients: Sequence[tuple[float, float, float]]
) -> torch.Tensor:
    """Newton-Schulz of a whole matrix, as it stands in the papers.

    Args:
        x: The matrix, ``(M, N)``.
        coefficients: One ``(a, b, c)`` a step.
    """
    if x.shape[0] > x.shape[1]:
        return orthogonalize(x.T, coefficients).T
    norm = x.norm()
    if norm == 0:
        return torch.zeros_like(x)
    x = x / norm
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of ``expected``, in fp64.

    An expected zero must be met exactly: any difference is then infinite.
    """
    difference = float((got.double() - expected.double()).norm())
    size = float(expected.double().norm())
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / size
