"""A folder of text files to one of Megatron's indexed datasets, one byte a token.

    python -m megatron_muon.tools.prepare_text --input FOLDER --output-prefix PREFIX

writes PREFIX.bin and PREFIX.idx with Megatron's own IndexedDatasetBuilder, for `--data-path
PREFIX`. Every `*.txt` and `*.md` below FOLDER becomes one document, in the order of their relative
paths: its UTF-8 bytes as they are, then `END_OF_DOCUMENT`.

PREFIX.json, written last, records the hash of every input. While it still fits, a second run does
nothing, and does not even import torch. New data appears under its final name only when it is
whole, and the sample indices that Megatron cached for the old data (below PREFIX/cache) are dropped
with it: Megatron keys them by path and not by content.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from megatron_muon.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

VOCABULARY_SIZE = 256
"""One token a byte value. A power of two, so that it needs no padding at any tensor-parallel size
that is one too: padding rows enter the softmax, and would make the model depend on that size."""

END_OF_DOCUMENT = 0
"""The token that ends a document: NUL, a byte that no text contains."""

SUFFIXES = (".txt", ".md")
_STAMP_FORMAT = 1


@dataclass(frozen=True, slots=True)
class TextFile:
    """One input file, as it was when the folder was read."""

    name: str
    """Path relative to the input folder, with forward slashes."""

    path: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a preparation found or wrote."""

    num_documents: int
    num_tokens: int
    written: bool
    """False where the dataset was up to date."""


def prepare_text(folder: str | Path, prefix: str | Path) -> Prepared:
    """Bring the indexed dataset at `prefix` up to date with the text files below `folder`.

    Args:
        folder: Folder that is searched, recursively, for `*.txt` and `*.md`.
        prefix: Path of the dataset without its endings `.bin` and `.idx`.

    Returns:
        The size of the dataset, and whether it had to be written.

    Raises:
        ConfigurationError: There is no such folder or no text in it, a file is not UTF-8 or holds
            a NUL, or the dataset cannot be written. No half-written file is left.
    """
    files = find_text_files(Path(folder), Path(prefix))
    inputs = {file.name: file.sha256 for file in files}
    if (found := _up_to_date(Path(prefix), inputs)) is not None:
        return found
    try:
        return _write(files, inputs, Path(prefix))
    except OSError as error:
        raise ConfigurationError(
            f"--output-prefix {prefix}: the dataset could not be written: "
            f"{error.strerror or error}. Nothing half-written was left; free some space or choose "
            "another place"
        ) from error


def find_text_files(folder: Path, prefix: Path) -> list[TextFile]:
    """Return the text files below `folder` in the order of their relative paths, with hashes.

    What lies below the folder named `prefix` (Megatron's cache of the dataset) is not text.

    Raises:
        ConfigurationError: There is no such folder, or no text in it.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigurationError(
            f"--input {folder} {what}: name a folder with text files (*.txt, *.md)"
        )
    cache = prefix.absolute()
    paths = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and path.is_file()
        and cache not in path.absolute().parents
    }
    files = [
        TextFile(name, path, hashlib.sha256(_read(name, path)).hexdigest())
        for name, path in sorted(paths.items())
        if path.stat().st_size > 0
    ]
    if not files:
        raise ConfigurationError(
            f"--input {folder} holds no text: expected at least one non-empty file ending in "
            + " or ".join(SUFFIXES)
        )
    return files


def document_bytes(file: TextFile) -> bytes:
    """Return the document of `file`: its bytes as they are, then the end of the document.

    Raises:
        ConfigurationError: The file is not UTF-8 text, or it changed since its hash was taken.
    """
    data = _read(file.name, file.path)
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise ConfigurationError(f"{file.name} changed while it was being read: run again")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{file.name} is not UTF-8 text (byte {error.start}: {error.reason}): convert it, "
            "for instance with iconv -t UTF-8, or move it out of the --input folder"
        ) from error
    if (position := data.find(END_OF_DOCUMENT)) >= 0:
        raise ConfigurationError(
            f"{file.name} holds a NUL at byte {position}, which marks the end of a document here: "
            "remove it, or move the file out of the --input folder"
        )
    return data + bytes([END_OF_DOCUMENT])


def _read(name: str, path: Path) -> bytes:
    """Return the content of an input file.

    Raises:
        ConfigurationError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{name} cannot be read: {error.strerror or error}") from error


def _beside(prefix: Path, ending: str) -> Path:
    """Return `prefix` with `ending` added (a prefix may hold dots, so no `with_suffix`)."""
    return prefix.with_name(prefix.name + ending)


def _up_to_date(prefix: Path, inputs: dict[str, str]) -> Prepared | None:
    """Return the dataset at `prefix` if its stamp and its files fit `inputs`, else None."""
    try:
        stamp: dict[str, Any] = json.loads(_beside(prefix, ".json").read_text(encoding="utf-8"))
        sizes = {e: _beside(prefix, e).stat().st_size for e in (".bin", ".idx")}
        if stamp["about"] == _about(inputs) and stamp["nbytes"] == sizes:
            return Prepared(stamp["num_documents"], stamp["num_tokens"], written=False)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no stamp, or not one of ours: prepare again
    return None


def _about(inputs: dict[str, str]) -> dict[str, Any]:
    """Return all that the content of the dataset depends on."""
    return {
        "format": _STAMP_FORMAT,
        "vocabulary_size": VOCABULARY_SIZE,
        "end_of_document": END_OF_DOCUMENT,
        "inputs": inputs,
    }


def _write(files: Sequence[TextFile], inputs: dict[str, str], prefix: Path) -> Prepared:
    """Write the dataset under temporary names, then move it to its own."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    temporary = {e: _beside(prefix, f".{os.getpid()}.tmp{e}") for e in (".bin", ".idx", ".json")}
    try:
        num_tokens = _build(files, temporary[".bin"], temporary[".idx"])
        stamp = {
            "about": _about(inputs),
            "nbytes": {e: temporary[e].stat().st_size for e in (".bin", ".idx")},
            "num_documents": len(files),
            "num_tokens": num_tokens,
        }
        temporary[".json"].write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
        # The stamp goes first and comes last: whatever interrupts this, no stamp ever vouches for
        # files that are not its own.
        _beside(prefix, ".json").unlink(missing_ok=True)
        if prefix.is_dir():
            shutil.rmtree(prefix / "cache", ignore_errors=True)
        for ending, path in temporary.items():
            path.replace(_beside(prefix, ending))
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    return Prepared(len(files), num_tokens, written=True)


def _build(files: Sequence[TextFile], bin_path: Path, idx_path: Path) -> int:
    """Write one document a file with Megatron's builder; return the number of tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron tells what it found for training
        import torch
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(bin_path), dtype=DType.optimal_dtype(VOCABULARY_SIZE))
    num_tokens = 0
    with _closed_on_error(builder):
        for file in files:
            document = bytearray(document_bytes(file))
            builder.add_document(torch.frombuffer(document, dtype=torch.uint8), [len(document)])
            num_tokens += len(document)
        builder.finalize(str(idx_path))
    return num_tokens


@contextlib.contextmanager
def _closed_on_error(builder: "IndexedDatasetBuilder") -> Iterator[None]:
    """Close the builder's data file where something raises before the builder does so itself."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            builder.data_file.close()
        raise


@contextlib.contextmanager
def _terminated_cleanly() -> Iterator[None]:
    """Turn SIGTERM into an exit that runs the clean-up, as Ctrl-C does."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="prepare_text",
        description="Make a Megatron indexed dataset of a folder of text, one byte a token.",
    )
    parser.add_argument(
        "--input", required=True, metavar="FOLDER", help="folder with *.txt and *.md, at any depth"
    )
    parser.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX.bin, PREFIX.idx and PREFIX.json; pass PREFIX as --data-path",
    )
    options = parser.parse_args(argv)
    try:
        with _terminated_cleanly():
            prepared = prepare_text(options.input, options.output_prefix)
    except ConfigurationError as error:
        print(f"prepare_text: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    state = "written" if prepared.written else "up to date"
    print(
        f"prepare_text: {options.output_prefix} {state}: {prepared.num_documents} documents, "
        f"{prepared.num_tokens} tokens"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
