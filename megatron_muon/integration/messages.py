"""What the user reads: one message a job, whatever the number of ranks.

Under torchrun every rank meets the same mistake. The agent's key-value store counts who has said
a message; the first says it, the others stay silent and exit with the same code.
"""

from __future__ import annotations

import hashlib
import os
import sys
from datetime import timedelta
from types import TracebackType
from typing import NoReturn

from megatron_muon.errors import MuonError

EXIT_CODE = 2
_STORE_TIMEOUT = timedelta(seconds=5)


def is_first_rank() -> bool:
    """Whether this process is rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def say_error(message: str) -> None:
    """Print ``message`` to standard error unless another rank of this job has said it."""
    if _first_to_say(message):
        print(f"megatron-muon: error: {message}", file=sys.stderr, flush=True)


def fail(message: str) -> NoReturn:
    """Say ``message`` once a job and exit with code 2."""
    say_error(message)
    raise SystemExit(EXIT_CODE)


def excepthook(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Stand for ``sys.excepthook``: this package's own errors are one line, others as ever."""
    if isinstance(error, MuonError):
        say_error(str(error))
    else:
        sys.__excepthook__(kind, error, traceback)


def _first_to_say(message: str) -> bool:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    try:
        from torch.distributed import TCPStore

        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=_STORE_TIMEOUT,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        digest = hashlib.sha256(f"{attempt} {message}".encode()).hexdigest()
        return bool(store.add(f"megatron_muon/said/{digest}", 1) == 1)
    except Exception:  # a message must reach the user even if the store is gone
        return True
