"""Random numbers on the CPU: torch's one generator is both the CPU's and the GPU's.

Dropout draws from the default generator of the device it runs on, so what Megatron keeps of a GPU's
generator, its model-parallel streams and what a checkpoint holds of both, is kept of torch's CPU
generator. On a GPU nothing but the model draws from that generator. Here a data loader would too:
it takes a seed for its workers from the CPU's whenever it is iterated, on the first rank of each
tensor-parallel group alone, and once more after a checkpoint has been loaded. Dropout would then
leave out other elements on each tensor-parallel rank, and others in a resumed run than in one that
was not stopped. So Megatron's loaders have a generator of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.data import DataLoader

from megatron_muon.integration.patching import Patch


def random_state_rows() -> list[Patch]:
    """Return the rows of ``torch.cuda``, of Megatron's tracker and of its data loaders."""
    why = "the model-parallel random state lives in the CPU generator"
    tracker = "core/tensor_parallel/random.py:CudaRNGStatesTracker"
    core = [
        *(Patch(module="torch.cuda", name=name, replace=_value(stand_in), why=why,
                needed_by=needed_by)
          for name, stand_in, needed_by in (
              ("manual_seed", _seed, f"{tracker}.add"),
              ("get_rng_state", _random_state, f"{tracker}.add"),
              ("set_rng_state", _set_random_state, "training/checkpointing.py:load_checkpoint"))),
        *(Patch(module="megatron.core.tensor_parallel.random", name=name, replace=_value(stand_in),
                why="goes through private CUDA calls, past torch.cuda",
                needed_by=f"{tracker}.fork")
          for name, stand_in in (("_get_cuda_rng_state", _random_state_of_tracker),
                                 ("_set_cuda_rng_state", _set_random_state_of_tracker))),
    ]  # fmt: skip
    if find_spec("megatron.training") is None:
        return core
    return [
        *core,
        *(Patch(module=module, name="build_pretraining_data_loader", replace=_draws_its_own,
                why="a loader's seed would be drawn from the generator of dropout, after a resume "
                "once more, and on one tensor-parallel rank alone",
                needed_by="training/training.py:build_train_valid_test_data_loaders")
          for module in ("megatron.training.datasets.data_samplers", "megatron.training.training")),
    ]  # fmt: skip


def _value(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _random_state(device: Any = None) -> torch.Tensor:
    del device
    return torch.default_generator.get_state()


def _set_random_state(new_state: torch.Tensor, device: Any = None) -> None:
    del device
    try:
        torch.default_generator.set_state(new_state)
    except (RuntimeError, TypeError) as error:
        raise RuntimeError(
            f"a random-number state of {new_state.numel()} bytes is not one of the CPU's generator "
            "(a checkpoint of a run on a GPU holds CUDA's): load it with --no-load-rng."
        ) from error


def _random_state_of_tracker(
    device: Any = "cuda", clone: bool = False, graph_safe: bool = False
) -> torch.Tensor:
    del clone, graph_safe
    return _random_state(device)


def _set_random_state_of_tracker(
    new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False
) -> None:
    del graph_safe
    _set_random_state(new_state, device)


def _draws_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``build_pretraining_data_loader``: a loader without a generator gets one of its own."""

    @functools.wraps(function)
    def build_pretraining_data_loader(*args: Any, **kwargs: Any) -> Any:
        loader = function(*args, **kwargs)
        if isinstance(loader, DataLoader) and loader.generator is None:
            loader.generator = torch.Generator().manual_seed(torch.initial_seed())
        return loader

    return build_pretraining_data_loader
