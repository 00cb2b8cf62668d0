"""The state of all optimizers of a chain, out to a checkpoint and back in."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.grad_scaler import DynamicGradScaler, MegatronGradScaler

from megatron_muon.bookkeeping.plan import Plan
from megatron_muon.checkpoint import record as records
from megatron_muon.checkpoint.convert import VERSION
from megatron_muon.checkpoint.keys import MASTER, SHARDED_MASTER, STEP
from megatron_muon.collectives.agreement import gather, gather_distinct, raise_together
from megatron_muon.errors import CheckpointError
from megatron_muon.optimizer.config import MuonSettings
from megatron_muon.optimizer.state.held import (
    Held,
    counts_each,
    groups_of,
    held_by,
    set_step,
    step_of,
)
from megatron_muon.optimizer.state.request import STATE, StateRequest, Wanted, want
from megatron_muon.optimizer.state.shards import (
    alone_piece,
    coverage,
    incomplete,
    parts_of,
    sharded,
    shards_of_model,
)
from megatron_muon.optimizer.state.stock import find_in_buckets

_RANGES, _GROUPS, _SCALER = "ranges", "param_groups", "grad_scaler"


_SAME_RANKS = (
    "Files of --ckpt-format torch, which is needed to load them too, are for the same ranks, "
    "layout (--muon-layout) and precision that wrote them: resume with those, or save with "
    "--ckpt-format torch_dist."
)

logger = logging.getLogger(__name__)


class ChainState:
    """What the optimizers of a chain have to keep, by parameter.

    Two forms: ``sharded`` for Megatron's ``torch_dist`` format, which any other number of ranks,
    layout and precision can load, and ``of_rank`` for its ``torch`` format, in which each rank
    keeps what it holds, for the same ranks again.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        names: Mapping[torch.nn.Parameter, str],
        scaler: MegatronGradScaler | None,
        ranks: dist.ProcessGroup,
        is_fp32: bool,
        is_replicated: bool,
    ) -> None:
        """Look after the state of a chain.

        Args:
            leaves: The innermost of Megatron's wrappers, their state made.
            names: Name of each trained parameter of this rank, in the model's order.
            scaler: The loss scaler.
            ranks: All ranks of the model.
            is_fp32: Whether weights are their own masters.
            is_replicated: Whether all data-parallel ranks hold the same.
        """
        self._leaves, self._names, self._scaler, self._ranks = leaves, names, scaler, ranks
        self._is_fp32, self._is_replicated = is_fp32, is_replicated
        self._request: StateRequest | None = None
        self._record: dict[str, Any] = {}
        self._fingerprint = ""

    def describe(self, precision: str, settings: MuonSettings, plan: Plan) -> None:
        """Tell what a checkpoint says of the run.

        Args:
            precision: Of the weights, ``fp32``, ``bf16`` or ``fp16``.
            settings: The resolved settings.
            plan: The plan of this pipeline stage.
        """
        self._fingerprint = plan.fingerprint
        self._record = {
            "precision": precision,
            "momentum_convention": "ema",
            "settings": {**settings.to_dict(), "report": None},
            "num_ranks": self._ranks.size(),
        }

    def sharded(self, model: Any, metadata: MutableMapping[str, Any] | None) -> dict[Any, Any]:
        """Return the state for saving in the ``torch_dist`` format; collective.

        Args:
            model: The model's sharded state dict, of all chunks.
            metadata: Megatron's description of the checkpoint; told what form this is.
        """
        if metadata is not None and "distrib_optim_sharding_type" in metadata:
            metadata["distrib_optim_sharding_type"] = records.FULLY_RESHARDABLE

        def pieces() -> list[tuple[Held, str, list[ShardedTensor]]]:
            shards = shards_of_model(model)
            return [
                (
                    held,
                    state,
                    list(sharded(held, state, tensor, parts, self._is_replicated)),
                )
                for held in self._held()
                for parts in [parts_of(held, shards)]
                for state, tensor in _saved(held)
            ]

        found = raise_together(pieces, self._ranks)
        own = coverage((held, piece) for held, _, of_held in found for piece in of_held)
        apart = incomplete(gather(own, self._ranks))
        tree: dict[str, Any] = {}
        for held, state, of_held in found:
            tree.setdefault(held.name, {})[state] = {
                place: alone_piece(piece, held) if piece.key in apart else piece
                for place, piece in enumerate(of_held)
            }
        # A rank without state has no empty place for it, so that the rest is alike on all ranks.
        return self._common() | ({STATE: tree} if tree else {})

    def request(self, model: Any) -> StateRequest:
        """Return what to load from the ``torch_dist`` format; collective.

        Args:
            model: The model's sharded state dict, of all chunks.
        """
        wanted: list[Wanted] = []
        of_weights: list[Wanted] = []

        def ask() -> None:
            shards = shards_of_model(model)
            for held in self._held():
                parts = parts_of(held, shards)
                of_held = partial(want, held, parts=parts, is_replicated=self._is_replicated)
                wanted.extend(of_held(state, value) for state, value in held.tensors.items())
                if self._is_fp32 and not held.has_own_master:
                    of_weights.append(of_held(MASTER, held.master))

        raise_together(ask, self._ranks)
        self._request = StateRequest(
            wanted,
            of_weights,
            partial(find_in_buckets, self._leaves, self._names, self._ranks.size()),
        )
        return self._request

    def of_rank(self) -> dict[str, Any]:
        """Return what this rank holds; tensors are the live ones. Not collective."""
        muon, scalar = self._own_groups()
        record = {**self._record, "plan": self._fingerprint, "version": VERSION}
        held = self._held()
        return {
            records.RECORD: record,
            _GROUPS: [*muon, *scalar],
            _SCALER: None if self._scaler is None else dict(self._scaler.state_dict()),
            STEP: step_of(self._leaves),
            _RANGES: {item.name: item.range for item in held},
            STATE: {item.name: dict(item.tensors) for item in held},
        }

    def load(self, state_dict: Mapping[Any, Any]) -> None:
        """Load either form; collective.

        Raises:
            CheckpointError: Something is missing or of another model; the same on every rank.
        """
        load = self._load_of_rank if _RANGES in state_dict else self._load_sharded
        raise_together(lambda: load(state_dict), self._ranks)

    def save_file(self, path: Path) -> None:
        """Write what this rank holds to a file, whole or not at all; collective.

        Raises:
            CheckpointError: It cannot be written, on any rank.
        """
        state = self.of_rank()
        raise_together(lambda: _write(state, path), self._ranks)

    def load_file(self, path: Path) -> None:
        """Load what :meth:`save_file` wrote; collective.

        Raises:
            CheckpointError: It is not there, not whole or of other ranks; on every rank.
        """
        self.load(raise_together(lambda: _read(path), self._ranks))

    def _held(self) -> list[Held]:
        return held_by(self._leaves, self._names, self._is_fp32)

    def _groups(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the parameter groups of all ranks, Muon's and the others; collective."""
        own = self._own_groups()
        every = gather_distinct(own, own, self._ranks)
        return records.union(muon for muon, _ in every), records.union(s for _, s in every)

    def _own_groups(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        muon, scalar = (groups_of(self._leaves, is_muon) for is_muon in (True, False))
        return muon, scalar

    def _common(self) -> dict[Any, Any]:
        muon, scalar = self._groups()
        own = raise_together(
            lambda: (step_of(self._leaves), counts_each(self._leaves)), self._ranks
        )
        counts = gather_distinct(own, own, self._ranks)
        plans = gather_distinct(*2 * (self._fingerprint,), self._ranks)
        return records.common(
            muon,
            scalar,
            next((count for count, _ in counts if count is not None), None),
            None if self._scaler is None else self._scaler.state_dict(),
            {**self._record, "plan": sorted(plans)},
            counts_each=any(each for _, each in counts),
            is_fp32=self._is_fp32,
        )

    def _load_sharded(self, state_dict: Mapping[Any, Any]) -> None:
        if self._request is None:
            raise CheckpointError(
                "The optimizer was not asked what to load: call sharded_state_dict(..., "
                "is_loading=True), and load that."
            )
        parts = records.parts_of(state_dict)
        if not parts:
            raise CheckpointError(
                "The checkpoint has no optimizer. Take its weights alone with --no-load-optim."
            )
        record = records.record_of(parts)
        self._request.finish(state_dict)
        if self._ranks.rank() == 0:
            for told in self._request.padded:
                logger.warning("%s", told)
        step = records.step_in(parts)
        self._take(self._request.step if step is None else step, records.scaler_in(parts))
        self._request = None
        saved = [group for part in parts for group in part["optimizer"].get("param_groups", ())]
        self._tell_changes(record, saved)

    def _load_of_rank(self, state_dict: Mapping[Any, Any]) -> None:
        record = records.checked(dict(state_dict[records.RECORD]))
        precisions = record.get("precision"), self._record.get("precision")
        if precisions[0] != precisions[1]:
            raise CheckpointError(
                f"The checkpoint is of a run in {precisions[0]}, this one is in {precisions[1]}. "
                f"{_SAME_RANKS}"
            )
        held = self._held()
        owners = ""
        if record.get("plan") != self._fingerprint:
            owners = (
                f"Matrices have other owners there: its plan is {record.get('plan')}, by "
                f"megatron-muon {record.get('version')}, this run's is {self._fingerprint}, by "
                f"{VERSION}. Other sizes, another --muon-layout, other --muon-split-* flags, "
                "--muon-no-split-qkv and other versions do that. "
            )
        for item in held:
            _check_alike(item, state_dict, owners)
        for item in held:
            for state, tensor in item.tensors.items():
                tensor.copy_(state_dict[STATE][item.name][state])
        self._take(state_dict[STEP], state_dict[_SCALER])
        self._tell_changes(record, state_dict[_GROUPS])

    def _take(self, step: int | None, scaler: dict[str, Any] | None) -> None:
        """Take over what is no tensor of a parameter."""
        if step is None and step_of(self._leaves) is not None:
            raise CheckpointError(
                "The checkpoint does not say how many steps the scalar optimizer has made. Take "
                "its weights alone with --no-load-optim."
            )
        if step is not None:
            set_step(self._leaves, step)
        if self._scaler is not None and scaler:
            self._scaler.load_state_dict(scaler)
        elif isinstance(self._scaler, DynamicGradScaler) and self._ranks.rank() == 0:
            logger.warning(
                "The checkpoint has no loss scale: it starts at --initial-loss-scale, %g.",
                float(self._scaler.scale),
            )

    def _tell_changes(
        self,
        record: Mapping[str, Any] | None,
        saved: Sequence[Mapping[str, Any]],
    ) -> None:
        if self._ranks.rank() == 0:
            ours = [group for leaf in self._leaves for group in leaf.optimizer.param_groups]
            records.tell_changes(saved, ours)
            if record is not None:
                records.tell_other_scalar_optimizer(record, self._record)


def _saved(held: Held) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what is saved of a parameter.

    Stock Megatron reads the master of a scalar parameter under its distributed optimizer's name
    where it has a parameter layout, and under that of all others without one, as its
    pretrain_gpt.py has none. So the file has both.
    """
    yield from held.tensors.items()
    if SHARDED_MASTER in held.tensors:
        yield MASTER, held.tensors[SHARDED_MASTER]


def _check_alike(item: Held, state_dict: Mapping[str, Any], owners: str) -> None:
    """Check that a rank's own state has a parameter in the form that this rank holds."""
    state, ranges = state_dict[STATE], state_dict[_RANGES]
    place = ranges.get(item.name)
    same_place = item.name in ranges and (None if place is None else tuple(place)) == item.range
    if not same_place or any(
        key not in state[item.name] or state[item.name][key].shape != tensor.shape
        for key, tensor in item.tensors.items()
    ):
        held = "all" if item.range is None else f"elements {item.range[0]} to {item.range[1]}"
        raise CheckpointError(
            f"This rank holds {held} of {item.name}, with {', '.join(item.tensors)}; its file has "
            f"{_tell(item.name, state, ranges)}. {owners}{_SAME_RANKS}"
        )


def _tell(name: str, state: Mapping[str, Any], ranges: Mapping[str, Any]) -> str:
    if name not in ranges:
        return "nothing of it"
    place = ranges[name]
    held = "all" if place is None else f"elements {place[0]} to {place[1]}"
    return f"{held}, with {', '.join(state[name])}"


def _write(state: Mapping[str, Any], path: Path) -> None:
    """Write a file whose name appears when it is whole."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} could not be written: {error}. The checkpoints before it are whole."
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: the checkpoint is not whole, or other ranks wrote it."
        ) from None
    except Exception as error:
        raise CheckpointError(f"{path} is torn or no file of this optimizer: {error}") from error
    if not isinstance(state, dict) or not {records.RECORD, STATE, _RANGES} <= state.keys():
        raise CheckpointError(
            f"{path} is no file of this optimizer: it was written by Megatron's own, whose files "
            "of --ckpt-format torch cannot be loaded. Save with --ckpt-format torch_dist there."
        )
    return dict(state)
