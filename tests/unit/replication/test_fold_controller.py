"""Bases that the mover folds: the recovery's bits, what it falls back to, and what training waits for."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.failing import Failing
from tests.training import Training, memory
from tiercheck.errors import ConfigurationError, SaveError, Transient
from tiercheck.format.container import Shard
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.keys import ShardKey, Stream, parse
from tiercheck.opening.admission import sizes_of
from tiercheck.opening.startup import _Startup
from tiercheck.policy.first_tier import holding
from tiercheck.policy.policies import EverySeconds, EveryVersions, Policies, When
from tiercheck.replication.mover import Mover
from tiercheck.streams.errors import InDoubt, NotExact
from tiercheck.streams.rebuilding import folding
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.wrappers.base import Call, Operation

LAST = 23
AN_AGENT: Any = SimpleNamespace(node="node", lacks_to_fold="")


def durable(tmp_path: Path) -> str:
    return f"nvme://{tmp_path}/run?survives=rack"


def attached(training: Training, *tiers: str | Tier, **options: Any) -> Any:
    settings = {"bases": "fold", "base_every": 4, "batch": 2, **options}
    return training.attach(Hierarchy.of(*tiers), **settings)


def trained(training: Training, checkpointer: Any, flush_at: Sequence[int] = ()) -> Any:
    """The statistics of a training that ended well."""
    for version in range(1, LAST + 1):
        training.step(version)
        if version in flush_at:
            checkpointer.flush()
    checkpointer.close()
    return checkpointer.stats


def resumed(tmp_path: Path) -> tuple[int, bytes]:
    """The version and the parameters that a new job finds, whose memory is empty."""
    after = Training()
    checkpointer = attached(after, memory(), durable(tmp_path))
    checkpointer.abort()
    return checkpointer.version, after.parameters()


def test_bases_are_made_without_the_trainer_and_resumed_from(tmp_path: Path) -> None:
    training = Training()
    checkpointer = attached(training, memory(), durable(tmp_path))
    stats = trained(training, checkpointer)
    assert (stats.bases, stats.mover.folded_bases, stats.mover.watermark) == (1, 5, 20)
    assert resumed(tmp_path) == (LAST, training.states[LAST])


def halve(training: Training) -> None:
    with torch.no_grad():
        training.model[0].weight.mul_(0.5)


def test_a_write_beside_the_step_gets_a_captured_base_and_folding_goes_on_from_it(tmp_path: Path) -> None:
    training = Training()
    checkpointer = attached(training, memory(), durable(tmp_path))
    for version in range(1, LAST + 1):
        training.after_step = partial(halve, training) if version == 9 else lambda: None
        training.step(version)
        if version == 8:
            checkpointer.flush()  # else the base of version 9 may come first, and nobody needs that of version 8
    checkpointer.close()
    assert (checkpointer.stats.bases, checkpointer.stats.mover.folded_bases) == (2, 5)
    assert resumed(tmp_path) == (LAST, training.states[LAST])


def test_after_a_write_that_no_version_holds_bases_are_captured(tmp_path: Path) -> None:
    training = Training()
    checkpointer = attached(training, memory(), durable(tmp_path))
    for version in range(1, LAST + 1):
        training.step(version)
        if version == 8:
            checkpointer.flush()
        if version == 9:
            halve(training)
    checkpointer.close()
    assert checkpointer.stats.mover.folded_bases == 2
    assert checkpointer.stats.bases == 5, "the opening one, that with the write, and those of 12, 16 and 20"
    assert resumed(tmp_path) == (LAST, training.states[LAST])


def test_a_write_outlives_the_node_though_its_base_looks_like_a_folded_one(tmp_path: Path) -> None:
    """Bases of every fifth version stay in memory, and this one holds what no differential does."""
    training = Training()
    checkpointer = attached(training, memory(), durable(tmp_path), base_every=50)
    for version in range(1, 13):
        training.step(version)
        if version == 5:
            halve(training)
    checkpointer.close()
    assert resumed(tmp_path) == (12, training.states[12])


def test_a_doubt_ends_folding_and_the_bases_are_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fold = folding.fold

    def doubtful(base: Shard, differentials: Sequence[Shard], **others: Any) -> Any:
        if base.metadata.key.last >= 8:
            raise NotExact("the moon is full")
        return fold(base, differentials, **others)

    monkeypatch.setattr(folding, "fold", doubtful)
    training = Training()
    checkpointer = attached(training, memory(), durable(tmp_path))
    stats = trained(training, checkpointer, flush_at=(8, 12))
    assert stats.mover.not_folded == "the moon is full"
    assert stats.mover.folded_bases == 2
    assert stats.bases in (3, 4), "the opening one, those of 16 and 20, and that of 12 if the doubt came soon enough"
    assert [each.levelname for each in caplog.records if "the moon is full" in each.message] == ["WARNING", "WARNING"]
    assert resumed(tmp_path) == (LAST, training.states[LAST])


def test_a_doubt_that_a_captured_base_ends_is_no_end_of_folding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold = folding.fold

    def doubtful(base: Shard, differentials: Sequence[Shard], **others: Any) -> Any:
        if base.metadata.key.last == 8:
            raise InDoubt("version 12 holds a doubt")
        return fold(base, differentials, **others)

    monkeypatch.setattr(folding, "fold", doubtful)
    training = Training()
    checkpointer = attached(training, memory(), durable(tmp_path))
    stats = trained(training, checkpointer, flush_at=(8, 12, 16))
    assert (stats.bases, stats.mover.folded_bases, stats.mover.not_folded) == (2, 3, ""), "4, 8, then 16 captured, 20"
    assert resumed(tmp_path) == (LAST, training.states[LAST])


def test_a_write_after_a_version_that_is_folded_does_not_capture_it_again(tmp_path: Path) -> None:
    """Two bases of one version with other bits would be called one."""
    training = Training()
    checkpointer = attached(training, memory(), durable(tmp_path))
    for version in range(1, 10):
        training.step(version)
        if version == 8:
            halve(training)
    assert checkpointer.stats.bases == 2, "the opening one, and that of version 9"
    checkpointer.close()
    assert resumed(tmp_path) == (9, training.states[9])


def write_past_torchs_counters(training: Training) -> None:
    """To an element that no sample is of: of the moments there are none."""
    training.optimizer.state[training.model[0].weight]["exp_avg"].data[0, 0] += 1


def test_what_differs_from_the_live_state_is_captured_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    checkpointer = attached(training, memory(), durable(tmp_path), audit_every=2)
    for version in range(1, LAST + 1):
        if version == 10:
            write_past_torchs_counters(training)
        training.step(version)
        checkpointer.flush()
    checkpointer.close()
    mover = checkpointer.stats.mover
    assert (mover.audited_bases, mover.differing_version, mover.folded_bases) == (1, 12, 2), "4, 8; 12 differs"
    assert mover.differing == ("0.weight", "state/0.weight/exp_avg")
    assert checkpointer.stats.bases == 4, "the opening one, that of 12 from the flush, and those of 16 and 20"
    (told,) = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert "for version 12 differs from what training had in 0.weight, state/0.weight/exp_avg: something has" in told
    after = Training()
    checkpointer = attached(after, memory(), durable(tmp_path))
    recovery = checkpointer.recovery
    checkpointer.abort()
    assert after.parameters() == training.states[LAST]
    assert recovery is not None and recovery.fidelity == "approximate"
    assert "state/0.weight/exp_avg" in " ".join(recovery.notes)


def test_a_difference_at_the_last_version_is_captured_before_the_end(tmp_path: Path) -> None:
    training = Training()
    checkpointer = attached(training, memory(), durable(tmp_path), audit_every=1)
    for version in range(1, 9):
        if version == 7:
            write_past_torchs_counters(training)
        training.step(version)
    checkpointer.close()
    assert (checkpointer.stats.bases, checkpointer.stats.mover.differing_version) == (2, 8)
    assert resumed(tmp_path) == (8, training.states[8])


def test_no_more_bases_are_folded_than_memory_has_room_for(tmp_path: Path) -> None:
    """Training that goes on without the durable tier keeps its memory for differentials."""
    away = threading.Event()

    def is_away(call: Call) -> Exception | None:
        return Transient("away") if away.is_set() and call.operation is Operation.PUT else None

    name = f"folding-{uuid.uuid4().hex}"
    training = Training()
    last = Tier(durable(tmp_path), wrap=lambda driver: Failing(driver, is_away))
    checkpointer = attached(training, f"memory://{name}", last, deadline_s=1.0, on_save_error="warn")
    training.step(1)
    away.set()
    for version in range(2, 40):
        training.step(version)
    bases = [key for key in MemoryDriver(name).store.objects if "/base/" in key]
    assert len(bases) <= 3
    checkpointer.abort()
    MemoryDriver.forget(name)


def test_a_damaged_differential_is_made_up_for(tmp_path: Path) -> None:
    """The next base that is due is captured: no fold leads over the gap."""
    name = f"folding-{uuid.uuid4().hex}"
    training = Training()
    checkpointer = attached(training, f"memory://{name}", durable(tmp_path))
    for version in range(1, LAST + 1):
        training.step(version)
        if version == 6:
            checkpointer.flush()
            key = str(ShardKey.differential(1, 6, 6, 0))
            objects = MemoryDriver(name).store.objects
            content = bytearray(objects[key].content)
            content[-1] ^= 1
            objects[key] = replace(objects[key], content=memoryview(bytes(content)))
    checkpointer.close()
    assert checkpointer.stats.bases == 2
    assert resumed(tmp_path) == (LAST, training.states[LAST])
    MemoryDriver.forget(name)


def test_training_waits_for_folds_that_do_not_keep_up(tmp_path: Path) -> None:
    """And the error names what is not done."""

    def stuck(call: Call) -> Exception | None:
        key = parse(call.key or "")
        base = isinstance(key, ShardKey) and key.stream is Stream.BASE and key.first > 0
        return Transient("no memory just now") if base and call.operation is Operation.RESERVE else None

    training = Training()
    first = Tier(memory(), wrap=lambda driver: Failing(driver, stuck))
    checkpointer = attached(training, first, durable(tmp_path), deadline_s=1.0)
    training.step(1)
    while not checkpointer.stats.mover.folds:  # what folds is made ready beside training
        checkpointer.flush()
    for version in range(2, 8):
        training.step(version)
    with pytest.raises(SaveError, match=r"is not folded yet .4 versions were captured since.*no memory just now"):
        training.step(8)
    checkpointer.abort()


def test_with_auto_a_fold_that_hangs_costs_captured_bases_also_if_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also between the versions at which bases are due. Training waits for it once, and not up to the deadline."""
    caplog.set_level("INFO")
    fold, go_on = folding.fold, threading.Event()

    def hanging(*arguments: Any, **others: Any) -> Any:
        assert go_on.wait(300)
        return fold(*arguments, **others)

    monkeypatch.setattr(folding, "fold", hanging)
    monkeypatch.setattr("tiercheck.recording.backlog.FOLD_S_MAX", 1.0)
    folding_of = _Startup.folding
    monkeypatch.setattr(_Startup, "folding", lambda self, _, bound, **__: folding_of(self, AN_AGENT, bound, apart=True))
    options = {"bases": "auto", "base_every": 50, "deadline_s": 60.0}
    roomy = attached(Training(), memory(), durable(tmp_path / "roomy"), **options)
    sizes = sizes_of(roomy._job.recorder._stream)
    roomy.abort()
    held = holding(sizes, interval=50, batch=2, fold_every=5, each_commits=True)
    training = Training()
    checkpointer = attached(training, f"{memory()}?size={held.nbytes_least}", durable(tmp_path), **options)
    training.step(1)
    while not checkpointer.stats.mover.folds:
        checkpointer.flush()
    for version in range(2, LAST + 1):
        training.step(version)
    stats = checkpointer.stats
    assert stats.mover.folded_bases == 0
    assert stats.bases >= 3, "the opening one, and one each time that memory is full"
    waits = [each for each in caplog.messages if "a base is captured: none was folded within" in each]
    assert len(waits) == 1
    assert 1 <= stats.drain_stall_s < 50, "less than the deadline"
    go_on.set()
    checkpointer.close()
    assert resumed(tmp_path) == (LAST, training.states[LAST])


def test_neither_a_flush_nor_the_end_waits_for_a_base_of_the_first_tier_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, never = threading.Event(), threading.Event()

    def endless(*_: Any, check: Callable[[], None], **__: Any) -> Any:
        begun.set()
        while not never.wait(0.01):
            check()  # it is broken off at the end

    monkeypatch.setattr(folding, "fold", endless)
    training = Training()
    checkpointer = attached(training, memory(), durable(tmp_path), base_every=50)
    for version in range(1, 13):
        training.step(version)
    assert begun.wait(60)
    checkpointer.flush()
    assert checkpointer.stats.mover.folded_bases == 0
    checkpointer.close()
    assert resumed(tmp_path) == (12, training.states[12])


@pytest.mark.parametrize(
    ("cadence", "folded"),
    [
        (When(lambda seen: seen.version % 7 == 3, versions_max=9, ask_every=1), [3, 10, 17]),
        (EverySeconds(3600, versions_max=6, ask_every=1), [6, 12, 18]),
        (EveryVersions(5) | When(lambda seen: seen.version == 8, ask_every=1), [5, 8, 10, 15, 20]),
    ],
    ids=["by a function", "by seconds", "by both"],
)
def test_the_recorder_says_which_versions_are_due_by_whatever_cadence(
    tmp_path: Path, cadence: Any, folded: list[int]
) -> None:
    training = Training()
    options = {"policies": Policies(cadence=cadence), "base_every": 50, "keep_last": 9}
    checkpointer = attached(training, memory(), durable(tmp_path), **options)
    for version in range(1, LAST + 1):
        training.step(version)
        if version in folded:
            checkpointer.flush()
    checkpointer.close()
    assert (checkpointer.stats.bases, checkpointer.stats.mover.folded_bases) == (1, len(folded))
    assert {int(path.stem) for path in tmp_path.rglob("base/*.safetensors")} == {0, *folded}
    assert resumed(tmp_path) == (LAST, training.states[LAST])


def test_a_fold_that_does_not_keep_up_costs_a_captured_base_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Folding goes on from the captured base."""
    fold, go_on = folding.fold, threading.Event()

    def slow(base: Shard, differentials: Sequence[Shard], **others: Any) -> Any:
        assert go_on.wait(30)
        return fold(base, differentials, **others)

    monkeypatch.setattr(folding, "fold", slow)
    patiently = Mover.room_for_base

    def at_once(self: Mover, deadline_s: float, due: Sequence[int] = (), **_: Any) -> Any:
        return patiently(self, deadline_s, due)

    monkeypatch.setattr(Mover, "room_for_base", at_once)  # as with auto, where the agent folds
    training = Training()
    checkpointer = attached(training, memory(), durable(tmp_path))
    for version in range(1, LAST + 1):
        training.step(version)
        while not checkpointer.stats.mover.folds and not go_on.is_set():  # what folds is made ready beside training
            checkpointer.flush()
        if version == 8:
            go_on.set()
        if version >= 8:
            checkpointer.flush()
    checkpointer.close()
    lag = "a base that was due is not folded yet (4 versions were captured since)"
    assert f"base 8 is captured, and not folded: {lag}" in caplog.text
    assert checkpointer.stats.bases == 2
    assert checkpointer.stats.mover.folded_bases in (3, 4), "12, 16, 20, and 4 if that came before the captured one"
    assert resumed(tmp_path) == (LAST, training.states[LAST])


def test_auto_captures_what_cannot_be_folded_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def captured(options: dict[str, Any]) -> str:
        caplog.clear()
        training = Training()
        checkpointer = attached(training, memory(), f"{durable(tmp_path / uuid.uuid4().hex)}", bases="auto", **options)
        for version in range(1, 9):
            training.step(version)
            checkpointer.flush()
        checkpointer.close()
        stats = checkpointer.stats
        assert (stats.bases, stats.mover.folded_bases) == (3, 0)
        said = [each.message for each in caplog.records if stats.not_folded in each.message]
        assert any("captured" in each and "not folded" in each for each in said)
        return str(stats.not_folded)

    assert "no other process can open the first tier" in captured({})
    folding_of = _Startup.folding
    with monkeypatch.context() as patch:
        patch.setattr("tiercheck.runtime.front.bound_to", lambda: frozenset({0}))
        patch.setattr(_Startup, "folding", lambda self, _, bound, **__: folding_of(self, None, bound, apart=True))
        assert "ranks that share processors are 1, and the processors that they may use 1" in captured({})
    monkeypatch.setattr(_Startup, "folding", lambda self, _, bound, **__: folding_of(self, AN_AGENT, bound, apart=True))
    assert "do not lead to the bits of the state" in captured({"codec": "nf4"})
    with monkeypatch.context() as patch:
        patch.setattr(folding, "is_certified", lambda *_: False)
        assert "no kernel is certified in this process for torch.optim" in captured({})
    monkeypatch.setattr(folding, "find_optimizer", lambda _: None)
    assert "no kernel stands for torch.optim" in captured({})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"codec": "nf4"}, "do not lead to the bits of the state"),
    ],
)
def test_what_cannot_be_folded_is_refused_at_the_start(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        attached(Training(), memory(), durable(tmp_path), **options)
    assert not list(tmp_path.rglob("*.safetensors"))
