"""What was lost, or was never allowed to be seen: one JSON object a line, in a file that outlives who wrote it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["Losses"]


class Losses:
    """Appended to by every process of a soak; a line is written in one call, so that lines never mix."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        os.close(self._fd)

    def report(self, what: str, key: str | None, text: str) -> None:
        """``what`` is the rule that was broken, in a few words."""
        line = json.dumps({"lost": what, "key": key, "text": text, "process": os.getpid()})
        os.write(self._fd, f"{line}\n".encode())

    def read(self) -> list[dict[str, Any]]:
        """All lines so far."""
        return [json.loads(line) for line in self._path.read_text().splitlines()]
