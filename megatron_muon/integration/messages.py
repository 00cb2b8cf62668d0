"""What the user reads: one message a job, whatever the number of ranks.

Under torchrun every rank meets the same mistake. The agent's key-value store counts who claims a
message: the first says it, the others wait until it has been said and end with the same code.
They wait because the first rank to end makes torchrun end the others, the speaker among them.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

from megatron_muon.errors import MuonError

EXIT_CODE = 2
_STORE_TIMEOUT = timedelta(seconds=5)

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_hook_before: ExceptHook | None = None


def is_first_rank() -> bool:
    """Whether this process is rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def say_error(message: str) -> None:
    """Print ``message`` to standard error unless another rank of this job has said it."""
    store = _agent_store()
    if store is None:
        _say(message)
        return
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"megatron_muon/{hashlib.sha256(f'{attempt} {message}'.encode()).hexdigest()}"
    try:
        if store.add(f"{key}/claims", 1) > 1:
            store.wait([f"{key}/said"], _STORE_TIMEOUT)
            return
    except Exception:  # the store or the speaker is gone, and a message must reach the user
        _say(message)
        return
    _say(message)
    store.set(f"{key}/said", "1")


def fail(message: str) -> NoReturn:
    """Say ``message`` once a job and exit with code 2."""
    say_error(message)
    raise SystemExit(EXIT_CODE)


def hook_errors() -> None:
    """Show an uncaught error of this package as one line; leave all others to the hook there was.

    Idempotent; :func:`unhook_errors` undoes it.
    """
    global _hook_before
    if sys.excepthook is not excepthook:
        _hook_before = sys.excepthook
        sys.excepthook = excepthook


def unhook_errors() -> None:
    """Put the former ``sys.excepthook`` back, unless somebody has set another since."""
    global _hook_before
    if sys.excepthook is excepthook:
        sys.excepthook = _hook_before or sys.__excepthook__
    _hook_before = None


def excepthook(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Stand for ``sys.excepthook``: this package's own errors are one line, others as before."""
    if isinstance(error, MuonError):
        say_error(str(error))
    else:
        (_hook_before or sys.__excepthook__)(kind, error, traceback)


def _say(message: str) -> None:
    sys.stdout.flush()
    print(f"megatron-muon: error: {message}", file=sys.stderr, flush=True)


def _agent_store() -> Any:
    """Connect to the store of this job's torchrun agent; ``None`` where there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        import torch.distributed as dist

        return dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=_STORE_TIMEOUT,
        )
    except Exception:  # a message must reach the user even if the store is gone
        return None
