"""A user's request carried out at a recovery: what counts from here on, and what is left behind."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tiercheck.errors import RecoveryError
from tiercheck.policy.observation import Copy, Role
from tiercheck.policy.recovery.consensus import Reachable, Readable
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.policy.recovery.request import Request, Turn, kept_after, newer
from tiercheck.policy.recovery.spans import Span, contain, spans_text
from tiercheck.recovery.finding import refusals
from tiercheck.recovery.finding.past import Past
from tiercheck.recovery.ranks import Ranks

__all__ = ["is_to_turn", "turn", "unreachable"]


def is_to_turn(past: Past, request: Request) -> bool:
    """Whether the request is still to be carried out. A fresh beginning that came to nothing is made once more."""
    if request.is_done(past.lineage):
        return request.fresh and past.version() is None and past.only_begun
    return past.begun if request.fresh else bool(request)


async def turn(
    past: Past, request: Request, ranks: Ranks, own: Collection[Copy], roles: Sequence[Role], *, keeps: bool
) -> Turn:
    """``own``: this rank's copies. ``keeps``: what is left behind is to stay in the tiers that all ranks share.
    Collective. Errors: ``RecoveryError`` for a version that cannot be reached, and if nothing would stay."""
    if not request.fresh:
        refusals.check(past)
    of_all = {role.index for role in roles if role.shared}

    def tell() -> Reachable:
        return Readable.of(source.key for source in own if source.tier in of_all).reach()

    answers = await ranks.gather("what stays of what is left behind", tell, kind=Reachable)
    before, after = past.lineage, counting(past, request)
    shared = before.shared_with(after)
    behind = newer(past.left(), shared)
    if not keeps:
        return Turn(request, after, (), before.newest, behind, ())
    staying = newer(past.left(answers), shared)
    if behind and not staying:
        raise RecoveryError(
            f"{request} leaves versions {spans_text(behind)} behind, and no tier that all ranks share holds any of "
            "them: they would be lost, since the tiers inside the nodes need the room. To give them up, say so: "
            "CheckpointConfig(keep_left_behind=False)"
        )
    return Turn(request, after, kept_after(before, after, past.newest_of), before.newest, behind, staying)


def counting(past: Past, request: Request) -> Lineage:
    """What counts once the request is carried out. Errors: ``RecoveryError`` naming what can be reached."""
    if request.version is None:
        return Lineage(())
    of = past.lineage if request.generation is None else past.as_of(request.generation)
    counts = of.until(request.version)
    if not contain(past.versions(of), request.version) and not past.may_convert(counts, request.version):
        raise unreachable(past, request)
    return counts


def unreachable(past: Past, request: Request) -> RecoveryError:
    """The version cannot be reached, and these can."""
    known = [each.generation for each in past.branches]
    if request.generation is not None and request.generation not in known:
        there = ", ".join(map(str, sorted(known)))
        said = f"there is no generation {request.generation}: there are {there}"
        return RecoveryError(f"{request} was asked for, and {said}")
    others: Mapping[int, tuple[Span, ...]] = {each: past.versions(past.as_of(each)) for each in past.kept}
    within_reach = [
        f"there are {spans_text(past.versions())}",
        *(f"with generation={each} {spans_text(spans)}" for each, spans in others.items() if spans),
    ]
    return RecoveryError(f"{request} was asked for, and not every rank can come to it: {'; '.join(within_reach)}")
