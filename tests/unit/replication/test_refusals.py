"""What is refused is not done, is told once, and is shown as long as it lasts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.moving import base, capture, held, mover_of, record, tiers
from tiercheck.keys import CommitKey, Key
from tiercheck.policy.guard import Refusal
from tiercheck.policy.observation import Observation
from tiercheck.policy.watermark import Retention
from tiercheck.replication.refusals import TOLD_MAX, Refusals


class Greedy(Retention):
    """Deletes all that there is."""

    def reclaimable(self, seen: Observation) -> dict[int, list[Key]]:
        return {role.index: list(seen.contents[role.index]) for role in seen.roles}

    def wanted(self, seen, transfers):  # type: ignore[no-untyped-def]  # whatever is deleted, it is wanted
        return list(transfers)


async def test_whoever_decides_to_delete_what_a_recovery_needs_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with tiers(tmp_path) as hierarchy:
        await capture(hierarchy, base(0), record(1), record(2), record(3))
        mover = mover_of(hierarchy, retention=Greedy())
        await mover.cycle()
        await mover.cycle()
        assert {str(base(0)), str(CommitKey(1, 0))} <= set(await held(hierarchy))
        assert {str(base(0)), str(record(1)), str(record(3))} <= set(await held(hierarchy, 0))
        assert "KeepLast(n=2) is refused: it would delete" in mover.status.errors["policies"]
        assert mover.status.refused_decisions > 0
        assert mover.status.watermark == 0
    assert any("which a recovery to version 0 needs; the safe decision is taken" in each for each in caplog.messages)


def test_a_refusal_is_told_once_counted_whenever_it_comes_back_and_shown_while_it_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals, refusal = Refusals(), Refusal("Own()", "it raises")
    for now in ([refusal], [refusal], [], [refusal]):
        refusals.note("retention", now)
    refusals.note("placement", [refusal])
    assert refusals.count == 3
    assert refusals.text == "Own() is refused: it raises"
    assert len(caplog.messages) == 1
    refusals.note("placement", [])
    refusals.note("retention", [])
    assert refusals.text == ""
    for number in range(2 * TOLD_MAX):
        refusals.note("retention", [Refusal("Own()", str(number))])
    assert len(caplog.messages) == TOLD_MAX, "a policy that is refused for ever new reasons does not fill the log"
