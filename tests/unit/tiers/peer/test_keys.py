"""Keys on disk: private, whole, never overwritten; and what is wrong with them is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tiercheck.cli import commands
from tiercheck.errors import ConfigurationError
from tiercheck.tiers.peer import PeerKeys


def test_what_is_generated_is_loaded(tmp_path: Path) -> None:
    place = tmp_path / "a" / "keys"
    keys = PeerKeys.generate(place)
    assert PeerKeys.load(place) == keys
    assert keys.allowed == {keys.client_public: "owner"}
    for value in (keys.server_public, keys.server_secret, keys.client_public, keys.client_secret):
        assert re.fullmatch("[0-9a-f]{64}", value)
    assert len({keys.server_public, keys.server_secret, keys.client_public, keys.client_secret}) == 4
    assert place.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in place.iterdir()} == {0o600}
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "server.secret", "server.public", "client.secret", "client.public", "clients.allowed",
    }  # fmt: skip


def test_secrets_do_not_show(tmp_path: Path) -> None:
    keys = PeerKeys.generate(tmp_path / "keys")
    assert keys.server_secret not in repr(keys)
    assert keys.client_secret not in repr(keys)


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    keys = PeerKeys.generate(tmp_path / "keys")
    with pytest.raises(ConfigurationError, match="never overwritten"):
        PeerKeys.generate(tmp_path / "keys")
    assert PeerKeys.load(tmp_path / "keys") == keys
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="not empty"):
        PeerKeys.generate(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    keys = PeerKeys.generate(tmp_path / "keys")
    assert PeerKeys.load(tmp_path / "keys") == keys


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        PeerKeys.generate(tmp_path / "file" / "keys")


@pytest.mark.parametrize("name", ["server.secret", "server.public", "client.secret", "client.public"])
@pytest.mark.parametrize("content", ["", "abc", "Z" * 64, "00" * 32, "\xff" * 64, "a" * 64 + " " + "b" * 64])
def test_a_broken_key_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    PeerKeys.generate(tmp_path / "keys")
    path = tmp_path / "keys" / name
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigurationError) as caught:
        PeerKeys.load(tmp_path / "keys")
    assert str(tmp_path / "keys") in str(caught.value)
    assert name.partition(".")[0] in str(caught.value)


def test_a_missing_file_and_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tiercheck keys .*nowhere"):
        PeerKeys.load(tmp_path / "nowhere")
    PeerKeys.generate(tmp_path / "keys")
    (tmp_path / "keys" / "clients.allowed").unlink()
    with pytest.raises(ConfigurationError, match=r"clients\.allowed"):
        PeerKeys.load(tmp_path / "keys")


def test_the_command_makes_keys_of_an_owner(tmp_path: Path) -> None:
    made = CliRunner().invoke(commands.app, ["keys", str(tmp_path / "keys"), "--owner", "alice"])
    assert made.exit_code == 0, made.output
    keys = PeerKeys.load(tmp_path / "keys")
    assert (keys.owner, dict(keys.allowed)) == ("alice", {keys.client_public: "alice"})


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    PeerKeys.generate(tmp_path / "keys")
    (tmp_path / "keys" / "client.secret").chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        PeerKeys.load(tmp_path / "keys")


def test_allowed_clients_are_lines_with_their_owners(tmp_path: Path) -> None:
    PeerKeys.generate(tmp_path / "keys")
    path = tmp_path / "keys" / "clients.allowed"
    path.write_text(f"# nodes\n{'ab' * 32} alice # node 1\n\n{'cd' * 32} bob\n")
    keys = PeerKeys.load(tmp_path / "keys")
    assert (keys.allowed, keys.owner) == ({"ab" * 32: "alice", "cd" * 32: "bob"}, None)
    path.write_text("# nobody\n")
    with pytest.raises(ConfigurationError, match="nobody could get in"):
        PeerKeys.load(tmp_path / "keys")
    for odd in ("", " a b", " a/b", " # alice", " " + "a" * 65):
        path.write_text("ab" * 32 + f"{odd}\n")
        with pytest.raises(ConfigurationError, match="owner by one word"):
            PeerKeys.load(tmp_path / "keys")
    with pytest.raises(ConfigurationError, match="an owner is a word"):
        PeerKeys.generate(tmp_path / "other", owner="a b")
    path.write_text("ab" * 32 + " alice\nnonsense\n")
    with pytest.raises(ConfigurationError, match="line 2"):
        PeerKeys.load(tmp_path / "keys")
