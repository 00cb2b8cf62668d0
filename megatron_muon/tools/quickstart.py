"""The quickstart: a GPT trained with Muon under Megatron-Core, TP2 x DP2, on this machine's CPU.

Four ranks are forked from one process that has imported Megatron, so that a run starts in
seconds. The loss is compared with the recorded golden curve at the end.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.errors import ConfigurationError, MuonError
from megatron_muon.testing.ranks import RankFailed, run_program, run_ranks

NUM_RANKS = 4
NUM_STEPS = 60
CASE = "gpt_quickstart_tp2_dp2"
PROGRAM = "megatron_muon.tools.pretrain_gpt"
METRIC = "lm loss"

_ITERATION = re.compile(r" iteration +(\d+)/ +(\d+) .*elapsed time per iteration \(ms\): ([\d.]+) "
                        r".*lm loss: ([\d.E+-]+)")  # fmt: skip
_TIMEOUT_S = 1800.0


def flags(data_prefix: str, num_steps: int, work_dir: Path) -> list[str]:
    """Return Megatron's command line for the quickstart's model, data and schedule.

    Args:
        data_prefix: Indexed dataset of bytes, without its ``.bin`` and ``.idx`` endings.
        num_steps: Training steps.
        work_dir: Folder for the dataset cache and the curves.
    """
    return f"""
        --tensor-model-parallel-size 2
        --num-layers 2 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4
        --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm
        --position-embedding-type rope --untie-embeddings-and-output-weights
        --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
        --seq-length 64 --max-position-embeddings 64
        --micro-batch-size 3 --global-batch-size 12
        --train-iters {num_steps} --lr 2e-3 --min-lr 2e-4 --lr-decay-iters {NUM_STEPS}
        --lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1 --clip-grad 1.0
        --optimizer muon --use-distributed-optimizer --muon-momentum 0.9
        --overlap-grad-reduce --overlap-param-gather
        --bf16 --init-by-name --seed 1234
        --split 100,0,0 --eval-iters 0 --log-interval 1
    """.split() + [
        "--data-path", data_prefix,
        "--data-cache-path", str(work_dir / "dataset_cache"),
        "--tensorboard-dir", str(work_dir / "tensorboard"),
        "--muon-report", str(work_dir / "muon_report.json"),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Train, show the progress, compare with the golden curve; return the exit code."""
    options = _parse(argv)
    try:
        return _run(options.data_prefix, options.steps, options.work_dir, options.log_every)
    except MuonError as error:
        print(f"megatron-muon: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("megatron-muon: interrupted, all ranks have ended", file=sys.stderr)
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__)
    parser.add_argument("--data-prefix", required=True, metavar="PREFIX",
                        help="indexed dataset of bytes, as prepare_text makes it")  # fmt: skip
    parser.add_argument("--work-dir", type=Path, default=Path("runs/quickstart"), metavar="DIR",
                        help="folder for logs and curves (default: %(default)s)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=NUM_STEPS, metavar="N",
                        help="training steps (default: %(default)s)")  # fmt: skip
    parser.add_argument("--log-every", type=int, default=5, metavar="N",
                        help="show the loss every N steps (default: %(default)s)")  # fmt: skip
    return parser.parse_args(argv)


def _run(data_prefix: str, num_steps: int, work_dir: Path, log_every: int) -> int:
    if num_steps < 1 or log_every < 1:
        raise ConfigurationError("--steps and --log-every must be 1 or more.")
    logs = work_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for stale in (work_dir / "tensorboard").glob("events.*"):
        stale.unlink()
    progress = _Progress(logs / f"rank{NUM_RANKS - 1}.log", num_steps, log_every)
    print(f"megatron-muon: training on {NUM_RANKS} ranks (TP2 x DP2), logs in {logs}", flush=True)
    _import_once()
    try:
        run_ranks(
            run_program,
            NUM_RANKS,
            PROGRAM,
            flags(data_prefix, num_steps, work_dir),
            timeout_s=_TIMEOUT_S,
            start_method="fork",
            logs=logs,
            while_waiting=progress.show,
        )
    except RankFailed as error:
        raise ConfigurationError(f"the run failed, logs in {logs}: {error}") from None
    return _summarize(progress, work_dir, logs)


def _import_once() -> None:
    """Import what the ranks need before they are forked."""
    from megatron_muon.testing import preload  # noqa: F401


class _Progress:
    """Shows the losses that the last rank logs."""

    def __init__(self, log: Path, num_steps: int, log_every: int) -> None:
        self._log = log
        self._num_steps = num_steps
        self._log_every = log_every
        self._position = 0
        self._started = time.monotonic()
        log.unlink(missing_ok=True)
        self.losses: list[float] = []
        self.step_ms: list[float] = []

    def show(self) -> None:
        """Read what is new in the log, and print every so many steps."""
        if not self._log.exists():
            return
        with self._log.open() as file:
            file.seek(self._position)
            text = file.read()
        complete = text.rfind("\n") + 1
        self._position += len(text[:complete].encode())
        for line in text[:complete].splitlines():
            if match := _ITERATION.search(line):
                self._add(int(match[1]), float(match[3]), float(match[4]))

    def _add(self, step: int, ms: float, loss: float) -> None:
        self.losses.append(loss)
        self.step_ms.append(ms)
        if step == 1 or step % self._log_every == 0 or step == self._num_steps:
            elapsed = time.monotonic() - self._started
            print(f"  step {step:4d}/{self._num_steps}  loss {loss:.4f}  {elapsed:5.1f} s",
                  flush=True)  # fmt: skip


def golden_file() -> Path:
    """Return the recorded curve: in the installed package, or at the root of a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "golden_values", package.parent / "golden_values"):
        path = folder / CASE / "golden_values_dev_cpu.json"
        if path.exists():
            return path
    raise ConfigurationError(
        f"the golden curve golden_values/{CASE}/golden_values_dev_cpu.json is missing: "
        "install the package again."
    )


def _summarize(progress: _Progress, work_dir: Path, logs: Path) -> int:
    first, last = progress.losses[0], progress.losses[-1]
    seconds = sorted(progress.step_ms)[len(progress.step_ms) // 2] / 1e3
    print(f"summary: loss {first:.4f} -> {last:.4f}, {seconds:.2f} s/step, logs in {logs}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
