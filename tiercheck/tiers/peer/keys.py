"""The CURVE keys of a peer network: a directory of small text files, readable by their owner alone.

::

    server.secret    server.public      the key pair of every server of the network
    client.secret    client.public      the key pair of its clients
    clients.allowed                     who gets in: a client's public key a line, and after it the word for its owner

Each key is 64 hex digits. A network whose nodes must be told apart has a directory with its own client pair for
each node, and all the public keys in everybody's ``clients.allowed``.

A client reaches the namespaces of its owner only: of two owners each has a namespace of its own under the same name.
So the clients of one job (or of one user, who trusts himself) have one owner, and those of others another one.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Self

import zmq
from zmq.utils import z85

from tiercheck.errors import ConfigurationError
from tiercheck.types import shown

__all__ = ["KEYS_VARIABLE", "PeerKeys", "parse_public_key"]

KEYS_VARIABLE = "TIERCHECK_KEYS"
OWNER = "owner"
"""The word for the owner of the clients of a new network."""
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_HEX = re.compile(r"[0-9a-f]{64}\Z", re.ASCII)
ALLOWED_BYTES_MAX = 1 << 20
_FILES = ("server.secret", "server.public", "client.secret", "client.public")


@dataclass(frozen=True)
class PeerKeys:
    """Key pairs as 64 hex digits each. Secrets do not show in ``repr``."""

    server_public: str
    client_public: str
    allowed: Mapping[str, str] = field(hash=False)
    """The public keys of the clients that a server lets in, and whose they are."""
    server_secret: str = field(repr=False)
    client_secret: str = field(repr=False)

    @property
    def owner(self) -> str | None:
        """Of these keys' own clients; ``None`` if they are not listed."""
        return self.allowed.get(self.client_public)

    @classmethod
    def generate(cls, directory: str | os.PathLike[str], *, owner: str = OWNER) -> Self:
        """Make new keys and write them to ``directory`` (mode 0700, its files 0600), all of them or none.

        Errors: ``ConfigurationError`` if the directory holds keys already, or cannot be written, and for an
        ``owner`` that is no plain word.
        """
        place = Path(directory)
        if not _OWNER.match(owner):
            raise ConfigurationError(f"an owner is a word of letters, digits, '.', '_' and '-', not {shown(owner)}")
        pairs = {name: _new_pair() for name in ("server", "client")}
        contents = {
            "server.secret": pairs["server"][1],
            "server.public": pairs["server"][0],
            "client.secret": pairs["client"][1],
            "client.public": pairs["client"][0],
            "clients.allowed": f"{pairs['client'][0]} {owner}",
        }
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.exists() and any(place.iterdir()):
                raise ConfigurationError(f"{place} is not empty; keys are never overwritten: name a new directory")
            made = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
            try:
                for name, content in contents.items():
                    _write_private(made / name, f"{content}\n")
                # Onto an empty directory or none; whoever lost a race finds that it is not empty.
                made.rename(place)
            except BaseException:
                for name in contents:
                    (made / name).unlink(missing_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    made.rmdir()
                raise
        except OSError as error:
            raise ConfigurationError(f"keys cannot be written to {place}: {error.strerror or error}") from error
        return cls.load(place)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Self:
        """The keys in ``directory``. Errors: ``ConfigurationError`` says which file, what is wrong, what to do."""
        place = Path(directory)
        try:
            there = place.is_dir()
        except OSError as error:  # such as a name that is too long
            raise ConfigurationError(f"keys={shown(str(place), 200)} cannot be read: {error.strerror}") from error
        if not there:
            raise ConfigurationError(f"there are no keys in {place}; make them with: tiercheck keys {place}")
        values = {name: _read_key(place / name) for name in _FILES}
        for pair in ("server", "client"):
            if _public_of(values[f"{pair}.secret"]) != values[f"{pair}.public"]:
                raise ConfigurationError(
                    f"{place / pair}.public does not belong to {pair}.secret; copy both from one place, or make new "
                    f"keys with: tiercheck keys NEW_DIRECTORY"
                )
        return cls(
            server_public=values["server.public"],
            server_secret=values["server.secret"],
            client_public=values["client.public"],
            client_secret=values["client.secret"],
            allowed=_read_allowed(place / "clients.allowed"),
        )


def parse_public_key(text: str) -> str:
    """``text`` if it is a public key; ``ValueError`` otherwise."""
    if not _HEX.match(text):
        raise ValueError("a public key is 64 hex digits, as in the file server.public of a directory of keys")
    return text


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return z85.decode(public).hex(), z85.decode(secret).hex()


def _public_of(secret: str) -> str:
    return z85.decode(zmq.curve_public(z85.encode(bytes.fromhex(secret)))).hex()


def _write_private(path: Path, content: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            if path.name.endswith(".secret") and os.fstat(file.fileno()).st_mode & 0o077:
                raise ConfigurationError(f"others can read {path}; protect it with: chmod 600 {path}")
            content = file.read(ALLOWED_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigurationError(
            f"the key file {path} cannot be read ({error.strerror}); make keys with: tiercheck keys NEW_DIRECTORY"
        ) from error
    if len(content) > ALLOWED_BYTES_MAX:
        raise ConfigurationError(f"{path} has more than {ALLOWED_BYTES_MAX} bytes; that is no file of keys")
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is no text; a key is 64 hex digits") from None


def _read_key(path: Path) -> str:
    content = _read_text(path).strip()
    if not _HEX.match(content):
        # What the file says is not repeated: it may be a secret.
        raise ConfigurationError(f"{path} must hold one key of 64 hex digits (a-f in small letters) and nothing else")
    return content


def _read_allowed(path: Path) -> Mapping[str, str]:
    allowed: dict[str, str] = {}
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if not _HEX.match(words[0]):
            raise ConfigurationError(f"line {number} of {path} must start with a public key of 64 hex digits")
        if len(words) != 2 or not _OWNER.match(words[1]):
            raise ConfigurationError(
                f"line {number} of {path} must name the key's owner by one word after it: clients of one owner share "
                "their namespaces, and nobody else reaches them. A comment begins with '#'"
            )
        allowed[words[0]] = words[1]
    if not allowed:
        raise ConfigurationError(f"{path} lists no client, so nobody could get in; add a client's public key a line")
    return MappingProxyType(allowed)
