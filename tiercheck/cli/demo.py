"""``tiercheck demo``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

__all__ = ["demo"]


def demo(
    failure: Annotated[str, typer.Option(help="What to lose: software, node, rack or stage.")] = "software",
    zero: Annotated[int, typer.Option(help="The ZeRO stage.", min=0, max=3)] = 1,
    dtype: Annotated[str, typer.Option(help="What to train in: fp32 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="Where to train: cpu, or cuda, with a rank on each GPU.")] = "cpu",
    seed: Annotated[int | None, typer.Option(help="Model, data and failure; drawn and printed by default.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="A file or folder to train on, instead of Python's standard library.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where the plot, the report and the logs go.")] = Path("demo-output"),
    steps: Annotated[int | None, typer.Option(help="Iterations; by default as fits the dtype.")] = None,
    resume_on: Annotated[
        int | None, typer.Option(help="Go on with so many ranks after the failure, instead of 2.", min=1, metavar="M")
    ] = None,
    pipeline: Annotated[
        int, typer.Option(help="Train a pipeline of so many stages, one a rank.", min=0, metavar="STAGES")
    ] = 0,
    on_lost_stage: Annotated[
        str | None,
        typer.Option(
            help="Makes a lost stage: neighbours, neighbours-and-ends, older-base or older-base-or-neighbours."
        ),
    ] = None,
    codec: Annotated[str, typer.Option(help="How the differentials are encoded.")] = "exact",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the durable tier's files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, last.")] = False,
    width: Annotated[int | None, typer.Option(hidden=True)] = None,
    layers: Annotated[int | None, typer.Option(hidden=True)] = None,
    heads: Annotated[int | None, typer.Option(hidden=True)] = None,
    sequence: Annotated[int | None, typer.Option(hidden=True)] = None,
    base_every: Annotated[int | None, typer.Option(hidden=True)] = None,
    batch: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train a small GPT, kill it, recover it, and compare with a run that was never killed.

    Exits with 1 if the recovery broke its promise: it called itself exact, and a bit differs.
    """
    from tiercheck.demo.requirements import check_requirements

    check_requirements()
    from tiercheck.demo.failure import Failure
    from tiercheck.demo.results.report import render
    from tiercheck.demo.run import DemoOptions, run_demo

    console = Console(stderr=as_json)
    result = run_demo(
        DemoOptions(
            failure=Failure.parse(failure),
            zero=zero,
            dtype=dtype,
            device=device,
            codec=codec,
            seed=seed,
            text=text,
            output=output,
            keep=keep,
            steps=steps,
            width=width,
            layers=layers,
            heads=heads,
            sequence=sequence,
            base_every=base_every,
            batch=batch,
            resume_on=resume_on,
            pipeline=pipeline,
            on_lost_stage=on_lost_stage,
        ),
        console,
    )
    console.print(render(result))
    if as_json:
        typer.echo(json.dumps(result.to_object()))
    if not result.promise_kept:
        raise typer.Exit(1)
