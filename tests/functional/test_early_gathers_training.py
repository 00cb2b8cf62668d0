"""The real script trains the same whether gathers of weights start in the step or after it.

With skipped steps, evaluations and checkpoints between steps, and two chunks a rank. The first
steps are skipped: Megatron turns its hooks on after the first that is not, and evaluates only then.
"""

from __future__ import annotations

import pytest

from megatron_muon.testing.training import train
from tests.functional.jobs import MODEL, MUON

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

STEPS = 9
FLAGS = [
    *(flag for flag in MODEL if flag != "--bf16"), *MUON, "--mock-data", "--train-iters",
    str(STEPS), "--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "8000",
    "--muon-gather-budget-mib", "0.05", "--eval-interval", "4", "--eval-iters", "1",
]  # fmt: skip
MODELS: dict[str, tuple[int, list[str]]] = {
    "skipped steps and checkpoints": (
        2,
        ["--fp16", "--initial-loss-scale", "262144", "--hysteresis", "1", "--save-interval",
         "3"],
    ),
    "two chunks a rank": (
        4,
        ["--bf16", "--num-layers", "4", "--pipeline-model-parallel-size", "2",
         "--num-virtual-stages-per-pipeline-rank", "2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_losses_are_those_without_it(model, tmp_path):
    num_ranks, more = MODELS[model]
    losses = []
    for early in ([], ["--muon-overlap-param-gather"]):
        folder = tmp_path / ("early" if early else "late")
        saves = ["--save", str(folder / "saved")] if "--save-interval" in more else []
        losses.append(train([*FLAGS, *more, *early, *saves], num_ranks, folder).values)
    late, early = losses
    assert len(late) >= STEPS - 5
    assert late == early
    assert len(set(late)) > 1
