"""A part of a tier as a tier of its own: every key lies under a prefix that its users never see."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from tiercheck.errors import ConfigurationError, TierError
from tiercheck.keys import validate_key
from tiercheck.tiers.driver import Reservation, TierDriver
from tiercheck.tiers.wrappers.base import Call, Operation, WrappingDriver, WrappingReservation
from tiercheck.types import ByteRange, Capabilities, ObjectInfo, Payload, PutMode, Usage

__all__ = ["PrefixedDriver"]

T = TypeVar("T")


class PrefixedDriver(WrappingDriver):
    """The objects of ``driver`` whose keys start with ``prefix/``, under the rest of their keys.

    Several jobs may share one tier so. Capabilities are those of ``driver``, but keys can be less long.
    ``usage`` is the tier's less the objects that lie beside this part, which it lists to find out; so the reservations
    of the whole tier are in it. Its limit is what it uses and what the tier has free.

    Errors: ``ConfigurationError`` for a prefix that is no key, or too long to leave room for one.
    """

    def __init__(self, driver: TierDriver, prefix: str) -> None:
        super().__init__(driver)
        try:
            self._above = validate_key(prefix, bytes_max=driver.capabilities.key_bytes_max - 2) + "/"
        except ValueError as error:
            raise ConfigurationError(f"the prefix {prefix!r} of {driver.url} cannot be used: {error}") from None

    @property
    def url(self) -> str:
        place, question, options = self.inner.url.partition("?")
        return f"{place.rstrip('/') if not place.endswith('://') else place}/{self._above[:-1]}{question}{options}"

    @property
    def capabilities(self) -> Capabilities:
        inner = self.inner.capabilities
        return replace(inner, key_bytes_max=inner.key_bytes_max - len(self._above.encode()))

    async def around(self, call: Call, work: Callable[[], Awaitable[T]]) -> T:
        """Errors speak of this tier and of its keys."""
        try:
            return await super().around(call, work)
        except TierError as error:
            if error.tier == self.inner.url:
                error.tier = self.url
            if error.key is not None:
                error.key = error.key.removeprefix(self._above)
            raise

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        return self._shown(await super().put(self._full(key), payload, mode=mode))

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        return await super().get(self._full(key), range=range, into=into)

    async def stat(self, key: str) -> ObjectInfo:
        return self._shown(await super().stat(self._full(key)))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async for item in super().list(self._above + prefix):
            yield self._shown(item)

    async def delete(self, keys: Iterable[str]) -> None:
        await super().delete([self._full(key) for key in keys])

    async def usage(self) -> Usage:
        whole = await super().usage()
        beside_bytes = 0
        async for item in super().list():
            if not item.key.startswith(self._above):
                beside_bytes += item.nbytes
        used_bytes = max(0, whole.used_bytes - beside_bytes)
        return Usage(used_bytes, None if whole.free_bytes is None else used_bytes + whole.free_bytes)

    async def reserve(self, key: str, nbytes: int) -> Reservation:
        full = self._full(key)
        reservation = await self.around(Call(Operation.RESERVE, full), lambda: self.inner.reserve(full, nbytes))
        return _PrefixedReservation(self, reservation, key)

    def _full(self, key: str) -> str:
        return self._above + validate_key(key, bytes_max=self.capabilities.key_bytes_max)

    def _shown(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, key=info.key.removeprefix(self._above))


class _PrefixedReservation(WrappingReservation):
    async def publish(self, nbytes: int | None = None, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        return replace(await super().publish(nbytes, mode=mode), key=self.key)
