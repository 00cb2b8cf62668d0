"""Which optimizer each parameter belongs to: decided once, from names, shapes and the rules.

The first rule that applies decides:

1. a name that matches ``include`` goes to Muon if it is a matrix;
2. a name that matches ``exclude`` goes to the scalar optimizer;
3. the attribute ``use_muon`` of the parameter decides;
4. embeddings and the output layer, marked by Megatron, go to the scalar optimizer;
5. whatever has two logical dimensions goes to Muon, the rest to the scalar optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from megatron_muon.bookkeeping.matrix import LogicalMatrix
from megatron_muon.errors import ConfigurationError

Optimizer = Literal["muon", "scalar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamFacts:
    """What routing knows of a parameter.

    Attributes:
        name: Name in the model, wrapper prefixes removed.
        shape: Logical shape, before any sharding.
        is_embedding_or_output: Megatron's mark on embeddings and the output layer.
        use_muon: The user's attribute on the parameter, ``None`` if not set.
    """

    name: str
    shape: tuple[int, ...]
    is_embedding_or_output: bool = False
    use_muon: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRules:
    """The user's rules: globs over parameter names."""

    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where one parameter goes, and why.

    Attributes:
        facts: What was known of it.
        optimizer: The optimizer it belongs to.
        reason: The rule that decided.
        matrix: Its logical matrix, ``None`` for the scalar optimizer.
        rules: The user's rules in force.
    """

    facts: ParamFacts
    optimizer: Optimizer
    reason: str
    rules: RoutingRules
    matrix: LogicalMatrix | None = None


def decide(facts: ParamFacts, rules: RoutingRules) -> tuple[Optimizer, str]:
    """Return the optimizer of a parameter and the reason.

    Raises:
        ConfigurationError: A rule asks for Muon on something that is not a matrix.
    """
    is_matrix = len(facts.shape) == 2 and 0 not in facts.shape
    for glob in rules.include:
        if fnmatchcase(facts.name, glob):
            return _demand_matrix(facts, is_matrix, f"--muon-include {glob}")
    for glob in rules.exclude:
        if fnmatchcase(facts.name, glob):
            return "scalar", f"--muon-exclude {glob}"
    if facts.use_muon is not None:
        if facts.use_muon:
            return _demand_matrix(facts, is_matrix, "attribute use_muon=True")
        return "scalar", "attribute use_muon=False"
    if facts.is_embedding_or_output:
        return "scalar", "embedding or output layer"
    if is_matrix:
        return "muon", "matrix"
    return "scalar", "no elements" if 0 in facts.shape else f"{len(facts.shape)}-dimensional"


def check_rules_match(names: Iterable[str], rules: RoutingRules) -> None:
    """Raise :class:`ConfigurationError` if a pattern matches no parameter name at all."""
    names = list(names)
    for flag, globs in (("--muon-include", rules.include), ("--muon-exclude", rules.exclude)):
        for glob in globs:
            if not any(fnmatchcase(name, glob) for name in names):
                example = f", for example {names[0]}" if names else ""
                raise ConfigurationError(
                    f"{flag} {glob!r} matches no parameter of this model. Names look like those "
                    f"of model.named_parameters(){example}; quote the pattern in the shell."
                )


def _demand_matrix(facts: ParamFacts, is_matrix: bool, reason: str) -> tuple[Optimizer, str]:
    if not is_matrix:
        raise ConfigurationError(
            f"{reason}: {facts.name} has logical shape {facts.shape}; Muon takes matrices of two "
            "dimensions only."
        )
    return "muon", reason
