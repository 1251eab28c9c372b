"""``docs/reference.md`` against the code: everything public is there, and nothing that the code does not have."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import typer

import tiercheck
from tests.unit.agent.status.test_http import AGENT
from tiercheck.agent.status.metrics import metrics_text
from tiercheck.agent.status.snapshot import AgentSnapshot, PeerSnapshot, RankSnapshot, TierSnapshot, Versions
from tiercheck.cli.commands import app
from tiercheck.config import CheckpointConfig
from tiercheck.demo.results.report import DemoResult
from tiercheck.diagnostics.costs import Cost
from tiercheck.diagnostics.doctor import Problem
from tiercheck.diagnostics.gpu import GpuDiagnosis
from tiercheck.diagnostics.measure import Point
from tiercheck.replication.named_policies import InstalledPolicy
from tiercheck.streams.codecs import codec_names
from tiercheck.testing.checks import Check
from tiercheck.testing.describe import Option
from tiercheck.tiers import registry
from tiercheck.tiers.peer.server.limits import PeerStatistics
from tiercheck.types import Capabilities, Usage

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
LAUNCHERS = {"GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}


def part(title: str) -> str:
    """The text under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", REFERENCE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def rows(title: str) -> list[list[str]]:
    """The cells of the tables under a heading, without their heads."""
    lines = [line for line in part(title).splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row, line in zip(cells, lines, strict=True) if "`" in line]


def names(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


def firsts(title: str) -> list[str]:
    return list(chain.from_iterable(names(row[0]) for row in rows(title)))


def test_the_package() -> None:
    assert sorted(firsts("The package")) == sorted(tiercheck.__all__)


def test_the_errors() -> None:
    assert sorted([*firsts("Errors"), "TierCheckError"]) == sorted(tiercheck.errors.__all__)


def test_the_options() -> None:
    assert sorted(firsts("Options")) == sorted(each.name for each in fields(CheckpointConfig))
    for name, default, *_ in rows("Options"):
        (name,) = names(name)
        value = getattr(CheckpointConfig, name, None)
        said = default.strip("`") or ""
        assert said.lower() == str("" if value is None else value).lower(), name


def test_the_codecs_and_the_drivers() -> None:
    assert sorted(firsts("Codecs")) == sorted(codec_names())
    documented = {re.match(r"(\w+)", name)[1] for name in firsts("Tiers")}  # type: ignore[index]  # a URL begins so
    assert documented == {scheme for scheme, provider in registry.schemes().items() if provider == "tiercheck"}


def test_the_commands_and_their_options() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # it is a group
    found = {match[1]: match[0] for match in re.finditer(r"^\| `tiercheck (\w+).*", part("The command line"), re.M)}
    assert found.keys() == commands.keys()
    for name, command in commands.items():
        visible = [each for each in command.params if not getattr(each, "hidden", False)]
        options = [[*each.opts, *each.secondary_opts] for each in visible if each.opts[0].startswith("--")]
        missing = [opts for opts in options if not any(re.search(rf"{opt}(?![-\w])", found[name]) for opt in opts)]
        assert not missing, f"the row of tiercheck {name} lacks {missing}"
        gone = set(re.findall(r"--[a-z][-a-z]*", found[name])) - set(chain.from_iterable(options))
        assert not gone, f"tiercheck {name} has no {gone}"


def test_the_environment() -> None:
    read = {name for path in (ROOT / "tiercheck").rglob("*.py") for name in variables(ast.parse(path.read_text()))}
    assert sorted(firsts("Environment")) == sorted(read)


def variables(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and (value in LAUNCHERS or re.fullmatch(r"TIERCHECK_[A-Z_]+", value)):
            yield value


def test_the_entry_points() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert sorted(firsts("Entry points")) == sorted(name for name in groups if name.startswith("tiercheck."))


def test_the_metrics() -> None:
    counts = {each.name: 1 for each in fields(PeerStatistics) if each.name != "dropped"}
    agent = replace(AGENT, peer=PeerSnapshot("", True, counts, {"truncated": 1}))
    served = set(re.findall(r"^(tiercheck_\w+?)(?:_created)?[ {]", metrics_text(agent)[1], re.MULTILINE))
    assert sorted(firsts("Metrics")) == sorted(served)


# What the commands print as JSON.

VALUES = {"base", "differential", "snapshot", "approximate", "put", "get", "stat", "list", "bench", "doctor"}
"""Words of the table that are values, not fields."""


def test_the_fields_of_json() -> None:
    commands = keys_by_command()
    made = {
        "demo": of(DemoResult),
        "agent --status": of(AgentSnapshot, RankSnapshot, TierSnapshot, Versions, PeerSnapshot),
        "plugins": keys_in("tiercheck/cli/tiers.py", "plugins")
        | keys_in("tiercheck/diagnostics/doctor.py", "InstalledDriver.to_object")
        | of(Option, InstalledPolicy),
        "doctor": keys_in("tiercheck/cli/tiers.py", "doctor")
        | keys_in("tiercheck/diagnostics/doctor.py", "Diagnosis.to_object")
        | of(Usage, Check, Problem, Capabilities, GpuDiagnosis, Cost),
        "bench": keys_in("tiercheck/cli/tiers.py", "bench") | of(Point),
        **{name: keys_in("tiercheck/cli/as_json.py", function) for name, function in FUNCTIONS.items()},
    }
    made["plan"] |= {"time"} | keys_in("tiercheck/recovery/duration.py", "Duration.to_object")
    assert commands.keys() == made.keys()
    for command, keys in made.items():
        assert not keys - commands[command], f"the row of {command} lacks fields"
        assert not commands[command] - keys, f"{command} has no such fields"


FUNCTIONS = {
    "ls": "listing_object",
    "plan": "plan_object",
    "show": "contents_object",
    "diff": "compared_object",
    "copy": "copied_object",
    "prune": "removal_object",
    "rm": "removal_object",
    "gc": "leftovers_object",
    "export": "exported_object",
    "verify": "verified_object",
}


def keys_by_command() -> dict[str, set[str]]:
    """The fields that the row of each command names."""
    found: dict[str, set[str]] = {}
    for commands, text in rows("What the commands print as JSON"):
        said = {name for name in names(text) if re.fullmatch(r"[a-z][a-z0-9_]*", name)} - VALUES
        found |= dict.fromkeys(names(commands), said)
    return found


def of(*classes: Any) -> set[str]:
    return {each.name for one in classes for each in fields(one)}


def keys_in(path: str, *functions: str) -> set[str]:
    """The keys of the dictionaries that functions of a file make, and those that the ``..._object`` they call make."""
    tree = ast.parse((ROOT / path).read_text())
    defined: dict[str, ast.AST] = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        defined |= {f"{owner.name}.{node.name}": node for node in owner.body if isinstance(node, ast.FunctionDef)}
    waiting, seen, found = list(functions), set[str](), set[str]()
    while waiting:
        if (name := waiting.pop()) in seen:
            continue
        seen.add(name)
        for node in ast.walk(defined[name]):
            if isinstance(node, ast.Dict):
                found |= set(constants(node.keys))
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                found |= set(constants([node.slice]))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("_object"):
                waiting.append(node.func.id)
    return found


def constants(nodes: Iterable[ast.AST | None]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
