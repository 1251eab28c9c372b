"""``python -m benchmarks lives``: each loop is trained once undisturbed, and once in several lives, of which all but
the last end by SIGKILL at a random moment. Now and then the node's memory is lost as well. Every version that a life
restores or trains must have the bits of the undisturbed run, unless its recovery calls itself approximate."""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import re
import secrets
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import progress
from tiercheck.errors import NotFound
from tiercheck.tiers.shm.namespaces import remove_namespace

if TYPE_CHECKING:
    from benchmarks.lives.life import Entry

__all__ = ["add_command"]

LIFE_S_MAX = 180.0
LATE_S_MAX = 3.0
"""How long the other ranks of a job may go on after one of them was killed."""
POLL_S = 0.001
"""How often it is looked what a life has written: nobody tells, and who did would be no user's loop."""
LATER_S = (0.002, 0.01, 0.05)
"""A kill comes up to so long after an iteration was written down: at its end, in the next one, or in a later one."""
ONE_KILLED = 0.3
"""How often one rank is killed, and not all."""
MEMORY_LOST = 0.3
"""How often the node's memory goes with them."""


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="REGEX", default="", help="the loops to train, by name (all of them)")
    parser.add_argument("--kills", type=int, default=3, help="how many lives end early (3)")
    parser.add_argument("--versions", type=int, default=30, help="of each loop (30)")
    parser.add_argument("--base-every", type=int, default=5)
    parser.add_argument("--bases", choices=("auto", "capture", "fold"), default="auto")
    parser.add_argument("--seed", type=int, default=None, help="the seed that another run printed")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Settings:
    kills: int
    versions: int
    base_every: int
    bases: str
    seed: int


@dataclass
class Outcome:
    """What became of a loop."""

    loop: str
    lives: int = 0
    lost: list[int] = field(default_factory=list)
    """Of each life after the first, how many versions its predecessor had trained in vain."""
    memory_lost: int = 0
    """How many lives began without the node's memory."""
    recoveries: dict[str, int] = field(default_factory=dict)
    """By fidelity."""
    failure: str = ""
    """What differs, or the error that ended a life. Empty: all bits are the same."""


def run(arguments: argparse.Namespace) -> int:
    from benchmarks.lives.loops import LOOPS

    chosen = [name for name in LOOPS if re.search(arguments.only, name)]
    if not chosen or min(arguments.kills, arguments.versions, arguments.base_every) < 1:
        progress(f"error: --kills, --versions and --base-every are 1 or more, and the loops are {', '.join(LOOPS)}")
        return 2
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    settings = Settings(arguments.kills, arguments.versions, arguments.base_every, arguments.bases, seed)
    progress(f"{len(chosen)} loops, seed {seed}")
    failed = False
    for name in chosen:
        outcome = lived(name, settings)
        failed |= bool(outcome.failure)
        print(json.dumps(asdict(outcome)), flush=True)
    return 1 if failed else 0


def lived(name: str, settings: Settings) -> Outcome:
    """All lives of a loop."""
    with tempfile.TemporaryDirectory(prefix="lives-") as folder:
        lives = Lives(name, settings, Path(folder))
        try:
            return lives.run()
        finally:
            lives.lose_memory()


class Lives:
    """Of one loop, one after the other."""

    def __init__(self, name: str, settings: Settings, directory: Path) -> None:
        from benchmarks.lives.loops import LOOPS

        self._name, self._ranks = name, LOOPS[name].ranks
        self._settings = settings
        self._directory = directory
        self._memory = f"lives-{secrets.token_hex(6)}"
        self._drawn = random.Random(f"{settings.seed} {name}")
        self._outcome = Outcome(name)

    def run(self) -> Outcome:
        outcome = self._outcome
        undisturbed, ended = self._life("undisturbed", None, kill_after=None)
        if not ended:
            outcome.failure = self._error("undisturbed")
            return outcome
        expected = [{each.version: each for each in rank} for rank in undisturbed]
        tiers = [f"shm://{self._memory}?size=64MiB", f"nvme://{self._directory}/durable?survives=rack"]
        trained, ended = 0, False
        while not ended and not outcome.failure:
            life = f"life{outcome.lives}"
            early = outcome.lives < self._settings.kills
            kill_after = self._drawn.randint(1, max(1, (self._settings.versions - trained) // 2)) if early else None
            if outcome.lives and self._drawn.random() < MEMORY_LOST:
                outcome.memory_lost += self.lose_memory()
            found, ended = self._life(life, tiers, kill_after)
            if not ended and not early:
                outcome.failure = self._error(life)
            self._note_recovery(found[0], trained)
            if "approximate" not in outcome.recoveries:  # what follows such a one may differ, in later lives, too
                outcome.failure = outcome.failure or self._difference(life, found, expected)
            trained = max((each.version for each in found[0]), default=trained)
            outcome.lives += 1
        return outcome

    def lose_memory(self) -> bool:
        """Whether there was any."""
        try:
            remove_namespace(self._memory)
        except NotFound:
            return False
        return True

    def _note_recovery(self, entries: Sequence[Entry], trained: int) -> None:
        for entry in entries:
            if entry.fidelity:
                self._outcome.recoveries[entry.fidelity] = self._outcome.recoveries.get(entry.fidelity, 0) + 1
                self._outcome.lost.append(max(0, trained - entry.version))

    def _difference(self, life: str, found: Sequence[Sequence[Entry]], expected: Sequence[Mapping[int, Entry]]) -> str:
        """The first one from the undisturbed run, in words; empty if there is none."""
        for rank, entries in enumerate(found):
            for entry in entries:
                wanted = expected[rank][entry.version]
                if entry.digest != wanted.digest or entry.loss not in ("", wanted.loss):
                    what = "was restored, called exact," if entry.fidelity else "was trained"
                    return f"version {entry.version} of rank {rank} {what} in {life} with other bits"
        return ""

    def _life(self, life: str, tiers: Sequence[str] | None, kill_after: int | None) -> tuple[list[list[Entry]], bool]:
        """What each rank wrote, and whether all came to their end. ``kill_after``: so many entries of rank 0."""
        from benchmarks.lives.life import entries

        logs = [self._directory / f"{life}-{rank}.jsonl" for rank in range(self._ranks)]
        forked = multiprocessing.get_context("fork")
        given = self._name, self._settings, self._directory, life, tiers
        ranks = [forked.Process(target=train, args=(*given, rank, log)) for rank, log in enumerate(logs)]
        try:
            for each in ranks:
                each.start()
            until = time.monotonic() + LIFE_S_MAX
            while any(each.is_alive() for each in ranks) and time.monotonic() < until:
                if kill_after is not None and len(entries(logs[0])) >= kill_after:
                    time.sleep(self._drawn.random() * self._drawn.choice(LATER_S))
                    one = self._drawn.random() < ONE_KILLED
                    for each in [self._drawn.choice(ranks)] if one else ranks:
                        each.kill()
                    kill_after, until = None, min(until, time.monotonic() + LATE_S_MAX)
                time.sleep(POLL_S)
        finally:
            for each in ranks:
                if each.pid is not None:
                    each.kill()
                    each.join()
        return [entries(log) for log in logs], all(each.exitcode == 0 for each in ranks)

    def _error(self, life: str) -> str:
        texts = [path.read_text().strip() for path in sorted(self._directory.glob(f"{life}-*.error"))]
        return f"{life}: {texts[0].splitlines()[-1] if texts else 'it did not end in time'}"


def train(
    name: str, settings: Settings, directory: Path, life: str, tiers: Sequence[str] | None, rank: int, log: Path
) -> None:
    """One rank of one life, in a process of its own."""
    import torch

    from benchmarks.lives.life import Life
    from benchmarks.lives.loops import LOOPS, begin
    from tiercheck.config import CheckpointConfig
    from tiercheck.hierarchy import Hierarchy

    logging.getLogger("tiercheck").setLevel(logging.ERROR)
    try:
        torch.set_num_threads(1)
        loop = LOOPS[name]
        begin(rank, loop.ranks, str(directory / f"{life}.rendezvous"))
        hierarchy = None if tiers is None else Hierarchy.of(*tiers)
        config = CheckpointConfig(base_every=settings.base_every, bases=settings.bases, deadline_s=60.0)
        loop.run(Life(log, rank, settings.versions, hierarchy, config))
    except Exception:
        (directory / f"{life}-{rank}.error").write_text(traceback.format_exc())
        raise
