"""Where a demo keeps its things: an output folder, and the memory of its nodes."""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tiercheck.demo.nodes import Nodes, remove_orphans
from tiercheck.demo.settings import RANKS
from tiercheck.errors import ConfigurationError

__all__ = ["Workspace"]

log = logging.getLogger(__name__)

MARKER = ".tiercheck-demo"


class Workspace:
    """The output folder and the nodes of one demo; leaving the context wipes their memory and the durable tier."""

    def __init__(self, output: Path, *, keep: bool, ranks: Sequence[int] = (RANKS,)) -> None:
        self.output = output.absolute()
        self.keep = keep
        self.nodes = Nodes(ranks)
        self._marker: IO[str]
        """Locked while the demo runs."""

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

    def write_report(self, values: dict[str, Any]) -> None:
        self.report.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> Self:
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            if any(self.output.iterdir()) and not (self.output / MARKER).exists():
                raise ConfigurationError(
                    f"{self.output} is not empty and no earlier demo's output; choose another folder with --output"
                )
            self._hold()
            for folder in (self.uninterrupted, self.interrupted, self.durable):
                if folder.exists():
                    shutil.rmtree(folder)
            for file in (self.plot, self.report):
                file.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigurationError(f"cannot write the demo's output to {self.output}: {error.strerror}") from error
        remove_orphans()
        return self

    def _hold(self) -> None:
        """Errors: ``ConfigurationError`` if another demo has its things there."""
        self._marker = (self.output / MARKER).open("a", encoding="utf-8")
        try:
            fcntl.flock(self._marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._marker.close()
            raise ConfigurationError(
                f"another demo runs in {self.output}; choose another folder with --output"
            ) from None
        except OSError as error:  # a file system without locks
            log.debug("%s is not locked: %s", self.output, error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.nodes.close()
        if not self.keep and self.durable.exists():
            shutil.rmtree(self.durable)
        self._marker.close()
