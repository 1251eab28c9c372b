"""``tiercheck diff``: what differs between two versions."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TimeRemainingColumn
from rich.text import Text

from tiercheck.cli.as_json import compared_object
from tiercheck.cli.checkpoints import DEADLINE, DEADLINE_S, opened, progress_bar, show_problems
from tiercheck.cli.tiers import JSON, output, plain_table

if TYPE_CHECKING:
    from tiercheck.archive.compare.versions import Compared, Form, TensorDifference

__all__ = ["diff"]

TENSORS_SHOWN_MAX = 40
PATHS_SHOWN_MAX = 40


def diff(
    url: Annotated[str, typer.Argument(help="The tier that holds the first version.", show_default=False)],
    before: Annotated[int, typer.Argument(help="The first version.", show_default=False, min=0)],
    after: Annotated[int, typer.Argument(help="The second version.", show_default=False, min=0)],
    tier: Annotated[
        list[str] | None, typer.Option(help="One more tier of the same job; repeat for several.", show_default=False)
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="Where the second version is, if not there too; repeat for several.", show_default=False),
    ] = None,
    generation: Annotated[int | None, typer.Option(help="The first version as of this generation.", min=1)] = None,
    against_generation: Annotated[
        int | None, typer.Option(help="The second version as of this generation.", min=1)
    ] = None,
    rank: Annotated[int, typer.Option(help="Whose host states are compared.", min=0)] = 0,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Compare the optimizer's tensors as well.")] = False,
    deadline_s: DEADLINE = DEADLINE_S,
    as_json: JSON = False,
) -> None:
    """Compare two versions: each tensor of the model, and a rank's host state. What differs most comes first.

    They may be of different numbers of ranks, stages, frameworks and jobs. Differentials are replayed. Exits with 0
    whether they differ or not.
    """
    with (
        opened([url, *(tier or ())], deadline_s) as archive,
        opened(against, deadline_s) if against else nullcontext() as other,
        progress_bar("comparing", BarColumn(), TimeRemainingColumn()) as update,
    ):
        found = archive.diff(
            before,
            after,
            generation=generation,
            other=other,
            other_generation=against_generation,
            rank=rank,
            optimizer=optimizer,
            progress=update,
        )
    if as_json:
        typer.echo(json.dumps(compared_object(found)))
    else:
        show_compared(output(), found)


def show_compared(console: Console, found: Compared) -> None:
    differing = [each for each in found.tensors if each.differs]
    table = plain_table("tensor", "difference", "relative", "largest", "changed", "")
    table.columns[0].overflow = "fold"
    for each in differing[:TENSORS_SHOWN_MAX]:
        table.add_row(*tensor_row(each))
    if differing:
        console.print(table)
    if len(differing) > TENSORS_SHOWN_MAX:
        console.print(Text(f"  and {len(differing) - TENSORS_SHOWN_MAX} tensors more (--json lists all)"))
    paths = [*found.written, *found.host_state]
    table = plain_table("host state", "first", "second")
    table.columns[0].overflow = "fold"
    for path in paths[:PATHS_SHOWN_MAX]:
        table.add_row(path.path, *("(none)" if each is None else each for each in (path.before, path.after)))
    if paths:
        console.print(table)
    if len(paths) > PATHS_SHOWN_MAX:
        console.print(Text(f"  and {len(paths) - PATHS_SHOWN_MAX} values more (--json lists all)"))
    said = [f"version {v} of generation {g}" for v, g in zip(found.versions, found.generations, strict=True)]
    console.print(
        Text(f"{' and '.join(said)}: {len(differing)} of {len(found.tensors)} tensors differ; {found.fidelity}")
    )
    show_problems(console, found.notes)


def tensor_row(each: TensorDifference) -> tuple[str, ...]:
    distance = each.distance
    name = each.name + (f" ({each.slice_name})" if each.slice_name else "") + (f": {each.state}" if each.state else "")
    notes = [f"{distance.not_finite} elements are not finite"] if distance.not_finite else []
    if each.before is None or each.after is None:
        notes.append("only in the second" if each.before is None else "only in the first")
    elif each.before != each.after:
        notes.append(f"{form_text(each.before)} -> {form_text(each.after)}")
    if not distance.elements:
        return name, "", "", "", "", "; ".join(notes)
    relative = "" if math.isinf(distance.relative) else f"{distance.relative:.3g}"
    changed = f"{distance.changed} of {distance.elements}"
    return name, f"{distance.l2:.3g}", relative, f"{distance.max_abs:.3g}", changed, "; ".join(notes)


def form_text(form: Form) -> str:
    frozen = "" if form.trained else ", not trained"
    model = f" (of {form.model_dtype})" if form.model_dtype not in ("", form.dtype) else ""
    return f"{form.dtype}{model} {list(form.shape)}{frozen}"
