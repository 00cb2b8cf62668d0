"""Record the golden curves of all cases, if every wrong run fails against them.

    python scripts/record_golden.py --data-prefix .cache/shakespeare_bytes --work-dir runs/golden

trains each case, the same model at other parallel sizes, and every mutant, one after another. Run
it after a change that is meant to move the curve, and say in CHANGELOG.md why it moves.
"""

import argparse
from pathlib import Path

from megatron_muon.testing.golden import EXPECTED_MUTANTS, MetricSeries, Mutant, read_case, record
from megatron_muon.testing.training import GOLDEN_NAME, Grid, golden_folder, train_case

MUTANT_CASE = "gpt_tp2_dp2"
OTHER_GRIDS = (Grid(1, 1), Grid(2, 1), Grid(1, 2), Grid(1, 3))


def main() -> None:
    """Train everything and write the golden files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-prefix", required=True, metavar="PREFIX")
    parser.add_argument("--work-dir", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    names = sorted(path.parent.name for path in golden_folder().glob("*/model_config.yaml"))

    def run(
        label: str, name: str, grid: Grid | None = None, mutant: Mutant | None = None
    ) -> MetricSeries:
        folder = options.work_dir / label
        curve = train_case(name, options.data_prefix, folder, grid=grid, mutant=mutant,
                           timeout_s=600)  # fmt: skip
        print(f"{label}: loss {curve.first:.5f} -> {curve.last:.5f}", flush=True)
        return curve

    cases = {name: run(name, name) for name in names}
    others = {str(grid): run(str(grid), MUTANT_CASE, grid) for grid in OTHER_GRIDS}
    mutants = {mutant: run(mutant, MUTANT_CASE, mutant=mutant) for mutant in EXPECTED_MUTANTS}
    for name, curve in cases.items():
        rest = {other: c for other, c in cases.items() if other != name}
        provenance = record(
            golden_folder() / name / GOLDEN_NAME,
            curve,
            legitimate={**rest, **others},
            mutants=mutants,
            kind="cross-sharding",
            command=read_case(golden_folder() / name).command_line(),
        )
        evidence = provenance.evidence
        nearest = min(evidence.mutants.values())
        print(f"{name}: recorded, spread {evidence.spread:.1e}, nearest mutant {nearest:.1e}")


if __name__ == "__main__":
    main()
