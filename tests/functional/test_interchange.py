"""A user's own script goes on with this package where stock Megatron's Muon stopped, and back."""

import pytest

from megatron_muon.testing.golden.curves import read_tensorboard
from tests.functional.jobs import MODEL, MUON, STOCK_STYLE, launch, run_on

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

FLAGS = [
    *MODEL, *MUON, "--mock-data", "--tensor-model-parallel-size", "2", "--lr", "5e-4",
    "--lr-decay-style", "constant", "--muon-momentum", "0.9", "--muon-fp32-matmul-prec", "high",
    "--muon-tp-mode", "duplicated", "--ckpt-format", "torch_dist",
]  # fmt: skip
# Without data parallelism, since gloo refuses an uneven gather that stock Muon makes.
STOCK, OURS = ["--no-optimizer"], []
SPLIT, END, LOSS = 3, 8, 5e-4


def train(folder, name, iterations, ours, *flags):
    """Train through the launcher; return the losses by iteration, and what was printed."""
    job = launch(
        run_on(
            2, STOCK_STYLE, *FLAGS, "--train-iters", str(iterations), *flags,
            "--tensorboard-dir", str(folder / f"{name}_curves"), ours=ours,
        ),
        folder / f"{name}_logs",
        timeout_s=120,
    )  # fmt: skip
    assert job.code == 0, job.said
    assert ("megatron-muon: Muon is on" in job.said) == (ours is OURS)
    return read_tensorboard(folder / f"{name}_curves").values


@pytest.mark.parametrize(
    ("first", "second", "flags"),
    [(STOCK, OURS, []), (OURS, STOCK, []), (STOCK, OURS, ["--no-load-optim"])],
    ids=["to ours", "to stock", "without its state"],
)
def test_a_script_goes_on_with_the_other_optimizer(tmp_path, first, second, flags):
    saved = str(tmp_path / "saved")
    whole = train(tmp_path, "whole", END, first, "--save", saved, "--save-interval", str(SPLIT))
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text(str(SPLIT))
    rest = train(tmp_path, "rest", END, second, "--load", saved, *flags)
    assert (len(whole), len(rest)) == (END, END - SPLIT)
    apart = max(abs(a - b) for a, b in zip(whole[SPLIT:], rest, strict=True))
    print(f"losses {apart:.1e} apart")
    # The last row shows that the others can fail.
    assert (apart < LOSS) == (not flags)
