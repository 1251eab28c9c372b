"""``tiercheck plugins``, ``doctor`` and ``bench``: what tiers there are, and whether they are healthy."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiercheck.config import CheckpointConfig
from tiercheck.diagnostics.costs import costs_of
from tiercheck.diagnostics.doctor import Diagnosis, InstalledDriver, examine, installed_drivers
from tiercheck.diagnostics.fit import JobSize, fit, why_captured
from tiercheck.diagnostics.gpu import GpuDiagnosis, examine_gpu
from tiercheck.diagnostics.measure import BUDGET_S, CONCURRENCY, REPEATS, SIZES, Point, curves
from tiercheck.errors import ConfigurationError
from tiercheck.opening.room import rooms_text
from tiercheck.replication.named_policies import installed_policies
from tiercheck.tiers.registry import TierURL, parse_size
from tiercheck.types import Capabilities, bytes_text

__all__ = ["bench", "doctor", "output", "plugins"]

PIPED_COLUMNS = 500

JSON = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]
URLS = Annotated[list[str], typer.Argument(help="Tier URLs, such as shm://run or s3://bucket/run.", show_default=False)]


def plugins(as_json: JSON = False) -> None:
    """List the drivers and policies that are installed, what each can do, and what those that cannot be loaded lack."""
    drivers, policies = installed_drivers(), installed_policies()
    if as_json:
        found = {"drivers": [each.to_object() for each in drivers], "policies": [asdict(each) for each in policies]}
        typer.echo(json.dumps(found))
        return
    table = plain_table("scheme", "from", "survives", "can", "what it is")
    for driver in drivers:
        table.add_row(*driver_row(driver))
    console = output()
    console.print(table)
    for driver in drivers:
        if driver.missing:
            console.print(Text(f"{driver.scheme}:// {driver.missing}", style="red"))
    table = plain_table("policy", "from", "kind", "what it says")
    for policy in policies:
        table.add_row(policy.name, policy.distribution, policy.kind or "cannot be loaded", policy.summary)
    console.print(table)


def driver_row(driver: InstalledDriver) -> tuple[str, ...]:
    origin = f"{driver.distribution} {driver.version}"
    if driver.missing:
        return driver.scheme, origin, "", "cannot be loaded", ""
    capabilities = driver.capabilities
    survives = "as the URL says" if capabilities is None else capabilities.survives.name.lower()
    return driver.scheme, origin, survives, abilities(capabilities), driver.summary


def abilities(capabilities: Capabilities | None) -> str:
    if capabilities is None:
        return "as the store says"
    flags = {
        "mapped": capabilities.mappable,
        "conditional puts": capabilities.conditional_put,
        "ranges": capabilities.ranged_get,
    }
    return ", ".join(name for name, can in flags.items() if can) or "put, get, list"


def doctor(
    urls: Annotated[
        list[str] | None,
        typer.Argument(help="Tier URLs, such as shm://run or s3://bucket/run; without any: the GPU alone."),
    ] = None,
    measure_s: Annotated[float, typer.Option(help="Seconds spent on measuring each; 0: none.", min=0)] = 5.0,
    parameters: Annotated[
        float, typer.Option(help="Say what each tier will hold of a job: a rank's.", min=0, max=1e15)
    ] = 0,
    ranks: Annotated[int, typer.Option(help="Its ranks on a node.", min=1)] = 1,
    nodes: Annotated[int, typer.Option(help="Its nodes.", min=1)] = 1,
    gradient_bytes: Annotated[int, typer.Option(help="Of a parameter's gradient.", min=1)] = 4,
    base_every: Annotated[int, typer.Option(help="Versions between its bases.", min=1)] = CheckpointConfig.base_every,
    folds: Annotated[
        bool | None,
        typer.Option("--folds/--captures", help="Whether its bases are folded; else as by default on this machine."),
    ] = None,
    as_json: JSON = False,
) -> None:
    """Look for a GPU, open each tier, check that it keeps its word, and measure both. What a tier holds is left alone.

    With --parameters (of a rank, with Adam in fp32) the tiers are taken for a job's, fastest first: it says what each
    of them will hold, what it has room for, and what a version would cost here.

    Exits with 1 if a tier cannot be used, does not do what it claims, or has no room for the least that it must hold.
    """
    console = Console(stderr=as_json)
    diagnoses = []
    with console.status("looking for a GPU"):
        gpu = examine_gpu()
    if not as_json:
        show_gpu(console, gpu)
    for url in urls or []:
        with console.status(f"examining {shown(url)}"):
            diagnoses.append(asyncio.run(examine(url, measure_s=measure_s)))
        if not as_json:
            show(console, diagnoses[-1])
    job = JobSize(int(parameters), ranks, nodes, gradient_bytes, base_every, folds)
    unopened = [each.url for each in diagnoses if each.capabilities is None]
    rooms = fit(job, diagnoses) if parameters and diagnoses and not unopened else []
    costs = costs_of(job, gpu, diagnoses) if parameters else []
    if parameters and unopened:
        reason = f"{' and '.join(unopened)} could not be opened"
        console.print(Text(f"what each tier will hold cannot be said: {reason}", style="red"))
    if as_json:
        objects = [diagnosis.to_object() for diagnosis in diagnoses]
        for found, room in zip(objects, rooms, strict=False):
            found["holds"] = {"least": room.least_nbytes, "usual": room.usual_nbytes, "ranks": room.ranks}
            found["captures"] = why_captured(job, diagnoses)
        for found in objects or (objects := [{}]):
            found["device"] = gpu.to_object()
            found["costs"] = [each.to_object() for each in costs if each.place in ("device", found.get("url"))]
        typer.echo(json.dumps(objects))
    elif rooms:
        console.print(Text(rooms_text(rooms)))
        why = why_captured(job, diagnoses)
        console.print(Text(f"bases are taken for {f'captured: {why}' if why else 'folded'}"))
    if not as_json:
        for cost in costs:
            console.print(Text(str(cost)))
    for room in (full := [each for each in rooms if not each.holds_least]):
        console.print(Text(f"{room.url} has no room for the least that it must hold", style="red"))
    if full or not all(diagnosis.healthy for diagnosis in diagnoses):
        raise typer.Exit(1)


def show_gpu(console: Console, found: GpuDiagnosis) -> None:
    if found.obstacle:
        console.print(Text(f"no GPU: {found.obstacle}"))
        return
    console.print(Text(found.name, style="bold"))
    facts = plain_table("", "")
    facts.show_header = False
    facts.add_row("memory", bytes_text(found.memory_nbytes))
    facts.add_row("CUDA", f"driver for {found.driver}, runtime {found.runtime or 'not installed as a package'}")
    facts.add_row("into memory", f"{bytes_text(int(found.pageable_bytes_per_s))}/s")
    pinned = f"{bytes_text(int(found.pinned_bytes_per_s))}/s"
    facts.add_row("into pinned shared memory", found.pinning_obstacle or pinned)
    console.print(facts)


def show(console: Console, found: Diagnosis) -> None:
    console.print(Text(found.url, style="bold"))
    if found.capabilities is not None:
        facts = plain_table("", "")
        facts.show_header = False
        facts.add_row("survives", found.capabilities.survives.name.lower())
        facts.add_row("can", abilities(found.capabilities))
        if found.usage is not None:
            limit = "" if found.usage.limit_bytes is None else f" of {bytes_text(found.usage.limit_bytes)}"
            facts.add_row("in use", f"{bytes_text(found.usage.used_bytes)}{limit}")
        for name, value in found.facts.items():
            facts.add_row(name, value)
        passed = sum(check.passed for check in found.checks)
        facts.add_row("checks", f"{passed} of {len(found.checks)} passed")
        console.print(facts)
    if found.points:
        console.print(points_table(found.points))
    for problem in found.problems:
        console.print(Text(f"  {problem.what}: {problem.advice}", style="red" if problem.serious else "yellow"))
    console.print(Text("  healthy" if found.healthy else "  unhealthy", style="green" if found.healthy else "red"))


def bench(
    urls: URLS,
    size: Annotated[
        list[str] | None, typer.Option(help="Object size, such as 16MiB; repeat for several.", show_default=False)
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(help="Calls at once; repeat for several.", show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds; each figure is their median.", min=1)] = REPEATS,
    budget_s: Annotated[float, typer.Option(help="Seconds for each tier.")] = BUDGET_S,
    as_json: JSON = False,
) -> None:
    """Measure bandwidth and latency of each tier, over sizes and concurrencies, under a prefix of its own."""
    sizes = [bytes_of(text) for text in size] if size else SIZES
    console = Console(stderr=as_json)
    for url in urls:
        with console.status(f"measuring {shown(url)}"):
            points = asyncio.run(curves(url, sizes, concurrency or CONCURRENCY, repeats, budget_s))
        if as_json:
            for point in points:
                typer.echo(json.dumps({"url": shown(url), **point.to_object()}))
        else:
            console.print(Text(shown(url), style="bold"), points_table(points))


def points_table(points: Sequence[Point]) -> Table:
    table = plain_table("operation", "size", "at once", "median", "95 %", "bandwidth", "calls")
    for column in table.columns[1:]:
        column.justify = "right"
    for point in points:
        table.add_row(
            point.operation,
            bytes_text(point.nbytes) if point.nbytes else f"{point.objects} objects" if point.objects > 1 else "",
            str(point.concurrency),
            f"{point.latency_s_median * 1e3:.2f} ms",
            f"{point.latency_s_p95 * 1e3:.2f} ms",
            f"{bytes_text(int(point.bytes_per_s))}/s" if point.bytes_per_s else "",
            str(point.calls),
        )
    return table


def output() -> Console:
    """For what a command prints. If that is piped, lines are as long as they need to be: a name that is cut, or goes on
    in the next line, serves no other command."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_COLUMNS)


def plain_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE)
    for column in columns:
        table.add_column(column)
    return table


def shown(url: str) -> str:
    """The URL without its secrets."""
    return TierURL.parse(url).text


def bytes_of(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigurationError(f"--size: {error}") from None
