"""Are the tiers healthy? Which drivers there are, and what one URL is found to be, do and bring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Any

from tiercheck.diagnostics.measure import USAGE_S, Point, measure_in_room, usage_in_time
from tiercheck.entry_points import distribution_of
from tiercheck.errors import TierCheckError
from tiercheck.testing.checks import Check, check_tier
from tiercheck.testing.describe import Description, describe
from tiercheck.testing.scratch import Scratch, scratch
from tiercheck.tiers.registry import GROUP, TierURL, make_driver, registered
from tiercheck.types import Capabilities, Survives, Usage, bytes_text

__all__ = ["Diagnosis", "InstalledDriver", "Problem", "examine", "installed_drivers"]

SIZES = (4 << 10, 4 << 20, 32 << 20)
MEASURE_S = 5.0
ROOM_MIN_BYTES = 1 << 30
SLOW_PUT_S = 1.0
FULL_SHARE = 0.95


# The drivers that are installed.


@dataclass(frozen=True)
class InstalledDriver:
    """An entry point of the group ``tiercheck.tiers``.

    ``missing`` is empty if the driver can be loaded; else it says what to do. ``description`` is ``None`` then.
    """

    scheme: str
    distribution: str
    version: str
    missing: str
    description: Description | None

    @property
    def summary(self) -> str:
        """One line on what the driver is for; empty if it cannot be loaded."""
        return self.description.summary if self.description else ""

    @property
    def capabilities(self) -> Capabilities | None:
        """Those of its simplest URL; ``None`` if they are not known before a URL is given."""
        return self.description.capabilities if self.description else None

    def to_object(self) -> dict[str, Any]:
        """For JSON."""
        described = self.description
        return {
            "scheme": self.scheme,
            "distribution": self.distribution,
            "version": self.version,
            "loadable": not self.missing,
            "missing": self.missing,
            "summary": self.summary,
            "url": described.url_form if described else "",
            "options": [asdict(option) for option in described.options] if described else [],
            "capabilities": claimed(self.capabilities),
        }


def installed_drivers() -> list[InstalledDriver]:
    """Every driver that is registered, by scheme; each is loaded to see whether it can be. None is opened.

    A driver that cannot be loaded, or one of two that claim one scheme, is listed with what to do about it.
    """
    return [installed(entry) for entry in GROUP.all()]


def installed(entry: EntryPoint) -> InstalledDriver:
    version = entry.dist.version if entry.dist is not None else ""
    missing, description = "", None
    try:
        description = describe(GROUP.load(entry.name))
    except TierCheckError as error:
        missing = str(error)
    except Exception as error:  # noqa: BLE001  (somebody else's code; what it raises is what is shown)
        missing = f"loading it raises {type(error).__name__}: {error}; ask its author, or reinstall it"
    return InstalledDriver(entry.name, distribution_of(entry), version, missing, description)


def claimed(capabilities: Capabilities | None) -> dict[str, Any] | None:
    if capabilities is None:
        return None
    return {**asdict(capabilities), "survives": capabilities.survives.name.lower()}


# One tier.


@dataclass(frozen=True)
class Problem:
    """Something to look into. ``serious``: the tier cannot be used, or breaks its word; else it is a caution."""

    what: str
    advice: str
    serious: bool = True


@dataclass(frozen=True)
class Diagnosis:
    """What was found at one URL. If it could not be opened, only ``url`` and ``problems`` say anything."""

    url: str
    """Without secrets."""
    distribution: str = ""
    capabilities: Capabilities | None = None
    facts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    usage: Usage | None = None
    checks: tuple[Check, ...] = ()
    points: tuple[Point, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def healthy(self) -> bool:
        """Nothing serious was found."""
        return not any(problem.serious for problem in self.problems)

    def to_object(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "url": self.url,
            "distribution": self.distribution,
            "healthy": self.healthy,
            "capabilities": claimed(self.capabilities),
            "facts": dict(self.facts),
            "usage": asdict(self.usage) if self.usage else None,
            "checks": [asdict(check) for check in self.checks],
            "points": [point.to_object() for point in self.points],
            "problems": [asdict(problem) for problem in self.problems],
        }


async def examine(url: str, *, measure_s: float = MEASURE_S) -> Diagnosis:
    """Open the tier at ``url``, ask it what it is, check that it keeps its word, and measure it for ``measure_s`` s (0:
    not at all).

    All of it happens under a prefix of its own (in shared memory, in a namespace of its own), which is removed again: a
    tier that a job uses is not disturbed, except for the bandwidth. Opening does what it does for a job too: a
    directory that is missing is made, and what dead writers left is reclaimed. Counting what the tier holds may list
    it, for 20 s at most.

    Errors: none of the tier's, and none for a URL that cannot be used; they are ``problems``.
    """
    found: list[Diagnosis] = []
    shown = url.partition("?")[0].rpartition("@")[2]  # until it is parsed nobody knows what in it is secret
    try:
        parsed = TierURL.parse(url)
        shown = parsed.text
        distribution = distribution_of(registered(parsed))
        async with scratch(url, "doctor") as place:
            found.append(await diagnose(shown, distribution, place, measure_s))
        return found[0]
    except TierCheckError as error:
        problem = Problem(f"{type(error).__name__}: {error}", advice_for(error))
    except TimeoutError:
        problem = Problem("the tier did not answer in time", "look at the tier, and at the network to it")
    except Exception as error:  # noqa: BLE001  (a driver that lets a foreign one through is what is reported)
        what = f"a foreign {type(error).__name__} reached the caller: {error}"
        problem = Problem(what, "tell the driver's author: it should be a TierError")
    if found:  # something is left behind, or does not close
        return replace(found[0], problems=(*found[0].problems, problem))
    return Diagnosis(shown, problems=(problem,))


def advice_for(error: TierCheckError) -> str:
    return ADVICE.get(type(error).__name__, "the message says what to change")


ADVICE = {
    "Unauthorized": "check the credentials, and the owner and the mode of what the URL names",
    "CapacityExceeded": "make room, or ask for less in the URL",
    "Transient": "try again; if it stays, look at the server and at the network to it",
    "NotFound": "create what the URL names: a bucket, a container or a mount",
    "Corruption": "do not use this tier before its disks or its server have been looked at",
}


async def diagnose(shown: str, distribution: str, place: Scratch, measure_s: float) -> Diagnosis:
    driver = place.driver
    usage = await usage_in_time(place.tier)
    checks = await check_tier(place, make_driver(place.url))
    points: list[Point] = []
    if measure_s > 0 and all(check.passed for check in checks):
        points = await measure_in_room(place, SIZES, (1,), 3, measure_s, usage)
    problems = [
        *(
            Problem(
                f"{check.name}: {check.message}", ADVICE[check.error] if check.error in NO_BREACH else BROKEN_ADVICE
            )
            for check in checks
            if not check.passed
        ),
        *cautions(driver.capabilities, usage, points),
    ]
    return Diagnosis(
        shown,
        distribution,
        driver.capabilities,
        MappingProxyType(dict(driver.facts())),
        usage,
        checks,
        tuple(points),
        tuple(problems),
    )


NO_BREACH = ("Unauthorized", "CapacityExceeded", "Transient")
"""Errors of a tier that refuses, is full or is away. Any other one breaks its word, as ``NotFound`` of what was put."""
BROKEN_ADVICE = (
    "do not keep checkpoints here: the tier breaks its driver's word. Run the kit for the whole picture: "
    "pytest --pyargs tiercheck.testing.certify --tiercheck-url=URL (of an empty tier)"
)


def cautions(capabilities: Capabilities, usage: Usage | None, points: list[Point]) -> list[Problem]:
    """What a hierarchy with this tier should know."""
    found: list[Problem] = []
    if usage is None:
        found.append(
            Problem(
                f"it could not say within {USAGE_S:.0f} s what it holds",
                "see how many objects it has: if they are listed to be counted, it takes this long for a job too",
                serious=False,
            )
        )
        usage = Usage(0, None)
    free, limit = usage.free_bytes, usage.limit_bytes
    if free is not None and limit is not None and usage.used_bytes > FULL_SHARE * limit:
        found.append(
            Problem(
                f"{bytes_text(free)} of {bytes_text(limit)} are free",
                "delete what is not needed any more, or enlarge it",
                serious=False,
            )
        )
    elif free is not None and free < ROOM_MIN_BYTES:
        enlarge = "; shared memory grows with 'mount -o remount,size=... /dev/shm', in a container with --shm-size"
        found.append(
            Problem(
                f"only {bytes_text(free)} are free; a base takes 12 to 16 bytes a parameter, and two must fit",
                "enlarge the tier" + (enlarge if capabilities.mappable else ""),
                serious=False,
            )
        )
    if capabilities.survives is Survives.NOTHING:
        found.append(
            Problem(
                "what it holds goes with the process",
                "use it for tests; a job begins with shm://NAME",
                serious=False,
            )
        )
    if capabilities.survives > Survives.PROCESS and not capabilities.conditional_put:
        found.append(
            Problem(
                "it takes no conditional puts, so ranks cannot agree in it in one step",
                "if the store has them, turn them on; else see docs/how-to/write-a-driver.md on what that means",
                serious=False,
            )
        )
    slow = [point for point in points if point.operation == "put" and point.latency_s_median > SLOW_PUT_S]
    if slow:
        found.append(
            Problem(
                f"a put of {bytes_text(slow[0].nbytes)} takes {slow[0].latency_s_median:.1f} s",
                "look at the network and at the store's own limits before a job depends on it",
                serious=False,
            )
        )
    return found
