"""Generalized tensor parallelism, which cuts rows over ranks of their own, is refused by name."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from megatron_muon.errors import ConfigurationError
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests.command_line import parser
from tests.unit_tests.gtp_job import SCENARIOS, run_scenarios

MUON = ["--optimizer", "muon", "--use-distributed-optimizer"]
SHARDS = "--tensor-parallel-num-weight-shards"
EXPERT_SHARDS = "--expert-tensor-parallel-num-weight-shards"


@pytest.fixture
def parse(monkeypatch):
    """Return a function that parses and validates a command line as Megatron does."""
    with parser(monkeypatch) as parse:
        yield parse


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ([SHARDS, "2"], SHARDS),
        (["--tensor-model-parallel-size", "2", SHARDS, "4"], SHARDS),
        ([EXPERT_SHARDS, "2"], EXPERT_SHARDS),
        (["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "1",
          EXPERT_SHARDS, "2"], EXPERT_SHARDS),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_the_flag_is_refused_before_any_work(parse, flags, flag):
    with pytest.raises(ConfigurationError, match=rf"{flag} \d does not work .* muon: drop it"):
        parse(*MUON, *flags)


def test_as_many_shards_as_tensor_parallelism_makes_are_let_through(parse):
    flags = ["--tensor-model-parallel-size", "2", SHARDS, "2", EXPERT_SHARDS, "2"]
    args = parse(*MUON, *flags)
    assert (args.gtp_weight_remat_size, args.expert_gtp_weight_remat_size) == (1, 1)


SAID = {
    "as megatron cuts": ["True (32, 64) 24 32+0", "True (32, 64) 24 8+24"],
    "a weight that is cut": [f"UnsupportedError: decoder.linear_fc1.weight is sharded by {SHARDS}"],
    "groups without a weight that is cut": [f"UnsupportedError: {SHARDS}: weights are cut into 2"],
}
"""How what each rank says begins; one text for all ranks that say the same."""


@cache
def said() -> list[dict[str, str]]:
    with TemporaryDirectory() as logs:
        return run_ranks(run_scenarios, 2, timeout_s=60, logs=Path(logs))


@pytest.mark.distributed
@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", SCENARIOS)
def test_it_is_refused_where_megatron_has_made_it(name):
    texts = [rank[name] for rank in said()]
    begins = SAID[name] * (2 // len(SAID[name]))
    assert all(map(str.startswith, texts, begins))
    assert len(SAID[name]) == 2 or texts[0] == texts[1]
