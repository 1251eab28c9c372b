"""Going back on purpose, and beginning anew: what is left behind stays, and a request is carried out once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.training import Training, memory
from tests.unit.opening.test_failing_ranks import ranks
from tiercheck.archive.archive import open as open_archive
from tiercheck.checkpointer import Checkpointer
from tiercheck.cli.checkpoints import generation_text
from tiercheck.errors import ConfigurationError, RecoveryError
from tiercheck.hierarchy import Hierarchy
from tiercheck.policy.recovery.request import Request


@dataclass
class Place:
    """A job's tiers, and its lives one after the other."""

    durable: str
    first: str = field(default_factory=memory)

    @property
    def hierarchy(self) -> Hierarchy:
        return Hierarchy.of(self.first, self.durable)

    def live(self, to: int | None, *, crash: bool = False, **options: Any) -> Life:
        """One life of the job: it trains to a version, or not at all, and ends."""
        training = Training()
        checkpointer = training.attach(self.hierarchy, base_every=4, batch=1, **options)
        began = checkpointer.version, checkpointer.generation
        at_attach = training.parameters()
        for version in range(checkpointer.version + 1, (to or 0) + 1):
            training.step(version)
        checkpointer.abort() if crash else checkpointer.close()
        return Life(*began, at_attach, training.states)

    def spans(self, generation: int | None = None) -> tuple[int, ...]:
        with open_archive(self.durable) as archive:
            return tuple(sorted(archive.inventory.readable_of(archive.inventory.lineage(generation))))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(f"nvme://{tmp_path}/durable?survives=rack")


@dataclass
class Life:
    began: int
    generation: int
    parameters: bytes
    states: dict[int, bytes]


def test_a_return_leaves_its_parent_at_the_version_and_what_came_later_stays(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    first = place.live(10)
    caplog.set_level(logging.INFO, logger="tiercheck")
    second = place.live(20, version=6)
    assert (second.began, second.parameters) == (6, first.states[6])
    assert (
        "version=6 was asked for, and is carried out: versions 7..10 are left behind; 7..10 of them stay in "
        "nvme until a start with keep_left_behind=False, and version=10, generation=1 returns to them"
    ) in caplog.text
    assert {7, 8, 9, 10} <= set(place.spans(generation=1))
    # Restarts, and bases that are committed since, do not take it away.
    place.live(30)
    third = place.live(None, version=9, generation=1)
    assert (third.began, third.parameters) == (9, first.states[9])
    # What the second life trained is left behind in its turn.
    assert 30 in place.spans(generation=3)
    fourth = place.live(None, version=30, generation=3)
    assert fourth.began == 30
    assert 10 in place.spans(generation=1)


def test_from_one_future_to_another_what_was_trained_since_they_parted_is_left_behind(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the version that is returned to has a higher number."""
    place.live(20, keep_last=10)
    place.live(14, version=8, keep_last=10)
    caplog.set_level(logging.INFO, logger="tiercheck")
    third = place.live(None, version=18, generation=1, keep_last=10)
    assert third.began == 18
    assert "version=18, generation=1 was asked for, and is carried out: versions 9..14 are left behind" in caplog.text
    assert "version=14, generation=2 returns to them" in caplog.text
    assert place.live(None, version=14, generation=2, keep_last=10).began == 14


def test_a_launcher_that_repeats_a_request_goes_on(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.live(10)
    assert place.live(8, version=6, crash=True).began == 6
    assert place.live(12, version=6, crash=True).began == 8
    assert "version=6 was carried out by an earlier start" in caplog.text
    assert "the job goes on from its newest version, 8" in caplog.text
    assert place.live(None, version=6).began == 12
    # A start without it ends that: asked for again, it is done again.
    assert place.live(None).began == 12
    again = place.live(13, version=6)
    assert again.began == 6
    # Another version is another request.
    assert place.live(None, version=9).began == 9


def test_a_crash_right_after_a_return_loses_nothing(place: Place) -> None:
    first = place.live(10)
    assert place.live(None, version=6, crash=True).began == 6
    back = place.live(None, version=6)
    assert (back.began, back.parameters) == (6, first.states[6])
    assert 10 in place.spans(generation=1)
    newest = place.live(None, version=10, generation=1)
    assert (newest.began, newest.parameters) == (10, first.states[10])


def test_fresh_begins_anew_once_and_what_was_there_stays(place: Place) -> None:
    first = place.live(10)
    second = place.live(3, fresh=True, crash=True)
    assert (second.began, second.parameters) == (0, first.states[0])
    assert place.live(7, fresh=True).began == 3, "a launcher has repeated it"
    assert place.live(9).began == 7
    assert place.live(5, fresh=True).began == 0
    assert 10 in place.spans(generation=1)
    assert 9 in place.spans(generation=4)
    back = place.live(None, version=10, generation=1)
    assert (back.began, back.parameters) == (10, first.states[10])


def test_what_is_left_behind_goes_when_a_start_says_so(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.live(10)
    place.live(12, version=6)
    place.live(14)
    assert 10 in place.spans(generation=1)
    place.live(24, keep_left_behind=False)
    assert "what was left behind of generations 1 is given up (keep_left_behind=False)" in caplog.text
    assert place.spans(generation=1) == ()
    assert place.spans()[-1] == 24


def test_the_newest_version_can_be_asked_for(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.live(10)
    assert place.live(20, version=10).began == 10
    assert "version=10 was asked for, and is carried out: nothing is left behind" in caplog.text
    with open_archive(place.durable) as archive:
        assert not any(each.kept_to for each in archive.generations)


def test_the_listing_says_how_to_return(place: Place) -> None:
    place.live(10)
    place.live(12, version=6)
    with open_archive(place.durable) as archive:
        first, second = archive.generations
        assert (first.kept_to, second.kept_to) == (10, None)
        assert "attach(..., version=10, generation=1) returns to it" in generation_text(first)
        assert archive.plan(10, generation=1).version == 10


def test_a_version_that_cannot_be_reached_is_one_message_that_names_what_can(place: Place) -> None:
    with pytest.raises(RecoveryError, match=r"version=3 was asked for, .* can come to it: there are none"):
        place.live(None, version=3)
    assert place.live(10, fresh=True).began == 0
    place.live(12, version=6)
    with pytest.raises(RecoveryError, match=r"version=50 was .*: there are .*12; with generation=1 \d+\.\.10$"):
        place.live(None, version=50)
    with pytest.raises(RecoveryError, match="version=11, generation=1 was asked for"):
        place.live(None, version=11, generation=1)
    assert place.live(None).began == 12


def test_without_a_tier_that_all_share_nothing_is_given_up_unless_the_user_says_so(tmp_path: Path) -> None:
    place = Place(f"nvme://{tmp_path}/durable?survives=node")
    first = place.live(10)
    for request in ({"version": 9}, {"fresh": True}):
        with pytest.raises(RecoveryError, match=r"no tier that all ranks share holds any.*keep_left_behind=False"):
            place.live(None, **request)
    assert place.live(None).began == 10
    back = place.live(None, version=9, keep_left_behind=False)
    assert (back.began, back.parameters) == (9, first.states[9])


def test_ranks_go_back_together(place: Place) -> None:
    firsts, durable = [memory(), memory()], place.durable

    def life(to: int, **options: Any) -> Callable[[int, Any], tuple[int, bytes]]:
        def body(rank: int, group: Any) -> tuple[int, bytes]:
            training = Training()
            asked = {name: value(rank) if callable(value) else value for name, value in options.items()}
            hierarchy = Hierarchy.of(firsts[rank], durable)
            checkpointer = training.attach(hierarchy, group=group, base_every=4, batch=1, **asked)
            began, parameters = checkpointer.version, training.parameters()
            for version in range(began + 1, to + 1):
                training.step(version)
            checkpointer.close()
            return began, parameters

        return body

    ranks(life(10))
    apart = ranks(life(0, version=lambda rank: 6 + rank))
    assert "rank 1 asks for version=7, and rank 0 for version=6" in str(apart[0]), apart
    back = ranks(life(9, version=6))
    assert [back[rank][0] for rank in (0, 1)] == [6, 6], back
    again = ranks(life(0, version=10, generation=1))
    assert [again[rank][0] for rank in (0, 1)] == [10, 10], again
    fresh = ranks(life(2, fresh=True))
    assert [fresh[rank][0] for rank in (0, 1)] == [0, 0], fresh


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"version": -1}, "version must be a whole number from 0 to"),
        ({"version": True}, "version must be a whole number"),
        ({"version": "6"}, "version must be a whole number"),
        ({"generation": 1}, "generation says which version is meant"),
        ({"version": 1, "fresh": True}, "fresh begins at version 0"),
        ({"fresh": 1}, "fresh must be bool"),
    ],
)
def test_a_request_that_is_none_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Request(**asked)


def test_checkpointer_takes_a_request() -> None:
    with pytest.raises(ConfigurationError, match="request= must be a Request, not int"):
        Checkpointer(None, Hierarchy.of(memory()), request=6)  # type: ignore[arg-type]  # refused before the provider is looked at
