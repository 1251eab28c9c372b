"""What a version may not hold, as far as the process that saved it knew. It is saved with the host state.

A replay may be bit for bit, and the state it leads to still not the one that the interrupted run went on with: then the
loop has written outside of what the version holds. A recovery says so, and is approximate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = ["KEY", "NAMES_MAX", "Doubts", "listed"]

KEY = "doubts"
"""In the host state. Absent if there are none."""
NAMES_MAX = 16
"""Of each kind so many are named; a version's host state stays small."""

_END = "call checkpointer.end_iteration() behind the last thing that an iteration changes"


@dataclass(frozen=True)
class Doubts:
    """By kind, the names of what was seen to change."""

    late: tuple[str, ...] = ()
    """Tensors that the loop writes to after a version was published: no version of then holds that."""
    unseen: tuple[str, ...] = ()
    """Trained tensors, or what else of a base by its name there, that have other bits than the differentials lead to.
    Nothing but a comparison of all their bits has seen that."""
    moved: tuple[str, ...] = ()
    """What was passed as ``stateful`` and moved between the optimizer's step and the next forward pass: as a data
    loader does, whose position must be saved before, or as an average, which must be saved after."""
    apart: tuple[str, ...] = ()
    """Tensors that all ranks are to hold alike, and that one rank stores: they differ between the ranks, or something
    has written to them on another rank, and they were not compared since."""

    def with_late(self, names: tuple[str, ...]) -> Doubts:
        return replace(self, late=together(self.late, names))

    def with_unseen(self, names: tuple[str, ...]) -> Doubts:
        return replace(self, unseen=together(self.unseen, names))

    def with_apart(self, names: tuple[str, ...]) -> Doubts:
        return replace(self, apart=together(self.apart, names))

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def saved_in(self, host_state: dict[str, Any]) -> dict[str, Any]:
        """The host state with these doubts besides those that it has."""
        has = vars(Doubts.of(host_state))
        every = {kind: list(together(has[kind], names)) for kind, names in vars(self).items()}
        found = {kind: names for kind, names in every.items() if names}
        return {**host_state, KEY: found} if found else host_state

    @classmethod
    def of(cls, host_state: Mapping[str, Any]) -> Doubts:
        """What a version's host state says. Errors: ``ValueError`` if that is malformed."""
        found = host_state.get(KEY, {}) if isinstance(host_state, Mapping) else None
        if not isinstance(found, Mapping) or found.keys() - {each.name for each in fields(cls)}:
            raise ValueError("the doubts of a version are malformed")
        for names in found.values():
            plain = isinstance(names, list) and all(isinstance(each, str) for each in names)
            if not plain or len(names) > NAMES_MAX:
                raise ValueError("the doubts of a version are malformed")
        return cls(**{kind: tuple(names) for kind, names in found.items()})

    def notes(self, *, replayed: bool) -> list[str]:
        """Why a recovery of the version is approximate, in words; empty if it is not.

        ``replayed``: whether differentials led to the version, or it was read as a base."""
        notes: list[str] = []
        if self.late:
            notes.append(
                f"the loop wrote to {listed(self.late)} after versions had been saved, which none of them holds: {_END}"
            )
        if self.unseen and replayed:
            notes.append(
                f"something wrote to {listed(self.unseen)} without torch counting it (through .data, perhaps), or "
                "memory or arithmetic has failed, and no differential holds that: use in-place operations under "
                "torch.no_grad()"
            )
        if self.moved:
            notes.append(
                f"{listed(self.moved)} moved between the optimizer's step and the next forward pass, and nothing tells "
                f"which iteration that belongs to: {_END}; or pass what is updated after the step in after_step="
            )
        if self.apart:
            notes.append(
                f"{listed(self.apart)} may differ between the ranks, which are to hold them alike: something other "
                "than the optimizer's step wrote to them, or each rank stepped with gradients of its own; one rank "
                "stores them, and all have what it had. If they are to differ, start with "
                "CheckpointConfig(replicas='each')"
            )
        return notes


def listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) + (", and perhaps others" if len(names) == NAMES_MAX else "")


def together(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*first, *second]))[:NAMES_MAX]
