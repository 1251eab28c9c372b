"""The node agent: the movers of a node's ranks, and a server for its neighbours, in a process that outlives the
trainers.

A trainer calls :func:`ensure_agent` and hands its checkpointer an :class:`RemoteMover`; a platform runs
:func:`run_agent` (``tiercheck agent``). The names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercheck.agent.client.client import AgentClient as AgentClient
    from tiercheck.agent.client.client import connect_agent as connect_agent
    from tiercheck.agent.client.client import ensure_agent as ensure_agent
    from tiercheck.agent.client.remote_mover import RemoteMover as RemoteMover
    from tiercheck.agent.protocol.rundir import default_node as default_node
    from tiercheck.agent.protocol.settings import AgentSettings as AgentSettings
    from tiercheck.agent.server.process import run_agent as run_agent

_MODULES = {
    "AgentClient": "tiercheck.agent.client.client",
    "RemoteMover": "tiercheck.agent.client.remote_mover",
    "AgentSettings": "tiercheck.agent.protocol.settings",
    "connect_agent": "tiercheck.agent.client.client",
    "default_node": "tiercheck.agent.protocol.rundir",
    "ensure_agent": "tiercheck.agent.client.client",
    "run_agent": "tiercheck.agent.server.process",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
