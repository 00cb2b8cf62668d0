"""Golden values: recorded loss curves, and the rules by which a run is held to them.

A golden file is worth something only if wrong runs fail against it. :func:`record` therefore asks
for the curves of deliberately broken runs and refuses to write a file that one of them passes;
:func:`compare` lets no step fail. The file format is Megatron's, so its tools read it too.

The imports point one way: ``record`` -> ``provenance`` -> ``compare`` -> ``series``, and ``curves``
-> ``values`` -> ``series``. ``case`` reads the configuration that lies beside a golden file.
"""

from megatron_muon.testing.golden.case import FunctionalCase, read_case
from megatron_muon.testing.golden.compare import (
    KINDS,
    Comparison,
    Kind,
    Precision,
    compare,
    tolerance_of,
)
from megatron_muon.testing.golden.curves import (
    IterationLine,
    parse_console_log,
    read_console,
    read_curve,
    read_tensorboard,
    series_from_console,
)
from megatron_muon.testing.golden.provenance import (
    EXPECTED_MUTANTS,
    QUANTIZATION_MUTANTS,
    SCALING_MUTANTS,
    Evidence,
    Mutant,
    Processor,
    Provenance,
    load_provenance,
    parse_cpuinfo,
    sidecar_path,
)
from megatron_muon.testing.golden.record import GoldenRefusedError, examine, load_recorded, record
from megatron_muon.testing.golden.series import DECIMALS, MetricSeries, Source
from megatron_muon.testing.golden.values import (
    GoldenValues,
    golden_path,
    load_golden,
    save_golden,
)

__all__ = [
    "DECIMALS",
    "EXPECTED_MUTANTS",
    "KINDS",
    "QUANTIZATION_MUTANTS",
    "SCALING_MUTANTS",
    "Comparison",
    "Evidence",
    "FunctionalCase",
    "GoldenRefusedError",
    "GoldenValues",
    "IterationLine",
    "Kind",
    "MetricSeries",
    "Mutant",
    "Precision",
    "Processor",
    "Provenance",
    "Source",
    "compare",
    "examine",
    "golden_path",
    "load_golden",
    "load_provenance",
    "load_recorded",
    "parse_console_log",
    "parse_cpuinfo",
    "read_case",
    "read_console",
    "read_curve",
    "read_tensorboard",
    "record",
    "save_golden",
    "series_from_console",
    "sidecar_path",
    "tolerance_of",
]
