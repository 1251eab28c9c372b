"""What the ``tiercheck`` command can do."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Annotated, Any

import typer

from tiercheck.cli.agent import agent, keys
from tiercheck.cli.checkpoints import export, ls, plan, show, verify
from tiercheck.cli.copy import copy
from tiercheck.cli.demo import demo
from tiercheck.cli.diff import diff
from tiercheck.cli.gc import gc
from tiercheck.cli.removal import prune, rm
from tiercheck.cli.tiers import bench, doctor, plugins
from tiercheck.errors import ConfigurationError, TierCheckError

__all__ = ["app", "run"]

UsageError: Any = typer.BadParameter.__mro__[1]
"""Of the click that typer uses: its own, or the installed one."""

app = typer.Typer(
    name="tiercheck",
    help="Storage tiers for LLM training checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=lambda asked: show_version(asked))
    ] = False,
) -> None:
    """Storage tiers for LLM training checkpoints."""


def show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"tiercheck {version('tiercheck')}")
        raise typer.Exit


for command in (demo, agent, keys, plugins, doctor, bench, ls, show, diff, verify, plan, export, copy, prune, rm, gc):
    app.command()(command)


def run() -> None:
    """Run the command line: an expected error is one line on stderr, exit code 1 (2: wrong usage), no traceback."""
    # A polite kill, or a terminal that is closed, must clean up like Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_politely)
    try:
        sys.exit(app(prog_name="tiercheck", standalone_mode=False) or 0)
    except UsageError as error:
        if said := error.format_message().rstrip("."):  # without any argument the help was printed
            command = error.ctx.command_path if error.ctx else "tiercheck"
            print(f"error: {said} (see: {command} --help)", file=sys.stderr)
        sys.exit(2)
    except typer.Abort:
        print("error: nobody answered: nothing was done", file=sys.stderr)
        sys.exit(1)
    except TierCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)


def end_politely(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
