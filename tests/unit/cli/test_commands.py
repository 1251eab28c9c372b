"""Whatever is wrong with a call, one line says so."""

from __future__ import annotations

import sys

import pytest

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
