"""What attaching says in the log: in one line what was resumed, and in a line each what a user may not have meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tiercheck.hierarchy import OpenHierarchy
from tiercheck.policy.policies import KeepLast, RetentionPolicy
from tiercheck.policy.recovery.consensus import admitted
from tiercheck.policy.recovery.lineage import Branch
from tiercheck.policy.recovery.request import Request, Turn
from tiercheck.policy.recovery.spans import contain, spans_text
from tiercheck.recovery.finding.past import Past
from tiercheck.recovery.report import Recovery
from tiercheck.types import Fidelity, Survives, bytes_text

__all__ = [
    "begun",
    "doubtful_tiers",
    "given_up",
    "left_out",
    "nothing_outlives_a_node",
    "overruled_options",
    "repeated",
    "retention_without_effect",
    "trained_again",
    "turned",
]


PLACES_NAMED_MAX = 8
MOMENTA = frozenset({"betas", "momentum"})
"""What some schedulers move besides ``lr``."""


def begun(
    recovery: Recovery | None,
    read_from: Iterable[str],
    tiers: OpenHierarchy,
    branch: Branch,
    base_nbytes: int,
    saved_by: int = 0,
    again: str = "",
) -> str:
    """Where the job goes on: ``branch``. ``read_from``: the tiers, and the nodes' memory, that any rank read its state
    from, perhaps several times; ``base_nbytes``: of a rank. ``saved_by``: how many ranks saved the state; 0 if nobody
    tells. ``again``: what :func:`trained_again` says."""
    fails = what_fails(tiers.survives)
    goes_on = f"this is generation {branch.generation}, and what it saves outlives the failure of {fails}"
    if recovery is None and tiers.survives > Survives.PROCESS:
        last = tiers.tiers[-1].name
        goes_on += f", once each rank's first base (about {bytes_text(base_nbytes)}) has reached {last}"
    if recovery is None and branch.asked:
        return f"training begins at version 0, as {branch.asked} asks; {goes_on}"
    if recovery is None:
        places = ", ".join(tier.driver.url for tier in tiers.tiers)
        return f"nothing to resume from was found in {places}: training begins at version 0; {goes_on}"
    why = "" if recovery.fidelity is Fidelity.EXACT else f" ({'; '.join(recovery.notes)})"
    found = list(dict.fromkeys(read_from))
    named = ", ".join(found[:PLACES_NAMED_MAX]) + (", ..." if len(found) > PLACES_NAMED_MAX else "")
    others = f", saved by {saved_by} ranks and brought to {branch.world_size}"
    return (
        f"resumed after version {recovery.version}, {recovery.fidelity}{why}: base {recovery.point.anchor} of "
        f"generation {recovery.point.generation} and what follows it, from {named}"
        f"{others if saved_by not in (0, branch.world_size) else ''}{f'; {again}' if again else ''}; {goes_on}"
    )


def trained_again(past: Past, generation: int, version: int) -> str:
    """Which versions after ``version`` were found in its generation, damaged or not, and which ranks cannot come to
    them; empty if there are none."""
    found = (each.newest_trained for each in past.told)
    newest = max((last for of, last in found if of == generation), default=version)
    lineage = past.as_of(generation)
    behind = [str(rank) for rank, each in enumerate(past.told) if not contain(admitted(each.reach, lineage), newest)]
    if newest <= version or not behind:
        return ""
    of = f"rank{'s' * (len(behind) > 1)} {', '.join(behind[:PLACES_NAMED_MAX])}"
    more = ", ..." if len(behind) > PLACES_NAMED_MAX else ""
    lost = spans_text([(version + 1, newest)])
    return f"up to version {newest} was found, which {of}{more} cannot come to: {lost} is trained again"


def turned(turn: Turn, tiers: OpenHierarchy) -> str:
    """What a request that was carried out leaves behind, and how to return to it."""
    if not turn.behind:
        return f"{turn.request} was asked for, and is carried out: nothing is left behind"
    said = [f"{turn.request} was asked for, and is carried out: versions {spans_text(turn.behind)} are left behind"]
    if turn.staying:
        places = ", ".join(tier.name for tier in tiers.tiers if tier.role.shared)
        newest = turn.staying[-1][1]
        said.append(
            f"{spans_text(turn.staying)} of them stay in {places} until a start with keep_left_behind=False, and "
            f"version={newest}, generation={turn.newest} returns to them"
        )
    if turn.behind != turn.staying:
        said.append("what lies in tiers inside the nodes alone makes room")
    return "; ".join(said)


def repeated(request: Request, recovery: Recovery | None) -> str | None:
    """A request that an earlier start has carried out."""
    if not request or recovery is None:
        return None
    return (
        f"{request} was carried out by an earlier start, and the job goes on from its newest version, "
        f"{recovery.version}: to do it once more, start once without it"
    )


def given_up(kept: Sequence[int]) -> str:
    """``kept``: the generations that stayed until now."""
    named = ", ".join(map(str, kept))
    return (
        f"what was left behind of generations {named} is given up (keep_left_behind=False): it is deleted once this "
        "generation has a committed base"
    )


def left_out(generation: int, tiers: OpenHierarchy) -> str:
    """Of a checkpoint of another model a part was dropped."""
    places = ", ".join(tier.name for tier in tiers.tiers if tier.role.shared)
    if not places:
        return (
            "a part of what was saved is dropped, and no tier that all ranks share keeps it: it is lost when this "
            "generation has taken the room"
        )
    return (
        f"a part of what was saved is dropped. What {places} holds of generation {generation} stays there until a "
        "start with keep_left_behind=False: the model that saved it returns to it by version=..., "
        f"generation={generation} ('tiercheck ls' names the version)"
    )


def what_fails(survives: Survives) -> str:
    return "nothing, not even this process" if survives is Survives.NOTHING else f"a {survives.name.lower()}"


def nothing_outlives_a_node(tiers: OpenHierarchy, world_size: int) -> str | None:
    """A job of one process is told so in the line above, and who has said what must survive knows it."""
    if world_size == 1 or tiers.must_survive > Survives.NOTHING or tiers.survives >= Survives.NODE:
        return None
    held = ", ".join(tier.name for tier in tiers.tiers)
    return (
        f"no tier outlives the failure of a node ({held}): it would cost the run; add storage that all nodes reach or, "
        'on two nodes or more, a neighbour\'s memory (peer://NAME), or say must_survive="process"'
    )


def doubtful_tiers(tiers: OpenHierarchy) -> str | None:
    """What drivers see that speaks against what their URLs claim."""
    doubts = [f"{tier.name}: {doubt}" for tier in tiers.tiers for doubt in tier.driver.doubts()]
    return "; ".join(doubts) or None


def overruled_options(
    given: Sequence[Mapping[str, Any]], restored: Sequence[Mapping[str, Any]], *, scheduled: bool
) -> str | None:
    """The optimizer's options that the script gave otherwise than the checkpoint has them.

    A scheduler moves ``lr``: what it began with is compared then, or nothing (``scheduled``), where it does not tell.
    Some move the momentum, too: torch's say so in the group.
    What integrations have added under names of ours is state, and no option.
    """
    differing: list[str] = []
    for index, (before, after) in enumerate(zip(given, restored, strict=False)):
        differing += [
            f"without {name}, which was removed (group {index})"
            for name in before.keys() - after.keys()
            if not name.startswith("tiercheck.")
        ]
        moved = MOMENTA if scheduled or "max_momentum" in before.keys() & after.keys() else frozenset[str]()
        for name in before.keys() & after.keys() - {"initial_lr"} - moved:
            if name.startswith("tiercheck."):
                continue
            compared = name
            if name == "lr":
                if scheduled or ("initial_lr" in before) != ("initial_lr" in after):
                    continue
                compared = "initial_lr" if "initial_lr" in before else "lr"
            if plain(before[compared]) != plain(after[compared]):
                differing.append(f"{name}={after[compared]} instead of {before[compared]} (group {index})")
    if not differing:
        return None
    return (
        f"the checkpoint overrules the script: {', '.join(sorted(differing))}; to change an option, set it "
        "after attach (one of torch's in optimizer.param_groups)"
    )


def plain(value: object) -> object:
    """For comparison: what was read from a checkpoint may be a list where the optimizer has a tuple."""
    return list(value) if isinstance(value, tuple) else value


def retention_without_effect(tiers: OpenHierarchy, retention: RetentionPolicy) -> str | None:
    """A retention policy decides about shared tiers alone."""
    if isinstance(retention, KeepLast) or any(role.shared for role in tiers.roles):
        return None
    return (
        f"the retention policy {retention} has nothing to decide: no tier is shared by all ranks, so what leads to the "
        "version that they agree on stays, and nothing else; add one that is, such as nvme:///shared/path?survives=rack"
    )
