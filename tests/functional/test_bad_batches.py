"""A loss that is not a number, through the real program: steps are skipped, then training ends."""

from __future__ import annotations

import re

import pytest

from tests.functional.jobs import MODEL, MUON, launch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

SCRIPT = """
import torch
import torch.distributed as dist

from megatron_muon.tools import pretrain_gpt
from megatron.training import get_args

loss_func = pretrain_gpt.loss_func

def bad_loss_func(loss_mask, output_tensor):
    loss, num_tokens, report = loss_func(loss_mask, output_tensor)
    bad = [int(step) for step in "{steps}".split()]
    if get_args().curr_iteration + 1 in bad and dist.get_rank() == 1:
        loss = loss * torch.nan
    return loss, num_tokens, report

pretrain_gpt.loss_func = bad_loss_func
pretrain_gpt.main()
"""


def run(tmp_path, steps, *flags):
    """Train eight steps on two ranks, of which one has a NaN loss in the given steps."""
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(SCRIPT.format(steps=steps))
    command = ["run", "--device", "cpu", str(script), *MODEL, *MUON, "--mock-data",
               "--train-iters", "8", *flags]  # fmt: skip
    return launch([command] * 2, tmp_path / "logs", timeout_s=60)


def test_a_bad_step_is_skipped_and_named(tmp_path):
    job = run(tmp_path, "3 4 6", "--muon-max-skipped-steps", "2")
    assert job.code == 0, job.said
    skips = re.findall(
        r"step skipped: the gradient of (\S+) and others .*\((\d) in a row", job.said
    )
    assert [(name.endswith("weight"), row) for name, row in skips] == [
        (True, "1"), (True, "2"), (True, "1")]  # fmt: skip
    rates = re.findall(r"learning rate: (\S+)", job.said)
    # The schedule stands still in a skipped step.
    assert [rates[i] == rates[i - 1] for i in range(1, 8)] == [
        False, True, True, False, True, False, False]  # fmt: skip
    assert "nan" not in "".join(re.findall(r"lm loss: (\S+)", job.said)).lower()


def test_too_many_end_training_on_every_rank(tmp_path):
    job = run(tmp_path, "3 4 5", "--muon-max-skipped-steps", "2")
    assert job.code != 0
    assert len(job.errors) == 1
    assert "has inf or NaN, in 3 steps in a row" in job.errors[0]
    assert job.seconds < 60
