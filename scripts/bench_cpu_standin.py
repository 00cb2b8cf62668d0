"""Measure what the CPU stand-in costs: its own time as a share of a training step.

    .venv/bin/python scripts/bench_cpu_standin.py [--num-steps N]

trains the quickstart's model on mock data under the real Megatron, in one process without tensor
parallelism and with the quickstart's micro-batches. Some steps are timed as they are, the next ones
under cProfile. A function of the stand-in counts with its own lines and with the built-in
functions it calls, other than the one of torch that it wraps. cProfile adds its own time to every
call of a function and none to a matrix product, and the sum is held against the time of a step
without it, so the share printed is an upper bound. The garbage collector is off in all measured
steps, since a collection would count for whichever function it happens to begin in.
"""

import argparse
import cProfile
import gc
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.integration import cpu
from megatron_muon.integration.install import install
from megatron_muon.integration.patching import Patch
from megatron_muon.testing.golden import read_case
from megatron_muon.testing.training import case_flags, golden_folder

CASE = "gpt_tp2_dp2_overlap"
FILES = re.compile(r"megatron_muon/integration/(cpu\w*|patching)\.py$")
"""Where the stand-in's functions are defined."""

LIMIT_PERCENT = 5.0
WARM_UP = 5


@dataclass(frozen=True)
class Cost:
    """What one function of the stand-in costs.

    Attributes:
        name: File and name of the function.
        num_calls: Calls in one step.
        step_ms: Its own milliseconds in one step.
    """

    name: str
    num_calls: float
    step_ms: float


@dataclass
class Stopwatch:
    """Times steps of Megatron's loop, each from one call of ``train_step`` to the next.

    Attributes:
        num_steps: Steps to time, and then to profile.
        step_ms: Milliseconds of each timed step.
        profile: The profile of the later steps.
    """

    num_steps: int
    step_ms: list[float] = field(default_factory=list)
    profile: cProfile.Profile = field(default_factory=cProfile.Profile)
    _num_begun: int = 0
    _began: float = 0.0

    def wrap(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return Megatron's ``train_step`` with a look at the clock before it."""

        def timed_train_step(*args: Any, **kwargs: Any) -> Any:
            self._begin()
            return train_step(*args, **kwargs)

        return timed_train_step

    def _begin(self) -> None:
        now = time.perf_counter()
        if WARM_UP < self._num_begun <= WARM_UP + self.num_steps:
            self.step_ms.append((now - self._began) * 1e3)
        if self._num_begun == WARM_UP:
            gc.disable()
        if self._num_begun == WARM_UP + self.num_steps:
            self.profile.enable()
        if self._num_begun == WARM_UP + 2 * self.num_steps:
            self.profile.disable()
        self._num_begun += 1
        self._began = time.perf_counter()


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print a line a function and the share; return 1 where the share is too large."""
    options = _parse(argv)
    stopwatch = Stopwatch(options.num_steps)
    torch.set_num_threads(1)
    install(device="cpu")
    wrapped = {row.name.rpartition(".")[2] for row in cpu.table() if isinstance(row, Patch)}
    with tempfile.TemporaryDirectory(prefix="megatron_muon_bench_") as folder:
        _train(stopwatch, Path(folder))
    return _report(stopwatch, sorted(_costs(stopwatch, wrapped), key=lambda cost: -cost.step_ms))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-steps", type=int, default=30, metavar="N",
                        help="steps to time and to profile (default: %(default)s)")  # fmt: skip
    return parser.parse_args(argv)


def _train(stopwatch: Stopwatch, folder: Path) -> None:
    from megatron.training import training

    from megatron_muon.tools import pretrain_gpt

    flags = case_flags(read_case(golden_folder() / CASE), "unused", folder)
    flags[flags.index("--tensor-model-parallel-size") + 1] = "1"
    flags[flags.index("--train-iters") + 1] = str(WARM_UP + 2 * stopwatch.num_steps + 1)
    at = flags.index("--data-path")
    flags[at : at + 2] = ["--mock-data"]
    sys.argv = ["pretrain_gpt.py", *flags]
    training.train_step = stopwatch.wrap(training.train_step)
    dist.init_process_group("gloo", f"file://{folder / 'meeting'}", rank=0, world_size=1)
    pretrain_gpt.main()


def _costs(stopwatch: Stopwatch, wrapped: set[str]) -> Iterator[Cost]:
    for entry in stopwatch.profile.getstats():
        if isinstance(entry.code, CodeType) and FILES.search(entry.code.co_filename):
            builtins = [call for call in entry.calls or () if isinstance(call.code, str)]
            own = entry.inlinetime + sum(
                call.totaltime for call in builtins if _last_word(call.code) not in wrapped
            )
            yield Cost(
                name=f"{Path(entry.code.co_filename).name}:{entry.code.co_qualname}",
                num_calls=entry.callcount / stopwatch.num_steps,
                step_ms=own * 1e3 / stopwatch.num_steps,
            )


def _last_word(builtin: str) -> str:
    """Return the name of a built-in function as a profile shows it.

    It shows ``<built-in method torch.zeros>``, ``<method 'get' of 'dict' objects>``, and a method
    that is wrapped as its wrapper, ``<function Tensor.to at 0x7f>``.
    """
    found = re.search(r"(\w+)'?(?: of .*| at 0x\w+)?>$", builtin)
    return found[1] if found else builtin


def _report(stopwatch: Stopwatch, costs: Sequence[Cost]) -> int:
    step_ms = statistics.median(stopwatch.step_ms)
    print(f"\n{'function':<62} {'calls':>7} {'us/call':>8} {'ms/step':>8} {'share':>7}")
    for cost in costs:
        us = cost.step_ms * 1e3 / cost.num_calls
        print(f"{cost.name:<62} {cost.num_calls:7.1f} {us:8.2f} {cost.step_ms:8.3f} "
              f"{cost.step_ms / step_ms:7.2%}")  # fmt: skip
    total_ms = sum(cost.step_ms for cost in costs)
    percent = total_ms / step_ms * 100
    print(
        f"summary: the stand-in takes at most {total_ms:.3f} ms of a step of {step_ms:.1f} ms "
        f"(median of {len(stopwatch.step_ms)}): {percent:.2f} %, limit {LIMIT_PERCENT:g} %"
    )
    return int(percent >= LIMIT_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
