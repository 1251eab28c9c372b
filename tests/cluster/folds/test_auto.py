"""``bases="auto"``, the default: with a processor to spare bases are folded beside training, and whatever stands in the
way, training goes on with captured ones and is told why."""

from __future__ import annotations

import errno
import importlib
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import children, until
from tests.servers.agents import eager_agents
from tests.training import Training
from tests.unit.streams.codecs.test_registry import register
from tests.unit.streams.optimizers.test_registry import LION
from tiercheck.demo.nodes import remove_when_released
from tiercheck.errors import NotFound
from tiercheck.folding import launch, owner
from tiercheck.hierarchy import Hierarchy
from tiercheck.replication.fold_controller import PREPARING
from tiercheck.runtime.backoff import Backoff
from tiercheck.streams.optimizers.registry import find_optimizer, optimizer_of

__all__ = ["eager_agents"]

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("eager_agents", "processors")]

SETTINGS = {"base_every": 4, "batch": 2, "deadline_s": 200.0}
spawn = launch._spawn


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercheck.runtime.front.bound_to", lambda: frozenset(range(4)))
    monkeypatch.setattr("tiercheck.runtime.front.quota", lambda: None)


@pytest.fixture
def hierarchy(tmp_path: Path) -> Iterator[Hierarchy]:
    name = f"auto-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield Hierarchy.of(f"shm://{name}?size=64MiB", f"nvme://{tmp_path}/run?survives=rack")
    with suppress(NotFound):
        remove_when_released(name)


def settled(training: Training, checkpointer: Any) -> str:
    """Train six versions, until a base is folded or it is said why not. Returns why not."""

    def decided() -> bool:
        mover = checkpointer.stats.mover
        return mover.folded_bases > 0 or mover.not_folded not in ("", PREPARING)

    version = checkpointer.version
    training.step(version + 1)
    until(lambda: checkpointer.stats.mover.not_folded != PREPARING, "what folds is ready, or is not", 150)
    for each in range(version + 2, version + 7):
        training.step(each)
    until(decided, "a base is folded, or it is said why not", 150)
    return str(checkpointer.stats.mover.not_folded)


def test_what_never_trains_starts_no_process(hierarchy: Hierarchy) -> None:
    """Not at its first start, and not after a recovery."""
    before = set(children(os.getpid()))
    training = Training()
    with training.attach(hierarchy, **SETTINGS) as checkpointer:
        checkpointer.flush()
        assert (checkpointer.stats.not_folded, checkpointer.stats.mover.not_folded) == ("", PREPARING)
        assert not set(children(os.getpid())) - before
        training.step(1)
        until(lambda: set(children(os.getpid())) - before, "a process that folds")
    assert not set(children(os.getpid())) - before
    with Training().attach(hierarchy, **SETTINGS) as checkpointer:
        assert checkpointer.version == 1
        checkpointer.flush()
        assert not set(children(os.getpid())) - before


def no_memory(*_: Any) -> Any:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def dies(*_: Any) -> Any:
    return subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])


def without_torch(*arguments: Any) -> Any:
    return spawn(*arguments)


@pytest.mark.parametrize(
    ("starts", "why"),
    [
        (no_memory, "the process that folds cannot be started: .*Cannot allocate memory; that was end 4 in a row"),
        (dies, r"the process that folds \(\d+\) has ended: exit status 7.*; that was end 4 in a row"),
        (without_torch, "bases cannot be folded: No module named 'torch'; install torch where folds run"),
    ],
)
def test_if_the_process_cannot_fold_bases_are_captured_and_the_log_says_so_once(
    hierarchy: Hierarchy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    starts: Callable[..., Any],
    why: str,
) -> None:
    caplog.set_level("INFO")
    if starts is without_torch:
        (tmp_path / "path").mkdir()
        (tmp_path / "path" / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
        monkeypatch.syspath_prepend(str(tmp_path / "path"))
    monkeypatch.setattr(launch, "_spawn", starts)
    monkeypatch.setattr(owner, "AGAIN", Backoff(0.1, 0.1))
    training = Training()
    with training.attach(hierarchy, **SETTINGS) as checkpointer:
        said = settled(training, checkpointer)
        assert re.search(why, said), said
        bases = checkpointer.stats.bases
        for version in range(7, 17):
            training.step(version)
        checkpointer.flush()
        assert checkpointer.stats.bases == bases + 3, "8, 12 and 16"
        assert checkpointer.stats.mover.watermark == 16
    told = [each for each in caplog.messages if said in each and "captured from here on" in each]
    assert len(told) == 1
    again = Training()
    with again.attach(hierarchy, bases="capture", **SETTINGS) as checkpointer:
        assert (checkpointer.version, checkpointer.recovery.fidelity) == (16, "exact")
        assert again.parameters() == training.states[16]


def in_two_ways(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """One group runs tensor by tensor, the others by foreach."""
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first], "foreach": True}, {"params": others, "foreach": False}], **options)


def many_groups(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """One for each tensor, some of which are shorter than a vector register, with options of their own."""
    groups = [{"params": [each], "weight_decay": 0.01 * index} for index, each in enumerate(parameters)]
    return torch.optim.AdamW(groups, **options)


@pytest.fixture
def lions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[..., Any]]]:
    """Optimizers of a user's own, registered by entry points of a distribution on this process's path."""
    folder = tmp_path / "installed"
    folder.mkdir()
    (folder / "lion_of_mine.py").write_text(LION)
    entries = {"lion_of_mine.Lion": "lion_of_mine:Replayable", "lion_of_mine.Almost": "lion_of_mine:Wrong"}
    register(folder, "lion", group="tiercheck.optimizers", **entries)
    monkeypatch.syspath_prepend(str(folder))
    for cached in (optimizer_of, find_optimizer):
        cached.cache_clear()
    mine = importlib.import_module("lion_of_mine")
    yield {"Lion": mine.Lion, "Almost": mine.Almost}
    for cached in (optimizer_of, find_optimizer):
        cached.cache_clear()
    sys.modules.pop("lion_of_mine", None)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("in_two_ways", "no kernel is certified in this process for torch.optim.adamw.AdamW as it runs"),
        ("many_groups", ""),
        ("Lion", ""),
        ("Almost", "no kernel is certified in this process for lion_of_mine.Almost as it runs"),
    ],
)
def test_what_has_a_kernel_is_folded_and_what_has_none_is_captured_and_told(
    hierarchy: Hierarchy, lions: dict[str, Callable[..., Any]], name: str, why: str
) -> None:
    """Each folded base is compared with what training has, so folding gives its bits."""
    optimizer: Any = {**lions, "in_two_ways": in_two_ways, "many_groups": many_groups}[name]
    training = Training(optimizer)
    with training.attach(hierarchy, audit_every=1, **SETTINGS) as checkpointer:
        said = settled(training, checkpointer)
        for version in range(7, 17):
            training.step(version)
            checkpointer.flush()
        mover = checkpointer.stats.mover
        assert (said, mover.not_folded, mover.differing_version) == (why, why, None)
        assert (mover.folded_bases > 0, mover.audited_bases > 0) == (not why, not why)
        assert mover.watermark == 16
    again = Training(optimizer)
    with again.attach(hierarchy, bases="capture", **SETTINGS) as checkpointer:
        assert (checkpointer.version, checkpointer.recovery.fidelity) == (16, "exact")
        assert again.parameters() == training.states[16]


def test_an_optimizer_that_is_not_registered_where_folds_run_is_told_what_to_install(
    hierarchy: Hierarchy, lions: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an agent with an environment of its own."""

    def elsewhere(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [each for each in sys.path if not each.endswith("/installed")])
            return spawn(*arguments)

    monkeypatch.setattr(launch, "_spawn", elsewhere)
    training = Training(lions["Lion"])
    with training.attach(hierarchy, **SETTINGS) as checkpointer:
        said = settled(training, checkpointer)
        training.step(7)
        training.step(8)
        checkpointer.flush()
        assert said.startswith("no lion_of_mine.Lion is registered where folds run")
        assert said.endswith("install there what registers it, too")
        assert checkpointer.stats.mover.watermark == 8
