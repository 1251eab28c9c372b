"""An attach and the agent of its node: it is killed in every phase, hangs, or belongs to a job that lives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.cluster.agents.test_kills import end
from tests.servers.agents import Node, eager_agents, node, open_generation
from tests.training import Training
from tiercheck.agent.__main__ import KILLED
from tiercheck.agent.client import connection, start
from tiercheck.agent.client.connection import answer_s_max
from tiercheck.agent.client.session import AgentSession
from tiercheck.agent.protocol.messages import Look, Request
from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.errors import DeadlineExceeded, JobConflict, SaveError
from tiercheck.hierarchy import Hierarchy
from tiercheck.replication.job import ReplicationJob
from tiercheck.runtime.front import ThreadScheduler, run
from tiercheck.runtime.loop_thread import LoopThread
from tiercheck.tiers.registry import make_driver

__all__ = ["eager_agents", "node"]

pytestmark = pytest.mark.cluster


@pytest.fixture
def place(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node whose agent, started by whomever, ends with the test."""
    monkeypatch.setenv("TIERCHECK_AGENT_NODE", node.name)
    yield node
    if RunDirectory.of(node.name).agent_lives():
        loop = LoopThread()
        loop.call(end(node), what="ending the agent", deadline_s=20)
        loop.close()


@contextlib.contextmanager
def enlisted(job: ReplicationJob, deadline_s: float = 20.0) -> Iterator[tuple[AgentSession, ThreadScheduler]]:
    """As a rank that attaches is, before it opens its tiers."""
    scheduler = ThreadScheduler()
    try:
        enlistment = run(AgentSession.of(job.hierarchy, job.rank, scheduler, deadline_s, os.environ))
        try:
            yield enlistment, scheduler
        finally:
            run(enlistment.end())
    finally:
        run(scheduler.close())


def another(enlistment: AgentSession, before: int) -> int:
    """The process of the agent that has taken the place of that one."""
    until = time.monotonic() + 20
    while enlistment.pid == before:
        assert time.monotonic() < until, "no other agent was started"
        time.sleep(0.01)
    return enlistment.pid


async def opens(url: str) -> None:
    async with make_driver(url):
        pass


def test_an_agent_that_is_killed_in_any_phase_of_an_attach_is_replaced(place: Node) -> None:
    """Where it was: its neighbours look for it at the address that they were told before."""
    job = place.job(place.shm())
    place.namespaces.append(f"peer-{place.name}-run")
    with enlisted(job) as (enlistment, scheduler):
        first, told = enlistment.pid, enlistment.endpoint(0)
        os.kill(first, signal.SIGKILL)  # nobody of this node needs it before it registers, but a neighbour does
        run(scheduler.call(opens(f"peer://run?at={told.endpoint}"), what="a neighbour's opening", deadline_s=20))
        second = another(enlistment, first)
        assert enlistment.endpoint(0) == told
        hierarchy = place.open(job)
        run(scheduler.call(hierarchy.__aenter__(), what="opening", deadline_s=20))
        run(scheduler.call(open_generation(hierarchy), what="a generation", deadline_s=20))
        os.kill(second, signal.SIGKILL)
        mover = enlistment.mover(job, hierarchy.first.driver)
        run(enlistment.register())
        another(enlistment, second)
        os.kill(enlistment.pid, signal.SIGKILL)
        assert run(scheduler.call(mover.cycle(), what="a cycle", deadline_s=20))
        run(enlistment.withdraw())
        run(scheduler.call(hierarchy.__aexit__(None, None, None), what="closing", deadline_s=20))


def test_an_agent_that_is_killed_while_it_starts_is_started_again(place: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn, spawned = start._spawn, []

    def killed_at_first(*args: object) -> int:
        spawned.append(args)
        return KILLED + signal.SIGKILL if len(spawned) == 1 else spawn(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(start, "_spawn", killed_at_first)
    with enlisted(place.job(place.shm())) as (enlistment, _):
        assert len(spawned) == 2
        assert enlistment.pid


def test_the_starter_tells_a_kill_from_a_failure() -> None:
    """The process that leaves the agent behind reports how it died, if it dies before it is ready."""
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    code = f"import sys, tiercheck.agent.server.process as life; life.run_agent = lambda *a, **k: exec({dies!r})\n"
    code += "import tiercheck.agent.__main__ as main; sys.argv = ['', '{}']\n"
    code += "import tiercheck.agent.protocol.settings as s; s.AgentSettings.from_json = lambda t: None\n"
    code += "sys.exit(main.main())"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == KILLED + signal.SIGKILL


@pytest.fixture
def granted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each request may wait for the agent's answer, but for looks, which keep nobody waiting."""
    seconds: list[float] = []

    def counted(request: Request) -> float:
        allowed_s = answer_s_max(request)
        if not isinstance(request, Look):
            seconds.append(allowed_s)
        return allowed_s

    monkeypatch.setattr(connection, "answer_s_max", counted)
    return seconds


@pytest.mark.usefixtures("eager_agents")
def test_an_agent_that_hangs_is_named_and_waited_for_no_longer_than_the_deadline(
    place: Node, granted: list[float]
) -> None:
    hierarchy = Hierarchy.of(place.shm(), f"nvme://{place.durable}?survives=rack")
    training = Training()
    checkpointer = training.attach(hierarchy, mover="agent", deadline_s=20.0)
    training.step(1)
    checkpointer.flush()
    pid = int(RunDirectory.of(place.name).lock.read_text().split()[1])
    os.kill(pid, signal.SIGSTOP)
    try:
        stopped = rf"process {pid}, which is stopped: 'kill -CONT {pid}'"
        who = rf"the agent '{place.name}' of .* \({stopped} .*within [012](\.\d+)? s"
        checkpointer._job.recorder._requests._deadline_s = 2.0
        granted.clear()
        with pytest.raises(SaveError, match=who):
            checkpointer.flush()
        assert 0 < sum(granted) <= 2.0, "all that it waits for is within one deadline"
        checkpointer.abort()
        granted.clear()
        with pytest.raises(DeadlineExceeded, match=who):
            Training().attach(hierarchy, mover="agent", deadline_s=2.0)
        assert 0 < sum(granted) <= 2.0, "all that it waits for is within one deadline"
    finally:
        os.kill(pid, signal.SIGCONT)
    with Training().attach(hierarchy, mover="agent", deadline_s=20.0) as again:
        assert again.version == 1


def test_a_second_job_of_the_name_is_refused_and_the_first_goes_on(place: Node) -> None:
    """A second one disturbs neither the trainer nor its mover."""
    urls = [place.shm(), f"nvme://{place.durable}?survives=rack"]
    training = Training()
    with training.attach(Hierarchy.of(*urls), mover="agent", deadline_s=20.0) as checkpointer:
        training.step(1)
        checkpointer.flush()  # its mover has opened what it needs
        scheduler = ThreadScheduler()
        with pytest.raises(JobConflict, match=r"this process is using .* for rank 0 already"):
            run(AgentSession.of(Hierarchy.of(*urls), 0, scheduler, 10.0, os.environ))
        run(scheduler.close())
        assert state_of(place) == "moving", "the mover of the job that lives stands still"
        training.step(2)
        checkpointer.flush()


def state_of(place: Node) -> str:
    from tiercheck.cli.agent import ask

    loop = LoopThread()
    try:
        (rank,) = loop.call(ask(place.name, stop=False), what="the status", deadline_s=10)["ranks"]
        return str(rank["state"])
    finally:
        loop.close()
