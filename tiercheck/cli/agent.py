"""``tiercheck agent`` and ``tiercheck keys``: the process that outlives the trainers, and who may talk to it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tiercheck.errors import ConfigurationError
from tiercheck.tiers.url import parse_size

__all__ = ["agent", "keys"]

ANSWER_S_MAX = 10.0


def agent(
    node: Annotated[str | None, typer.Option(help="The agent's name on this machine.")] = None,
    bind: Annotated[
        str | None,
        typer.Option(
            help="Where neighbours reach it, such as tcp://0.0.0.0:7070; port 0: any. It takes keys: without them it "
            "serves this user on this machine.",
        ),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Directory of keys, as 'tiercheck keys' makes it.", envvar="TIERCHECK_KEYS")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="The most it keeps for neighbours, such as 64GiB.")] = None,
    http_port: Annotated[int, typer.Option(help="Status page and metrics, on 127.0.0.1; 0: any.")] = 0,
    drain_s: Annotated[float, typer.Option(help="The most seconds that it drains for when it is ended.")] = 60.0,
    fold_threads: Annotated[
        int | None, typer.Option(help="How many bases it folds at a time.", envvar="TIERCHECK_FOLD_THREADS")
    ] = None,
    fold_cpus: Annotated[
        str, typer.Option(help="The processors that folds may use, such as 0-3,8.", envvar="TIERCHECK_FOLD_CPUS")
    ] = "",
    fold_nice: Annotated[
        int | None, typer.Option(help="The niceness of the process that folds.", envvar="TIERCHECK_FOLD_NICE")
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Print what the running agent says, as JSON.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Have the running agent drain and end.")] = False,
) -> None:
    """Run this node's agent: it moves what trainers captured, serves the neighbours, and outlives both.

    Trainers whose hierarchy has a peer:// tier start one themselves if none runs; a platform starts it once a node.
    """
    try:
        from tiercheck.agent.protocol.rundir import default_node
        from tiercheck.agent.protocol.settings import AgentSettings
        from tiercheck.agent.server.process import run_agent
    except ImportError as error:
        raise ConfigurationError(f"the agent needs {error.name}: pip install 'tiercheck[agent]'") from error
    name = node or default_node()
    if status or stop:
        typer.echo(json.dumps(asyncio.run(ask(name, stop=stop)), indent=2))
        return
    settings = AgentSettings(
        node=name,
        bind=bind,
        keys=str(keys.absolute()) if keys else None,
        memory_bytes=size(memory),
        http_port=http_port,
        drain_s=drain_s,
        fold_threads=fold_threads,
        fold_cpus=fold_cpus,
        fold_nice=fold_nice,
    )
    run_agent(settings)


async def ask(node: str, *, stop: bool) -> Any:
    """What the running agent answers. Errors: ``Transient`` if none runs."""
    from tiercheck.agent.client.client import connect_agent

    async with await connect_agent(node, deadline_s=ANSWER_S_MAX) as client:
        if stop:
            told = client.hello
            await client.stop(drain=True)  # for as long as it may take by its own settings
            return {"node": node, "pid": told.pid, "ended": True}
        return await client.status(deadline_s=ANSWER_S_MAX)


def size(text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise ConfigurationError(f"--memory: {error}") from None


def keys(
    directory: Annotated[Path, typer.Argument(help="A new directory, to be brought to every node.")],
    owner: Annotated[
        str, typer.Option(help="Whose keys they are. Clients of one owner share their copies, and reach no other's.")
    ] = "owner",
) -> None:
    """Make the keys that let agents and trainers of several machines talk to one another, and nobody else."""
    try:
        from tiercheck.tiers.peer import PeerKeys
    except ImportError as error:
        raise ConfigurationError(f"keys need {error.name}: pip install 'tiercheck[peer]'") from error
    PeerKeys.generate(directory, owner=owner)
    typer.echo(
        f"Keys are in {directory}. Bring the directory to every node, readable by the job's user alone, and set "
        f"TIERCHECK_KEYS={directory} there."
    )
