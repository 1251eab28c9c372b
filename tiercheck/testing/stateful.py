"""Any driver against a dictionary, in an order that Hypothesis chooses.

The oracle is a plain ``dict`` and shares no code with any driver. Subclass :class:`DriverMachine`, say how to
make a driver, and let pytest run the machine::

    class MyMachine(DriverMachine):
        def make_driver(self): return make_driver("mine://...")
        def remove_tier(self): ...

    TestMyMachine = MyMachine.TestCase
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from tiercheck.errors import AlreadyExists, NotFound, PreconditionFailed, TierError, Unsupported
from tiercheck.tiers.driver import Reservation, TierDriver
from tiercheck.types import ByteRange, ObjectInfo, PutMode

__all__ = ["DriverMachine"]

T = TypeVar("T")

KEYS = ("a", "a-b", "b/c", "b/c-d", "b/d/e", "b0", "é", "z/z/z/z")
"""None lies under another, which file systems cannot hold."""
PREFIXES = ("", "a", "b", "b/", "b/c", "b/d/", "z/z", "nothing", "é")
BLOCK = 1 << 16

keys = st.sampled_from(KEYS)
contents = st.one_of(
    st.binary(max_size=64),
    # Large enough to be recycled by tiers that do that, and cheap to draw.
    st.builds(lambda seed, blocks, tail: seed * (blocks * BLOCK) + tail, st.binary(min_size=1, max_size=1),
              st.integers(1, 8), st.binary(max_size=3)),
)  # fmt: skip


class DriverMachine(RuleBasedStateMachine):
    """The rules are the protocol's calls, with good and stale conditions, mappings that are held, and reopening."""

    reservations: Bundle[tuple[Reservation, bytes]] = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.model: dict[str, bytes] = {}
        self.infos: dict[str, ObjectInfo] = {}
        self.etags: set[str] = set()
        self.held: list[tuple[memoryview, bytes]] = []
        self.reserved_bytes = 0
        self.reservations_open = 0
        self.driver: TierDriver | None = None

    def make_driver(self) -> TierDriver:
        """A driver, not open, for this machine's own tier, which is empty at first."""
        raise NotImplementedError

    def remove_tier(self) -> None:
        """Remove the tier. Called once the driver is closed."""
        raise NotImplementedError

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

    @property
    def tier(self) -> TierDriver:
        assert self.driver is not None
        return self.driver

    @initialize()
    def start(self) -> None:
        self.driver = self.make_driver()
        self.run(self.driver.open())

    def teardown(self) -> None:
        try:
            for content, expected in self.held:
                assert content == expected
            self.held.clear()
            if self.driver is not None:
                self.run(self.driver.close())
                self.remove_tier()
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    def published(self, info: ObjectInfo, key: str, content: bytes) -> None:
        assert (info.key, info.nbytes) == (key, len(content))
        assert info.etag not in self.etags, "an etag came back"
        self.etags.add(info.etag)
        self.model[key], self.infos[key] = content, info

    @rule(key=keys, content=contents, cut=st.integers(0, 200_000))
    def overwrite(self, key: str, content: bytes, cut: int) -> None:
        self.published(self.run(self.tier.put(key, [content[:cut], content[cut:]])), key, content)

    def expected_failure(self, fails: type[TierError] | None) -> type[TierError] | None:
        return fails if self.tier.capabilities.conditional_put else Unsupported

    @rule(key=keys, content=contents)
    def create(self, key: str, content: bytes) -> None:
        fails = self.expected_failure(AlreadyExists if key in self.model else None)
        try:
            self.published(self.run(self.tier.put(key, [content], mode=PutMode.CREATE)), key, content)
        except (AlreadyExists, Unsupported) as error:
            assert type(error) is fails
        else:
            assert fails is None

    @rule(key=keys, other=keys, content=contents)
    def update(self, key: str, other: str, content: bytes) -> None:
        etag = self.infos[other].etag if other in self.infos else "no such etag"
        fails = self.expected_failure(None if key == other and key in self.model else PreconditionFailed)
        try:
            self.published(self.run(self.tier.put(key, [content], mode=PutMode.UPDATE(etag))), key, content)
        except (PreconditionFailed, Unsupported) as error:
            assert type(error) is fails
        else:
            assert fails is None

    @rule(key=keys, hold=st.booleans())
    def get(self, key: str, hold: bool) -> None:
        try:
            found = self.run(self.tier.get(key))
        except NotFound:
            assert key not in self.model
            return
        assert found == self.model[key]
        if hold:
            self.held = [*self.held[-3:], (found, self.model[key])]

    @rule(key=keys, start=st.integers(0, 1 << 18), nbytes=st.integers(0, 1 << 18), room=st.integers(0, 5))
    def get_range_into(self, key: str, start: int, nbytes: int, room: int) -> None:
        into = bytearray(nbytes + room)
        wanted = ByteRange(start, start + nbytes)
        content = self.model.get(key)
        try:
            found = self.run(self.tier.get(key, range=wanted, into=memoryview(into)))
        except NotFound:
            assert content is None
        except ValueError:
            assert content is not None
            assert wanted.stop > len(content)
        except Unsupported:
            assert not self.tier.capabilities.ranged_get
        else:
            assert content is not None
            assert found == content[wanted.start : wanted.stop]
            assert into == content[wanted.start : wanted.stop] + bytes(room)

    @rule(key=keys)
    def stat(self, key: str) -> None:
        try:
            assert self.run(self.tier.stat(key)) == self.infos[key]
        except NotFound:
            assert key not in self.model

    @rule(chosen=st.lists(keys, max_size=3))
    def delete(self, chosen: list[str]) -> None:
        self.run(self.tier.delete(chosen))
        for key in chosen:
            self.model.pop(key, None)
            self.infos.pop(key, None)

    @rule(prefix=st.sampled_from(PREFIXES))
    def list_objects(self, prefix: str) -> None:
        async def listed() -> list[ObjectInfo]:
            return [info async for info in self.tier.list(prefix)]

        expected = sorted((key for key in self.model if key.startswith(prefix)), key=str.encode)
        assert self.run(listed()) == [self.infos[key] for key in expected]

    @rule()
    def usage(self) -> None:
        used = self.run(self.tier.usage()).used_bytes
        assert used == sum(map(len, self.model.values())) + self.reserved_bytes

    @rule()
    @precondition(lambda self: not self.reservations_open)
    def reopen(self) -> None:
        self.run(self.tier.close())
        self.driver = self.make_driver()
        self.run(self.driver.open())

    @rule(target=reservations, key=keys, content=contents)
    @precondition(lambda self: self.driver.capabilities.mappable and self.reserved_bytes < 1 << 21)
    def reserve(self, key: str, content: bytes) -> tuple[Reservation, bytes]:
        reservation = self.run(self.tier.reserve(key, len(content)))
        reservation.buffer[:] = content
        self.reserved_bytes += len(content)
        self.reservations_open += 1
        return reservation, content

    @rule(reserved=consumes(reservations), keep=st.floats(0, 1), drop=st.booleans())
    def publish_or_drop(self, reserved: tuple[Reservation, bytes], keep: float, drop: bool) -> None:
        reservation, content = reserved
        nbytes = round(len(content) * keep)
        try:
            if drop:
                self.run(reservation.drop())
            else:
                self.published(self.run(reservation.publish(nbytes)), reservation.key, content[:nbytes])
        finally:
            self.reservations_open -= 1
            self.reserved_bytes -= len(content)

    @invariant()
    def what_is_held_stays(self) -> None:
        for content, expected in self.held:
            assert content == expected
