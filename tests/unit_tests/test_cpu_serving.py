"""Megatron's CPU stand-in answers what Megatron asks of torch.cuda, and says no needless word."""

import argparse
import io
import logging
import sys
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from megatron_muon.integration import cpu, cpu_compile, cpu_flags, cpu_streams
from megatron_muon.integration.cpu_devices import TypeName
from tests.unit_tests.standing import CPU, Squares, standing_in, table


@pytest.fixture
def stand_in():
    with standing_in():
        yield


TO_CUDA = ("cuda", "cuda:0", torch.device("cuda", 0), 0)


@pytest.mark.usefixtures("stand_in")
def test_every_factory_of_the_table_takes_a_cuda_device():
    arguments = {
        "arange": (3,), "as_tensor": ([1.0],), "empty": (2,), "empty_like": (torch.ones(2),),
        "eye": (2,), "full": ((2,), 1.0), "linspace": (0, 1, 3), "ones": (2,),
        "ones_like": (torch.ones(2),), "rand": (2,), "randint": (3, (2,)), "randn": (2,),
        "tensor": ([1.0],), "zeros": (2,), "zeros_like": (torch.ones(2),),
    }  # fmt: skip
    assert arguments.keys() == cpu.FACTORIES.keys()
    for name, args in arguments.items():
        for device in ("cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 0), 0):
            assert getattr(torch, name)(*args, device=device).device == CPU, (name, device)
    assert torch.empty(2, pin_memory=True, device="cpu").device == CPU
    assert torch.zeros(1, device="meta").device.type == "meta"


@pytest.mark.usefixtures("stand_in")
class TestMoves:
    @pytest.mark.parametrize("device", TO_CUDA)
    def test_a_tensor_moved_to_cuda_is_on_the_cpu(self, device):
        tensor = torch.ones(2)
        for moved in (
            tensor.to(device), tensor.to(device=device), tensor.to(device, torch.float16),
            tensor.to(device=device, dtype=torch.float16), tensor.cuda(device),
            tensor.cuda(device, non_blocking=True), torch.nn.Parameter(tensor).cuda(),
        ):  # fmt: skip
            assert moved.device == CPU
        assert tensor.to(device, torch.float16).dtype == torch.float16
        assert tensor.to(device, copy=True).data_ptr() != tensor.data_ptr()
        assert tensor.cuda() is tensor

    @pytest.mark.parametrize("device", TO_CUDA)
    def test_a_module_moved_to_cuda_is_on_the_cpu(self, device):
        module = torch.nn.Linear(2, 2)
        weight = module.weight
        assert module.cuda(device).weight is weight
        assert module.to(device).weight is weight
        assert module.to(device=device, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
        assert torch.nn.Linear(2, 2, device=device).weight.device == CPU
        assert torch.nn.Linear(2, 2, device="meta").to_empty(device=device).weight.device == CPU

    def test_what_takes_the_current_device_gets_the_cpu(self):
        device = torch.cuda.current_device()
        assert torch.zeros(2, device=device).new_empty(2, device=device).device == CPU

    def test_pinned_memory_is_a_copy_that_outlives_the_original(self):
        """Megatron frees the storage that it has copied to pinned memory."""
        tensor = torch.ones(4)
        pinned = tensor.cpu().pin_memory()
        tensor.untyped_storage().resize_(0)
        assert pinned.tolist() == [1.0] * 4
        assert not torch.nn.Parameter(torch.ones(1)).pin_memory().requires_grad

    @pytest.mark.parametrize("location", [None, *TO_CUDA[:3]])
    def test_what_was_saved_on_a_gpu_is_loaded_on_the_cpu(self, monkeypatch, location):
        buffer = io.BytesIO()
        monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
        torch.save(torch.arange(3), buffer)
        buffer.seek(0)
        assert b"cuda:3" in buffer.getvalue()
        loaded = torch.load(buffer, map_location=location, weights_only=True)
        assert loaded.device == CPU
        assert loaded.tolist() == [0, 1, 2]

    @pytest.mark.parametrize(
        ("dtype", "kind"),
        [(torch.float32, "Float"), (torch.float16, "Half"), (torch.bfloat16, "BFloat16")],
    )
    def test_a_type_answers_to_the_cuda_name(self, dtype, kind):
        name = torch.zeros(1, dtype=dtype).type()
        assert isinstance(name, TypeName)
        assert name in ["torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor", f"torch.{kind}Tensor"]
        assert name == f"torch.cuda.{kind}Tensor"
        assert f"torch.cuda.{kind}Tensor" == name
        assert name != "torch.cuda.DoubleTensor"
        assert not name.__ne__(f"torch.{kind}Tensor")
        assert repr(name) == repr(f"torch.{kind}Tensor")
        assert name != 1


def test_without_the_stand_in_a_gpu_file_is_not_loaded(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("it would be")
    buffer = io.BytesIO()
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
    torch.save(torch.arange(3), buffer)
    buffer.seek(0)
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(buffer, weights_only=True)


@pytest.mark.usefixtures("stand_in")
class TestStreams:
    def test_streams_and_events_are_done_when_they_are_asked(self):
        stream, other = torch.cuda.Stream(device="cuda", priority=-1), torch.cuda.current_stream()
        assert isinstance(stream, torch.cuda.Stream)
        assert isinstance(other, torch.cuda.Stream)
        assert torch.cuda.Stream.priority_range() == (0, 0)
        stream.wait_stream(other)
        with torch.cuda.stream(stream), stream:
            event = stream.record_event()
        stream.wait_event(event)
        event.wait(other)
        event.synchronize()
        stream.synchronize()
        torch.cuda.synchronize()
        torch.cuda.set_device(0)
        assert event.query()
        assert stream.query()
        assert torch.cuda.current_stream() is torch.cuda.current_stream()
        assert not torch.cuda.is_current_stream_capturing()

    def test_events_measure_milliseconds(self, monkeypatch):
        seconds = iter([0.0, 0.0, 1.0, 1.25])
        clock = types.SimpleNamespace(perf_counter=lambda: next(seconds))
        monkeypatch.setattr(cpu_streams, "time", clock)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(torch.cuda.current_stream())
        end.record()
        assert start.elapsed_time(end) == 250.0

    def test_counters_are_numbers(self):
        assert torch.cuda.memory_stats()["reserved_bytes.all.current"] == 0
        assert torch.cuda.device_memory_used() == 0
        assert torch.cuda.get_device_properties(torch.device("cuda:0")).major == 0
        assert torch.cuda.get_device_properties(0).total_memory > 2**20
        assert torch.cuda.get_device_capability() == (0, 0)
        assert torch.cuda.nvtx.range_push("range") is torch.cuda.nvtx.range_pop()


@pytest.mark.usefixtures("stand_in")
class TestRandomState:
    def test_the_state_is_the_cpu_generators(self):
        torch.cuda.manual_seed(7)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state)
        assert torch.equal(first, torch.rand(3))
        torch.manual_seed(7)
        assert torch.equal(first, torch.rand(3))

    def test_megatrons_tracker_forks_it(self):
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        tracker = CudaRNGStatesTracker()
        torch.manual_seed(1)
        tracker.add("a", 5)
        before = torch.get_rng_state()
        draws = []
        for _ in range(2):
            with tracker.fork("a"):
                draws.append(torch.rand(2))
        torch.manual_seed(5)
        assert torch.equal(torch.cat(draws), torch.cat([torch.rand(2), torch.rand(2)]))
        with tracker.fork("a"):
            pass
        torch.set_rng_state(before)

    def test_a_state_of_a_gpu_is_refused_with_the_flag_to_give(self):
        with pytest.raises(RuntimeError, match=r"16 bytes.*--no-load-rng"):
            torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))


def called(wrap):
    """Wrap a function that returns what it is called with."""
    return wrap(lambda *args, **kwargs: (args, kwargs))


class Options:
    """Stands for a backend's options, which are named after it."""


def options(name):
    return type(name, (Options,), {})()


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        ((("nccl",), {}), (("gloo",), {})),
        (((), {"backend": "nccl", "rank": 1}), ((), {"backend": "gloo", "rank": 1})),
        ((("cpu:gloo,cuda:nccl",), {}), (("gloo",), {})),
        ((([0, 1], None, "nccl"), {}), (([0, 1], None, "gloo"), {})),
        ((("gloo", "file:///nccl"), {}), (("gloo", "file:///nccl"), {})),
        ((("fake",), {"store": "nccl_store"}), (("fake",), {"store": "nccl_store"})),
        (((), {"device_id": torch.device("cuda:1")}), ((), {})),
        (((), {"device_id": CPU}), ((), {"device_id": CPU})),
        (((), {"device_id": None, "pg_options": None}), ((), {"device_id": None})),
    ],
)
def test_process_groups_are_made_over_gloo(given, passed_on):
    args, kwargs = given
    expected = (*passed_on[:1], {**passed_on[1], **dict.fromkeys(kwargs.keys() & {"pg_options"})})
    assert called(cpu._over_gloo)(*args, **kwargs) == expected


def test_options_of_gloo_are_kept_and_of_nccl_dropped():
    theirs = options("ProcessGroupNCCLOptions")
    ours = options("GlooOptions")
    make = called(cpu._over_gloo)
    assert make([0], pg_options=theirs) == (([0],), {})
    assert make([0], pg_options=ours) == (([0],), {"pg_options": ours})


def test_a_barrier_takes_no_devices():
    assert called(cpu._without_device_ids)(None, device_ids=[0], async_op=True) == (
        (None,),
        {"async_op": True},
    )


@pytest.mark.usefixtures("stand_in")
def test_a_job_over_nccl_runs_over_gloo(tmp_path):
    meeting = f"file://{tmp_path / 'meeting'}"
    device = torch.device("cuda:0")
    dist.init_process_group("nccl", meeting, rank=0, world_size=1, device_id=device)
    try:
        group = dist.new_group([0], backend="nccl", pg_options=None)
        dist.barrier(group, device_ids=[torch.cuda.current_device()])
        tensor = torch.ones(2, device=device)
        dist.all_reduce(tensor, group=group)
        assert dist.get_backend() == dist.get_backend(group) == "gloo"
        assert tensor.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("stand_in")
def test_the_sizes_of_an_exchange_of_tokens_are_numbers():
    from megatron.core.transformer.moe.token_dispatcher import maybe_move_tensor_to_cpu

    sizes = torch.tensor([3, 4])
    assert not torch.is_tensor(maybe_move_tensor_to_cpu(sizes, as_numpy=True))
    assert maybe_move_tensor_to_cpu(sizes) is sizes
    assert maybe_move_tensor_to_cpu(None, as_numpy=True) is None


# ------------------------------------------------------------------------------------------------
# Flags
# ------------------------------------------------------------------------------------------------


def stock_parser():
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def test_every_flag_exists_and_does_what_the_table_says():
    stock = stock_parser()
    before = stock.parse_args([])
    spelled = stock.parse_args(
        [word for _, flag in cpu_flags.FLAGS.values() for word in flag.split()]
    )
    with standing_in():
        supplied = stock_parser().parse_args([])
    for dest, (value, spelling) in cpu_flags.FLAGS.items():
        assert getattr(spelled, dest) == value, spelling
        assert getattr(supplied, dest) == value, spelling
        assert getattr(before, dest) != value, f"{spelling} is what Megatron does by itself"


def adds_a_few(parser):
    """Stands for Megatron's function, which takes seconds."""
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--distributed-backend", default="nccl")
    parser.add_argument("--no-rope-fusion", action="store_false", dest="apply_rope_fusion")
    return parser


def test_what_the_user_sets_wins_and_is_not_said(monkeypatch, capsys):
    user = ["--transformer-impl=transformer_engine", "--distributed-backend", "nccl"]
    monkeypatch.setattr(sys, "argv", ["script", *user])
    supplies = cpu_flags.supplies_cpu_flags(adds_a_few)
    for _ in range(2):
        args = supplies(argparse.ArgumentParser()).parse_args()
        assert (args.transformer_impl, args.distributed_backend) == ("transformer_engine", "nccl")
        assert args.apply_rope_fusion is False
    assert capsys.readouterr().out == "megatron-muon: on the CPU, so set --no-rope-fusion\n"


def test_an_abbreviation_of_the_user_wins_too(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script", "--transformer=transformer_engine"])
    args = cpu_flags.supplies_cpu_flags(adds_a_few)(argparse.ArgumentParser()).parse_args()
    assert args.transformer_impl == "transformer_engine"


def test_only_the_first_rank_says_what_was_set(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "argv", ["script"])
    args = cpu_flags.supplies_cpu_flags(adds_a_few)(argparse.ArgumentParser()).parse_args()
    assert args.transformer_impl == "local"
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------------------
# Messages
# ------------------------------------------------------------------------------------------------

FORKED = "CPU RNG state changed within GPU RNG context"


def drop_out_in_a_fork():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("a", 5)
    with tracker.fork("a"):
        torch.rand(2)


def test_the_random_state_of_a_fork_is_not_complained_about(caplog):
    with standing_in():
        drop_out_in_a_fork()
        logging.getLogger("megatron.core.tensor_parallel.random").warning("another message")
        logging.getLogger("megatron.core").warning(FORKED)
    assert [record.message for record in caplog.records] == ["another message", FORKED]


def test_without_its_row_the_fork_complains(caplog):
    rows = [row for row in table() if FORKED not in row.target]
    assert len(rows) == len(table()) - 1
    with standing_in(rows):
        drop_out_in_a_fork()
    assert [record.message for record in caplog.records] == [FORKED]


def shown(act):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with standing_in():
            act()
        act()
    return [str(warning.message) for warning in caught]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch warns where there is no CUDA")
def test_pinned_memory_is_not_complained_about_while_standing_in():
    said = shown(lambda: next(iter(DataLoader(Squares(), pin_memory=True))))
    assert len(said) == 1
    assert "pin_memory" in said[0]


def test_other_warnings_are_shown():
    def warn():
        warnings.warn_explicit("something", UserWarning, "x.py", 1, "torch.utils.data.dataloader")
        warnings.warn_explicit("'pin_memory' argument is", UserWarning, "x.py", 1, "a.b")

    assert shown(warn) == ["something", "'pin_memory' argument is"] * 2


# ------------------------------------------------------------------------------------------------
# Compiling
# ------------------------------------------------------------------------------------------------


def activation(x):
    return x + 1


@pytest.fixture
def fused(monkeypatch):
    """A module of Megatron's with a function, a method and a static method that are compiled."""
    module = types.ModuleType("megatron.core.fused_for_a_test")
    later = cpu_compile._compiles_later
    activation.__module__, activation.__qualname__ = module.__name__, "activation"
    module.activation = later(activation)

    class Layer:
        forward = later(lambda self, x: x + 2)
        helper = staticmethod(later(dynamic=True)(lambda x: x + 3))

    Layer.__module__ = module.__name__
    module.Layer = Layer
    module.plain = lambda x: x
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_what_megatron_compiles_runs_as_written_and_is_compiled_afterwards(fused, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiled.append(options) or f)
    stored, static = fused.activation, vars(fused.Layer)["helper"]
    with standing_in(cpu_compile.compile_rows()):
        assert fused.activation is activation
        assert fused.activation(1) == stored(1) == 2
        assert (fused.Layer().forward(1), fused.Layer.helper(1), fused.Layer().helper(1)) == (
            3,
            4,
            4,
        )
        assert compiled == []
    assert fused.activation is stored
    assert vars(fused.Layer)["helper"] is static
    assert stored(1) == stored(1) == 2
    assert compiled == [{}]
    assert fused.Layer.helper(1) == 4
    assert compiled == [{}, {"dynamic": True}]


def test_what_is_imported_while_standing_in_is_compiled_afterwards(monkeypatch):
    from megatron.core import jit

    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f: compiled.append(f) or f)
    with standing_in():
        function = jit.jit_fuser(activation)
        assert function(1) == 2
        assert compiled == []
    assert function(1) == 2
    assert compiled == [activation]


def test_nothing_of_megatron_is_left_compiled(stand_in):
    assert cpu_compile.runs_as_written()
    assert list(cpu_compile._compiled_rows()) == []


def test_importing_megatron_installs_nothing():
    compile_, filters = torch.compile, list(warnings.filters)
    cpu.import_megatron()
    assert torch.compile is compile_
    assert list(warnings.filters) == filters
    assert not cpu_compile.runs_as_written()
    assert sys.modules["megatron.core.jit"].jit_fuser is compile_
