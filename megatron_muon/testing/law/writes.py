"""What an optimizer's step writes, in which dtype and where, seen below torch's operators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_muon.testing.law.case import Write


class WriteSpy:
    """Watches the steps of an optimizer.

    Attributes:
        writes: What they wrote.
    """

    def __init__(self, watches: bool) -> None:
        self.writes: set[Write] = set()
        self._watches = watches

    @contextlib.contextmanager
    def watch(self, chunks: Sequence[Any]) -> Iterator[None]:
        """Watch inside the block, if anything is watched.

        Args:
            chunks: Model chunks in DDP, whose buffers are told apart from all else.
        """
        with _Writes(_places(chunks), self.writes) if self._watches else contextlib.nullcontext():
            yield


def _places(chunks: Sequence[Any]) -> dict[int, str]:
    """Return what lies in each storage of a model."""
    places: dict[int, str] = {}
    for chunk in chunks:
        for param in chunk.parameters():
            places[_storage(param)] = "parameters"
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            places[_storage(buffer.grad_data)] = "gradients"
            if buffer.param_data is not None:
                places[_storage(buffer.param_data)] = "parameters"
    return places


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Writes(TorchDispatchMode):
    """Records every tensor that an operator changes or makes anew; views are neither."""

    def __init__(self, places: Mapping[int, str], writes: set[Write]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places, self._found = places, writes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for tensor in (*_changed(func, args, kwargs), *_made(func, result)):
            place = self._places.get(_storage(tensor), "elsewhere")
            self._found.add(Write(tensor.dtype, place, str(func)))
        return result


def _changed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the arguments that an operator changes; a collective does not say which those are."""
    arguments = func._schema.arguments
    named = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
    for argument in arguments:
        alias = argument.alias_info
        if func.namespace == "c10d" or (alias is not None and alias.is_write):
            yield from _tensors(named.get(argument.name))


def _made(func: Any, result: Any) -> Iterator[torch.Tensor]:
    """Yield the results of an operator that are no views of its arguments."""
    results = result if len(func._schema.returns) > 1 else (result,)
    for declared, value in zip(func._schema.returns, results, strict=False):
        if declared.alias_info is None:
            yield from _tensors(value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.numel())
