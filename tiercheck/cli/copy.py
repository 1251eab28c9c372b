"""``tiercheck copy``: what a job has left, brought to another tier."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from tiercheck.cli.as_json import copied_object
from tiercheck.cli.checkpoints import (
    DEADLINE,
    DEADLINE_S,
    GENERATION,
    VERSION,
    one_version,
    opened,
    progress_bar,
    show_problems,
)
from tiercheck.cli.tiers import JSON, output
from tiercheck.policy.recovery.spans import spans_text
from tiercheck.types import bytes_text

if TYPE_CHECKING:
    from tiercheck.archive.change.copying import Copied

__all__ = ["copy"]


def copy(
    source: Annotated[str, typer.Argument(help="The tier that is read.", show_default=False)],
    target: Annotated[str, typer.Argument(help="The tier that is written to.", show_default=False)],
    number: Annotated[
        int | None, typer.Argument(help="The version; --version says the same.", metavar="[VERSION]", min=0)
    ] = None,
    version: VERSION = None,
    generation: GENERATION = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything that is there, not one version.")] = False,
    tier: Annotated[
        list[str] | None, typer.Option(help="One more tier to read from; repeat for several.", show_default=False)
    ] = None,
    deadline_s: DEADLINE = DEADLINE_S,
    as_json: JSON = False,
) -> None:
    """Copy a version, or everything that a job has left, to another tier, from where a job can go on.

    Every object is verified as it is read. What is there already is not sent again: after an interruption give the same
    command. Exits with 1 if something is damaged and was left out.
    """
    version = one_version(number, version)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with opened([source, *(tier or ())], deadline_s) as archive, progress_bar("copying", *columns) as update:
        found = archive.copy(target, version, generation=generation, everything=everything, progress=update)
    if as_json:
        typer.echo(json.dumps(copied_object(found)))
    else:
        show_copied(output(), found)
    if found.damaged:
        raise typer.Exit(1)


def show_copied(console: Console, found: Copied) -> None:
    what = "everything" if found.version is None else f"version {found.version}"
    copied = f"{found.objects} objects, {bytes_text(found.nbytes)}"
    console.print(Text(f"{found.url}: {what}: {copied}; {found.present} were there already"))
    if found.gone:
        console.print(Text(f"{found.gone} objects were deleted meanwhile", style="yellow"))
    console.print(Text(f"Versions that can be read there: {spans_text(found.versions)}"))
    show_problems(console, found.damaged)
