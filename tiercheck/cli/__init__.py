"""The ``tiercheck`` command. The extra ``cli`` brings what it needs; the library works without."""

from __future__ import annotations

import signal
import sys

from tiercheck.cli.ending import end_interrupted

__all__ = ["main"]


def main() -> None:
    """Run the command line. If the extra ``cli`` is not installed, one line says so, and the exit code is 2."""
    try:
        from tiercheck.cli.commands import run
    except KeyboardInterrupt:
        end_interrupted(128 + signal.SIGINT, sys.argv[1:])
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("rich", "typer"):
            raise
        print(f"error: the tiercheck command needs {missing}: pip install 'tiercheck[cli]'", file=sys.stderr)
        sys.exit(2)
    run()
