"""``tiercheck.open(url)``: what jobs have left in their tiers, listed, shown, verified and rebuilt from outside.

Nothing is ever written: no claim, no lock, no marker. A job that runs meanwhile is not disturbed, and what it deletes
is told as gone. Several tiers are one view.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tiercheck.archive.change.copying import Copied, copy
from tiercheck.archive.inventory import Generation, Inventory, Recoverable
from tiercheck.archive.tiers import CLOSE_S, look_into, opened_to_read
from tiercheck.archive.verify import Progress, Verified, verify
from tiercheck.errors import Closed, ConfigurationError, DeadlineExceeded, NotFound, RecoveryError, TierCheckError
from tiercheck.format.index.logical import MASTER
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.policy.recovery.spans import Span
from tiercheck.recovery.duration import Duration, duration, probe
from tiercheck.recovery.finding import refusals
from tiercheck.runtime.front import ThreadScheduler, run
from tiercheck.streams.state import ReplayRate

if TYPE_CHECKING:
    from tiercheck.archive.compare.versions import Compared
    from tiercheck.archive.contents import Contents
    from tiercheck.archive.export.write import Exported
    from tiercheck.archive.rebuild import RankState, StoredVersion

__all__ = ["Archive", "open"]

log = logging.getLogger(__name__)

T = TypeVar("T")

DEADLINE_S = 60.0
"""A tier that says nothing for so long is done without."""
FOREVER_S = 10.0**9
LOOKS_MAX = 5
"""A version that a job deletes while it is read is looked for again, so many times in a row."""


def open(url: str, *more_urls: str, deadline_s: float = DEADLINE_S) -> Archive:  # noqa: A001  tiercheck.open(url)
    """A read-only view of what jobs have left at these tier URLs. Close it, or use it as a context manager.

    ``deadline_s``: how long a tier may keep silent while it is opened or listed, or while a version is read.
    Errors: ``ConfigurationError`` for a URL that is none; ``TierError`` if no tier can be opened and listed.
    """
    return Archive(url, *more_urls, deadline_s=deadline_s)


@contextmanager
def needing_torch() -> Iterator[None]:
    """Imports what listing and verifying do without. Errors: ``ConfigurationError`` if torch is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigurationError("to look into versions needs torch: pip install 'tiercheck[torch]'") from error


class Archive:
    """See :func:`open`. It shows the tiers as they were when it was opened, or last looked at again (:meth:`look`): it
    does so by itself if a job has deleted what a version was to be read from. Of that version, or, unless one was asked
    for, of the newest one, it reads what there is then."""

    def __init__(self, *urls: str, deadline_s: float = DEADLINE_S) -> None:
        self._urls = urls
        self._deadline_s = deadline_s
        self._scheduler: ThreadScheduler | None = ThreadScheduler()
        self._stack = AsyncExitStack()
        try:
            self._hierarchy, self._away = self._call(self._opened(urls))
            self.inventory = self._call(self._looked())
            tiers = self.inventory.tiers
            if all(tier.away for tier in tiers) and (error := next((each.error for each in tiers if each.error), None)):
                raise error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the tiers. Idempotent."""
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            try:
                run(scheduler.call(self._stack.aclose(), what="closing the tiers", deadline_s=self._deadline_s))
            finally:
                with suppress(DeadlineExceeded):  # a call to a hung mount goes on; its thread is no one's any more
                    run(scheduler.close(deadline_s=CLOSE_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def look(self) -> None:
        """List the tiers again."""
        self.inventory = self._call(self._looked())

    # What there is

    @property
    def generations(self) -> tuple[Generation, ...]:
        """Each incarnation of the job, oldest first, and what is left of it."""
        return self.inventory.generations

    @property
    def versions(self) -> tuple[Span, ...]:
        """The versions that can be read, oldest first, as (first, last) of consecutive ones."""
        return self.inventory.spans

    @property
    def problems(self) -> tuple[str, ...]:
        """What a recovery would refuse or do without, in words."""
        return self.inventory.problems

    def plan(self, version: int | None = None, *, generation: int | None = None) -> Recoverable:
        """What a recovery to ``version`` (by default the newest) would read, from which tiers.

        ``generation``: as of that generation, whatever came later. Errors: ``RecoveryError`` if it cannot be read;
        without ``version`` also if a recovery would refuse what lies here.
        """
        if version is None and generation is None and self.inventory.branches:
            refusals.check(self.inventory.past)
        return self.inventory.at(version, generation=generation)

    def duration(self, chosen: Recoverable) -> Duration:
        """How long a recovery along this plan would take on machines like this one.

        Parts of its objects are read, at most 48 MiB from each tier (one whole object, if it gives no parts), and some
        steps of its optimizer are replayed on a state that is made up. What cannot be measured is told, and raises
        nothing.
        """
        sizes = {copy: self.inventory.nbytes(copy) for plan in chosen.plans for copy in plan.sources}
        rates = run(
            self._running().call(
                probe(self._hierarchy.tiers, sizes, deadline_s=self._deadline_s, clock=time.perf_counter),
                what="measuring the tiers",
                deadline_s=FOREVER_S,
            )
        )
        expected = partial(duration, chosen.plans, self._hierarchy.tiers, sizes, rates)
        if not any(point.replayed and not point.by_snapshot for point in chosen.points):
            return expected()
        elements, replay = self._replay_rate(chosen)
        return expected(elements=elements, replay=replay)

    def _replay_rate(self, chosen: Recoverable) -> tuple[int, ReplayRate]:
        try:
            with needing_torch():
                from tiercheck.archive.contents import read_contents
                from tiercheck.streams.replay.rate import replay_rate
            contents = self._call(read_contents(self._hierarchy, self.inventory, chosen, 0))
        except TierCheckError as error:
            return 0, ReplayRate(None, False, str(error))
        trained = (spec for spec in contents.tensors if spec.name.startswith(MASTER))
        elements = sum(math.prod(spec.shape) for spec in trained)
        return elements, replay_rate(contents.identity, contents.hyperparameters, elements)

    def show(self, version: int | None = None, *, rank: int = 0, generation: int | None = None) -> Contents:
        """What a rank has of a version: tensors, host state, and who wrote it. Errors: ``RecoveryError``."""
        with needing_torch():
            from tiercheck.archive.contents import read_contents

        def read(inventory: Inventory, chosen: Recoverable) -> Contents:
            return self._call(read_contents(self._hierarchy, inventory, chosen, rank))

        return self._reading(read, version, generation)

    def verify(self, progress: Progress = lambda done, total: None) -> Verified:
        """Read every byte of every object in all tiers, and say what would be lost without those that are damaged.

        ``progress`` is called in another thread.
        """
        return self._call(verify(self._hierarchy, self.inventory, self._deadline_s, progress), FOREVER_S)

    def rebuild(
        self, rank: int = 0, version: int | None = None, *, generation: int | None = None, threads: int | None = None
    ) -> RankState:
        """A rank's state at a version, bit for bit what the job would have recovered, without its model and trainer.

        Errors: ``RecoveryError``; ``ConfigurationError`` if steps must be replayed of an optimizer that is neither
        torch's nor registered; ``TierError``.
        """
        return self._reading(lambda *chosen: run(self._stored(*chosen).rebuild(rank, threads)), version, generation)

    def export(
        self,
        to: str | Path,
        format: str = "safetensors",
        version: int | None = None,
        *,
        generation: int | None = None,
        dtype: str | None = None,
        overwrite: bool = False,
        progress: Progress = lambda done, total: None,
    ) -> Exported:
        """Write the model of a version, whole and under its own names.

        ``format``: ``safetensors``, ``torch``, ``huggingface``, ``dcp``, or ``deepspeed``: a universal checkpoint, with
        the optimizer's state. ``dtype``: ``fp32``, ``bf16``, ``fp16``, or
        ``model`` (as the model had them); by default parameters are exported in the precision in which the optimizer
        held them. Buffers are never converted.

        The target gets its name when it is whole. Errors: as :meth:`rebuild`; ``ConfigurationError`` if the target is
        there already, unless ``overwrite``; ``TierError`` for what the target's file system refuses.
        """
        with needing_torch():
            from tiercheck.archive.export.write import Format, export

        try:
            chosen_format = Format(format)
        except ValueError:
            known = ", ".join(Format)
            raise ConfigurationError(f"there is no export format {format!r}: choose one of {known}") from None
        target = Path(to).absolute()

        def read(inventory: Inventory, chosen: Recoverable) -> Exported:
            source = self._stored(inventory, chosen)
            return run(export(source, target, chosen_format, dtype=dtype, overwrite=overwrite, progress=progress))

        return self._reading(read, version, generation)

    def diff(
        self,
        before: int,
        after: int,
        *,
        generation: int | None = None,
        other: Archive | None = None,
        other_generation: int | None = None,
        rank: int = 0,
        optimizer: bool = False,
        progress: Progress = lambda done, total: None,
    ) -> Compared:
        """What differs between two versions: every tensor of the model, and a rank's host state.

        ``other``: where the second version is, by default here too. ``generation``, ``other_generation``: as of that
        generation. ``optimizer``: the optimizer's tensors as well. Errors: as of :meth:`rebuild`.
        """
        with needing_torch():
            from tiercheck.archive.compare.versions import compare

        second = other or self

        def read(inventory: Inventory, chosen: Recoverable) -> Compared:
            one = self._stored(inventory, chosen)

            def with_other(inventory: Inventory, chosen: Recoverable) -> Compared:
                two = second._stored(inventory, chosen)
                return run(compare(one, two, rank=rank, optimizer=optimizer, progress=progress))

            return second._reading(with_other, after, other_generation)

        return self._reading(read, before, generation)

    def copy(
        self,
        to: str,
        version: int | None = None,
        *,
        generation: int | None = None,
        everything: bool = False,
        progress: Progress = lambda done, total: None,
    ) -> Copied:
        """Copy a version (by default the newest) into the tier at ``to``, or ``everything`` that is there.

        Each object is verified as it is read; one that is there already is not sent again, so that an interrupted copy
        goes on. Errors: ``RecoveryError`` if the version cannot be read; ``ConfigurationError``; ``JobConflict`` if the
        target holds another job; ``TierError`` naming the tier.
        """
        if everything and (version is not None or generation is not None):
            raise ConfigurationError("everything is copied, or one version: choose one of both")

        def read(inventory: Inventory, chosen: Recoverable | None) -> Copied:
            copying = copy(self._hierarchy, inventory, chosen, to, deadline_s=self._deadline_s, progress=progress)
            return self._call(copying, FOREVER_S)

        return read(self.inventory, None) if everything else self._reading(read, version, generation)

    # How

    async def _opened(self, urls: tuple[str, ...]) -> tuple[OpenHierarchy, dict[int, str]]:
        return await self._stack.enter_async_context(opened_to_read(urls, self._deadline_s))

    async def _looked(self) -> Inventory:
        looks = (look_into(tier, self._away.get(tier.index), self._deadline_s) for tier in self._hierarchy.tiers)
        return Inventory(tuple(await asyncio.gather(*looks)))

    def _reading(self, read: Callable[[Inventory, Recoverable], T], version: int | None, generation: int | None) -> T:
        """What ``read`` makes of the version, by what was listed. Errors: ``RecoveryError`` if its job deletes it."""
        looks = 0
        while True:
            inventory = self.inventory
            try:
                chosen = inventory.at(version, generation=generation)
            except RecoveryError as error:
                if not looks:
                    raise
                raise RecoveryError(f"{error}: it was deleted meanwhile, as its job goes on") from None
            try:
                return read(inventory, chosen)
            except (RecoveryError, NotFound) as error:
                self.look()
                if not self._is_gone(inventory, chosen):
                    raise
                looks += 1
                if looks > LOOKS_MAX:
                    raise RecoveryError(
                        f"version {chosen.version}: the job that goes on deletes each version before it is read: read "
                        f"from a tier that keeps versions for longer ({error})"
                    ) from error
                log.warning(
                    "version %d was deleted while it was read, as its job goes on: looking again", chosen.version
                )

    def _is_gone(self, inventory: Inventory, chosen: Recoverable) -> bool:
        """Whether something that the version was to be read from, by an older inventory, is not there any more. If a
        tier does not answer any more, nobody knows."""
        tiers = self.inventory.tiers
        if any(now.away and not before.away for before, now in zip(inventory.tiers, tiers, strict=True)):
            return False
        sources = (copy for plan in chosen.plans for copy in plan.sources)
        return any(not tiers[copy.tier].away and copy.key not in tiers[copy.tier].objects for copy in sources)

    def _stored(self, inventory: Inventory, chosen: Recoverable) -> StoredVersion:
        with needing_torch():
            from tiercheck.archive.rebuild import StoredVersion

        return StoredVersion(self._hierarchy, inventory, chosen, self._running(), self._deadline_s)

    def _running(self) -> ThreadScheduler:
        if self._scheduler is None:
            raise Closed("the archive is closed: open it again")
        return self._scheduler

    def _call(self, coroutine: Coroutine[Any, Any, T], deadline_s: float | None = None) -> T:
        within_s = 3 * self._deadline_s + CLOSE_S if deadline_s is None else deadline_s
        if self._scheduler is None:
            coroutine.close()
        return run(self._running().call(coroutine, what="reading the tiers", deadline_s=within_s))
