"""Momentum, decay and the step on plain tensors, by hand-made numbers."""

from __future__ import annotations

import torch

from megatron_muon.orthogonalize.update import (
    accumulate_momentum,
    advance_momentum,
    apply_update,
)


def test_momentum_is_an_average_of_the_gradients():
    momentum = torch.tensor([1.0, -2.0])
    grad = torch.tensor([3.0, 2.0])
    ahead = advance_momentum(momentum, grad, 0.75, nesterov=False)
    assert ahead is momentum
    assert momentum.tolist() == [1.5, -1.0]
    assert grad.tolist() == [3.0, 2.0]


def test_nesterov_looks_ahead_and_leaves_the_momentum():
    momentum = torch.tensor([1.0, -2.0])
    grad = torch.tensor([3.0, 2.0])
    ahead = advance_momentum(momentum, grad, 0.75, nesterov=True)
    assert momentum.tolist() == [1.5, -1.0]
    assert ahead.tolist() == [1.875, -0.25]
    assert grad.tolist() == [3.0, 2.0]


def test_no_momentum_is_the_gradient():
    momentum = torch.tensor([5.0])
    assert advance_momentum(momentum, torch.tensor([2.0]), 0.0, nesterov=True).tolist() == [2.0]
    assert momentum.tolist() == [2.0]


def test_decay_is_decoupled_from_the_update():
    weight = torch.tensor([4.0, -8.0])
    apply_update(weight, torch.tensor([1.0, 2.0]), lr=0.5, weight_decay=0.25)
    assert weight.tolist() == [4.0 * 0.875 - 0.5, -8.0 * 0.875 - 1.0]


def test_zero_update_only_decays():
    weight = torch.tensor([4.0])
    apply_update(weight, torch.zeros(1), lr=0.5, weight_decay=0.5)
    assert weight.tolist() == [3.0]
    apply_update(weight, torch.zeros(1), lr=0.5, weight_decay=0.0)
    assert weight.tolist() == [3.0]


def test_accumulated_momentum_is_a_sum_of_the_gradients():
    momentum = torch.tensor([1.0, -2.0])
    grad = torch.tensor([3.0, 2.0])
    ahead = accumulate_momentum(momentum, grad, 0.75, nesterov=False)
    assert ahead is momentum
    assert momentum.tolist() == [3.75, 0.5]
    assert grad.tolist() == [3.0, 2.0]


def test_accumulated_momentum_looks_ahead_by_the_gradient_itself():
    momentum = torch.tensor([1.0, -2.0])
    grad = torch.tensor([3.0, 2.0])
    ahead = accumulate_momentum(momentum, grad, 0.75, nesterov=True)
    assert momentum.tolist() == [3.75, 0.5]
    assert ahead.tolist() == [3.0 + 0.75 * 3.75, 2.0 + 0.75 * 0.5]
    assert grad.tolist() == [3.0, 2.0]


def test_the_sum_is_the_average_over_one_minus_mu():
    """The two conventions have one direction; a buffer of one is not a buffer of the other."""
    average, total = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for step in range(20):
        grad = torch.tensor([1.0 + step, -2.0], dtype=torch.float64)
        ahead = advance_momentum(average, grad, 0.95, nesterov=True)
        further = accumulate_momentum(total, grad, 0.95, nesterov=True)
        torch.testing.assert_close(total * 0.05, average, rtol=1e-12, atol=0)
        torch.testing.assert_close(further * 0.05, ahead, rtol=1e-12, atol=0)
