"""Whether a base is due, on all ranks alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tiercheck.policy.compose.cadence import by_versions_and_asked
from tiercheck.policy.guard import ask_cadence
from tiercheck.policy.policies import CadencePolicy, Progress
from tiercheck.replication.refusals import Refusals

__all__ = ["Cadence"]


class Cadence:
    """A cadence policy, asked once a version.

    What depends on versions alone, each rank computes. If the policy looks at more, rank 0 is asked and the others take
    its answer. They meet at the versions at which that part of the policy wants to be asked, and at no other.
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
        self._by_versions, self._of_rank_0 = by_versions_and_asked(policy)
        self._interval = policy.interval
        self._clock = clock
        self._agree = agree
        self._last_due = version
        self._began_s = clock()
        self._asked = version
        self._answer = False
        self._decided = {"cadence": (version, False), "cadence of rank 0": (version, False)}

    def may_be_due(self, version: int) -> bool:
        """Whether :meth:`is_due` may say so."""
        if version == self._asked:
            return self._answer
        return self._is_due_by_versions(version) or self._is_question(version)

    async def is_due(self, version: int) -> bool:
        """Whether the version gets a base. Every rank asks for every version. Errors: those of ``agree``."""
        if version == self._asked:
            return self._answer
        due = self._is_due_by_versions(version)
        if not due and self._of_rank_0 is not None and self._is_question(version):
            due = self._decide(self._of_rank_0, "cadence of rank 0", version)
            if self._agree is not None:
                due = await self._agree(due)
        self._asked, self._answer = version, due
        if due:
            self._last_due, self._began_s = version, self._clock()
        return due

    def _is_due_by_versions(self, version: int) -> bool:
        if version - self._last_due >= self._interval:
            return True
        return self._by_versions is not None and self._decide(self._by_versions, "cadence", version)

    def _is_question(self, version: int) -> bool:
        return self._of_rank_0 is not None and version % self._of_rank_0.check_every == 0

    def _decide(self, policy: CadencePolicy, part: str, version: int) -> bool:
        if self._decided[part][0] != version:
            due, refusal = ask_cadence(policy, Progress(version, self._last_due, self._clock() - self._began_s))
            self.refusals.note(part, [] if refusal is None else [refusal])
            self._decided[part] = version, due
        return self._decided[part][1]
