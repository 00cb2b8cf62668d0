"""Where a model and its sizes come from: a name, a Hugging Face config, or Megatron's flags."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_muon.errors import ConfigurationError
from megatron_muon.planner.flag_words import (
    check_command_line,
    parse_flags,
    words_of,
    yaml_words,
)
from megatron_muon.planner.hugging_face import fields_of, from_hugging_face
from megatron_muon.planner.megatron_flags import Source, from_flags, with_flags
from megatron_muon.planner.models import BUILT_IN


def read_source(given: str | None, flags: Sequence[str]) -> Source:
    """Return the model that a name or file says, changed by Megatron's flags.

    Args:
        given: A built-in name, a Hugging Face ``config.json`` or its folder, a file of Megatron's
            flags (words, a shell script's array, or YAML with ``MODEL_ARGS``), or ``None`` where
            the flags say all.
        flags: Megatron's flags and ours, as on a command line.

    Raises:
        ConfigurationError: It is none of these, or something is missing; the message names it.
        UnsupportedError: The model has a part that is not planned.
    """
    check_command_line(flags)
    more = parse_flags(flags)
    if not given:
        if not more:
            raise ConfigurationError(
                f"no model: give one of {', '.join(BUILT_IN)}, a config.json, a file of Megatron's "
                "flags, or these flags behind `--`."
            )
        return from_flags(more, "the command line")
    if given in BUILT_IN:
        return with_flags(Source(BUILT_IN[given]), more, given)
    path, text = _read(given)
    if path.suffix == ".json":
        return with_flags(Source(from_hugging_face(fields_of(text, given), given)), more, given)
    words = yaml_words(text, given) if path.suffix in (".yaml", ".yml") else words_of(text, given)
    # Of a flag that is given twice the last counts, as for Megatron.
    return from_flags({**parse_flags(words), **more}, given)


def _read(given: str) -> tuple[Path, str]:
    """Return the file that was meant, and what is in it."""
    path = Path(given)
    names = ("config.json", "model_config.yaml")
    try:
        if path.is_dir():
            path = next((path / name for name in names if (path / name).is_file()), path)
            if path.is_dir():
                raise ConfigurationError(f"{given}: a folder without {' or '.join(names)}.")
        if not path.exists():
            raise ConfigurationError(
                f"{given}: no such file, and no built-in model; those are {', '.join(BUILT_IN)}."
            )
        return path, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigurationError(
            f"{given}: cannot be read ({why}). Give {', '.join(BUILT_IN)}, a config.json, or a "
            "file of Megatron's flags."
        ) from None
