"""A message is said once a job, and reaches the user whatever happens to the store."""

import os
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_muon.errors import ConfigurationError, MuonError
from megatron_muon.integration import messages
from megatron_muon.testing.ranks import run_ranks


def speak():
    """Say what every rank says, then fail with this rank's own message."""
    messages.say_error("all say this")
    try:
        messages.fail(f"only rank {os.environ['RANK']}")
    except SystemExit as end:
        return end.code


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


@pytest.fixture
def agent(monkeypatch):
    """Stand for torchrun's agent: its store, and the variables that lead to it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }.items():
        monkeypatch.setenv(name, value)
    return store


def test_fail_says_one_line_and_ends_with_2(alone, capsys):
    with pytest.raises(SystemExit) as caught:
        messages.fail("no such thing")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "megatron-muon: error: no such thing\n"


@pytest.mark.distributed
def test_ranks_say_a_common_message_once_and_their_own_each(agent, tmp_path):
    environment = {
        name: os.environ[name]
        for name in (
            "TORCHELASTIC_USE_AGENT_STORE",
            "TORCHELASTIC_RESTART_COUNT",
            "MASTER_ADDR",
            "MASTER_PORT",
        )
    }
    codes = run_ranks(
        speak, 3, timeout_s=60, environment=environment, logs=tmp_path, process_group=False
    )
    said = "".join(path.read_text() for path in tmp_path.glob("rank*.log"))
    assert said.count("all say this") == 1
    assert [said.count(f"only rank {rank}") for rank in range(3)] == [1, 1, 1]
    assert codes == [2, 2, 2]


def test_the_same_message_is_said_again_after_a_restart(agent, monkeypatch, capsys):
    messages.say_error("again")
    messages.say_error("again")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    messages.say_error("again")
    assert capsys.readouterr().err.count("again") == 2


def test_a_message_is_said_if_its_first_speaker_died(agent, monkeypatch, capsys):
    monkeypatch.setattr(messages, "_STORE_TIMEOUT", timedelta(milliseconds=200))

    def die(message):
        raise SystemExit

    with monkeypatch.context() as dying:
        dying.setattr(messages, "_say", die)
        with pytest.raises(SystemExit):
            messages.say_error("dying words")
    messages.say_error("dying words")
    assert capsys.readouterr().err.count("dying words") == 1


def test_a_message_is_said_if_the_store_is_gone(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(messages, "_STORE_TIMEOUT", timedelta(milliseconds=200))
    messages.say_error("still heard")
    assert "still heard" in capsys.readouterr().err


@pytest.fixture
def hooked(alone, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: seen.append(error))
    before = sys.excepthook
    messages.hook_errors()
    messages.hook_errors()
    yield seen
    messages.unhook_errors()
    assert sys.excepthook is before


@pytest.mark.parametrize("error", [MuonError("one line"), ConfigurationError("one line")])
def test_the_hook_shows_our_errors_as_one_line(hooked, capsys, error):
    sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "megatron-muon: error: one line\n"
    assert hooked == []


def test_the_hook_leaves_other_errors_to_the_hook_there_was(hooked, capsys):
    error = ValueError("not ours")
    sys.excepthook(ValueError, error, None)
    assert hooked == [(ValueError, error, None)]
    assert capsys.readouterr().err == ""


def test_unhooking_leaves_a_hook_that_was_set_since(alone, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    messages.hook_errors()
    sys.excepthook = others = lambda *error: None
    messages.unhook_errors()
    assert sys.excepthook is others
