"""Muon's phases among Megatron's timers: printed and written from ``--timing-log-level 2`` on."""

from __future__ import annotations

import re

import pytest

from megatron_muon.testing.training import train
from tests.functional.jobs import MODEL, MUON

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

LABELS = ["muon-momentum", "muon-exchange", "muon-newton-schulz", "muon-update"]
TIMED = "--logging-level 20 --log-timers-to-tensorboard --tensorboard-log-interval 1".split()


def timers_of(tmp_path, level):
    """Train on two ranks; return milliseconds of each timer and step, and the curves' names."""
    flags = [*MODEL, *MUON, "--mock-data", *TIMED, "--timing-log-level", str(level),
             "--tensor-model-parallel-size", "2", "--nvtx-ranges", "--profile",
             "--use-pytorch-profiler", "--profile-step-start", "1",
             "--profile-step-end", "2"]  # fmt: skip
    train(flags, 2, tmp_path)
    said = (tmp_path / "logs" / "rank1.log").read_text()
    found: dict[str, list[float]] = {}
    for name, longest in re.findall(r"^ +([a-z-]+) \.+: \([\d.]+, ([\d.]+)\)", said, re.MULTILINE):
        found.setdefault(name, []).append(float(longest))
    curves = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").rglob("events.*"))
    return found, {name for name in LABELS if f"{name}-time".encode() in curves}


def test_phases_are_timed_in_each_step(tmp_path):
    found, curves = timers_of(tmp_path, 2)
    assert curves == set(LABELS)
    steps = len(found["optimizer-inner-step"])
    assert steps == 3
    for label in LABELS:
        assert len(found[label]) == steps
    for i in range(steps):
        inside = sum(found[label][i] for label in LABELS)
        # Each is the longest of any rank, so that the sum may exceed what one rank took.
        assert 0 < inside < 1.5 * found["optimizer"][i]
    assert sum(found["muon-newton-schulz"]) > sum(found["muon-update"])


def test_below_their_level_there_are_none(tmp_path):
    found, curves = timers_of(tmp_path, 1)
    assert curves == set()
    assert "optimizer-inner-step" in found
    assert not found.keys() & set(LABELS)
