"""What damaged copies cost, and when they go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from tests.unit.policy.test_placement import base, batch, committed, seen, single
from tiercheck.keys import Key, ShardKey
from tiercheck.policy.damage import base_needed_after, base_without_constants, lost, outlived
from tiercheck.policy.observation import Copy
from tiercheck.policy.placement import Placement
from tiercheck.policy.policies import KeepLast
from tiercheck.policy.watermark import Retention


def going(memory: Iterable[Key], durable: Iterable[Key], *damaged: ShardKey) -> list[Key]:
    return outlived(seen(memory, durable), Retention(KeepLast(1)), [Copy(0, key) for key in damaged])[0]


def snapshot(of: int, version: int) -> ShardKey:
    return ShardKey.snapshot(1, of, version, 0)


@pytest.mark.parametrize(
    ("damaged", "memory", "durable", "is_lost"),
    [
        (single(3), [base(0)], [], True),
        (single(3), [base(0)], [batch(1, 5)], False),
        (single(3), [base(0), base(2)], [], True),
        (single(3), [base(0), base(3)], [], False),
        (base(3), [base(0)], [], True),
        (base(3), [base(0)], [base(3)], False),
        (base(3), [base(0), base(4)], [], False),
        (snapshot(0, 3), [base(0)], [], True),
        (snapshot(0, 3), [base(0), snapshot(0, 4)], [], False),
        (snapshot(0, 3), [base(0), base(3)], [], False),
    ],
)
def test_what_another_copy_or_something_newer_makes_up_for_is_not_lost(
    damaged: ShardKey, memory: list[Key], durable: list[Key], *, is_lost: bool
) -> None:
    assert lost(seen(memory, durable), [Copy(0, damaged)], Placement()) == ([Copy(0, damaged)] if is_lost else [])


def test_a_base_that_stays_in_the_first_tier_makes_up_for_nothing_in_the_others() -> None:
    folding = Placement(5, interval=20, fold_every=5)
    here = seen([base(0), base(10), *(single(version) for version in (6, 8, 9, 10))], [*committed(0), batch(1, 5)])
    rotten = [Copy(0, single(7))]
    assert lost(here, rotten, folding) == rotten
    assert lost(here, rotten, Placement(5, interval=10)) == []


def test_the_next_base_comes_after_all_that_is_lost() -> None:
    here = seen([], [])
    assert base_needed_after(here, []) is None
    assert base_needed_after(here, [Copy(0, base(5)), Copy(0, single(4)), Copy(0, snapshot(5, 9))]) == 5
    assert base_needed_after(here, [Copy(0, single(7)), Copy(0, base(5))]) == 6
    assert base_needed_after(here, [Copy(0, snapshot(5, 9))]) is None, "the next one makes up for it"


def test_lost_constants_need_a_base_after_all_that_refer_to_them() -> None:
    constants = ShardKey.constant(1, 0, 0)
    memory = [replace(base(0), refers_to=(1, 0)), replace(base(10), refers_to=(1, 0))]
    here = seen(memory, [])
    assert lost(here, [Copy(0, constants)], Placement()) == [Copy(0, constants)]
    assert base_needed_after(here, [Copy(0, constants)]) == 10
    assert lost(seen(memory, [constants]), [Copy(0, constants)], Placement()) == [], "another tier has them"
    newer = seen([*memory, base(20)], [])
    assert lost(newer, [Copy(0, constants)], Placement()) == [], "the newest base does without them"


def test_a_base_without_its_constants_needs_another_whatever_other_tiers_hold() -> None:
    """Nothing brings them back into the first tier, and no base is folded of one that lacks them."""
    constants = ShardKey.constant(1, 0, 0)
    referring = [replace(base(0), refers_to=(1, 0)), replace(base(10), refers_to=(1, 0))]
    here = seen(referring, [constants, *referring])
    assert (base_without_constants(here), base_needed_after(here, [])) == (referring[1], 10)
    whole = seen([constants, *referring], [])
    assert (base_without_constants(whole), base_needed_after(whole, [])) == (None, None)
    newer = seen([*referring, base(20)], [constants])
    assert base_without_constants(newer) is None, "the newest base does without them"
    assert base_without_constants(seen([], referring)) is None, "that is another tier's to hold"


def test_a_damaged_differential_goes_with_its_neighbours() -> None:
    memory = [base(0), base(10), single(2), single(11)]
    assert going(memory, [*committed(0), batch(1, 5)], single(3)) == [], "a sound copy would still lead on"
    assert going(memory, committed(10), single(3)) == [single(3)]
    assert going([*memory, base(20)], committed(10), single(3), single(13)) == [single(3)]


def test_of_bases_in_memory_no_more_than_two_stay_and_the_sound_ones_do() -> None:
    assert going([base(0), base(10)], [], base(20)) == [base(20)]
    assert going([base(0)], [], base(20)) == []
    assert going([base(0)], [], base(10), base(20)) == [base(10)]
    assert going([], [], base(0)) == [], "it tells that there was something"
    assert going([], [], base(0), base(10), base(20)) == [base(0)]


def test_a_damaged_base_of_a_shared_tier_goes_when_it_would_go_sound() -> None:
    def gone(*durable: Key) -> list[Key]:
        return outlived(seen([], durable), Retention(KeepLast(1)), [Copy(1, base(10))])[1]

    assert gone(*committed(10)[1:]) == []
    assert gone(*committed(10)[1:], *committed(20)) == [base(10)]
