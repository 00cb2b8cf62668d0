"""Reading and writing the JSON files of this package: strictly, and whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_muon.errors import ConfigurationError


def read_text(path: Path) -> str:
    """Read a text file; a missing or unreadable one is the user's error and names the file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror})") from error


def parse_object(text: str, where: str) -> dict[str, object]:
    """Parse a JSON object, refusing what ``json`` lets pass: NaN, infinity and repeated keys.

    Args:
        text: The JSON text.
        where: File name for messages.

    Raises:
        ConfigurationError: The text is not one JSON object of that kind.
    """

    def unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigurationError(f"{where}: key {key!r} occurs twice; expected once")
            found[key] = value
        return found

    def constant(name: str) -> NoReturn:
        raise ConfigurationError(f"{where}: found {name}; expected finite numbers only")

    try:
        parsed = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{where}: not JSON ({error})") from error
    return as_object(parsed, where)


def as_object(value: object, where: str) -> dict[str, object]:
    """Return ``value`` if it is a JSON object with string keys; raise naming ``where`` if not."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigurationError(f"{where}: got {_short(value)}; expected a mapping of names")
    return value


def as_number(value: object, where: str) -> float:
    """Return ``value`` if it is a finite JSON number (never a bool); raise if not."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or value in (float("inf"), float("-inf")):
        raise ConfigurationError(f"{where}: got {_short(value)}; expected a finite number")
    assert isinstance(value, int | float)
    return value


def as_integer(value: object, where: str) -> int:
    """Return ``value`` if it is a JSON integer (never a bool); raise if not."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigurationError(f"{where}: got {_short(value)}; expected an integer")
    return value


def as_text(value: object, where: str) -> str:
    """Return ``value`` if it is a non-empty string; raise if not."""
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{where}: got {_short(value)}; expected a non-empty string")
    return value


def as_texts(value: object, where: str) -> tuple[str, ...]:
    """Return ``value`` as a tuple if it is a list of non-empty strings; raise if not."""
    if not isinstance(value, list):
        raise ConfigurationError(f"{where}: got {_short(value)}; expected a list of strings")
    return tuple(as_text(item, where) for item in value)


def as_choice[T](value: object, choices: Sequence[T], where: str) -> T:
    """Return the one of ``choices`` that ``value`` is; raise listing them if it is none."""
    for choice in choices:
        if value == choice:
            return choice
    listed = ", ".join(str(choice) for choice in choices)
    raise ConfigurationError(f"{where}: got {_short(value)}; expected one of {listed}")


def require_keys(mapping: Mapping[str, object], keys: Sequence[str], where: str) -> None:
    """Raise unless ``mapping`` has exactly ``keys``; the message lists what differs."""
    missing = [key for key in keys if key not in mapping]
    unknown = [key for key in mapping if key not in keys]
    if missing or unknown:
        parts = [f"missing {missing}"] * bool(missing) + [f"unknown {unknown}"] * bool(unknown)
        raise ConfigurationError(
            f"{where}: keys {' and '.join(parts)}; expected exactly {list(keys)}"
        )


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that readers see the old file or the new one, never a part.

    The text goes to a file of its own in the same folder and is renamed over ``path``; a failure
    leaves what was there before, and nothing else behind.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "x", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ConfigurationError(f"{path}: cannot be written ({error.strerror})") from error
        raise


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
