"""What was read, brought to where it stays, before a provider loads it: by several threads, and copied once.

What the provider holds already is overwritten in place. For the rest, such as the moments of an optimizer that has not
stepped, memory is made, of huge pages where the machine has them, and given to the provider to keep: filling fresh
pages of four KiB takes several times as long as the copy. Gradients for an optimizer that is called lie in such
memory, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck.format.container import ALIGNMENT
from tiercheck.format.memory import fresh_memory
from tiercheck.kernels.threads import run as on_threads
from tiercheck.streams.records.base import BaseState
from tiercheck.streams.tensors.as_bytes import array_of, dtype_name, given, is_given, tensor_in
from tiercheck.streams.tensors.provider import StateProvider, check_shapes, extras_of

__all__ = ["copies", "laid_out_as", "placed"]

CHUNK_NBYTES = 4 << 20
"""What a thread copies before it looks for more."""
SMALL_NBYTES = 4 << 10
"""Less than this the provider copies itself."""

Bytes = NDArray[np.uint8]


def placed(provider: StateProvider, state: BaseState, *, threads: int) -> BaseState:
    """The state, with its tensors where they stay; others, such as a GPU's, as they were. ``provider.load`` follows.

    What is given already is left where it is, if the provider lacks it. At most ``threads`` threads run, the caller's
    included. Takes the memory of what the provider does not hold yet, and keeps none. Errors: ``Mismatch`` if names or
    shapes of the trained tensors differ, before any is changed.
    """
    masters, extras, held = provider.masters(), extras_of(provider), provider.optimizer_state()
    if masters:
        check_shapes(masters, state.masters)
    placing = _Placing()
    found = replace(
        state,
        masters=placing.all(masters, state.masters),
        extras=placing.all(extras, state.extras),
        optimizer_state={
            name: placing.all(held.get(name, {}), each, device=masters[name].device if name in masters else HOST)
            for name, each in state.optimizer_state.items()
        },
    )
    placing.copy(threads)
    return found


HOST = torch.device("cpu")


class _Placing:
    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def all(
        self, targets: Mapping[str, Any], sources: Mapping[str, Any], device: torch.device = HOST
    ) -> dict[str, Any]:
        """What is to be loaded of these values, which are to be on ``device``."""
        lacking = {
            name: source
            for name, source in sources.items()
            if device == HOST and targets.get(name) is None and is_worth_it(source) and not is_given(source)
        }
        made = new_like(lacking)
        self._copies += [(made[name], source) for name, source in lacking.items()]
        return {n: made[n] if n in made else self._one(targets.get(n), source) for n, source in sources.items()}

    def _one(self, target: Any, source: Any) -> Any:
        if not (is_worth_it(source) and is_worth_it(target)):
            return source
        if (target.shape, target.dtype) != (source.shape, source.dtype):
            return source
        self._copies.append((target, source))
        return target

    def copy(self, threads: int) -> None:
        waiting = deque(chunk for target, source in self._copies for chunk in chunks(target, source))

        def drain(_: slice) -> None:
            while True:
                try:
                    target, source = waiting.popleft()
                except IndexError:
                    return
                np.copyto(target, source)

        torch.autograd.graph.increment_version([target for target, _ in self._copies])
        on_threads(drain, [slice(0)] * max(1, min(threads, len(waiting))))


def is_worth_it(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device == HOST
        and tensor.nbytes >= SMALL_NBYTES
        and tensor.is_contiguous()
    )


def chunks(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[Bytes, Bytes]]:
    into, held = (array_of(each).reshape(-1).view(np.uint8) for each in (target, source))
    for start in range(0, into.size, CHUNK_NBYTES):
        yield into[start : start + CHUNK_NBYTES], held[start : start + CHUNK_NBYTES]


def copies(gradients: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of the masters' gradients, in their dtypes, on their devices, and laid out as they are (:func:`laid_out_as`): an
    optimizer may write to these, and keep them. What was read may be a mapping that nobody can write to."""
    found = {name: gradients[name] for name in masters if name in gradients}
    made = new_like(
        {
            name: torch.empty_like(each, dtype=masters[name].dtype, device="meta")
            for name, each in found.items()
            if masters[name].device == HOST and each.nbytes >= SMALL_NBYTES and masters[name].is_contiguous()
        }
    )
    with torch.no_grad():
        return {
            name: made[name].copy_(each)
            if name in made
            else laid_out_as(masters[name], each.detach().to(masters[name].device, masters[name].dtype, copy=True))
            for name, each in found.items()
        }


def laid_out_as(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, in the order in which the parameter's elements lie in memory, if it has its shape: torch makes
    gradients and moments so (``torch.preserve_format``), and a sum over them has other bits in another order."""
    if parameter.is_contiguous() or tensor.shape != parameter.shape:
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def new_like(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Memory for as many tensors, without content, that whoever gets it may keep."""
    starts = dict[str, int]()
    nbytes = 0
    for name, tensor in tensors.items():
        starts[name] = nbytes
        nbytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    if not nbytes:
        return {}
    view = fresh_memory(nbytes)
    return {
        name: given(
            tensor_in(
                view[starts[name] : starts[name] + tensor.nbytes], dtype_name(tensor, name), tensor.shape, what=name
            )
        )
        for name, tensor in tensors.items()
    }
