"""How a new checkpoint takes an old one's place, so that one of the two is always whole.

A save over an iteration's folder that holds anything writes into a folder beside it::

    iter_0000004            the old one, whole or torn: what the tracker names stays loadable
    replacing_iter_0000004  the new one, while it is written

When all ranks have written, two renames swap them (:func:`put_in_place`), the old one to
``replaced_iter_0000004``. What a process that ends between the two leaves behind is put right
before the next load (:func:`settle`), and removed by the next save (:func:`drop_replaced`). None of
these names begins with ``iter_``: Megatron takes such folders for iterations.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

_NEW = "replacing_"
_OLD = "replaced_"


def holds_anything(folder: Path) -> bool:
    """Whether a folder is there with anything in it."""
    return folder.is_dir() and next(folder.iterdir(), None) is not None


def staging_folder(folder: Path) -> Path:
    """Return where the new contents of a folder that is not empty are written."""
    return folder.with_name(_NEW + folder.name)


def placed(path: Path, parent: Path) -> Path:
    """Return where a path in a :func:`staging_folder` of ``parent`` lies once that is in place."""
    if not path.is_relative_to(parent) or path == parent:
        return path
    first, *rest = path.relative_to(parent).parts
    return parent.joinpath(first.removeprefix(_NEW), *rest)


def replaced_folders(parent: Path) -> list[Path]:
    """Return the folders of ``parent`` that have an old one aside: a replacement was cut off."""
    return sorted(old.with_name(old.name.removeprefix(_OLD)) for old in parent.glob(f"{_OLD}*"))


def put_in_place(folder: Path) -> None:
    """Put what was written to :func:`staging_folder` in the place of ``folder``.

    Does nothing if there is no such folder. Of several processes one calls it, after all have
    written.
    """
    staged, old = staging_folder(folder), folder.with_name(_OLD + folder.name)
    if not staged.is_dir():
        return
    if folder.exists():
        # A whole one that an earlier process had put aside is still here, so this is none.
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    staged.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def settle(folder: Path) -> None:
    """End a :func:`put_in_place` that was cut off between its two renames.

    The old folder is moved away only once the new one is whole, so its being away shows that. This
    gives a folder that is missing its name back and does nothing else, neither moves ``folder``
    nor removes anything: of several processes each may call it.
    """
    old = folder.with_name(_OLD + folder.name)
    if not old.is_dir():
        return
    for source in (staging_folder(folder), old):
        if folder.exists():
            return
        try:
            source.rename(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster
                raise


def drop_replaced(folder: Path) -> None:
    """Remove the old folder that a :func:`put_in_place` which was cut off has left aside.

    Of several processes one calls it, when none can be in :func:`settle` any more.
    """
    if folder.exists():
        shutil.rmtree(folder.with_name(_OLD + folder.name), ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that a reader, or a crash, finds the old text or the new one."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Bring a file that was written by others to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk; a file system that cannot is left to itself."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
