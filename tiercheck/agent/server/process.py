"""An agent as a process: from its start to its signals and its end."""

from __future__ import annotations

import asyncio
import importlib
import logging
import logging.handlers
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.agent.protocol.settings import AgentSettings
from tiercheck.agent.server.service import Agent
from tiercheck.errors import TierCheckError
from tiercheck.runtime.descriptors import allow_many_descriptors
from tiercheck.runtime.priority import stand_back

__all__ = ["run_agent"]

log = logging.getLogger(__name__)

LOG_BYTES_MAX = 4 << 20
SIGNALS = (signal.SIGTERM, signal.SIGINT)
END_S_MAX = 20.0
"""What the end may take once everything is drained."""
AT_ONCE_S_MAX = 3.0
"""The same, for whoever was told twice."""


def run_agent(settings: AgentSettings, *, ready: Callable[[], None] | None = None) -> None:
    """Be the agent of this node, in this process, until told to end. ``ready`` is called once it answers.

    SIGTERM (or SIGINT): everything captured is brought to where it belongs, within ``settings.drain_s``; a second one
    ends it at once. A store that does not answer holds up neither: then the process ends with exit status 1, wherever
    its threads are. SIGKILL costs a pause: the next agent goes on with what the tiers hold.
    Errors: ``JobConflict`` if another agent of this name runs; ``ConfigurationError``. A detached one writes them
    to its log.
    """
    log_to(settings)
    # Its movers reach the neighbours' servers with the same keys.
    if settings.keys is not None:
        os.environ.setdefault("TIERCHECK_KEYS", settings.keys)
    if settings.peer_bind:
        importlib.import_module("tiercheck.tiers.peer")  # what is to be loaded is loaded before standing back
    log.info("standing back: %s", stand_back())
    allow_many_descriptors()
    last_resort = LastResort()
    try:
        asyncio.run(_live(settings, ready, last_resort))
    except TierCheckError as error:
        if not settings.detached:
            raise
        log.error("%s", error)
        sys.exit(1)
    except asyncio.CancelledError:
        log.warning("told to end twice: what is not yet moved stays in its first tier")
    finally:
        last_resort.disarm()
    log.info("ended")


class LastResort:
    """Ends the process from a thread of its own, where threads that wait for a store can neither be broken off nor
    waited for."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None
        self._at = math.inf

    def arm(self, seconds: float) -> None:
        """End the process after so long, unless it is to end sooner already."""
        at = time.monotonic() + seconds
        if at >= self._at:
            return
        self.disarm()
        self._at = at
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        log.warning("a tier does not answer: ended without it; what is not yet moved stays in its first tier")
        os._exit(1)


async def _live(settings: AgentSettings, ready: Callable[[], None] | None, last_resort: LastResort) -> None:
    async with Agent(settings) as agent:
        serving = asyncio.ensure_future(agent.serve())

        def told_to_end(number: signal.Signals) -> None:
            if agent.ending.is_set():
                serving.cancel()
                last_resort.arm(AT_ONCE_S_MAX)
            log.info("%s: ending", number.name)
            agent.ending.set()

        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, told_to_end, number)
        loop.add_signal_handler(signal.SIGHUP, lambda: None)  # the terminal it was started from is gone: what of it?
        if ready is not None:
            ready()
        try:
            await serving
        finally:
            last_resort.arm(END_S_MAX)


def log_to(settings: AgentSettings) -> None:
    """Log to the run directory where a trainer started the agent, else to standard error, which the platform keeps."""
    handler: logging.Handler = logging.StreamHandler()
    if settings.detached:
        run = RunDirectory.of(settings.node)
        handler = logging.handlers.RotatingFileHandler(run.log, maxBytes=LOG_BYTES_MAX, backupCount=1)
        with suppress(FileNotFoundError):
            run.log.chmod(0o600)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
