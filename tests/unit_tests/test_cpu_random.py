"""On the CPU, nothing but the model draws from the generator that stands for the GPU's."""

from argparse import Namespace

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_muon.integration.cpu import import_megatron
from tests.unit_tests.standing import Squares, standing_in

import_megatron()

from megatron.core.tensor_parallel import random as tensor_parallel  # noqa: E402
from megatron.training import global_vars, training  # noqa: E402
from megatron.training.datasets import data_samplers  # noqa: E402


@pytest.fixture
def external(monkeypatch):
    """Megatron's arguments where the loader is the user's own."""
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", Namespace(dataloader_type="external"))


def moves_generator(module, **options):
    """Whether dropout draws something else once a loader has been iterated."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    loader = module.build_pretraining_data_loader(DataLoader(Squares(), **options), 0)
    assert len(list(loader)) == len(Squares())
    return not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("module", [training, data_samplers])
def test_a_loader_draws_from_a_generator_of_its_own(external, module):
    with standing_in():
        assert not moves_generator(module)
        own = torch.Generator().manual_seed(5)
        given = DataLoader(Squares(), generator=own)
        assert module.build_pretraining_data_loader(given, 0).generator is own
    assert moves_generator(module)  # which is why


def test_workers_have_the_seeds_of_the_run(external):
    with standing_in():
        seeds = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            loader = training.build_pretraining_data_loader(DataLoader(Squares()), 0)
            seeds.append(iter(loader)._base_seed)
    assert seeds[0] == seeds[1] != seeds[2]


def drop_out():
    return torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()


def test_all_streams_go_on_from_what_a_checkpoint_holds():
    """As Megatron saves and loads them: training/checkpointing.py, get_rng_state."""
    with standing_in():
        tracker = tensor_parallel.CudaRNGStatesTracker()
        torch.cuda.manual_seed(1)
        tracker.add("model", 2)

        def draw():
            outside = drop_out()
            with tracker.fork("model"):
                return [outside, drop_out(), drop_out()]

        first = draw()
        saved = torch.get_rng_state(), torch.cuda.get_rng_state(), tracker.get_states()
        second = draw()
        torch.cuda.manual_seed(8)
        tracker.set_states({"model": torch.cuda.get_rng_state()})
        torch.cuda.manual_seed(9)
        other = draw()
        torch.set_rng_state(saved[0])
        torch.cuda.set_rng_state(saved[1])
        tracker.set_states(saved[2])
        assert draw() == second
        assert len({str(part) for part in [*first, *second, *other]}) == 9


def test_the_state_of_a_gpu_is_refused():
    with standing_in(), pytest.raises(RuntimeError, match=r"16 bytes.*--no-load-rng"):
        torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))
