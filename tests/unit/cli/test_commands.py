"""Whatever is wrong with a call, one line says so."""

from __future__ import annotations

import sys

import pytest

from tiercheck.agent.protocol.settings import AgentSettings
from tiercheck.agent.server import process
from tiercheck.cli import commands


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls"], "Missing argument 'urls' (see: tiercheck ls --help)"),
        (["lss"], "No such command 'lss'"),
        (["ls", "nvme:///x", "--foo"], "No such option: --foo"),
        (["demo", "--zero", "9"], "Invalid value for '--zero'"),
        (["ls", "/mnt/run"], "'/mnt/run' is no tier URL: it has no scheme, such as nvme:///mnt/run"),
        (["ls", "s4://bucket"], "there is no driver s4://"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_a_wrong_call_is_told_in_one_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tiercheck", *words])
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        commands.run()
    out, error = capsys.readouterr()
    assert (ended.value.code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: ")
    assert said in error


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["plugins", "--json"], 0), ([], 2)])
def test_a_right_call_ends_as_it_always_did(
    words: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a word the help is printed."""
    monkeypatch.setattr(sys, "argv", ["tiercheck", *words])
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        commands.run()
    said = capsys.readouterr()
    assert ended.value.code == code
    assert "error" not in said.err
    assert said.out


def test_the_agent_is_told_by_option_or_environment_what_folds_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[AgentSettings] = []
    monkeypatch.setattr(process, "run_agent", told.append)
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)
    for words in ([], ["--fold-threads", "2"]):
        monkeypatch.setattr(sys, "argv", ["tiercheck", "agent", *words])
        with pytest.raises(SystemExit) as ended:
            commands.run()
        assert ended.value.code == 0
        monkeypatch.setenv("TIERCHECK_FOLD_CPUS", "0-3")
        monkeypatch.setenv("TIERCHECK_FOLD_THREADS", "7")
    assert [(each.fold_threads, each.fold_cpus) for each in told] == [(None, ""), (2, "0-3")]
