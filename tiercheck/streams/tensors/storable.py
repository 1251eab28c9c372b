"""What ``state_dict`` returns, in values that host state can hold, and back."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tiercheck.errors import UnsupportedSetup
from tiercheck.streams.tensors.as_bytes import array_of, dtype_name, tensor_of

__all__ = ["PLAIN", "from_storable", "to_plain", "to_storable"]

TENSOR = "tiercheck.tensor"
"""The key that tells a stored tensor from other dictionaries; its value is the dtype."""
PLAIN = frozenset({type(None), bool, int, float, str})
"""What holds no tensor, told without asking what it is an instance of."""


def to_plain(value: Any, path: str) -> Any:
    """``value`` with every tensor as a NumPy array, or as a number where it has no dimension.

    Errors: ``UnsupportedSetup`` for a tensor whose dtype NumPy lacks; it names the path.
    """

    def plain(tensor: torch.Tensor, path: str) -> Any:
        try:
            array = tensor.detach().cpu().clone().numpy()  # a copy: nobody may resize a tensor that NumPy has seen
        except TypeError:
            raise UnsupportedSetup(f"{path} is a {tensor.dtype} tensor, which host state cannot hold") from None
        return array.item() if array.ndim == 0 else array

    return with_tensors(value, path, plain)


def to_storable(value: Any, path: str) -> Any:
    """``value`` with every tensor as a dictionary that :func:`from_storable` turns back into it.

    Errors: ``UnsupportedSetup`` for a tensor whose dtype a shard cannot hold, or one of a class of its own, such as a
    ``DTensor``; it names the path.
    """

    def storable(tensor: torch.Tensor, path: str) -> Any:
        try:
            return {TENSOR: dtype_name(tensor, path), "content": array_of(tensor).copy()}
        except RuntimeError as error:
            raise UnsupportedSetup(
                f"{path} is a {type(tensor).__name__}, whose content cannot be read ({error}): give its local tensor "
                "(to_local()) in state_dict(), or make it a part of the model that is attached"
            ) from error

    return with_tensors(value, path, storable)


def from_storable(value: Any) -> Any:
    """The inverse of :func:`to_storable`; tensors are on the host."""
    if isinstance(value, dict):
        if value.keys() == {TENSOR, "content"}:
            return tensor_of(value["content"], value[TENSOR])
        return type(value)({key: from_storable(each) for key, each in value.items()})
    if type(value) in (list, tuple):
        return type(value)(from_storable(each) for each in value)
    return value


def with_tensors(value: Any, path: str, put: Callable[[torch.Tensor, str], Any]) -> Any:
    """``value`` with ``put(tensor, its path)`` for every tensor; lists, tuples and the dictionaries that host state can
    hold keep their types, other mappings become dictionaries."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return put(value, path)
    if isinstance(value, Mapping):
        kind: Callable[[Any], Any] = type(value) if type(value) in (OrderedDict, Counter) else dict
        return kind({key: with_tensors(each, f"{path}.{key}", put) for key, each in value.items()})
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(with_tensors(each, f"{path}[{index}]", put) for index, each in enumerate(value))
    return value
