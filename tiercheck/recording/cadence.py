"""Whether a base is due, on all ranks alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tiercheck.policy.guard import ask_cadence
from tiercheck.policy.policies import CadencePolicy, Progress
from tiercheck.replication.refusals import Refusals

__all__ = ["Cadence"]


class Cadence:
    """A cadence policy, asked once a version.

    If the policy looks at more than versions, rank 0 is asked and the others take its answer. They meet at the versions
    at which the policy wants to be asked, and at no other.
    """

    def __init__(
        self,
        policy: CadencePolicy,
        version: int,
        clock: Callable[[], float],
        agree: Callable[[bool], Awaitable[bool]] | None = None,
    ) -> None:
        """``version``: that at which the generation opened. ``clock``: seconds. ``agree``: rank 0's answer, on every
        rank; ``None``: this rank is alone."""
        self.refusals = Refusals()
        self._policy = policy
        self._clock = clock
        self._agree = None if policy.alike else agree
        self._last_due = version
        self._began_s = clock()
        self._asked = version
        self._answer = False
        self._decided = (version, False)

    def may_be_due(self, version: int) -> bool:
        """Whether :meth:`is_due` may say so."""
        if version == self._asked:
            return self._answer
        if self._policy.alike:
            return self._decide(version)
        return version % self._policy.check_every == 0 or version - self._last_due >= self._policy.interval

    async def is_due(self, version: int) -> bool:
        """Whether the version gets a base. Every rank asks for every version. Errors: those of ``agree``."""
        if version == self._asked:
            return self._answer
        due = version - self._last_due >= self._policy.interval
        if not due and (self._policy.alike or version % self._policy.check_every == 0):
            due = self._decide(version)
            if self._agree is not None:
                due = await self._agree(due)
        self._asked, self._answer = version, due
        if due:
            self._last_due, self._began_s = version, self._clock()
        return due

    def _decide(self, version: int) -> bool:
        if self._decided[0] != version:
            due, refusal = ask_cadence(self._policy, Progress(version, self._last_due, self._clock() - self._began_s))
            self.refusals.note("cadence", [] if refusal is None else [refusal])
            self._decided = version, due
        return self._decided[1]
