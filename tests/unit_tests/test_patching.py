"""A table is put in force as a whole or not at all, and what is put back is the very object."""

import functools
import sys
import types

import pytest

from megatron_muon.integration.patching import Patch, PatchSet

ABSENT = object()
MODULE = "a_module_to_patch"


class Parent:
    def inherited(self):
        return "parent"


class Child(Parent):
    def own(self):
        return "child"

    @staticmethod
    def static():
        return "static"

    @classmethod
    def of_class(cls):
        return cls.__name__


@pytest.fixture(autouse=True)
def module(monkeypatch):
    """A module with every kind of name that a row can replace."""
    holder = types.ModuleType(MODULE)
    holder.function = lambda: "original"
    holder.other = object()
    holder.Child = type("Child", Child.__bases__, dict(vars(Child)))
    holder.registry = {"muon": object()}
    monkeypatch.setitem(sys.modules, MODULE, holder)
    return holder


NAMES = (
    "function",
    "Child",
    "Child.own",
    "Child.static",
    "Child.of_class",
    "Child.inherited",
    "registry.muon",
    "absent",
)


def row(name, replace=None, module=MODULE):
    return Patch(
        module=module,
        name=name,
        replace=replace or (lambda original: object()),
        why="a test",
        needed_by="core/x.py:y",
    )


@functools.cache
def holders(module):
    """Where each name lies, found before anything is replaced."""
    return {name: row(name).holder() for name in NAMES}


def held():
    """What each name holds itself, without what it inherits."""
    found = holders(sys.modules[MODULE])
    return {name: vars(holder).get(leaf, ABSENT) for name, (holder, leaf) in found.items()}


def same(before, after):
    return all(before[name] is after[name] for name in before)


class Broken:
    """A row that cannot be put in force."""

    target = why = needed_by = "a test"

    def __init__(self, error):
        self.error = error

    def apply(self):
        raise self.error


class Forgetful(PatchSet):
    """Mutant: a failure leaves what was replaced until then."""

    def apply(self):
        for row in self.rows:
            self._undo.append(row.apply())


class Copying(Patch):
    """Mutant: puts back something that does the same, not the object that was there."""

    def apply(self):
        holder, leaf = self.holder()
        value = getattr(holder, leaf)
        setattr(holder, leaf, self.replace(value))
        return lambda: setattr(holder, leaf, lambda: value())


@pytest.mark.parametrize("name", NAMES)
def test_the_very_object_is_put_back(name):
    before = held()
    table = PatchSet([row(name)])
    table.apply()
    assert table.applied
    assert not same(before, held())
    table.revert()
    assert not table.applied
    assert same(before, held())


def test_the_check_notices_an_equal_object_put_back():
    before = held()
    mutant = Copying(module=MODULE, name="function", replace=lambda f: f, why="", needed_by="")
    table = PatchSet([mutant])
    table.apply()
    table.revert()
    assert not same(before, held())


def test_a_table_can_be_used_again_and_twice_is_once():
    before = held()
    table = PatchSet([row(name) for name in NAMES if name != "Child"])
    for _ in range(2):
        table.apply()
        now = held()
        table.apply()
        assert same(now, held())
        table.revert()
        table.revert()
        assert same(before, held())


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("position", range(len(NAMES) + 1))
def test_a_failure_half_way_puts_everything_back(position, error):
    before = held()
    rows = [row(name) for name in reversed(NAMES)]
    rows.insert(position, Broken(error))
    table = PatchSet(rows)
    with pytest.raises(type(error)):
        table.apply()
    assert not table.applied
    assert same(before, held())


@pytest.mark.parametrize(
    "broken",
    [
        row("function", module="no_such_module"),
        row("no_such_class.function"),
        row("other", replace=lambda original: original.no_such_attribute),
    ],
    ids=["module", "holder", "replacement"],
)
def test_a_row_that_cannot_be_applied_changes_nothing(broken):
    before = held()
    with pytest.raises((ImportError, AttributeError)):
        PatchSet([row("function"), broken]).apply()
    assert same(before, held())


def test_the_check_notices_a_table_that_forgets_to_put_back():
    before = held()
    with pytest.raises(ValueError, match="no"):
        Forgetful([row("function"), Broken(ValueError("no"))]).apply()
    assert not same(before, held())


def test_rows_on_one_name_stack_and_unwind(module):
    before = held()
    add = [row("function", lambda f, n=n: lambda: f"{f()} {n}") for n in (1, 2)]
    table = PatchSet(add)
    table.apply()
    assert module.function() == "original 1 2"
    table.revert()
    assert same(before, held())


def test_two_tables_unwind_in_reverse_order(module):
    before = held()
    first, second = (PatchSet([row("function")]) for _ in range(2))
    first.apply()
    with_first = held()
    second.apply()
    second.revert()
    assert same(with_first, held())
    first.revert()
    assert same(before, held())


def test_an_inherited_name_is_set_on_the_child_alone(module):
    table = PatchSet([row("Child.inherited", lambda f: lambda self: f"not {f(self)}")])
    table.apply()
    assert module.Child().inherited() == "not parent"
    assert Parent().inherited() == "parent"
    table.revert()
    assert "inherited" not in vars(module.Child)
    assert module.Child().inherited() == "parent"


def test_what_is_missing_is_handed_over_as_none_and_removed_again(module):
    seen = []
    table = PatchSet([row("absent", lambda original: seen.append(original) or 1)])
    table.apply()
    assert seen == [None]
    assert module.absent == 1
    table.revert()
    assert not hasattr(module, "absent")
