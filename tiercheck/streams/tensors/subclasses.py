"""Tensors of an optimizer's state that are made of others, such as moments in eight bits: codes, scales and a table.

torch's protocol of wrapper subclasses (``__tensor_flatten__``, ``__tensor_unflatten__``) takes them apart. Each tensor
inside is stored as one of the state, under the key, ``#`` and its name; what puts them together again is a value. The
class is never imported because a checkpoint names it: the process must have imported it, as the optimizer has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from tiercheck.errors import Mismatch, UnsupportedSetup
from tiercheck.streams.tensors.as_bytes import DTYPES
from tiercheck.streams.tensors.joint import qualified

__all__ = ["apart", "whole"]

MADE_OF = "tiercheck.made_of"
"""The key that tells such a value from other dictionaries."""
DTYPE = "tiercheck.dtype"
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PLAIN = (torch.Tensor, torch.nn.Parameter)


def apart(held: Mapping[str, Any], of: str) -> dict[str, Any]:
    """What an optimizer holds of a parameter, in plain tensors. ``of``: the parameter, for messages. Errors:
    ``UnsupportedSetup`` for a tensor of another class that cannot be taken apart."""
    found: dict[str, Any] = {}
    for key, value in held.items():
        if not isinstance(value, torch.Tensor) or type(value) in PLAIN:
            found[key] = value
            continue
        what = f"the optimizer's {key} of {of}"
        if not (hasattr(value, "__tensor_flatten__") and hasattr(type(value), "__tensor_unflatten__")):
            raise UnsupportedSetup(
                f"{what} is a {type(value).__name__}; supported are plain tensors, and classes made of such by torch's "
                "protocol of wrapper subclasses (__tensor_flatten__)"
            )
        names, context = value.__tensor_flatten__()
        found[key] = {
            MADE_OF: {"class": qualified(type(value)), "tensors": list(names), "context": plain(context, what)},
            "shape": list(value.shape),
            "stride": list(value.stride()),
        }
        found |= apart({f"{key}#{name}": getattr(value, name) for name in names}, of)
    return found


def whole(held: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`apart`. Errors: ``Mismatch`` for a class that this process has not imported."""
    found, taken = dict(held), set[str]()
    for key in sorted(held, key=len, reverse=True):  # what is inside comes first
        value = held[key]
        if not (isinstance(value, dict) and MADE_OF in value):
            continue
        made_of = value[MADE_OF]
        inside = {name: found[f"{key}#{name}"] for name in made_of["tensors"]}
        taken |= {f"{key}#{name}" for name in inside}
        unflatten = imported(made_of["class"], key).__tensor_unflatten__
        size, stride = torch.Size(value["shape"]), tuple(value["stride"])
        found[key] = unflatten(inside, restored(made_of["context"]), size, stride)
    return {key: value for key, value in found.items() if key not in taken}


def imported(name: str, key: str) -> Any:
    module, _, kind = name.rpartition(".")
    found: Any = sys.modules.get(module)
    for part in [kind] if found is not None else ():
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, torch.Tensor) and hasattr(found, "__tensor_unflatten__")):
        raise Mismatch(f"the optimizer's {key} was a {name}, which this process has not imported")
    return found


def plain(value: Any, what: str) -> Any:
    if isinstance(value, torch.dtype):
        if value not in NAMES:
            raise UnsupportedSetup(f"{what} has the dtype {value}, which a shard cannot hold")
        return {DTYPE: NAMES[value]}
    if isinstance(value, list | tuple):
        return [plain(each, what) for each in value]
    if isinstance(value, dict):
        return {key: plain(each, what) for key, each in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UnsupportedSetup(f"{what} is a tensor that holds a {type(value).__name__}, which cannot be saved")


def restored(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {DTYPE}:
            return DTYPES[value[DTYPE]]
        return {key: restored(each) for key, each in value.items()}
    return [restored(each) for each in value] if isinstance(value, list | tuple) else value
