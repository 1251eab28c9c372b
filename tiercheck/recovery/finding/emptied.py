"""A tier that is empty, and was not: most likely its file system is not mounted.

The lineage record in a node's memory says which of the tiers that all ranks share had it before
(:func:`.open_generation`). Such a tier has a lineage record from then on: an older one is deleted only after a newer
one was put.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiercheck.errors import RecoveryError
from tiercheck.hierarchy import OpenTier
from tiercheck.recovery.finding.survey import Survey
from tiercheck.replication.objects.generation import EMPTIED

__all__ = ["refuse_emptied"]


def refuse_emptied(survey: Survey, tiers: Iterable[OpenTier]) -> None:
    """Errors: ``RecoveryError`` if one of ``tiers`` answers that it holds no lineage record, and another one says that
    it did."""
    away, recorded = dict(survey.away), {tier for tier, _ in survey.recorded}
    for tier in tiers:
        if tier.driver.url in survey.stores and tier.index not in away and tier.index not in recorded:
            raise RecoveryError(
                f"tier {tier.name} {EMPTIED}: {tier.driver.url} is not mounted, or was emptied. Mount it, and start "
                "again. If it was emptied on purpose, give the tier another place (a new directory or prefix), and "
                "what memory holds is copied there; or remove the job's memory to begin at version 0"
            )
