"""Lists and dictionaries of tensors that an optimizer keeps of a parameter, such as the factors of a preconditioner.

Each tensor in them is stored as a tensor of the state, under the key, ``#`` and a number; what held them is a value
with the numbers in their places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tiercheck.streams.tensors.storable import with_tensors

__all__ = ["flat", "nested"]

AT = "tiercheck.at"
"""The key that tells a place from other dictionaries; its value is the number."""


def flat(held: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer holds of a parameter, with no tensor in a list, tuple or dictionary."""
    found: dict[str, Any] = {}
    for key, value in held.items():
        found[key] = value
        if isinstance(value, list | tuple | Mapping):
            tensors: list[torch.Tensor] = []

            def put(tensor: torch.Tensor, path: str, tensors: list[torch.Tensor] = tensors) -> dict[str, int]:
                tensors.append(tensor)
                return {AT: len(tensors) - 1}

            found[key] = with_tensors(value, key, put)
            found |= {f"{key}#{number}": tensor for number, tensor in enumerate(tensors)}
    return found


def nested(held: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`flat`."""
    found, taken = {}, set[str]()
    for key, value in held.items():

        def get(at: int, key: str = key) -> Any:
            name = f"{key}#{at}"
            taken.add(name)
            return held[name]

        found[key] = with_places(value, get)
    return {key: value for key, value in found.items() if key not in taken}


def with_places(value: Any, get: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {AT}:
            return get(value[AT])
        return type(value)({key: with_places(each, get) for key, each in value.items()})
    if type(value) in (list, tuple):
        return type(value)(with_places(each, get) for each in value)
    return value
