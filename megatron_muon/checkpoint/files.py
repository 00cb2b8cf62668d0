"""What lies in a checkpoint folder, found without running anything that is in it.

A folder of ``--ckpt-format torch_dist`` has an index, ``.metadata``, which is a pickle. Megatron
and torch read it with ``pickle.load``, so a crafted file runs its author's code. Here only the
classes of an index may be named in it, and every object is read with ``weights_only``. Nothing
here needs a process group.

Source: torch/distributed/checkpoint/{metadata,filesystem}.py of torch 2.13; what Megatron adds:
core/dist_checkpointing/{serialization,strategies/torch}.py of megatron-core 0.19.2.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_muon.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
INDEX = ".metadata"
CONFIG = "metadata.json"
COMMON_KEY = "common_state"
COMMON_FILE = "common.pt"
RANK_FILE = "model_optim_rng.pt"

CheckpointFormat = Literal["torch_dist", "torch"]

_MAX_NAMED = 5
_ITERATION = re.compile(r"iter_\d{7,}|release")
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_CLASSES: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        "Metadata MetadataIndex StorageMeta TensorStorageMetadata BytesStorageMetadata "
        "ChunkStorageMetadata TensorProperties _MEM_FORMAT_ENCODING".split()
    ),
    "torch.distributed.checkpoint.filesystem": frozenset(("_StorageInfo", "_StoragePrefix")),
    "torch.distributed.checkpoint.planner": frozenset(
        ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    ),
    # Of indexes written by older versions.
    "torch.distributed._shard.sharded_tensor.metadata": frozenset(
        ("TensorProperties", "MEM_FORMAT_ENCODING")
    ),
    _MCORE: frozenset(("MCoreMetadata", "MCoreSavePlan")),
    "torch": frozenset(("Size",)),
    "torch.serialization": frozenset(("_get_layout",)),
    "collections": frozenset(("OrderedDict",)),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor of a checkpoint.

    Attributes:
        key: Its name in the file.
        shape: Of the whole tensor, whatever pieces it is saved in.
        dtype: Of its elements in the file.
        files: The files its pieces lie in, by name and in order.
        nbytes: Bytes of its elements.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    files: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """What a ``torch_dist`` folder says it holds; :func:`check_files` compares it with the files.

    Attributes:
        path: The iteration's folder.
        tensors: Every tensor by its key.
        objects: The files of every object by its key, such as ``rng_state/shard_0.0_1.1``.
        metadata: torch's own index, of which the others are a view.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, tuple[str, ...]]
    metadata: Metadata = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class RankFolder:
    """What one model-parallel rank wrote with ``--ckpt-format torch``.

    Attributes:
        path: ``iter_XXXXXXX/mp_rank_XX[_YYY][_ZZZ]``.
        tensor_rank: Its tensor-parallel rank.
        files: Names of its files, ``model_optim_rng.pt`` the first.
    """

    path: Path
    tensor_rank: int
    files: tuple[str, ...]


def iteration_folder(path: Path) -> Path:
    """Return the folder of an iteration: ``path`` if it is one, else the one its tracker names.

    Args:
        path: What ``--load`` takes, or a folder ``iter_XXXXXXX`` or ``release`` itself.

    Raises:
        CheckpointError: There is no folder; or there is no tracker file, or one that names no
            iteration, or one that names a folder which is not there.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder.")
    is_iteration = (path / INDEX).exists() or (path / CONFIG).exists() or rank_folders(path)
    if is_iteration or _ITERATION.fullmatch(path.name):
        return path
    name = tracked(path)
    if name is None:
        raise CheckpointError(
            f"{path}: there is no {TRACKER}, which a save writes last. {_what_else(path)}"
        )
    if not (path / name).is_dir():
        raise CheckpointError(
            f"{path / TRACKER}: it names {name}, which is not there. {_what_else(path)}"
        )
    return path / name


def tracked(path: Path) -> str | None:
    """Return the name of the folder that a tracker file names, ``None`` if there is no such file.

    Args:
        path: What ``--load`` takes.

    Raises:
        CheckpointError: The tracker file names no iteration.
    """
    tracker = path / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(errors="replace").strip()
    if text == "release":
        return text
    if text.isascii() and text.isdigit():
        return f"iter_{int(text):07d}"
    raise CheckpointError(
        f"{tracker}: it holds {text[:40]!r}, expected an iteration's number or 'release'. "
        f"{_what_else(path)}"
    )


def iterations(path: Path) -> list[str]:
    """Return the names of the iterations' folders in ``path``, a ``--load`` folder, in order."""
    if not path.is_dir():
        return []
    return sorted(p.name for p in path.iterdir() if p.is_dir() and _ITERATION.fullmatch(p.name))


def holds_checkpoint(path: Path) -> bool:
    """Whether ``path``, a ``--load`` folder, has a tracker file or a whole iteration's folder.

    A first save that was cut off leaves neither.
    """
    return (path / TRACKER).exists() or any(is_whole(path / name) for name in iterations(path))


def is_whole(folder: Path) -> bool:
    """Whether an iteration's folder has what a save writes last; the bytes before are not read.

    Of ``torch_dist`` these are the index and ``metadata.json``, of ``torch`` the ends of the files.
    """
    ranks = rank_folders(folder)
    if ranks:
        return all(has_end(rank.path / RANK_FILE) for rank in ranks)
    return (folder / INDEX).is_file() and (folder / CONFIG).is_file()


def has_end(file: Path) -> bool:
    """Whether a file of ``torch.save`` is there to its end: what a zip file ends with."""
    return zipfile.is_zipfile(file)


def checkpoint_format(path: Path) -> CheckpointFormat:
    """Return the format of an iteration's folder.

    Raises:
        CheckpointError: It is of another format, or nothing shows of which.
    """
    if (path / CONFIG).exists() or (path / INDEX).exists():
        return "torch_dist"
    if rank_folders(path):
        return "torch"
    raise CheckpointError(
        f"{path}: this is no checkpoint of --ckpt-format torch_dist or torch: there is no "
        f"{INDEX}, no {CONFIG} and no folder mp_rank_XX. It holds "
        f"{_some(sorted(p.name for p in path.iterdir())) or 'nothing'}."
    )


def rank_folders(path: Path) -> tuple[RankFolder, ...]:
    """Return the folders of the ranks of a ``--ckpt-format torch`` checkpoint, in order.

    Source: training/checkpointing.py:195-262 of megatron-core 0.19.2.
    """
    folders = []
    for folder in sorted(path.iterdir()):
        match = _RANK_FOLDER.fullmatch(folder.name)
        if match and folder.is_dir():
            names = sorted((p.name for p in folder.iterdir()), key=lambda n: (n != RANK_FILE, n))
            folders.append(RankFolder(folder, int(match[1]), tuple(names)))
    return tuple(folders)


def read_index(path: Path) -> CheckpointIndex:
    """Read the index of an iteration's folder of ``--ckpt-format torch_dist``.

    No process group is needed and no code of the file is run.

    Raises:
        CheckpointError: There is no index, it is torn, or it names what no index needs.
    """
    metadata = _read_metadata(path)
    files = _files_by_key(metadata)
    tensors, objects = {}, {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            shape, dtype = tuple(entry.size), entry.properties.dtype
            nbytes = math.prod(shape) * dtype.itemsize
            tensors[key] = StoredTensor(key, shape, dtype, files.get(key, ()), nbytes)
        else:
            objects[key] = files.get(key, ())
    return CheckpointIndex(path, tensors, objects, metadata)


def check_files(index: CheckpointIndex) -> None:
    """Hold the files of a folder to its index: all there, long enough, every tensor covered.

    The bytes themselves are not read.

    Raises:
        CheckpointError: It names the first files, or keys, at fault, and what lies in them.
    """
    _check_finished(index)
    _check_pieces(index)
    _check_extents(index)


def read_tensor(index: CheckpointIndex, key: str) -> torch.Tensor:
    """Read a whole tensor of a checkpoint from its pieces.

    Returns:
        Tensor of the index's shape and dtype, on the CPU.

    Raises:
        CheckpointError: There is no such tensor, or its file is not what the index says.
    """
    if key not in index.tensors:
        raise CheckpointError(f"{index.path}: there is no tensor '{key}'.")
    entry = index.metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    for chunk in entry.chunks:
        piece = _read_piece(index, MetadataIndex(key, chunk.offsets))
        if not isinstance(piece, torch.Tensor) or piece.shape != chunk.sizes:
            raise CheckpointError(
                f"{index.path}: the piece of '{key}' at {tuple(chunk.offsets)} is not the tensor "
                f"of shape {tuple(chunk.sizes)} that {INDEX} says it is."
            )
        view = whole
        for dim, (start, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            view = view.narrow(dim, start, length)
        view.copy_(piece)
    return whole


def read_object(index: CheckpointIndex, key: str) -> Any:
    """Read an object of a checkpoint, with torch's ``weights_only``.

    Megatron saves the objects of a key as a list, of which nearly all have one element. Those of
    its classes that a checkpoint may hold are known to torch once ``megatron.core`` is imported.

    Raises:
        CheckpointError: There is no such object, or it cannot be read.
    """
    if key not in index.objects:
        raise CheckpointError(f"{index.path}: there is no object '{key}'.")
    return _read_piece(index, MetadataIndex(key))


def read_common(index: CheckpointIndex) -> dict[str, Any]:
    """Read what is not sharded: iteration, arguments, schedule, the optimizer's settings.

    It is the object ``common_state`` since megatron-core 0.19, and ``common.pt`` before.

    Raises:
        CheckpointError: It is missing, torn, or holds what is no plain data.
    """
    import megatron.core  # noqa: F401  # makes its classes known to torch

    key = _common_key(index)
    common = load_file(index.path / COMMON_FILE) if key is None else read_object(index, key)[0]
    if not isinstance(common, dict):
        raise CheckpointError(f"{index.path}: its common state is no dict, {type(common)} instead.")
    return common


def load_file(path: Path, mmap: bool = False) -> Any:
    """Load a file of ``torch.save`` with ``weights_only``, on the CPU.

    Args:
        path: The file.
        mmap: Map its tensors, so that each is read when it is used.

    Raises:
        CheckpointError: It is missing, torn, or holds what is no plain data.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: it cannot be read: {_first_line(error)}") from error


class _IndexUnpickler(pickle.Unpickler):
    """Builds the classes of an index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            if module == _MCORE:  # empty classes; Megatron itself need not be imported
                return type(name, (), {})
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return PurePosixPath
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")


def _read_metadata(path: Path) -> Metadata:
    file = path / INDEX
    if not file.is_file():
        raise CheckpointError(_why_no_index(path))
    try:
        with file.open("rb") as stream:
            metadata = _IndexUnpickler(stream).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError("it is no index of torch.distributed.checkpoint")
        if not all(
            isinstance(entry, TensorStorageMetadata | BytesStorageMetadata)
            for entry in metadata.state_dict_metadata.values()
        ) or not all(
            isinstance(key, MetadataIndex) and isinstance(info, _StorageInfo)
            for key, info in metadata.storage_data.items()
        ):
            raise pickle.UnpicklingError("its entries are not those of an index")
    except Exception as error:  # a torn pickle raises nearly anything
        raise CheckpointError(
            f"{file}: the checkpoint's index is torn or foreign: {_first_line(error)}. Take an "
            "earlier iteration."
        ) from error
    return metadata


def _why_no_index(path: Path) -> str:
    if not path.is_dir():
        return f"{path}: there is no such folder."
    if rank_folders(path):
        return f"{path}: this checkpoint is of --ckpt-format torch and has no index."
    names = sorted(p.name for p in path.iterdir())
    return (
        f"{path / INDEX}: the checkpoint's index is missing, which a save writes after all data. "
        f"The folder holds {_some(names) or 'nothing'}. Take an earlier iteration."
    )


def _files_by_key(metadata: Metadata) -> dict[str, tuple[str, ...]]:
    files: dict[str, set[str]] = defaultdict(set)
    for piece, info in metadata.storage_data.items():
        files[piece.fqn].add(info.relative_path)
    return {key: tuple(sorted(names)) for key, names in files.items()}


def _check_finished(index: CheckpointIndex) -> None:
    """Check what a save writes besides the data: the last file of all, and the common state."""
    config = index.path / CONFIG
    if not config.is_file():
        raise CheckpointError(
            f"{config}: it is missing, and a save writes it last: the save was cut off. Take an "
            "earlier iteration."
        )
    try:
        backend = json.loads(config.read_text())["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{config}: it is torn, expected a 'sharded_backend'.") from error
    if backend != "torch_dist":
        raise CheckpointError(f"{config}: 'sharded_backend' is {backend!r}, expected 'torch_dist'.")
    if _common_key(index) is None and not (index.path / COMMON_FILE).is_file():
        raise CheckpointError(
            f"{index.path}: there is no common state, neither an object '{COMMON_KEY}' in {INDEX} "
            f"nor a file {COMMON_FILE}."
        )


def _check_pieces(index: CheckpointIndex) -> None:
    """Check that the index places every piece in a file, and that the pieces make up the whole."""
    stored = index.metadata.storage_data
    lost = [key for key in index.objects if MetadataIndex(key) not in stored]
    for key, entry in index.metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            placed = [c.sizes for c in entry.chunks if MetadataIndex(key, c.offsets) in stored]
            if sum(map(math.prod, placed)) != math.prod(entry.size):
                lost.append(key)
    if lost:
        raise CheckpointError(
            f"{index.path / INDEX}: it does not say where all pieces lie of {_some(lost)}. Take an "
            "earlier iteration."
        )


def _check_extents(index: CheckpointIndex) -> None:
    """Check that every file is there and as long as what the index places in it."""
    ends: dict[str, int] = defaultdict(int)
    for info in index.metadata.storage_data.values():
        ends[info.relative_path] = max(ends[info.relative_path], info.offset + info.length)
    faults = [
        f"{name} {fault} ({_some(_keys_at(index, name, size))})"
        for name in sorted(ends)
        for size, fault in _fault_of(index.path, name, ends[name])
    ]
    if faults:
        raise CheckpointError(
            f"{index.path}: {len(faults)} of {len(ends)} files are not as {INDEX} says: "
            f"{_some(faults, separator='; ')}. Take an earlier iteration."
        )


def _fault_of(folder: Path, name: str, end: int) -> Iterator[tuple[int, str]]:
    """Yield the size and the fault of a file, if it has one."""
    file = _file(folder, name)
    if not file.is_file():
        yield 0, "is missing"
    elif (size := file.stat().st_size) < end:
        yield size, f"has {size:,} bytes, expected {end:,}"


def _keys_at(index: CheckpointIndex, name: str, size: int) -> list[str]:
    """Return the keys that lie in a file, wholly or in part, behind its first ``size`` bytes."""
    return sorted(
        {
            piece.fqn
            for piece, info in index.metadata.storage_data.items()
            if info.relative_path == name and info.offset + info.length > size
        }
    )


def _read_piece(index: CheckpointIndex, piece: MetadataIndex) -> Any:
    """Read one piece; each is a file of ``torch.save`` inside a file."""
    info = index.metadata.storage_data.get(piece)
    if info is None:
        raise CheckpointError(f"{index.path / INDEX}: it does not say where '{piece.fqn}' lies.")
    file = _file(index.path, info.relative_path)
    if info.transform_descriptors:
        raise CheckpointError(
            f"{file}: '{piece.fqn}' is encoded with {', '.join(info.transform_descriptors)}, which "
            "is not supported."
        )
    try:
        with file.open("rb") as stream:
            stream.seek(info.offset)
            data = stream.read(info.length)
        if len(data) < info.length:
            raise EOFError(f"{len(data):,} bytes of {info.length:,} at {info.offset:,}")
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{file}: '{piece.fqn}' cannot be read: {_first_line(error)}"
        ) from error


def _file(folder: Path, name: str) -> Path:
    """Return a file's path; an index may name files of its own folder alone."""
    if PurePosixPath(name).name != name or name == "..":
        raise CheckpointError(f"{folder / INDEX}: it names the file {name!r}, outside its folder.")
    return folder / name


def _common_key(index: CheckpointIndex) -> str | None:
    return next((key for key in index.objects if key.partition("/")[0] == COMMON_KEY), None)


def _what_else(path: Path) -> str:
    found = iterations(path)
    if not found:
        return "It holds no iter_XXXXXXX folder. Give the folder that --save named."
    return (
        f"It holds {_some(found)}. Write the number of a whole one to {path / TRACKER}, if that is "
        "meant."
    )


def _first_line(error: Exception) -> str:
    return f"{error}".partition("\n")[0].rstrip(".") or type(error).__name__


def _some(names: Iterable[str], separator: str = ", ") -> str:
    """Join the first few names and count the rest."""
    names = list(names)
    more = [f"{len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return separator.join([*names[:_MAX_NAMED], *more])
