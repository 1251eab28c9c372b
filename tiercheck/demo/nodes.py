"""The demo's nodes: each has memory and an agent of its own, and loses both when it fails.

A rank stands for a node. What a node's memory holds is its rank's first tier, and what its agent keeps for the node
before it on the ring.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.agent.server.neighbours import kept_for_neighbours, shm_name
from tiercheck.demo.settings import RANKS, TrainingSettings
from tiercheck.demo.training.model_size import parameter_count
from tiercheck.errors import ConfigurationError, NotFound, Transient
from tiercheck.keys import MarkerKey, ShardKey, Stream, parse
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.shm.driver import ShmDriver
from tiercheck.tiers.shm.namespaces import SHM, namespace_path, namespaces, remove_namespace
from tiercheck.types import bytes_text

__all__ = ["Nodes", "memory_bytes", "remove_orphans"]

BASE_BYTES = 12  # a parameter: its float32 master and two moments
DIFFERENTIAL_BYTES = 4  # a parameter: its float32 gradient
BASES_HELD = 3  # two kept, one being written
BASE_ROOM_BYTES = 9 << 20  # each: its header, and the most that the host state may take
DIFFERENTIAL_ROOM_BYTES = 3 << 20
BLOCK_BYTES = 512  # of which st_blocks counts
END_DEADLINE_S = 30.0
END_POLL_S = 0.05

_JOB = r"demo-(?P<pid>\d+)-[0-9a-f]{8}"
_NAMESPACE = re.compile(rf"(?:peer-(?P<node>demo-\d+-[0-9a-f]{{8}}-\d+)-)?{_JOB}(?:-node\d+)?")
_AGENT = re.compile(rf"agent-(?P<node>{_JOB}-\d+)\.")


class Nodes:
    """The nodes of one demo, under a name that no other demo has. ``ranks``: of each of its lives."""

    def __init__(self, ranks: Sequence[int] = (RANKS,)) -> None:
        self.ranks = ranks
        self._nodes = range(max(ranks))
        self.name = f"demo-{os.getpid()}-{secrets.token_hex(4)}"

    def agent(self, node: int) -> str:
        """The name of the node's agent."""
        return f"{self.name}-{node}"

    def tiers(self, settings: TrainingSettings, durable: Path) -> tuple[str, ...]:
        """The tiers' URLs: own memory, the neighbour's if there is one, and a directory that all share."""
        peer = (f"peer://{self.name}",) if settings.ranks > 1 else ()
        own = f"shm://{self.name}-node{{rank}}?size={self._memory_bytes(settings)}"
        return (own, *peer, f"nvme://{durable}?survives=rack")

    def _memory_bytes(self, settings: TrainingSettings) -> int:
        """A node's. On other ranks what was saved stays until the new ones have a base of their own."""
        return sum(memory_bytes(replace(settings, ranks=ranks)) for ranks in self.ranks)

    def check_memory(self, settings: TrainingSettings) -> None:
        """Refuse to start if the shared memory cannot hold that of all nodes. Errors: ``ConfigurationError``."""
        needed = 2 * len(self._nodes) * self._memory_bytes(settings)  # its own objects, and as many of its neighbour's
        free = shutil.disk_usage(SHM).free
        if free < needed:
            raise ConfigurationError(
                f"{SHM} has {bytes_text(free)} free and the demo's memory tiers need up to "
                f"{bytes_text(needed)}; enlarge it (mount -o remount,size=4G {SHM}, or docker run "
                "--shm-size=4g), or train with ZeRO 1, 2 or 3, which divide the state among the ranks"
            )

    def held_bytes(self, durable: Path) -> dict[str, int]:
        """Bytes of the objects in each tier, all nodes together, by the tier's name."""
        present = {namespace.name for namespace in namespaces()}
        own = [f"{self.name}-node{node}" for node in self._nodes]
        kept = [shm_name(self.agent(node), self.name) for node in self._nodes]
        return {
            "shm": sum(asyncio.run(object_bytes(ShmDriver(name))) for name in own if name in present),
            "peer": sum(asyncio.run(object_bytes(kept_for_neighbours(name))) for name in kept if name in present),
            "nvme": asyncio.run(object_bytes(make_driver(f"nvme://{durable}"))) if durable.exists() else 0,
        }

    def occupied_bytes(self, durable: Path) -> dict[str, int]:
        """What each tier takes, also for what is being written and for what is kept for reuse, while others write
        there."""
        own = [namespace_path(f"{self.name}-node{node}") for node in self._nodes]
        kept = [namespace_path(shm_name(self.agent(node), self.name)) for node in self._nodes]
        return {
            "shm": sum(map(occupied, own)),
            "peer": sum(map(occupied, kept)),
            "nvme": occupied(durable),
        }

    def fail(self, nodes: Iterable[int]) -> None:
        """The nodes' agents die, and their memory is gone; a node that holds nothing has nothing to lose.

        Errors: ``Transient`` if a process still uses it after :data:`END_DEADLINE_S`.
        """
        for node in nodes:
            wipe(self.agent(node), f"{self.name}-node{node}", shm_name(self.agent(node), self.name))

    def lose_stage(self, rank: int, durable: Path, kept_until: int) -> None:
        """Every copy of what a rank has saved is gone, but for its durable bases up to a version.

        Errors: ``Transient`` if a process still uses one after :data:`END_DEADLINE_S`.
        """
        keeper = self.agent((rank + 1) % len(self._nodes))
        wipe(keeper, shm_name(keeper, self.name))
        self.fail((rank,))
        asyncio.run(delete_of(rank, make_driver(f"nvme://{durable}"), kept_until))

    def close(self) -> None:
        """End every node, and leave nothing behind."""
        self.fail(self._nodes)
        for node in self._nodes:
            remove_run_files(self.agent(node))


def wipe(agent: str, *namespaces: str) -> None:
    """The agent dies, and these namespaces are gone; those that are not there have nothing to lose. Errors:
    ``Transient``."""
    kill_agent(agent)
    for name in namespaces:
        with contextlib.suppress(NotFound):
            remove_when_released(name)


def kill_agent(name: str) -> None:
    """``kill -9`` the agent, if there is one, and wait until it is gone. Errors: ``Transient``."""
    run = RunDirectory.of(name)
    deadline = time.monotonic() + END_DEADLINE_S
    while run.agent_lives():
        if time.monotonic() > deadline:
            raise Transient(f"the agent {name} outlived kill -9 by {END_DEADLINE_S:.0f} s; its log is {run.log}")
        # One that is still starting holds its lock, and says who it is a moment later.
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            process = psutil.Process(json.loads(run.info.read_text(encoding="utf-8"))["pid"])
            if any("tiercheck.agent" in argument for argument in process.cmdline()):
                process.kill()
        time.sleep(END_POLL_S)


def remove_run_files(name: str) -> None:
    run = RunDirectory.of(name)
    logs = (run.log, run.log.with_name(f"{run.log.name}.1"))
    for file in (run.socket, run.peer_socket, run.lock, run.start_lock, *logs, run.info):
        file.unlink(missing_ok=True)


def remove_when_released(name: str) -> None:
    """Remove a namespace. Of a killed process the last thread may hold its files a moment longer than the process
    seems to live, and there is nothing to wait on."""
    deadline = time.monotonic() + END_DEADLINE_S
    while True:
        try:
            return remove_namespace(name)
        except Transient:
            if time.monotonic() > deadline:
                raise
            time.sleep(END_POLL_S)


def remove_orphans() -> None:
    """End the agents and free the memory of demos that were killed before they could do so themselves."""
    for file in RunDirectory.of("demo").root.iterdir():
        found = _AGENT.match(file.name)
        if found and not psutil.pid_exists(int(found["pid"])):
            kill_agent(found["node"])
            remove_run_files(found["node"])
    for namespace in namespaces():
        owner = _NAMESPACE.fullmatch(namespace.name)
        if owner and not psutil.pid_exists(int(owner["pid"])):
            with contextlib.suppress(NotFound, Transient):  # another demo is removing it, too
                remove_namespace(namespace.name)


def memory_bytes(settings: TrainingSettings) -> int:
    """The most that one rank's memory tier holds, as admission counts it: bases, and an interval of differentials for
    each of them."""
    layers = settings.layers // settings.stages if settings.stages else settings.layers
    owned = parameter_count(width=settings.width, layers=layers, sequence=settings.sequence)
    if settings.zero > 0 and not settings.stages:
        owned = -(-owned // settings.ranks)
    bases = BASES_HELD * (owned * BASE_BYTES + BASE_ROOM_BYTES)
    differentials = BASES_HELD * settings.base_every + max(2, settings.batch) + 1  # one more is being captured
    return bases + differentials * (owned * DIFFERENTIAL_BYTES + DIFFERENTIAL_ROOM_BYTES)


def occupied(root: Path) -> int:
    """Bytes of the pages or blocks of all files in a directory. Files and folders may be deleted meanwhile, and a file
    that is renamed counts once."""
    found: dict[int, int] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = Path(folder, name).lstat()
                found[status.st_ino] = status.st_blocks * BLOCK_BYTES
    return sum(found.values())


async def object_bytes(driver: TierDriver) -> int:
    async with driver:
        return sum([info.nbytes async for info in driver.list()])


async def delete_of(rank: int, driver: TierDriver, kept_until: int) -> None:
    """What a rank has captured and its markers, but for bases up to a version."""

    def is_lost(name: str) -> bool:
        key = parse(name)
        shard = key.shard if isinstance(key, MarkerKey) else key
        if not isinstance(shard, ShardKey) or shard.rank != rank:
            return False
        return shard.stream not in (Stream.BASE, Stream.CONSTANT) or shard.last > kept_until

    async with driver:
        await driver.delete([info.key async for info in driver.list() if is_lost(info.key)])
