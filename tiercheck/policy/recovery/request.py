"""What a user asks for at a start: to go back to an older version on purpose, or to begin anew under an old name.

A request is carried out once. A launcher that starts a crashed job again repeats it: then the newest generation was
opened under the same request, and the job goes on from its newest version. Whoever wants to go back to the same version
once more starts once without the request.

What a request leaves behind is no part of the job's past any more. Its generations are *kept*: retention leaves them
alone in the tiers that all ranks share, until a start says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tiercheck.errors import ConfigurationError
from tiercheck.keys import GENERATION_MAX, VERSION_MAX
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.policy.recovery.spans import Span
from tiercheck.types import shown

__all__ = ["Request", "Turn", "kept_after", "newer"]


@dataclass(frozen=True)
class Request:
    """Where a job is to begin. By default: after the newest version that every rank can reach."""

    version: int | None = None
    """After this version, whatever came later."""
    generation: int | None = None
    """``version`` as this generation had it: of what was left behind. By default: of the job's own past."""
    fresh: bool = False
    """At version 0, whatever lies in the tiers."""

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("version", self.version, 0, VERSION_MAX),
            ("generation", self.generation, 1, GENERATION_MAX),
        ):
            if value is not None and (type(value) is not int or not least <= value <= most):
                raise ConfigurationError(f"{name} must be a whole number from {least} to {most}, not {shown(value)}")
        if not isinstance(self.fresh, bool):
            raise ConfigurationError(f"fresh must be bool, not {shown(self.fresh)}")
        if self.fresh and (self.version, self.generation) != (None, None):
            raise ConfigurationError("fresh begins at version 0: leave version and generation out, or leave fresh out")
        if self.generation is not None and self.version is None:
            raise ConfigurationError("generation says which version is meant: give version as well")

    def __bool__(self) -> bool:
        return self.fresh or self.version is not None

    def __str__(self) -> str:
        """As a lineage record tells it; empty if nothing is asked for."""
        if self.fresh:
            return "fresh=True"
        of = "" if self.generation is None else f", generation={self.generation}"
        return "" if self.version is None else f"version={self.version}{of}"

    def is_done(self, lineage: Lineage) -> bool:
        """Whether the newest generation was opened under this very request."""
        newest = lineage.branches.get(lineage.newest)
        return bool(self) and newest is not None and newest.asked == str(self)


@dataclass(frozen=True)
class Turn:
    """A request that is carried out, and what that leaves behind."""

    request: Request
    lineage: Lineage
    """What counts from here on: the past up to the version; nothing of it for ``fresh``."""
    kept: tuple[int, ...]
    """See :attr:`tiercheck.policy.recovery.lineage.Branch.kept`."""
    newest: int
    """The newest generation of what is left behind."""
    behind: tuple[Span, ...]
    """The versions that are left behind, of those that every rank could come to. Oldest first."""
    staying: tuple[Span, ...]
    """Those of them that every rank can come to by the tiers that all ranks share."""


def kept_after(before: Lineage, after: Lineage, newest: Mapping[int, int]) -> tuple[int, ...]:
    """The generations that are kept when a request turns from ``before`` to ``after``: those that lead to versions
    that count no more. ``newest``: of each generation, the newest version that some rank can come to."""
    known = dict(before.chain) if before.chain else dict.fromkeys(newest)
    limits: dict[int, int | None] = {**known, **dict.fromkeys(before.kept)}
    return tuple(
        sorted(
            generation
            for generation, limit in limits.items()
            if generation in newest
            and not after.admits(generation, newest[generation] if limit is None else min(newest[generation], limit))
        )
    )


def newer(spans: Iterable[Span], version: int) -> tuple[Span, ...]:
    """The versions among these after ``version``."""
    return tuple((max(first, version + 1), last) for first, last in spans if last > version)
