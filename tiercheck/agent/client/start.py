"""Starting an agent beside a trainer, once for all the ranks of a node."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tiercheck.agent.__main__ import KILLED
from tiercheck.agent.client.connection import AgentGone
from tiercheck.agent.protocol.rundir import RunDirectory, lock_file
from tiercheck.agent.protocol.settings import AgentSettings
from tiercheck.errors import ConfigurationError, DeadlineExceeded
from tiercheck.runtime.daemon_threads import DaemonThreads
from tiercheck.tiers.posix.files import unlock_and_close

__all__ = ["START_S_MAX", "start_detached", "starting"]

START_S_MAX = 60.0
LOCK_AGAIN_S = 0.05
AGAIN_S = 0.2


@asynccontextmanager
async def starting(run: RunDirectory, deadline_s: float) -> AsyncIterator[None]:
    """Inside, no other process of this node starts this agent. Errors: ``DeadlineExceeded``."""
    until = asyncio.get_running_loop().time() + deadline_s
    while (lock := lock_file(run.start_lock)) is None:
        if asyncio.get_running_loop().time() > until:
            raise DeadlineExceeded(
                f"another process has been starting the agent of node {run.node!r} for {deadline_s:g} s; the agent's "
                f"log ({run.log}) ends:\n{run.log_tail()}"
            )
        await asyncio.sleep(LOCK_AGAIN_S)
    try:
        yield
    finally:
        unlock_and_close(lock)


async def start_detached(
    run: RunDirectory, settings: AgentSettings, environment: Mapping[str, str], deadline_s: float
) -> None:
    """Start an agent that outlives this process, in this environment, and wait until it answers, or another one does.

    Errors: ``ConfigurationError`` if it ended instead; ``AgentGone`` if it was killed; ``DeadlineExceeded``; each with
    the end of its log.
    """
    thread = DaemonThreads(1, "tiercheck agent's start")
    spawned = thread.submit(lambda: _spawn(run, settings, environment, deadline_s))
    thread.end()
    spawning = asyncio.wrap_future(spawned)
    while not spawning.done():
        await asyncio.wait({spawning}, timeout=AGAIN_S)
        if not spawning.done() and run.incarnation():  # a platform has started one, for whose lock ours waits
            return
    try:
        code = spawning.result()
    except subprocess.TimeoutExpired:
        if run.agent_lives():
            return
        raise DeadlineExceeded(
            f"the agent of node {run.node!r} was not ready within {deadline_s:g} s; its log ({run.log}) ends:\n"
            f"{run.log_tail()}"
        ) from None
    if code and run.agent_lives():
        return  # one that a process had started which is dead: it was first
    if code >= KILLED:
        raise AgentGone(
            f"the agent of node {run.node!r} was killed while it started (signal {code - KILLED}); its log ({run.log}) "
            f"ends:\n{run.log_tail()}"
        )
    if code != 0:
        raise ConfigurationError(
            f"the agent of node {run.node!r} could not be started; its log ({run.log}) ends:\n{run.log_tail()}"
        )


def _spawn(run: RunDirectory, settings: AgentSettings, environment: Mapping[str, str], deadline_s: float) -> int:
    # What this process can import the agent must find too: a driver may come from anywhere on its path.
    path = os.pathsep.join(str(Path(place).absolute()) for place in sys.path)
    descriptor = os.open(run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        code = subprocess.run(
            [sys.executable, "-m", "tiercheck.agent", settings.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            env={**environment, "PYTHONPATH": path, "TIERCHECK_RUN_DIR": str(run.root)},
            timeout=deadline_s,
            check=False,
        ).returncode
        return code if code >= 0 else KILLED - code
    finally:
        os.close(descriptor)
