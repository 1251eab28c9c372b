"""``tiercheck.open_to_change(url)``: the same view as ``tiercheck.open(url)``, and verbs that delete."""

from __future__ import annotations

from collections.abc import Collection

from tiercheck.archive.archive import DEADLINE_S, FOREVER_S, Archive
from tiercheck.archive.change.deleting import carry_out
from tiercheck.archive.change.live import refuse_processes
from tiercheck.archive.change.pruning import prune, retention_of, verify_kept
from tiercheck.archive.change.removal import Removal
from tiercheck.archive.change.selection import of_generation, of_job, of_version
from tiercheck.archive.verify import Progress
from tiercheck.errors import ConfigurationError

__all__ = ["ChangeableArchive", "open_to_change"]


def open_to_change(url: str, *more_urls: str, deadline_s: float = DEADLINE_S) -> ChangeableArchive:
    """A view of what jobs have left at these tier URLs, and what deletes it. Close it, or use it as a context manager.

    The tiers are opened to be written to only while something is deleted. Errors: as of ``tiercheck.open``.
    """
    return ChangeableArchive(url, *more_urls, deadline_s=deadline_s)


class ChangeableArchive(Archive):
    """See :func:`open_to_change`."""

    def prune(
        self,
        *,
        keep_last: int = 0,
        keep_every: int = 0,
        keep_versions: Collection[int] = (),
        dry_run: bool = False,
        progress: Progress = lambda done, total: None,
    ) -> Removal:
        """Delete what none of these keeps: the last n committed bases and all that is newer, each committed base whose
        version is a multiple of k, and some versions. The newest committed base, and what is newer, stays in any case.
        Every byte of what leads to the newest version, and to those that are named, is verified first.

        ``dry_run``: say what would go. Errors: ``ConfigurationError`` if nothing says what is to stay;
        ``RecoveryError`` for what a recovery would refuse; ``JobConflict`` if a newer generation opens meanwhile;
        ``TierError`` naming the tier.
        """
        policy = retention_of(keep_last, keep_every, keep_versions)
        removal = prune(self.inventory, policy, keep_versions)
        if not dry_run:
            self._call(verify_kept(self._hierarchy, removal, keep_versions, self._deadline_s), FOREVER_S)
        return self._carried_out(removal, dry_run, progress)

    def rm(
        self,
        *,
        version: int | None = None,
        generation: int | None = None,
        job: bool = False,
        job_is_dead: bool = False,
        dry_run: bool = False,
        progress: Progress = lambda done, total: None,
    ) -> Removal:
        """Delete a base with what leads nowhere without it (``version``, and ``generation`` if several have it), all of
        a ``generation``, or all of the ``job``.

        What the newest generation needs is refused, unless ``job_is_dead``. ``dry_run``: say what would go. Errors:
        ``ConfigurationError``; ``JobConflict``, also if a process of this node uses the tiers; ``TierError``.
        """
        if job and (version is not None or generation is not None):
            raise ConfigurationError("a job is removed as a whole, or a version or a generation of it: choose one")
        if version is not None:
            removal = of_version(self.inventory, version, generation=generation, job_is_dead=job_is_dead)
        elif generation is not None:
            removal = of_generation(self.inventory, generation, job_is_dead=job_is_dead)
        elif job:
            removal = of_job(self.inventory, job_is_dead=job_is_dead)
        else:
            raise ConfigurationError(
                "nothing says what to remove: give version, generation or job (--version, --generation, --job)"
            )
        if job_is_dead:
            refuse_processes(self._hierarchy, self.inventory)
        return self._carried_out(removal, dry_run, progress)

    def _carried_out(self, removal: Removal, dry_run: bool, progress: Progress) -> Removal:
        if not dry_run:
            self._call(carry_out(removal, self._urls, deadline_s=self._deadline_s, progress=progress), FOREVER_S)
            self.look()
        return removal
