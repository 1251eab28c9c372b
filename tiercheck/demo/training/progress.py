"""What a rank tells of its run: one JSON object a line, in a file of its own.

A file is the one channel that says the same before and after ``kill -9``. A line counts once its newline is
written, so a line torn by the kill is no line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tiercheck.errors import TierCheckError

__all__ = ["ProgressError", "ProgressWriter", "RankProgress", "Step", "progress_path", "read_progress"]


class ProgressError(TierCheckError):
    """A rank's progress file holds something else than its progress."""


@dataclass(frozen=True)
class Step:
    """One finished iteration of one rank."""

    version: int
    loss: str
    """The rank's loss as a hexadecimal float, which keeps every bit."""
    seconds: float
    stall_s: float
    """Seconds that checkpointing has stalled this process so far."""
    captured: int = 0
    folded: int = 0
    """Bases so far."""

    @property
    def loss_value(self) -> float:
        return float.fromhex(self.loss)


@dataclass
class RankProgress:
    """What one rank's file holds; a part that is not written yet is empty."""

    started: Mapping[str, Any] = field(default_factory=dict)
    """``rank``, ``pid``, ``parameters``, ``corpus`` (a fingerprint), ``version`` to go on from."""
    recovered: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    """``version``, and ``digest`` of the whole state after it, if that was asked for."""
    steps: list[Step] = field(default_factory=list)
    finished: Mapping[str, Any] = field(default_factory=dict)
    """``digest`` of the final state by part, ``drain_s``: what closing the checkpointer took; ``captured`` and
    ``folded``: bases, those of the closing included."""
    failed: Mapping[str, Any] = field(default_factory=dict)
    """``error``: what ended the rank, in its own words."""

    @property
    def version(self) -> int:
        """The last version whose line is there; before any, the one the run went on from, or 0."""
        return self.steps[-1].version if self.steps else int(self.started.get("version", 0))

    @property
    def captured(self) -> int:
        """Bases that the rank has captured, as far as it came to tell. A run that had nothing left to train has one."""
        return int(self.finished.get("captured", self.steps[-1].captured if self.steps else 0))

    @property
    def folded(self) -> int:
        """Bases that were folded for it, as far as it came to tell."""
        return int(self.finished.get("folded", self.steps[-1].folded if self.steps else 0))


def progress_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


class ProgressWriter:
    """Appends lines; each is in the kernel's hands, where a killed process cannot lose it, before a call returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("x", encoding="utf-8")

    def write(self, record: str, **values: Any) -> None:
        self._file.write(json.dumps({"record": record, **values}) + "\n")
        self._file.flush()

    def step(
        self, version: int, loss: float, seconds: float, stall_s: float, *, captured: int = 0, folded: int = 0
    ) -> None:
        taken = {"seconds": seconds, "stall_s": stall_s, "captured": captured, "folded": folded}
        self.write("step", version=version, loss=loss.hex(), **taken)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def read_progress(path: Path) -> RankProgress:
    """The complete lines of a rank's file; a file that does not exist yet is an empty one.

    Raises:
        ProgressError: a complete line is no record.
    """
    progress = RankProgress()
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return progress
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        try:
            values = json.loads(line)
            record = values.pop("record")
            if record == "step":
                progress.steps.append(Step(**values))
            elif record in ("started", "recovered", "state", "finished", "failed"):
                setattr(progress, record, values)
            else:
                raise ValueError(f"unknown record {record!r}")
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ProgressError(f"line {number} of {path} is no progress record: {error!r}") from error
    return progress
