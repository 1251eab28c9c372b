"""A module's parameters and buffers by name, as they are now, without a walk through its tree at each iteration.

``named_parameters`` and ``state_dict`` take a millisecond for a few hundred modules, and each iteration asks several
times, while training stands still. What modules hold seldom changes, so it is kept, and each time compared with what is
there, in loops that are not Python's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, is_, methodcaller
from typing import Generic, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

__all__ = ["ModuleTensors"]

WRAPPED = frozenset(("_orig_mod", "_checkpoint_wrapped_module"))
"""What ``torch.compile`` and torch's activation checkpointing call the module that they wrap."""

T = TypeVar("T")

# Under ZeRO-3 looking up a name may fetch the parameter from the other ranks, and what a scripted module has for a
# dictionary cannot be iterated over.
_keys, _values = methodcaller("keys"), methodcaller("values")


class ModuleTensors:
    """Of ``module`` and all below it. A tensor that several modules share is named once, as torch names it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._look()

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """What ``named_parameters`` has."""
        if self._children.changed():
            self._look()
        elif self._parameters.changed():
            self._look_at_parameters()
        return self._named_parameters

    def others(self, parameters: Iterable[torch.Tensor]) -> dict[str, torch.nn.Parameter]:
        """Those that are not among ``parameters``."""
        known = set(map(id, parameters))
        found = self.parameters()
        if known.issuperset(map(id, found.values())):  # all, as a rule
            return {}
        return {name: parameter for name, parameter in found.items() if id(parameter) not in known}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Those of ``named_buffers`` that ``state_dict`` holds, detached; the others are recomputed by the modules
        themselves."""
        if self._children.changed():
            self._look()
        elif self._buffers.changed():
            self._look_at_buffers()
        saved = {
            prefix + name
            for prefix, module in self._with_buffers
            for name in set(module._buffers.keys()) - _not_persistent(module)
        }
        return {name: buffer.detach() for name, buffer in self._named_buffers.items() if name in saved}

    def aliases(self) -> dict[str, str]:
        """The other names of what several modules share (tied weights), each with the one under which it is listed
        here. Both are those of the model (:meth:`model_name`)."""
        saved = self.buffers()
        buffers = ((name, each) for name, each in self._named_buffers.items() if name in saved)
        named = {id(each): name for name, each in (*self.parameters().items(), *buffers)}
        everything = chain(
            self._module.named_parameters(remove_duplicate=False), self._module.named_buffers(remove_duplicate=False)
        )
        other = {name: named[id(each)] for name, each in everything if named.get(id(each), name) != name}
        return {self.model_name(name): self.model_name(first) for name, first in other.items()}

    def model_name(self, name: str) -> str:
        """``name`` as the model knows it, without what wrappers around it and its modules (DDP, ``torch.compile``,
        activation checkpointing) have put into it."""
        parts: list[str] = []
        module: torch.nn.Module | None = self._module
        for part in name.split("."):
            if not (part in WRAPPED or (part == "module" and isinstance(module, DistributedDataParallel))):
                parts.append(part)
            module = module._modules[part] if module is not None and part in module._modules else None
        return ".".join(parts)

    def _look(self) -> None:
        """Walk through the tree."""
        found = list(self._module.named_modules())
        self._prefixes = [f"{name}." if name else "" for name, _ in found]
        self._modules = [module for _, module in found]
        self._children: _Held[torch.nn.Module] = _Held(self._modules, "_modules")
        self._look_at_parameters()
        self._look_at_buffers()

    def _look_at_parameters(self) -> None:
        self._parameters: _Held[torch.nn.Parameter] = _Held(self._modules, "_parameters")
        self._named_parameters = dict(self._parameters.named(self._prefixes))

    def _look_at_buffers(self) -> None:
        self._buffers: _Held[torch.Tensor] = _Held(self._modules, "_buffers")
        self._named_buffers = dict(self._buffers.named(self._prefixes))
        owners = zip(self._prefixes, self._modules, strict=True)
        self._with_buffers = [(prefix, module) for prefix, module in owners if len(module._buffers)]


class _Held(Generic[T]):
    """What each of some modules holds in its dictionary ``name``, at the time."""

    def __init__(self, modules: Sequence[torch.nn.Module], name: str) -> None:
        self._modules = modules
        self._dictionary = attrgetter(name)
        held = self._now()
        self._sizes = [*map(len, held)]
        self._names = [*chain.from_iterable(map(_keys, held))]
        self._contents = [*chain.from_iterable(map(_values, held))]

    def changed(self) -> bool:
        """Whether they hold something else now, or hold it elsewhere."""
        held = self._now()
        if [*map(len, held)] != self._sizes:
            return True
        held = [*compress(held, self._sizes)]  # few modules have children, and fewer have buffers
        same = map(is_, chain.from_iterable(map(_values, held)), self._contents)
        return not all(same) or [*chain.from_iterable(map(_keys, held))] != self._names

    def named(self, prefixes: Iterable[str]) -> Iterator[tuple[str, T]]:
        """All of it but ``None``, by full names: each once, by the first that it has."""
        owners = chain.from_iterable([prefix] * size for prefix, size in zip(prefixes, self._sizes, strict=True))
        seen: set[int] = set()
        for prefix, name, content in zip(owners, self._names, self._contents, strict=True):
            if content is not None and id(content) not in seen:
                seen.add(id(content))
                yield prefix + name, content

    def _now(self) -> list[dict[str, T | None]]:
        return [*map(self._dictionary, self._modules)]


def _not_persistent(module: torch.nn.Module) -> set[str]:
    return module._non_persistent_buffers_set  # torch has no public way but to make a whole state_dict
