"""How a command ends that was not carried out: one line on stderr, an exit code, and for scripts an object on stdout.

The exit code is 2 if the call or the set-up is wrong, 128 and the signal's number if a signal ended the command, and 1
otherwise.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from tiercheck.errors import ConfigurationError, TierCheckError, TierError

__all__ = ["INTERRUPTED", "end", "end_interrupted", "end_with"]

INTERRUPTED = {128 + each: each.name for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
"""The signals that end a command, by its exit code."""

LEFT_BEHIND = {
    "copy": "what was copied stays, and the same command goes on from there",
    "prune": "what was to stay is there, and the same command ends it",
    "rm": "some of it may be gone, and the same command ends it",
    "export": "the target is as it was",
}
"""What an interruption leaves, by command; others change nothing."""


def end_with(error: Exception, words: Sequence[str]) -> NoReturn:
    """``words``: of the command line."""
    match error:
        case TierCheckError():
            kind, said = type(error).__name__, str(error)
        case OSError():
            where = f"{error.filename}: " if error.filename else ""
            kind, said = "OSError", f"{where}{error.strerror or error or type(error).__name__}"
        case MemoryError():
            kind, said = "MemoryError", "this machine has not enough memory for it"
        case _:
            kind = "Unexpected"
            said = f"this should not happen: {type(error).__name__}: {error} ('tiercheck --traceback ...' shows where)"
    end(kind, said, words, 2 if isinstance(error, ConfigurationError) else 1, error)


def end_interrupted(code: int, words: Sequence[str]) -> NoReturn:
    left = next((f": {left}" for command, left in LEFT_BEHIND.items() if command in words), "")
    end("Interrupted", f"interrupted by {INTERRUPTED[code]}{left}", words, code)


def end(kind: str, message: str, words: Sequence[str], code: int, error: Exception | None = None) -> NoReturn:
    message = " ".join(message.split())
    print(f"error: {message}", file=sys.stderr)
    if "--json" in words:
        where = {"tier": error.tier, "object": error.key} if isinstance(error, TierError) else {}
        with suppress(OSError):  # stdout may be what cannot be written
            print(json.dumps({"error": {"kind": kind, "message": message, **where}}), flush=True)
    sys.exit(code)
