"""Where a step's time goes: seconds, and ranges in traces, are those of its phases."""

from __future__ import annotations

import time

import pytest
import torch

from megatron_muon import Muon
from megatron_muon.optimizer.account import PHASES, StepAccount, label_of

MOVES_NOTHING = set(PHASES) - {"exchange"}
"""Phases of a step on one process."""


def muon(device="cpu", size=192):
    params = [torch.nn.Parameter(torch.randn(size, 256, device=device)) for _ in range(4)]
    for param in params:
        param.grad = torch.randn_like(param)
    return Muon([{"params": params, "use_muon": True}])


def test_phases_are_all_of_a_step_and_no_more():
    optimizer = muon()
    optimizer.step()
    began = time.perf_counter()
    optimizer.step()
    whole = time.perf_counter() - began
    seconds = optimizer.account.seconds
    assert set(seconds) == MOVES_NOTHING
    assert min(seconds.values()) > 0
    assert 0.5 * whole < sum(seconds.values()) < whole
    assert max(seconds, key=seconds.get) == "newton_schulz"


def test_time_of_a_phase_is_what_is_spent_in_it():
    account = StepAccount()
    for _ in range(2):
        with account.phase("exchange"):
            time.sleep(0.01)
    time.sleep(0.05)
    assert 0.02 <= account.seconds["exchange"] < 0.05
    account.clear()
    assert account.seconds == {}
    with pytest.raises(ZeroDivisionError), account.phase("update"):
        1 / 0  # noqa: B018
    assert set(account.seconds) == {"update"}


def test_a_profiler_sees_the_phases():
    """Each in its place: the products of Newton-Schulz lie inside its range."""
    optimizer = muon()
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        optimizer.step()
    spans = {label_of(phase): [] for phase in MOVES_NOTHING}
    products = []
    for event in trace.events():
        span = event.time_range.start, event.time_range.end
        if event.name in spans:
            spans[event.name].append(span)
        elif event.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"):
            products.append(span)
    assert all(spans.values())
    assert products
    for start, end in products:
        assert any(low <= start and end <= high for low, high in spans["muon-newton-schulz"])
        assert not any(low <= start and end <= high for low, high in spans["muon-momentum"])


def test_nothing_is_recorded_without_a_profiler():
    with StepAccount().phase("update"):
        pass
    phase = StepAccount().phase("update")
    phase.__enter__()
    assert phase._recorded is None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        phase = StepAccount().phase("update")
        phase.__enter__()
        assert phase._recorded is not None
        phase.__exit__(None, None, None)


def test_ranges_begin_and_end_in_turn():
    optimizer, told = muon(), []
    optimizer.account.ranges = (
        lambda name: told.append(("begin", name)),
        lambda name: told.append(("end", name)),
    )
    optimizer.step()
    assert {name for _, name in told} == set(map(label_of, MOVES_NOTHING))
    for (first, name), (second, other) in zip(told[::2], told[1::2], strict=True):
        assert (first, second, name) == ("begin", "end", other)


@pytest.mark.gpu
def test_seconds_are_those_of_the_device_where_they_are_read():
    """The host is done long before: large products take the device longer than their launches."""
    optimizer = muon("cuda", 8192)
    for is_read in (False, True, True):
        optimizer.account.is_read = is_read
        torch.cuda.synchronize()
        optimizer.step()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    optimizer.step()
    ended.record()
    torch.cuda.synchronize()
    whole = began.elapsed_time(ended) / 1e3
    assert 0.5 * whole < sum(optimizer.account.seconds.values()) <= 1.01 * whole
