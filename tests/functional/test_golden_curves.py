"""Whole training runs held to the recorded curves, at every parallel size."""

from pathlib import Path

import pytest

from megatron_muon.testing.golden import MetricSeries, compare, load_recorded, read_case
from megatron_muon.testing.training import (
    GOLDEN_NAME,
    Grid,
    case_flags,
    golden_folder,
    num_ranks_of,
    train,
    train_case,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASES = sorted(path.parent.name for path in golden_folder().glob("*/model_config.yaml"))
PAIRS = [name for name in CASES if f"{name}_overlap" in CASES]
BASE = "gpt_tp2_dp2"
OTHER_GRIDS = (Grid(1, 1), Grid(2, 1), Grid(1, 2), Grid(1, 3))
RUN_TIMEOUT_S = 240.0


@pytest.fixture(scope="session")
def curves(data_prefix: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, MetricSeries]:
    """Curves by case or grid, each trained once a session."""
    return _Curves(data_prefix, tmp_path_factory.mktemp("curves"))


class _Curves(dict[str, MetricSeries]):
    def __init__(self, data_prefix: str, folder: Path) -> None:
        self._data_prefix = data_prefix
        self._folder = folder

    def __missing__(self, key: str) -> MetricSeries:
        grids = {str(grid): grid for grid in OTHER_GRIDS}
        name = BASE if key in grids else key
        self[key] = train_case(
            name, self._data_prefix, self._folder / key, grid=grids.get(key),
            timeout_s=RUN_TIMEOUT_S,
        )  # fmt: skip
        return self[key]


def test_there_are_cases_for_each_grid_with_and_without_overlap() -> None:
    grids = ("tp1_dp4", "tp2_dp2", "tp4_dp1")
    assert sorted(f"gpt_{grid}{end}" for grid in grids for end in ("", "_overlap")) == CASES


def test_the_cases_differ_in_parallel_sizes_and_overlap_alone() -> None:
    free = {
        "--tensor-model-parallel-size", "--micro-batch-size", "--overlap-grad-reduce",
        "--overlap-param-gather",
    }  # fmt: skip
    args = [read_case(golden_folder() / name).model_args for name in CASES]
    kept = [{flag: value for flag, value in a.items() if flag not in free} for a in args]
    assert all(other == kept[0] for other in kept)


@pytest.mark.parametrize("name", CASES)
def test_a_case_follows_its_golden_curve(name: str, curves: dict[str, MetricSeries]) -> None:
    golden, provenance = load_recorded(golden_folder() / name / GOLDEN_NAME)
    held = compare(curves[name], golden.metric("lm loss"), kind="cross-hardware")
    assert held.passed, held.message
    # What was recorded is held to the tolerance that the mutants fail.
    assert min(provenance.evidence.mutants.values()) > provenance.evidence.tolerance


@pytest.mark.parametrize("name", PAIRS)
def test_overlap_changes_no_bit(name: str, curves: dict[str, MetricSeries]) -> None:
    held = compare(curves[f"{name}_overlap"], curves[name], kind="exact")
    assert held.passed, held.message


@pytest.mark.parametrize("label", [*map(str, OTHER_GRIDS), "gpt_tp1_dp4", "gpt_tp4_dp1"])
def test_the_curve_is_the_same_at_every_parallel_size(
    label: str, curves: dict[str, MetricSeries]
) -> None:
    reference, curve = curves[BASE], curves[label]
    assert abs(curve.first - reference.first) <= 1e-5 * reference.first
    assert len(curve.steps) == 50
    held = compare(curve, reference, kind="cross-sharding")
    assert held.passed, held.message


def test_a_broken_run_leaves_the_curve(
    data_prefix: str, tmp_path: Path, curves: dict[str, MetricSeries]
) -> None:
    """The mutant nearest to the golden curve, of those that one flag makes."""
    curve = train_case(BASE, data_prefix, tmp_path, mutant="unsplit-qkv", timeout_s=RUN_TIMEOUT_S)
    held = compare(curve, curves[BASE], kind="cross-sharding")
    assert not held.passed, held.message


def test_the_same_run_twice_gives_the_same_bits(
    data_prefix: str, tmp_path: Path, curves: dict[str, MetricSeries]
) -> None:
    case = read_case(golden_folder() / BASE)
    flags = case_flags(case, data_prefix, tmp_path)
    flags += ["--exit-interval", "5"]
    curve = train(flags, num_ranks_of(case), tmp_path, timeout_s=RUN_TIMEOUT_S)
    first = {step: curves[BASE].as_mapping()[step] for step in curve.steps}
    assert curve.as_mapping() == first
