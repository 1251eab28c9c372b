"""The trainers of one run as processes: torchrun starts them, this watches and kills them.

Every wait has a deadline; trainers that die or stop making progress end the demo with the tail of their log.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tiercheck.demo.settings import TrainingSettings
from tiercheck.demo.training.progress import RankProgress, progress_path, read_progress
from tiercheck.errors import TierCheckError

__all__ = ["Deadlines", "Start", "TrainerFailure", "Trainers", "torchrun"]

Start = Callable[[int, Sequence[str], Path, Mapping[str, str]], psutil.Process]
"""Starts so many ranks with these arguments of the trainer, their output in this log, and these variables more. Returns
the process that they are children of, which ends after them and fails when one of them does."""

POLL_S = 0.02
TAIL_LINES = 40  # the half of it is what the torchrun agent says of any failure


class TrainerFailure(TierCheckError):
    """The trainers died by themselves, or stopped making progress; the message holds the tail of their log."""


@dataclass(frozen=True)
class Deadlines:
    """The longest that trainers may take, in seconds, without anything new in their progress files."""

    start_s: float = 240.0
    step_s: float = 120.0
    finish_s: float = 180.0
    kill_s: float = 30.0


class Trainers:
    """The trainer processes under one agent, torchrun's if nothing else is said. Leaving the context kills those
    that still live."""

    def __init__(
        self,
        settings: TrainingSettings,
        folder: Path,
        *,
        deadlines: Deadlines | None = None,
        start: Start | None = None,
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.deadlines = deadlines or Deadlines()
        self.log = folder / "trainers.log"
        self._start = start or torchrun
        self._code: int | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        settings_file = self.folder / "settings.json"
        self.settings.save(settings_file)
        arguments = [f"--settings={settings_file}", f"--progress={self.folder}"]
        before = set(psutil.Process().children())
        try:
            self._agent = self._start(
                self.settings.ranks, arguments, self.log, trainer_environment(self.settings.device, self.folder)
            )
        except BaseException:  # a signal that ends the demo may come when the process is there and nobody knows it yet
            for process in set(psutil.Process().children()) - before:
                process.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def progress(self) -> list[RankProgress]:
        return [read_progress(progress_path(self.folder, rank)) for rank in range(self.settings.ranks)]

    def watch(
        self,
        until: Callable[[Sequence[RankProgress]], bool],
        tell: Callable[[Sequence[RankProgress]], None],
    ) -> Sequence[RankProgress]:
        """Wait until ``until`` holds of the ranks' progress, which ``tell`` is given whenever it grows.

        The files are polled: they are tiny, and nothing else of the trainers is there after ``kill -9``.

        Raises:
            TrainerFailure: the trainers ended before, or were silent past their deadline.
        """
        seen = (-1, -1)
        heard = time.monotonic()
        while True:
            ended = self._ended_within(POLL_S)
            ranks = self.progress()
            sizes = (sum(stage(rank) for rank in ranks), sum(len(rank.steps) for rank in ranks))
            if sizes != seen:
                seen, heard = sizes, time.monotonic()
                tell(ranks)
            if until(ranks):
                return ranks
            if ended:
                raise self._failure(f"the trainers ended with exit code {self._code}")
            if time.monotonic() - heard > (limit := self._patience(ranks)):
                slowest = min(range(len(ranks)), key=lambda rank: (stage(ranks[rank]), ranks[rank].version))
                raise self._failure(
                    f"rank {slowest}, last seen at version {ranks[slowest].version}, made no progress for {limit:.0f} s"
                )

    def run_on(self, seconds: float) -> None:
        """Let the trainers run for so long. Errors: ``TrainerFailure`` if they end by themselves meanwhile."""
        if self._ended_within(seconds):
            raise self._failure(f"the trainers ended with exit code {self._code}")

    def wait_for_exit(self) -> None:
        """Wait for the trainers that have finished. Errors: ``TrainerFailure`` for a bad end, or none in time."""
        if not self._ended_within(self.deadlines.finish_s):
            raise self._failure(f"the trainers did not end within {self.deadlines.finish_s:.0f} s of their last step")
        if self._code != 0:
            raise self._failure(f"the trainers ended with exit code {self._code}")

    def kill(self) -> None:
        """``kill -9`` the agent and all its descendants, and wait until they are gone; idempotent.

        Raises:
            TrainerFailure: a process is still there when the deadline ends.
        """
        # The workers have sessions of their own, so the agent's process group would not reach them.
        processes = [self._agent]
        try:
            processes += self._agent.children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._agent.wait(self.deadlines.kill_s)
        deadline = time.monotonic() + self.deadlines.kill_s
        while alive := [process for process in processes[1:] if not gone(process)]:
            if time.monotonic() > deadline:
                pids = ", ".join(str(process.pid) for process in alive)
                raise TrainerFailure(f"the processes {pids} outlived kill -9 by {self.deadlines.kill_s:.0f} s")
            time.sleep(POLL_S)  # they are no children of this process: there is nothing to wait on

    def _ended_within(self, seconds: float) -> bool:
        try:
            self._code = self._agent.wait(seconds)
        except psutil.TimeoutExpired:
            return False
        return True

    def _patience(self, ranks: Sequence[RankProgress]) -> float:
        if any(not rank.steps for rank in ranks):
            return self.deadlines.start_s
        if all(rank.version >= self.settings.steps for rank in ranks):
            return self.deadlines.finish_s
        return self.deadlines.step_s

    def _failure(self, what: str) -> TrainerFailure:
        self.kill()
        reasons = [f"rank {rank}: {told.failed['error']}" for rank, told in enumerate(self.progress()) if told.failed]
        if reasons:
            return TrainerFailure(f"{what}: {'; '.join(reasons)}; the whole log is {self.log}")
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:])
        return TrainerFailure(f"{what}; the end of {self.log}:\n{tail}")


def torchrun(ranks: int, arguments: Sequence[str], log: Path, variables: Mapping[str, str]) -> psutil.Process:
    """Ranks as a user would start them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--max-restarts=0", "-m", "tiercheck.demo.training.trainer", *arguments]
    with log.open("wb") as output:
        return psutil.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,  # a Ctrl-C is for the parent, which then kills them
        )


def stage(rank: RankProgress) -> int:
    return bool(rank.started) + bool(rank.recovered) + bool(rank.finished)


def gone(process: psutil.Process) -> bool:
    """Whether it runs no more. A zombie holds no memory, lock or file; whether it is reaped is up to others."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def trainer_environment(device: str, folder: Path) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": device,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else its results differ from run to run
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a rank that aborts in native code says where it was
        # A build lock that some killed DeepSpeed job left in the shared cache must not hold these up.
        "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),
    }
