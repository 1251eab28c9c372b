"""What attaching says: in one line what was resumed, and in a line each what the user may not have meant."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import Training, memory
from tests.unit.opening.test_agreement import train
from tests.unit.opening.test_failing_ranks import checkpointer_of, ranks
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.opening.announcement import nothing_outlives_a_node, overruled_options
from tiercheck.runtime.group import SimulatedGroup
from tiercheck.tiers.posix import file_driver
from tiercheck.tiers.posix.mounts import Mount

STARTUP = "tiercheck.opening.startup"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=STARTUP)
    return caplog


def lines(said: pytest.LogCaptureFixture, level: int) -> list[str]:
    """What was said since the last time, at this level. Of what is no warning, by the start: another logger may have
    been told by another test to say that, too."""
    at_level = [each for each in said.records if each.levelno == level]
    found = [each.getMessage() for each in at_level if level > logging.INFO or each.name == STARTUP]
    said.clear()
    return found


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every directory lies on storage that other nodes reach."""
    monkeypatch.setattr(file_driver, "mount_of", lambda path: Mount(path, "nfs4", frozenset()))


def trained(hierarchy: Hierarchy, last: int, *, flushed: bool = False, **config: Any) -> Checkpointer:
    training = Training()
    checkpointer = training.attach(hierarchy, base_every=2, **config)
    for version in range(checkpointer.version + 1, last + 1):
        training.step(version)
    if flushed:
        checkpointer.flush()
    checkpointer.abort()
    return checkpointer


@pytest.mark.usefixtures("shared")
def test_one_line_says_what_was_resumed_and_from_where(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    first, durable = memory(), f"nvme://{tmp_path}?survives=rack"
    trained(Hierarchy.of(first, durable), 3)
    (line,) = lines(said, logging.INFO)
    assert line.startswith(
        f"nothing to resume from was found in {first}, nvme://{tmp_path}: training begins at version 0; this is "
        "generation 1, and what it saves outlives the failure of a rack, once each rank's first base (about "
    )
    assert line.endswith("B) has reached nvme"), "how much must first drain"
    trained(Hierarchy.of(first, durable), 3)
    assert lines(said, logging.INFO) == [
        "resumed after version 3, exact: base 2 of generation 1 and what follows it, from memory; this is generation "
        "2, and what it saves outlives the failure of a rack"
    ]
    assert not lines(said, logging.WARNING)


@pytest.mark.usefixtures("shared")
def test_a_job_that_begins_anew_on_request_is_not_told_that_nothing_was_found(
    tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    hierarchy = Hierarchy.of(memory(), f"nvme://{tmp_path}?survives=rack")
    trained(hierarchy, 3, flushed=True)
    lines(said, logging.INFO)
    Training().attach(hierarchy, fresh=True).abort()
    (line,) = lines(said, logging.INFO)
    assert line.startswith("training begins at version 0, as fresh=True asks; this is generation 2, and what it saves ")


def test_versions_that_are_trained_again_are_named_with_the_ranks_that_lack_them(
    tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    """Rank 1's memory is lost, and its newest versions with it."""
    urls, durable = [memory(), memory()], f"nvme://{tmp_path}?survives=rack"

    def life(rank: int, group: SimulatedGroup) -> int:
        training = Training()
        provider = ModuleProvider(training.model, training.optimizer)
        config = CheckpointConfig(base_every=4, batch=4)
        checkpointer = Checkpointer(provider, Hierarchy.of(urls[rank], durable), group=group, config=config)
        train(training, checkpointer, 4)
        checkpointer.flush()
        train(training, checkpointer, 6)
        checkpointer.abort()
        return checkpointer.version

    ranks(life)
    urls[1] = memory()
    lines(said, logging.INFO)
    ranks(life)
    (line,) = [line for line in lines(said, logging.WARNING) if line.startswith("resumed")]
    assert (
        "; up to version 6 was found, which rank 1 cannot come to: 5..6 is trained again; this is generation 2" in line
    )


def test_what_is_approximate_is_said_to_be_with_the_reason(said: pytest.LogCaptureFixture) -> None:
    hierarchy = Hierarchy.of(memory())
    trained(hierarchy, 3, codec="int8")
    lines(said, logging.INFO)
    trained(hierarchy, 3, codec="int8")
    (line,) = lines(said, logging.INFO)
    assert line.startswith("resumed after version 3, approximate (1 of the 1 versions replayed were encoded by int8")
    assert "outlives the failure of nothing, not even this process" in line


def test_nodes_whose_failure_costs_the_run_are_told_of_once_a_job(said: pytest.LogCaptureFixture) -> None:
    urls = [memory(), memory()]
    ranks(lambda rank, group: checkpointer_of(group, Hierarchy.of(urls[rank])).abort())
    (line,) = lines(said, logging.WARNING)
    assert line.startswith("no tier outlives the failure of a node (memory): it would cost the run; add ")
    assert nothing_outlives_a_node(Hierarchy.of("shm://x").open(), 1) is None, "a laptop is one node"
    assert nothing_outlives_a_node(Hierarchy.of("shm://x", must_survive="process").open(), 8) is None, "it was said"
    assert nothing_outlives_a_node(Hierarchy.of("shm://x", "nvme:///y?survives=rack").open(), 8) is None


def test_a_local_disk_that_is_to_survive_a_rack_is_told_of(
    tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_driver, "mount_of", lambda path: Mount(path, "ext4", frozenset()))
    trained(Hierarchy.of(memory(), f"nvme://{tmp_path}/local"), 1)
    assert not lines(said, logging.WARNING)
    trained(Hierarchy.of(memory(), f"nvme://{tmp_path}/durable?survives=rack"), 1)
    assert lines(said, logging.WARNING) == [
        f"nvme: survives=rack is claimed of {tmp_path}/durable, which lies on ext4, a file system of this node alone"
    ]


class TestAnOptionThatTheCheckpointOverrules:
    def resume(self, hierarchy: Hierarchy, *, scheduled: bool = False, **options: Any) -> Checkpointer:
        training = Training(**options)
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5) if scheduled else None
        checkpointer = attach(training.model, training.optimizer, hierarchy, scheduler=scheduler)
        for version in (1, 2):
            training.step(version)
            if scheduler is not None:
                scheduler.step()
        checkpointer.close()
        return checkpointer

    def test_it_is_told(self, said: pytest.LogCaptureFixture) -> None:
        hierarchy = Hierarchy.of(memory())
        self.resume(hierarchy, weight_decay=0.1)
        self.resume(hierarchy, weight_decay=0.2)
        assert lines(said, logging.WARNING) == [
            "the checkpoint overrules the script: weight_decay=0.1 instead of 0.2 (group 0); to change an option, set "
            "it after attach (one of torch's in optimizer.param_groups)"
        ]

    def test_an_option_that_is_the_same_is_not(self, said: pytest.LogCaptureFixture) -> None:
        hierarchy = Hierarchy.of(memory())
        self.resume(hierarchy)
        self.resume(hierarchy)
        assert not lines(said, logging.WARNING)

    def test_what_a_scheduler_has_moved_is_not(self, said: pytest.LogCaptureFixture) -> None:
        hierarchy = Hierarchy.of(memory())
        self.resume(hierarchy, scheduled=True)
        self.resume(hierarchy, scheduled=True)
        assert not lines(said, logging.WARNING)

    def test_what_a_scheduler_began_with_is(self) -> None:
        told = overruled_options([{"lr": 0.2, "initial_lr": 0.2}], [{"lr": 0.05, "initial_lr": 0.1}], scheduled=False)
        assert "lr=0.1 instead of 0.2 (group 0)" in (told or "")
        assert overruled_options([{"lr": 0.2}], [{"lr": 0.05}], scheduled=True) is None

    def test_a_momentum_that_a_scheduler_moves_is_not(self) -> None:
        given, restored = {"betas": (0.8, 0.99)}, {"betas": (0.83, 0.99)}
        assert overruled_options([given], [restored], scheduled=True) is None
        told = overruled_options([given], [restored], scheduled=False)
        assert "betas=(0.83, 0.99) instead of (0.8, 0.99)" in (told or "")
        moved = {"max_momentum": 0.95, "momentum": 0.9, "betas": (0.8, 0.99)}
        assert overruled_options([{**moved, "momentum": 0.95}], [{**moved, **restored}], scheduled=False) is None

    def test_a_list_is_a_tuple_that_was_stored(self) -> None:
        assert overruled_options([{"betas": (0.9, 0.95)}], [{"betas": [0.9, 0.95]}], scheduled=False) is None

    def test_an_option_that_was_removed_is(self) -> None:
        told = overruled_options([{"lr": 0.1, "boost": 2.0}], [{"lr": 0.1}], scheduled=False)
        assert "without boost, which was removed (group 0)" in (told or "")

    def test_what_integrations_keep_there_is_not(self) -> None:
        given, restored = ({"lr": 0.1, "tiercheck.own_state": {"0": step}} for step in (0, 4))
        assert overruled_options([given], [restored], scheduled=False) is None


def test_a_retention_policy_with_nothing_to_decide_is_told(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    for url, expected in ((f"nvme://{tmp_path}/own", True), (f"nvme://{tmp_path}/shared?survives=rack", False)):
        with Training().attach(Hierarchy.of(memory(), url), retention="keep_best?metric=loss"):
            pass
        told = any("has nothing to decide: no tier is shared" in line for line in lines(said, logging.WARNING))
        assert told is expected
