"""The set-up that the two commands share: scripts/lib, run by bash itself.

Installing the real packages takes minutes, so a stand-in plays the Python that is found: it
answers what the set-up asks of a Python, makes an environment that holds itself, and notes each
call of pip.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_muon.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash") or "bash"
TOOLS = "/usr/bin:/bin"

STAND_IN = """\
#!/bin/bash
# Made with the answer that the set-up's question about the version gets, or "broken".
hang() {{
  touch "$LOG/$1-began"
  while [[ -e "$LOG/$1-hangs" ]]; do sleep 0.02; done
}}
call="$*"
case "$call" in
  *ensurepip*) [[ "{answer}" != broken ]] || exit 127; echo "{answer}" ;;
  "-m venv "*)
    echo "venv" >>"$LOG/calls"
    mkdir -p "$3/bin"
    touch "$3/bin/half"
    hang venv
    mv "$3/bin/half" "$3/bin/whole"
    cp "$0" "$3/bin/python" ;;
  *"import pip, sys"*) cut -d. -f1,2 <<<"{answer}" ;;
  *"get_path"*) dirname "$(dirname "$0")" ;;
  *"-m pip "*)
    echo "pip ${{call#* --quiet --quiet }}" >>"$LOG/calls"
    touch "$TMPDIR/of-pip"
    hang pip
    [[ ! -e "$LOG/pip-fails" ]] || exit 1 ;;
  *prepare_text.py*) echo "prepare" >>"$LOG/calls"; touch "${{!#}}.bin" "${{!#}}.idx" ;;
  *) exit 99 ;;
esac
"""


class Checkout:
    """A copy of the set-up in a folder of its own, and a stand-in for Python."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        self.log = folder / "log"
        self.home = folder / "home"
        self.log.mkdir()
        self.home.mkdir()
        shutil.copytree(ROOT / "scripts" / "lib", self.root / "scripts" / "lib")
        (self.root / "requirements.lock").write_text("torch==2.13.0\n")
        (self.root / "pyproject.toml").write_text("[project]\n")
        script = self.root / "scripts" / "script.sh"
        script.write_text(
            'set -euo pipefail\nsource "$(dirname "${BASH_SOURCE[0]}")/lib/setup.sh"\neval "$1"\n'
        )
        self.python = self.add_python(folder / "pythons" / "good", "3.12.4;")

    @staticmethod
    def add_python(path: Path, answer: str) -> Path:
        """A stand-in at `path` that gives this answer."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STAND_IN.format(answer=answer))
        path.chmod(0o755)
        return path

    def start(self, command: str, **environment: str) -> subprocess.Popen[str]:
        """Run shell code with the set-up sourced, from a folder that is not the checkout."""
        return subprocess.Popen(
            [BASH, str(self.root / "scripts" / "script.sh"), command],
            cwd=self.home,
            env={
                "PATH": TOOLS,
                "HOME": str(self.home),
                "LOG": str(self.log),
                "MEGATRON_MUON_PYTHON": str(self.python),
            }
            | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """The same, to its end."""
        process = self.start(command, **environment)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def calls(self) -> list[str]:
        """What the stand-in was asked to do since the last time."""
        path = self.log / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    @property
    def stamp(self) -> Path:
        """The note that is written when everything is installed."""
        return self.root / ".venv" / ".megatron-muon" / "stamp"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        time.sleep(0.01)


LOCK = "pip --no-deps --only-binary :all: --requirement"
PACKAGE = "pip --no-deps --no-index --no-build-isolation --editable ."
SETUP_CALLS = ["venv", "pip", "pip"]


def kinds(calls: list[str]) -> list[str]:
    return [call.split()[0] for call in calls]


# --- which Python -------------------------------------------------------------------------------


def find(checkout: Checkout, path: str = "", **environment: str) -> subprocess.CompletedProcess:
    """Let it look on `path` only; /opt and /usr/local are those of the machine."""
    environment = {"MEGATRON_MUON_PYTHON": "", "PATH": f"{path}:{TOOLS}", **environment}
    return checkout.run('find_python; echo "$PYTHON_VERSION $PYTHON"', **environment)


def test_a_real_python_is_probed_by_running_it(checkout: Checkout) -> None:
    code = f'probe_python "{sys.executable}"; echo "$PYTHON_VERSION"'
    version = ".".join(map(str, sys.version_info[:3]))
    assert checkout.run(code).stdout.strip() == version


def test_a_shim_that_does_not_run_is_passed_over(checkout: Checkout, tmp_path: Path) -> None:
    checkout.add_python(tmp_path / "shims" / "python3.12", "broken")
    pyenv = checkout.add_python(
        checkout.home / ".pyenv" / "versions" / "3.13.1" / "bin" / "python3.13", "3.13.1;"
    )
    assert find(checkout, str(tmp_path / "shims")).stdout.strip() == f"3.13.1 {pyenv}"


def test_a_python_newer_than_the_pinned_packages_comes_last(
    checkout: Checkout, tmp_path: Path
) -> None:
    checkout.add_python(tmp_path / "path" / "python3", "3.15.0;")
    uv = checkout.add_python(
        checkout.home / ".local/share/uv/python/cpython-3.14/bin/python3.14", "3.14.2;"
    )
    assert find(checkout, str(tmp_path / "path")).stdout.strip() == f"3.14.2 {uv}"


def test_the_environment_is_not_made_from_itself(checkout: Checkout, tmp_path: Path) -> None:
    own = checkout.add_python(checkout.root / ".venv" / "bin" / "python3.12", "3.12.1;")
    other = checkout.add_python(tmp_path / "path" / "python3.12", "3.12.2;")
    assert find(checkout, f"{own.parent}:{other.parent}").stdout.strip() == f"3.12.2 {other}"


def test_no_python_says_what_is_needed_and_what_was_found(
    checkout: Checkout, tmp_path: Path
) -> None:
    old = checkout.add_python(tmp_path / "path" / "python3", "3.11.2;too old")
    shim = checkout.add_python(tmp_path / "path" / "python3.13", "broken")
    listed = f'list_pythons() {{ printf "%s\\n" "{shim}" "{old}"; }}; find_python'
    result = checkout.run(listed, MEGATRON_MUON_PYTHON="")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "needs Python 3.12 or newer" in result.stderr
    assert f"{shim} (does not run); {old} (3.11.2, too old)" in result.stderr
    assert "MEGATRON_MUON_PYTHON" in result.stderr


def test_the_override_is_not_replaced_by_another(checkout: Checkout, tmp_path: Path) -> None:
    old = checkout.add_python(tmp_path / "old", "3.10.0;too old")
    result = find(checkout, MEGATRON_MUON_PYTHON=str(old))
    assert result.returncode == 1
    assert f"MEGATRON_MUON_PYTHON is {old} (3.10.0, too old)" in result.stderr


# --- the environment ----------------------------------------------------------------------------


def test_the_environment_is_made_once(checkout: Checkout) -> None:
    first = checkout.run("ensure_environment")
    assert first.returncode == 0, first.stderr
    calls = checkout.calls()
    assert kinds(calls) == SETUP_CALLS
    assert calls[1].startswith(LOCK)
    assert calls[2] == PACKAGE
    second = checkout.run("ensure_environment")
    assert (second.returncode, second.stderr, checkout.calls()) == (0, "", [])
    assert sorted(path.name for path in (checkout.root / ".cache").iterdir()) == ["setup.lock"]


def test_only_what_changed_is_installed_again(checkout: Checkout) -> None:
    checkout.run("ensure_environment")
    checkout.calls()
    (checkout.root / "pyproject.toml").write_text("[project]\n# changed\n")
    checkout.run("ensure_environment")
    assert checkout.calls() == [PACKAGE]
    (checkout.root / "requirements.lock").write_text("torch==2.13.1\n")
    checkout.run("ensure_environment")
    assert kinds(checkout.calls()) == ["pip", "pip"]


def test_a_checkout_that_moved_is_installed_from_where_it_is(checkout: Checkout) -> None:
    checkout.run("ensure_environment")
    checkout.calls()
    checkout.root = checkout.root.rename(checkout.root.parent / "moved")
    assert checkout.run("ensure_environment").returncode == 0
    assert checkout.calls()[-1] == PACKAGE


def test_a_failed_installation_is_not_taken_for_done(checkout: Checkout) -> None:
    (checkout.log / "pip-fails").touch()
    failed = checkout.run("ensure_environment")
    assert failed.returncode == 1
    assert "run it again" in failed.stderr
    assert not checkout.stamp.exists()
    (checkout.log / "pip-fails").unlink()
    checkout.calls()
    assert checkout.run("ensure_environment").returncode == 0
    assert kinds(checkout.calls()) == ["pip", "pip"]


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP"])
def test_an_interrupted_installation_leaves_nothing_at_work(checkout: Checkout, name: str) -> None:
    (checkout.log / "pip-hangs").touch()
    process = checkout.start("ensure_environment")
    wait_for((checkout.log / "pip-began").exists)
    began = time.monotonic()
    number = signal.Signals[f"SIG{name}"]
    process.send_signal(number)
    # Both pipes end only when all that held them has ended.
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 5
    assert process.returncode == -number
    assert "interrupted" in err
    assert not (checkout.root / ".cache" / "scratch").exists()
    assert not checkout.stamp.exists()


def test_an_interrupted_installation_goes_on(checkout: Checkout) -> None:
    (checkout.log / "pip-hangs").touch()
    process = checkout.start("ensure_environment")
    wait_for((checkout.log / "pip-began").exists)
    process.terminate()
    process.communicate(timeout=60)
    (checkout.log / "pip-hangs").unlink()
    checkout.calls()
    # pip writes RECORD last: the first of these was cut off, the second was not.
    cut_off = checkout.root / ".venv" / "torch-2.13.0.dist-info"
    whole = checkout.root / ".venv" / "numpy-2.5.5.dist-info"
    for folder in (cut_off, whole):
        folder.mkdir()
        (folder / "METADATA").touch()
    (whole / "RECORD").touch()
    assert checkout.run("ensure_environment").returncode == 0
    assert not cut_off.exists()
    assert whole.exists()
    assert kinds(checkout.calls()) == ["pip", "pip"]


def test_a_half_made_environment_is_made_anew(checkout: Checkout) -> None:
    (checkout.log / "venv-hangs").touch()
    process = checkout.start("ensure_environment")
    wait_for((checkout.log / "venv-began").exists)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    (checkout.log / "venv-hangs").unlink()
    checkout.calls()
    assert (checkout.root / ".venv" / "bin" / "half").exists()
    assert checkout.run("ensure_environment").returncode == 0
    assert not (checkout.root / ".venv" / "bin" / "half").exists()
    assert kinds(checkout.calls()) == SETUP_CALLS


def test_an_environment_of_the_users_own_is_used_and_never_removed(checkout: Checkout) -> None:
    python = checkout.add_python(checkout.root / ".venv" / "bin" / "python", "3.13.0;")
    assert checkout.run("ensure_environment").returncode == 0
    assert kinds(checkout.calls()) == ["pip", "pip"]
    shutil.rmtree(checkout.root / ".venv")
    checkout.add_python(python, "3.11.0;too old")
    refused = checkout.run("ensure_environment")
    assert refused.returncode == 1
    assert "Python 3.11" in refused.stderr
    assert python.exists()
    assert checkout.calls() == []


def test_two_runs_at_once_install_once(checkout: Checkout) -> None:
    (checkout.log / "pip-hangs").touch()
    first = checkout.start("ensure_environment")
    wait_for((checkout.log / "pip-began").exists)
    second = checkout.start("ensure_environment")
    assert second.stderr is not None
    assert "waiting" in second.stderr.readline()
    (checkout.log / "pip-hangs").unlink()
    for process in (first, second):
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert kinds(checkout.calls()) == SETUP_CALLS


# --- the text -----------------------------------------------------------------------------------


def test_the_text_is_prepared_once_and_again_when_its_program_changes(checkout: Checkout) -> None:
    (checkout.root / ".cache" / "shakespeare").mkdir(parents=True)
    program = checkout.root / "megatron_muon" / "tools" / "prepare_text.py"
    program.parent.mkdir(parents=True)
    program.write_text("one")
    both = "ensure_environment; ensure_text"
    assert checkout.run(both).returncode == 0
    assert checkout.calls()[-1] == "prepare"
    assert checkout.run(both).returncode == 0
    assert checkout.calls() == []
    program.write_text("two")
    checkout.run(both)
    assert checkout.calls() == ["prepare"]


# --------------------------------------------------------------------------------------------
# The measuring scripts
# --------------------------------------------------------------------------------------------


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scripts be imported, here and by forked ranks."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.mark.parametrize(
    ("value", "status", "met"),
    [(0.1, 0, [True, True]), (0.2, 0, [True, False]), (0.4, 1, [False, False])],
)
def test_a_limit_decides_the_exit_status_and_one_to_reach_does_not(
    value, status, met, scripts, tmp_path, capsys
):
    import benchlib

    def measure(quick):
        yield from benchlib.rows_of("without a limit", 7.0)
        yield from benchlib.rows_of("a ratio", value, 0.3, 0.15)

    file = tmp_path / "rows.json"
    arguments = ["--json", str(file), "--markdown"]
    assert benchlib.main(measure, "Measure.\n\nMore.", "less", arguments) == status
    free, limit, reach = json.loads(file.read_text())
    assert free == {"name": "without a limit", "value": 7.0, "limit": None, "met": True}
    assert limit == {"name": "a ratio", "value": value, "limit": 0.3, "met": met[0]}
    assert reach == {
        "name": "a ratio", "value": value, "limit": 0.15, "met": met[1], "reach": True,
    }  # fmt: skip
    said = capsys.readouterr().out
    assert said.count("NOT MET") == met.count(False) - said.count("NOT REACHED")
    assert f"| a ratio | {value:.3g} | 0.3" in said


def test_a_table_takes_the_place_of_the_last_one(scripts):
    import benchlib

    text = "a\n<!-- x.py -->\nold\n<!-- end of x.py -->\nb\n<!-- y.py -->\n<!-- end of y.py -->\n"
    once = benchlib.put_into(text, "x.py", "| new |")
    assert once == benchlib.put_into(once, "x.py", "| new |")
    assert once.replace("\n\n| new |\n\n", "\nold\n") == text
    with pytest.raises(ValueError, match=r"no <!-- z\.py -->"):
        benchlib.put_into(text, "z.py", "| new |")


@pytest.mark.parametrize("name", ["step", "memory", "training", "scaling"])
def test_the_document_has_a_place_for_the_table_of_each_script(name, scripts):
    import benchlib

    assert benchlib.put_into(benchlib.DOCUMENT.read_text(), f"bench_{name}.py", "| new |")


def test_a_quick_measurement_is_told_to_be_quick(scripts):
    import benchlib

    asked = []
    benchlib.main(lambda quick: asked.append(quick) or (), "Measure.", "less", ["--quick"])
    benchlib.main(lambda quick: asked.append(quick) or (), "Measure.", "less", [])
    assert asked == [True, False]


def test_peak_scratch_is_the_most_that_was_allocated_at_one_moment(scripts):
    from bench_memory import peak_of

    assert peak_of([4, 4, -4, 2, 5, -11]) == 11
    assert peak_of([-8, 4]) == peak_of([]) == 0


@pytest.mark.distributed
def test_traffic_of_both_optimizers_is_counted_from_outside(scripts):
    """One layer, tensor parallel 2: what each has to receive follows from the shapes."""
    import bench_step
    from benchmodel import Size, Way, stock

    ways = [stock("duplicated", "highest"), stock("distributed", "highest"),
            Way("ours", "owner", "highest")]  # fmt: skip
    hidden = 64
    for calls in run_ranks(bench_step.count, 2, ways, Size(hidden, layers=1, vocab=64), 2):
        within = {
            name: [call for call in found if call.group == "tp"] for name, found in calls.items()
        }
        half = 4 * 12 * hidden * hidden // 2
        assert [c.name for c in within["stock duplicated"]] == ["all_gather"] * 6
        assert sum(c.nbytes for c in within["stock duplicated"]) == half
        # Five Gram matrices and a norm for each of six blocks, of which half comes from the other.
        assert [c.name for c in within["stock distributed"]] == ["all_reduce"] * 36
        assert sum(c.nbytes for c in within["stock distributed"]) == 6 * (
            5 * 4 * hidden * hidden // 2 + 2
        )
        assert [c.name for c in within["ours"]] == ["all_to_all_single"] * 2
        assert sum(c.nbytes for c in within["ours"]) == half


def test_the_table_of_predicted_steps_is_what_the_planner_says(scripts):
    import plan_table

    page = (ROOT / "docs" / "performance.md").read_text()
    _, _, section = page.partition("\n## Scaling, on paper\n")
    documented = [line for line in section.partition("\n## ")[0].splitlines() if "|" in line]
    printed = list(plan_table.table())
    assert len(printed) == 2 + len(plan_table.ROWS)
    assert documented[: len(printed)] == printed, "run scripts/plan_table.py and paste its output"
