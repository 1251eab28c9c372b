"""``kill -9`` of the agent at every point, and of the trainers around it: nothing that was captured is lost."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.cluster.agents.victim import whole
from tests.servers.agents import Node, base, capture, held, node, open_generation, record
from tiercheck.agent.client.client import AgentClient, connect_agent, ensure_agent
from tiercheck.agent.client.connection import AgentGone
from tiercheck.agent.client.remote_mover import RemoteMover
from tiercheck.agent.jobs.job_store import write_job
from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.errors import ConfigurationError, TierCheckError
from tiercheck.keys import CommitKey, ShardKey
from tiercheck.tiers.registry import make_driver

__all__ = ["node"]

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[3]

STARTER = """
import asyncio, sys
from tiercheck.agent import ensure_agent
async def main():
    client = await ensure_agent(sys.argv[1], bind="")
    print(client.hello.pid, flush=True)
    sys.stdin.read()
asyncio.run(main())
"""

PLATFORM = """
import sys
from tiercheck.agent import AgentSettings, run_agent
run_agent(AgentSettings.from_json(sys.argv[1]))
"""

HANGING = """
import sys, threading
from pathlib import Path
from tiercheck.agent import AgentSettings, run_agent
from tiercheck.agent.jobs import replicator
from tiercheck.agent.server import process, service
from tiercheck.tiers.posix.nvme import NvmeDriver
run = NvmeDriver.run
async def never_ends(self, work, key=None, undo=None):
    def hang(check):
        Path(sys.argv[2]).touch()
        threading.Event().wait()
    return await run(self, hang, key, undo)
NvmeDriver.run = never_ends
replicator.CLOSE_S_MAX = service.OVERDUE_S = process.END_S_MAX = process.AT_ONCE_S_MAX = 0.5
run_agent(AgentSettings.from_json(sys.argv[1]))
"""


@asynccontextmanager
async def started(node: Node, **options: object) -> AsyncIterator[AgentClient]:
    """A client of a detached agent, which ends with the test."""
    client = await ensure_agent(node.name, **{"bind": "", **options})  # type: ignore[arg-type]
    try:
        yield client
    finally:
        await client.close()
        await end(node)


async def end(node: Node) -> None:
    with suppress(AgentGone):
        async with await connect_agent(node.name) as last:
            try:
                await last.stop(drain=False, deadline_s=10)
            except TierCheckError:
                os.kill(last.hello.pid, signal.SIGKILL)
                raise


async def gone(node: Node, deadline_s: float = 20.0) -> None:
    run = RunDirectory.of(node.name)
    async with asyncio.timeout(deadline_s):
        while run.agent_lives():  # noqa: ASYNC110  (a lock tells nobody)
            await asyncio.sleep(0.02)


async def logged(node: Node, words: str, deadline_s: float = 20.0) -> None:
    """An agent writes its last words when it has let go of its lock."""
    async with asyncio.timeout(deadline_s):
        while words not in RunDirectory.of(node.name).log_tail():  # noqa: ASYNC110  (a file tells nobody)
            await asyncio.sleep(0.02)


def test_killed_before_every_call(node: Node) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.agents.victim", str(node.folder), "53"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10, "the agent makes more calls than this: were they not seen?"


async def test_killed_again_and_again_under_a_trainer(node: Node) -> None:
    chance = random.Random(11)
    job = node.job(node.shm("256MiB"), batch=3)
    async with started(node) as client, node.open(job) as hierarchy:
        await open_generation(hierarchy)
        mover = RemoteMover(client, hierarchy.first.driver, job)
        await mover.register()
        life = asyncio.create_task(mover.run())
        kills = 0
        for version in range(41):
            if version % 10 == 0:
                await mover.room_for_base(60)
                await capture(hierarchy, base(version), nbytes=2_000_000)
            if version:
                await capture(hierarchy, record(version), nbytes=500_000)
            mover.nudge()
            if version % 9 == 4:
                await asyncio.sleep(chance.random() * 0.05)  # another moment of its work each time
                os.kill(client.hello.pid, signal.SIGKILL)
                kills += 1
                await mover.cycle()  # it notices by itself, starts another, and goes on
        await mover.drain(60, closing=True)
        assert mover.status.watermark == 40
        assert mover.conflict is None
        life.cancel()
        assert kills == 5
        keys = await whole(hierarchy, 1)
        covered = {v for key in keys if isinstance(key, ShardKey) for v in key.versions}
        assert covered.issuperset(range(30, 41)), covered
        assert CommitKey(1, 40) in keys


@pytest.mark.parametrize("removed", ["the directory", "the lock", "the socket"])
async def test_an_agent_whose_files_are_removed_ends_and_another_goes_on(node: Node, removed: str) -> None:
    """What tidies temporary files does that to a job of many days."""
    run = RunDirectory.of(node.name)
    job = node.job(node.shm())
    async with started(node) as client, node.open(job) as hierarchy:
        first = client.hello.pid
        await open_generation(hierarchy)
        mover = RemoteMover(client, hierarchy.first.driver, job)
        await mover.register()
        await capture(hierarchy, base(0))
        if removed == "the directory":
            shutil.rmtree(run.root)
        else:
            (run.lock if removed == "the lock" else run.socket).unlink()
        async with asyncio.timeout(60):  # of which it waits a third for another agent
            while Path(f"/proc/{first}").exists():  # noqa: ASYNC110  (it is no child of ours)
                await asyncio.sleep(0.02)
        await capture(hierarchy, record(1))
        await mover.drain(60, closing=True)
        assert mover.status.watermark == 0
        assert client.hello.pid != first
    if removed == "the directory":
        assert "were removed from" not in run.log_tail(), "the log went with it"
    else:
        assert "were removed from" in run.log_tail(lines=100)


async def test_of_many_processes_one_starts_it_and_it_outlives_them_all(node: Node) -> None:
    trainers = [start_trainer(node) for _ in range(4)]
    try:
        pids = {int(await asyncio.to_thread(each.stdout.readline)) for each in trainers if each.stdout}
        assert len(pids) == 1, "more than one was started"
        (pid,) = pids
        for each in trainers:
            os.killpg(each.pid, signal.SIGKILL)
            each.wait(timeout=10)
        assert os.getsid(pid) == pid, "it has a session of its own"
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        assert parent not in {each.pid for each in trainers} | {os.getpid()}
        async with await connect_agent(node.name) as client:
            assert client.hello.pid == pid
            targets = {Path(f"/proc/{pid}/fd/{fd}").readlink() for fd in range(3)}
            assert targets == {Path("/dev/null"), RunDirectory.of(node.name).log}
    finally:
        for each in trainers:
            each.kill()
            each.wait(timeout=10)
            for stream in (each.stdin, each.stdout):
                assert stream is not None
                stream.close()
        await end(node)


async def test_it_goes_on_after_its_trainer_was_killed_and_ends_when_nobody_is_left(node: Node) -> None:
    job = node.job(node.shm(), batch=5)
    async with started(node, linger_s=1.0) as client:
        async with node.open(job) as hierarchy:
            await open_generation(hierarchy)
            await RemoteMover(client, hierarchy.first.driver, job).register()
            await capture(hierarchy, base(0), record(1), record(2))
        await client.close()
        # What is left, an incomplete batch, goes out before it ends.
        await gone(node, 60)
        async with node.open(job) as hierarchy:
            assert str(CommitKey(1, 0)) in await held(hierarchy)
            assert str(ShardKey.differential(1, 1, 2, 0)) in await held(hierarchy)


async def test_an_agent_that_cannot_start_says_why(node: Node) -> None:
    with pytest.raises(ConfigurationError, match=r"could not be started; its log .* ends:\n(.|\n)*no keys in"):
        await ensure_agent(node.name, keys=node.folder / "none")


async def test_told_to_end_it_brings_everything_home(node: Node) -> None:
    job = node.job(node.shm(), batch=5)
    async with started(node) as client, node.open(job) as hierarchy:
        await open_generation(hierarchy)
        await RemoteMover(client, hierarchy.first.driver, job).register()
        await capture(hierarchy, base(0), record(1), record(2), nbytes=1_000_000)
        os.kill(client.hello.pid, signal.SIGTERM)
        await client.close()
        await gone(node)
        assert str(ShardKey.differential(1, 1, 2, 0)) in await held(hierarchy)
        await logged(node, "ended")


async def test_told_twice_it_ends_at_once(node: Node) -> None:
    (node.folder / "notadir").write_text("in the way")
    bad = node.job(node.shm(), durable=f"nvme://{node.folder}/notadir/x?survives=rack")
    async with started(node) as client:
        async with make_driver(bad.namespace) as first:
            await RemoteMover(client, first, bad).register()
        pid = client.hello.pid
        os.kill(pid, signal.SIGTERM)
        async with asyncio.timeout(20):  # it goes on answering while it drains
            while not (await client.status())["ending"]:
                pass
        await client.close()
        os.kill(pid, signal.SIGTERM)
        await gone(node)
        await logged(node, "told to end twice")


@pytest.mark.parametrize("times", [1, 2])
async def test_a_store_that_never_answers_keeps_it_from_no_end(node: Node, times: int) -> None:
    job = node.job(node.shm())
    async with node.open(job) as hierarchy:
        await open_generation(hierarchy)
        await write_job(hierarchy.first.driver, job)
    hangs = node.folder / "hangs"
    settings = node.settings(detached=False, drain_s=0.2 if times == 1 else 600.0).to_json()
    agent = start_hanging(settings, hangs)
    try:
        async with asyncio.timeout(30):
            while not (hangs.exists() and RunDirectory.of(node.name).info.exists()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        for _ in range(times):
            async with await connect_agent(node.name) as client:  # it answers, so it takes signals
                assert client.hello.pid == agent.pid
            agent.send_signal(signal.SIGTERM)
        _, said = await asyncio.to_thread(agent.communicate, timeout=20)
        assert agent.returncode == 1
        assert "a tier does not answer: ended without it" in said
    finally:
        agent.kill()
        agent.communicate(timeout=10)


async def test_a_platforms_agent_waits_for_the_platform(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer starts one itself only where the platform has not within its time."""
    monkeypatch.setattr("tiercheck.agent.client.client.PLATFORM_S", 0.5)
    platform = start_platforms(node)
    try:
        async with asyncio.timeout(30):
            while not RunDirectory.of(node.name).info.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        async with started(node) as client:
            assert (client.hello.pid, client.hello.detached) == (platform.pid, False)
            platform.kill()
            platform.wait(timeout=10)
            await client.status()
            assert client.hello.detached
    finally:
        platform.kill()
        platform.wait(timeout=10)


async def test_its_memory_does_not_grow_with_what_it_moves(node: Node) -> None:
    """Objects of 128 MiB, from shared memory to disk, by a process with less than that of its own."""
    job = node.job(node.shm("700MiB"))
    peak = 0
    async with started(node) as client, node.open(job) as hierarchy:
        await open_generation(hierarchy)
        mover = RemoteMover(client, hierarchy.first.driver, job)
        await mover.register()
        for version in (0, 1, 2):
            await capture(hierarchy, base(version), nbytes=128 << 20)
        draining = asyncio.create_task(mover.drain(120, closing=True))
        while not draining.done():
            peak = max(peak, private_bytes(client.hello.pid))
            await asyncio.wait([draining], timeout=0.01)
        await draining
        assert mover.status.copied_bytes >= 128 << 20
    assert 0 < peak < 112 << 20, f"{peak >> 20} MiB"


def start_trainer(node: Node) -> subprocess.Popen[bytes]:
    """Prints the agent's process, and lives until it is killed."""
    command = [sys.executable, "-c", STARTER, node.name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def start_platforms(node: Node) -> subprocess.Popen[bytes]:
    """An agent in the foreground."""
    settings = node.settings(detached=False).to_json()
    return subprocess.Popen([sys.executable, "-c", PLATFORM, settings], stderr=subprocess.DEVNULL)


def start_hanging(settings: str, hangs: Path) -> subprocess.Popen[str]:
    """An agent whose durable tier never answers; ``hangs`` is there once it has been asked."""
    command = [sys.executable, "-c", HANGING, settings, str(hangs)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
