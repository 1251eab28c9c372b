"""``tiercheck gc``: what dead processes have left."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.text import Text

from tiercheck.archive.change.leftovers import FoundLeftover, collect
from tiercheck.cli.as_json import leftovers_object
from tiercheck.cli.checkpoints import DEADLINE, DEADLINE_S, age_text
from tiercheck.cli.tiers import JSON, output, plain_table
from tiercheck.types import bytes_text

__all__ = ["gc"]


def gc(
    urls: Annotated[
        list[str] | None, typer.Argument(help="Tier URLs; none: this node's shared memory.", show_default=False)
    ] = None,
    older_than_h: Annotated[float, typer.Option(help="Shared memory that changed in these hours stays.", min=0)] = 24.0,
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without this nothing is removed.")] = False,
    deadline_s: DEADLINE = DEADLINE_S,
    as_json: JSON = False,
) -> None:
    """Remove what dead processes have left: temporary files, unfinished uploads, and shared memory that nobody holds.

    Without --yes it says what would go. What a live process holds is never touched. The shared memory of a job that has
    failed may be what it comes back for: it stays for --older-than-h.
    """
    found = collect(*(urls or ()), older_than_s=older_than_h * 3600, dry_run=not yes, deadline_s=deadline_s)
    if as_json:
        typer.echo(json.dumps(leftovers_object(found, done=yes)))
        return
    console = output()
    table = plain_table("where", "what", "name", "bytes", "unchanged for", "")
    for column in table.columns[:3]:
        column.overflow = "fold"  # a name that is cut is no name
    for each in found:
        left = each.left
        nbytes = "?" if left.nbytes is None else bytes_text(left.nbytes)
        table.add_row(each.where, left.what, left.name, nbytes, age_text(left.age_s), outcome(each, done=yes))
    if found:
        console.print(table)
    going = [each for each in found if each.stays is None]
    nbytes = bytes_text(sum(each.left.nbytes or 0 for each in going if each.removed or not yes))
    count = sum(each.removed for each in going) if yes else len(going)
    said = f"{count} removed, {nbytes}" if yes else f"{count} would go, {nbytes}; nothing was removed: --yes does it"
    console.print(Text(said, style="bold"))


def outcome(found: FoundLeftover, *, done: bool) -> str:
    if found.stays is not None:
        return f"stays: {found.stays}"
    if not done:
        return "would go"
    return "removed" if found.removed else "still there: its writer is back, or another machine holds it"
