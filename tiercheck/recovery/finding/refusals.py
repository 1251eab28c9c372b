"""With which pasts no job goes on, and what the user may do then.

Evidence of a past is never read as a new job. If versions were saved, and no rank can come to one that all reach, the
job is refused, and the error names what was found where. So it is if two histories were put together, if a tier cannot
be asked that may hold something newer than the others, and if copies that are whole have another form than this job's
state.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from tiercheck.errors import Mismatch, RecoveryError
from tiercheck.keys import LineageKey
from tiercheck.policy.recovery.consensus import admitted
from tiercheck.policy.recovery.lineage import Branch, strangers
from tiercheck.policy.recovery.spans import contain, numbers_in
from tiercheck.recovery.finding.past import Past

__all__ = ["cannot_ask", "check", "check_form", "check_nothing_is_lost"]

log = logging.getLogger(__name__)

NAMED_MAX = 3
"""Objects that an error names."""
RANKS_NAMED_MAX = 16


def check(past: Past) -> None:
    """Errors: ``RecoveryError`` for two histories, and for versions whose lineage is lost."""
    check_numbers(past)
    if (newest := past.orphaned) is not None:
        older = f", or remove the objects {LineageKey(newest)} and r*/g{newest:06d}/* to go back to an older version"
        raise RecoveryError(
            f"there are versions of generation {newest}, but its record {LineageKey(newest)} is missing or damaged "
            f"in every tier ({past.places}): see first whether it is whole there and damaged on the way. Bring back a "
            f"tier that holds it (a copy that was broken off: copy again){older if past.branches else ''}"
        )
    check_strangers(past)
    check_places(past)


def check_numbers(past: Past) -> None:
    """Two jobs have opened generations of one number."""
    by_generation: dict[int, list[Branch]] = defaultdict(list)
    for branch in past.branches:
        by_generation[branch.generation].append(branch)
    for generation, rivals in sorted(by_generation.items()):
        if len(rivals) > 1:
            said = "; ".join(f"{branch.token} in {told_by(past, branch)}" for branch in rivals)
            raise RecoveryError(
                f"two jobs have each opened a generation {generation} here, and their versions must not be mixed "
                f"({said}). To go on with one of them remove all objects of the other from its tiers; or give this "
                f"job a place of its own"
            )


def told_by(past: Past, branch: Branch) -> str:
    digests = past.digests(branch)
    places = [
        place(past, tier, rank)
        for rank, each in enumerate(past.told)
        for tier, digest in enumerate(each.lineages)
        if digest in digests
    ]
    return first_of(list(dict.fromkeys(places)), ", ")


def check_strangers(past: Past) -> None:
    """A tier that all ranks share went on under another job while this one's memory stood still, or the other way
    round."""
    for tier in (tier for tier in past.tiers if tier.shared):
        for recorded in {each.recorded[tier.index] for each in past.different}:
            if others := strangers(past.lineage, numbers_in([recorded]), past.captured[tier.index]):
                there, newest, name = others[-1], past.lineage.newest, tier.name
                raise RecoveryError(
                    f"{name} holds versions of generation {there}, and the newest generation in the other tiers is "
                    f"{newest}, which does not come from it: the job was started without that tier, and went on "
                    f"from an older version. To go on from generation {there} remove {LineageKey(newest)} and "
                    f"r*/g{newest:06d}/* from the other tiers; to go on from generation {newest} remove "
                    f"{LineageKey(there)} and r*/g{there:06d}/* from {name}"
                )


def check_form(past: Past, version: int | None) -> None:
    """Errors: ``Mismatch`` if whole copies that this job cannot use lead to a newer version than ``version``."""
    if not any(each.unusable for each in past.different):
        return
    whole = past.version_of_whole_copies()
    if whole is None or (version is not None and version >= whole):
        return
    found: dict[str, list[str]] = defaultdict(list)
    for each in past.told:
        for why, copy in each.unusable:
            found[why].append(copy)
    said = [f"{why} ({first_of(places, ', ')})" for why, places in found.items()]
    raise Mismatch(
        f"version {whole} was saved whole, and this job cannot use it: {first_of(said, '; ')}. The tiers "
        "are as they were: resume with the model, the optimizer, the stateful= and the codecs that it was saved "
        "with; use another place; or remove these objects, if an older version is one that this job can use"
    )


def check_places(past: Past) -> None:
    """Without a shared tier, ranks that come back on each other's nodes may still meet somewhere, by what their new
    neighbours kept: at something older than what lies in sight of all of them together."""
    reached = past.version()
    if reached is None or any(tier.shared for tier in past.tiers):
        return  # check_nothing_is_lost(); what all ranks share serves ranks on any node
    if not any(each.others_last > reached for each in past.different):
        return
    reaches = {id(each): admitted(each.reach, past.own_lineage)[-1][1] for each in past.different}
    apart, newest = False, [reaches[id(each)] for each in past.told]
    for others in past.others:
        for tier, rank, generation, last in others:
            if rank < len(newest) and last > 0:
                # Of its own place an owner knows more than others see.
                apart |= last > reached and not contain(past.told[rank].own[tier], generation)
                if past.own_lineage.admits(generation, last):
                    newest[rank] = max(newest[rank], last)
    if apart and min(newest) > reached:
        raise RecoveryError(
            f"versions up to {min(newest)} of every rank were found, but where the ranks are now they can "
            f"all come to version {reached} only ({'; '.join(evidence(past))}): start the ranks on the nodes "
            f"where they were; have the agents there answer, so that it is read from them; or remove what is "
            f"newer from {past.places} to go on from version {reached}"
        )


def check_nothing_is_lost(
    past: Past, *, restart: bool, failed: Sequence[str] = (), lacking: str = "", advice: str = ""
) -> None:
    """The ranks cannot meet anywhere. That is fine if nothing was trained yet; else the user must say so.
    ``failed``: this rank's copies that cannot be used, and why, for the message; ``lacking``: what else tells of a
    past; ``advice``: what else the user may do.

    Errors: ``RecoveryError`` naming what was found where; with ``restart`` only if it may come back.
    """
    said = [*evidence(past), *([lacking] if lacking else [])]
    if not said or (past.only_begun and not lacking and not past.committed_to):
        if past.lineage.newest:
            log.warning(
                "generation %d was opened here, and nothing that was trained in it is left: this job begins at "
                "version 0",
                past.lineage.newest,
            )
        return
    newest = max([past.trained_to, past.committed_to, *(branch.left_at for branch in past.branches)])
    found = "; ".join(said)
    what = f"versions up to {newest} were saved, but there is no base that every rank can read ({found})"
    if failed:
        what += f"; {len(failed)} copies of this rank's cannot be used, the first of them {failed[0]}"
    whole = past.seen_by_others | {rank for rank, each in enumerate(past.told) if each.sound > 0}
    if not lacking and past.seen_by_others and whole == set(range(len(past.told))):
        raise RecoveryError(
            f"{what}. Every rank's versions were found, some of them on other ranks' nodes: start the ranks on the "
            "nodes where they were; have the agents there answer, so that it is read from them; or remove what is "
            f"left in {past.places} to begin at version 0"
        )
    if restart:
        log.error("%s. They are given up, and training begins anew at version 0 (on_nothing_left='restart')", what)
        return
    raise RecoveryError(
        f"{what}. Bring the missing tier back, or remove what is left in {past.places} to begin at version 0 "
        f'(CheckpointConfig(on_nothing_left="restart") does so by itself){advice}'
    )


def evidence(past: Past) -> list[str]:
    """What says that there were versions, for people."""
    said: list[str] = []
    for rank, told in enumerate(past.told if past.trained_to > 0 else ()):
        if rank == RANKS_NAMED_MAX:
            said.append("...")
            break
        own = [past.tiers[tier].name for tier, last in enumerate(told.last) if last >= 0]
        parts = [", ".join(sorted(own))] if own else []
        parts += [
            f"rank {of}'s up to {last} in {past.tiers[tier].name}"
            for tier, of, _, last in past.others[rank][:RANKS_NAMED_MAX]
            if last > 0
        ]
        said.append(f"rank {rank}: {', and '.join(parts) or 'nothing'}")
    if committed := past.committed_to:
        tiers = ", ".join(tier.name for tier in past.tiers if tier.shared)
        said.append(f"commit records (in {tiers}) tell of version {committed}, which was whole there")
    left = [branch for branch in past.branches if branch.left_at > 0]
    if left:
        newest = left[-1]
        said.append(f"generation {newest.generation} left generation {newest.parent} at version {newest.left_at}")
    return said


def place(past: Past, tier: int, rank: int) -> str:
    if tier >= len(past.tiers):
        return f"the memory of other nodes that rank {rank} has looked into"
    name = past.tiers[tier].name
    return name if past.tiers[tier].shared else f"{name} of rank {rank}"


def cannot_ask(past: Past, version: int | None) -> RecoveryError:
    """The error for tiers that are away and may hold something newer. ``version``: to which all ranks can come,
    each by its own shards."""
    said = [f"rank {rank}, tier {tier}: {error}" for rank, tier, error in past.away]
    reached = f"version {version} is the newest that was found"
    if version is None:
        reached = f"up to version {past.trained_to} was found" if past.trained_to > 0 else "nothing was found"
        if others := {str(each.world_size) for each, _ in past.eras if past.layout and not each.is_like(past.layout)}:
            reached += f", saved by {' and '.join(sorted(others))} ranks under another layout"
    return RecoveryError(
        f"a tier could not be asked what it holds ({first_of(said, '; ')}), and in the others {reached}: it may "
        "hold something newer, so that nothing is restored. Start again when it answers; correct its address; or "
        "leave it out of the hierarchy to go on without what it holds"
    )


def first_of(said: Sequence[str], separator: str) -> str:
    return separator.join([*said[:NAMED_MAX], *(["..."] if len(said) > NAMED_MAX else [])])
