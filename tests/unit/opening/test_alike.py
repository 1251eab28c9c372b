"""What ranks must have alike: settings, and tiers that all of them share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.training import Training, memory
from tests.unit.opening.test_failing_ranks import ranks
from tests.unit.replication.objects.test_generation import Unconditional
from tiercheck.errors import ConfigurationError, NotFound, SaveError, Transient
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.opening.alike import SETTINGS, refuse_different
from tiercheck.runtime.group import SimulatedGroup
from tiercheck.testing.faults import FaultPlan, FaultyDriver
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.wrappers.retrying import RetryingDriver
from tiercheck.types import ObjectInfo, Payload, PutMode


def started(hierarchies: list[Hierarchy], *, last: int = 0, **options: Any) -> dict[int, Any]:
    """What each of two ranks comes to: the version that it ends with, or what it raises. An option that is a list has
    a value for each rank."""

    def body(rank: int, group: SimulatedGroup) -> int:
        training = Training()
        given = {name: value[rank] if isinstance(value, list) else value for name, value in options.items()}
        with training.attach(hierarchies[rank], group=group, batch=1, **given) as checkpointer:
            for version in range(checkpointer.version + 1, last + 1):
                training.step(version)
        return checkpointer.version

    return ranks(body)


def test_other_settings_are_refused_on_all_ranks() -> None:
    for said in started([Hierarchy.of(memory()) for _ in range(2)], base_every=[5, 7]).values():
        assert isinstance(said, ConfigurationError)
        assert "rank 1 has base_every=7, and rank 0 base_every=5: all ranks must have the same" in str(said)


def test_other_tiers_are_refused_on_all_ranks(tmp_path: Path) -> None:
    fewer, more = Hierarchy.of(memory()), Hierarchy.of(memory(), f"nvme://{tmp_path}?survives=node")
    for said in started([more, fewer]).values():
        assert "rank 1 has tiers=memory, and rank 0 tiers=memory, nvme: all ranks must have" in str(said)


def test_each_setting_is_compared() -> None:
    alike = dict.fromkeys(SETTINGS, "1")
    refuse_different(["", ""], [alike, alike])
    for name in SETTINGS:
        with pytest.raises(ConfigurationError, match=f"rank 1 has {name}=2, and rank 0 {name}=1"):
            refuse_different(["", ""], [alike, {**alike, name: "2"}])


def apart(tmp_path: Path, wrap: Callable[[TierDriver], TierDriver] | None = None) -> list[Hierarchy]:
    """Each rank's durable tier is a place of its own."""
    urls = [f"nvme://{tmp_path}/{rank}?survives=rack" for rank in (0, 1)]
    return [Hierarchy.of(memory(), Tier(url, wrap=wrap)) for url in urls]


def test_a_shared_tier_that_is_two_places_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    for said in started(apart(tmp_path)).values():
        assert isinstance(said, ConfigurationError)
        assert f"the tier nvme is nvme://{tmp_path}/0 for rank 0 and nvme://{tmp_path}/1" in str(said)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "lineage" in str(path)]
    one = f"nvme://{tmp_path}/0?survives=rack"
    assert started([Hierarchy.of(memory(), one) for _ in range(2)], last=3) == {0: 3, 1: 3}


class ComesSecond(FaultyDriver):
    """Its first try to put the generation's record fails, when another rank's is there."""

    tries = 0

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        if "lineage" in key:
            self.tries += 1
        if "lineage" in key and self.tries == 1:
            async with asyncio.timeout(30):
                while True:
                    with suppress(NotFound):
                        await self.inner.stat(key)
                        raise Transient("the answer is lost")
                    await asyncio.sleep(0.01)
        return await super().put(key, payload, mode=mode)


def test_ranks_that_share_a_store_which_fails_once_are_not_taken_apart(tmp_path: Path) -> None:
    """After a try that failed, a rank takes the record that another one has put for its own: they are the same."""
    url, second = f"nvme://{tmp_path}?survives=rack", list[ComesSecond]()

    def fails_once(driver: TierDriver) -> TierDriver:
        second.append(ComesSecond(driver))
        return RetryingDriver(second[-1])

    hierarchies = [Hierarchy.of(memory(), url), Hierarchy.of(memory(), Tier(url, wrap=fails_once))]
    assert started(hierarchies, last=3) == {0: 3, 1: 3}
    assert [each.tries for each in second] == [1], "the retry finds a record like its own"
    assert [path.name for path in tmp_path.rglob("lineage/*")] == ["g000001"], "nothing else is left"


def test_a_job_does_not_end_well_if_nothing_was_ever_committed(tmp_path: Path) -> None:
    """A store without conditional puts tells nobody that a record is there already."""
    ended = started(apart(tmp_path, Unconditional), last=3, deadline_s=2.0)
    assert isinstance(ended[0], SaveError)
    assert "base 0 is not known to have come whole to nvme from rank 1, though it has brought everything" in str(
        ended[0]
    )


def test_a_rank_that_has_not_brought_everything_is_not_waited_for_once_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    durable = f"nvme://{tmp_path}?survives=rack"
    stuck = Tier(durable, wrap=lambda driver: FaultyDriver(driver, FaultPlan.full(after_puts=1)))
    hierarchies = [Hierarchy.of(memory(), durable), Hierarchy.of(memory(), stuck)]
    ended = started(hierarchies, last=3, deadline_s=2.0, on_save_error="warn")
    assert ended == {0: 3, 1: 3}
    assert "stays in the first tier" in caplog.text
    assert "though it has brought everything" not in caplog.text
