"""What the seams change and what they leave alone, in whole runs of a user's own script."""

import json
import runpy
import sys

import pytest

from megatron_muon.testing.golden.curves import read_tensorboard
from megatron_muon.testing.ranks import run_ranks
from tests.functional.jobs import MODEL, MUON, STOCK_STYLE, launch, run_on, torchrun

pytestmark = pytest.mark.distributed

ADAM = ["--optimizer", "adam", "--use-distributed-optimizer"]
FLAGS = [*MODEL, "--mock-data"]

WATCH = f"""
import runpy
from megatron.training import training

build = training.setup_model_and_optimizer

def watched(*args, **kwargs):
    model, optimizer, scheduler = build(*args, **kwargs)
    # With a layout, the layer-wise optimizer and Adam's are chained.
    layer_wise = next(part for part in (optimizer, optimizer.chained_optimizers[0])
                      if hasattr(part, "use_buffer_param_sync"))
    print("WATCHED", type(layer_wise).__name__, type(model[0].full_param_layout).__name__,
          layer_wise.use_buffer_param_sync, flush=True)
    return model, optimizer, scheduler

training.setup_model_and_optimizer = watched
runpy.run_path({STOCK_STYLE!r}, run_name="__main__")
"""


def train(folder, *flags, script=STOCK_STYLE, ours=(), num_ranks=2):
    """Train through the launcher; return the exact losses and what was printed."""
    folder.mkdir()
    curves = ["--tensorboard-dir", str(folder / "curves")]
    job = launch(run_on(num_ranks, script, *FLAGS, *flags, *curves, ours=ours), folder / "logs")
    assert job.code == 0, job.said
    return losses(folder), job.said


def losses(folder):
    series = read_tensorboard(folder / "curves")
    assert len(series.values) == 3
    return series.values


@pytest.fixture(scope="module")
def with_muon(tmp_path_factory):
    """Losses and words of a run with Muon through the launcher, on the ModelBuilder path."""
    return train(tmp_path_factory.mktemp("muon") / "run", *MUON)


def test_adam_is_bit_equal_with_and_without_the_seams(tmp_path, with_muon):
    with_seams, _ = train(tmp_path / "seams", *ADAM)
    without, said = train(tmp_path / "bare", *ADAM, ours=["--no-optimizer"])
    assert with_seams == without
    assert "Muon is on" not in said
    # The comparison can fail: another optimizer gives other losses from the second step on.
    muon, said = with_muon
    assert "Muon is on" in said
    assert muon[0] == with_seams[0]
    assert muon[1:] != with_seams[1:]


@pytest.mark.parametrize(
    "way", [[], ["--use-model-provider"]], ids=["model builder", "model provider"]
)
def test_both_ways_to_ddp_take_the_layout_path(tmp_path, way):
    script = tmp_path / "watched.py"
    script.write_text(WATCH)
    report = tmp_path / "report.json"
    _, said = train(tmp_path / "run", *MUON, *way, "--muon-report", str(report), script=str(script))
    assert said.count("WATCHED LayerWiseMuonOptimizer MuonParamLayout True") == 2
    written = json.loads(report.read_text())
    assert written["resolved"]["layout"] == "owner"
    owners = {owner["data"] for row in written["routing"] for owner in row["owner_ranks"]}
    assert owners == {0, 1}
    assert [step["newton_schulz_calls"] > 0 for step in written["steps"]] == [True] * 3


def test_without_the_layout_the_run_says_so_and_trains(tmp_path):
    """Shows that the test above can fail."""
    script = tmp_path / "watched.py"
    script.write_text(WATCH)
    _, said = train(tmp_path / "run", *MUON, "--no-use-layer-wise-param-layout", script=str(script))
    assert said.count("WATCHED LayerWiseMuonOptimizer NoneType False") == 2


OWN = f"""
{{before}}
import megatron_muon
megatron_muon.install(device="cpu")
{{after}}
import runpy
runpy.run_path({STOCK_STYLE!r}, run_name="__main__")
"""

IMPORTS = """
from megatron.core.optimizer.layer_wise_optimizer import tag_params_for_buffer_routing
from megatron.training import get_args, pretrain
from megatron.training.arguments import parse_and_validate_args, validate_args
"""


def be_script(path, flags):
    sys.argv = [path, *flags]
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize(
    ("before", "after"), [("", IMPORTS), (IMPORTS, "")], ids=["before imports", "after imports"]
)
def test_a_script_that_installs_trains_as_the_launcher_does(tmp_path, with_muon, before, after):
    folder = tmp_path / "own"
    folder.mkdir()
    script = folder / "own.py"
    script.write_text(OWN.format(before=before, after=after))
    flags = [*FLAGS, *MUON, "--tensorboard-dir", str(folder / "curves")]
    run_ranks(be_script, 2, str(script), flags, timeout_s=60, logs=folder)
    assert losses(folder) == with_muon[0]


def test_an_unchanged_script_trains_under_torchrun(tmp_path):
    report = tmp_path / "report.json"
    command = run_on(
        1, STOCK_STYLE, *FLAGS, *MUON, "--tensor-model-parallel-size", "2",
        "--muon-report", str(report),
    )[0]  # fmt: skip
    job = torchrun(2, "megatron_muon", *command)
    assert job.code == 0, job.said
    assert job.said.count("on the CPU, so set") == 1
    assert job.said.count("Muon is on") == 1
    assert "iteration        3/       3" in job.said
    assert len(json.loads(report.read_text())["steps"]) == 3
