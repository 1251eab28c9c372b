"""The node agent: the movers of a node's ranks, and a server for its neighbours, in a process that outlives the
trainers.

A trainer calls :func:`ensure_agent` and hands its checkpointer an :class:`AgentMover`; a platform runs
:func:`run_agent` (``tiercheck agent``). The names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercheck.agent.client import AgentClient as AgentClient
    from tiercheck.agent.client import connect_agent as connect_agent
    from tiercheck.agent.client import ensure_agent as ensure_agent
    from tiercheck.agent.life import run_agent as run_agent
    from tiercheck.agent.moving import AgentMover as AgentMover
    from tiercheck.agent.rundir import default_node as default_node
    from tiercheck.agent.settings import AgentSettings as AgentSettings

_MODULES = {
    "AgentClient": "tiercheck.agent.client",
    "AgentMover": "tiercheck.agent.moving",
    "AgentSettings": "tiercheck.agent.settings",
    "connect_agent": "tiercheck.agent.client",
    "default_node": "tiercheck.agent.rundir",
    "ensure_agent": "tiercheck.agent.client",
    "run_agent": "tiercheck.agent.life",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
