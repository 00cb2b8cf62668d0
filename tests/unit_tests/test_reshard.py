"""A run is loaded at other sizes, in another layout and precision, with the same state.

What is compared is whole, by parameter name and place in it: put together from the live optimizers
of the run that was saved, and of the one that was loaded into garbage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_muon.integration.cpu_mxfp8_tensor import CpuMXFP8Quantizer
from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.model import is_cut, unshard
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests.reshard_job import (
    EMBEDDING,
    GARBAGE,
    LOSS_SCALE,
    OUTPUT,
    STEPS,
    Kept,
    Model,
    Run,
    Way,
    run_all,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

LOSS_BOUND = 5e-4

UNTIED, TIED = Model(), Model(tied=True, layers=4)
BIASES = Model(gated=False, bias=True, groups=4)
EXPERTS = Model(experts=4)
FOR_MXFP8 = Model(hidden=64, ffn=96, head=16)

BIG = Way(tp=2, dp=2, sequence_parallel=True, overlap=True, bucket_size=6000)
FLAT3 = Way(dp=3, layout="flat")
PIPELINE = Way(model=TIED, pp=2, vpp=2, dp=2, layout="flat")
QUANTIZED = Way(model=FOR_MXFP8, dp=2, mxfp8=True, mxfp8_gather=True, overlap=True)

Pairs = Mapping[str, tuple[Way, Way]]
"""Saved the first way, loaded the second."""

MIXED = {"exclude": ("*.layers.0.mlp.*",), "frozen": (1,)}
"""Layers that share keys of the model, of which each has another state or none."""
FROZEN_STAGE = Way(model=TIED, pp=2, frozen=(0, 1))

PAIRS: Pairs = {
    "TP2 DP2 owner, DP3 flat": (BIG, FLAT3),
    "TP2 DP2 owner, TP4 owner": (BIG, Way(tp=4)),
    "DP3 flat, TP2 DP2 owner": (FLAT3, BIG),
    "DP3 flat, TP2 flat, fully parallel load": (
        FLAT3, Way(tp=2, layout="flat", parallel_load=True),
    ),
    "PP2 VPP2 DP2 flat, TP2 owner, tied": (PIPELINE, Way(model=TIED, tp=2)),
    "DP2 none, PP2 VPP2 DP2 flat, tied": (Way(model=TIED, dp=2, layout="none"), PIPELINE),
    "TP2 replicated, DP3 flat, biases": (
        Way(model=BIASES, tp=2, layout="replicated"), Way(model=BIASES, dp=3, layout="flat"),
    ),
    "EP2 DP2 owner, EP1 DP3 flat": (
        Way(model=EXPERTS, ep=2, dp=2), Way(model=EXPERTS, dp=3, layout="flat"),
    ),
    "TP2 EP2 DP2 flat, EP1 DP2 none": (
        Way(model=EXPERTS, tp=2, ep=2, dp=2, sequence_parallel=True, layout="flat"),
        Way(model=EXPERTS, dp=2, layout="none"),
    ),
    "bf16 flat, fp32 owner": (FLAT3, Way(tp=2, precision="fp32")),
    "fp32 owner, bf16 flat": (Way(dp=2, precision="fp32"), Way(tp=2, layout="flat")),
    "fp16 owner, fp16 flat": (
        Way(dp=2, precision="fp16"), Way(tp=2, precision="fp16", layout="flat"),
    ),
    "bf16 flat, fp16 owner": (FLAT3, Way(dp=2, precision="fp16")),
    "momentum fp32, bf16": (FLAT3, Way(dp=2, momentum_dtype="bf16")),
    "MXFP8 gather on, off": (QUANTIZED, Way(model=FOR_MXFP8, dp=3, mxfp8=True, layout="flat")),
    "MXFP8 gather off, on": (
        Way(model=FOR_MXFP8, dp=3, mxfp8=True, layout="flat"),
        replace(QUANTIZED, layout="flat", overlap=False),
    ),
    "more padding": (FLAT3, Way(vocab=80, tp=2, layout="flat")),
    "layers that differ, DP3 flat, TP2 owner": (
        replace(FLAT3, **MIXED), Way(tp=2, **MIXED),
    ),
    "layers that differ, TP2 owner, DP2 none": (
        Way(tp=2, **MIXED), Way(dp=2, layout="none", **MIXED),
    ),
    "a frozen stage, PP2 owner, DP2 flat": (
        FROZEN_STAGE, Way(model=TIED, dp=2, layout="flat", frozen=(0, 1)),
    ),
}  # fmt: skip

WAYS = {
    "TP2 DP2 owner": replace(BIG, model=TIED),
    "DP3 flat, buckets": replace(FLAT3, model=TIED, overlap=True, bucket_size=3000),
    "TP4 owner, bf16 momentum": Way(model=TIED, tp=4, momentum_dtype="bf16"),
    "PP2 VPP2 DP2 flat": PIPELINE,
    "DP2 none": Way(model=TIED, dp=2, layout="none"),
    "TP2 replicated": Way(model=TIED, tp=2, layout="replicated"),
    "DP1 fp32 owner": Way(model=TIED, precision="fp32"),
    "TP2 fp16 flat": Way(model=TIED, tp=2, precision="fp16", layout="flat"),
}
OF_EXPERTS = {
    "EP2 DP2 owner": Way(model=EXPERTS, ep=2, dp=2),
    "DP3 flat, experts": Way(model=EXPERTS, dp=3, layout="flat"),
    "TP2 EP2 DP2 flat": Way(model=EXPERTS, tp=2, ep=2, dp=2, sequence_parallel=True, layout="flat"),
    "EP2 DP4 none": Way(model=EXPERTS, ep=2, dp=4, layout="none"),
}
OTHERS: Pairs = {
    "TP2 replicated, DP2 replicated, fully parallel load": (
        Way(model=BIASES, tp=2, layout="replicated"),
        Way(model=BIASES, dp=2, layout="replicated", parallel_load=True),
    ),
    "less padding": (Way(vocab=80, dp=2), FLAT3),
    "momentum bf16, fp32": (Way(dp=2, momentum_dtype="bf16"), FLAT3),
    "MXFP8, other layout": (QUANTIZED, replace(QUANTIZED, layout="flat")),
}
EVERY_PAIR: Pairs = OTHERS | {
    f"{label}; {other}": (ways[label], ways[other])
    for ways in (WAYS, OF_EXPERTS)
    for label in ways
    for other in ways
}


class Trips:
    """Runs that are saved and loaded, those of as many ranks in one launch."""

    def __init__(self, folder: Path, pairs: Pairs) -> None:
        self.pairs = pairs
        ways = dict.fromkeys(way for way, _ in pairs.values())
        self._folders = {way: folder / f"{number}" for number, way in enumerate(ways)}
        self._done: dict[tuple[bool, int], dict[Run, list[Kept]] | BaseException] = {}

    def folder(self, label: str) -> str:
        way, _ = self.pairs[label]
        return str(self._folders[way])

    def saved(self, label: str) -> list[Kept]:
        way, _ = self.pairs[label]
        return self._get(Run(way=way, save=str(self._folders[way])))

    def loaded(self, label: str) -> list[Kept]:
        self.saved(label)
        way, other = self.pairs[label]
        return self._get(Run(way=other, load=str(self._folders[way])))

    def _get(self, run: Run) -> list[Kept]:
        key = run.load is not None, run.way.num_ranks
        if key not in self._done:
            # Remembered too: the next test would only wait for the same failure.
            try:
                self._done[key] = self._launch(*key)
            except BaseException as error:
                self._done[key] = error
        found = self._done[key]
        if isinstance(found, BaseException):
            raise found
        return found[run]

    def _launch(self, is_load: bool, num_ranks: int) -> dict[Run, list[Kept]]:
        if is_load:
            runs = [Run(way=other, load=str(self._folders[way]))
                    for way, other in self.pairs.values()]  # fmt: skip
            for label, (_, other) in self.pairs.items():
                if other.num_ranks == num_ranks:
                    self.saved(label)
        else:
            runs = [Run(way=way, save=str(folder)) for way, folder in self._folders.items()]
        return launch([run for run in dict.fromkeys(runs) if run.way.num_ranks == num_ranks])


def launch(runs: Sequence[Run]) -> dict[Run, list[Kept]]:
    """Do runs of one number of ranks."""
    for run in runs:
        if run.save is not None:
            Path(run.save).mkdir(exist_ok=True)
    (num_ranks,) = {run.way.num_ranks for run in runs}
    ranks = run_ranks(run_all, num_ranks, runs, timeout_s=60 + 10 * len(runs))
    return dict(zip(runs, map(list, zip(*ranks, strict=True)), strict=True))


@pytest.fixture(scope="module")
def trips(tmp_path_factory):
    return {
        label: found
        for name, pairs in (("few", PAIRS), ("all", EVERY_PAIR))
        for found in [Trips(tmp_path_factory.mktemp(name), pairs)]
        for label in pairs
    }


# --------------------------------------------------------------------------------------------
# Whole tensors, in plain code
# --------------------------------------------------------------------------------------------

Piece = tuple[int, torch.Tensor]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    ints = {4: torch.int32, 2: torch.int16}[one.element_size()]
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(ints), other.contiguous().view(ints))
    )


def whole(
    way: Way, ranks: Sequence[Kept], pieces_of: Sequence[Mapping[str, Sequence[Piece]]]
) -> dict[str, torch.Tensor]:
    """Put flat pieces of the shards of all ranks together, every element of every parameter."""
    shards: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
    for kept, pieces in zip(ranks, pieces_of, strict=True):
        for name, start, piece in ((n, s, p) for n, found in pieces.items() for s, p in found):
            of_name = shards.setdefault(name, {})
            numel = torch.Size(kept.shapes[name]).numel()
            shard, is_there = of_name.setdefault(
                kept.tp_rank, (piece.new_zeros(numel), torch.zeros(numel, dtype=torch.bool))
            )
            place = slice(start, start + len(piece))
            again = is_there[place]
            assert same(shard[place][again], piece[again]), f"copies of {name} differ"
            shard[place], is_there[place] = piece, True
    found = {}
    for name, of_name in shards.items():
        assert sorted(of_name) == list(range(way.tp)), name
        assert all(is_there.all() for _, is_there in of_name.values()), f"parts of {name} missing"
        shape = next(kept.shapes[name] for kept in ranks if name in kept.shapes)
        parts = [of_name[rank][0].view(shape) for rank in range(way.tp)]
        if not is_cut(name):
            assert all(same(part, parts[0]) for part in parts), f"copies of {name} differ"
        found[name] = unshard(Case(gated=way.model.gated), name, parts)
    return found


def masters(way: Way, ranks: Sequence[Kept]) -> dict[str, torch.Tensor]:
    return whole(way, ranks, [kept.masters for kept in ranks])


def weights(way: Way, ranks: Sequence[Kept]) -> dict[str, torch.Tensor]:
    """Return the weights that are not MXFP8."""
    pieces = [
        {name: [(0, weight.flatten())] for name, weight in kept.weights.items()} for kept in ranks
    ]
    return whole(way, ranks, pieces)


def states(way: Way, ranks: Sequence[Kept]) -> dict[str, dict[str, torch.Tensor]]:
    """Return each state but the steps, by its name."""
    keys = {key for state in every_state(ranks) for key in state} - {"step"}
    return {
        key: whole(way, ranks, [
            {name: [(start, state[key]) for start, state in pieces if key in state]
             for name, pieces in kept.states.items()}
            for kept in ranks
        ])
        for key in keys
    }  # fmt: skip


def every_state(ranks: Sequence[Kept]) -> Iterator[dict[str, torch.Tensor]]:
    for kept in ranks:
        for pieces in kept.states.values():
            for _, state in pieces:
                yield state


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of what is not bit for bit alike."""
    assert one.keys() == other.keys()
    return [name for name in one if not same(one[name], other[name])]


def padded(found: Mapping[str, torch.Tensor], way: Way) -> dict[str, torch.Tensor]:
    """Return tensors as a model with another padding has them: rows are cut off, or zero."""
    result = dict(found)
    for name in {EMBEDDING, OUTPUT} & found.keys():
        rows, old = found[name], len(found[name])
        extra = rows.new_zeros(max(way.vocab - old, 0), *rows.shape[1:])
        result[name] = torch.cat([rows[: way.vocab], extra])
    return result


# --------------------------------------------------------------------------------------------
# From one way to another
# --------------------------------------------------------------------------------------------

over_pairs = pytest.mark.parametrize(
    "label",
    [
        *PAIRS,
        *(pytest.param(label, marks=[pytest.mark.full, pytest.mark.timeout(1500)])
          for label in EVERY_PAIR),
    ],
)  # fmt: skip


@over_pairs
def test_loaded_state_is_what_was_saved(trips, label):
    way, other = trips[label].pairs[label]
    saved, loaded = trips[label].saved(label), trips[label].loaded(label)
    assert differing(masters(other, loaded), padded(masters(way, saved), other)) == []
    before, after = states(way, saved), states(other, loaded)
    assert before.keys() == after.keys() == {"momentum_buffer", "exp_avg", "exp_avg_sq"}
    for key, found in after.items():
        expected = padded(before[key], other)
        if key == "momentum_buffer" and other.momentum_dtype == "bf16":
            expected = {name: value.bfloat16() for name, value in expected.items()}
        elif key == "momentum_buffer":
            expected = {name: value.float() for name, value in expected.items()}
        assert differing(found, expected) == [], key
    for ranks in (saved, loaded):
        assert {float(s["step"]) for s in every_state(ranks) if "step" in s} == {STEPS}


@over_pairs
def test_loss_scale_is_what_was_saved(trips, label):
    """A run without one has none to give: then a run keeps its own."""
    saved, loaded = trips[label].saved(label), trips[label].loaded(label)
    _, other = trips[label].pairs[label]
    for kept in loaded:
        expected = (saved[0].scaler or GARBAGE) if other.precision == "fp16" else None
        assert kept.scaler == expected
    if saved[0].scaler is not None:
        assert saved[0].scaler["scale"] == 2 * LOSS_SCALE


@over_pairs
def test_weights_are_those_of_the_saved_masters(trips, label):
    """On every rank: exact in fp32, else rounded once."""
    way, other = trips[label].pairs[label]
    loaded = trips[label].loaded(label)
    expected = padded(masters(way, trips[label].saved(label)), other)
    found = weights(other, loaded)
    trained = {name: value for name, value in found.items() if name in expected}
    assert bool(found.keys() - trained.keys()) == bool(other.frozen)
    assert differing(trained, {name: expected[name].to(other.dtype) for name in trained}) == []
    for kept in loaded:
        assert kept.planes.keys() | kept.weights.keys() == kept.shapes.keys()
        assert bool(kept.planes) == other.mxfp8_gather
        for name, planes in kept.planes.items():
            quantized = CpuMXFP8Quantizer()(expected[name].to(other.dtype)).planes.each()
            assert all(torch.equal(p, q) for p, q in zip(planes, quantized, strict=True)), name


@over_pairs
def test_loss_goes_on_as_if_never_stopped(trips, label):
    way, other = trips[label].pairs[label]
    saved, loaded = trips[label].saved(label)[0].losses, trips[label].loaded(label)[0].losses
    if way == other:
        assert loaded == saved
    elif way.vocab == other.vocab:  # rows of padding count in a loss
        assert loaded == pytest.approx(saved, abs=LOSS_BOUND)
    assert saved[-1] < saved[0] - 100 * LOSS_BOUND


def test_saved_state_can_tell(trips):
    """Masters are no bf16 numbers, states not zero, and shards of a flat run end within rows."""
    label = "DP3 flat, TP2 DP2 owner"
    saved = trips[label].saved(label)
    for name, master in masters(FLAT3, saved).items():
        assert not same(master, master.bfloat16().float()), name
    for found in states(FLAT3, saved).values():
        assert all(value.abs().min() < value.abs().max() for value in found.values())
    within_rows = {
        name
        for kept in saved
        for name, pieces in kept.masters.items()
        for start, _ in pieces
        if start % kept.shapes[name][-1] and len(kept.shapes[name]) > 1
    }
    assert any("linear" in name for name in within_rows)
    assert EMBEDDING in within_rows or OUTPUT in within_rows


def test_loss_that_goes_on_without_momentum_is_seen(trips):
    label = "PP2 VPP2 DP2 flat, TP2 owner, tied"
    _, other = PAIRS[label]
    saved = trips[label].saved(label)[0].losses
    run = Run(way=other, load=trips[label].folder(label), fault="momentum forgotten")
    (kept, _) = launch([run])[run]
    assert max(abs(a - b) for a, b in zip(saved, kept.losses, strict=True)) > 10 * LOSS_BOUND


# --------------------------------------------------------------------------------------------
# The same way again, all garbage before
# --------------------------------------------------------------------------------------------

SAME = {
    "owner": Way(dp=2),
    "owner, overlapped": Way(dp=2, overlap=True, bucket_size=6000),
    "flat": Way(dp=2, layout="flat"),
    "flat, overlapped": Way(dp=2, layout="flat", overlap=True, bucket_size=6000),
    "none": Way(dp=2, layout="none"),
    "none, overlapped": Way(dp=2, layout="none", overlap=True, bucket_size=6000),
    "replicated": Way(dp=2, layout="replicated"),
    "fp16, overlapped": Way(dp=2, precision="fp16", overlap=True),
    "MXFP8": replace(QUANTIZED, overlap=False),
    "MXFP8, overlapped": QUANTIZED,
}
FAULTY = [
    (label, fault)
    for label in ("owner, overlapped", "flat")
    for fault in ("weights not renewed", "masters not loaded")
]


@pytest.fixture(scope="module")
def again(tmp_path_factory):
    """Runs that are saved, and go on from garbage; and those that are broken on purpose."""
    folder = tmp_path_factory.mktemp("again")
    saved = {label: Run(way=way, save=str(folder / label)) for label, way in SAME.items()}
    loads = {
        (label, "none"): Run(way=way, load=str(folder / label), late=True)
        for label, way in SAME.items()
    }
    loads |= {
        (label, fault): replace(loads[label, "none"], steps_after=0, fault=fault)
        for label, fault in FAULTY
    }
    done = launch([*saved.values(), *loads.values()])
    return {key: (done[saved[key[0]]], done[run]) for key, run in loads.items()}


@pytest.mark.parametrize("label", SAME)
def test_weights_are_made_of_masters_alone(again, label):
    """After masters were read into garbage, and once all weights had been made garbage again."""
    for live, kept in zip(*again[label, "none"], strict=True):
        assert differing_weights(live, kept) == []
        assert kept.losses == live.losses


@pytest.mark.parametrize(("label", "fault"), FAULTY)
def test_garbage_that_is_left_is_seen(again, label, fault):
    for live, kept in zip(*again[label, fault], strict=True):
        assert differing_weights(live, kept) == list(live.weights)


def differing_weights(live: Kept, kept: Kept) -> list[str]:
    """Return the weights that two runs of a rank do not have alike."""
    assert live.planes.keys() == kept.planes.keys()
    return differing(live.weights, kept.weights) + [
        name
        for name, planes in live.planes.items()
        if not all(torch.equal(p, q) for p, q in zip(planes, kept.planes[name], strict=True))
    ]
