"""Jobs of several ranks that are started as a user starts them, and what they said."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist

from megatron_muon.testing.ranks import RankFailedError, run_ranks

ROOT = Path(__file__).parents[2]
STOCK_STYLE = str(Path(__file__).with_name("stock_style_pretrain_gpt.py"))

MODEL = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 2e-3 --bf16 --seed 7
--tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1 --eval-iters 0
--eval-interval 1000""".split()
MUON = ["--optimizer", "muon", "--use-distributed-optimizer"]

_ENDED = re.compile(r"ended with exit code (-?\d+)")


@dataclass(frozen=True)
class Job:
    """What became of a job.

    Attributes:
        code: Exit code of the first rank to fail, of torchrun, or 0.
        said: What all its processes printed.
        seconds: How long it took.
    """

    code: int
    said: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        """Our messages, in order."""
        prefix = "megatron-muon: error: "
        return [line.removeprefix(prefix) for line in self.said.splitlines() if prefix in line]


def launch(
    per_rank: Sequence[Sequence[str]],
    logs: Path,
    *,
    timeout_s: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> Job:
    """Run ``megatron-muon`` on forked ranks, each with its own command line, as torchrun would.

    The ranks find the store of an agent, and end with the first of them that fails.
    """
    logs.mkdir(exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=timeout_s))
    variables = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "PYTHONWARNINGS": "ignore",
    }
    start, code = time.monotonic(), 0
    try:
        run_ranks(
            _be_rank,
            len(per_rank),
            [list(line) for line in per_rank],
            timeout_s=timeout_s,
            environment={**variables, **(environment or {})},
            logs=logs,
            process_group=False,
        )
    except RankFailedError as failure:
        ended = _ENDED.search(str(failure))
        if ended is None:
            raise AssertionError(f"the job hung: {failure}\n{_read(logs)}") from None
        code = int(ended.group(1))
    return Job(code, _read(logs), time.monotonic() - start)


def run_on(num_ranks: int, script: str, *flags: str, ours: Sequence[str] = ()) -> list[list[str]]:
    """Return one command line for each of several ranks, all the same."""
    return [["run", "--device", "cpu", *ours, script, *flags] for _ in range(num_ranks)]


def torchrun(
    num_ranks: int,
    *command: str,
    timeout_s: float = 100.0,
    environment: Mapping[str, str] | None = None,
    module: bool = True,
) -> Job:
    """Run a command under the real torchrun, as ``-m COMMAND`` or as a program."""
    start = time.monotonic()
    process = start_torchrun(num_ranks, *command, environment=environment, module=module)
    try:
        said, _ = process.communicate(timeout=timeout_s)
    finally:
        end_tree(process)
    return Job(process.returncode, said, time.monotonic() - start)


def start_torchrun(
    num_ranks: int,
    *command: str,
    environment: Mapping[str, str] | None = None,
    module: bool = True,
) -> subprocess.Popen[str]:
    """Start torchrun in a process group of its own, on a free port."""
    kind = "-m" if module else "--no-python"
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", str(num_ranks), kind),
            *command,
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        | dict(environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end_tree(process: subprocess.Popen[str]) -> None:
    """Kill a process and all it started; torchrun puts each rank into a session of its own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


def _be_rank(per_rank: list[list[str]]) -> None:
    from megatron_muon.tools.cli import main

    code = main(per_rank[int(os.environ["RANK"])])
    if code:
        raise SystemExit(code)


def _read(logs: Path) -> str:
    return "".join(path.read_text() for path in sorted(logs.glob("rank*.log")))
