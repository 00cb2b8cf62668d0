"""Optional packages count only if they hold what is used of them."""

import importlib.util
import sys

import pytest

from megatron_muon.integration.capabilities import capabilities

OPTIONAL = ("transformer_engine", "apex", "amp_C")


@pytest.fixture
def install_fake(tmp_path, monkeypatch):
    """Return a function that writes a module into an otherwise empty world of such packages."""
    for name in list(sys.modules):
        if name.partition(".")[0] in OPTIONAL:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)

    def write(module, source):
        path = tmp_path.joinpath(*module.split("."))
        path.mkdir(parents=True, exist_ok=True)
        for folder in (path, *path.relative_to(tmp_path).parents):
            init = tmp_path / folder / "__init__.py"
            if init.parent != tmp_path:
                init.touch()
        (path / "__init__.py").write_text(source)
        importlib.invalidate_caches()

    yield write
    for name in list(sys.modules):
        if name.partition(".")[0] in OPTIONAL:
            del sys.modules[name]


def found():
    return {capability.name: capability.found for capability in capabilities()}


def lines():
    return [str(capability) for capability in capabilities()]


TE = ("transformer_engine.pytorch.optimizers", "FusedAdam = multi_tensor_applier = object()")
APEX = (("apex.optimizers", "FusedAdam = object()"), ("amp_C", "multi_tensor_scale = object()"))


def test_transformer_engine_is_found_by_what_is_used_of_it(install_fake):
    install_fake(*TE)
    assert found() == {"Transformer Engine": True, "Apex": False}
    assert lines()[0] == (
        "Transformer Engine: found, used for fused Adam, multi-tensor copies and norms"
    )
    assert lines()[1] == "Apex: not found, Transformer Engine instead"


def test_apex_is_found_by_what_is_used_of_it(install_fake):
    for fake in APEX:
        install_fake(*fake)
    assert found() == {"Transformer Engine": False, "Apex": True}
    assert lines()[0] == "Transformer Engine: not found, Apex instead"


def test_where_both_are_found_the_line_says_which_is_used(install_fake):
    for fake in (TE, *APEX):
        install_fake(*fake)
    assert found() == {"Transformer Engine": True, "Apex": True}
    assert lines()[1] == "Apex: found, used for nothing, since Transformer Engine comes first"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("apex", "application = 'the package of this name on PyPI'"),
        ("apex", "raise SyntaxError('written for another Python')"),
        ("apex.optimizers", ""),
        ("transformer_engine", ""),
        ("transformer_engine", "raise OSError('libcudnn.so.9: cannot open')"),
        ("transformer_engine.pytorch.optimizers", "FusedAdam = object()"),
    ],
)
def test_a_package_without_what_is_used_of_it_does_not_count(install_fake, module, source):
    install_fake(module, source)
    assert found() == {"Transformer Engine": False, "Apex": False}
    assert all(line.endswith("not found, torch instead") for line in lines())


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="no Transformer Engine"
)
def test_megatron_uses_the_transformer_engine_that_the_line_names():
    import megatron.core.optimizer as megatron_optimizer
    from transformer_engine.pytorch.optimizers import FusedAdam

    assert found()["Transformer Engine"]
    assert megatron_optimizer.Adam is FusedAdam


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("amp_C") is None, reason="no NVIDIA Apex")
def test_megatron_uses_the_apex_that_the_line_names():
    import megatron.core.optimizer as megatron_optimizer
    from apex.optimizers import FusedAdam

    assert found()["Apex"]
    assert found()["Transformer Engine"] or megatron_optimizer.Adam is FusedAdam
