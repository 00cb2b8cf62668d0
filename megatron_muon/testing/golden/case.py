"""A functional case: Megatron's ``model_config.yaml``, which lies beside the golden files."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from megatron_muon.errors import ConfigurationError, HostError
from megatron_muon.testing.golden.jsonfile import (
    as_choice,
    as_object,
    as_texts,
    read_text,
    require_keys,
)

type TestType = Literal["regular", "ckpt-resume"]
"""``regular``: one run. ``ckpt-resume``: its second half is run from a checkpoint of the first."""

type FlagValue = bool | int | float | str | tuple[int | float | str, ...]
"""What a flag is given: true stands for the bare flag, false for none."""

CONFIG_NAME = "model_config.yaml"

_KEYS = ("ENV_VARS", "TEST_TYPE", "METRICS", "MODEL_ARGS")
_TEST_TYPES: tuple[TestType, ...] = get_args(TestType.__value__)


@dataclass(frozen=True, slots=True)
class FunctionalCase:
    """One training run to be held to golden values.

    Attributes:
        env_vars: Environment of the run.
        test_type: Whether the run is stopped halfway and resumed.
        metrics: Metrics to be held to the golden values.
        model_args: Flags of the training script.
    """

    env_vars: Mapping[str, str]
    test_type: TestType
    metrics: tuple[str, ...]
    model_args: Mapping[str, FlagValue]

    def command_line(self, variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """The flags as arguments, with ``${NAME}`` replaced from ``variables``.

        Args:
            variables: What the case leaves to its runner, such as ``DATA_PATH``. None leaves the
                names in place.

        Raises:
            ConfigurationError: A name is not among the variables; the message names the flag.
        """
        arguments: list[str] = []
        for flag, value in self.model_args.items():
            if value is False:
                continue
            arguments.append(flag)
            if value is not True:
                items = value if isinstance(value, tuple) else (value,)
                arguments += [_fill(flag, str(item), variables) for item in items]
        return tuple(arguments)


def read_case(path: Path) -> FunctionalCase:
    """Read and validate a ``model_config.yaml``, given itself or by its folder.

    Raises:
        ConfigurationError: Something is not as the format wants it; the message names the file,
            the key and what was expected.
    """
    path = path / CONFIG_NAME if path.is_dir() else path
    where = str(path)
    fields = as_object(_parse_yaml(read_text(path), where), where)
    require_keys(fields, _KEYS, where)
    test_type = as_choice(fields["TEST_TYPE"], _TEST_TYPES, f"{where}: TEST_TYPE")
    metrics = as_texts(fields["METRICS"], f"{where}: METRICS")
    if not metrics:
        raise ConfigurationError(f"{where}: METRICS is empty; a run held to nothing cannot fail")
    return FunctionalCase(
        env_vars=_env_vars(fields["ENV_VARS"], f"{where}: ENV_VARS"),
        test_type=test_type,
        metrics=metrics,
        model_args=_model_args(fields["MODEL_ARGS"], f"{where}: MODEL_ARGS"),
    )


def _parse_yaml(text: str, where: str) -> object:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise HostError(
            f"{where}: reading a case needs the package PyYAML; install megatron-muon[test]"
        ) from error
    try:
        return cast(object, yaml.safe_load(text))
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{where}: not YAML ({reason})") from error


def _env_vars(value: object, where: str) -> Mapping[str, str]:
    fields = as_object(value if value is not None else {}, where)
    for name, item in fields.items():
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise ConfigurationError(f"{where}: {name} is {item!r}; expected a string or number")
    return MappingProxyType({name: str(item) for name, item in fields.items()})


def _model_args(value: object, where: str) -> Mapping[str, FlagValue]:
    fields = as_object(value, where)
    for flag in fields:
        if not flag.startswith("--"):
            raise ConfigurationError(f"{where}: got {flag!r}; expected a flag such as --num-layers")
    return MappingProxyType(
        {flag: _flag(item, f"{where}: {flag}") for flag, item in fields.items()}
    )


def _flag(value: object, where: str) -> FlagValue:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list) and value:
        items = [item for item in value if isinstance(item, int | float | str)]
        if len(items) == len(value) and not any(isinstance(item, bool) for item in items):
            return tuple(items)
    raise ConfigurationError(
        f"{where} is {value!r}; expected true, false, a number, a string or a list of them"
    )


def _fill(flag: str, text: str, variables: Mapping[str, str] | None) -> str:
    if variables is None or "$" not in text:
        return text
    try:
        return Template(text).substitute(variables)
    except (KeyError, ValueError) as error:
        raise ConfigurationError(
            f"{flag} {text}: cannot fill it in ({error}); the variables are {sorted(variables)}"
        ) from error
