"""``megatron-muon run``: start a Megatron script, unchanged, with this package installed.

The script finds what ``python SCRIPT ARGUMENTS`` would give it, and what it leaves behind, an exit
code or a traceback, is its own.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from megatron_muon.errors import ConfigurationError, MuonError
from megatron_muon.integration.install import Device, install
from megatron_muon.integration.messages import EXIT_CODE, say_error

SCRIPT_FAILED = 1

_SEAMS = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parent.parent)


def run_script(script: str, arguments: Sequence[str], device: Device, optimizer: bool) -> int:
    """Run a script as ``python SCRIPT ARGUMENTS`` would, after ``install()``.

    Does not return if the script calls ``sys.exit`` or is interrupted.

    Args:
        script: Path of the script.
        arguments: Its command line.
        device: As for ``install()``.
        optimizer: As for ``install()``.

    Returns:
        The exit code: 0, 1 after the script's traceback, 2 after one of our messages.
    """
    try:
        return _run(script, arguments, device, optimizer)
    except KeyboardInterrupt:
        pass
    # Both the terminal and torchrun send Ctrl-C to a rank.
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_interrupted()


def _run(script: str, arguments: Sequence[str], device: Device, optimizer: bool) -> int:
    path = os.path.abspath(script)
    try:
        source = _read(script)
        _lead_path_with(os.path.dirname(path))
        sys.argv = [script, *arguments]
        install(device=device, optimizer=optimizer)
        # Without dont_inherit the script would be compiled under this file's __future__ imports.
        code = compile(source, path, "exec", dont_inherit=True)
        exec(code, vars(_new_main(path)))
    except MuonError as error:
        say_error(str(error))
        return EXIT_CODE
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        _remove_own_frames(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return SCRIPT_FAILED
    return 0


def _read(script: str) -> bytes:
    try:
        with io.open_code(os.path.abspath(script)) as file:
            return file.read()
    except OSError as error:
        raise ConfigurationError(
            f"run: the script {script} cannot be read ({error.strerror}). Usage: megatron-muon run "
            "[--device cpu] SCRIPT ARGS..."
        ) from None


def _lead_path_with(folder: str) -> None:
    """Put the script's folder where ``python -m`` or the console script had put another."""
    if not sys.flags.safe_path:
        started_from = ("", os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0])))
        if sys.path and sys.path[0] in started_from:
            del sys.path[0]
        sys.path.insert(0, folder)


def _new_main(path: str) -> ModuleType:
    """Make the module ``__main__`` that the script runs in; it stays, as it does for python."""
    module = ModuleType("__main__")
    vars(module).update(
        __file__=path,
        __builtins__=builtins,
        __loader__=SourceFileLoader("__main__", path),
        __cached__=None,
    )
    sys.modules["__main__"] = module
    return module


def _remove_own_frames(error: BaseException) -> None:
    """Remove the frames of the launcher and of the seams from an exception and its causes.

    An error raised by this package itself keeps what lies below the launcher: it is a fault of
    ours, and the frames are what is needed to find it.
    """
    for link in _chain(error):
        frames = list(_frames(link.__traceback__))
        while frames and _file(frames[0]) == __file__:
            del frames[0]
        if frames and not _file(frames[-1]).startswith(_PACKAGE):
            frames = [frame for frame in frames if not _file(frame).startswith(_SEAMS)]
        link.__traceback__ = _joined(frames)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and all that were raised before it or are grouped in it."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _joined(frames: Sequence[TracebackType]) -> TracebackType | None:
    chained: TracebackType | None = None
    for frame in reversed(frames):
        chained = TracebackType(chained, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return chained


def _file(traceback: TracebackType) -> str:
    return traceback.tb_frame.f_code.co_filename


def _end_interrupted() -> NoReturn:
    """End as an interrupted program does: by the signal, so that a shell loop stops too.

    Exit functions still run. Process groups are not torn down, since that waits for collectives
    that the other ranks, interrupted too, will never join.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(128 + signal.SIGINT)
