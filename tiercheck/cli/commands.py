"""What the ``tiercheck`` command can do."""

from __future__ import annotations

import signal
import sys
import warnings
from types import FrameType
from typing import Annotated, Any

import typer

from tiercheck.cli.agent import agent, keys
from tiercheck.cli.checkpoints import export, ls, plan, show, verify
from tiercheck.cli.copy import copy
from tiercheck.cli.demo import demo
from tiercheck.cli.diff import diff
from tiercheck.cli.ending import INTERRUPTED, end, end_interrupted, end_with
from tiercheck.cli.gc import gc
from tiercheck.cli.removal import prune, rm
from tiercheck.cli.tiers import bench, doctor, plugins

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
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
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
    """Run the command line: an error is one line on stderr (:mod:`tiercheck.cli.ending`), and no traceback."""
    # A polite kill, or a terminal that is closed, must clean up like Ctrl-C does. What nohup has shut out stays out.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end_politely)
    # A call of which nothing had begun when the command was interrupted.
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
    words = sys.argv[1:]
    try:
        code = app(prog_name="tiercheck", standalone_mode=False) or 0
        sys.stdout.flush()  # else a full disk is found only when the interpreter ends
    except UsageError as error:
        if not (said := error.format_message().rstrip(".")):  # without any argument the help was printed
            sys.exit(2)
        command = error.ctx.command_path if error.ctx else "tiercheck"
        end("Usage", f"{said} (see: {command} --help)", words, 2)
    except typer.Abort:
        end("Unanswered", "nobody answered: nothing was done", words, 1)
    except Exception as error:
        if "--traceback" in words:
            raise
        end_with(error, words)
    except SystemExit as ended:
        if ended.code in INTERRUPTED:
            end_interrupted(ended.code, words)
        raise
    if code in INTERRUPTED:
        end_interrupted(code, words)
    sys.exit(code)


def end_politely(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
