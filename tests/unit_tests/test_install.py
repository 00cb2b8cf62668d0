"""install() replaces everything or nothing, says why not, and uninstall() leaves no trace."""

import argparse
import functools
import importlib.metadata
import os
import sys
import types
from typing import get_args

import pytest
import torch

import megatron_muon
from megatron_muon.errors import ConfigurationError, HostError
from megatron_muon.integration import hosts, seams
from megatron_muon.integration.cpu import table as cpu_table
from megatron_muon.integration.install import Layout, install, installation, uninstall
from megatron_muon.integration.patching import Patch
from megatron_muon.optimizer.config import FLAGS, LAYOUTS

ABSENT = object()


@pytest.fixture(autouse=True)
def clean():
    uninstall()
    yield
    uninstall()


@functools.cache
def replaced():
    """Every row that replaces a name, as the tables were before any install()."""
    return [row for row in [*cpu_table(), *seams.table()] if isinstance(row, Patch)]


def held(row):
    holder, leaf = row.holder()
    return vars(holder).get(leaf, ABSENT)


def state():
    """Every replaced name with the object it holds, and what else install() touches."""
    return {row.target: held(row) for row in replaced()}, sys.excepthook, dict(os.environ)


def assert_untouched(before):
    assert differences(before[0]) == set()
    assert dict(os.environ) == before[2]


def differences(names):
    now = state()[0]
    return {name for name, value in names.items() if now[name] is not value}


def test_uninstall_puts_every_object_back():
    before = state()
    install(device="cpu")
    changed = differences(before[0])
    assert "megatron.training.training.OptimizerConfig" in changed
    assert "torch.cuda.current_device" in changed
    uninstall()
    assert_untouched(before)
    assert sys.excepthook is before[1]


def test_a_second_install_changes_nothing():
    from megatron.training import arguments

    install(device="cpu")
    first = arguments.add_megatron_arguments
    install(device="cpu")
    install()
    assert arguments.add_megatron_arguments is first
    uninstall()
    uninstall()
    assert installation() is None
    assert arguments.add_megatron_arguments is not first


def test_a_layout_may_be_named_later_and_stays():
    install(device="cpu")
    install(layout="owner")
    install()
    assert installation().layout == "owner"


def test_install_and_the_flags_know_the_same_layouts():
    assert get_args(Layout) == LAYOUTS


def test_a_second_install_that_asks_for_something_else_is_refused():
    install(device="cpu", optimizer=False)
    with pytest.raises(ConfigurationError, match=r"already installed.*uninstall\(\) first"):
        install(device="cpu")
    assert not installation().optimizer


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"device": "gpu"}, "device='gpu'"),
        ({"device": None}, "device=None"),
        ({"layout": "flatt"}, "layout='flatt'"),
        ({"optimizer": "muon"}, "optimizer='muon'"),
        ({"optimizer": 1}, "optimizer=1"),
    ],
)
def test_a_bad_argument_is_named_with_what_is_legal(arguments, named):
    with pytest.raises(ConfigurationError) as caught:
        install(**arguments)
    assert named in str(caught.value)
    assert "expected" in str(caught.value)
    assert installation() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none_is_refused():
    with pytest.raises(ConfigurationError, match="no CUDA device"):
        install(device="cuda")


def test_without_the_optimizer_only_the_stand_in_is_there():
    from megatron.training import arguments, training

    before = {row.target: held(row) for row in seams.table()}
    install(device="cpu", optimizer=False)
    shared = {
        # The stand-in supplies flags through the same function.
        "megatron.training.arguments.add_megatron_arguments",
        # Each wraps saving and loading for a purpose of its own.
        "megatron.core.dist_checkpointing.load",
        "megatron.core.dist_checkpointing.save",
    }
    assert differences(before) == shared
    assert training.OptimizerConfig.__module__.startswith("megatron.core")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    assert "muon_report" not in [action.dest for action in parser._actions]


def refused(match):
    before = state()
    with pytest.raises(HostError, match=match) as caught:
        install(device="cpu")
    assert installation() is None
    assert_untouched(before)
    return str(caught.value)


def test_an_unknown_distribution_version_is_refused(monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "0.20.0" if name == "megatron-core" else version(name),
    )
    message = refused("Nothing was changed")
    assert "0.20.0" in message
    assert "0.19.2" in message


def test_unknown_code_is_refused_whatever_the_distribution_says(monkeypatch):
    monkeypatch.setattr(hosts, "_code_version", lambda: "0.18.1")
    assert "0.18.1" in refused("knows megatron-core 0.19.2")


def test_a_missing_megatron_core_is_named(monkeypatch):
    monkeypatch.setattr(hosts, "_code_version", lambda: None)
    refused("megatron-core is not installed.*pip install megatron-core==0.19.2")


@pytest.mark.parametrize(
    ("distribution", "version", "needed"),
    [("torch", "2.12.1+cpu", "torch>=2.13"), ("emerging-optimizers", "0.4.0", ">=0.3,<0.4")],
)
def test_another_version_of_a_host_is_refused(monkeypatch, distribution, version, needed):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == distribution else real(name)
    )
    message = refused(f"{distribution} .* is installed")
    assert version in message
    assert needed in message


def test_a_missing_name_is_refused_before_anything_is_replaced(monkeypatch):
    from megatron.training.models import dist_utils

    monkeypatch.delattr(dist_utils, "_ddp_wrap")
    with pytest.raises(HostError) as caught:
        install(device="cpu")
    assert "megatron.training.models.dist_utils._ddp_wrap is missing" in str(caught.value)
    assert installation() is None
    assert torch.cuda.current_device.__module__ == "torch.cuda"


def test_a_missing_name_of_the_stand_in_is_refused_too(monkeypatch):
    from megatron.core.tensor_parallel import random

    monkeypatch.delattr(random, "_get_cuda_rng_state")
    with pytest.raises(HostError, match=r"_get_cuda_rng_state is missing"):
        install(device="cpu", optimizer=False)
    assert torch.cuda.current_device.__module__ == "torch.cuda"


def test_a_changed_signature_is_refused_with_found_and_expected(monkeypatch):
    from megatron.training import arguments

    monkeypatch.setattr(arguments, "validate_args", lambda args, defaults, strict: None)
    message = refused("validate_args")
    assert "takes (args, defaults, strict)" in message
    assert "expected (args, defaults)" in message


def test_a_name_that_is_only_relied_on_is_checked_too(monkeypatch):
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    monkeypatch.setattr(
        DistributedOptimizer, "_compute_per_buffer_param_layout", staticmethod(lambda params: None)
    )
    refused(r"_compute_per_buffer_param_layout takes \(params\)")


def test_every_misfit_is_named_at_once(monkeypatch):
    from megatron.core.optimizer import layer_wise_optimizer
    from megatron.training.models import dist_utils

    monkeypatch.delattr(dist_utils, "_ddp_wrap")
    monkeypatch.setattr(layer_wise_optimizer, "tag_params_for_buffer_routing", lambda: None)
    with pytest.raises(HostError) as caught:
        install(device="cpu")
    assert "_ddp_wrap" in str(caught.value)
    assert "tag_params_for_buffer_routing takes ()" in str(caught.value)


def test_a_failure_half_way_leaves_nothing_behind(monkeypatch):
    from megatron_muon.integration import factory

    def broken(original):
        raise RuntimeError("half way")

    before = state()
    monkeypatch.setattr(factory, "builds_muon", broken)
    with pytest.raises(RuntimeError, match="half way"):
        install(device="cpu")
    monkeypatch.undo()
    assert installation() is None
    assert_untouched(before)


def test_names_imported_before_install_are_served(monkeypatch):
    """A script that says `from megatron... import` above its `install()` gets ours all the same."""
    from megatron.core.optimizer import layer_wise_optimizer
    from megatron.training import arguments

    script = types.ModuleType("a_user_script")
    script.tag_params_for_buffer_routing = layer_wise_optimizer.tag_params_for_buffer_routing
    script.validate_args = arguments.validate_args
    script.LayerWiseDistributedOptimizer = stock = (
        layer_wise_optimizer.LayerWiseDistributedOptimizer
    )
    monkeypatch.setitem(sys.modules, "a_user_script", script)
    stock_tag = script.tag_params_for_buffer_routing
    install(device="cpu")
    assert script.LayerWiseDistributedOptimizer is megatron_muon.LayerWiseMuonOptimizer
    assert (
        script.tag_params_for_buffer_routing is layer_wise_optimizer.tag_params_for_buffer_routing
    )
    assert script.validate_args.__wrapped__ is not script.validate_args
    # Our own subclass keeps the class it derives from.
    assert megatron_muon.LayerWiseMuonOptimizer.__mro__[1] is stock
    uninstall()
    assert script.tag_params_for_buffer_routing is stock_tag
    assert script.LayerWiseDistributedOptimizer is stock


@pytest.mark.parametrize("optimizer", ["muon", "dist_muon"])
def test_install_after_the_command_line_was_parsed_is_refused(monkeypatch, optimizer):
    from megatron.training import global_vars

    monkeypatch.setattr(
        global_vars,
        "_GLOBAL_ARGS",
        argparse.Namespace(optimizer=optimizer, muon_tp_mode="blockwise"),
    )
    with pytest.raises(ConfigurationError, match="after Megatron had parsed its command line"):
        install(device="cpu")
    assert installation() is None


def parsed_with_our_flags():
    ours = {flag.removeprefix("--").replace("-", "_"): None for flag in FLAGS}
    return argparse.Namespace(optimizer="muon", **ours)


@pytest.mark.parametrize(
    "parsed",
    [argparse.Namespace(optimizer="adam"), parsed_with_our_flags()],
    ids=["another optimizer", "parsed with our flags"],
)
def test_install_after_the_command_line_is_fine_where_nothing_is_lost(monkeypatch, parsed):
    from megatron.training import global_vars

    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", parsed)
    install(device="cpu")
    assert installation() is not None


def test_the_environment_of_the_user_wins_and_comes_back(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    install(device="cpu")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    uninstall()
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    install(device="cpu")
    uninstall()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


@pytest.mark.gpu
def test_with_a_gpu_nothing_of_torch_is_replaced():
    before = {row.target: held(row) for row in replaced() if row.module.startswith("torch")}
    install()
    assert differences(before) == set()
    assert not installation().on_cpu
