"""``--muon-match-adamw-rms 0.2``: every update has a root mean square of 0.2 times the rate.

Five quintic steps leave singular values between 0.7 and 1.2. Of full-rank random gradients,
momentum off, the size measured was 0.195 to 0.203 times the rate for every shape, in fp32 and with
bf16 products. Without the flag it is 0.98 and more, with ``unit_rms_norm`` from 0.009 to 0.98, and
scaled by the shape of the fused weight in place of its blocks' from 0.28.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from megatron_muon import MuonConfig
from megatron_muon.errors import ConfigurationError
from megatron_muon.optimizer.config import resolve
from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.model import blocks
from megatron_muon.testing.law.reference import update, whole_masters
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests.rates_job import Changed, run_changed, updates_of_shapes

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

RMS = 0.2
LEAST, MOST = 0.97 * RMS, 1.03 * RMS
FLAG = (("muon_match_adamw_rms", RMS),)
CONFIGS = {
    "fp32": FLAG,
    "bf16 products": (*FLAG, ("muon_fp32_matmul_prec", "medium")),
    "no flag": (),
    "unit_rms_norm": (("muon_scale_mode", "unit_rms_norm"),),
}

SHAPES = (
    (64, 64), (256, 256), (256, 32), (32, 256), (512, 16), (100, 90), (3, 200), (1, 96), (96, 1),
    (2, 2), (1, 1),
)  # fmt: skip

FIRST_STEP = Case(layers=1, momentum=0.0, weight_decay=0.0, steps=1)
SPLIT = replace(FIRST_STEP, output_gate=True, split_heads=True, split_gated_fc1=True)
MODELS = {
    "query groups": (1, FIRST_STEP),
    "whole qkv": (1, replace(FIRST_STEP, split_qkv=False)),
    "heads and halves": (1, SPLIT),
    "no gate": (1, replace(FIRST_STEP, groups=8, gated=False)),
    "experts": (1, replace(FIRST_STEP, experts=4)),
    "heads and halves, TP2": (2, replace(SPLIT, tp=2)),
    "whole qkv, TP2, flat": (2, replace(FIRST_STEP, tp=2, layout="flat", split_qkv=False)),
}
RUNS = {
    **{label: (num_ranks, case, FLAG) for label, (num_ranks, case) in MODELS.items()},
    **{
        f"{label}, no flag": (num_ranks, case, ())
        for label, (num_ranks, case) in MODELS.items()
        if num_ranks == 1
    },
    "scale of the whole": (1, replace(SPLIT, mutant="scale of the whole"), FLAG),
}


def launch(function, num_ranks, *arguments):
    with TemporaryDirectory() as logs:
        return run_ranks(function, num_ranks, *arguments, timeout_s=100, logs=Path(logs))


def rms(tensor):
    return float(tensor.double().square().mean().sqrt())


@cache
def of_shapes():
    (sizes,) = launch(updates_of_shapes, 1, SHAPES, list(CONFIGS.values()))
    return dict(zip(CONFIGS, sizes, strict=True))


@pytest.mark.parametrize("config", ["fp32", "bf16 products"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_has_the_size_asked_for(shape, config):
    (found,) = (u for s, u in zip(SHAPES, of_shapes()[config], strict=True) if s == shape)
    assert found.shape == shape
    assert LEAST < rms(found) < MOST


@pytest.mark.parametrize("config", ["no flag", "unit_rms_norm"])
def test_without_the_flag_it_has_another(config):
    assert all(not LEAST < rms(found) < MOST for found in of_shapes()[config])


@cache
def of_models(num_ranks):
    """Sizes of the updates of each block of each model on so many ranks, by label and name."""
    runs = {label: run for label, (ranks, *run) in RUNS.items() if ranks == num_ranks}
    changed = [Changed(case=case, config=flag) for case, flag in runs.values()]
    ranks = launch(run_changed, num_ranks, changed)
    return {
        label: {
            (name, i): rms(update(name, weight)[list(rows)]) / case.lr
            for name, weight in whole_masters(case, outcomes).items()
            for i, rows in enumerate(blocks(case).get(name, ()))
        }
        for (label, (case, _)), *outcomes in zip(runs.items(), *ranks, strict=True)
    }


def sizes_of(label):
    return of_models(RUNS[label][0])[label]


@pytest.mark.parametrize("label", MODELS)
def test_every_block_has_the_size_asked_for(label):
    """Not the fused weight that it is a part of, nor the shard: their shapes scale otherwise."""
    sizes = sizes_of(label)
    assert {name for name, _ in sizes} == blocks(MODELS[label][1]).keys()
    assert {key: size for key, size in sizes.items() if not LEAST < size < MOST} == {}


@pytest.mark.parametrize("label", [label for label in RUNS if label.endswith("no flag")])
def test_without_the_flag_a_block_has_another(label):
    assert all(size > 4 * MOST for size in sizes_of(label).values())


def test_the_scale_of_a_fused_weight_is_seen():
    sizes = sizes_of("scale of the whole")
    wrong = {name for (name, _), size in sizes.items() if not LEAST < size < MOST}
    assert wrong == {name for name, parts in blocks(SPLIT).items() if len(parts) > 1}


# Values.


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"muon_match_adamw_rms": 0.0}, ["--muon-match-adamw-rms is 0.0", "above 0", "0.2"]),
        ({"muon_match_adamw_rms": -0.2}, ["--muon-match-adamw-rms is -0.2"]),
        ({"muon_match_adamw_rms": float("nan")}, ["--muon-match-adamw-rms is nan"]),
        ({"muon_match_adamw_rms": float("inf")}, ["--muon-match-adamw-rms is inf"]),
        ({"muon_match_adamw_rms": 0.2, "muon_scale_mode": "unit_rms_norm"},
         ["--muon-match-adamw-rms", "drop it", "--muon-scale-mode"]),
        ({"muon_match_adamw_rms": 0.2, "muon_extra_scale_factor": 0.5},
         ["--muon-match-adamw-rms", "drop it", "--muon-extra-scale-factor"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_size_that_cannot_be_is_refused(changes, parts):
    with pytest.raises(ConfigurationError) as caught:
        resolve(MuonConfig(optimizer="muon", lr=0.1, **changes), None)
    for part in parts:
        assert part in str(caught.value)


def test_the_flag_is_the_spectral_scale():
    """So that a run may name that mode too, which is the default."""
    settings = resolve(MuonConfig(optimizer="muon", lr=0.1, muon_match_adamw_rms=0.3), None)
    assert (settings.scale_mode, settings.extra_scale_factor) == ("spectral", 0.3)
