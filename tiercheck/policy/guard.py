"""What stands between a policy and what is done: a decision that would break an invariant is refused by name.

A policy that raises, or answers with something else than a decision, never stops saving. It is refused, and the safe
decision is taken instead: a base is due, a shard goes everywhere, everything stays, copies are not paced.

Every deletion is checked here once more, whoever decided it, by rules that share no code with what decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tiercheck.errors import ConfigurationError
from tiercheck.keys import VERSION_MAX, CommitKey, Key, LineageKey, MarkerKey, ShardKey, Stream
from tiercheck.policy.attempts import left_by_attempts
from tiercheck.policy.compose.cadence import CadencePolicy, Progress
from tiercheck.policy.compose.pacing import Copying, PacingPolicy
from tiercheck.policy.compose.placement import Candidate, PlacementPolicy
from tiercheck.policy.compose.retention import Committed, Keep, RetentionPolicy
from tiercheck.policy.observation import Observation, Role
from tiercheck.policy.recovery.agreement import way_to_mark
from tiercheck.types import Survives, shown

__all__ = [
    "Refusal",
    "ask_cadence",
    "ask_pacing",
    "ask_placement",
    "ask_retention",
    "checked_deletions",
    "refuse_no_versions",
    "refuse_uncovered",
]

T = TypeVar("T")

NAMED_MAX = 3
CHARS_MAX = 300
BYTES_PER_S_MIN = 1.0


@dataclass(frozen=True)
class Refusal:
    """A decision that was not carried out."""

    policy: str
    reason: str

    def __str__(self) -> str:
        return f"{self.policy} is refused: {self.reason}"


def ask_cadence(policy: CadencePolicy, seen: Progress) -> tuple[bool, Refusal | None]:
    """Whether a base is due. It is, whatever the policy says, when its interval has passed since the last one."""
    due, refusal = _asked(policy, lambda: policy.due(seen), bool, True)
    return due or seen.version - seen.last_due >= policy.interval, refusal


def refuse_no_versions(policy: CadencePolicy) -> None:
    """Errors: ``ConfigurationError`` for a cadence whose ``interval`` or ``check_every`` is no number of versions. Both
    are read outside of a decision, and have no safe value to be taken instead."""
    for name in ("interval", "check_every"):
        try:
            given = getattr(policy, name)
        except Exception as error:
            raise ConfigurationError(
                f"the cadence {_name(policy)}: {name} raises {type(error).__name__}: {error}"
            ) from error
        if type(given) is not int or not 1 <= given <= VERSION_MAX:
            raise ConfigurationError(
                f"the cadence {_name(policy)}: {name} must be a number of versions, from 1 to {VERSION_MAX}, not "
                f"{shown(given, CHARS_MAX)}"
            )


def ask_placement(policy: PlacementPolicy, shard: Candidate) -> tuple[bool, Refusal | None]:
    """Whether the shard is to go to the tier."""
    return _asked(policy, lambda: policy.wants(shard), bool, True)


def ask_retention(policy: RetentionPolicy, seen: Committed) -> tuple[Keep, Refusal | None]:
    """What is to stay."""
    everything = Keep(since=seen.bases[0])
    kept, refusal = _asked(policy, lambda: policy.keep(seen), Keep, everything)
    if refusal is None and not _is_sound(kept):
        return everything, Refusal(_name(policy), f"it keeps {shown(kept, CHARS_MAX)}, which are no versions")
    return kept, refusal


def ask_pacing(policy: PacingPolicy, seen: Copying) -> tuple[float | None, Refusal | None]:
    """Bytes per second; ``None``: unpaced."""
    try:
        rate = policy.bytes_per_s(seen)
    except Exception as error:  # noqa: BLE001  whatever it raises is what it is refused for
        return None, _raised(policy, error)
    if rate is None:
        return None, None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or math.isnan(rate) or rate < BYTES_PER_S_MIN:
        return None, Refusal(
            _name(policy), f"at {shown(rate)} bytes per second nothing would reach the tier {seen.tier}"
        )
    return float(rate), None


def refuse_uncovered(policy: PlacementPolicy, roles: Sequence[Role], must_survive: Survives, intervals: int) -> None:
    """Errors: ``ConfigurationError`` if every tier that survives ``must_survive`` would get no base in so many
    intervals, apart from the first one of a generation."""
    covering = [role for role in roles[1:] if role.survives >= must_survive]
    if must_survive is Survives.NOTHING or not covering or roles[0].survives >= must_survive:
        return
    for role in covering:
        for number in range(1, intervals + 1):
            base = Candidate(role.name, role.survives, Stream.BASE, number, number, number)
            if ask_placement(policy, base)[0]:
                return
    names = ", ".join(role.name for role in covering)
    raise ConfigurationError(
        f"the placement policy {_name(policy)} is refused: it sends no base to {names}, and no other tier survives a "
        f"{must_survive.name.lower()} failure, which must_survive asks for"
    )


def checked_deletions(
    seen: Observation, gone: Mapping[int, Sequence[Key]], policy: str
) -> tuple[dict[int, list[Key]], list[Refusal]]:
    """The deletions that break no invariant, by tier index, and a refusal for each tier with others. ``policy``: who
    decided them."""
    allowed: dict[int, list[Key]] = {}
    refusals: list[Refusal] = []
    for role in seen.roles:
        wanted = list(gone.get(role.index, ()))
        if not wanted:
            allowed[role.index] = []
            continue
        reasons = _Needed.of(seen, role)
        kept = {key: reason for key in wanted if (reason := reasons.why(key)) is not None}
        allowed[role.index] = [key for key in wanted if key not in kept]
        if kept:
            named = ", ".join(map(str, list(kept)[:NAMED_MAX])) + (", ..." if len(kept) > NAMED_MAX else "")
            reason = next(iter(kept.values()))
            refusals.append(Refusal(policy, f"it would delete {named} from the tier {role.name}, {reason}"))
    lost = _lost_way(seen, allowed)
    if lost is not None:
        for role in seen.roles:
            allowed[role.index] = [key for key in allowed[role.index] if not _is_own(seen, key)]
        refusals.append(Refusal(policy, f"it would delete what a recovery to version {lost} needs"))
    return allowed, refusals


@dataclass(frozen=True)
class _Needed:
    """What a recovery may need in one tier."""

    seen: Observation
    role: Role
    floor: tuple[int, int] | None
    """The newest base (generation, version) from which a recovery by this tier starts; ``None``: there is none."""
    whole: bool
    """Whether the present generation has that base: else of older ones nothing but ``attempts`` may go from a shared
    tier."""
    attempts: frozenset[Key]
    """What older generations have left there, and nobody needs."""

    @classmethod
    def of(cls, seen: Observation, role: Role) -> _Needed:
        contents = seen.contents[role.index]
        held = {(base.generation, base.first) for base in contents.bases(seen.rank) if contents.completes(base)}
        if role.shared:
            committed = {(each.generation, each.version) for each in contents.commits}
            held = {each for each in held & committed if seen.lineage.admits(*each)}
        floor = max(held, default=None)
        whole = floor is not None and floor[0] == seen.generation
        attempts = frozenset(left_by_attempts(seen, contents) if role.shared and not whole else ())
        return cls(seen, role, floor, whole, attempts)

    def why(self, key: Key) -> str | None:
        """Why the object may not be deleted; ``None``: it may."""
        seen, shared = self.seen, self.role.shared
        if key in self.attempts:
            return None
        match key:
            case ShardKey(stream=Stream.CONSTANT) if (base := self._referring(key)) is not None:
                return f"which base {base.first} refers to"
            case ShardKey(stream=Stream.CONSTANT) if self._may_be_referred_to(key):
                return "which the next base may refer to"
            case ShardKey() | CommitKey() if shared and key.generation in seen.lineage.kept:
                return "which was left behind on purpose, and stays until a start says otherwise"
            case ShardKey() if key.rank != seen.rank:
                departed = key.rank >= seen.world_size
                if key.generation >= seen.generation or (shared and not departed):
                    return f"which is rank {key.rank}'s"
                if shared and not self.whole:
                    return "before this generation has a committed base there"
            case ShardKey() | MarkerKey() | CommitKey() if shared and not self.whole:
                if not self._is_orphaned(key):
                    return "before this generation has a committed base there"
            case LineageKey() if key.generation >= seen.generation:
                return "which keeps older processes of the job from committing"
            case CommitKey() if self._is_needed(key) and not self._is_orphaned(key):
                return f"which a recovery to version {key.version} needs"
            case MarkerKey() if self._is_awaited(key):
                return f"without which version {key.commit.version} cannot be committed"
            case ShardKey(stream=Stream.BASE) if self._is_from_floor_on(key):
                return f"which a recovery to version {key.first} needs"
            case ShardKey(stream=Stream.DIFFERENTIAL) if self._is_after_floor(key):
                return f"which a recovery to version {key.last} needs"
            case ShardKey(stream=Stream.SNAPSHOT) if self._is_newest_snapshot(key):
                return f"which a recovery to version {key.last} needs"
        return None

    def _is_orphaned(self, key: Key) -> bool:
        """A commit record without this rank's shard is none."""
        if not isinstance(key, CommitKey):
            return False
        return self.seen.contents[self.role.index].shard(key, self.seen.rank) is None

    def _referring(self, key: ShardKey) -> ShardKey | None:
        """A base that needs these constants here: of any tier, but for shared ones that have them, if this is none."""
        for role in self.seen.roles:
            contents = self.seen.contents[role.index]
            if role.shared and not self.role.shared and key in contents:
                continue
            for base in contents.bases(key.rank):
                if base.refers_to == (key.generation, key.first):
                    return base
        return None

    def _may_be_referred_to(self, key: ShardKey) -> bool:
        """This rank's: whether no base of the present generation is newer than the constants. Another rank's: whether
        the job has it, and it is not known to capture elsewhere."""
        seen = self.seen
        bases = (base for contents in seen.contents for base in contents.bases(key.rank))
        newest = max((base.first for base in bases if base.generation == seen.generation), default=-1)
        if key.rank == seen.rank:
            return newest < 0 or (seen.generation, newest) <= (key.generation, key.first)
        elsewhere = self.role.index == 0 and seen.relisted and newest < 0
        return key.rank < seen.world_size and not elsewhere

    def _is_awaited(self, key: MarkerKey) -> bool:
        """Whether what the marker speaks of is there, and not committed yet."""
        contents = self.seen.contents[self.role.index]
        return key.shard in contents and key.commit not in contents and self._is_needed(key.commit)

    def _is_needed(self, key: CommitKey) -> bool:
        """Whether the record is of the newest committed base or of a newer one; of snapshots: whether it is the newest
        that leads from there."""
        if key.is_of_base:
            return (key.generation, key.version) >= (self.floor or (0, 0))
        newer = [each for each in self.seen.contents[self.role.index].snapshot_commits if each > key]
        return not newer and self.floor is not None and (key.generation, key.version) > self.floor

    def _is_from_floor_on(self, base: ShardKey) -> bool:
        """Whether the base is the floor, or newer. Inside a node one without its constants leads nowhere."""
        if self.floor is None or (base.generation, base.first) < self.floor:
            return False
        return self.role.shared or self.seen.contents[self.role.index].completes(base)

    def _is_after_floor(self, key: ShardKey) -> bool:
        return self.floor is not None and key.generation == self.floor[0] and key.last > self.floor[1]

    def _is_newest_snapshot(self, key: ShardKey) -> bool:
        if self.role.shared or not self._is_after_floor(key):
            return False
        own = self.seen.contents[self.role.index].snapshots(key.rank)
        return [key] == [each for each in own if each.generation == key.generation][-1:]


def _lost_way(seen: Observation, gone: Mapping[int, Collection[Key]]) -> int | None:
    """Without a shared tier: the mark, if this rank could not come to it any more."""
    if seen.durable.shared or not any(_is_own(seen, key) for keys in gone.values() for key in keys):
        return None
    before = way_to_mark(seen)
    if before is None:
        return None
    after = way_to_mark(seen.without(gone))
    return before.last if after is None or after.last < before.last else None


def _is_own(seen: Observation, key: Key) -> bool:
    return isinstance(key, ShardKey) and key.rank == seen.rank


def _is_sound(kept: Keep) -> bool:
    numbers = [*kept.versions, *(() if kept.since is None else (kept.since,))]
    return isinstance(kept.versions, frozenset) and all(type(each) is int for each in numbers)


def _asked(policy: object, answer: Callable[[], T], kind: type[T], default: T) -> tuple[T, Refusal | None]:
    """What the policy answers, or ``default`` and why."""
    try:
        given = answer()
    except Exception as error:  # noqa: BLE001  whatever it raises is what it is refused for
        return default, _raised(policy, error)
    if type(given) is not kind:
        return default, Refusal(_name(policy), f"it answers {shown(given, CHARS_MAX)}, which is no {kind.__name__}")
    return given, None


def _raised(policy: object, error: Exception) -> Refusal:
    return Refusal(_name(policy), f"it raises {type(error).__name__}: {error}"[:CHARS_MAX])


def _name(policy: object) -> str:
    return shown(policy, CHARS_MAX)
