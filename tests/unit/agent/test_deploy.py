"""The examples for systemd and Kubernetes run commands that exist, with options that exist."""

from __future__ import annotations

import configparser
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.agent.server.process import END_S_MAX
from tiercheck.agent.server.service import OVERDUE_S
from tiercheck.cli import commands

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parents[3] / "docs" / "how-to" / "deploy"


def parsed(words: list[str]) -> dict[str, Any]:
    """The options of a ``tiercheck`` command, as the command line reads them. Nothing is run."""
    program, name, *rest = words
    assert Path(program).name == "tiercheck"
    command = typer.main.get_command(commands.app).commands[name]  # type: ignore[attr-defined]
    with command.make_context(name, rest) as context:
        return dict(context.params)


def test_the_systemd_unit() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(DEPLOY / "tiercheck-agent.service")
    service = unit["Service"]
    options = parsed(shlex.split(service["ExecStart"]))
    assert options["drain_s"] + OVERDUE_S + END_S_MAX <= int(service["TimeoutStopSec"]), "it would be killed before"
    name, _, value = service["Environment"].partition("=")
    assert (name, value) == ("TIERCHECK_RUN_DIR", f"/run/{service['RuntimeDirectory']}")
    assert service["RuntimeDirectoryMode"] == "0700"


def test_the_daemon_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = yaml.safe_load((DEPLOY / "tiercheck-agent.yaml").read_text())["spec"]["template"]["spec"]
    (agent,) = spec["containers"]
    options = parsed([*agent["command"], *agent["args"]])
    assert options["drain_s"] + OVERDUE_S + END_S_MAX <= spec["terminationGracePeriodSeconds"]
    assert parsed(agent["livenessProbe"]["exec"]["command"])["status"] is True
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in (*spec["containers"], *spec["initContainers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    variables = {each["name"]: each.get("value") for each in agent["env"]}
    assert str(options["keys"]) in spec["initContainers"][0]["args"][0]
    assert variables["TIERCHECK_RUN_DIR"] in spec["initContainers"][0]["args"][0]
    assert None not in variables.values(), "what differs from node to node may be too long, and trainers must know it"
    monkeypatch.setenv("TIERCHECK_RUN_DIR", str(tmp_path / "run"))
    RunDirectory.of(variables["TIERCHECK_AGENT_NODE"])


def test_the_trainers_pods_find_the_agent() -> None:
    agents = yaml.safe_load((DEPLOY / "tiercheck-agent.yaml").read_text())["spec"]["template"]["spec"]
    trainers = yaml.safe_load((DEPLOY / "tiercheck-trainers.yaml").read_text())["spec"]
    (agent,), (trainer,) = agents["containers"], trainers["containers"]
    wanted = {each["name"]: each["value"] for each in agent["env"]}
    wanted["TIERCHECK_KEYS"] = str(parsed([*agent["command"], *agent["args"]])["keys"])
    variables = {each["name"]: each for each in trainer["env"]}
    assert {name: variables[name].get("value") for name in wanted} == wanted
    host = variables["TIERCHECK_HOST"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert agents["hostNetwork"]
    assert host == "status.hostIP", "the address of the agent, not of the pod"
    for what in ("volumes", "securityContext"):
        assert trainers[what] == agents[what]
    assert trainer["volumeMounts"] == agent["volumeMounts"]
    for each in (trainers, agents):
        (prepare,) = each["initContainers"]
        assert prepare["args"] == agents["initContainers"][0]["args"]
    header = (DEPLOY / "tiercheck-agent.yaml").read_text().partition("apiVersion")[0]
    assert all(name in header for name in (*wanted, "TIERCHECK_HOST")), "whoever reads only this file must learn of it"
