"""Actions that fail are tried again with growing pauses, each action for itself.

Trouble belongs to an action: what it does, and the object that it does it to. A base that cannot be committed or does
not fit, or an object that cannot be deleted, holds up nothing else. Only when several different objects cannot be
brought to a tier, one after the other, and for reasons that concern no single one of them, is the tier itself taken to
be away: then one object at a time is tried, and not the same one again and again.

A cause that holds up many objects is told when it begins, at growing counts while it lasts, and when it is over. Each
failure is logged at DEBUG in any case.
"""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tiercheck.errors import (
    CapacityExceeded,
    Closed,
    JobConflict,
    NotFound,
    SaveError,
    TierError,
    Transient,
    Unauthorized,
)
from tiercheck.hierarchy import OpenTier
from tiercheck.runtime.backoff import Backoff
from tiercheck.runtime.shutdown import process_ends

__all__ = ["RETRY", "TIER_AWAY_AFTER", "Action", "ProcessEnds", "SourceError", "TierBackoff"]

log = logging.getLogger(__name__)

RETRY = Backoff(0.5, 30.0)
TRIES_WAITED_FOR = 8
"""While somebody waits until a deadline, what has failed is tried again at least so often."""
TIER_AWAY_AFTER = 3
"""So many different actions must fail in a row, before the tier is taken to be away."""
TROUBLES_MAX = 256
"""With so many actions in trouble a tier counts as away, whatever the reasons: no more are tried and remembered."""
ERROR_CHARACTERS_MAX = 1000
TOLD_AGAIN_AFTER = 8
"""A cause that has been told is told again after so many failures, then after twice as many, and so on."""
CONCERNS_THE_TIER = (Transient, Unauthorized, Closed)


class SourceError(TierError):
    """What was to be copied could not be read. It says nothing about the tier that it was to be copied to."""


@dataclass(frozen=True)
class Action:
    """Something to do for one tier. Trouble with it is remembered under its kind and its object's key."""

    kind: str
    """What is being done, as a message says it: ``copying``, ``committing``."""
    key: str
    do: Callable[[], Awaitable[None]] = field(compare=False)
    into_tier: bool = True
    """It puts something into the tier, so that it waits while the tier is away."""

    @property
    def name(self) -> tuple[str, str]:
        return self.kind, self.key


@dataclass
class _Trouble:
    """Failures of one action in a row, or of a tier. Times are the event loop's, in seconds."""

    since: float
    failures: int = 0
    retry_at: float = 0.0
    not_before: float = 0.0
    """What takes long to fail gets half of the time at most."""
    error: str = ""
    cause: str = ""
    lacks_object: bool = False
    """An object is not there: what has failed before that, or with others, may say why."""

    def failed(self, now: float, error: str, cause: str, took_s: float, pause_max_s: float) -> None:
        self.failures += 1
        self.error, self.cause = error, cause
        self.not_before = now + took_s
        self.retry_at = max(self.not_before, now + min(RETRY.pause_s(self.failures), pause_max_s))

    def hurry(self, retry_at: float) -> None:
        """Try again then, if not before."""
        self.retry_at = max(self.not_before, min(self.retry_at, retry_at))


class ProcessEnds(SaveError):
    """The process ends without :meth:`Checkpointer.close`: the interpreter shuts down, and threads take no work."""


@dataclass
class _Cause:
    """What actions have failed of. It outlives their trouble: some actions are wanted only now and then."""

    since: float
    text: str
    """The message of the last one."""
    failures: int = 0
    kinds: set[str] = field(default_factory=set)
    """Of the actions that have failed of it."""

    @property
    def is_to_tell(self) -> bool:
        failures = self.failures
        return failures == 1 or (failures >= TOLD_AGAIN_AFTER and not failures & (failures - 1))


@dataclass
class _OfTier:
    actions: dict[tuple[str, str], _Trouble] = field(default_factory=dict)
    in_a_row: set[tuple[str, str]] = field(default_factory=set)
    """Actions that have failed since one has succeeded, for reasons that concern the tier."""
    away: _Trouble | None = None
    causes: dict[str, _Cause] = field(default_factory=dict)
    """Those that are not over, by their text."""
    was_full: bool = False
    """It has refused something for want of room."""
    traced: set[tuple[str, str, int]] = field(default_factory=set)
    """The unknown errors whose traceback was logged: what was being done, and the file and line that raised."""


class TierBackoff:
    """Remembers which actions, and which tiers, are in trouble."""

    def __init__(self) -> None:
        self._tiers: dict[str, _OfTier] = {}
        self._pauses_s: list[float] = []
        """The longest that those who wait have use for."""
        self._hurry = 0.0, RETRY.max_s
        """Until when somebody waits who says so again and again, and the longest pause that helps."""

    @asynccontextmanager
    async def waited_for(self, deadline_s: float) -> AsyncIterator[None]:
        """A context in which somebody waits so long at most. A tier that comes back meanwhile is seen in time: pauses
        are a fraction of the deadline. Who only asks (0) changes nothing."""
        pause_s = _pause_s(deadline_s) if deadline_s > 0 else RETRY.max_s
        self._pauses_s.append(pause_s)
        self._shorten(pause_s)
        try:
            yield
        finally:
            self._pauses_s.remove(pause_s)

    def hurry(self, seconds: float) -> None:
        """The same for the next ``seconds``: somebody waits who calls this again and again."""
        if seconds > 0:
            until, pause_s = self._hurry if _now() < self._hurry[0] else (0.0, RETRY.max_s)
            self._hurry = max(until, _now() + seconds), min(pause_s, _pause_s(seconds))
            self._shorten(_pause_s(seconds))

    def _shorten(self, pause_s: float) -> None:
        """Whatever pauses now goes on in so long at most."""
        for state in self._tiers.values():
            for trouble in (*state.actions.values(), *([state.away] if state.away else ())):
                trouble.hurry(_now() + pause_s)

    @property
    def _pause_max_s(self) -> float:
        until, pause_s = self._hurry
        return min([RETRY.max_s if _now() >= until else pause_s, *self._pauses_s])

    @property
    def errors(self) -> dict[str, str]:
        """Per tier in trouble: what has been failing for longest, with its object and its last error. That an object is
        not there is told only if nothing else fails."""
        return {name: _text(tier) for name, tier in self._tiers.items() if tier.actions}

    def failures(self, tier: OpenTier, name: tuple[str, str]) -> int:
        """How often the action has failed in a row."""
        trouble = self._of(tier).actions.get(name)
        return trouble.failures if trouble else 0

    def was_full(self, tier: OpenTier) -> bool:
        """Whether the tier has refused something for want of room, once or more."""
        return self._of(tier).was_full

    def in_trouble(self, tier: OpenTier, kind: str) -> set[str]:
        """The keys of such actions that have failed."""
        return {key for each, key in self._of(tier).actions if each == kind}

    def ordered(self, tier: OpenTier, actions: Iterable[Action]) -> list[Action]:
        """Those that have not failed first, as they come; then those whose last attempt is longest ago."""
        troubles = self._of(tier).actions
        return sorted(actions, key=lambda each: troubles[each.name].retry_at if each.name in troubles else 0.0)

    async def run(self, tier: OpenTier, action: Action) -> bool:
        """Run the action, unless it is pausing. ``False`` if it failed, or was not tried.

        Whatever it raises is its trouble, and logged. What is no tier's error is logged with its traceback once,
        however often it comes, and for however many objects. Errors: ``JobConflict``; ``ProcessEnds``.
        """
        state = self._of(tier)
        began = _now()
        trouble = state.actions.get(action.name)
        if trouble is not None and began < trouble.retry_at:
            return False
        if action.into_tier and state.away is not None and began < state.away.retry_at:
            return False
        try:
            await action.do()
        except JobConflict:
            raise
        except Exception as error:
            if process_ends(error):
                raise ProcessEnds("the process ends, and nothing can be moved any more") from error
            if not isinstance(error, TierError) and (raised := (action.kind, *_raised_at(error))) not in state.traced:
                state.traced.add(raised)
                log.exception("tier %s: %s", tier, _what(action.name))
            self.failed(tier, action, error, took_s=_now() - began)
            return False
        state.actions.pop(action.name, None)
        _tell_what_is_over(tier, state, action.kind)
        if action.into_tier:
            state.in_a_row.clear()
            state.away = None
        return True

    def keep(self, tier: OpenTier, kinds: Iterable[str], wanted: Iterable[Action]) -> None:
        """Forget the trouble of actions of these kinds that are wanted no more."""
        state, names, forgotten = self._of(tier), {action.name for action in wanted}, set(kinds)
        for name in [each for each in state.actions if each[0] in forgotten and each not in names]:
            del state.actions[name]
            state.in_a_row.discard(name)
        if not state.actions:
            state.away = None

    def failed(self, tier: OpenTier, action: Action, error: Exception, *, took_s: float = 0.0) -> None:
        """The action has failed."""
        state, now, text, why = self._of(tier), _now(), _text_of(error), _cause_of(error)
        trouble = state.actions.setdefault(action.name, _Trouble(now))
        if len(state.causes) >= TROUBLES_MAX:
            state.causes.clear()
        cause = state.causes.setdefault(why, _Cause(now, ""))
        cause.text = _message_of(error)
        cause.failures += 1
        cause.kinds.add(action.kind)
        most_s = self._pause_max_s
        trouble.failed(now, text, why, took_s, most_s)
        trouble.lacks_object = isinstance(error, NotFound)
        log.log(
            logging.WARNING if cause.is_to_tell else logging.DEBUG,
            "tier %s: %s: %s; trying again, every %g s at most%s",
            tier,
            _what(action.name),
            text,
            most_s,
            f" ({cause.failures} failures of this cause)" if cause.failures > 1 else "",
        )
        if not action.into_tier or isinstance(error, SourceError):
            return
        state.was_full = state.was_full or isinstance(error, CapacityExceeded)
        if isinstance(error, CONCERNS_THE_TIER):
            state.in_a_row.add(action.name)
        else:
            state.in_a_row.clear()  # it has answered
        if len(state.in_a_row) >= TIER_AWAY_AFTER or len(state.actions) >= TROUBLES_MAX:
            state.away = state.away or _Trouble(now)
            state.away.failed(now, text, why, took_s, most_s)
        else:
            state.away = None

    def _of(self, tier: OpenTier) -> _OfTier:
        return self._tiers.setdefault(tier.name, _OfTier())


def _tell_what_is_over(tier: OpenTier, state: _OfTier, kind: str) -> None:
    """An action of this kind has succeeded: what such actions have failed of is over, unless some still do."""
    lasting = {trouble.cause for trouble in state.actions.values()}
    for why, cause in list(state.causes.items()):
        if kind in cause.kinds and why not in lasting:
            del state.causes[why]
            times = f"{cause.failures} failures" if cause.failures > 1 else "one failure"
            # Whoever has read the warning is to read that it is over.
            log.warning("tier %s: over after %s in %.0f s: %s", tier, times, _now() - cause.since, cause.text)


def _text(tier: _OfTier) -> str:
    troubles = sorted(tier.actions.items(), key=lambda each: (each[1].lacks_object, each[1].since))
    (name, oldest), *others = troubles
    more = f" (and {len(others)} more in trouble)" if others else ""
    return f"{_what(name)}: {oldest.error}{more}"


def _text_of(error: Exception) -> str:
    text = str(error) if isinstance(error, TierError) else f"{type(error).__name__}: {error}"
    return text[:ERROR_CHARACTERS_MAX]


def _cause_of(error: Exception) -> str:
    """What the errors of several objects have in common: neither their keys, nor their lengths."""
    return re.sub(r"\d+", "N", _message_of(error))


def _message_of(error: Exception) -> str:
    """What is wrong, without whose error it is."""
    message = error.message if isinstance(error, TierError) else f"{type(error).__name__}: {error}"
    return message[:ERROR_CHARACTERS_MAX]


def _raised_at(error: Exception) -> tuple[str, int]:
    """The file and the line."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return (frames[0].filename, frames[0].lineno or 0) if frames else ("", 0)


def _what(name: tuple[str, str]) -> str:
    kind, key = name
    return f"{kind} {key}" if key else kind


def _pause_s(waits_s: float) -> float:
    """The longest pause that helps somebody who waits so long at most."""
    return max(RETRY.first_s, waits_s / TRIES_WAITED_FOR)


def _now() -> float:
    return asyncio.get_running_loop().time()
