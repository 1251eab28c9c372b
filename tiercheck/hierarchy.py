"""Tiers and their order: compose a hierarchy, and see which failures it covers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from string import Formatter
from types import TracebackType
from typing import Self
from urllib.parse import quote

from tiercheck.errors import ConfigurationError, Transient
from tiercheck.policy.observation import Role
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.url import TierURL
from tiercheck.tiers.wrappers.lazy_open import CallsUnderWay, LazyOpenDriver
from tiercheck.types import Capabilities, ObjectInfo, Survives

__all__ = ["Hierarchy", "OpenHierarchy", "OpenTier", "Tier"]

PEER_SCHEME = "peer"


@dataclass(frozen=True)
class Tier:
    """A driver's URL with a place in the hierarchy.

    ``url`` may hold ``{rank}``, ``{local_rank}`` and ``{node}``, which are filled in when the tier is opened. ``name``
    is the tier's name in messages and reports, by default its scheme. ``wrap`` puts a wrapper around the driver,
    such as a throttled or a faulty one. ``codec`` encodes gradients on their way into this tier, if they were captured
    as ``exact``. It must keep every bit, such as ``exact+entropy``.
    """

    url: str
    name: str = ""
    wrap: Callable[[TierDriver], TierDriver] | None = None
    codec: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.url, str):
            raise ConfigurationError(f"a tier is a URL, such as shm://NAME, or a Tier of one, not {self.url!r}")
        if "://" not in self.url:
            # Not repeated whole: it may hold a password.
            said = self.url.partition("?")[0].rpartition("@")[2]
            example = f"nvme://{said}" if said.startswith("/") else "shm:// or nvme://"
            raise ConfigurationError(f"{said!r} is no tier URL: it has no scheme, such as {example}")
        if not self.name:
            object.__setattr__(self, "name", self.url.partition("://")[0])
        if self.codec:
            from tiercheck.streams.records.reencode import check_codec_of_tier  # brings NumPy

            check_codec_of_tier(self.codec, self.name)

    def __repr__(self) -> str:
        """As for any dataclass, without what may be secret in the URL."""
        try:
            url = str(TierURL.parse(self.url))
        except ConfigurationError:
            url = f"{self.url.partition('://')[0]}://..."
        return f"Tier(url={url!r}, name={self.name!r}, wrap={self.wrap!r}, codec={self.codec!r})"

    def resolved(self, places: Mapping[str, int]) -> str:
        """The URL for one rank. Errors: ``ConfigurationError`` for an unknown field."""
        try:
            fields = [field for _, field, _, _ in Formatter().parse(self.url) if field is not None]
        except ValueError as error:
            raise ConfigurationError(f"the URL of the tier {self.name} has an unbalanced brace: {error}") from None
        unknown = [field for field in fields if field not in places]
        if unknown:
            known = ", ".join(f"{{{place}}}" for place in places)
            raise ConfigurationError(
                f"the URL of the tier {self.name} has the field {{{unknown[0]}}}; known are {known}"
            )
        try:
            return self.url.format_map(places)
        except (ValueError, LookupError) as error:
            raise ConfigurationError(
                f"the URL of the tier {self.name} has a field in a form that no number has, unlike {{rank}} or "
                f"{{rank:05d}}: {error}"
            ) from None

    def driver(self, places: Mapping[str, int]) -> TierDriver:
        """The tier's driver for one rank, not yet open. Errors: ``ConfigurationError`` for an unusable URL."""
        driver = make_driver(self.resolved(places))
        return self.wrap(driver) if self.wrap else driver


@dataclass(frozen=True)
class Hierarchy:
    """Tiers, fastest first. Versions are captured in the first tier; each later tier is to outlive a wider failure.

    >>> Hierarchy.of("shm://run-7?size=8GiB", "nvme:///shared/run-7?survives=rack")  # doctest: +ELLIPSIS
    Hierarchy(tiers=(Tier(url='shm://run-7?size=8GiB', name='shm', wrap=None, codec=''), ...)

    ``must_survive``: the failure that the hierarchy must survive. If it cannot, opening it is a ``ConfigurationError``.
    """

    tiers: tuple[Tier, ...]
    must_survive: Survives = Survives.NOTHING

    def __post_init__(self) -> None:
        if not self.tiers:
            raise ConfigurationError("a hierarchy needs at least one tier, such as shm://NAME")
        if self.tiers[0].codec:
            raise ConfigurationError(
                f"the first tier, {self.tiers[0].name}, holds differentials as they are captured: CheckpointConfig "
                "says in which codec; a tier's own codec is for those behind it"
            )
        # Two tiers of one scheme are told apart by a number.
        given = {tier.name for tier in self.tiers}
        names: list[str] = []
        tiers: list[Tier] = []
        for tier in self.tiers:
            name, count = tier.name, 1
            while name in names or (count > 1 and name in given):
                count += 1
                name = f"{tier.name}-{count}"
            names.append(name)
            tiers.append(tier if name == tier.name else replace(tier, name=name))
        object.__setattr__(self, "tiers", tuple(tiers))

    @classmethod
    def of(cls, *tiers: Tier | str, must_survive: Survives | str = Survives.NOTHING) -> Hierarchy:
        """A hierarchy of tiers or of their URLs, fastest first."""
        if isinstance(must_survive, str):
            try:
                must_survive = Survives.parse(must_survive)
            except ValueError as error:
                raise ConfigurationError(f"must_survive: {error}") from None
        return cls(tuple(tier if isinstance(tier, Tier) else Tier(tier) for tier in tiers), must_survive)

    @property
    def needs_peer(self) -> bool:
        """Whether a tier is a neighbour's memory whose address is not known yet: ``peer://NAME`` without ``at=``."""
        return any(_lacks_address(tier) for tier in self.tiers)

    def promises(self, *, rank: int = 0, local_rank: int = 0, node: int = 0) -> Survives:
        """The widest failure that some tier is to outlive, as far as its URL says. Errors: as :meth:`open`."""
        places = {"rank": rank, "local_rank": local_rank, "node": node}
        return max(
            Survives.NODE if _lacks_address(tier) else tier.driver(places).capabilities.survives for tier in self.tiers
        )

    def with_peer(self, address: str, server_key: str | None) -> Hierarchy:
        """The hierarchy with the neighbour's address (``HOST:PORT``), and its public key, in those tiers."""
        more = f"at={quote(address)}" + (f"&server_key={quote(server_key)}" if server_key else "")
        tiers = (
            replace(tier, url=f"{tier.url}{'&' if '?' in tier.url else '?'}{more}") if _lacks_address(tier) else tier
            for tier in self.tiers
        )
        return replace(self, tiers=tuple(tiers))

    def without_peer(self) -> Hierarchy:
        """The hierarchy without those tiers."""
        return replace(self, tiers=tuple(tier for tier in self.tiers if not _lacks_address(tier)))

    def resolved(self, *, rank: int = 0, local_rank: int = 0, node: int = 0) -> Hierarchy:
        """The hierarchy of one rank, with every field of its URLs filled in. Errors: as :meth:`Tier.resolved`."""
        places = {"rank": rank, "local_rank": local_rank, "node": node}
        # A brace that is left is part of the URL, and must still be one when the tier is opened.
        urls = [tier.resolved(places).replace("{", "{{").replace("}", "}}") for tier in self.tiers]
        return replace(self, tiers=tuple(replace(tier, url=url) for tier, url in zip(self.tiers, urls, strict=True)))

    def lazily_opened(self, *, open_s: float | None = None, calls: CallsUnderWay | None = None) -> Hierarchy:
        """The same hierarchy, but it opens even if a store behind the first tier is away. Calls to that store fail
        until it is back. ``open_s``: how long opening waits for each store. ``calls`` notes what the stores are asked.
        """

        def lazy(tier: Tier) -> Tier:
            wrap = tier.wrap
            return replace(
                tier, wrap=lambda driver: LazyOpenDriver(wrap(driver) if wrap else driver, calls=calls, open_s=open_s)
            )

        first, *others = self.tiers
        return replace(self, tiers=(first, *map(lazy, others)))

    def open(self, *, rank: int = 0, local_rank: int = 0, node: int = 0) -> OpenHierarchy:
        """The drivers of one rank, not yet connected: use it as an async context manager."""
        places = {"rank": rank, "local_rank": local_rank, "node": node}
        opened = tuple(
            OpenTier(index, tier.name, tier.driver(places), tier.codec) for index, tier in enumerate(self.tiers)
        )
        urls = [tier.driver.url for tier in opened]
        if twice := {url for url in urls if urls.count(url) > 1 and url != "memory://"}:
            raise ConfigurationError(f"two tiers are the same place, {twice.pop()}; give each one of its own")
        return OpenHierarchy(opened, self.must_survive)


def _lacks_address(tier: Tier) -> bool:
    scheme, _, rest = tier.url.partition("://")
    options = rest.partition("?")[2].split("&")
    return scheme == PEER_SCHEME and not any(option.partition("=")[0] == "at" for option in options)


@dataclass(frozen=True)
class OpenTier:
    """A tier of one rank: its driver and its place."""

    index: int
    name: str
    driver: TierDriver
    codec: str = ""
    """Encodes gradients on their way into this tier. Empty: they stay as they were captured."""
    is_other_node: bool = False
    """It is no tier of the job's: a recovery reads another node's memory by it."""

    @property
    def seen_by_all(self) -> bool:
        """Whether every rank sees the same objects here, and each looks for its own."""
        return self.is_other_node or self.role.shared

    @property
    def capabilities(self) -> Capabilities:
        return self.driver.capabilities

    @property
    def role(self) -> Role:
        return Role(self.index, self.name, self.driver.capabilities.survives)

    async def listed(self, prefixes: Iterable[str]) -> AsyncIterator[ObjectInfo]:
        """The objects under each of the prefixes, one prefix after the other. Errors: as of ``TierDriver.list``."""
        for prefix in prefixes:
            async for info in self.driver.list(prefix):
                yield info

    def __str__(self) -> str:
        return self.name


class OpenHierarchy:
    """One rank's drivers. ``async with`` connects them all, or none."""

    def __init__(self, tiers: tuple[OpenTier, ...], must_survive: Survives = Survives.NOTHING) -> None:
        self.tiers = tiers
        self.must_survive = must_survive
        self._stack = AsyncExitStack()

    @property
    def first(self) -> OpenTier:
        """The tier in which versions are captured."""
        return self.tiers[0]

    @property
    def order(self) -> tuple[int, ...]:
        """The tiers, the cheapest to read first: another node's memory comes before what all share."""
        shared = min((tier.index for tier in self.tiers if tier.role.shared), default=len(self.tiers))
        return tuple(sorted(range(len(self.tiers)), key=lambda each: self._cost(self.tiers[each], shared)))

    @staticmethod
    def _cost(tier: OpenTier, shared: int) -> tuple[int, int, int]:
        return (shared, 0, tier.index) if tier.is_other_node else (tier.index, 1, 0)

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(tier.role for tier in self.tiers)

    @property
    def survives(self) -> Survives:
        """The widest failure that some tier outlives."""
        return max(tier.capabilities.survives for tier in self.tiers)

    def check(self) -> None:
        """Refuse a hierarchy that cannot serve its purpose.

        Errors: ``ConfigurationError`` if no tier survives ``must_survive``, or the first tier hands out no memory.
        """
        if self.survives < self.must_survive:
            tiers = ", ".join(f"{tier.name} ({tier.capabilities.survives.name.lower()})" for tier in self.tiers)
            wanted = self.must_survive.name.lower()
            raise ConfigurationError(
                f"no tier survives a {wanted} failure, which must_survive asks for; the tiers survive: {tiers}. "
                f"Add one that does, such as a shared directory: nvme:///path?survives={wanted}"
            )
        if not self.first.capabilities.mappable:
            raise ConfigurationError(
                f"the first tier, {self.first.driver.url}, hands out no memory for captures to land in; "
                "begin the hierarchy with a mappable tier, such as shm://NAME"
            )

    async def __aenter__(self) -> Self:
        return await self.opened(None)

    async def opened(self, deadline_s: float | None) -> Self:
        """Connect all drivers within ``deadline_s``, or none; :meth:`__aexit__` closes them.

        Errors: the drivers' own; after the deadline ``Transient``, which names the tier and its last error.
        """
        until = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        async with AsyncExitStack() as stack:
            for tier in self.tiers:
                try:
                    async with asyncio.timeout_at(until) as scope:
                        await stack.enter_async_context(tier.driver)
                except TimeoutError:
                    if not scope.expired():
                        raise
                    trouble = tier.driver.facts().get("trouble", "it does not answer")
                    raise Transient(
                        f"the tier {tier.name} could not be opened within {deadline_s:g} s: {trouble}",
                        tier=tier.driver.url,
                    ) from None
            self.check()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()
