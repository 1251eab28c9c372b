"""``tiercheck ls``, ``show``, ``verify``, ``plan`` and ``export``: what jobs have left in their tiers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from tiercheck.cli.as_json import contents_object, exported_object, listing_object, plan_object, verified_object
from tiercheck.cli.tiers import JSON, URLS, output, plain_table
from tiercheck.errors import RecoveryError
from tiercheck.keys import Stream
from tiercheck.policy.recovery.spans import spans_text
from tiercheck.types import bytes_text, shown

if TYPE_CHECKING:
    from tiercheck.archive.archive import Archive
    from tiercheck.archive.contents import Contents
    from tiercheck.archive.inventory import Generation, Held, Recoverable, Stored
    from tiercheck.archive.verify import Verified
    from tiercheck.recovery.duration import Duration

__all__ = [
    "DEADLINE",
    "GENERATION",
    "URLS_AND_VERSION",
    "VERSION",
    "export",
    "ls",
    "one_version",
    "opened",
    "plan",
    "show",
    "verify",
    "with_version",
]

VERSION = Annotated[int | None, typer.Option(help="The version; by default the newest that can be read.", min=0)]
URLS_AND_VERSION = Annotated[
    list[str], typer.Argument(help="Tier URLs, then optionally a version.", metavar="URL... [VERSION]")
]
GENERATION = Annotated[int | None, typer.Option(help="As of this generation, whatever came later.", min=1)]
DEADLINE = Annotated[float, typer.Option(help="Seconds that a tier may keep silent.", min=0.001, max=1e9)]
DEADLINE_S = 60.0
RANKS_NAMED_MAX = 8
RANKS_SHOWN_MAX = 24


def ls(urls: URLS, deadline_s: DEADLINE = DEADLINE_S, as_json: JSON = False) -> None:
    """List what lies in tiers: the generations of a job, what each has captured, and which versions can be read.

    Several tiers are one view: a version can be read if each rank's part of it lies in some tier. A tier that cannot be
    opened is told of, and the others are listed.
    """
    with opened(urls, deadline_s) as archive:
        if as_json:
            typer.echo(json.dumps(listing_object(archive.inventory)))
            return
        show_listing(output(), archive)


def plan(
    urls: URLS_AND_VERSION,
    version: VERSION = None,
    generation: GENERATION = None,
    deadline_s: DEADLINE = DEADLINE_S,
    measured: Annotated[
        bool, typer.Option("--time/--no-time", help="Measure how long it would take: parts of its objects are read.")
    ] = True,
    as_json: JSON = False,
) -> None:
    """Say what a recovery would reach now, from which tiers, how many bytes it would read, and how long that takes.

    The time is a range: from all ranks reading at the rate that this machine measured, to all of them sharing it.
    """
    urls, version = with_version(urls, version)
    with opened(urls, deadline_s) as archive:
        chosen = archive.plan(version, generation=generation)
        expected = archive.duration(chosen) if measured else None
        if as_json:
            time_object = None if expected is None else expected.to_object()
            typer.echo(json.dumps({**plan_object(archive.inventory, chosen), "time": time_object}))
            return
        show_plan(output(), archive, chosen)
        if expected is not None:
            show_duration(output(), expected)


def show(
    urls: URLS_AND_VERSION,
    version: VERSION = None,
    generation: GENERATION = None,
    rank: Annotated[int, typer.Option(help="Whose part is shown.", min=0)] = 0,
    deadline_s: DEADLINE = DEADLINE_S,
    as_json: JSON = False,
) -> None:
    """Show what a version holds: tensors, host state, lineage, and who wrote it with what. No tensor is read."""
    urls, version = with_version(urls, version)
    with opened(urls, deadline_s) as archive:
        contents = archive.show(version, rank=rank, generation=generation)
        if as_json:
            typer.echo(json.dumps(contents_object(archive.inventory, contents)))
            return
        show_contents(output(), archive, contents)


def verify(urls: URLS, deadline_s: DEADLINE = DEADLINE_S, as_json: JSON = False) -> None:
    """Read every byte in all tiers, compare it with its checksum, and say what would be lost.

    Exits with 1 if a version that the tiers list cannot be read any more, if a tier cannot be read, or if no job has an
    object there. Damage of which another tier holds a whole copy is told, and loses nothing.
    """
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with opened(urls, deadline_s) as archive:
        tiers = archive.inventory.tiers
        if not any(tier.objects or tier.away for tier in tiers):
            places = ", ".join(tier.url for tier in tiers)
            raise RecoveryError(f"there is nothing to verify: no job has an object in {places}; check the URL")
        with progress_bar("verifying", *columns) as update:
            found = archive.verify(update)
        if as_json:
            typer.echo(json.dumps(verified_object(found)))
        else:
            show_verified(output(), archive, found)
    if not found.healthy:
        raise typer.Exit(1)


def export(
    urls: URLS_AND_VERSION,
    to: Annotated[Path, typer.Option(help="A new file, or a new directory for huggingface, dcp and deepspeed.")],
    format: Annotated[
        str, typer.Option("--format", help="safetensors, torch, huggingface, dcp or deepspeed.", show_default=True)
    ] = "safetensors",
    version: VERSION = None,
    generation: GENERATION = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32, bf16, fp16, or model: as the model had them. By default as the optimizer held them."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    deadline_s: DEADLINE = DEADLINE_S,
    as_json: JSON = False,
) -> None:
    """Write the model of a version, whole and under its own names: any number of ranks, ZeRO stages and differentials.

    The target gets its name when it is whole. Differentials are replayed bit for bit; what is printed says how true the
    result is.
    """
    urls, version = with_version(urls, version)
    with opened(urls, deadline_s) as archive:
        with progress_bar("exporting", BarColumn(), TimeRemainingColumn()) as update:
            made = archive.export(
                to, format, version, generation=generation, dtype=dtype, overwrite=overwrite, progress=update
            )
        if as_json:
            typer.echo(json.dumps(exported_object(made)))
            return
        console = output()
        size = bytes_text(made.nbytes)
        console.print(Text(f"{made.path}: version {made.version}, {made.fidelity}, {made.tensors} tensors, {size}"))
        if made.aliases and format in ("safetensors", "huggingface"):
            tied = ", ".join(f"{alias} (it is {name})" for alias, name in made.aliases.items())
            console.print(Text(f"Tied weights are written once; left out: {tied}"))
        show_problems(console, made.notes)


@contextmanager
def progress_bar(what: str, *columns: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    """On a terminal, a bar on stderr; it is told how much is done, and of how much."""
    console = Console(stderr=True)
    with Progress(TextColumn(what), *columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def with_version(words: list[str], version: int | None) -> tuple[list[str], int | None]:
    """The URLs, and the version that was given after them or by option."""
    *urls, last = words
    if not last.isascii() or not last.isdigit():
        return words, version
    if not urls:
        raise typer.BadParameter(f"version {last} of what? Name a tier before it")
    return urls, one_version(int(last), version)


def one_version(given: int | None, by_option: int | None) -> int | None:
    """What was given as a word, or by ``--version``."""
    if None not in (given, by_option):
        raise typer.BadParameter(f"the version is given twice: {given}, and {by_option} by --version")
    return by_option if given is None else given


def opened(urls: Sequence[str], deadline_s: float) -> Archive:
    from tiercheck.archive.archive import open as open_archive

    return open_archive(*urls, deadline_s=deadline_s)


# For people


def show_listing(console: Console, archive: Archive) -> None:
    table = plain_table("tier", "where", "survives", "objects", "bytes")
    for tier in archive.inventory.tiers:
        survives = tier.role.survives.name.lower()
        if tier.away is not None:
            table.add_row(tier.name, tier.url, survives, "?", "?")
        else:
            table.add_row(tier.name, tier.url, survives, f"{len(tier.objects)}", bytes_text(tier.nbytes))
    console.print(table)
    for generation in archive.generations:
        console.print(Text(generation_text(generation), style="bold"))
        console.print(stored_table(generation, time.time()))
    console.print(Text(f"Versions that can be read: {spans_text(archive.versions)}"))
    show_problems(console, archive.problems)


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def generation_text(generation: Generation) -> str:
    said = f"generation {generation.number}"
    branch = generation.branch
    if branch is None:
        return f"{said}: its record is missing or damaged, so that nobody knows what it belongs to"
    begun = f"from version {branch.left_at} of generation {branch.parent}" if branch.parent else "from the beginning"
    said += f", {counted(branch.world_size, 'rank')}, {begun}"
    notes = [f"approximate: {said}" for said in branch.made]
    notes += [] if generation.counts else ["no part of the newest generation's past"]
    if generation.until is not None:
        notes.append(f"counts up to version {generation.until}")
    if generation.kept_to is not None:
        to = f"version={generation.kept_to}, generation={generation.number}"
        notes.append(f"what was left behind is kept: attach(..., {to}) returns to it")
    return f"{said} ({'; '.join(notes)})" if notes else said


def stored_table(generation: Generation, now_s: float) -> Table:
    table = plain_table("what", "version", "tier", "ranks", "bytes", "age", "")
    world_size = generation.branch.world_size if generation.branch else None
    for stored in generation.stored:
        for index, held in enumerate(stored.held):
            what = (str(stored.stream), version_text(stored)) if not index else ("", "")
            age = "" if held.written_s is None else age_text(now_s - held.written_s)
            table.add_row(
                *what,
                held.tier,
                ranks_text(held, world_size),
                bytes_text(held.nbytes),
                age,
                "committed" if held.committed else versions_note(stored, held),
            )
    return table


def version_text(stored: Stored) -> str:
    if stored.stream == "snapshot":
        return f"{stored.last} (from base {stored.first - 1})"
    return str(stored.first) if stored.first == stored.last else f"{stored.first}..{stored.last}"


def versions_note(stored: Stored, held: Held) -> str:
    whole = ((stored.first, stored.last),)
    return "" if stored.stream != "differential" or held.versions == whole else f"{spans_text(held.versions)} whole"


def ranks_text(held: Held, world_size: int | None) -> str:
    if world_size is None:
        return str(len(held.ranks))
    missing = sorted(set(range(world_size)) - set(held.ranks))
    if not missing:
        return f"{world_size} of {world_size}"
    names = ", ".join(map(str, missing[:RANKS_NAMED_MAX])) + (", ..." if len(missing) > RANKS_NAMED_MAX else "")
    return f"{world_size - len(missing)} of {world_size} (not {names})"


def show_plan(console: Console, archive: Archive, chosen: Recoverable) -> None:
    inventory = archive.inventory
    table = plain_table("rank", "what", "version", "tier", "objects", "bytes")
    sizes = [inventory.nbytes(source) for plan in chosen.plans for source in plan.sources]
    for rank, plan in enumerate(chosen.plans[:RANKS_SHOWN_MAX]):
        told = str(rank)
        for (stream, tier), group in groupby(plan.sources, key=lambda source: (source.key.stream, source.tier)):
            sources = list(group)
            first, last = sources[0].key.first, sources[-1].key.last
            versions = str(last) if stream is not Stream.DIFFERENTIAL or first == last else f"{first}..{last}"
            nbytes = sum(map(inventory.nbytes, sources))
            table.add_row(told, stream, versions, inventory.tiers[tier].name, str(len(sources)), bytes_text(nbytes))
            told = ""
    console.print(Text(f"Version {chosen.version}, of {counted(chosen.world_size, 'rank')}", style="bold"))
    console.print(table)
    if chosen.world_size > RANKS_SHOWN_MAX:
        console.print(Text(f"  and {chosen.world_size - RANKS_SHOWN_MAX} ranks more (--json lists every object)"))
    console.print(Text(f"{bytes_text(sum(sizes))} in {counted(len(sizes), 'object')}"))
    show_problems(console, archive.problems)


def show_duration(console: Console, expected: Duration) -> None:
    if expected.seconds is None:
        console.print(Text(f"How long it takes is not known: {'; '.join(expected.unknown)}", style="yellow"))
    else:
        said = str(expected)
        range_of = "from each rank reading at the rate measured here to all of them sharing it"
        console.print(Text(f"{said[:1].upper()}{said[1:]}, {range_of}"))
    for each in expected.tiers:
        if each.bytes_per_s is not None:
            slow, fast = each.bytes_per_s
            said = f"{bytes_text(int(slow))}/s to {bytes_text(int(fast))}/s"
            console.print(Text(f"  {each.tier}: {said}, measured on {bytes_text(each.probed_nbytes)} of it"))
    if expected.replay is not None and expected.replay.elements_per_s is not None:
        slow, fast = expected.replay.elements_per_s
        how = "by a kernel" if expected.replay.kernel else "by calling the optimizer"
        console.print(Text(f"  replay {how}: {slow:,.0f} to {fast:,.0f} elements a second"))


def show_contents(console: Console, archive: Archive, contents: Contents) -> None:
    identity, point = contents.identity, contents.point
    others = "; each stores its part, and --rank shows another one's" if contents.world_size > 1 else ""
    title = f"Version {contents.version}, rank {contents.rank} of {contents.world_size}"
    console.print(Text(title, style="bold") + Text(others))
    facts = plain_table("", "")
    facts.show_header = False
    way = f"base {point.anchor} of generation {point.generation}"
    if point.by_snapshot:
        way += ", and a snapshot of what changed since"
    elif point.replayed:
        way += f", and {point.replayed} differentials"
    facts.add_row("is", way)
    chain = archive.inventory.lineage(point.generation).chain
    facts.add_row("lineage", " < ".join(str(each) if last is None else f"{each} to {last}" for each, last in chain))
    for made in archive.inventory.made_before(point.generation):
        facts.add_row("approximate", made)
    optimizer = identity.optimizer
    facts.add_row("framework", identity.framework)
    facts.add_row("model", f"{identity.model_summary} ({identity.model})")
    facts.add_row("optimizer", f"{optimizer.kind} ({optimizer.implementation}) {optimizer.library}".rstrip())
    facts.add_row("wrote it", f"torch {optimizer.torch_version} on {optimizer.device}, {optimizer.instruction_set}")
    for index, group in enumerate(contents.hyperparameters):
        facts.add_row(f"group {index}", ", ".join(f"{name}={shown(each)}" for name, each in group.items()))
    console.print(facts)
    table = plain_table("tensor", "dtype", "shape", "bytes")
    table.columns[0].overflow = "fold"
    for spec in contents.tensors:
        table.add_row(spec.name, spec.dtype, str(list(spec.shape)), bytes_text(spec.nbytes))
    console.print(table)
    table = plain_table("host state", "")
    for name, value in contents.host_state.items():
        table.add_row(name, shown(value))
    console.print(table)


def show_verified(console: Console, archive: Archive, found: Verified) -> None:
    for damaged in found.damaged:
        what = "could not be read" if damaged.unread else "is damaged"
        console.print(Text(f"{damaged.key} in {damaged.tier} {what}: {damaged.reason}", style="red"))
    if found.gone:
        console.print(Text(f"{found.gone} objects were deleted meanwhile", style="yellow"))
    console.print(Text(f"{found.objects} objects, {bytes_text(found.nbytes)}: {len(found.damaged)} damaged"))
    if found.lost:
        newest = "none" if found.newest is None else str(found.newest)
        lost = f"lost: version {spans_text(found.lost)}; the newest that can be read is {newest}"
        console.print(Text(lost, style="red"))
    elif found.newest is None and found.objects:
        console.print(Text("no version can be read", style="red"))
    elif found.damaged:
        console.print(Text("nothing is lost: every version can be read without what is damaged", style="yellow"))
    show_problems(console, archive.problems)


def show_problems(console: Console, problems: Iterable[str]) -> None:
    for problem in problems:
        console.print(Text(problem, style="yellow"))


def age_text(seconds: float) -> str:
    """``90`` to ``1 min``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"
