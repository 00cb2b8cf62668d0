"""Checkpoints move between stock Megatron's Muon and this package's, both ways."""

from dataclasses import replace

import pytest
import torch

from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.model import logical_shapes, shard, unshard
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests.interchange_job import STEPS, STEPS_AFTER, Run, run_ours, run_stock

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

LOSS, LOSS_RESHARDED = 5e-4, 1e-3
"""How far losses of the two may be apart; the second where sums are in another order, too."""

CASE = Case(bf16=True, backward=True, lr=5e-4)
LAYOUT, LEGACY = replace(CASE, wrap="training"), replace(CASE, wrap="legacy")
FLAT, REPLICATED = replace(LAYOUT, layout="flat"), replace(CASE, wrap="replicated")
FP32 = replace(REPLICATED, bf16=False)
# Its buckets are others than those of the files.
BUCKETS = replace(LAYOUT, overlap_grad=True, bucket_size=3000)

BY_BUCKET, BY_PARAMETER = "dp_reshardable", "fully_reshardable"


def tp2(case):
    return replace(case, tp=2)


STOCK = {
    "legacy": Run(case=LEGACY),
    "legacy, torch's AdamW": Run(case=LEGACY, counts_in_group=False),
    "layout": Run(case=LAYOUT),
    "layout, fully reshardable": Run(case=LAYOUT, sharding=BY_PARAMETER),
    "no distribution, fp32": Run(case=FP32, sharding=None, counts_in_group=False),
    "legacy TP2": Run(case=tp2(LEGACY)),
    "layout TP2": Run(case=tp2(LAYOUT)),
    "AdamW": Run(case=LAYOUT, is_adamw=True),
    "AdamW, fully reshardable": Run(case=LAYOUT, is_adamw=True, sharding=BY_PARAMETER),
}
"""What stock Megatron saves, on two ranks."""

INTO_OURS = [
    ("legacy", LAYOUT),
    ("legacy", FLAT),
    ("legacy", LEGACY),
    ("legacy", tp2(LAYOUT)),
    ("legacy, torch's AdamW", LAYOUT),
    ("layout", LAYOUT),
    ("layout", FLAT),
    ("layout", BUCKETS),
    ("layout, fully reshardable", LAYOUT),
    ("layout, fully reshardable", REPLICATED),
    ("layout, fully reshardable", tp2(FLAT)),
    ("no distribution, fp32", FP32),
    ("no distribution, fp32", replace(FLAT, bf16=False)),
    ("legacy TP2", FLAT),
    ("layout TP2", tp2(LAYOUT)),
]
"""What is loaded, and how this package goes on."""

FAULTY = [("legacy", LAYOUT, "momentum is not loaded"), ("layout", LAYOUT, "momentum is a sum")]

PRECISIONS = [
    (name, replace(case, bf16=False, **precision))
    for name, case in (
        ("legacy", LAYOUT),
        ("layout", LAYOUT),
        ("layout, fully reshardable", LEGACY),
    )
    for precision in ({}, {"fp16": True})
]
"""The same in fp32, whose weights are the masters, and in fp16."""

REFUSED = [("layout", tp2(LAYOUT)), ("layout TP2", LAYOUT), ("layout", LEGACY)]

WITHOUT_MOMENTUM = [
    ("AdamW", LAYOUT),
    ("AdamW", FLAT),
    ("AdamW", LEGACY),
    ("AdamW", tp2(LAYOUT)),
    ("AdamW, fully reshardable", LAYOUT),
]
"""Checkpoints of another optimizer, by bucket and by parameter."""

OURS = {
    "owner": Run(case=LAYOUT),
    "flat": Run(case=FLAT),
    "no layout": Run(case=LEGACY),
    "no distribution, fp32": Run(case=FP32, sharding=None),
    "owner TP2": Run(case=tp2(LAYOUT)),
}
"""What this package saves, on two ranks."""

INTO_STOCK = [
    ("owner", Run(case=LAYOUT)),
    ("flat", Run(case=LAYOUT)),
    ("owner", Run(case=tp2(LAYOUT))),
    ("owner TP2", Run(case=LAYOUT)),
    ("owner", Run(case=LEGACY)),
    ("flat", Run(case=LEGACY, counts_in_group=False)),
    ("no layout", Run(case=LEGACY, counts_in_group=False)),
    ("no distribution, fp32", Run(case=FP32, counts_in_group=False)),
]
"""What is loaded, and how stock Megatron goes on."""


def launch(function, jobs, num_ranks=2):
    """Run jobs in processes of their own; return for each what every rank kept."""
    return list(zip(*run_ranks(function, num_ranks, jobs, timeout_s=300), strict=True))


def saved(function, runs, folder):
    """Train and save each of ``runs``; return what each kept, and the folder, by name."""
    folders = {name: folder / f"{number}" for number, name in enumerate(runs)}
    for path in folders.values():
        path.mkdir()
    jobs = [replace(run, save=str(folders[name])) for name, run in runs.items()]
    kept = dict(zip(runs, launch(function, jobs), strict=True))
    return {name: (runs[name].case, kept[name], str(folders[name])) for name in runs}


@pytest.fixture(scope="module")
def of_stock(tmp_path_factory):
    return saved(run_stock, STOCK, tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def of_ours(tmp_path_factory):
    return saved(run_ours, OURS, tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def into_ours(of_stock):
    jobs = [Run(case=case, load=of_stock[name][2]) for name, case in INTO_OURS]
    jobs += [Run(case=case, load=of_stock[name][2], fault=f) for name, case, f in FAULTY]
    jobs += [Run(case=case, load=of_stock[name][2]) for name, case in REFUSED]
    jobs += [Run(case=case, load=of_stock[name][2], steps_after=0) for name, case in PRECISIONS]
    jobs += [Run(case=case, load=of_stock[name][2]) for name, case in WITHOUT_MOMENTUM]
    return launch(run_ours, jobs)


@pytest.fixture(scope="module")
def into_stock(of_ours):
    return launch(run_stock, [replace(run, load=of_ours[name][2]) for name, run in INTO_STOCK])


def wholes(case, ranks):
    """Put together every master and state of a model, from the pieces of all ranks."""
    found = {}
    for name, shape in logical_shapes(case).items():
        tp = case.tp
        keys = {key for rank in ranks for _, state in rank.states.get(name, ()) for key in state}
        for key in sorted({"master", *keys} - {"step"}):
            shards = []
            for tp_rank in range(tp):
                local = shard(case, name, torch.empty(shape), tp_rank).shape
                flat = torch.full((local.numel(),), torch.nan)
                for rank in ranks:
                    if rank.tp_rank == tp_rank:
                        pieces = zip(rank.masters.get(name, ()), rank.states.get(name, ()),
                                     strict=True)  # fmt: skip
                        for (start, master), (_, state) in pieces:
                            piece = master if key == "master" else state[key]
                            flat[start : start + piece.numel()] = piece
                shards.append(flat.view(local))
            found[name, key] = unshard(case, name, shards)
    return found


def assert_same_state(one, other):
    """Compare what two runs hold, by parameter and to the last bit."""
    (case, ranks), (other_case, other_ranks) = one, other
    before, after = wholes(case, ranks), wholes(other_case, other_ranks)
    assert before.keys() == after.keys()
    assert sum(key == "momentum_buffer" for _, key in before) == 8
    assert sum(key == "exp_avg_sq" for _, key in before) == len(logical_shapes(case)) - 8
    different = [key for key in before if not torch.equal(before[key], after[key])]
    assert different == []
    counts = {count for rank in (*ranks, *other_ranks) for count in rank.steps}
    assert counts == {STEPS}


def far_apart(one, other):
    """Return how far the losses of two runs are apart at most, and how far they may be."""
    (case, ranks), (other_case, other_ranks) = one, other
    losses, other_losses = ranks[0].losses, other_ranks[0].losses
    assert len(losses) == len(other_losses) == STEPS_AFTER + 1
    assert all(rank.losses == losses for rank in ranks)
    apart = max(abs(a - b) for a, b in zip(losses, other_losses, strict=True))
    print(f"losses {apart:.1e} apart")
    is_alike = (case.tp, len(ranks)) == (other_case.tp, len(other_ranks))
    return apart, LOSS if is_alike else LOSS_RESHARDED


def named(rows):
    return [f"{row[0]}-{number}" for number, row in enumerate(rows)]


@pytest.mark.parametrize("row", range(len(INTO_OURS)), ids=named(INTO_OURS))
def test_stock_goes_on_as_ours(of_stock, into_ours, row):
    name, case = INTO_OURS[row]
    before, after = of_stock[name][:2], (case, into_ours[row])
    assert [rank.refusal for rank in after[1]] == ["", ""]
    assert_same_state(before, after)
    apart, bound = far_apart(before, after)
    assert apart < bound


@pytest.mark.parametrize("row", range(len(FAULTY)), ids=[row[2] for row in FAULTY])
def test_momentum_that_is_lost_or_of_the_other_convention_is_seen(of_stock, into_ours, row):
    """Shows that the test above can fail, by the state and by the losses."""
    name, case, _ = FAULTY[row]
    before, after = of_stock[name][:2], (case, into_ours[len(INTO_OURS) + row])
    with pytest.raises(AssertionError, match="momentum_buffer"):
        assert_same_state(before, after)
    apart, _ = far_apart(before, after)
    assert apart > 2 * LOSS_RESHARDED


@pytest.mark.parametrize("row", range(len(REFUSED)), ids=named(REFUSED))
def test_state_by_bucket_of_other_sizes_is_refused(into_ours, row):
    for rank in into_ours[len(INTO_OURS) + len(FAULTY) + row]:
        assert "bucket by bucket" in rank.refusal
        assert "--dist-ckpt-optim-fully-reshardable" in rank.refusal


@pytest.mark.parametrize("row", range(len(PRECISIONS)), ids=named(PRECISIONS))
def test_masters_of_another_precision_are_those_of_the_file(of_stock, into_ours, row):
    name, case = PRECISIONS[row]
    loaded = into_ours[len(INTO_OURS) + len(FAULTY) + len(REFUSED) + row]
    assert_same_state(of_stock[name][:2], (case, loaded))


@pytest.mark.parametrize("row", range(len(WITHOUT_MOMENTUM)), ids=named(WITHOUT_MOMENTUM))
def test_a_checkpoint_of_adamw_is_told_to_lend_its_weights(into_ours, row):
    """No way to save it again would give it momentum."""
    for rank in into_ours[row - len(WITHOUT_MOMENTUM)]:
        assert "momentum" in rank.refusal
        assert "--no-load-optim" in rank.refusal
        assert "bucket" not in rank.refusal
        assert "--dist-ckpt-optim-fully-reshardable" not in rank.refusal


def test_state_by_bucket_is_read_by_another_number_of_ranks(of_stock):
    (loaded,) = launch(run_ours, [Run(case=FLAT, load=of_stock["layout"][2])], num_ranks=1)
    before, after = of_stock["layout"][:2], (FLAT, loaded)
    assert_same_state(before, after)
    apart, bound = far_apart(before, after)
    assert apart < bound


@pytest.mark.parametrize("row", range(len(INTO_STOCK)), ids=named(INTO_STOCK))
def test_ours_goes_on_as_stock(of_ours, into_stock, row):
    name, run = INTO_STOCK[row]
    before, after = of_ours[name][:2], (run.case, into_stock[row])
    assert_same_state(before, after)
    apart, bound = far_apart(before, after)
    assert apart < bound
