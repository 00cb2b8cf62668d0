"""``megatron-muon run``: start a Megatron script, unchanged, with this package installed."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType

from megatron_muon.errors import MuonError
from megatron_muon.integration.install import Device, install
from megatron_muon.integration.messages import EXIT_CODE, fail, say_error

SCRIPT_FAILED = 1
INTERRUPTED = 130


def run_script(script: str, arguments: Sequence[str], device: Device, optimizer: bool) -> int:
    """Run a script as ``python SCRIPT ARGUMENTS`` would, after ``install()``.

    Args:
        script: Path of the script.
        arguments: Its command line.
        device: As for ``install()``.
        optimizer: As for ``install()``.

    Returns:
        The exit code: the script's own, 1 after its traceback, 2 after one of our messages.
    """
    if not os.path.isfile(script):
        fail(f"run: there is no script {script}. Usage: megatron-muon run SCRIPT ARGS...")
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        install(device=device, optimizer=optimizer)
        runpy.run_path(script, run_name="__main__")
    except MuonError as error:
        say_error(str(error))
        return EXIT_CODE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        traceback.print_exception(type(error), error, _from_script(error.__traceback__, script))
        return SCRIPT_FAILED
    return 0


def _from_script(frames: TracebackType | None, script: str) -> TracebackType | None:
    """Drop the frames above the script's first one, which are this launcher's."""
    current = frames
    while current is not None:
        if current.tb_frame.f_code.co_filename == script:
            return current
        current = current.tb_next
    return frames
