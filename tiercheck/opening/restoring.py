"""What was restored, as opening takes it over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tiercheck.recovery.report import Recovery
from tiercheck.recovery.restored import Restored
from tiercheck.recovery.stages.losses import made_before
from tiercheck.streams.state import StateStream
from tiercheck.types import Fidelity

__all__ = ["kept_by", "take_over"]


def kept_by(restored: Restored) -> tuple[int, ...]:
    """The generations that stay: also the one of which a part was left out."""
    return tuple(sorted({*restored.past.kept, *([restored.parent] if restored.dropped else [])}))


async def take_over(restored: Restored, stream: StateStream, caveats: Callable[[], Sequence[str]]) -> Recovery | None:
    """Give the stream the residuals. Returns the recovery: approximate, if an uninterrupted run would go on
    otherwise. Under another layout every run does, and the fidelity is that of the state alone."""
    recovery = restored.recovery
    if recovery is not None and (before := made_before(restored.past, restored.parent)):
        recovery = replace(recovery, fidelity=Fidelity.APPROXIMATE, notes=(*recovery.notes, *before))
    if recovery is not None and recovery.version > 0 and (why := caveats()):
        fidelity = recovery.fidelity if restored.converted else Fidelity.APPROXIMATE
        recovery = replace(recovery, fidelity=fidelity, notes=(*recovery.notes, *why))
    stream.load(restored.residuals)
    return recovery
