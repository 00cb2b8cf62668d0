"""Every public name can be imported and says what it does."""

import ast
import inspect
from pathlib import Path

import pytest

import megatron_muon
from megatron_muon import errors

PACKAGE = Path(megatron_muon.__file__).parent


def undocumented(source):
    """Return the public classes, functions and methods of a source that have no docstring."""
    missing = []

    def visit(node, path):
        for child in node.body:
            named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if not named or child.name.startswith("_"):
                continue
            name = f"{path}{child.name}"
            if ast.get_docstring(child) is None and not _is_setter(child):
                missing.append(name)
            if isinstance(child, ast.ClassDef):
                visit(child, f"{name}.")

    tree = ast.parse(source)
    if ast.get_docstring(tree) is None and tree.body:
        missing.append("the module")
    visit(tree, "")
    return missing


def _is_setter(node):
    return any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in node.decorator_list)


def test_every_public_name_has_a_docstring():
    missing = {
        str(path.relative_to(PACKAGE)): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if (names := undocumented(path.read_text()))
    }
    assert missing == {}


@pytest.mark.parametrize(
    "source",
    [
        "def f(): pass",
        '"""M."""\ndef f(): pass',
        '"""M."""\nclass A:\n  "A."\n  def f(self): pass',
        '"""M."""\nasync def f(): pass',
    ],
)
def test_a_missing_docstring_is_seen(source):
    assert undocumented(source)


def test_private_names_need_none():
    assert undocumented('"""M."""\ndef _f(): pass\nclass _A:\n  def f(self): pass') == []


@pytest.mark.parametrize("name", megatron_muon.__all__)
def test_a_public_name_can_be_imported(name):
    value = getattr(megatron_muon, name)
    assert name in dir(megatron_muon)
    if name != "__version__":
        assert inspect.getdoc(value)
        assert value.__name__ == name


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Muonn'"):
        _ = megatron_muon.Muonn


def test_every_error_can_be_caught_as_ours_and_as_python_s_own():
    kinds = {
        errors.ConfigurationError: ValueError,
        errors.UnsupportedError: NotImplementedError,
        errors.PlanError: RuntimeError,
        errors.HostError: ImportError,
    }
    for kind, builtin in kinds.items():
        assert issubclass(kind, errors.MuonError)
        assert issubclass(kind, builtin)
        assert str(kind("what was wrong")) == "what was wrong"
