"""Frozen dataclasses as plain values and back, strictly: what crosses a process boundary has the declared types,
and nothing else."""

from __future__ import annotations

import math
import types
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from tiercheck.types import is_unicode, shown

__all__ = ["TEXT_CHARACTERS_MAX", "from_plain", "to_plain"]

T = TypeVar("T")

TEXT_CHARACTERS_MAX = 16 << 10
ITEMS_MAX = 100_000
INTEGERS = range(-(2**63), 2**64)


def to_plain(value: Any) -> Any:
    """``value`` in lists, dicts and atoms; fields keep their names."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple | list):
        return [to_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): to_plain(each) for key, each in value.items()}
    return str(value) if isinstance(value, StrEnum) else value


def from_plain(kind: type[T], value: Any) -> T:
    """An instance of the dataclass ``kind``. Fields with a default may be missing.

    Raises:
        ValueError: an unknown or missing field, a wrong type, a number that is not finite or has over 64 bits, or
            a text that is too long or no Unicode; or whatever ``kind`` itself refuses.
    """
    if not isinstance(value, dict):
        raise ValueError(f"a {kind.__name__} is made of fields, not of a {type(value).__name__}")
    hints = _hints(kind)  # type: ignore[arg-type]  # a class is hashable
    if unknown := [shown(name, 40) for name in value if name not in hints]:
        raise ValueError(f"{kind.__name__} has no field {unknown[0]}; known are {', '.join(hints)}")
    given = {name: _read(hints[name], each, f"{kind.__name__}.{name}") for name, each in value.items()}
    missing = [
        each.name
        for each in fields(kind)  # type: ignore[arg-type]  # no bound says that it is a dataclass
        if each.name not in given and each.default is MISSING and each.default_factory is MISSING
    ]
    if missing:
        raise ValueError(f"{kind.__name__} needs the field {missing[0]!r}")
    return kind(**given)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def _read(kind: Any, value: Any, what: str) -> Any:
    origin = get_origin(kind)
    if origin is types.UnionType or origin is Union:
        return _read_optional(kind, value, what)
    if origin is tuple:
        return _read_tuple(get_args(kind), value, what)
    if origin is dict:
        _check(isinstance(value, dict) and len(value) <= ITEMS_MAX, value, what)
        of_key, of_value = get_args(kind)
        return {_read(of_key, key, what): _read(of_value, each, what) for key, each in value.items()}
    if is_dataclass(kind):
        return from_plain(kind, value)  # type: ignore[arg-type]  # hints are classes, not instances
    return _read_atom(kind, value, what)


def _read_atom(kind: Any, value: Any, what: str) -> Any:
    _check(type(value) is not int or value in INTEGERS, value, what)
    if kind is float:
        _check(type(value) in (int, float) and math.isfinite(value), value, what)
        return float(value)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        _check(value in list(kind), value, what)
        return kind(value)
    _check(kind in (str, int, bool) and type(value) is kind, value, what)
    _check(kind is not str or (len(value) <= TEXT_CHARACTERS_MAX and is_unicode(value)), value, what)
    return value


def _read_optional(kind: Any, value: Any, what: str) -> Any:
    if value is None:
        return None
    (only,) = [each for each in get_args(kind) if each is not types.NoneType]
    return _read(only, value, what)


def _read_tuple(items: tuple[Any, ...], value: Any, what: str) -> Any:
    _check(isinstance(value, list | tuple) and len(value) <= ITEMS_MAX, value, what)
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_read(items[0], each, what) for each in value)
    _check(len(value) == len(items), value, what)
    return tuple(_read(item, each, what) for item, each in zip(items, value, strict=True))


def _check(sound: bool, value: Any, what: str) -> None:
    if not sound:
        raise ValueError(f"{what} cannot be {shown(value, 60)}")
