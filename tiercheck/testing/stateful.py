"""Any driver against a dictionary, in an order that Hypothesis chooses.

Two clients of one tier take turns, each with the whole protocol; what one does the other sees at once. The oracle is
a plain ``dict`` and shares no code with any driver. Subclass :class:`DriverMachine`, say how to make a driver, and
let pytest run the machine::

    class MyMachine(DriverMachine):
        def make_driver(self): return make_driver("mine://...")
        def remove_tier(self): ...

    TestMyMachine = MyMachine.TestCase
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from tiercheck.errors import AlreadyExists, NotFound, PreconditionFailed, TierError, Unsupported
from tiercheck.testing.contents import difference
from tiercheck.tiers.driver import Reservation, TierDriver
from tiercheck.types import ByteRange, Capabilities, ObjectInfo, PutMode

__all__ = ["DriverMachine"]

T = TypeVar("T")

KEYS = ("a", "a-b", "b/c", "b/c-d", "b/d/e", "b0", "é", "z/z/z/z")
"""None lies under another, which file systems cannot hold."""
PREFIXES = ("", "a", "b", "b/", "b/c", "b/d/", "z/z", "nothing", "é")
BLOCK = 1 << 16

places = st.integers(0, len(KEYS) - 1)
"""Places in a machine's own choice of keys: few keys are met often, many are listed."""
clients = st.integers(0, 1)
small = st.binary(max_size=64)
contents = st.one_of(
    small,
    # Large enough to be recycled by tiers that do that, and cheap to draw.
    st.builds(lambda seed, blocks, tail: seed * (blocks * BLOCK) + tail, st.binary(min_size=1, max_size=1),
              st.integers(1, 8), st.binary(max_size=3)),
)  # fmt: skip


@dataclass(frozen=True)
class Reserved:
    """A reservation that is open, what its buffer holds, and whose it is."""

    reservation: Reservation
    content: bytes
    who: int


class DriverMachine(RuleBasedStateMachine):
    """The rules are the protocol's calls, with good and stale conditions, mappings that are held, and reopening."""

    lists_may_lag = False
    """Whether a listing may show an etag that the object had before, with the very same bytes. Stores whose etags are
    hashes of the content cannot do better without a request for each object listed; a driver that sets this says so in
    its docs."""

    etags_may_return = False
    """Whether an object that one client deletes and another puts again, in the same second, may have its former etag.
    Stores that keep whole seconds cannot do better; a driver that sets this says so in its docs."""

    reservations: Bundle[Reserved] = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.keys: list[str] = []
        self.model: dict[str, bytes] = {}
        self.infos: dict[str, ObjectInfo] = {}
        self.etags: dict[tuple[str, str], bytes] = {}
        self.held: list[tuple[memoryview, bytes]] = []
        self.reserved_bytes = 0
        self.reservations_open = [0, 0]
        self.drivers: list[TierDriver] = []

    def make_driver(self) -> TierDriver:
        """A driver, not open, for this machine's own tier, which is empty at first. Called for each client."""
        raise NotImplementedError("a subclass makes the driver")

    def remove_tier(self) -> None:
        """Remove the tier. Called once the driver is closed."""
        raise NotImplementedError("a subclass removes the tier")

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

    @property
    def capabilities(self) -> Capabilities:
        return self.drivers[0].capabilities

    @initialize(first=st.dictionaries(st.sampled_from(KEYS), small, min_size=1), some=st.integers(0, len(KEYS)))
    def start(self, first: dict[str, bytes], some: int) -> None:
        """Two clients on a tier that holds ``some`` of the keys at first."""
        self.keys = sorted(first)
        for _ in range(2):
            driver = self.make_driver()
            self.run(driver.open())
            self.drivers.append(driver)
        for key in self.keys[:some]:
            self.published(self.run(self.drivers[0].put(key, [first[key]])), key, first[key])

    def teardown(self) -> None:
        try:
            for content, expected in self.held:
                assert not difference(content, expected)
        finally:
            self.held.clear()
            for driver in self.drivers:
                self.run(driver.close())
            if self.drivers:
                self.remove_tier()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    def key(self, place: int) -> str:
        return self.keys[place % len(self.keys)]

    def published(self, info: ObjectInfo, key: str, content: bytes) -> None:
        assert (info.key, info.nbytes) == (key, len(content))
        assert (key, info.etag) not in self.etags or self.etags_may_return, "an etag came back"
        self.etags[key, info.etag] = content
        self.model[key], self.infos[key] = content, info
        for driver in self.drivers:
            assert self.run(driver.stat(key)) == info, "each client sees what either has put"

    @rule(who=clients, at=places, content=contents, cut=st.integers(0, 200_000))
    def overwrite(self, who: int, at: int, content: bytes, cut: int) -> None:
        key, payload = self.key(at), [content[:cut], content[cut:]]
        self.published(self.run(self.drivers[who].put(key, payload)), key, content)

    @rule(who=clients, at=places)
    def put_the_same_again(self, who: int, at: int) -> None:
        """Equal bytes are another put all the same, also to the listings of a client that has not made it."""
        key = self.key(at)
        if key in self.model:
            self.check_listing(1 - who, key)
            self.published(self.run(self.drivers[who].put(key, [self.model[key]])), key, self.model[key])
            self.check_listing(1 - who, key)

    def expected_failure(self, fails: type[TierError] | None) -> type[TierError] | None:
        return fails if self.capabilities.conditional_put else Unsupported

    def mode_for(self, key: str, condition: str) -> tuple[PutMode, type[TierError] | None]:
        """A put mode, and how it must fail: ``condition`` is "create", or the key whose etag is used."""
        if condition == "create":
            return PutMode.CREATE, self.expected_failure(AlreadyExists if key in self.model else None)
        etag = self.infos[condition].etag if condition in self.infos else "no such etag"
        holds = key == condition and key in self.model
        return PutMode.UPDATE(etag), self.expected_failure(None if holds else PreconditionFailed)

    @rule(who=clients, at=places, condition=st.sampled_from(("create", *KEYS)), content=contents)
    def put_under_a_condition(self, who: int, at: int, condition: str, content: bytes) -> None:
        self.conditional_put(who, self.key(at), condition, content)

    def conditional_put(self, who: int, key: str, condition: str, content: bytes) -> None:
        mode, fails = self.mode_for(key, condition)
        try:
            self.published(self.run(self.drivers[who].put(key, [content], mode=mode)), key, content)
        except (AlreadyExists, PreconditionFailed, Unsupported) as error:
            assert type(error) is fails
        else:
            assert fails is None

    @rule(who=clients, data=st.data(), content=contents)
    @precondition(lambda self: self.model)
    def update_what_is_there(self, who: int, data: st.DataObject, content: bytes) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.conditional_put(who, key, key, content)

    @rule(who=clients, at=places, hold=st.booleans())
    def get(self, who: int, at: int, hold: bool) -> None:
        key = self.key(at)
        try:
            found = self.run(self.drivers[who].get(key))
        except NotFound:
            assert key not in self.model
            return
        assert not difference(found, self.model[key])
        if hold:
            self.held = [*self.held[-3:], (found, self.model[key])]

    @rule(
        who=clients,
        at=places,
        start=st.integers(0, 1 << 18),
        nbytes=st.integers(0, 1 << 18),
        room=st.none() | st.integers(0, 5),
    )
    def get_range(self, who: int, at: int, start: int, nbytes: int, room: int | None) -> None:
        self.ranged_get(who, self.key(at), start, nbytes, room)

    def ranged_get(self, who: int, key: str, start: int, nbytes: int, room: int | None) -> None:
        """Into a buffer with ``room`` bytes to spare, or into one of the driver's."""
        into = None if room is None else bytearray(nbytes + room)
        wanted = ByteRange(start, start + nbytes)
        content = self.model.get(key)
        view = None if into is None else memoryview(into)
        try:
            found = self.run(self.drivers[who].get(key, range=wanted, into=view))
        except NotFound:
            assert content is None
        except ValueError:
            assert content is not None
            assert wanted.stop > len(content)
        except Unsupported:
            assert not self.capabilities.ranged_get
        else:
            assert content is not None
            assert self.capabilities.ranged_get
            assert not difference(found, content[wanted.start : wanted.stop])
            if into is not None and room is not None:
                assert not difference(into, content[wanted.start : wanted.stop] + bytes(room))

    @rule(who=clients, data=st.data())
    @precondition(lambda self: self.model)
    def get_a_range_that_is_there(self, who: int, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        ends = st.integers(0, len(self.model[key]))
        start, stop = sorted((data.draw(ends), data.draw(ends)))
        self.ranged_get(who, key, start, stop - start, data.draw(st.none() | st.integers(0, 5)))

    @rule(who=clients, at=places)
    def stat(self, who: int, at: int) -> None:
        key = self.key(at)
        try:
            assert self.run(self.drivers[who].stat(key)) == self.infos[key]
        except NotFound:
            assert key not in self.model

    @rule(who=clients, some=st.lists(places, max_size=2))
    def delete(self, who: int, some: list[int]) -> None:
        chosen = [self.key(at) for at in some]
        self.run(self.drivers[who].delete(chosen))
        for key in chosen:
            self.model.pop(key, None)
            self.infos.pop(key, None)

    @rule(who=clients, odd=st.none() | st.sampled_from(PREFIXES), at=places, cut=st.integers(0, 8))
    def list_objects(self, who: int, odd: str | None, at: int, cut: int) -> None:
        """By an odd prefix, or by the beginning of a key that may well be there."""
        self.check_listing(who, self.key(at)[:cut] if odd is None else odd)

    def check_listing(self, who: int, prefix: str) -> None:
        async def listed() -> list[ObjectInfo]:
            return [info async for info in self.drivers[who].list(prefix)]

        expected = sorted((key for key in self.model if key.startswith(prefix)), key=str.encode)
        found = self.run(listed())
        if self.lists_may_lag:
            for info in found:
                assert self.etags[info.key, info.etag] == self.model.get(info.key), "never the etag of other bytes"
            found = [replace(info, etag=self.infos[info.key].etag) for info in found]
        if not self.capabilities.lists_etags:
            assert not any(info.etag for info in found)
            found = [replace(info, etag=self.infos[info.key].etag) for info in found]
        assert found == [self.infos[key] for key in expected]

    @rule(who=clients)
    def usage(self, who: int) -> None:
        used = self.run(self.drivers[who].usage()).used_bytes
        assert used == sum(map(len, self.model.values())) + self.reserved_bytes

    @rule(who=clients)
    def reopen(self, who: int) -> None:
        """Reservations end with their client, so one that has any stays."""
        if self.reservations_open[who]:
            return
        self.run(self.drivers[who].close())
        self.drivers[who] = self.make_driver()
        self.run(self.drivers[who].open())

    @rule(target=reservations, who=clients, at=places, content=contents, at_once=st.booleans())
    @precondition(lambda self: self.capabilities.mappable and self.reserved_bytes < 1 << 21)
    def reserve(self, who: int, at: int, content: bytes, at_once: bool) -> Reserved:
        driver, key, nbytes = self.drivers[who], self.key(at), len(content)
        found = driver.reserve_nowait(key, nbytes) if at_once else None
        reservation = self.run(driver.reserve(key, nbytes)) if found is None else found
        reservation.buffer[:] = content
        self.reserved_bytes += len(content)
        self.reservations_open[who] += 1
        return Reserved(reservation, content, who)

    @rule(who=clients)
    @precondition(lambda self: not self.capabilities.mappable)
    def reserve_is_refused(self, who: int) -> None:
        try:
            self.run(self.drivers[who].reserve("a", 1))
        except Unsupported:
            return
        raise AssertionError("the tier is not mappable, and hands out memory")

    def settle(self, reserved: Reserved) -> None:
        """The reservation is over, however it ended."""
        self.reservations_open[reserved.who] -= 1
        self.reserved_bytes -= len(reserved.content)

    @rule(reserved=consumes(reservations), keep=st.floats(0, 1), at_once=st.booleans())
    def publish(self, reserved: Reserved, keep: float, at_once: bool) -> None:
        nbytes = round(len(reserved.content) * keep)
        try:
            found = reserved.reservation.publish_nowait(nbytes) if at_once else None
            info = self.run(reserved.reservation.publish(nbytes)) if found is None else found
        finally:
            self.settle(reserved)
        self.published(info, reserved.reservation.key, reserved.content[:nbytes])

    @rule(reserved=consumes(reservations), condition=st.sampled_from(("create", *KEYS)))
    def publish_under_a_condition(self, reserved: Reserved, condition: str) -> None:
        key = reserved.reservation.key
        mode, fails = self.mode_for(key, condition)
        try:
            info = self.run(reserved.reservation.publish(mode=mode))
        except (AlreadyExists, PreconditionFailed, Unsupported) as error:
            assert type(error) is fails
        else:
            assert fails is None
            self.published(info, key, reserved.content)
        finally:
            self.settle(reserved)

    @rule(reserved=consumes(reservations))
    def drop(self, reserved: Reserved) -> None:
        self.run(reserved.reservation.drop())
        self.settle(reserved)

    @invariant()
    def what_is_held_stays(self) -> None:
        for content, expected in self.held:
            assert not difference(content, expected)
