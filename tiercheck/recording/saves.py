"""What saving has done and cost on one rank, and what becomes of a save that fails."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from tiercheck.config import CheckpointConfig
from tiercheck.errors import DeadlineExceeded, GroupError, JobConflict, SaveError, TierCheckError, TierError
from tiercheck.recording.modes import BaseEvent, Modes
from tiercheck.recording.stats import Stats
from tiercheck.replication.handle import MoverHandle
from tiercheck.runtime.runtime import Scheduler
from tiercheck.streams.doubts import Doubts
from tiercheck.streams.state import StateStream

__all__ = ["TELL_S", "Saves", "ask_mover", "doubt"]

log = logging.getLogger(__name__)

T = TypeVar("T")

TELL_S = 5.0
"""After so many seconds of waiting for the tiers there is a warning."""
TOLD_S = 5.0
"""The time that the mover may take beyond its own deadline. Its own error names the tier for which it waits."""


class Saves:
    """Counts the saves of one rank, and decides what a failed one means: ``on_save_error`` says so."""

    def __init__(self, config: CheckpointConfig, modes: Modes) -> None:
        self.stats = Stats()
        self.failure: str | None = None
        """Why the newest version could not be saved, if that was raised."""
        self._config = config
        self._modes = modes
        self._failed = (0, 0)
        """The version whose save failed last, and how many in a row had failed then."""

    def count(self, **more: float) -> None:
        self.stats = self.stats.plus(**more)

    def note_not_folded(self, why: str) -> None:
        self.stats = replace(self.stats, not_folded=why)

    @contextmanager
    def saving(self, version: int, *, recorded: bool = False) -> Iterator[None]:
        """A context for a save of the version. ``recorded``: its differential is there, and its base is made. Errors:
        ``SaveError``; what is no failure of a save."""
        try:
            yield
        except Exception as error:
            if not self.failed(version, error, recorded=recorded):
                raise

    def failed(self, version: int, error: BaseException, *, recorded: bool = False) -> bool:
        """A save has failed. Returns whether training goes on. Errors: ``SaveError``."""
        if not isinstance(error, TierError | DeadlineExceeded | GroupError | SaveError):
            return False
        self._modes.base.on(BaseEvent.NEEDED)
        self.count(failed_saves=1)
        what = f"version {version} is saved as a differential, but its base could not be made" if recorded else ""
        message = f"{what or f'version {version} could not be saved'}: {error}"
        if self._config.on_save_error == "fail":
            self.failure = message
            raise SaveError(message) from error
        last, failed = self._failed
        failed = 1 if version > last + 1 else failed + (version > last)
        self._failed = version, failed
        again = f" ({failed} versions in a row)" if failed > 1 else ""
        # The first, the second, the fourth...: a tier may be away for hours.
        level = logging.DEBUG if failed & (failed - 1) else logging.ERROR
        log.log(level, "%s%s; training goes on, and the next version gets a base", message, again)
        return True


def doubt(stream: StateStream, doubts: Doubts) -> bool:
    """Record ``doubts`` with all later versions. Returns whether they are new."""
    if doubts == stream.doubts:
        return False
    stream.doubts = doubts
    log.warning("versions from here on are approximate: %s", "; ".join(doubts.notes(replayed=True)))
    return True


async def ask_mover(
    scheduler: Scheduler,
    mover: MoverHandle,
    call: Coroutine[Any, Any, T],
    what: str,
    deadline_s: float,
    *,
    flushes: bool = False,
    folds: bool = False,
) -> T:
    """Wait for a call to the mover that has this deadline, and say so if it takes long. ``flushes``: it waits for all
    tiers. ``folds``: and for folding, while that is being prepared. Errors: ``JobConflict``; else ``SaveError``."""

    def holds_up() -> str:
        if folds and mover.status.prepares_folding and mover.status.not_folded:
            return mover.status.not_folded
        return mover.status.holds_up_a_flush if flushes else mover.status.holds_up

    asking = scheduler.start(call)
    try:
        if deadline_s > TELL_S and not await scheduler.ends(asking, TELL_S):
            held_up = holds_up() or "the tiers are not done yet"
            log.warning("%s is waited for, for up to %g s: %s", what, deadline_s, held_up)
            deadline_s -= TELL_S
        return await scheduler.result(asking, what=what, deadline_s=deadline_s + TOLD_S)
    except JobConflict:
        raise
    except TierCheckError as error:
        why = str(error) if str(error).startswith(what) else f"{what}: {error}"
        if isinstance(error, DeadlineExceeded) and holds_up() not in why:
            why += f" ({holds_up()})"
        raise SaveError(why) from error
    finally:
        asking.cancel()  # of one that is done, and of one that nobody waits for any more
