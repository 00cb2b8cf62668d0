"""Megatron's CPU stand-in is a table that is true, comes off whole, and leaves torch as it was."""

import ast
import functools
import io
import logging
import pickle
import types
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_muon.integration import install
from megatron_muon.integration.cpu_devices import KnownToTorch
from megatron_muon.integration.patching import Patch, PatchSet
from tests.unit_tests.standing import CPU, Squares, patches, standing_in, table

ABSENT = object()
MEGATRON = Path(next(iter(find_spec("megatron").submodule_search_locations)))


# ------------------------------------------------------------------------------------------------
# The table
# ------------------------------------------------------------------------------------------------


def upstream_text(needed_by):
    """The source of the upstream symbol that a row names, ``None`` where there is none such."""
    path, _, symbol = needed_by.partition(":")
    if not (MEGATRON / path).is_file():
        return None
    text = (MEGATRON / path).read_text()
    node = syntax(path)
    for part in symbol.split(".") if symbol else ():
        inner = [child for child in ast.walk(node) if child is not node]
        named = [child for child in inner if getattr(child, "name", None) == part]
        if not named:
            return None
        node = named[0]
    return ast.get_source_segment(text, node) if symbol else text


@functools.cache
def syntax(path):
    return ast.parse((MEGATRON / path).read_text())


def words_of(row):
    """A word that the upstream code must hold, if it needs the row."""
    if isinstance(row, Patch):
        return row.name.rpartition(".")[2]
    word = {
        "torch's caches of its own factories": "torch.compile",
        "logger torch.utils.cpp_extension: 'No CUDA runtime is found'": "load_inline",
        "UserWarning of torch.utils.data.dataloader: \"'pin_memory' argument is set as true but no "
        'accelerator is found"': "pin_memory",
    }
    return word.get(row.target) or row.message


def is_needed(row):
    text = upstream_text(row.needed_by)
    return text is not None and words_of(row) in text


def test_every_row_names_the_upstream_code_that_says_its_name():
    assert [row.target for row in table() if not is_needed(row)] == []


@pytest.mark.parametrize(
    "needed_by",
    [
        "core/no_such_file.py:Timer.start",
        "core/timers.py:Timer.no_such_method",
        "core/timers.py:Timer.__init__",
        "core/timers.py:no_such_class.start",
    ],
)
def test_the_check_of_the_table_notices_a_wrong_place(needed_by):
    row = next(row for row in patches() if row.target == "torch.cuda.synchronize")
    assert is_needed(row)
    wrong = Patch(
        module=row.module, name=row.name, replace=row.replace, why=row.why, needed_by=needed_by
    )
    assert not is_needed(wrong)


def test_every_row_says_why():
    assert all(row.why for row in table())


def test_every_stand_in_is_an_object_of_its_own():
    """torch's compiler tells functions of torch apart by identity, and refuses duplicates."""
    originals = {row.target: held(row) for row in patches()}
    with standing_in():
        new = {row.target: held(row) for row in patches() if row.module.startswith("torch")}
    assert len({id(value) for value in new.values()}) == len(new)
    assert not [name for name, value in new.items() if value is originals[name]]


# ------------------------------------------------------------------------------------------------
# Everything comes back
# ------------------------------------------------------------------------------------------------


@functools.cache
def holders():
    return {row.target: row.holder() for row in patches()}


def held(row):
    holder, leaf = holders()[row.target]
    return vars(holder).get(leaf, ABSENT)


def state():
    """What the table may change, by identity where it is a name."""
    from torch.jit._builtins import _get_builtin_table

    names = {row.target: id(held(row)) for row in patches()}
    loggers = [row.logger for row in table() if hasattr(row, "logger")]
    return {
        **names,
        "warnings": list(map(id, warnings.filters)),
        "loggers": [list(logging.getLogger(name).filters) for name in loggers],
        "scripted": dict(_get_builtin_table()),
        "torch.compile": id(torch.compile),
    }


def differences(before, after):
    return {name for name in before if before[name] != after[name]}


def test_every_name_comes_back_and_comes_back_again():
    before = state()
    for _ in range(2):
        with standing_in():
            changed = differences(before, state())
            assert changed >= {row.target for row in patches()} | {"warnings", "loggers"}
        assert differences(before, state()) == set()


class Lasting:
    """Mutant: a row that is not put back."""

    def __init__(self, row):
        self.row = row

    def apply(self):
        self.undo = self.row.apply()
        return lambda: None


@pytest.mark.parametrize("lasting", ["torch.cuda.synchronize", "torch.Tensor.to", "logger", "User"])
def test_the_walk_notices_a_row_that_stays(lasting):
    before = state()
    mutant = Lasting(next(row for row in table() if row.target.startswith(lasting)))
    with standing_in([mutant]):
        pass
    assert differences(before, state())
    mutant.undo()
    assert differences(before, state()) == set()


class Failing:
    def apply(self):
        raise OSError("no")


@pytest.mark.parametrize("position", [0, 1, 20, 40, -1])
def test_an_error_in_the_middle_puts_everything_back(position):
    before = state()
    rows = list(table())
    rows.insert(position if position >= 0 else len(rows), Failing())
    with pytest.raises(OSError, match="no"):
        PatchSet(rows).apply()
    assert differences(before, state()) == set()


# ------------------------------------------------------------------------------------------------
# torch behaves as before
# ------------------------------------------------------------------------------------------------


def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros([2], dtype=x.dtype, device=x.device) + torch.arange(2)


def compiled(x):
    return x.to(torch.float64) * torch.ones(2, device=x.device) + torch.tensor([1.0, 2.0])


def types_of_tensors():
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
    names = [torch.zeros(1, dtype=dtype).type() for dtype in dtypes]
    return [
        [str(name) for name in names],
        [hash(name) for name in names],
        [name == f"torch.{kind}Tensor" for name in names for kind in ("Float", "Half", "Long")],
        [pickle.loads(pickle.dumps(name)).__class__ is str for name in names],
        dict.fromkeys(names, 1).get("torch.FloatTensor"),
        torch.zeros(1).type(torch.float16).dtype,
        torch.zeros(1).type("torch.LongTensor").dtype,
    ]


def defaults():
    with torch.device("meta"):
        on_meta = [f(2).device.type for f in (torch.zeros, torch.ones, torch.arange, torch.randn)]
    return [
        torch.get_default_dtype(), torch.get_default_device(), torch.zeros(1).dtype,
        torch.tensor([1]).dtype, torch.empty(1).device, torch.zeros(1).is_cuda, on_meta,
        torch.zeros(1).is_pinned(),
    ]  # fmt: skip


def random_streams():
    torch.manual_seed(11)
    generator = torch.Generator().manual_seed(5)
    first = torch.rand(3).tolist()
    other = torch.rand(3, generator=generator).tolist()
    with torch.random.fork_rng(devices=[]):
        inside = torch.randn(2).tolist()
    torch.nn.functional.dropout(torch.ones(8), 0.5)
    state = torch.get_rng_state()
    after = torch.rand(2).tolist()
    torch.set_rng_state(state)
    again = torch.rand(2).tolist()
    assert after == again
    return [first, other, inside, after, torch.initial_seed(), generator.initial_seed()]


def saved():
    tensor = torch.arange(4.0).bfloat16().requires_grad_()
    buffer = io.BytesIO()
    torch.save({"weight": tensor, "half": tensor[1:3]}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    buffer.seek(0)
    mapped = torch.load(buffer, map_location="meta")
    return [
        len(pickle.dumps(tensor)),
        pickle.loads(pickle.dumps(tensor)).tolist(),
        buffer.getvalue(),
        loaded["half"].tolist(),
        loaded["half"].untyped_storage().nbytes(),
        mapped["weight"].device.type,
    ]


def functions_pickled():
    return [pickle.loads(pickle.dumps(f)) is f for f in (torch.zeros, torch.load)]


def loaded_by_workers():
    loader = DataLoader(
        Squares(), batch_size=3, num_workers=1, pin_memory=True, multiprocessing_context="fork"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [batch.tolist() for batch in loader]


def stream_classes():
    def annotated(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event | None:
        return stream

    return [
        isinstance(object(), torch.cuda.Stream),
        isinstance(torch.cuda.Stream, type),
        isinstance(torch.cuda.Event(), torch.cuda.Event),
        isinstance(type("S", (torch.cuda.Stream,), {}), type),
        annotated(),
    ]


def compiled_by_torch():
    torch.compiler.reset()
    function = torch.compile(compiled, backend="eager", fullgraph=True)
    return function(torch.tensor([3.0, 4.0])).tolist()


def scripted_by_torch():
    # torch keeps what it made of a function, so each time it gets a new one.
    function = types.FunctionType(scripted.__code__, scripted.__globals__)
    function.__annotations__ = scripted.__annotations__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(function)(torch.tensor([3.0, 4.0])).tolist()


def gradients():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (x.to(torch.float64) * torch.ones_like(x)).sum().backward()
    batched = torch.func.vmap(lambda row: row + torch.zeros(2))(torch.ones(3, 2))
    return [x.grad.tolist(), batched.tolist()]


OBSERVATIONS = {
    "devices": lambda: [
        torch.cuda.is_available(), torch.accelerator.is_available(),
        torch.accelerator.device_count(), torch.accelerator.current_accelerator(),
        torch.cuda.is_initialized(), torch.cuda.memory_allocated(), torch.cuda.empty_cache(),
        torch.backends.cuda.is_built(), torch.version.cuda,
    ],
    "types": types_of_tensors,
    "defaults": defaults,
    "random": random_streams,
    "saved": saved,
    "pickled functions": functions_pickled,
    "workers": loaded_by_workers,
    "streams": stream_classes,
    "compile": compiled_by_torch,
    "script": scripted_by_torch,
    "gradients": gradients,
    "moves": lambda: [
        torch.zeros(2, 3).to(CPU).stride(), torch.zeros(2).to(torch.float16, copy=True).dtype,
        torch.zeros(2).to(torch.zeros(1, dtype=torch.float16)).dtype,
        torch.zeros(2).to(dtype=torch.int8, copy=True).dtype,
        torch.nn.Linear(2, 2).to(torch.bfloat16).weight.dtype,
        torch.nn.Linear(2, 2).to(device="cpu", dtype=torch.float16).weight.dtype,
    ],
}  # fmt: skip


def skip_where_it_depends_on_a_gpu(name):
    if name.strip() in ("devices", "workers") and torch.cuda.is_available():
        pytest.skip("is about a machine without a GPU")


def observe(name):
    """What torch answers, or the kind of error it raises."""
    try:
        return OBSERVATIONS[name]()
    except Exception as error:
        return type(error)


@pytest.fixture(scope="module")
def before():
    return {name: observe(name) for name in OBSERVATIONS}


def test_nothing_observed_is_an_error(before):
    assert {name: v for name, v in before.items() if isinstance(v, type)} == {}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_torch_behaves_as_before_during_and_after(name, before):
    skip_where_it_depends_on_a_gpu(name)
    with standing_in():
        during = observe(name)
    assert during == before[name]
    assert observe(name) == before[name]


@pytest.mark.parametrize("name", ["compile", "script", "defaults"])
def test_torch_that_met_the_stand_in_first_behaves_as_before(name, before):
    """torch fills caches of its own functions on first use, which may be while they are wrapped."""
    from torch.utils._device import _device_constructors

    torch.compiler.reset()
    _device_constructors.cache_clear()
    with standing_in():
        assert observe(name) == before[name]
    assert observe(name) == before[name]


def rough(name, replace, module="torch"):
    """A stand-in that is good enough for Megatron, and changes torch."""
    return Patch(module=module, name=name, replace=replace, why="rough", needed_by="nobody")


def without(kind):
    return [row for row in table() if not isinstance(row, kind)]


def plainly_wrapped(function):
    return lambda *args, **kwargs: function(*args, **kwargs)


def one(*args, **kwargs):
    """One stand-in for several functions."""


def one_for_all(original):
    return one


MUTANTS = {
    "devices": [rough("is_available", lambda f: lambda: True, "torch.cuda")],
    "devices ": [rough("device_count", lambda f: lambda: 1, "torch.cuda")],
    "types": [rough("Tensor.type", lambda f: lambda x, *a: f(x, *a) if a else f"torch.cuda.{1}")],
    "random": [rough("rand", lambda f: lambda *a, **k: f(1) is None or f(*a, **k))],
    "saved": [rough("load", lambda f: lambda b, *a, **k: f(b, map_location="cpu"))],
    "pickled functions": [rough("load", plainly_wrapped)],
    "workers": [rough("is_available", lambda f: lambda: True, "torch.accelerator")],
    "streams": [rough("Stream", lambda f: lambda *a: None, "torch.cuda")],
    "compile": [rough("zeros", one_for_all), rough("cuda.get_rng_state", one_for_all)],
    "script": [rough("zeros", plainly_wrapped)],
    "gradients": [rough("Tensor.to", lambda f: lambda x, *a, **k: f(x.detach(), *a, **k))],
    "moves": [rough("Tensor.to", lambda f: lambda x, *a, **k: x)],
}


# A loader that fails in its constructor complains once more when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", MUTANTS)
def test_the_observation_notices_a_rough_stand_in(name, before):
    skip_where_it_depends_on_a_gpu(name)
    torch.compiler.reset()
    with standing_in(MUTANTS[name]):
        during = observe(name.strip())
    torch.compiler.reset()
    assert during != before[name.strip()]


@pytest.mark.parametrize("name", ["script", "defaults"])
def test_the_observation_notices_caches_filled_by_stand_ins(name, before):
    from torch.utils._device import _device_constructors

    _device_constructors.cache_clear()
    with standing_in(without(KnownToTorch)):
        during = observe(name)
    _device_constructors.cache_clear()
    assert during != before[name]


# ------------------------------------------------------------------------------------------------
# Where there is a GPU
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has_cuda", "device", "on_cpu"),
    [
        (False, "auto", True),
        (False, "cpu", True),
        (True, "auto", False),
        (True, "cuda", False),
        (True, "cpu", True),
    ],
)
def test_a_gpu_is_left_alone_unless_the_cpu_is_asked_for(monkeypatch, has_cuda, device, on_cpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert install._takes_cpu(device) is on_cpu
    named = {
        row.target
        for rows in install.seam_tables(device=device, optimizer=False).values()
        for row in rows.rows
    }
    assert ("torch.cuda.current_device" in named) is on_cpu
    assert any(name.startswith("torch.") for name in named) is on_cpu


@pytest.mark.gpu
def test_on_a_machine_with_a_gpu_the_cpu_takes_its_place_for_a_while():
    on_gpu = torch.ones(2, device="cuda")
    before = state()
    with standing_in():
        assert not torch.cuda.is_available()
        assert not torch.accelerator.is_available()
        assert torch.ones(2, device="cuda").device == CPU
        assert torch.ones(2).cuda().device == CPU
        assert on_gpu.to("cpu").tolist() == [1.0, 1.0]
        assert len(loaded_by_workers()) == 2
    assert differences(before, state()) == set()
    assert torch.cuda.is_available()
    assert torch.ones(2, device="cuda").is_cuda
    assert on_gpu.type() == "torch.cuda.FloatTensor"
    torch.cuda.synchronize()
