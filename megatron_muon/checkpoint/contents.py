"""What a checkpoint holds, of either format, described for a reader and for a comparison."""

from __future__ import annotations

import hashlib
import io
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_muon.checkpoint import files, record
from megatron_muon.checkpoint.files import CheckpointFormat, StoredTensor
from megatron_muon.checkpoint.keys import (
    MASTER,
    SHARDED_MASTER,
    STATES,
    STEP,
    canonical,
    state_key,
)
from megatron_muon.errors import CheckpointError

type Name = tuple[str, str]
"""What a tensor is (:func:`family`), and the model's key or, without one, that in the file."""

WEIGHTS = "weights"

SIZES: Mapping[str, str] = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
    "DP": "data_parallel_size",
    "ranks": "world_size",
}
"""Megatron's arguments that say on which ranks a run was."""

_PROGRESS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
"""What of Megatron's arguments is no setting, but how far a run has come."""
_BY_BUCKET = "optimizer.distributed."
"""In the keys of what Megatron's distributed optimizer saves by bucket (``dp_reshardable``)."""
_DESCRIBED = ("args", "optimizer", "content_metadata", "checkpoint_version", _BY_BUCKET)
"""What of the common state says how the run was set up."""
_COMMON = (
    *("args", "content_metadata", "checkpoint_version"),
    *("iteration", "num_floating_point_operations_so_far", "opt_param_scheduler"),
)
"""What the ranks' files of the ``torch`` format have alike."""
_SET_UP = ("param_groups", "ranges", record.RECORD)
"""What of the optimizer in a rank's file says how the run was set up."""
_OPTIMIZER_FILE = "layer_wise_optimizer_"
"""How the files of the ``torch`` format begin from which a rank's optimizer is loaded (0.19.2,
training/checkpointing.py:2565)."""
_ALONE = re.compile(r"(?P<whole>.+)\.at_(?P<place>\d+(?:_\d+)*)")
_LONG = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a checkpoint holds.

    Attributes:
        path: The iteration's folder.
        format: Megatron's ``--ckpt-format``.
        file_nbytes: Size of each file, by its name inside the folder.
        tensors: Weights and optimizer state by key; in the ``torch`` format a key begins with
            the rank's folder and the file.
        iteration: How many steps the run had made.
        consumed_samples: How many training samples.
        no_optimizer: Why it has no optimizer state, ``None`` if it has.
        precision: Of the weights: ``fp32``, ``bf16`` or ``fp16``, and fp8's recipe if it was on.
        sizes: On which ranks it ran, by the names of :data:`SIZES`.
        record: This package's record of the run, ``None`` in a checkpoint of Megatron's own.
        step: Steps of the scalar optimizer.
        scaler: State of the loss scaler.
        state: What else a resumed run continues from, flat, as text; objects by their shards.
        described: What says how the run was set up, and is not needed to continue it; flat.
        read: Reads a whole tensor by its key, onto the CPU.
    """

    path: Path
    format: CheckpointFormat
    file_nbytes: Mapping[str, int]
    tensors: Mapping[str, StoredTensor]
    iteration: int | None
    consumed_samples: int | None
    no_optimizer: str | None
    precision: str
    sizes: Mapping[str, int]
    record: Mapping[str, Any] | None
    step: int | None
    scaler: Mapping[str, str]
    state: Mapping[str, str]
    described: Mapping[str, str]
    read: Callable[[str], torch.Tensor] = field(repr=False, compare=False)


def read_contents(path: Path) -> Contents:
    """Read what a checkpoint holds, but its tensors; whatever is torn is an error.

    Args:
        path: A folder ``iter_XXXXXXX``, or one of ``--save``, of which the latest is taken.

    Raises:
        CheckpointError: There is no checkpoint, or it is torn or of another format.
    """
    if path.is_file():
        raise CheckpointError(
            f"{path}: this is a file, expected a folder iter_XXXXXXX or one of --save. It lies in "
            f"{path.absolute().parent}."
        )
    folder = files.iteration_folder(path)
    if files.checkpoint_format(folder) == "torch_dist":
        return _of_index(folder)
    return _of_rank_folders(folder)


def family(key: str) -> str:
    """Return what a tensor is: ``weights``, or the optimizer's state of that name.

    It is told from the key of any form: by parameter (:func:`~.keys.canonical`), by bucket
    (Megatron's ``dp_reshardable``), or in the ``torch`` format, where a state's name is the last.
    """
    known = canonical(key)
    if known is not None:
        return known[0]
    state = key.rpartition(".")[2]
    if state in STATES and (".gbuf_idx_" in key or "/" in key):
        return MASTER if state == "param" else state
    return WEIGHTS if "optimizer" not in key else "other"


def names_of(keys: Iterable[str]) -> dict[str, Name]:
    """Return what each tensor of a checkpoint is, and the model's key, by its key in the file.

    A scalar's master can be there twice (:data:`~.keys.SHARDED_MASTER`, for Megatron's own loader):
    then the second one is no :data:`~.keys.MASTER` but a kind of its own, ``param``.
    """
    known = {key: canonical(key) or (family(key), key) for key in keys}
    second = {
        key for key, name in known.items() if key.endswith(state_key(SHARDED_MASTER, name[1]))
    }
    masters = {name for key, name in known.items() if key not in second}
    for key in second:
        state, model_key = known[key]
        if {(state, model_key), (state, place_of(model_key)[0])} & masters:
            known[key] = SHARDED_MASTER, model_key
    count = Counter(known.values())
    return {key: name if count[name] == 1 else (name[0], key) for key, name in known.items()}


def place_of(model_key: str) -> tuple[str, tuple[int, ...]]:
    """Return the model's common key and the place on its axes, of what :func:`~.keys.alone` named.

    The place is empty in any other key.
    """
    match = _ALONE.fullmatch(model_key)
    if match is None:
        return model_key, ()
    return match["whole"], tuple(map(int, match["place"].split("_")))


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield every leaf of nested containers by its dotted name, as text.

    Tensors, arrays and long lists become a digest: two are equal where their texts are.
    """
    for leaf_name, leaf in _leaves(value, name):
        yield leaf_name, _text(leaf)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Namespace):
        value = vars(value)
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping) and value:
        items = value.items()
    elif isinstance(value, list | tuple) and value and not _is_long(value):
        items = enumerate(value)
    else:
        yield name, value
        return
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}" if name else f"{key}")


def _is_long(value: Any) -> bool:
    return len(value) > _LONG and not any(
        isinstance(item, Mapping | list | tuple | torch.Tensor) for item in value
    )


def _text(value: Any) -> str:
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.numel() == 1:
            return repr(value.item())
        kind = f"{value.dtype}{list(value.shape)}".removeprefix("torch.")
        return f"{kind} {_digest(value.contiguous().flatten().view(torch.uint8).numpy().data)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)} {_digest(np.ascontiguousarray(value).data)}"
    if isinstance(value, io.BytesIO):
        return f"bytes[{len(value.getbuffer())}] {_digest(value.getbuffer())}"
    if isinstance(value, list | tuple) and len(value) > _LONG:
        return f"list[{len(value)}] {_digest(repr(value).encode())}"
    return repr(value)


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _of_index(folder: Path) -> Contents:
    index = files.read_index(folder)
    files.check_files(index)
    common = files.read_common(index)
    state: dict[str, str] = {}
    for key in index.objects:
        if key.partition("/")[0] == files.COMMON_KEY:
            continue
        value = files.read_object(index, key)
        if _BY_BUCKET in key:
            # Megatron's own keeps the scalar optimizer's settings and steps there.
            common.setdefault(_BY_BUCKET, {})[key] = value
        else:
            state |= {f"{key} {name}": text for name, text in flatten(value)}
    return _described(
        folder,
        "torch_dist",
        index.tensors,
        common,
        state,
        lambda key: files.read_tensor(index, key),
    )


def _of_rank_folders(folder: Path) -> Contents:
    import megatron.core  # noqa: F401  # makes its classes known to torch

    common: dict[str, Any] = {}
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, torch.Tensor] = {}
    state: dict[str, str] = {}
    for rank in files.rank_folders(folder):
        has_optimizer_files = any(name.startswith(_OPTIMIZER_FILE) for name in rank.files)
        if files.RANK_FILE not in rank.files:
            raise CheckpointError(f"{rank.path}: there is no {files.RANK_FILE}.")
        for name in rank.files:
            # Mapped, not read: a tensor is read when it is compared.
            content = files.load_file(rank.path / name, mmap=True)
            if not isinstance(content, dict):
                raise CheckpointError(f"{rank.path / name}: it holds no dict.")
            if name == files.RANK_FILE and has_optimizer_files:
                # Megatron writes one rank's optimizer here too, and never loads it from here.
                content.pop("optimizer", None)
            optimizer = content if record.RECORD in content else content.get("optimizer")
            alike = {key: content[key] for key in _COMMON if key in content}
            common = {**alike, **({"optimizer": optimizer} if optimizer else {}), **common}
            file = f"{rank.path.name}/{name}"
            for key, leaf in _leaves_of_rank(content, file):
                if _is_large(leaf) and "rng_state" not in key:
                    values[key] = leaf
                    nbytes = leaf.numel() * leaf.itemsize
                    tensors[key] = StoredTensor(key, tuple(leaf.shape), leaf.dtype, (file,), nbytes)
                else:
                    state[key] = _text(leaf)
    return _described(folder, "torch", tensors, common, state, values.__getitem__)


def _is_large(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.numel() > 1


def _leaves_of_rank(content: Mapping[Any, Any], file: str) -> Iterator[tuple[str, Any]]:
    """Yield what a rank's file holds of its own, but not how the run was set up."""
    own = {key: value for key, value in content.items() if key not in (*_COMMON, *_SET_UP)}
    for name, leaf in _leaves(own, ""):
        if not set(_SET_UP) & set(name.split(".")):
            yield f"{file}/{name}", leaf


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """What the common state tells of the optimizer."""

    record: Mapping[str, Any] | None
    step: int | None
    scaler: Mapping[str, str]

    @classmethod
    def of(cls, state: Any, by_bucket: Mapping[str, Any]) -> _Optimizer:
        """Find it in either format's form, Megatron's own included.

        Args:
            state: The optimizer's part of the common state.
            by_bucket: The objects that Megatron's distributed optimizer saves by bucket.
        """
        if isinstance(state, list | tuple):
            state = dict(enumerate(state))
        if not isinstance(state, Mapping):
            return cls(None, None, {})
        if record.RECORD in state:  # of a rank's file
            scaler = state.get("grad_scaler") or {}
            return cls(state[record.RECORD], state.get(STEP), _flat(scaler))
        parts = record.parts_of(state)
        records = [p["optimizer"][record.RECORD] for p in parts if record.RECORD in p["optimizer"]]
        parts += [
            {"optimizer": item}
            for saved in by_bucket.values()
            for item in saved
            if isinstance(item, Mapping)
        ]
        scaler = record.scaler_in(parts) or {}
        return cls(next(iter(records), None), record.step_in(parts), _flat(scaler))


def _flat(value: Mapping[str, Any]) -> dict[str, str]:
    return dict(flatten(value)) if value else {}


def _described(
    folder: Path,
    kind: CheckpointFormat,
    tensors: Mapping[str, StoredTensor],
    common: Mapping[str, Any],
    objects: Mapping[str, str],
    read: Callable[[str], torch.Tensor],
) -> Contents:
    args = vars(common["args"]) if isinstance(common.get("args"), Namespace) else {}
    optimizer = _Optimizer.of(common.get("optimizer"), common.get(_BY_BUCKET, {}))
    rest = {key: common[key] for key in common if key not in _DESCRIBED}
    progress = {key: args[key] for key in _PROGRESS if key in args}
    state = {**dict(flatten(rest | progress)), **objects}
    if optimizer.step is not None:
        state["scalar optimizer.step"] = repr(optimizer.step)
    state |= {f"loss scaler.{key}": value for key, value in optimizer.scaler.items()}
    described = {key: common[key] for key in _DESCRIBED if key in common}
    has_optimizer = bool(common.get("optimizer")) or any(family(key) != WEIGHTS for key in tensors)
    return Contents(
        path=folder,
        format=kind,
        file_nbytes={
            f"{path.relative_to(folder)}": path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
        tensors=tensors,
        iteration=common.get("iteration"),
        consumed_samples=args.get("consumed_train_samples"),
        no_optimizer=None if has_optimizer else _why_no_optimizer(args),
        precision=_precision(args),
        sizes={short: args[name] for short, name in SIZES.items() if args.get(name) is not None},
        record=optimizer.record,
        step=optimizer.step,
        scaler=optimizer.scaler,
        state=state,
        # In the ``torch`` format the optimizer's part holds its tensors, which are told above.
        described={
            name: _text(leaf) for name, leaf in _leaves(described, "") if not _is_large(leaf)
        },
        read=read,
    )


def _why_no_optimizer(args: Mapping[str, Any]) -> str:
    return "saved with --no-save-optim" if args.get("no_save_optim") else "no optimizer state"


def _precision(args: Mapping[str, Any]) -> str:
    name = next((name for name in ("bf16", "fp16") if args.get(name)), "fp32" if args else "?")
    return f"{name}, fp8 {args.get('fp8_recipe')}" if args.get("fp8") else name
