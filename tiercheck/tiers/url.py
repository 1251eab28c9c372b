"""Tier URLs: ``scheme://location?option=value``, and the typed reading of their options."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import parse_qsl, quote, unquote

from tiercheck.errors import ConfigurationError

__all__ = ["OptionReader", "TierURL", "parse_size"]

T = TypeVar("T")

_SCHEME = re.compile(r"[a-z][a-z0-9.+-]*\Z")
_SECRET = re.compile(r"secret|pass|token|credential|connection_string|sas|signature|(^|[_.])key\Z|(^|[_.])key_id\Z")
_PUBLIC = {"server_key"}
"""A public key: the peer server's."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)(b?)\Z", re.IGNORECASE)
_HIDDEN = "***"


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
        """Read ``text``; ``ConfigurationError`` where it is no tier URL or names an option twice."""
        scheme, separator, rest = text.partition("://")
        # A URL that does not parse is not repeated whole: it may hold a password.
        if not separator or not _SCHEME.match(scheme):
            raise ConfigurationError(
                f"a tier URL looks like scheme://location?option=value, such as shm://run or nvme:///mnt/ssd/run; "
                f"{text.partition('?')[0].rpartition('@')[2]!r} does not"
            )
        location, _, query = rest.partition("?")
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
        except ValueError:
            raise ConfigurationError(f"the options of a {scheme}:// URL must look like name=value&name=value") from None
        options: dict[str, str] = {}
        for name, value in pairs:
            if name in options:
                raise ConfigurationError(f"the option {name!r} appears twice in a {scheme}:// URL")
            options[name] = value
        return cls(scheme, unquote(location), MappingProxyType(options))

    @property
    def text(self) -> str:
        """The URL for messages: user information and options that look secret are hidden."""
        authority, slash, path = self.location.partition("/")
        if "@" in authority:
            authority = f"{_HIDDEN}@{authority.rpartition('@')[2]}"
        location = quote(authority + slash + path, safe="/:@*[]")
        query = "&".join(
            f"{quote(name)}={_HIDDEN if is_secret(name) else quote(value, safe='/:')}"
            for name, value in self.options.items()
        )
        return f"{self.scheme}://{location}" + (f"?{query}" if query else "")

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"TierURL({self.text!r})"

    @property
    def has_secret(self) -> bool:
        """Whether the URL itself holds a password, a token or their like."""
        user, at, _ = self.location.partition("/")[0].rpartition("@")
        return bool(at and ":" in user) or any(map(is_secret, self.options))

    def reader(self) -> OptionReader:
        """A reader that turns the options into typed values."""
        return OptionReader(self)


class OptionReader:
    """Reads a URL's options one by one, then refuses those that nobody asked for.

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
        """The option's value through ``convert``, or ``default`` where the URL does not have it.

        Errors: ``ConfigurationError`` where ``convert`` raises ``ValueError``; its text is kept, unless the
        option is a secret.
        """
        self._known.append(name)
        if name not in self._left:
            return default
        value = self._left.pop(name)
        try:
            return convert(value)
        except ValueError as error:
            reason = "" if is_secret(name) else f": {error}"
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


def is_secret(name: str) -> bool:
    """Whether an option of this name looks like one whose value must not be shown."""
    return name not in _PUBLIC and _SECRET.search(name.lower()) is not None


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
    if scaled > 2**62:
        raise ValueError(f"{text!r} is more than any tier holds")
    # Whole numbers are computed as such: a float would round beyond 2**53.
    return int(number) * base ** " kmgtp".index(letter.lower() or " ") if number.isdigit() else int(scaled)
