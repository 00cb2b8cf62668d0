"""The seam table fits the installed Megatron and says all a reader needs."""

import re

import pytest

from megatron_muon.errors import HostError
from megatron_muon.integration import cpu, seams
from megatron_muon.integration.patching import Patch
from megatron_muon.integration.seams import Expected, Seam


def test_the_installed_megatron_fits_the_tables():
    seams.check(seams.table())
    seams.check(cpu.table())


def test_every_row_says_why_and_which_upstream_code_needs_it():
    for row in seams.table():
        assert row.why, row.target
        path, _, symbol = row.needed_by.partition(":")
        assert re.fullmatch(r"(core|training)/[\w/]+\.py", path), row.needed_by
        assert symbol, row.needed_by


def test_the_upstream_code_a_row_names_exists():
    import importlib

    for row in seams.table():
        path, _, symbol = row.needed_by.partition(":")
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        assert hasattr(importlib.import_module(f"megatron.{module}"), symbol), row.needed_by


def test_no_name_is_replaced_twice_in_one_table():
    for table in (seams.table(), cpu.table()):
        targets = [row.target for row in table]
        assert len(targets) == len(set(targets))


def test_everything_that_is_called_is_checked_by_its_parameters():
    assert [row.target for row in seams.table() if row.expected is None] == []


def row(name, expected=None, module="collections"):
    return Seam(
        module=module,
        name=name,
        replace=lambda value: value,
        why="a test",
        needed_by="core/x.py:y",
        expected=expected,
    )


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (row("no_such_name"), "collections.no_such_name is missing"),
        (row("x", module="no_such_module"), "no_such_module.x cannot be reached"),
        (row("OrderedDict.absent.deeper"), "OrderedDict.absent.deeper cannot be reached"),
        (row("namedtuple", Expected(("typename",))), "expected (typename)"),
        (row("namedtuple", Expected(("typename", "colour"), at_least=True)), "(typename, colour, "),
    ],
)
def test_a_row_that_does_not_fit_is_refused(bad, said):
    with pytest.raises(HostError) as caught:
        seams.check([bad])
    assert said in str(caught.value)
    assert "nothing was changed" in str(caught.value)


def test_rows_that_fit_are_not_refused():
    seams.check([row("namedtuple", Expected(("typename", "defaults"), at_least=True))])
    seams.check([row("namedtuple")])


def test_a_name_outside_megatron_may_be_missing_in_the_stand_in():
    absent = Patch(
        module="collections", name="absent", replace=lambda value: 1, why="w", needed_by="n"
    )
    seams.check([absent])


def test_the_description_has_every_row():
    table = seams.table()
    shown = seams.describe(table)
    for line in table:
        assert f"{line.target}\n    why: {line.why}\n" in shown
    assert shown.count("checked: ") == len(table)
