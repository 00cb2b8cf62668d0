"""Megatron's argument parser with this package's flags, and its errors in one line."""

from __future__ import annotations

import argparse
import difflib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megatron_muon.integration.messages import fail
from megatron_muon.optimizer.compatibility import LATER_LAYOUTS
from megatron_muon.optimizer.config import FLAGS, MATMUL_PRECISIONS, TP_MODES

Parser = argparse.ArgumentParser

LATER_FLAG = "--layer-wise-param-layout"
"""A flag of later Megatrons, understood so that a command line for them need not be changed."""


@dataclass(slots=True)
class CommandLine:
    """Megatron's command line as it was parsed last, before Megatron derives values from it.

    Attributes:
        spellings: Spelling of each flag of Megatron and of this package, by destination; not those
            the script adds.
        values: What each of them was given, its default if it was not.
    """

    spellings: dict[str, str]
    values: dict[str, Any] = field(default_factory=dict)


_last: CommandLine | None = None


def command_line() -> CommandLine | None:
    """Return the last command line that was parsed with our flags, ``None`` if none was."""
    return _last


def adds_muon_arguments(function: Callable[[Parser], Parser]) -> Callable[[Parser], Parser]:
    """Wrap ``add_megatron_arguments``: our flags beside Megatron's own ``--muon-*`` ones."""

    @functools.wraps(function)
    def add_megatron_arguments(parser: Parser) -> Parser:
        parser = function(parser)
        _widen_tp_mode(parser)
        _set_precisions(parser)
        group = parser.add_argument_group(title="megatron_muon")
        for flag, options in FLAGS.items():
            group.add_argument(flag, **options)
        _add_later_flag(parser, group)
        _watch(parser)
        return parser

    return add_megatron_arguments


def _add_later_flag(parser: Parser, group: Any) -> None:
    if LATER_FLAG not in parser._option_string_actions:
        group.add_argument(
            LATER_FLAG,
            choices=LATER_LAYOUTS,
            default=None,
            help="As later Megatrons have it: padded is --muon-layout owner, legacy is "
            "--no-use-layer-wise-param-layout, in the place of decoupled there is "
            "--muon-layout flat.",
        )


def _widen_tp_mode(parser: Parser) -> None:
    for action in parser._actions:
        if action.dest == "muon_tp_mode":
            action.choices = TP_MODES
            action.default = "owner"
            action.help = (
                "Where the matrices that tensor parallelism cuts are orthogonalized: whole on one "
                "rank each (owner), whole on every rank (duplicated), together (distributed), or "
                "shard by shard, which is another optimizer at every size (blockwise)."
            )


def _set_precisions(parser: Parser) -> None:
    """Offer the precisions that have a meaning: Megatron has ``low``, which does nothing."""
    for action in parser._actions:
        if action.dest == "muon_fp32_matmul_prec":
            action.choices = MATMUL_PRECISIONS


def _watch(parser: Parser) -> None:
    """Make a parser say its errors in one line, refuse unknown Muon flags, and keep what it read.

    A script may ask Megatron to ignore unknown arguments; a misspelt ``--muon-`` flag is an error
    all the same.
    """
    parse = parser.parse_known_args
    spellings = {
        action.dest: action.option_strings[0] for action in parser._actions if action.option_strings
    }

    @functools.wraps(parse)
    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        global _last
        _mend_help(parser)
        namespace, unknown = parse(*args, **kwargs)
        ours = [word for word in unknown if word.startswith(("--muon-", "--muon_"))]
        if ours:
            _error(parser, f"unrecognized arguments: {' '.join(ours)}")
        values = {dest: value for dest, value in vars(namespace).items() if dest in spellings}
        _last = CommandLine(spellings, values)
        return namespace, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    parser.error = functools.partial(_error, parser)  # type: ignore[method-assign]


def _mend_help(parser: Parser) -> None:
    """Escape help texts with a bare percent sign: with one, 0.19.2's ``--help`` is a traceback."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (KeyError, TypeError, ValueError):
            action.help = str(action.help).replace("%", "%%")


def _error(parser: Parser, message: str) -> NoReturn:
    """Say what is wrong with the command line in one line, with the nearest flags that exist."""
    prefix = "unrecognized arguments: "
    if message.startswith(prefix):
        known = [option for action in parser._actions for option in action.option_strings]
        near = []
        for word in message[len(prefix) :].split():
            if word.startswith("-"):
                near += difflib.get_close_matches(word.split("=", 1)[0], known, n=1)
        if near:
            message = f"{message}. Did you mean {' and '.join(near)}?"
    fail(message)
