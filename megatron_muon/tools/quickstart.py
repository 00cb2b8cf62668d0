"""The quickstart: a GPT trained with Muon under Megatron-Core, TP2 x DP2, on this machine's CPU.

Four ranks are forked from one process that has imported Megatron, so that a run starts in
seconds. The loss is held to the recorded golden curve at the end.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.errors import ConfigurationError, MuonError
from megatron_muon.testing.golden import (
    Comparison,
    MetricSeries,
    compare,
    load_golden,
    parse_console_log,
    read_case,
)
from megatron_muon.testing.ranks import RankFailedError
from megatron_muon.testing.training import (
    GOLDEN_NAME,
    case_flags,
    golden_folder,
    num_ranks_of,
    train,
)

CASE = "gpt_tp2_dp2_overlap"
METRIC = "lm loss"
STEP_MS = "elapsed time per iteration (ms)"
_TIMEOUT_S = 1800.0


def main(argv: Sequence[str] | None = None) -> int:
    """Train, show the progress, compare with the golden curve; return the exit code."""
    options = _parse(argv)
    try:
        return _run(options.data_prefix, options.steps, options.work_dir, options.log_every)
    except MuonError as error:
        print(f"megatron-muon: error: {error}", file=sys.stderr)
        return 2
    except RankFailedError as error:
        print(f"megatron-muon: error: the run failed, logs in {options.work_dir / 'logs'}. {error}",
              file=sys.stderr)  # fmt: skip
        return 1
    except KeyboardInterrupt:
        print("megatron-muon: interrupted, all ranks have ended", file=sys.stderr)
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__)
    parser.add_argument("--data-prefix", required=True, metavar="PREFIX",
                        help="indexed dataset of bytes, as prepare_text makes it")  # fmt: skip
    parser.add_argument("--work-dir", type=Path, default=Path("runs/quickstart"), metavar="DIR",
                        help="folder for logs and curves (default: %(default)s)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=None, metavar="N",
                        help="training steps (default: all of the golden curve)")  # fmt: skip
    parser.add_argument("--log-every", type=int, default=5, metavar="N",
                        help="show the loss every N steps (default: %(default)s)")  # fmt: skip
    return parser.parse_args(argv)


def _run(data_prefix: str, num_steps: int | None, work_dir: Path, log_every: int) -> int:
    golden = load_golden(golden_folder() / CASE / GOLDEN_NAME).metric(METRIC)
    num_steps = len(golden.steps) if num_steps is None else num_steps
    if not 1 <= num_steps <= len(golden.steps):
        raise ConfigurationError(f"--steps {num_steps}: expected 1 to {len(golden.steps)}.")
    if log_every < 1:
        raise ConfigurationError(f"--log-every {log_every}: expected 1 or more.")
    case = read_case(golden_folder() / CASE)
    num_ranks = num_ranks_of(case)
    flags = case_flags(case, data_prefix, work_dir)
    # A shorter run follows the same schedule, so that it follows the golden curve.
    position = flags.index("--train-iters") + 1
    flags += ["--lr-decay-iters", flags[position]]
    flags[position] = str(num_steps)
    flags += ["--muon-report", str(work_dir / "muon_report.json")]
    logs = work_dir / "logs"
    print(f"megatron-muon: {num_ranks} ranks, TP2 x DP2, {num_steps} steps, logs in {logs}",
          flush=True)  # fmt: skip
    progress = _Progress(logs / f"rank{num_ranks - 1}.log", num_steps, log_every)
    _import_before_forking()
    curve = train(
        flags, num_ranks, work_dir,
        timeout_s=_TIMEOUT_S, start_method="fork", while_waiting=progress.show,
    )  # fmt: skip
    return _summarize(curve, golden, progress, logs)


def _import_before_forking() -> None:
    from megatron_muon.testing import preload  # noqa: F401
    from megatron_muon.tools import pretrain_gpt  # noqa: F401


def _summarize(curve: MetricSeries, golden: MetricSeries, progress: _Progress, logs: Path) -> int:
    held = _hold(curve, golden)
    print(
        f"summary: loss {curve.first:.4f} -> {curve.last:.4f}, golden distance "
        f"{held.distance:.1e} (limit {held.tolerance:g}), {progress.seconds_per_step:.2f} s/step, "
        f"logs in {logs}"
    )
    if not held.passed:
        print(f"megatron-muon: error: the loss left the golden curve: {held.message}",
              file=sys.stderr)  # fmt: skip
        return 1
    return 0


def _hold(curve: MetricSeries, golden: MetricSeries) -> Comparison:
    """Hold a run, perhaps a shorter one, to the golden curve."""
    kept = {step: value for step, value in golden.as_mapping().items() if step <= curve.steps[-1]}
    reference = MetricSeries.from_mapping(METRIC, kept, source="golden", decimals=golden.decimals)
    return compare(curve, reference, kind="cross-hardware")


class _Progress:
    """Shows the losses that the last rank logs."""

    def __init__(self, log: Path, num_steps: int, log_every: int) -> None:
        self._log = log
        self._num_steps = num_steps
        self._log_every = log_every
        self._shown = 0
        self._started = time.monotonic()
        self._milliseconds: dict[int, float] = {}
        log.unlink(missing_ok=True)

    @property
    def seconds_per_step(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self._milliseconds.values()) / 1e3

    def show(self) -> None:
        """Print what the log has gained: the first step, every so many, and the last."""
        if not self._log.exists():
            return
        for line in parse_console_log(self._log.read_text()):
            if line.iteration <= self._shown or METRIC not in line.numbers:
                continue
            self._shown = line.iteration
            self._milliseconds[line.iteration] = line.numbers[STEP_MS]
            if line.iteration in (1, self._num_steps) or line.iteration % self._log_every == 0:
                print(
                    f"  step {line.iteration:3d}/{self._num_steps}  loss "
                    f"{line.numbers[METRIC]:.4f}  {time.monotonic() - self._started:5.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    raise SystemExit(main())
