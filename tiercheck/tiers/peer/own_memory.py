"""A node's own memory, as its peer server shows it to the other nodes of a job: under a name that no put can use."""

from __future__ import annotations

__all__ = ["is_own", "name_of_own", "own_memory"]

OWN = "own:"


def own_memory(name: str) -> str:
    """What stands on the wire for the node's own namespace ``name``."""
    return OWN + name


def is_own(namespace: str) -> bool:
    """Whether the namespace, which may begin with an owner, is a node's own memory."""
    return namespace.rpartition("/")[2].startswith(OWN)


def name_of_own(namespace: str) -> str:
    return namespace.removeprefix(OWN)
