"""Megatron's argument parser with this package's flags, and its errors in one line."""

from __future__ import annotations

import argparse
import difflib
import functools
from collections.abc import Callable
from typing import NoReturn

from megatron_muon.integration.messages import fail
from megatron_muon.optimizer.config import FLAGS, TP_MODES

Parser = argparse.ArgumentParser


def adds_muon_arguments(function: Callable[[Parser], Parser]) -> Callable[[Parser], Parser]:
    """Wrap ``add_megatron_arguments``: our flags beside Megatron's own ``--muon-*`` ones."""

    @functools.wraps(function)
    def add_megatron_arguments(parser: Parser) -> Parser:
        parser = function(parser)
        _widen_tp_mode(parser)
        group = parser.add_argument_group(title="megatron_muon")
        for flag, options in FLAGS.items():
            group.add_argument(flag, **options)
        parser.error = functools.partial(_error, parser)  # type: ignore[method-assign]
        return parser

    return add_megatron_arguments


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


def _error(parser: Parser, message: str) -> NoReturn:
    """Say what is wrong with the command line in one line, with the nearest flag that exists."""
    prefix = "unrecognized arguments: "
    if message.startswith(prefix):
        known = [option for action in parser._actions for option in action.option_strings]
        unknown = [word for word in message[len(prefix) :].split() if word.startswith("-")]
        hints = []
        for word in unknown:
            near = difflib.get_close_matches(word.split("=", 1)[0], known, n=1)
            if near:
                hints.append(f"did you mean {near[0]}?")
        message = " ".join([message + ".", *hints])
    fail(message)
