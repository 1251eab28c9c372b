"""The tiers and nodes of a simulated cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from tiercheck.keys import Key, LineageKey
from tiercheck.policy.observation import Contents
from tiercheck.policy.recovery.lineage import Branch, LineageRecord

name_of = lru_cache(maxsize=None)(str)
"""The name of a key; the same few are listed at each action."""


class Tier(dict[Key, object]):
    """A tier's objects, and what a look at it shows."""

    def __init__(self, objects: Iterable[tuple[Key, object]] = ()) -> None:
        super().__init__(objects)
        self._contents = Contents.of((key, 1) for key in self)
        self._changed: dict[Key, int | None] = {}
        self._listed: dict[tuple[str, ...], Contents] = {}
        self._branches: dict[int, Branch] | None = None
        self.damaged: set[Key] = set()
        """Objects that a look shows, and that nobody can read."""

    def __setitem__(self, key: Key, value: object) -> None:
        super().__setitem__(key, value)
        self._note(key, 1)
        self.damaged.discard(key)

    def __delitem__(self, key: Key) -> None:
        super().__delitem__(key)
        self._note(key, None)
        self.damaged.discard(key)

    def clear(self) -> None:
        super().clear()
        self._contents, self._changed, self._listed, self._branches = Contents(), {}, {}, None
        self.damaged.clear()

    def _note(self, key: Key, nbytes: int | None) -> None:
        self._changed[key] = nbytes
        if isinstance(key, LineageKey):
            self._branches = None

    @property
    def branches(self) -> dict[int, Branch]:
        """What the lineage records tell, as a reader finds it: it reads those of which no newer one tells."""
        if self._branches is None:
            self._branches = self._read_branches()
        return self._branches

    def _read_branches(self) -> dict[int, Branch]:
        told: dict[int, Branch] = {}
        generations = sorted((key.generation for key in self if isinstance(key, LineageKey)), reverse=True)
        for generation in generations:
            if generation in told:
                continue
            record = self[LineageKey(generation)]
            assert isinstance(record, LineageRecord)
            for branch in (record.branch, *record.told):
                told.setdefault(branch.generation, branch)
        return told

    @property
    def recorded(self) -> set[int]:
        """Generations that have a record here, or of which one tells."""
        return {key.generation for key in self if isinstance(key, LineageKey)} | self.branches.keys()

    @property
    def contents(self) -> Contents:
        if self._changed:
            self._contents = self._contents.changed(self._changed)
            for prefixes, contents in self._listed.items():
                if changed := {key: size for key, size in self._changed.items() if name_of(key).startswith(prefixes)}:
                    self._listed[prefixes] = contents.changed(changed)
            self._changed = {}
        return self._contents

    def listed(self, prefixes: tuple[str, ...]) -> Contents:
        """What lies under any of these prefixes."""
        contents = self.contents
        if prefixes not in self._listed:
            self._listed[prefixes] = under(contents, prefixes)
        return self._listed[prefixes]


def under(contents: Contents, prefixes: tuple[str, ...]) -> Contents:
    return Contents.of((key, 1) for key in contents if name_of(key).startswith(prefixes))


@dataclass(eq=False)
class Node:
    """A machine's memory. It outlives the processes, and stays what it is when other ranks come to run there."""

    memory: Tier = field(default_factory=Tier)
    kept: Tier = field(default_factory=Tier)
    """What it keeps for its neighbour."""
