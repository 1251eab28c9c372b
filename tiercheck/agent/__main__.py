"""``python -m tiercheck.agent SETTINGS``: an agent that a trainer starts, detached from it. SETTINGS is JSON."""

from __future__ import annotations

import os
import sys

__all__ = ["KILLED"]

KILLED = 128
"""The exit status of :func:`main` where a signal killed the agent: this, and the signal's number."""


def main() -> int:
    """Leave a child of the init process behind that is the agent; return once it is ready (0), or has failed or was
    killed.

    Whoever ends the trainer and its children, in whatever way, does not find the agent among them.
    """
    ready, readied = os.pipe()
    if agent := os.fork():
        os.close(readied)
        if os.read(ready, 1):
            return 0
        status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
        return KILLED - status if status < 0 else status or 1
    os.close(ready)
    os.setsid()
    os.chdir("/")
    os.umask(0o077)
    from tiercheck.agent.protocol.settings import AgentSettings
    from tiercheck.agent.server.process import run_agent

    def say_ready() -> None:
        os.write(readied, b"1")
        os.close(readied)

    run_agent(AgentSettings.from_json(sys.argv[1]), ready=say_ready)
    return 0


if __name__ == "__main__":
    sys.exit(main())
