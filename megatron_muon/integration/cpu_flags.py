"""The Megatron flags that a machine without CUDA needs, supplied unless the user set them."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

from megatron_muon.integration.messages import is_first_rank

Parser = argparse.ArgumentParser

FLAGS: dict[str, tuple[object, str]] = {
    "transformer_impl": ("local", "--transformer-impl local"),
    "distributed_backend": ("gloo", "--distributed-backend gloo"),
    "masked_softmax_fusion": (False, "--no-masked-softmax-fusion"),
    "bias_gelu_fusion": (False, "--no-bias-gelu-fusion"),
    "bias_swiglu_fusion": (False, "--no-bias-swiglu-fusion"),
    "bias_dropout_fusion": (False, "--no-bias-dropout-fusion"),
    "apply_rope_fusion": (False, "--no-rope-fusion"),
    "gradient_accumulation_fusion": (False, "--no-gradient-accumulation-fusion"),
    "no_persist_layer_norm": (True, "--no-persist-layer-norm"),
}
"""Megatron flags that a machine without CUDA needs: argparse destination to (value, spelling)."""


def supplies_cpu_flags(function: Callable[[Parser], Parser]) -> Callable[[Parser], Parser]:
    """Wrap ``add_megatron_arguments``: the flags a machine without CUDA needs become defaults.

    What was set is said by the first parser only; Megatron makes several.
    """
    said = False

    @functools.wraps(function)
    def add_megatron_arguments(parser: Parser) -> Parser:
        nonlocal said
        parser = function(parser)
        supplied = _supply(parser)
        if supplied and not said and is_first_rank():
            print(f"megatron-muon: on the CPU, so set {' '.join(supplied)}", flush=True)
        said = True
        return parser

    return add_megatron_arguments


def _supply(parser: Parser) -> list[str]:
    """Make the flags defaults, which what the user sets overrides; return how they are spelled."""
    options: dict[str, set[str]] = {}
    for action in parser._actions:
        options.setdefault(action.dest, set()).update(action.option_strings)
    user = {argument.split("=", 1)[0] for argument in sys.argv[1:]}
    supplied = []
    for dest, (value, spelling) in FLAGS.items():
        if dest in options and user.isdisjoint(options[dest]):
            parser.set_defaults(**{dest: value})
            supplied.append(spelling)
    return supplied
