"""Tiers that may not answer: what is asked when, and whom the answer comes from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from tests.simulation import virtual_time
from tiercheck.errors import NotFound, TierError, Transient
from tiercheck.hierarchy import OpenTier
from tiercheck.replication.objects.asking import first_answer


class Named:
    """What the log and an error say of a tier."""

    def __init__(self, name: str) -> None:
        self.name, self.driver, self.url = name, self, f"{name}://here"


Ask = Callable[[], Awaitable[str]]


def answered(asks: dict[str, Ask], deadline_s: float = 8.0) -> tuple[str | None, dict[str, TierError], float]:
    async def ask() -> tuple[str | None, dict[str, TierError], float]:
        tiers = {name: (cast(OpenTier, Named(name)), each) for name, each in asks.items()}
        found, errors = await first_answer(tiers, deadline_s)
        return found, errors, asyncio.get_running_loop().time()

    return virtual_time.run(ask())


async def silent() -> Any:
    await asyncio.sleep(1e6)


async def says(what: str, after_s: float = 0.0) -> str:
    await asyncio.sleep(after_s)
    return what


async def lacks() -> Any:
    raise NotFound("nothing")


def test_silent_tiers_leave_time_to_ask_the_others() -> None:
    found, errors, took_s = answered({"one": silent, "two": silent, "three": partial(says, "good", 3.0)})
    assert (found, errors) == ("good", {})
    assert took_s < 8 * 2 / 3 + 3


def test_the_first_is_the_only_one_that_is_asked_if_it_answers() -> None:
    assert answered({"one": partial(says, "good", 1.0), "two": partial(says, "other")}) == ("good", {}, 1.0)
    found, errors, took_s = answered({"one": lacks, "two": partial(says, "other")})
    assert (found, round(took_s, 3)) == ("other", 0.0)
    assert isinstance(errors["one"], NotFound)


def test_silent_tiers_are_named_when_the_time_is_over() -> None:
    found, errors, took_s = answered({"one": silent, "two": lacks, "three": silent})
    assert (found, took_s) == (None, 8.0)
    assert [type(errors[name]) for name in ("one", "two", "three")] == [Transient, NotFound, Transient]
    assert "one://here" in str(errors["one"]) and "not answered within" in str(errors["one"])
    assert answered({}) == (None, {}, 0.0)
