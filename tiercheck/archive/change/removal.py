"""What is to be removed from the tiers, as a value: named, counted, and compared with what stays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tiercheck.archive.inventory import Inventory
from tiercheck.keys import ClaimKey, CommitKey, Key, LineageKey, ShardKey, Stream
from tiercheck.policy.recovery.spans import Span, spans_of

__all__ = ["Removal", "in_order", "steps", "without"]


@dataclass(frozen=True)
class Removal:
    """What goes, by tier index, in the order in which it is deleted."""

    inventory: Inventory
    """What lies there now."""
    gone: Mapping[int, tuple[Key, ...]]
    refused: tuple[str, ...] = ()
    """What stays although it was asked for, and why, in words."""

    @property
    def objects(self) -> int:
        return sum(map(len, self.gone.values()))

    @property
    def nbytes(self) -> int:
        """That become free."""
        tiers = self.inventory.tiers
        return sum(tiers[index].objects[key].nbytes for index, keys in self.gone.items() for key in keys)

    @cached_property
    def after(self) -> Inventory:
        """What is left."""
        return without(self.inventory, self.gone)

    @property
    def versions(self) -> tuple[Span, ...]:
        """That can be read afterwards."""
        return self.after.spans

    @property
    def lost(self) -> tuple[Span, ...]:
        """Versions that can be read now, and not afterwards."""
        return spans_of(set(self.inventory.readable) - set(self.after.readable))

    @property
    def bases(self) -> tuple[tuple[int, int], ...]:
        """The bases that go: (generation, version)."""
        shards = (key for keys in self.gone.values() for key in keys if isinstance(key, ShardKey))
        return tuple(sorted({(key.generation, key.first) for key in shards if key.stream is Stream.BASE}))


def without(inventory: Inventory, gone: Mapping[int, Collection[Key]]) -> Inventory:
    tiers = []
    for index, tier in enumerate(inventory.tiers):
        going = set(gone.get(index, ()))
        left = {key: info for key, info in tier.objects.items() if key not in going}
        # A newer record tells of older generations; with all of them gone nobody knows of any.
        told = tier.branches if any(isinstance(key, LineageKey) for key in left) else ()
        tiers.append(replace(tier, objects=left, branches=told))
    return Inventory(tuple(tiers), inventory.without)


def in_order(keys: Iterable[Key]) -> tuple[Key, ...]:
    """The order in which objects of a tier are deleted; see :func:`steps`."""
    return tuple(sorted(keys, key=lambda key: (step_of(key), *newest_first(key), str(key))))


def steps(keys: Iterable[Key]) -> list[list[Key]]:
    """What is deleted in one step is gone before the next one begins: commit records before what they speak of, bases
    after everything else, and what they refer to last. So whoever looks meanwhile is told nothing that is not so, and a
    removal that was interrupted is found, and goes on, when it is asked for again."""
    found: list[list[Key]] = [[], [], [], [], [], []]
    for key in in_order(keys):
        found[step_of(key)].append(key)
    return [each for each in found if each]


def step_of(key: Key) -> int:
    match key:
        case CommitKey():
            return 0
        case LineageKey() | ClaimKey():
            return 1
        case ShardKey():
            return {Stream.BASE: 4, Stream.CONSTANT: 5}.get(key.stream, 3)
    return 2


def newest_first(key: Key) -> tuple[int, int]:
    return (-key.generation, -key.last) if isinstance(key, ShardKey) else (0, 0)
