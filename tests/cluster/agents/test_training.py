"""A training whose mover lives in the node's agent: it saves, is killed, comes back, and so does the agent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import alive, children, maps_torch, until
from tests.servers.agents import eager_agents
from tests.training import Training, memory
from tiercheck.agent.client.client import connect_agent
from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.demo.nodes import remove_when_released
from tiercheck.errors import ConfigurationError, NotFound, TierCheckError
from tiercheck.format import container
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.keys import CommitKey, JobKey
from tiercheck.streams.records.recorded import read_differentials
from tiercheck.tiers.registry import make_driver
from tiercheck.types import Fidelity

__all__ = ["eager_agents"]

pytestmark = pytest.mark.cluster


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of the job, and of its node's agent, which is ended afterwards."""
    name = f"agent-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv("TIERCHECK_AGENT_NODE", name)
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        monkeypatch.setenv("TIERCHECK_RUN_DIR", f"{folder}/run")
        yield name
        if RunDirectory.of(name).agent_lives():
            asyncio.run(end(name))
        with contextlib.suppress(NotFound):
            remove_when_released(name)


async def end(node: str) -> None:
    async with await connect_agent(node) as client:
        await client.stop(drain=False)


def agent_pid(node: str) -> int:
    return int(json.loads(RunDirectory.of(node).info.read_text())["pid"])


def tiers(name: str, tmp_path: Path) -> Hierarchy:
    return Hierarchy.of(f"shm://{name}?size=64MiB", f"nvme://{tmp_path}/durable?survives=rack")


async def held(url: str) -> list[str]:
    async with make_driver(url) as driver:
        return [info.key async for info in driver.list()]


def test_the_agent_brings_everything_home(name: str, tmp_path: Path) -> None:
    training = Training()
    with training.attach(tiers(name, tmp_path), mover="agent", base_every=4, batch=2) as checkpointer:
        for version in range(1, 8):
            training.step(version)
        checkpointer.flush()
        assert checkpointer.stats.mover.watermark == 4
        assert checkpointer.stats.mover.copied_objects > 0
    durable = asyncio.run(held(f"nvme://{tmp_path}/durable"))
    assert str(CommitKey(1, 4)) in durable
    assert any("000000000007" in key for key in durable), "the incomplete batch goes at the end"
    assert str(JobKey(0)) not in asyncio.run(held(f"shm://{name}")), "it is withdrawn at a clean end"


def test_what_a_dead_trainer_left_goes_on_its_way_and_a_killed_agent_comes_back(name: str, tmp_path: Path) -> None:
    training = Training()
    checkpointer = training.attach(tiers(name, tmp_path), mover="agent", base_every=4, batch=2)
    for version in range(1, 4):
        training.step(version)
    os.kill(agent_pid(name), signal.SIGKILL)
    for version in range(4, 7):
        training.step(version)
    checkpointer.flush()
    assert checkpointer.stats.mover.watermark == 4
    checkpointer.abort()
    first = agent_pid(name)
    again = Training()
    with again.attach(tiers(name, tmp_path), mover="agent", base_every=4, batch=2) as checkpointer:
        assert checkpointer.version == 6
        assert again.parameters() == training.states[6]
        assert agent_pid(name) == first, "the agent has outlived the trainer"
        again.step(7)
    assert str(CommitKey(2, 6)) in asyncio.run(held(f"nvme://{tmp_path}/durable"))


@pytest.mark.usefixtures("eager_agents")  # one that stands back may need minutes to import torch
def test_the_agent_folds_the_bases_that_are_due(name: str, tmp_path: Path) -> None:
    """With auto, if a kernel is certified. A process of its own does it, which imports torch, and ends with the agent,
    however that ends: the next agent starts another."""
    training = Training()
    settings = {"mover": "agent", "base_every": 4, "batch": 2, "bases": "auto", "deadline_s": 120.0}
    with training.attach(tiers(name, tmp_path), **settings) as checkpointer:
        training.step(1)
        while not checkpointer.stats.mover.folds:
            assert not checkpointer.stats.mover.not_folded or "being prepared" in checkpointer.stats.mover.not_folded
            checkpointer.flush()
        for version in range(2, 16):
            training.step(version)
            if version % 4 == 0:
                checkpointer.flush()
        checkpointer.flush()
        stats = checkpointer.stats
        assert stats.not_folded == ""
        assert (stats.bases, stats.mover.watermark, stats.mover.not_folded) == (1, 12, "")
        assert stats.mover.folded_bases == 3
        agent = agent_pid(name)
        (folds,) = children(agent)
        assert [maps_torch(each) for each in (agent, folds)] == [False, True]
        os.kill(agent, signal.SIGKILL)
        until(lambda: not alive(folds), "the end of the process that folds")
        for version in range(16, 24):
            training.step(version)
            checkpointer.flush()
        assert agent_pid(name) != agent
        until(lambda: checkpointer.stats.mover.folds, "another process that folds")
        for version in range(24, 28):
            training.step(version)
            checkpointer.flush()
        assert (checkpointer.stats.mover.folded_bases, checkpointer.stats.mover.watermark) == (1, 24)
    remove_when_released(name)
    again = Training()
    with again.attach(tiers(name, tmp_path), mover="trainer", base_every=4, batch=2) as checkpointer:
        assert (checkpointer.version, checkpointer.recovery.fidelity) == (27, Fidelity.EXACT)
        assert again.parameters() == training.states[27]


def test_the_agent_encodes_for_a_tier_with_a_codec_of_its_own(name: str, tmp_path: Path) -> None:
    first = Tier(f"shm://{name}?size=64MiB")
    hierarchy = Hierarchy.of(first, Tier(f"nvme://{tmp_path}/durable?survives=rack", codec="exact+entropy"))
    training = Training()
    # The agent imports torch and loads that codec's kernels at its first copy, which may take long beside other tests.
    with training.attach(hierarchy, mover="agent", base_every=4, batch=2, deadline_s=120.0):
        for version in range(1, 8):
            training.step(version)
    batches = list((tmp_path / "durable").glob("r*/g*/differential/*.safetensors"))
    assert batches
    for path in batches:
        shard = container.parse(path.read_bytes())
        for each in read_differentials(shard, tier="durable"):
            codecs = {name: encoding["codec"] for name, encoding in each.encodings.items()}
            codecs.pop("1.bias")  # of one number: it may be stored as a bf16 number and a factor, which is shorter
            assert set(codecs.values()) == {"exact+entropy"}
    remove_when_released(name)
    again = Training()
    with again.attach(hierarchy, mover="trainer", base_every=4, batch=2) as checkpointer:
        assert (checkpointer.version, checkpointer.recovery.fidelity) == (7, Fidelity.EXACT)
        assert again.parameters() == training.states[7]


def test_a_job_on_one_node_goes_on_without_a_neighbour(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have lost the others, and its script knows nothing of that: not its tiers, and not its policies."""
    shm, durable = tiers(name, tmp_path).tiers
    hierarchy = Hierarchy((shm, Tier(f"peer://{name}"), durable))
    training = Training()
    for first, last in ((0, 5), (5, 9)):
        training = Training()
        with training.attach(hierarchy, base_every=4, placement="bases_only?tier=peer") as checkpointer:
            assert checkpointer.version == first
            for version in range(first + 1, last + 1):
                training.step(version)
    assert caplog.text.count("there is no neighbour, and peer:// is left out until the job starts on more nodes") == 2
    assert asyncio.run(held(f"nvme://{tmp_path}/durable"))
    with pytest.raises(ConfigurationError, match="no tier survives a node failure, which must_survive asks for"):
        Training().attach(Hierarchy.of(f"shm://{name}?size=64MiB", f"peer://{name}", must_survive="node"))


def test_tiers_of_this_process_alone_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="shm://NAME, not memory"):
        Training().attach(Hierarchy.of(memory()), mover="agent")
    wrapped = Hierarchy.of(f"shm://{name}", Tier(f"nvme://{tmp_path}", wrap=lambda driver: driver))
    with pytest.raises(ConfigurationError, match="the tier nvme has a wrapper"):
        Training().attach(wrapped, mover="agent")
    with pytest.raises(ConfigurationError, match="leave mover at 'auto'"):
        Training().attach(Hierarchy.of(f"shm://{name}", f"peer://{name}"), mover="trainer")


@pytest.mark.usefixtures("eager_agents")
def test_what_could_not_be_drained_stays_the_agents_to_move(name: str, tmp_path: Path) -> None:
    (tmp_path / "durable").write_text("in the way")  # the durable tier cannot be opened: a file stands there
    hierarchy = tiers(name, tmp_path)
    with pytest.raises(TierCheckError):
        Training().attach(hierarchy, mover="agent")
    (tmp_path / "durable").unlink()
    training = Training()
    checkpointer = training.attach(hierarchy, mover="agent", on_save_error="warn")
    training.step(1)
    checkpointer.flush()
    checkpointer._job.recorder._requests._deadline_s = 2.0
    (tmp_path / "durable").rename(tmp_path / "aside")
    (tmp_path / "durable").write_text("in the way")
    training.step(2)
    checkpointer.close()
    assert str(JobKey(0)) in asyncio.run(held(f"shm://{name}")), "nobody has taken it back"


def test_the_launchers_word_must_be_a_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCHECK_NODE", "node3")
    with pytest.raises(ConfigurationError, match="TIERCHECK_NODE must be a number, not 'node3'"):
        Training().attach(Hierarchy.of(memory()))


def test_a_url_with_a_password_is_not_handed_over(name: str) -> None:
    hierarchy = Hierarchy.of(f"shm://{name}", "fsspec+sftp://me:p4ssword@host/x")
    with pytest.raises(ConfigurationError, match="holds a secret") as caught:
        Training().attach(hierarchy, mover="agent")
    assert "p4ssword" not in str(caught.value)
