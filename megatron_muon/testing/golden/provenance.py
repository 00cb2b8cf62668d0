"""What is known about a recording: the sidecar ``<golden name>.provenance.json``.

It holds the evidence that the golden file can tell right from wrong (how far the curve moves, how
far legitimate runs lie apart, how far each broken run lies off) and the processor, the versions
and the command, since processors differ in the last bits of the same sums.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Self, get_args

from megatron_muon.errors import ConfigurationError
from megatron_muon.testing.golden.compare import KINDS, Kind, tolerances_of
from megatron_muon.testing.golden.jsonfile import (
    as_choice,
    as_number,
    as_object,
    as_text,
    as_texts,
    parse_object,
    read_text,
    require_keys,
)
from megatron_muon.testing.golden.series import Source

type ExpectedMutant = Literal[
    "frozen-weights", "adamw-for-muon", "blockwise-tp", "unsplit-qkv", "one-owner-skipped"
]
type ScalingMutant = Literal["update-divided-by-loss-scale", "gradients-left-scaled"]
type QuantizationMutant = Literal["unquantized-weights", "unstaged-weights"]
type Mutant = ExpectedMutant | ScalingMutant | QuantizationMutant
"""A run that is broken on purpose.

``frozen-weights``: no weight is ever updated.
``adamw-for-muon``: the matrices go to AdamW.
``blockwise-tp``: each tensor-parallel shard is orthogonalized by itself.
``unsplit-qkv``: the fused QKV weight is orthogonalized as one matrix.
``one-owner-skipped``: the matrices of one owner are never updated.

With a loss scale only:

``update-divided-by-loss-scale``: Muon's update is unscaled, as a gradient should be.
``gradients-left-scaled``: no gradient is divided by the loss scale.

With gathered MXFP8 weights only:

``unquantized-weights``: the weights are bf16.
``unstaged-weights``: nothing is written before a gather, so all weights become zero.
"""

EXPECTED_MUTANTS: tuple[Mutant, ...] = get_args(ExpectedMutant.__value__)
"""Those that every recording needs."""

SCALING_MUTANTS: tuple[Mutant, ...] = get_args(ScalingMutant.__value__)
QUANTIZATION_MUTANTS: tuple[Mutant, ...] = get_args(QuantizationMutant.__value__)
MUTANTS = EXPECTED_MUTANTS + SCALING_MUTANTS + QUANTIZATION_MUTANTS

SOURCES: tuple[Source, ...] = get_args(Source.__value__)

MOVEMENT_FACTOR = 10
"""How many tolerances a golden curve has to move, from its first step to its last."""

_PACKAGES = ("torch", "megatron-core", "emerging-optimizers")
_EVIDENCE_KEYS = (
    "metric",
    "kind",
    "tolerance",
    "source",
    "movement",
    "spread",
    "legitimate",
    "mutants",
)
_KEYS = ("evidence", "processor", "versions", "command", "date", "values_sha256")
_PROCESSOR_KEYS = ("model", "architecture", "instructions")


@dataclass(frozen=True, slots=True)
class Evidence:
    """Numbers that show whether a golden curve tells right from wrong.

    Attributes:
        metric: Metric held to the rule.
        kind: Comparison the golden file is meant for.
        tolerance: Tolerance of that comparison.
        source: Where the curve was read from.
        movement: ``|first - last| / |last|`` of the curve.
        legitimate: Distance of each other right run, by its name.
        mutants: Distance of each run that is broken on purpose.
    """

    metric: str
    kind: Kind
    tolerance: float
    source: Source
    movement: float
    legitimate: Mapping[str, float]
    mutants: Mapping[Mutant, float]

    def __post_init__(self) -> None:
        for name in ("legitimate", "mutants"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def spread(self) -> float:
        """Largest distance between legitimate runs."""
        return max(self.legitimate.values(), default=0.0)

    def weaknesses(self) -> tuple[str, ...]:
        """Why this golden curve cannot be trusted, each with its numbers; empty if it can."""
        found = []
        if self.tolerance not in tolerances_of(self.kind):
            found.append(
                f"the tolerance {self.tolerance:g} is none of {tolerances_of(self.kind)}, those of "
                f"{self.kind}"
            )
        needed = MOVEMENT_FACTOR * self.tolerance
        if self.movement < needed:
            found.append(
                f"the curve moves {self.movement:.2e} of its last value, less than "
                f"{MOVEMENT_FACTOR} x {self.tolerance:g} = {needed:g}"
            )
        if not self.legitimate:
            found.append("no other legitimate run is comparable, so the spread is not measured")
        for name, distance in self.legitimate.items():
            if not distance <= self.tolerance:
                found.append(
                    f"the legitimate run {name!r} lies {distance:.2e} off, more than "
                    f"{self.tolerance:g}"
                )
        missing = [name for name in EXPECTED_MUTANTS if name not in self.mutants]
        if missing:
            found.append(f"no comparable run of the mutants {missing}")
        for mutant, distance in self.mutants.items():
            if not distance > self.tolerance:
                found.append(
                    f"the mutant {mutant!r} passes: it lies {distance:.2e} off, within "
                    f"{self.tolerance:g}"
                )
        return tuple(found)

    def to_dict(self) -> dict[str, object]:
        """JSON form."""
        return {
            "metric": self.metric,
            "kind": self.kind,
            "tolerance": self.tolerance,
            "source": self.source,
            "movement": self.movement,
            "spread": self.spread,
            "legitimate": dict(self.legitimate),
            "mutants": dict(self.mutants),
        }

    @classmethod
    def from_dict(cls, value: object, where: str) -> Self:
        """Read and validate the JSON form."""
        fields = as_object(value, where)
        require_keys(fields, _EVIDENCE_KEYS, where)
        evidence = cls(
            metric=as_text(fields["metric"], f"{where}: metric"),
            kind=as_choice(fields["kind"], KINDS, f"{where}: kind"),
            tolerance=as_number(fields["tolerance"], f"{where}: tolerance"),
            source=as_choice(fields["source"], SOURCES, f"{where}: source"),
            movement=as_number(fields["movement"], f"{where}: movement"),
            legitimate=_distances(fields["legitimate"], f"{where}: legitimate"),
            mutants={
                mutant_name(name, where): distance
                for name, distance in _distances(fields["mutants"], f"{where}: mutants").items()
            },
        )
        if fields["spread"] != evidence.spread:
            raise ConfigurationError(
                f"{where}: spread is {fields['spread']!r}; expected {evidence.spread!r}, the "
                "largest legitimate distance"
            )
        return evidence


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor of a recording.

    Attributes:
        model: Name of the model.
        architecture: Machine type, for example ``x86_64``.
        instructions: Vector instructions that change the order of sums: avx2, avx512*, amx*.
    """

    model: str
    architecture: str
    instructions: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """JSON form."""
        return {
            "model": self.model,
            "architecture": self.architecture,
            "instructions": list(self.instructions),
        }

    @classmethod
    def from_dict(cls, value: object, where: str) -> Self:
        """Read and validate the JSON form."""
        fields = as_object(value, where)
        require_keys(fields, _PROCESSOR_KEYS, where)
        return cls(
            model=as_text(fields["model"], f"{where}: model"),
            architecture=as_text(fields["architecture"], f"{where}: architecture"),
            instructions=as_texts(fields["instructions"], f"{where}: instructions"),
        )

    @classmethod
    def of_this_machine(cls) -> Self:
        """Read the processor this runs on."""
        try:
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        model, instructions = parse_cpuinfo(text)
        return cls(model or platform.processor() or "unknown", platform.machine(), instructions)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Everything the sidecar of a golden file says.

    Attributes:
        evidence: What shows that the golden file tells right from wrong.
        processor: Where it was recorded.
        versions: Python and packages, by distribution name.
        command: Command or flags of the recorded run.
        date: Day of the recording, ISO 8601.
        values_sha256: Fingerprint of the golden file this belongs to.
    """

    evidence: Evidence
    processor: Processor
    versions: Mapping[str, str]
    command: tuple[str, ...]
    date: str
    values_sha256: str

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigurationError("provenance: the command is empty; expected the run's command")
        object.__setattr__(self, "versions", MappingProxyType(dict(self.versions)))

    def to_json(self) -> str:
        """The text of the sidecar, ending in a newline."""
        fields = {
            "evidence": self.evidence.to_dict(),
            "processor": self.processor.to_dict(),
            "versions": dict(self.versions),
            "command": list(self.command),
            "date": self.date,
            "values_sha256": self.values_sha256,
        }
        return json.dumps(fields, indent=4, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Self:
        """Read and validate the JSON of a sidecar."""
        fields = parse_object(text, where)
        require_keys(fields, _KEYS, where)
        versions = as_object(fields["versions"], f"{where}: versions")
        return cls(
            evidence=Evidence.from_dict(fields["evidence"], f"{where}: evidence"),
            processor=Processor.from_dict(fields["processor"], f"{where}: processor"),
            versions={k: as_text(v, f"{where}: versions: {k}") for k, v in versions.items()},
            command=as_texts(fields["command"], f"{where}: command"),
            date=_iso_date(fields["date"], f"{where}: date"),
            values_sha256=as_text(fields["values_sha256"], f"{where}: values_sha256"),
        )


def sidecar_path(golden: Path) -> Path:
    """Where the provenance of a golden file lies: beside it."""
    return golden.with_name(f"{golden.stem}.provenance.json")


def load_provenance(golden: Path) -> Provenance:
    """Read the sidecar of the golden file ``golden``."""
    path = sidecar_path(golden)
    return Provenance.from_json(read_text(path), str(path))


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...]]:
    """Model name and vector instructions from the text of ``/proc/cpuinfo``."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    wanted = {flag for flag in flags if flag == "avx2" or flag.startswith(("avx512", "amx"))}
    return fields.get("model name", ""), tuple(sorted(wanted))


def mutant_name(name: str, where: str) -> Mutant:
    """Check the name of a mutant; the message lists the legal ones."""
    return as_choice(name, MUTANTS, f"{where}: mutant")


def _distances(value: object, where: str) -> dict[str, float]:
    fields = as_object(value, where)
    return {name: as_number(number, f"{where}: {name}") for name, number in fields.items()}


def _iso_date(value: object, where: str) -> str:
    text = as_text(value, where)
    try:
        datetime.date.fromisoformat(text)
    except ValueError as error:
        raise ConfigurationError(f"{where}: got {text!r}; expected a day as 2026-08-31") from error
    return text
