"""One rank's part of the tests of rates, sizes and dtypes: the law harness's model and gradients.

What the harness's ``Case`` has no word for is set on the config it makes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from megatron_muon.optimizer import muon
from megatron_muon.orthogonalize import blocks, update
from megatron_muon.testing.law import build, job
from megatron_muon.testing.law.backward import inject
from megatron_muon.testing.law.case import Case, Outcome
from megatron_muon.testing.law.mutants import MUTANTS, SCALE_MUTANTS

Fields = tuple[tuple[str, Any], ...]
"""Fields and their values, hashable."""


@dataclass(frozen=True, kw_only=True)
class Changed:
    """A case with other fields of the optimizer's config.

    Attributes:
        case: The case; its mutant is one of :data:`BREAKS`.
        config: The fields.
    """

    case: Case
    config: Fields = ()


@dataclass(frozen=True, kw_only=True)
class Recipe(Changed):
    """Learning rates and decays of a run.

    Attributes:
        warmup: Steps of linear warm-up from 0.
        decay: Steps after which the rate is the least one; linear.
        min_lr: Least rate.
        start_wd: Weight decay at the start; it grows linearly to that of the case.
        wd_steps: Steps in which it does.
        overrides: Fields of the parameters whose name matches, by glob.
        resume_after: Step after which optimizer and scheduler are built anew and loaded.
    """

    warmup: int = 2
    decay: int = 6
    min_lr: float = 0.0
    start_wd: float = 0.0
    wd_steps: int = 4
    overrides: tuple[tuple[str, Fields], ...] = ()
    resume_after: int | None = None


@dataclass
class Trained:
    """What a rank saw of a recipe.

    Attributes:
        outcome: As the law harness has it.
        rates: Learning rate and decay of each parameter that the rank steps, step by step.
        console: What Megatron shows as the learning rate.
    """

    outcome: Outcome
    rates: list[dict[str, tuple[float, float]]]
    console: list[float | None]


def run_changed(changed: Sequence[Changed]) -> list[Outcome]:
    """Run cases one after the other on this rank."""
    _install()
    outcomes = {}
    for grid in dict.fromkeys(item.case.grid for item in changed):
        with build.parallel_state(*grid):
            for item in dict.fromkeys(item for item in changed if item.case.grid == grid):
                with _config_of(item), BREAKS[item.case.mutant]():
                    outcomes[item] = job.train(item.case)
    return [outcomes[item] for item in changed]


def run_recipes(recipes: Sequence[Recipe]) -> list[Trained]:
    """Train by recipes one after the other on this rank."""
    _install()
    trained = {}
    for grid in dict.fromkeys(recipe.case.grid for recipe in recipes):
        with build.parallel_state(*grid):
            for recipe in (recipe for recipe in recipes if recipe.case.grid == grid):
                trained[recipe] = _train(recipe)
    return [trained[recipe] for recipe in recipes]


def _momentum_rounded_first() -> Any:
    """What is orthogonalized is rounded to bf16, as if the momentum were blended in it."""

    def advance(*arguments: Any) -> torch.Tensor:
        ahead = update.advance_momentum(*arguments)
        return ahead.copy_(ahead.bfloat16())

    return mock.patch.object(muon, "advance_momentum", advance)


def _floor_under_norms() -> Any:
    """Normalisation with 1e-7 as the least norm, as ``torch.nn.functional.normalize`` is used."""

    def normalize(x: torch.Tensor) -> None:
        x.div_(torch.linalg.matrix_norm(x, keepdim=True).clamp_min_(1e-7))

    return mock.patch.object(blocks, "normalize", normalize)


BREAKS = {
    **MUTANTS,
    **SCALE_MUTANTS,
    "momentum rounded first": _momentum_rounded_first,
    "floor under norms": _floor_under_norms,
}
"""What breaks a step, by the name of the fault."""


def reloaded(changed: Sequence[Changed]) -> list[list[str]]:
    """Return what is wrong with the momentum of each case, kept and loaded, on this rank."""
    _install()
    problems = []
    for item in changed:
        with build.parallel_state(*item.case.grid), _config_of(item):
            problems.append(list(_reloading_problems(item.case, dict(item.config))))
    return problems


def _reloading_problems(case: Case, config: dict[str, Any]) -> Iterator[str]:
    chunks = build.wrap(case, build.build_model(case))
    optimizer = build.build_optimizer(case, chunks)
    inject(case, chunks, 0)
    optimizer.step()
    fresh = build.build_optimizer(case, chunks)
    fresh.load_state_dict(optimizer.state_dict())
    dtype = torch.bfloat16 if config.get("muon_momentum_dtype") == "bf16" else torch.float32
    found = [next(build.find_muons(one)).state.values() for one in (optimizer, fresh)]
    assert found[0]
    for old, new in zip(*found, strict=True):
        kept, loaded = old["momentum_buffer"], new["momentum_buffer"]
        if not (kept.dtype == loaded.dtype == dtype):
            yield f"{kept.dtype} was loaded as {loaded.dtype}"
        if not kept.any() or not torch.equal(kept, loaded):
            yield f"another momentum was loaded, of shape {tuple(kept.shape)}"


def _install() -> None:
    from megatron_muon.integration.install import install

    install(device="cpu")


def _config_of(changed: Changed) -> Any:
    make = build.optimizer_config
    return mock.patch.object(
        build,
        "optimizer_config",
        lambda case: dataclasses.replace(make(case), **dict(changed.config)),
    )


def _build(recipe: Recipe, chunks: Sequence[Any]) -> tuple[Any, Any]:
    """Return optimizer and scheduler, as Megatron's set-up builds them."""
    from megatron.core.optimizer import (
        ParamKey,
        get_megatron_optimizer,
        get_standard_config_overrides,
    )
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    with _config_of(recipe):
        config = build.optimizer_config(recipe.case)
    config.min_lr = recipe.min_lr
    overrides = get_standard_config_overrides(config)
    for glob, fields in recipe.overrides:
        overrides[ParamKey(name=glob)] = dict(fields)
    optimizer = get_megatron_optimizer(config, list(chunks), config_overrides=overrides)
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, config.lr, recipe.min_lr, recipe.warmup, recipe.decay, "linear",
        recipe.start_wd, config.weight_decay, recipe.wd_steps, "linear",
    )  # fmt: skip
    return optimizer, scheduler


def _train(recipe: Recipe) -> Trained:
    from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

    case = recipe.case
    chunks = build.wrap(case, build.build_model(case))
    optimizer, scheduler = _build(recipe, chunks)
    run = job._Run(case, optimizer)
    rates, console = [], []
    for step in range(case.steps):
        if step == recipe.resume_after:
            optimizer, scheduler = _resumed(recipe, chunks, optimizer, scheduler)
            run = job._Run(case, optimizer)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        inject(case, chunks, step)
        rates.append(_rates(optimizer))
        console.append(get_canonical_lr_for_logging(optimizer.param_groups))
        run.step(chunks)
        scheduler.step(increment=1)
    return Trained(run.outcome(chunks, ""), rates, console)


def _rates(optimizer: Any) -> dict[str, tuple[float, float]]:
    names = {member.master: member.name for member in optimizer.members}
    return {
        names[param]: (float(group["lr"]), float(group["weight_decay"]))
        for group in optimizer.param_groups
        for param in group["params"]
    }


def _resumed(
    recipe: Recipe, chunks: Sequence[Any], optimizer: Any, scheduler: Any
) -> tuple[Any, Any]:
    """Return what is built anew and loads the state of the old ones."""
    state, schedule = optimizer.state_dict(), scheduler.state_dict()
    fresh, later = _build(recipe, chunks)
    fresh.load_state_dict(state)
    later.load_state_dict(schedule)
    return fresh, later


def updates_of_shapes(
    shapes: Sequence[tuple[int, int]], configs: Sequence[Fields]
) -> list[list[torch.Tensor]]:
    """Return minus the first update of matrices of these shapes, for each config.

    Their weights start at zero and their gradients are random; the learning rate is 1.
    """
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.transformer.module import MegatronModule

    _install()
    case = Case(momentum=0.0, weight_decay=0.0, lr=1.0)
    updates = []
    with build.parallel_state(*case.grid):
        for fields in configs:
            module = MegatronModule(build.transformer_config(case))
            for i, shape in enumerate(shapes):
                module.register_parameter(f"matrix{i}", torch.nn.Parameter(torch.zeros(shape)))
            chunks = build.wrap(case, [module])
            with _config_of(Changed(case=case, config=fields)):
                optimizer = get_megatron_optimizer(build.optimizer_config(case), chunks)
            params = list(module.parameters())
            for i, param in enumerate(params):
                generator = torch.Generator().manual_seed(i)
                param.main_grad.copy_(torch.randn(param.shape, generator=generator))
            assert optimizer.step()[0]
            updates.append([param.detach().clone() for param in params])
    return updates
