"""The launcher's parts: the path, the new `__main__`, and tracebacks without our frames."""

import os
import sys
import traceback

import pytest

from megatron_muon.integration import launch

SEAM = os.path.join(os.path.dirname(launch.__file__), "arguments.py")


@pytest.fixture
def path(monkeypatch):
    """Return a function that starts from a `sys.path` and gives what the script finds."""

    def of(entries, argv0="/opt/bin/megatron-muon"):
        monkeypatch.setattr(sys, "path", list(entries))
        monkeypatch.setattr(sys, "argv", [argv0])
        launch._lead_path_with("/home/user/scripts")
        return sys.path

    return of


@pytest.mark.skipif(sys.flags.safe_path, reason="python -P leaves the path alone")
def test_the_script_s_folder_takes_the_place_of_the_launcher_s(path):
    scripts = "/home/user/scripts"
    assert path([os.getcwd(), "/lib"]) == [scripts, "/lib"]  # python -m
    assert path(["", "/lib"]) == [scripts, "/lib"]  # python -c
    assert path(["/opt/bin", "/lib"]) == [scripts, "/lib"]  # the console script
    assert path(["/lib"]) == [scripts, "/lib"]
    assert path([]) == [scripts]


def raised(function):
    """Call a function as the launcher calls a script; return the exception, cleaned."""
    names = {"function": function}
    source = """
def run():
    try:
        seam()
    except Exception as error:
        return error
"""
    exec(compile(source, launch.__file__, "exec"), names)
    exec(compile("def seam(): function()", SEAM, "exec"), names)
    error = names["run"]()
    launch._remove_own_frames(error)
    return error


def script_fails():
    raise ValueError("in the script")


def files(error):
    return [os.path.basename(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]


def test_frames_of_the_launcher_and_of_the_seams_are_removed():
    assert files(raised(script_fails)) == ["test_launch.py"]


def test_causes_and_groups_lose_them_too():
    inner = raised(script_fails)

    def script():
        try:
            names = {"function": script_fails}
            exec(compile("def seam(): function()", SEAM, "exec"), names)
            names["seam"]()
        except ValueError as error:
            raise ExceptionGroup("several", [error, inner]) from error

    error = raised(script)
    assert files(error) == ["test_launch.py"]
    assert files(error.__cause__) == ["test_launch.py", "test_launch.py"]
    assert files(error.exceptions[1]) == ["test_launch.py"]


def test_an_error_of_our_own_keeps_the_frames_that_show_where():
    own = os.path.join(os.path.dirname(launch.__file__), "factory.py")
    names = {}
    exec(compile("def fault(): raise KeyError('a bug of ours')", own, "exec"), names)
    assert files(raised(names["fault"])) == ["arguments.py", "factory.py"]


def test_an_exception_that_is_its_own_cause_is_no_endless_loop():
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    assert {id(link) for link in launch._chain(first)} == {id(first), id(second)}


def test_the_new_main_is_the_module_of_that_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    module = launch._new_main("/home/user/s.py")
    assert sys.modules["__main__"] is module
    assert module.__name__ == "__main__"
    assert module.__file__ == "/home/user/s.py"
    assert module.__spec__ is None
    assert module.__package__ is None
