"""What a replay reached: how much of the truth the state it left behind keeps.

The rule is the worst of all that took part. An encoding is exact where its codec keeps every bit, or if the
optimizer stepped with the very tensor that it decodes to; otherwise it is what its codec declares. The steps are
exact where the optimizer that replays them is, in implementation, torch version, instruction set, device and, where
it is not torch's, library and code, the one that took them: what replays is that optimizer, or a kernel that was
certified to give its bits. Anything else is approximate, and a note says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace

from tiercheck.streams.codecs import Encoding, fidelity_of
from tiercheck.streams.doubts import Doubts
from tiercheck.streams.tensors.provider import Identity
from tiercheck.types import Fidelity

__all__ = ["Tally", "reached"]

NO_DOUBTS = Doubts()


@dataclass(frozen=True, order=True)
class Way:
    """How tensors were encoded, and what they are worth."""

    codec: str
    fidelity: Fidelity
    trained_on: bool

    def __str__(self) -> str:
        if self.trained_on:
            return f"{self.codec}: {self.fidelity}, since the optimizer stepped with the very gradients it decodes to"
        return f"{self.codec}: {self.fidelity}"


@dataclass(frozen=True)
class Tally:
    """How the versions of a replay were encoded. Tallies of disjoint versions add up, in any order."""

    versions: int = 0
    ways: Mapping[Way, int] = field(default_factory=dict)
    """Versions by the way they were encoded. One whose tensors were encoded in several counts once for each."""
    nonfinite_values: int = 0
    """NaNs and infinities in what was encoded, as far as its codecs count them."""
    nonfinite_versions: int = 0
    """Versions that had some."""
    approximated: int = 0
    """Steps that were replayed otherwise than bit for bit, since that was asked for."""

    @classmethod
    def of(cls, encodings: Iterable[object]) -> Tally:
        """The tally of one version, from how its gradients were encoded. Errors: ``Corruption``."""
        ways: set[Way] = set()
        nonfinite = 0
        for description in encodings:
            encoding = Encoding.from_object(description)
            ways.add(Way(encoding.codec, fidelity_of(encoding), encoding.trained_on))
            nonfinite += encoding.scalars.get("nonfinite", 0)
        return cls(1, dict.fromkeys(ways, 1), nonfinite, int(nonfinite > 0))

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.versions + other.versions,
            dict(Counter(self.ways) + Counter(other.ways)),
            self.nonfinite_values + other.nonfinite_values,
            self.nonfinite_versions + other.nonfinite_versions,
            self.approximated + other.approximated,
        )

    @property
    def fidelity(self) -> Fidelity:
        """The worst of the encodings and of the steps."""
        steps = Fidelity.APPROXIMATE if self.approximated else Fidelity.EXACT
        return Fidelity.worst(steps, *(way.fidelity for way in self.ways))

    def notes(self) -> list[str]:
        """In words: which codec was less than exact by itself, and for how many versions; and what was not finite."""
        found = [
            f"{count} of the {self.versions} versions replayed were encoded by {way}"
            for way, count in sorted(self.ways.items())
            if way.trained_on or way.fidelity is not Fidelity.EXACT
        ]
        if self.approximated:
            found.append(f"{self.approximated} steps were replayed by a closed form, as asked for: approximate")
        if self.nonfinite_values:
            found.append(
                f"the gradients of {self.nonfinite_versions} of the {self.versions} versions replayed held "
                f"{self.nonfinite_values} values that are not finite"
            )
        return found


def reached(
    saved: Identity, here: Identity, tally: Tally, doubts: Doubts = NO_DOUBTS
) -> tuple[Fidelity, tuple[str, ...]]:
    """The fidelity of a recovery, and what there is to know of it.

    ``saved``: what the base says of the optimizer that took the steps; ``here``: the one that replayed them;
    ``doubts``: what the version recovered says it may not hold.
    """
    fidelity, notes = tally.fidelity, tally.notes()
    if doubted := doubts.notes(replayed=tally.versions > 0):
        fidelity = Fidelity.APPROXIMATE
        notes += doubted
    before, now = (asdict(replace(each.optimizer, stand_in=None)) for each in (saved, here))
    if not before["threads"]:  # they do not matter, or an older release did not tell
        now["threads"] = 0
    changed = ", ".join(f"{name} {before[name]} -> {now[name]}" for name in before if before[name] != now[name])
    if tally.versions and changed:
        fidelity = Fidelity.APPROXIMATE
        notes.append(f"the steps were taken by another implementation than the one that replayed them: {changed}")
    return fidelity, tuple(notes)
