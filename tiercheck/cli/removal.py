"""``tiercheck prune`` and ``rm``: versions, generations and jobs, removed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn
from rich.text import Text

from tiercheck.cli.as_json import removal_object
from tiercheck.cli.checkpoints import (
    DEADLINE,
    DEADLINE_S,
    URLS_AND_VERSION,
    progress_bar,
    show_problems,
    with_version,
)
from tiercheck.cli.tiers import JSON, URLS, output, shown
from tiercheck.errors import ConfigurationError
from tiercheck.policy.recovery.spans import spans_text
from tiercheck.types import bytes_text

if TYPE_CHECKING:
    from tiercheck.archive.change.removal import Removal
    from tiercheck.archive.changeable import ChangeableArchive

__all__ = ["prune", "rm"]

YES = Annotated[bool, typer.Option("--yes", help="Do it. Without this nothing is removed.")]
UNASKED = Annotated[bool, typer.Option("--yes", help="Do it without asking.")]
BASES_NAMED_MAX = 12


def prune(
    urls: URLS,
    keep_last: Annotated[int, typer.Option(help="Keep the last n committed bases, and all that is newer.", min=0)] = 0,
    keep_every: Annotated[int, typer.Option(help="Keep each committed base of a multiple of this version.", min=0)] = 0,
    keep_versions: Annotated[str, typer.Option(help="Keep these versions, such as 8,120.", show_default=False)] = "",
    yes: YES = False,
    deadline_s: DEADLINE = DEADLINE_S,
    as_json: JSON = False,
) -> None:
    """Delete the versions that none of the options keeps. Without --yes it says what would go, and deletes nothing.

    The newest committed base and all that is newer stays in any case, so that a job may run meanwhile.
    """
    with opened_to_change(urls, deadline_s) as archive, progress_bar("pruning", BarColumn()) as update:
        removal = archive.prune(
            keep_last=keep_last,
            keep_every=keep_every,
            keep_versions=versions_of(keep_versions),
            dry_run=not yes,
            progress=update,
        )
    tell(removal, done=yes, as_json=as_json)


def rm(
    urls: URLS_AND_VERSION,
    version: Annotated[int | None, typer.Option(help="This base, and what leads nowhere without it.", min=0)] = None,
    generation: Annotated[int | None, typer.Option(help="A generation; with --version: whose base.", min=1)] = None,
    job: Annotated[bool, typer.Option("--job", help="All that TierCheck has in these tiers.")] = False,
    job_is_dead: Annotated[
        bool, typer.Option("--job-is-dead", help="No process of the job runs, nor will one need what goes.")
    ] = False,
    yes: UNASKED = False,
    deadline_s: DEADLINE = DEADLINE_S,
    as_json: JSON = False,
) -> None:
    """Delete a version, a generation or a job. It says what goes, and asks for the last part of the URL, or for --yes.

    What a job may go back to is refused, unless --job-is-dead says that none runs.
    """
    urls, version = with_version(urls, version)
    with opened_to_change(urls, deadline_s) as archive, progress_bar("removing", BarColumn()) as update:

        def removed(*, dry_run: bool) -> Removal:
            return archive.rm(
                version=version,
                generation=generation,
                job=job,
                job_is_dead=job_is_dead,
                dry_run=dry_run,
                progress=update,
            )

        done = yes
        if not yes and not as_json and is_asked():
            tell(removed(dry_run=True), done=False, as_json=False)
            name = shown(urls[0]).partition("?")[0].rstrip("/").rpartition("/")[2]
            done = typer.prompt(f"To delete this type {name}", default="", show_default=False) == name
            if not done:
                raise ConfigurationError("the name is another one: nothing is removed")
        removal = removed(dry_run=not done)
    tell(removal, done=done, as_json=as_json)


def is_asked() -> bool:
    """Whether somebody is there to answer."""
    return sys.stdin.isatty()


def opened_to_change(urls: Sequence[str], deadline_s: float) -> ChangeableArchive:
    from tiercheck.archive.changeable import open_to_change

    return open_to_change(*urls, deadline_s=deadline_s)


def versions_of(text: str) -> frozenset[int]:
    try:
        return frozenset(int(each) for each in text.split(",") if each.strip())
    except ValueError:
        raise ConfigurationError(f"--keep-versions takes numbers, such as 8,120, not {text!r}") from None


def tell(removal: Removal, *, done: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(removal_object(removal, done=done)))
        return
    console = output()
    for index, keys in removal.gone.items():
        tier = removal.inventory.tiers[index]
        nbytes = sum(tier.objects[key].nbytes for key in keys)
        if keys:
            console.print(Text(f"{tier.url}: {len(keys)} objects, {bytes_text(nbytes)}"))
    bases = [f"{version} of generation {generation}" for generation, version in removal.bases]
    if bases:
        more = f", and {len(bases) - BASES_NAMED_MAX} more" if len(bases) > BASES_NAMED_MAX else ""
        console.print(Text(f"bases: {', '.join(bases[:BASES_NAMED_MAX])}{more}"))
    did = "were removed" if done else "would go; nothing was removed: --yes does it"
    console.print(Text(f"{removal.objects} objects, {bytes_text(removal.nbytes)}, {did}", style="bold"))
    if removal.lost:
        cannot = "cannot" if done else "could not"
        console.print(Text(f"Versions that {cannot} be read any more: {spans_text(removal.lost)}", style="yellow"))
    console.print(Text(f"Versions that stay: {spans_text(removal.versions)}"))
    if removal.refused:
        console.print(Text("What stays although the options do not keep it:"))
        show_problems(console, [f"  {each}" for each in removal.refused])
