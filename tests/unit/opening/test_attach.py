"""Attaching: what can refuse refuses before a tier is touched, and a failure leaves the tiers as they were."""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training import Training, memory
from tests.unit.opening.test_failing_ranks import ranks
from tiercheck.agent.client.endpoint import RankEndpoint
from tiercheck.agent.client.session import AgentSession
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import (
    CapacityExceeded,
    ConfigurationError,
    GroupError,
    RecoveryError,
    TierCheckError,
    Transient,
    UnsupportedSetup,
)
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.opening import startup
from tiercheck.runtime.group import SingleProcess
from tiercheck.testing.faults import Fault, FaultPlan, FaultyDriver, Killed, Moment, Point
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver


class Accelerated(torch.optim.Optimizer):
    """As ``accelerate.optimizer.AcceleratedOptimizer``: an Optimizer whose own ``__init__`` never ran."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Unregistered(torch.optim.AdamW):
    """Of the user's own."""


class Lookahead(torch.optim.Optimizer):
    """Holds slow weights of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})


class Outer(torch.optim.SGD):
    """Another one does its work, as in torch's ``ZeroRedundancyOptimizer``."""

    def __init__(self, optimizer: torch.optim.Optimizer, held: Any) -> None:
        super().__init__(optimizer.param_groups)
        self.optim = held


class Hollow(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters)}]


def test_a_wrapped_optimizer_is_unwrapped() -> None:
    url = memory()
    training = Training()
    training.optimizer = Accelerated(Accelerated(training.optimizer))
    with training.attach(Hierarchy.of(url)):
        training.step(1)
        training.step(2)
    after = Training()
    after.optimizer = Accelerated(after.optimizer)
    checkpointer = after.attach(Hierarchy.of(url))
    checkpointer.abort()
    assert (checkpointer.version, after.parameters()) == (2, training.states[2])


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (Lookahead, "Lookahead wraps AdamW and holds groups or state of its own"),
        (lambda optimizer: Outer(optimizer, optimizer), "Outer holds AdamW as 'optim', whose state is its own"),
        (lambda optimizer: Outer(optimizer, [optimizer]), "Outer holds AdamW as 'optim'"),
        (lambda optimizer: Outer(optimizer, {"one": optimizer}), "Outer holds AdamW as 'optim'"),
        (lambda optimizer: optimizer.state_dict(), "optimizer= must be a torch.optim.Optimizer, not dict"),
        (lambda optimizer: Hollow(optimizer.param_groups[0]["params"]), "Hollow has no step hooks"),
    ],
)
def test_what_cannot_be_seen_stepping_is_refused_before_a_tier_is_touched(
    tmp_path: Path, wrap: Any, message: str
) -> None:
    training = Training()
    training.optimizer = wrap(training.optimizer)
    with pytest.raises(UnsupportedSetup, match=message):
        training.attach(Hierarchy.of(memory(), f"nvme://{tmp_path}/durable?survives=rack"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mover", ["trainer", "agent"])
def test_what_cannot_be_folded_is_refused_before_a_tier_is_touched(mover: str) -> None:
    def touched(driver: TierDriver) -> TierDriver:
        raise AssertionError("a tier is made")

    tiers = Hierarchy.of(Tier(f"memory://{uuid.uuid4().hex}", wrap=touched))
    with pytest.raises(ConfigurationError, match="makes snapshots, which no base is folded of"):
        Training().attach(tiers, bases="fold", codec="snapshot", mover=mover)
    with pytest.raises(ConfigurationError, match=r'Unregistered.*leave bases at "capture"'):
        Training(Unregistered).attach(tiers, bases="fold", mover=mover)


LAST = 3
Contents = dict[str, dict[str, bytes]]
"""By URL, what a tier holds."""


async def contents(urls: list[str]) -> Contents:
    held: Contents = {}
    for url in urls:
        async with make_driver(url) as tier:
            keys = [info.key async for info in tier.list()]
            held[url] = {key: bytes(await tier.get(key)) for key in keys}
    return held


@dataclass
class Past:
    """A job that has trained to version :data:`LAST` and died: what it left, as often as it is wanted."""

    root: Path
    left: list[dict[str, bytes]] = field(default_factory=list)
    parameters: bytes = b""

    @classmethod
    def of(cls, root: Path, *, base_every: int = 100) -> Past:
        """By default with one base, so that its memory holds nothing that is superseded."""
        past = cls(root)
        urls = past.fresh()
        training = Training()
        training.attach(Hierarchy.of(*urls), base_every=base_every)
        for version in range(1, LAST + 1):
            training.step(version)
        training.checkpointer.flush()
        training.checkpointer.abort()
        past.parameters = training.parameters()
        past.left = list(asyncio.run(contents(urls)).values())
        return past

    def fresh(self) -> list[str]:
        return [memory(), f"nvme://{self.root}/{uuid.uuid4().hex}?survives=rack"]

    def again(self) -> list[str]:
        """Tiers of their own that hold what the job left."""
        urls = self.fresh()

        async def fill() -> None:
            for url, objects in zip(urls, self.left, strict=True):
                async with make_driver(url) as tier:
                    for key, content in objects.items():
                        await tier.put(key, [content])

        asyncio.run(fill())
        return urls

    def check(self, urls: list[str]) -> None:
        """The name is free, and the job goes on where it was."""
        training = Training()
        checkpointer = training.attach(Hierarchy.of(*urls))
        checkpointer.abort()
        version = checkpointer.recovery.version if checkpointer.recovery else 0
        assert (version, training.parameters()) == (LAST, self.parameters)


@pytest.fixture(scope="module")
def past() -> Iterator[Past]:
    """In memory: no test of it cuts the power, and each put would wait for its fsync."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tiercheck-test-") as root:
        yield Past.of(Path(root))


def under(urls: list[str], plan: FaultPlan) -> Hierarchy:
    return Hierarchy.of(*(Tier(url, wrap=lambda driver: FaultyDriver(driver, plan)) for url in urls))


Place = tuple[str, int, Moment]
"""A call, which one of its name, and before, inside or after it."""


READS = ("get", "list", "stat", "usage")
"""These change nothing: to fail or to die inside such a call, or after it, is the same as before it."""


def place(point: Point) -> Place:
    return point.call, point.nth, point.moment


def places(past: Past) -> list[Place]:
    """Every place that an attach passes, and that differs from the others."""
    plan = FaultPlan()
    checkpointer = Training().attach(under(past.again(), plan))
    passed = list(plan.points)  # what the mover has done since is no part of it
    checkpointer.abort()
    return [place(point) for point in passed if point.call not in READS or point.moment is Moment.BEFORE]


def test_an_error_at_any_call_to_a_tier_leaves_the_tiers_as_they_were_and_the_name_free(past: Past) -> None:
    failed = 0
    urls = past.again()
    before = asyncio.run(contents(urls))
    for target in places(past):
        if target[2] is Moment.SUSPENDED:  # no driver fails there
            continue
        plan = FaultPlan((Fault(lambda point, at=target: place(point) == at, lambda: Transient("injected")),))
        training = Training()
        try:
            training.attach(under(urls, plan)).abort()
        except TierCheckError as error:
            failed += 1
            assert "injected" in str(error), target
            assert asyncio.run(contents(urls)) == before, target  # so the next attach finds the same
        else:
            past.check(urls)
            urls = past.again()
            before = asyncio.run(contents(urls))
    past.check(urls)
    assert failed >= 5, "others pass: a tier is asked again, or memory serves without it"


def test_when_no_base_can_be_captured_nothing_is_gone_but_what_is_superseded_in_memory(tmp_path: Path) -> None:
    """That had to make room for the base. The job goes on where it was without it."""
    past = Past.of(tmp_path, base_every=2)
    urls = past.again()
    before = asyncio.run(contents(urls))
    full = FaultPlan.fail_call("reserve", lambda: CapacityExceeded("no room"), times=9)
    with pytest.raises(TierCheckError, match="no room"):
        Training().attach(under(urls, full))
    after = asyncio.run(contents(urls))
    gone = {"r00000/g000001/base/000000000000.safetensors"}
    gone |= {f"r00000/g000001/differential/{version:012}-{version:012}.safetensors" for version in (1, 2)}
    assert after[urls[0]] == {key: content for key, content in before[urls[0]].items() if key not in gone}
    assert after[urls[1]] == before[urls[1]]
    past.check(urls)


def test_a_kill_at_any_call_to_a_tier_costs_nothing(past: Past) -> None:
    """Of reads in a row the first and the last one stand for all: the tiers hold the same at each of them."""
    passed, killed = places(past), 0
    inner = [all(call in READS for call, _, _ in passed[n - 1 : n + 2]) for n in range(len(passed))]
    targets = [target for n, target in enumerate(passed) if not inner[n] or n in (0, len(passed) - 1)]
    for target in targets:
        urls = past.again()
        plan = FaultPlan((Fault(lambda point, at=target: place(point) == at, Killed),))
        try:
            Training().attach(under(urls, plan)).abort()
        except (Killed, TierCheckError):
            killed += 1
        past.check(urls)
    assert killed > len(targets) // 2, "others are the mover's by now, or memory serves without the tier"


class Breaking(SingleProcess):
    """A group whose collective of one purpose fails, when all have said what they had to."""

    def __init__(self, breaks: Callable[[str], bool]) -> None:
        self._breaks = breaks

    def all_gather(self, message: bytes, *, what: str, deadline_s: float) -> list[bytes]:
        if self._breaks(what):
            raise GroupError(f"{what}: injected")
        return [message]


def test_a_group_that_breaks_costs_nothing(past: Past) -> None:
    purposes: list[str] = []
    Training().attach(Hierarchy.of(*past.again()), group=Breaking(lambda what: purposes.append(what) or False)).abort()
    assert len(purposes) > 5
    for purpose in purposes:
        urls = past.again()
        with pytest.raises(GroupError, match="injected"):
            Training().attach(Hierarchy.of(*urls), group=Breaking(lambda what, fails=purpose: what == fails))
        past.check(urls)


def provider_methods() -> list[str]:
    return [name for name in vars(ModuleProvider) if not name.startswith("_")]


def test_an_error_of_the_provider_leaves_the_tiers_as_they_were(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its every call. Of those that it makes itself, none fails: the outer one does."""
    calls: list[str] = []
    fails_at = [-1]
    inside = [False]

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return method(*args, **kwargs)
            calls.append(name)
            if len(calls) - 1 == fails_at[0]:
                raise ArithmeticError("injected")
            inside[0] = True
            try:
                return method(*args, **kwargs)
            finally:
                inside[0] = False

        return call

    for name in provider_methods():
        monkeypatch.setattr(ModuleProvider, name, counted(name, getattr(ModuleProvider, name)))
    Training().attach(Hierarchy.of(*past.again())).abort()
    urls = past.again()
    before = asyncio.run(contents(urls))
    for at in range(len(calls)):
        calls.clear()
        fails_at[0] = at
        training = Training()
        with pytest.raises(ArithmeticError, match="injected"):
            training.attach(Hierarchy.of(*urls))
        fails_at[0] = -1
        assert asyncio.run(contents(urls)) == before  # so the next attach finds the same, and the name free
        assert not training.optimizer._optimizer_step_pre_hooks, "a hook of ours stays"
    past.check(urls)


def test_a_rank_that_fails_at_the_end_of_attach_tells_the_others(tmp_path: Path) -> None:
    memories = [memory(), memory()]
    durable = f"nvme://{tmp_path}/durable?survives=rack"

    def life(rank: int, group: Any, plan: FaultPlan) -> int:
        training = Training()
        provider = ModuleProvider(training.model, training.optimizer)
        first = Tier(memories[rank], wrap=lambda driver: FaultyDriver(driver, plan if rank else FaultPlan()))
        config = CheckpointConfig(deadline_s=30)
        checkpointer = Checkpointer(provider, Hierarchy.of(first, durable), group=group, config=config)
        checkpointer.abort()
        return checkpointer.generation

    assert ranks(lambda rank, group: life(rank, group, FaultPlan())) == {0: 1, 1: 1}
    before = asyncio.run(contents([*memories, durable]))
    full = FaultPlan.fail_call("reserve", lambda: CapacityExceeded("no room"), times=9)
    ended = ranks(lambda rank, group: life(rank, group, full))
    assert isinstance(ended[1], TierCheckError)
    assert isinstance(ended[0], RecoveryError)
    assert "beginning to save: rank 1 reports: version 0 could not be saved: no room" in str(ended[0])
    assert asyncio.run(contents([*memories, durable])) == before
    assert ranks(lambda rank, group: life(rank, group, FaultPlan())) == {0: 2, 1: 2}


class InSession:
    """As :class:`tiercheck.agent.client.session.AgentSession`, with an agent that refuses rank 1's replication job."""

    node = "node"
    lacks_to_fold = ""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def endpoint(self, node: int) -> RankEndpoint:
        return RankEndpoint("node", "", "here", "127.0.0.1:7", None)

    async def memories(self, hierarchy: Any, endpoint: Any) -> list[Any]:
        return []

    def mover(self, job: Any, first: Any) -> Any:
        return SimpleNamespace(conflict=None, nudge=lambda **_: None)

    async def register(self) -> None:
        if self.rank == 1:
            raise Transient("the agent has no room")

    async def end(self) -> None:
        pass


def test_an_agent_that_refuses_one_ranks_nomination_is_heard_of_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = [memory(), memory()]

    def life(rank: int, group: Any, mover: str) -> int:
        training = Training()
        provider = ModuleProvider(training.model, training.optimizer)
        config = CheckpointConfig(deadline_s=30, mover=mover)
        checkpointer = Checkpointer(provider, Hierarchy.of(urls[rank]), group=group, config=config)
        checkpointer.abort()
        return checkpointer.version

    async def of(placed: Hierarchy, rank: int, *_: Any) -> InSession:
        return InSession(rank)

    monkeypatch.setattr(AgentSession, "of", of)
    ended = ranks(lambda rank, group: life(rank, group, "agent"))
    assert isinstance(ended[1], Transient)
    assert isinstance(ended[0], RecoveryError)
    assert "handing the movers to the agents: rank 1 reports: the agent has no room" in str(ended[0])
    assert ranks(lambda rank, group: life(rank, group, "trainer")) == {0: 0, 1: 0}, "the name is free"


def test_a_failure_while_what_is_superseded_is_cleared_leaves_the_tiers_as_they_were(
    past: Past, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any) -> int:
        raise RecoveryError("injected")

    urls = past.again()
    before = asyncio.run(contents(urls))
    with monkeypatch.context() as patched:
        patched.setattr(startup, "clear_tiers", fails)
        with pytest.raises(RecoveryError, match="injected"):
            Training().attach(Hierarchy.of(*urls))
    assert asyncio.run(contents(urls)) == before
    past.check(urls)
