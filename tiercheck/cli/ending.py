"""How a command ends that failed: one line on stderr, an exit code, and with ``--json`` one object on stdout.

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
"""By exit code: the signal that ended the command."""

LEFT_BEHIND = {
    "copy": "what was copied stays; run the same command again to copy the rest",
    "prune": "what was to stay is still there; run the same command again to delete the rest",
    "rm": "some of it may be deleted; run the same command again to delete the rest",
    "export": "the target is as it was, or the whole new export",
}
"""By command, what an interruption leaves. The other commands change nothing."""


def end_with(error: Exception, words: Sequence[str]) -> NoReturn:
    """End the command after an error. ``words``: the arguments of the command line."""
    match error:
        case TierCheckError():
            kind, said = type(error).__name__, str(error)
        case OSError():
            where = f"{error.filename}: " if error.filename else ""
            kind, said = "OSError", f"{where}{error.strerror or error or type(error).__name__}"
        case MemoryError():
            kind, said = "MemoryError", "the command needs more memory than this machine has free"
        case _:
            kind = "Unexpected"
            said = f"this is a bug: {type(error).__name__}: {error} ('tiercheck --traceback COMMAND ...' shows where)"
    end(kind, said, words, 2 if isinstance(error, ConfigurationError) else 1, error)


def end_interrupted(code: int, words: Sequence[str]) -> NoReturn:
    """End the command after a signal. ``code``: a key of :data:`INTERRUPTED`."""
    left = next((f": {left}" for command, left in LEFT_BEHIND.items() if command in words), "")
    end("Interrupted", f"interrupted by {INTERRUPTED[code]}{left}", words, code)


def end(kind: str, message: str, words: Sequence[str], code: int, error: Exception | None = None) -> NoReturn:
    """Print the message, and exit with ``code``. ``kind``: what the JSON object calls the error."""
    message = " ".join(message.split())
    print(f"error: {message}", file=sys.stderr)
    if "--json" in words:
        where = {"tier": error.tier, "object": error.key} if isinstance(error, TierError) else {}
        with suppress(OSError):  # stdout may be what cannot be written
            print(json.dumps({"error": {"kind": kind, "message": message, **where}}), flush=True)
    sys.exit(code)
