"""Which optimizer each parameter belongs to: decided once, from names, shapes and the rules.

The first rule that applies decides:

1. a name that matches ``include`` goes to Muon if it is a matrix;
2. a name that matches ``exclude`` goes to the scalar optimizer;
3. the attribute ``use_muon`` of the parameter decides;
4. embeddings and the output layer, by Megatron's mark or by name, and routers, gates and biases of
   experts (:data:`SCALAR_BY_NAME`) go to the scalar optimizer;
5. whatever has two logical dimensions goes to Muon, a stack of experts too, which is a matrix for
   each; the rest to the scalar optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from megatron_muon.bookkeeping.matrix import HEAD_SUFFIX, LogicalMatrix
from megatron_muon.errors import ConfigurationError

Optimizer = Literal["muon", "scalar"]

SCALAR_BY_NAME: tuple[tuple[str, str], ...] = (
    ("*position_embeddings.weight", "position embedding"),
    ("*.position_embeddings", "position embedding"),
    ("*tokentype_embeddings.weight", "token type embedding"),
    ("*.router.weight", "router of experts"),
    ("*.router.bias", "router of experts"),
    ("*.shared_experts.gate_weight", "gate of shared experts"),
    ("*experts.*bias", "bias of experts"),
)
"""Globs over names of what may have two dimensions and is no hidden layer's matrix, each with the
reason: rows that are looked up one by one, scores of experts, stacks of vectors. Megatron 0.19.2
marks none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamFacts:
    """What routing knows of a parameter.

    Attributes:
        name: Name in the model, wrapper prefixes removed.
        shape: Logical shape, before any sharding.
        is_embedding_or_output: Megatron's mark on embeddings and the output layer.
        is_expert_stack: Whether a shape ``(E, m, n)`` is ``E`` matrices, one an expert.
        use_muon: The user's attribute on the parameter, ``None`` if not set.
    """

    name: str
    shape: tuple[int, ...]
    is_embedding_or_output: bool = False
    is_expert_stack: bool = False
    use_muon: bool | None = None

    @property
    def is_matrix(self) -> bool:
        """Whether Muon can step it: a matrix or a stack of matrices, with elements."""
        num_dims = len(self.shape)
        return 0 not in self.shape and (num_dims == 2 or (num_dims == 3 and self.is_expert_stack))


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRules:
    """Which fused weights are orthogonalized part by part.

    Attributes:
        qkv: Split q, k, v and an output gate of a fused projection.
        gated_fc1: Split gate and up of a gated unit's first layer.
        heads: Split q, k, v and gate into heads too.
    """

    qkv: bool = True
    gated_fc1: bool = False
    heads: bool = False


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
    for glob in rules.include:
        if fnmatchcase(facts.name, glob):
            return _demand_matrix(facts, f"--muon-include {glob}")
    for glob in rules.exclude:
        if fnmatchcase(facts.name, glob):
            return "scalar", f"--muon-exclude {glob}"
    if facts.use_muon is not None:
        if facts.use_muon:
            return _demand_matrix(facts, "attribute use_muon=True")
        return "scalar", "attribute use_muon=False"
    if facts.is_embedding_or_output:
        return "scalar", "embedding or output layer"
    for glob, reason in SCALAR_BY_NAME:
        if fnmatchcase(facts.name, glob):
            return "scalar", reason
    if facts.is_matrix:
        return "muon", f"{facts.shape[0]} experts" if facts.is_expert_stack else "matrix"
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


def check_splits_apply(blocks: Iterable[str], splits: SplitRules) -> None:
    """Check that each split that was asked for splits something.

    Args:
        blocks: Names of the blocks of every matrix, over all pipeline stages.
        splits: The splits.

    Raises:
        ConfigurationError: No matrix of the model has the parts that a flag names.
    """
    names = set(blocks)
    if splits.gated_fc1 and "up" not in names:
        raise ConfigurationError(
            "--muon-split-gated-fc1 has no effect: no matrix that Muon steps is the first layer of "
            "a gated unit. Give --swiglu, or drop the flag."
        )
    if splits.heads and not any(name.endswith(HEAD_SUFFIX) for name in names):
        raise ConfigurationError(
            "--muon-split-heads has no effect: no matrix that Muon steps is a projection whose "
            "heads are known (linear_qkv). Drop the flag."
        )


def _demand_matrix(facts: ParamFacts, reason: str) -> tuple[Optimizer, str]:
    if not facts.is_matrix:
        raise ConfigurationError(
            f"{reason}: {facts.name} has logical shape {facts.shape}; Muon takes matrices of two "
            "dimensions only, and stacks of experts."
        )
    return "muon", reason
