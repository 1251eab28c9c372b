"""Tier URLs: ``scheme://location?option=value``, and the typed reading of their options."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import quote, unquote

from tiercheck.errors import ConfigurationError
from tiercheck.named import query_pairs
from tiercheck.types import bytes_text

__all__ = [
    "OptionReader",
    "TierURL",
    "directory_of",
    "number_from",
    "parse_size",
    "parse_yes",
    "seconds_from",
    "shown_value",
    "size_from",
]

T = TypeVar("T")

URL_CHARS_MAX = 8192
SIZE_MAX = 1 << 62
SECONDS_MAX = 365 * 86400.0

_SCHEME = re.compile(r"[a-z][a-z0-9.+-]*\Z")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)(b?)\Z", re.IGNORECASE | re.ASCII)
_HIDDEN = "***"
_USER_INFO = re.compile(r"(?:(?<=//)|\A)[^/?\s]*@")
_PASSWORD = re.compile(r"(?:(?<=//)|\A)[^/?\s]*:[^/?\s]*@")
_PLAIN = re.compile(r"\d+(?:\.\d+)?[a-z]{0,3}|true|false|null|on|off|auto", re.IGNORECASE | re.ASCII)
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_LOOKS_SECRET = re.compile(r"secret|pass|pwd|token|key|cred|connection_string|sas|sig|auth|cookie|cert|jwt|bearer")
_PUBLIC: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        scheme: frozenset(names.split())
        for scheme, names in {
            "": "survives size part parts_in_flight conditional deadline timeout wait threads region endpoint",
            "shm": "pool mount pin numa make",
            "nvme": "io block depth mount",
            "lustre": "stripe_count stripe_size mount",
            "peer": "at server_key keys connections credit",
            "s3": "endpoint_url profile addressing listing access shards storage_class sse abandoned_after",
            "fsspec": "publish fs.account_name fs.anon fs.auto_mkdir fs.endpoint_url fs.host fs.port fs.project"
            " fs.username fs.known_hosts fs.client_keys fs.config fs.agent_path",
        }.items()
    }
)
"""By scheme, the options whose values are never secret. Those under the empty scheme are common to all schemes.
``server_key`` is a public key; ``keys`` and ``fs.client_keys`` are paths of files."""


@dataclass(frozen=True)
class TierURL:
    """Where a tier is. ``location`` and the options are percent-decoded; ``#`` has no special meaning."""

    scheme: str
    location: str
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __hash__(self) -> int:
        return hash((self.scheme, self.location, frozenset(self.options.items())))

    @classmethod
    def parse(cls, text: str) -> TierURL:
        """Read ``text``. Errors: ``ConfigurationError`` if it is no tier URL, names an option twice, or holds a control
        character, a lone surrogate, or an escape that is no UTF-8."""
        scheme, separator, rest = text.partition("://")
        if len(text) > URL_CHARS_MAX:
            raise ConfigurationError(f"a tier URL has up to {URL_CHARS_MAX} characters, not {len(text)}")
        # A URL that does not parse is not repeated whole: it may hold a password.
        if not separator or not _SCHEME.match(scheme):
            raise ConfigurationError(
                f"a tier URL looks like scheme://location?option=value, such as shm://run or nvme:///mnt/ssd/run; "
                f"{text.partition('?')[0].rpartition('@')[2]!r} does not"
            )
        location, _, query = rest.partition("?")
        try:
            location = unquote(location, errors="strict")
            pairs = query_pairs(query)
        except UnicodeError:
            raise ConfigurationError(f"a {scheme}:// URL has an escape (%..) that is no UTF-8") from None
        except ValueError:
            raise ConfigurationError(f"the options of a {scheme}:// URL must look like name=value&name=value") from None
        if _UNPRINTABLE.search(location):
            raise ConfigurationError(f"the location of a {scheme}:// URL holds a control character or a lone surrogate")
        options: dict[str, str] = {}
        for name, value in pairs:
            if _UNPRINTABLE.search(name + value):
                raise ConfigurationError(
                    f"the option {name!r} of a {scheme}:// URL holds a control character or a lone surrogate"
                )
            if name in options:
                raise ConfigurationError(f"the option {name!r} appears twice in a {scheme}:// URL")
            options[name] = value
        return cls(scheme, location, MappingProxyType(options))

    @property
    def text(self) -> str:
        """The URL for messages. It hides user information, and the value of every option not known to be public."""
        location = quote(_USER_INFO.sub(f"{_HIDDEN}@", self.location), safe="/:@*[]", errors="replace")
        query = "&".join(
            f"{quote(name, errors='replace')}={shown_value(self.scheme, name, value)}"
            for name, value in self.options.items()
        )
        return f"{self.scheme}://{location}" + (f"?{query}" if query else "")

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"TierURL({self.text!r})"

    @property
    def has_secret(self) -> bool:
        """Whether the URL itself may hold a password, a token or another secret, judged by names and values."""
        texts = [self.location, *self.options.values()]
        return any(map(_PASSWORD.search, texts)) or any(
            may_be_secret(self.scheme, name, value) for name, value in self.options.items()
        )

    def reader(self) -> OptionReader:
        """A reader that turns the options into typed values."""
        return OptionReader(self)


class OptionReader:
    """Reads a URL's options one by one, then refuses the options that were not read.

    ::

        options = url.reader()
        size = options.take("size", parse_size, None)
        options.finish()
    """

    def __init__(self, url: TierURL) -> None:
        self._url = url
        self._left = dict(url.options)
        self._known: list[str] = []

    def take(self, name: str, convert: Callable[[str], T], default: T) -> T:
        """The option's value, converted by ``convert``; ``default`` if the URL does not have the option.

        Errors: ``ConfigurationError`` if ``convert`` raises ``ValueError``. The message repeats the text of that error
        only if the option is known to be public.
        """
        self._known.append(name)
        if name not in self._left:
            return default
        value = self._left.pop(name)
        try:
            return convert(value)
        except ValueError as error:
            reason = f": {error}" if is_public(self._url.scheme, name) else ""
            message = f"the option {name!r} of {self._url.text} cannot be used{reason}"
        raise ConfigurationError(message)

    def finish(self) -> None:
        """``ConfigurationError`` for options that were never taken."""
        if not self._left:
            return
        unknown = ", ".join(repr(name) for name in self._left)
        known = ", ".join(repr(name) for name in self._known) or "none"
        close = [match for name in self._left for match in difflib.get_close_matches(name, self._known, 1)]
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ConfigurationError(f"{self._url.scheme}:// does not know the option {unknown} (it knows: {known}){hint}")


def is_public(scheme: str, name: str) -> bool:
    """Whether an option of this name is known to hold no secret."""
    return name in _PUBLIC[""] or name in _PUBLIC.get(scheme.partition("+")[0], ())


def shown_value(scheme: str, name: str, value: str) -> str:
    """The value of an option for messages, quoted. It is hidden unless the option is known to be public. If the value
    is a URL, its user information and what follows a ``?`` are always hidden."""
    if not is_public(scheme, name):
        return _HIDDEN
    address, question, _ = value.partition("?")
    shown = quote(_USER_INFO.sub(f"{_HIDDEN}@", address), safe="/:*@", errors="replace")
    return shown + (f"{quote(question)}{_HIDDEN}" if question else "")


def may_be_secret(scheme: str, name: str, value: str) -> bool:
    """Whether an option may be a secret, judged by its name. An option of an fsspec file system is also judged by its
    value."""
    if is_public(scheme, name):
        return False
    if name.startswith("fs.") and not _PLAIN.fullmatch(value):
        return True
    return _LOOKS_SECRET.search(name.lower()) is not None


def directory_of(scheme: str, location: str | Path) -> Path:
    """The directory in which a tier of files lies. Errors: ``ConfigurationError`` unless the directory is absolute,
    without ``..``, and below the root of the file system."""
    path = Path(location)
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
        raise ConfigurationError(
            f"{scheme}:// needs an absolute directory below /, such as {scheme}:///mnt/scratch/run, not {str(path)!r}"
        )
    return path


def parse_yes(text: str) -> bool:
    """``ValueError`` for what is neither ``yes`` nor ``no``."""
    if text not in ("yes", "no"):
        raise ValueError(f"{text!r} is neither yes nor no")
    return text == "yes"


def number_from(low: int, high: int) -> Callable[[str], int]:
    """A conversion to a whole number within these bounds; it raises ``ValueError`` otherwise."""

    def convert(text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 20 or not low <= int(text) <= high:
            raise ValueError(f"{text!r} is no number from {low} to {high}")
        return int(text)

    return convert


def seconds_from(low: float, high: float = SECONDS_MAX) -> Callable[[str], float]:
    """A conversion to seconds within these bounds, ``low`` excluded; it raises ``ValueError`` otherwise."""

    def convert(text: str) -> float:
        seconds = float(text)
        if math.isnan(seconds) or not low < seconds <= high:
            raise ValueError(f"{text!r} is no number of seconds above {low:g} and up to {high:.0f}")
        return seconds

    return convert


def size_from(low: int, high: int = SIZE_MAX) -> Callable[[str], int]:
    """A conversion by :func:`parse_size` within these bounds; it raises ``ValueError`` otherwise."""

    def convert(text: str) -> int:
        nbytes = parse_size(text)
        if not low <= nbytes <= high:
            raise ValueError(f"{text!r} is no size from {bytes_text(low)} to {bytes_text(high)}")
        return nbytes

    return convert


def parse_size(text: str) -> int:
    """Bytes: ``"4GiB"``, ``"500 MB"``, ``"4g"`` (binary), ``"1048576"``. ``ValueError`` otherwise.

    ``kB``, ``MB``... are powers of 1000 and ``KiB``, ``MiB``... powers of 1024; a bare letter is binary, as
    for ``mount -o size=4g``.
    """
    match = _SIZE.match(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is no size; write it like 4GiB, 500MB or 1048576")
    number, letter, binary, byte = match.groups()
    base = 1000 if byte and not binary else 1024
    scaled = float(number) * base ** " kmgtp".index(letter.lower() or " ")
    if scaled > SIZE_MAX:
        raise ValueError(f"{text!r} is more than any tier holds")
    # Whole numbers are computed as such: a float would round beyond 2**53.
    return int(number) * base ** " kmgtp".index(letter.lower() or " ") if number.isdigit() else int(scaled)
