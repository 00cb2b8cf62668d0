"""Megatron's command line with our flags, parsed and validated as Megatron does."""

from __future__ import annotations

import contextlib
import sys

from megatron_muon.integration.install import install, uninstall
from tests.unit_tests.test_preflight import SMALL


@contextlib.contextmanager
def parser(monkeypatch, *always):
    """Give a function that parses flags of a job of four ranks, after the ones given here."""
    uninstall()
    install(device="cpu")
    from megatron.training.arguments import parse_args, validate_args

    def parse(*flags, dropped=()):
        kept = [flag for flag in SMALL if flag not in dropped]
        monkeypatch.setattr(sys, "argv", ["pretrain.py", *kept, *always, *flags])
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("RANK", "0")
        args = parse_args()
        validate_args(args)
        return args

    yield parse
    uninstall()
