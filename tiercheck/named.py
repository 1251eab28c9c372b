"""What a text names: ``NAME?option=value&option=value``, found by its entry point, made from its options.

A plug-in registers a frozen dataclass under a name in an entry-point group. The dataclass's fields are its options.
Nothing is imported before a text asks for it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import MISSING
from enum import Enum
from typing import Any, get_type_hints
from urllib.parse import parse_qsl, quote

from tiercheck.entry_points import EntryPointGroup, distribution_of
from tiercheck.errors import ConfigurationError
from tiercheck.types import shown

__all__ = ["TEXT_CHARS_MAX", "NamedGroup", "format_text", "options_of", "parse_text", "query_pairs"]

TEXT_CHARS_MAX = 1024
OPTIONS_MAX = 32

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\Z")


def parse_text(text: str) -> tuple[str, dict[str, str]]:
    """The name and the options in ``NAME?option=value&...``. Errors: ``ConfigurationError``."""
    if len(text) > TEXT_CHARS_MAX:
        raise ConfigurationError(f"{shown(text)} has {len(text)} characters; at most {TEXT_CHARS_MAX} are allowed")
    name, _, query = text.strip().partition("?")
    if not _NAME.match(name):
        raise ConfigurationError(f"{shown(text)} must look like NAME or NAME?option=value&option=value")
    try:
        pairs = query_pairs(query, OPTIONS_MAX)
    except ValueError:
        raise ConfigurationError(f"the options in {shown(text)} must look like option=value&option=value") from None
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ConfigurationError(f"{shown(text)} names an option twice")
    return name, options


def query_pairs(query: str, most: int | None = None) -> list[tuple[str, str]]:
    """The ``name=value`` in it, at most so many, percent-decoded: a plus is a plus, as in base64, and no space as in an
    HTML form. Errors: ``ValueError``."""
    plain = query.replace("+", "%2B")
    return parse_qsl(plain, keep_blank_values=True, strict_parsing=bool(query), errors="strict", max_num_fields=most)


def format_text(name: str, options: Mapping[str, str]) -> str:
    """What :func:`parse_text` reads."""
    query = "&".join(f"{quote(option, safe='')}={quote(value, safe='')}" for option, value in options.items())
    return f"{name}?{query}" if query else name


class NamedGroup(EntryPointGroup):
    """Entry points that are frozen dataclasses, made from texts."""

    def load(self, name: str) -> type:
        """The dataclass registered under ``name``. Errors: ``ConfigurationError``."""
        loaded = super().load(name)
        if not (isinstance(loaded, type) and dataclasses.is_dataclass(loaded)):
            entry = self.find(name)
            raise ConfigurationError(
                f"{entry.value!r} of {distribution_of(entry)} is no dataclass, as a {self.noun} must be"
            )
        return loaded

    def make(self, text: str) -> Any:
        """What ``text`` names. Errors: ``ConfigurationError``, which lists the options that there are."""
        name, options = parse_text(text)
        kind = self.load(name)
        hints = get_type_hints(kind)
        fields = {each.name: each for each in dataclasses.fields(kind) if each.init}
        if unknown := options.keys() - fields.keys():
            known = ", ".join(fields) or "none"
            raise ConfigurationError(
                f"the {self.noun} {name!r} does not know the option {min(unknown)!r}; it knows: {known}"
            )
        missing = [
            each.name
            for each in fields.values()
            if each.name not in options and each.default is MISSING and each.default_factory is MISSING
        ]
        if missing:
            raise ConfigurationError(
                f"the {self.noun} {name!r} needs the option {missing[0]!r}, as in {name}?{missing[0]}=..."
            )
        try:
            return kind(**{option: _value(value, hints[option]) for option, value in options.items()})
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"the {self.noun} {shown(text)} cannot be made: {error}") from None

    def text_of(self, made: Any) -> str:
        """The text that :meth:`make` makes ``made`` from.

        Errors: ``ConfigurationError`` if no entry point names its class, or a field holds what no text says.
        """
        kind = type(made)
        value = f"{kind.__module__}:{kind.__qualname__}"
        names = [entry.name for entry in self.all() if entry.value.partition(" ")[0] == value]
        if not names:
            raise ConfigurationError(
                f"no entry point in the group {self.group!r} names the {self.noun} {value}: register it in the "
                f'pyproject.toml of its distribution ([project.entry-points."{self.group}"] name = "{value}") and '
                "install that where it is to be used"
            )
        return format_text(names[0], options_of(made, f"{self.noun} {names[0]!r}"))


def options_of(made: Any, owner: str) -> dict[str, str]:
    """As text, the fields of a dataclass that are not what they are by default. ``owner``: what it is in messages.

    Errors: ``ConfigurationError`` if a field holds what no text says.
    """
    return {
        each.name: _text(field, owner, each.name)
        for each in dataclasses.fields(made)
        if each.init and (field := getattr(made, each.name)) != each.default
    }


def _value(text: str, kind: Any) -> Any:
    """Raises ``ValueError``."""
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(f"{shown(text)} is neither true nor false")
        return text == "true"
    if kind is int:
        if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) <= 20):
            raise ValueError(f"{shown(text)} is no whole number")
        return int(text)
    if kind is float or kind is str or (isinstance(kind, type) and issubclass(kind, Enum)):
        return kind(text)
    raise ValueError(f"an option of the type {kind!r} cannot be given as a text")


def _text(value: object, owner: str, option: str) -> str:
    match value:
        case bool():
            return str(value).lower()
        case Enum():
            return str(value.value)
        case int() | float() | str():
            return str(value)
    raise ConfigurationError(
        f"the option {option!r} of the {owner} is {shown(value)}, which no text says: use text, numbers, true and false"
    )
