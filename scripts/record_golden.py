"""Record the golden curves of all cases, if every wrong run fails against them.

    python scripts/record_golden.py --data-prefix .cache/shakespeare_bytes --work-dir runs/golden

trains each case, the same model at other parallel sizes, and every mutant, one after another. Run
it after a change that is meant to move the curve, and say in CHANGELOG.md why it moves.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from megatron_muon.testing.golden import (
    EXPECTED_MUTANTS,
    QUANTIZATION_MUTANTS,
    SCALING_MUTANTS,
    MetricSeries,
    Mutant,
    Precision,
    read_case,
    record,
)
from megatron_muon.testing.training import (
    GOLDEN_NAME,
    Grid,
    golden_folder,
    precision_of,
    train_case,
)

# For each precision the case that is also run at other sizes and broken on purpose, and the sizes.
BASES: dict[Precision, tuple[str, tuple[Grid, ...]]] = {
    "bf16": ("gpt_tp2_dp2", (Grid(1, 1), Grid(2, 1), Grid(1, 2), Grid(1, 3))),
    "fp16": ("gpt_fp16_tp2_dp2", (Grid(1, 1), Grid(4, 1), Grid(1, 3))),
    "fp32": ("gpt_fp32_tp2_dp2", ()),
    "mxfp8": ("gpt_mxfp8_tp2_dp2", (Grid(1, 1), Grid(2, 1), Grid(1, 2), Grid(1, 3), Grid(1, 4))),
}
OWN_MUTANTS: dict[Precision, tuple[Mutant, ...]] = {
    "fp16": SCALING_MUTANTS, "mxfp8": QUANTIZATION_MUTANTS
}  # fmt: skip


def main() -> None:
    """Train everything and write the golden files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-prefix", required=True, metavar="PREFIX")
    parser.add_argument("--work-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--precision", nargs="+", choices=BASES, default=tuple(BASES))
    options = parser.parse_args()

    def run(
        label: str, name: str, grid: Grid | None = None, mutant: Mutant | None = None
    ) -> MetricSeries:
        folder = options.work_dir / label
        curve = train_case(name, options.data_prefix, folder, grid=grid, mutant=mutant,
                           timeout_s=600)  # fmt: skip
        print(f"{label}: loss {curve.first:.5f} -> {curve.last:.5f}", flush=True)
        return curve

    for precision in options.precision:
        record_precision(precision, run)


def record_precision(precision: Precision, run: Callable[..., MetricSeries]) -> None:
    """Record all cases of one precision, each with all the others as legitimate runs."""
    base, grids = BASES[precision]
    folders = sorted(path.parent for path in golden_folder().glob("*/model_config.yaml"))
    cases = {
        folder.name: run(folder.name, folder.name)
        for folder in folders
        if precision_of(read_case(folder)) == precision
    }
    others = {str(grid): run(f"{base}_{grid}", base, grid) for grid in grids}
    names = EXPECTED_MUTANTS + OWN_MUTANTS.get(precision, ())
    mutants = {mutant: run(f"{base}_{mutant}", base, mutant=mutant) for mutant in names}
    for name, curve in cases.items():
        rest = {other: c for other, c in cases.items() if other != name}
        provenance = record(
            golden_folder() / name / GOLDEN_NAME,
            curve,
            legitimate={**rest, **others},
            mutants=mutants,
            kind="cross-sharding",
            precision=precision,
            command=read_case(golden_folder() / name).command_line(),
        )
        evidence = provenance.evidence
        nearest = min(evidence.mutants.values())
        print(f"{name}: recorded, spread {evidence.spread:.1e}, nearest mutant {nearest:.1e}")


if __name__ == "__main__":
    main()
