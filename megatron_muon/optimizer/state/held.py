"""What a rank holds of the optimizer's state, by parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_muon.checkpoint.keys import EXP_AVG_SQ, MASTER, NEVER, SHARDED_MASTER, STEP
from megatron_muon.checkpoint.record import identity
from megatron_muon.errors import CheckpointError
from megatron_muon.optimizer.masters import is_quantized, masters_of
from megatron_muon.optimizer.muon import OwnedMuon


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What this rank holds of one parameter.

    Attributes:
        name: The parameter's name.
        param: The model's parameter.
        tensors: The live state by its name in :mod:`~megatron_muon.checkpoint.keys`.
        range: Which elements of the flattened parameter these are, ``None`` for a whole one.
        has_own_master: Whether the master has memory of its own, and is not the weight itself.
        master: The master, which an fp32 run does not save.
    """

    name: str
    param: torch.nn.Parameter
    tensors: Mapping[str, torch.Tensor]
    range: tuple[int, int] | None
    has_own_master: bool
    master: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter on this rank."""
        return tuple(self.param.shape)


def held_by(
    leaves: Iterable[Any], names: Mapping[torch.nn.Parameter, str], is_fp32: bool
) -> list[Held]:
    """Return what this rank holds, in the model's order.

    Args:
        leaves: The innermost of Megatron's wrappers.
        names: Name of each trained parameter, in the model's order.
        is_fp32: Whether the run's weights are their own masters.
    """
    found = {}
    for leaf in leaves:
        is_sharded = isinstance(leaf, DistributedOptimizer)
        is_scalar = not isinstance(leaf.optimizer, OwnedMuon)
        for param, master in masters_of(leaf).items():
            # A quantized weight has no memory of its values.
            is_own = is_quantized(param) or _memory(master) != _memory(param)
            state = leaf.optimizer.state[master]
            tensors = {key: value for key, value in state.items() if _is_saved(key, value)}
            if is_own or (is_sharded and is_scalar and not is_fp32):
                tensors[SHARDED_MASTER if is_sharded and is_scalar else MASTER] = master
            place = leaf._get_model_param_range_map(param)["param"] if is_sharded else None
            found[param] = Held(
                name=names[param],
                param=param,
                tensors={key: value.detach() for key, value in tensors.items()},
                range=None if place is None else (place.start, place.end),
                has_own_master=is_own,
                master=master.detach(),
            )
    return _named_apart(found[param] for param in names if param in found)


def _named_apart(held: Iterable[Held]) -> list[Held]:
    """Give each its own name: copies of a shared embedding on one rank have the same."""
    seen: Counter[str] = Counter()
    apart = []
    for item in held:
        seen[item.name] += 1
        copy = seen[item.name]
        apart.append(item if copy == 1 else replace(item, name=f"{item.name} (copy {copy})"))
    return apart


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_saved(key: str, value: Any) -> bool:
    return key not in NEVER and isinstance(value, torch.Tensor)


@torch.no_grad()
def init_state(leaf: Any) -> None:
    """Make all state of a scalar optimizer, as its first step would.

    So what a checkpoint has depends on no gradient that was seen.
    """
    optimizer = leaf.optimizer
    if isinstance(optimizer, OwnedMuon):
        return
    if leaf.init_state_fn is not None:
        leaf.init_state_fn(optimizer, leaf.config)
    if not isinstance(optimizer, torch.optim.Adam):
        return
    for group in optimizer.param_groups:
        on_device = group["capturable"] or group["fused"]
        for param in group["params"]:
            # Megatron's initializer (0.19.2, optimizer/__init__.py:588) leaves it out, and torch
            # makes it with a state that is empty only.
            optimizer.state[param].setdefault(
                STEP, torch.zeros((), device=param.device if on_device else "cpu")
            )


def step_of(leaves: Iterable[Any]) -> int | None:
    """Return the steps that the scalar optimizer has made, ``None`` if nothing counts them.

    Raises:
        CheckpointError: Parameters have made different numbers of steps.
    """
    steps = {int(step) for leaf in leaves for step in _steps(leaf)}
    if len(steps) > 1:
        raise CheckpointError(
            f"Parameters of the scalar optimizer have made {sorted(steps)} steps: a checkpoint "
            "has one count for all of them."
        )
    return next(iter(steps), None)


def counts_each(leaves: Iterable[Any]) -> bool:
    """Whether a scalar optimizer counts the steps of each parameter, and not of each group."""
    return any(STEP in s for leaf in leaves for s in leaf.optimizer.state.values())


def _steps(leaf: Any) -> Iterable[Any]:
    if isinstance(leaf.optimizer, OwnedMuon):
        return
    for group in leaf.optimizer.param_groups:
        # Transformer Engine's and Apex's AdamW count in the group, torch's with each parameter.
        if STEP in group and group["params"]:
            yield group[STEP]
        for param in group["params"]:
            if STEP in leaf.optimizer.state[param]:
                yield leaf.optimizer.state[param][STEP]


def set_step(leaves: Iterable[Any], step: int) -> None:
    """Set the count of steps of the scalar optimizer."""
    for optimizer in (leaf.optimizer for leaf in leaves):
        if isinstance(optimizer, OwnedMuon):
            continue
        for group in optimizer.param_groups:
            counting = [s for p in group["params"] if STEP in (s := optimizer.state[p])]
            for state in counting:
                # A tensor of its own each, since each is counted up by itself.
                state[STEP] = torch.full_like(state[STEP], step)
            # Transformer Engine's and Apex's AdamW count in groups with parameters; Lion does not
            # count at all.
            if not counting and any(EXP_AVG_SQ in optimizer.state[p] for p in group["params"]):
                group[STEP] = step


def groups_of(leaves: Iterable[Any], is_muon: bool) -> list[dict[str, Any]]:
    """Return the parameter groups of Muon, or of the scalar optimizers, without parameters."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for leaf in leaves:
        if isinstance(leaf.optimizer, OwnedMuon) == is_muon:
            for group in leaf.optimizer.param_groups:
                plain = {key: value for key, value in group.items() if key != "params"}
                found.setdefault(identity(plain), plain)
    return list(found.values())
