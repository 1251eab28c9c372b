"""Where a demo keeps its things: an output folder, and a name in shared memory that no other demo has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tiercheck.demo.model_size import parameter_count
from tiercheck.demo.settings import RANKS, TrainingSettings
from tiercheck.errors import ConfigurationError, NotFound, Transient
from tiercheck.hierarchy import Hierarchy
from tiercheck.tiers.namespaces import SHM, namespaces, remove_namespace
from tiercheck.types import bytes_text

__all__ = ["Workspace"]

MARKER = ".tiercheck-demo"
NAME = re.compile(r"demo-(?P<pid>\d+)-[0-9a-f]{8}-node\d+")
BASE_BYTES = 12  # a parameter: its float32 master and two moments
DIFFERENTIAL_BYTES = 4  # a parameter: its float32 gradient
BASES_HELD = 3  # two kept, one being written
BASE_ROOM_BYTES = 9 << 20  # each: its header, and the most that the host state may take
DIFFERENTIAL_ROOM_BYTES = 3 << 20


RELEASE_DEADLINE_S = 30.0
RELEASE_POLL_S = 0.05


class Workspace:
    """The output folder and the memory of one demo; leaving the context wipes the memory and the durable tier."""

    def __init__(self, output: Path, *, keep: bool) -> None:
        self.output = output.absolute()
        self.keep = keep
        self.name = f"demo-{os.getpid()}-{secrets.token_hex(4)}"

    @property
    def durable(self) -> Path:
        return self.output / "durable"

    @property
    def uninterrupted(self) -> Path:
        return self.output / "uninterrupted"

    @property
    def interrupted(self) -> Path:
        return self.output / "interrupted"

    @property
    def plot(self) -> Path:
        return self.output / "losses.png"

    @property
    def report(self) -> Path:
        return self.output / "report.json"

    def tiers(self, settings: TrainingSettings) -> tuple[str, ...]:
        """The tiers' URLs: memory of each rank's own (which stands for a node), and a directory that all share."""
        size_bytes = memory_bytes(settings)
        return (f"shm://{self.name}-node{{rank}}?size={size_bytes}", f"nvme://{self.durable}?survives=rack")

    def check_memory(self, settings: TrainingSettings) -> None:
        """Refuse to start where the shared memory cannot hold the first tier. Errors: ``ConfigurationError``."""
        needed = RANKS * memory_bytes(settings)
        free = shutil.disk_usage(SHM).free
        if free < needed:
            raise ConfigurationError(
                f"{SHM} has {bytes_text(free)} free and the demo's memory tiers need up to "
                f"{bytes_text(needed)}; enlarge it (mount -o remount,size=2G {SHM}, or docker run "
                "--shm-size=2g), or train with ZeRO 1, 2 or 3, which divide the state among the ranks"
            )

    def held_bytes(self, tiers: Iterable[str]) -> dict[str, int]:
        """Bytes of the objects in each tier, all ranks together, by the tier's name."""
        return asyncio.run(held_bytes(Hierarchy.of(*tiers)))

    def wipe(self, nodes: Iterable[int]) -> None:
        """The nodes' memory is gone; a node that holds nothing has nothing to lose.

        Errors: ``Transient`` where a process still uses it after ``RELEASE_DEADLINE_S``.
        """
        for node in nodes:
            with contextlib.suppress(NotFound):
                remove_when_released(f"{self.name}-node{node}")

    def write_report(self, values: dict[str, Any]) -> None:
        self.report.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> Self:
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            if any(self.output.iterdir()) and not (self.output / MARKER).exists():
                raise ConfigurationError(
                    f"{self.output} is not empty and no earlier demo's output; choose another folder with --output"
                )
            (self.output / MARKER).touch()
            for folder in (self.uninterrupted, self.interrupted, self.durable):
                if folder.exists():
                    shutil.rmtree(folder)
            for file in (self.plot, self.report):
                file.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigurationError(f"cannot write the demo's output to {self.output}: {error.strerror}") from error
        remove_orphans()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.wipe(range(RANKS))
        if not self.keep and self.durable.exists():
            shutil.rmtree(self.durable)


def remove_when_released(name: str) -> None:
    """Remove a namespace. Of a killed process the last thread may hold its files a moment longer than the process
    seems to live, and there is nothing to wait on."""
    deadline = time.monotonic() + RELEASE_DEADLINE_S
    while True:
        try:
            return remove_namespace(name)
        except Transient:
            if time.monotonic() > deadline:
                raise
            time.sleep(RELEASE_POLL_S)


def remove_orphans() -> None:
    """Free the memory of demos that were killed before they could do so themselves."""
    for namespace in namespaces():
        owner = NAME.fullmatch(namespace.name)
        if owner and not namespace.in_use and not psutil.pid_exists(int(owner["pid"])):
            with contextlib.suppress(NotFound, Transient):  # another demo is removing it, too
                remove_namespace(namespace.name)


def memory_bytes(settings: TrainingSettings) -> int:
    """The most that one rank's memory tier holds: its bases, and the differentials since the older of them."""
    owned = parameter_count(width=settings.width, layers=settings.layers, sequence=settings.sequence)
    if settings.zero > 0:
        owned = -(-owned // RANKS)
    bases = BASES_HELD * (owned * BASE_BYTES + BASE_ROOM_BYTES)
    differentials = 2 * settings.base_every + settings.batch
    return bases + differentials * (owned * DIFFERENTIAL_BYTES + DIFFERENTIAL_ROOM_BYTES)


async def held_bytes(hierarchy: Hierarchy) -> dict[str, int]:
    held: dict[str, int] = {}
    for tier_index, tier in enumerate(hierarchy.tiers):
        urls: set[str] = set()
        for rank in range(RANKS):
            opened = hierarchy.open(rank=rank, node=rank).tiers[tier_index]
            if opened.driver.url in urls:
                continue  # the ranks share this tier
            urls.add(opened.driver.url)
            async with opened.driver as driver:
                held[tier.name] = held.get(tier.name, 0) + sum([info.nbytes async for info in driver.list()])
    return held
