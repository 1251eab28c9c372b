"""The conformance kit: what every driver is held to, by the same tests.

A driver's own test file subclasses :class:`TierDriverTests`, says how to make a driver on an empty tier, and
gives raw access past it, so that the driver cannot certify itself::

    class TestMine(TierDriverTests):
        async def make_driver(self): ...
        async def second_client(self, driver): ...
        async def raw_get(self, driver, key): ...
        async def raw_put(self, driver, key, content): ...
        def crash_before_publish(self, driver): ...
        def client_factory(self, driver): ...
        async def make_small_driver(self): ...

Every capability is tested both ways: what a false flag excludes must raise ``Unsupported``; nothing is skipped.
Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

import tiercheck.testing.plugin  # noqa: F401  (registers the kit's assertions for rewriting, before the imports below)
from tiercheck.testing.driver_kit.limits import LimitTests
from tiercheck.testing.driver_kit.objects import BAD_KEYS, GOOD_KEYS, ObjectTests
from tiercheck.testing.driver_kit.other_clients import OtherClientTests
from tiercheck.testing.driver_kit.reservations import ReservationTests
from tiercheck.testing.driver_kit.writers import WriterTests

__all__ = ["BAD_KEYS", "GOOD_KEYS", "TierDriverTests"]


class TierDriverTests(ObjectTests, WriterTests, OtherClientTests, ReservationTests, LimitTests):
    """The whole kit: subclass it, give the methods of :class:`~tiercheck.testing.driver_kit.base.TierKit`, name it
    ``Test...``."""
