"""The start-up block says how many micro-groups there are and whether they overlap, and from where.

The largest matrix has 64 x 192 elements; tensor parallelism cuts all.
"""

from __future__ import annotations

import re

import pytest

from tests.functional.jobs import MODEL, MUON, ROOT, launch, run_on

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]

SCRIPT = str(ROOT / "scripts" / "pretrain_gpt.py")
FLAGS = [
    *MODEL, *MUON, "--mock-data", "--transformer-impl", "local", "--num-layers", "6",
]  # fmt: skip
LOSS = re.compile(r"lm loss: ([-+.\dE]+)")
FROM = re.compile(r"they overlap from --muon-gather-budget-mib ([.\d]+)")


def said(tmp_path, budget_mib, tp="2"):
    flags = ["--muon-gather-budget-mib", str(budget_mib), "--tensor-model-parallel-size", tp]
    logs = tmp_path / f"{budget_mib} {tp}"
    job = launch(run_on(2, SCRIPT, *FLAGS, *flags), logs, timeout_s=90)
    assert job.code == 0, job.said
    return job.said


def test_the_start_block_says_whether_micro_groups_overlap(tmp_path):
    one_by_one = said(tmp_path, 0.02)
    assert "micro-groups one after the other" in one_by_one
    (least,) = FROM.findall(one_by_one)
    assert 4 * 4 * 64 * 192 / 2 <= float(least) * 2**20 <= 4 * 4 * 64 * 192 + 2**20 / 1000
    overlapped = said(tmp_path, least)
    assert "micro-groups, exchanged while another is orthogonalized" in overlapped
    whole = said(tmp_path, 64)
    assert "one micro-group: all matrices are exchanged at once" in whole
    nothing_moves = said(tmp_path, 64, "1")
    assert "micro-group" not in nothing_moves
    losses = LOSS.findall(whole)
    assert len(losses) == 3
    assert LOSS.findall(one_by_one) == LOSS.findall(overlapped) == losses
