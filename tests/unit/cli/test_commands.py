"""Whatever is wrong with a call, one line says so."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.archived import LAST, Left
from tiercheck import cli
from tiercheck.agent.protocol.settings import AgentSettings
from tiercheck.agent.server import process
from tiercheck.archive import archive
from tiercheck.cli import commands
from tiercheck.errors import DeadlineExceeded, TierError, Unauthorized

Ended = tuple[int, dict[str, Any], str]
"""Exit code, what ``--json`` printed, and the line on stderr."""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """A command that fails, with ``--json``: what it says is one line, twice."""
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)

    def run(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["tiercheck", *words, "--json"])
        with pytest.raises(SystemExit) as ended:
            commands.run()
        out, error = capsys.readouterr()
        assert error.startswith("error: ")
        assert error.count("\n") == out.count("\n") == 1
        said = json.loads(out)["error"]
        assert said["message"] == error.removeprefix("error: ").rstrip("\n")
        assert isinstance(ended.value.code, int)
        return ended.value.code, said, error

    return run


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


def test_a_closed_terminal_ends_no_command_that_nohup_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tiercheck", "--version"])
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with pytest.raises(SystemExit):
            commands.run()
        after = signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)
        assert after == (signal.SIG_IGN, commands.end_politely)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


MISSING = "nvme:///proc/missing"
READING = (["ls"], ["show"], ["verify"], ["plan"], ["export", "--to", "NEW"], ["copy", "nvme://NEW"])
CHANGING = (["prune", "--keep-last", "1"], ["rm", "--job"], ["gc"])


def placed(words: list[str], url: str, new: Path) -> list[str]:
    """The command, with the URL where it belongs."""
    command, *rest = (word.replace("NEW", str(new)) for word in words)
    return [command, url, *rest]


@pytest.mark.parametrize("words", [*READING, *CHANGING, ["diff", "1", "2"]], ids=lambda words: str(words[0]))
def test_a_place_that_is_not_there_or_does_not_answer_is_named(
    words: list[str], failing: Callable[..., Ended], tmp_path: Path
) -> None:
    code, said, _ = failing(*placed(words, MISSING, tmp_path / "new"))
    assert (code, said["kind"], said["tier"]) == (1, "NotFound", "nvme:///proc/missing")
    assert "there is no directory /proc/missing" in said["message"]
    code, said, _ = failing(*placed(words, "s4://bucket", tmp_path / "new"))
    assert (code, said["kind"]) == (2, "ConfigurationError")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["show", "99"], "version 99 cannot be read; there are 0..13"),
        (["show", "--generation", "9"], "generation 9"),
        (["show", "--rank", "5"], "rank 5"),
        (["plan", "99"], "version 99 cannot be read"),
        (["plan", "99", "--version", "9"], "the version is given twice: 99, and 9 by --version"),
        (["export", "99", "--to", "NEW"], "version 99 cannot be read"),
        (["export", "--to", "NEW", "--format", "pickle"], "no export format 'pickle'"),
        (["export", "--to", "/proc/model"], "/proc takes no new directory: choose another place"),
        (["copy", "nvme://NEW", "99"], "version 99 cannot be read"),
        (["copy", "/NEW"], "is no tier URL"),
        (["copy", "nvme:///proc/missing"], "/proc/missing"),
        (["diff", "1", "99"], "version 99 cannot be read"),
        (["prune"], "nothing says what to keep"),
        (["prune", "--keep-versions", "a"], "--keep-versions takes numbers"),
        (["prune", "--keep-versions", "99"], "version 99 is to be kept, and cannot be read"),
        (["rm"], "nothing says what to remove"),
        (["rm", "9"], "there is no base 9"),
        (["rm", str(LAST - 1)], "say so (job_is_dead=True, or --job-is-dead)"),
        (["rm", "--generation", "9", "--job-is-dead"], "there is nothing of generation 9"),
        (["rm", "4", "--job"], "choose one"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_what_is_not_there_or_cannot_be_meant_is_named(
    words: list[str], why: str, failing: Callable[..., Ended], finished: Left, tmp_path: Path
) -> None:
    before = sorted(finished.root.rglob("*"))
    code, said, _ = failing(*placed(words, finished.url, tmp_path / "new"))
    assert code in (1, 2)
    assert why in said["message"]
    assert sorted(finished.root.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", [["export", "--to", "NEW"], ["diff", "8", str(LAST)], ["copy", "nvme://NEW"]], ids=str
)
def test_damage_of_which_there_is_no_other_copy_is_named(
    words: list[str], failing: Callable[..., Ended], left: Left, tmp_path: Path
) -> None:
    left.flip(f"r*/g000002/differential/{LAST:012d}-*")
    code, said, _ = failing(*placed(words, left.url, tmp_path / "new"))
    assert (code, said["kind"]) == (1, "RecoveryError")
    assert f"/g000002/differential/{LAST:012d}" in said["message"]
    assert not list(tmp_path.glob("*new*")) or words[0] == "copy"


@pytest.mark.parametrize(
    ("raised", "code", "kind", "why"),
    [
        (
            Unauthorized("it refuses this caller", tier="s3://b", key="k"),
            1,
            "Unauthorized",
            "(tier 's3://b', object 'k')",
        ),
        (DeadlineExceeded("reading the tiers did not\nfinish"), 1, "DeadlineExceeded", "did not finish"),
        (OSError(28, "No space left on device", "/mnt/x"), 1, "OSError", "/mnt/x: No space left on device"),
        (MemoryError(), 1, "MemoryError", "more memory than this machine has free"),
        (KeyError("slip"), 1, "Unexpected", "KeyError: 'slip' ('tiercheck --traceback COMMAND ...' shows where)"),
        (KeyboardInterrupt(), 130, "Interrupted", "by SIGINT: what was copied stays; run the same command again"),
        (SystemExit(128 + signal.SIGTERM), 143, "Interrupted", "interrupted by SIGTERM: what was copied stays"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, BaseException) else "",
)
def test_whatever_ends_a_command_is_told_in_one_line(
    raised: BaseException,
    code: int,
    kind: str,
    why: str,
    failing: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def opened(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(archive, "open", opened)
    found, said, _ = failing("copy", "nvme:///a", "nvme:///b")
    assert (found, said["kind"]) == (code, kind)
    assert why in said["message"]
    if isinstance(raised, TierError):
        assert (said["tier"], said["object"]) == ("s3://b", "k")


def test_an_interrupt_before_anything_is_loaded_is_told_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loading(name: str, *_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["tiercheck", "ls", "nvme:///x", "--json"])
    monkeypatch.delitem(sys.modules, "tiercheck.cli.commands")
    monkeypatch.setattr("builtins.__import__", loading)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    monkeypatch.undo()
    out, error = capsys.readouterr()
    assert (ended.value.code, error) == (130, "error: interrupted by SIGINT\n")
    assert json.loads(out)["error"]["kind"] == "Interrupted"


def test_a_traceback_is_shown_to_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["tiercheck", "--traceback", "ls", "nvme:///x", "--deadline-s", "1"])
    monkeypatch.setattr(archive, "open", lambda *_, **__: [][1])
    with pytest.raises(IndexError):
        commands.run()
