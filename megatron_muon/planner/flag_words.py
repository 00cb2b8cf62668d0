"""Flags as words of a command line, a script or YAML, and how their values are read."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_muon.errors import ConfigurationError, HostError

Flags = Mapping[str, Sequence[str]]
"""The values behind each flag, by its name without dashes; none behind a switch."""

REPEATABLE = ("muon-exclude", "muon-include")
"""Flags whose values add up; of all others the last counts, as for Megatron."""

LARGEST = 10**9
"""No size of a model or a job is larger; a slip of the hand is."""

MOST_LAYERS = 10**4
"""More layers are a slip too, and would be planned one by one."""

_END = ""
"""Stands for what ends the values of a flag in a shell script."""

_OF_SHELL = re.compile(r"[()]|[A-Za-z_]\w*\+?=.*|\$\{\w+\[@\]\}")
"""Brackets of an array, an assignment, an array that is passed on."""


def parse_flags(words: Iterable[str]) -> dict[str, list[str]]:
    """Return the values behind each flag; those of a repeated ``--muon-exclude`` add up.

    Raises:
        ConfigurationError: One that may be repeated has more or fewer than one value each time.
    """
    found: dict[str, list[str]] = {}
    name, before = "", 0
    for word in [*words, _END]:
        is_flag = word.startswith("--") and len(word) > 2
        if (is_flag or word == _END) and name in REPEATABLE:
            _check_repeated(name, found[name][before:])
        if is_flag:
            name, has_value, value = word[2:].partition("=")
            kept = found.get(name, []) if name in REPEATABLE else []
            before = len(kept)
            found[name] = [*kept, *([value] if has_value else [])]
        elif word == _END:
            name = ""
        elif name:
            found[name].append(word)
    return found


def check_command_line(words: Sequence[str]) -> None:
    """Check that what follows ``--`` starts with a flag: words before one would be lost.

    Raises:
        ConfigurationError: It does not.
    """
    if words and not (words[0].startswith("--") and len(words[0]) > 2):
        raise ConfigurationError(
            f"{words[0]!r} behind `--` is no flag of Megatron's: expected one such as "
            "--num-layers 32. The plan's own options stand before `--`."
        )


def words_of(text: str, where: str) -> list[str]:
    """Return the words of a file of flags, also of those in a shell script's arrays.

    Raises:
        ConfigurationError: It has none.
    """
    try:
        words = [_END if _OF_SHELL.fullmatch(word) else word
                 for word in shlex.split(text.replace("\\\n", " "), comments=True)]  # fmt: skip
    except ValueError as error:
        raise ConfigurationError(f"{where}: not a list of flags ({error}).") from None
    if not any(word.startswith("--") for word in words):
        raise ConfigurationError(f"{where}: has no flag of Megatron's, such as --num-layers 32.")
    return words


def yaml_words(text: str, where: str) -> list[str]:
    """Return the flags and values of YAML, or of its ``MODEL_ARGS``, as words.

    Raises:
        ConfigurationError: It is something else.
        HostError: pyyaml is not installed.
    """
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        raise HostError(f"{where}: reading YAML needs the package pyyaml: install it.") from None
    try:
        fields = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: not YAML ({' '.join(str(error).split())}).") from None
    values = fields.get("MODEL_ARGS", fields) if isinstance(fields, dict) else None
    if not isinstance(values, dict):
        raise ConfigurationError(f"{where}: expected flags and values, or MODEL_ARGS with these.")
    words: list[str] = []
    for flag, value in values.items():
        if value is False or value is None:
            continue
        name = str(flag).removeprefix("--").replace("_", "-")
        items = value if isinstance(value, list) else [value]
        if value is True:
            words.append(f"--{name}")
        elif name in REPEATABLE:
            words += [f"--{name}={item}" for item in items]
        else:
            words += [f"--{name}", *map(str, items)]
    return words


def one(flags: Flags, flag: str, default: str | None = None) -> str:
    """Return the one value of a flag.

    Args:
        flags: All flags.
        flag: Its name without dashes.
        default: The value where it is not there.

    Raises:
        ConfigurationError: It has none, or several.
    """
    if flag not in flags and default is not None:
        return default
    values = flags[flag]
    if len(values) != 1:
        found = " ".join(values) or "nothing"
        raise ConfigurationError(f"--{flag} is {found}: expected one value.")
    return values[0]


def one_of(flags: Flags, flag: str, legal: Sequence[str]) -> None:
    """Check that a flag, where it is given, is one of some words.

    Raises:
        ConfigurationError: It is not.
    """
    if flag in flags and one(flags, flag) not in legal:
        raise ConfigurationError(
            f"--{flag} is {shown(one(flags, flag))}: expected one of {', '.join(legal)}."
        )


def count(
    flags: Flags, flag: str, default: str | None = None, least: int = 1, most: int = LARGEST
) -> int:
    """Return the integer behind a flag that says how many or how large.

    Raises:
        ConfigurationError: It is no integer, or not between ``least`` and ``most``.
    """
    given = one(flags, flag, default)
    try:
        value = int(given)
    except ValueError:
        raise ConfigurationError(
            f"--{flag} is {shown(given)}: expected {size_range(least, most)}."
        ) from None
    if not least <= value <= most:
        raise ConfigurationError(f"--{flag} is {value}: expected {size_range(least, most)}.")
    return value


def shown(value: object) -> str:
    """Return a value as a message shows it: quoted, and not at any length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "a value that is too large"  # an integer of thousands of digits
    return text if len(text) <= 60 else f"{text[:60]}..."


def size_range(least: int = 1, most: int = LARGEST) -> str:
    """Say which integers are sizes."""
    return f"an integer from {least} to {most}"


def _check_repeated(name: str, values: Sequence[str]) -> None:
    if len(values) != 1:
        found = " ".join(values) or "nothing"
        raise ConfigurationError(
            f"--{name} is {found}: expected one glob, in quotes; repeat the flag for another one."
        )
