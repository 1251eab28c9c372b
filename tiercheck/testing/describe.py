"""What a driver says of itself before it is opened: for ``tiercheck plugins``, and for the docs of a plug-in.

A driver class that wants to be described does two things. The first paragraph of its docstring, or its module's, holds
the form of its URL (``mine://name[?size=2GiB]``), what is optional in brackets. And each option has a line in the class
docstring that begins with ``- ``option``: ``.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import Enum
from typing import TypeVar

from tiercheck.errors import ConfigurationError
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.url import OptionReader, TierURL
from tiercheck.types import Capabilities

__all__ = ["Description", "Option", "describe"]

T = TypeVar("T")
Factory = Callable[[TierURL], TierDriver]

_LITERAL = re.compile(r"``([a-z][A-Za-z0-9.+-]*://[^`]*)``")
_OPTION = re.compile(r"^- ``(\w[\w.]*)(?:=[^`]*)?``: (.+?)(?=^- |^\s*$|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Option:
    """An option of a URL: its name, its default as text (empty: none), and its line of the docstring."""

    name: str
    default: str
    text: str


@dataclass(frozen=True)
class Description:
    """A driver, from its docstring and its own reading of a URL.

    ``url_form`` is empty if no docstring gives it. ``capabilities`` are those of a driver for the URL form without
    its optional parts; ``None`` if such a URL is not enough for the driver to be made.
    """

    summary: str
    url_form: str
    options: tuple[Option, ...]
    capabilities: Capabilities | None

    def options_table(self) -> str:
        """The options as a Markdown table."""
        rows = [
            f"| `{each.name}` | {f'`{each.default}`' if each.default else ''} | {each.text} |" for each in self.options
        ]
        return "\n".join(["| option | default | meaning |", "| --- | --- | --- |", *rows]) + "\n"

    def capabilities_table(self) -> str:
        """The capabilities as a Markdown table. Errors: ``ValueError`` if they are not known."""
        if self.capabilities is None:
            raise ValueError(f"no driver could be made for {self.url_form!r}, so its capabilities are not known")
        rows = [f"| `{name}` | `{value}` |" for name, value in claims(self.capabilities)]
        return "\n".join(["| capability | value |", "| --- | --- |", *rows]) + "\n"


def claims(capabilities: Capabilities) -> Iterator[tuple[str, str]]:
    for each in fields(capabilities):
        value = getattr(capabilities, each.name)
        yield each.name, value.name if isinstance(value, Enum) else str(value)


def describe(factory: Factory) -> Description:
    """Describe what ``factory``, an entry point's object, makes. Nothing is opened.

    Errors: those that are no ``ConfigurationError`` of making a driver.
    """
    owner = getattr(factory, "__self__", factory)
    documents = [inspect.getdoc(owner) or "", sys.modules[owner.__module__].__doc__ or ""]
    openings = [" ".join(text.strip().partition("\n\n")[0].split()) for text in documents]
    opening = next((each for each in openings if _LITERAL.search(each)), next(filter(None, openings), ""))
    found = _LITERAL.search(opening)
    form = found[1] if found else ""
    url = _RecordedURL.of(form)
    capabilities = None
    with suppress(ConfigurationError):  # the form alone may be no URL; what was read of it until then is known
        capabilities = factory(url).capabilities
    texts = {name: " ".join(text.split()) for name, text in _OPTION.findall(documents[0])}
    options = tuple(Option(name, shown(default), texts.get(name, "")) for name, default in url.seen.items())
    return Description(summary_of(opening), form, options, capabilities)


def summary_of(opening: str) -> str:
    """The first sentence: what comes before the URL form, or after it if the form comes first."""
    before, form, after = _LITERAL.split(opening, maxsplit=1) if _LITERAL.search(opening) else (opening, "", "")
    return (before.strip(" .:") or after.strip(" .:") or form).partition(". ")[0]


def shown(default: object) -> str:
    """A default as one writes it into a URL."""
    if default is None:
        return ""
    if isinstance(default, Enum):
        return default.name.lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


class _RecordedURL(TierURL):
    """A URL that notes which options are asked for."""

    seen: dict[str, object]

    @classmethod
    def of(cls, form: str) -> _RecordedURL:
        """The URL that ``form`` gives without its options and its optional parts; nothing in it is checked."""
        scheme, _, location = re.sub(r"\[[^]]*\]", "", form).partition("?")[0].partition("://")
        url = cls(scheme, location)
        object.__setattr__(url, "seen", {})
        return url

    def reader(self) -> OptionReader:
        return _RecordingReader(self)


class _RecordingReader(OptionReader):
    def __init__(self, url: _RecordedURL) -> None:
        super().__init__(url)
        self._seen = url.seen

    def take(self, name: str, convert: Callable[[str], T], default: T) -> T:
        self._seen[name] = default
        return super().take(name, convert, default)
