"""The examples for systemd and Kubernetes run commands that exist, with options that exist."""

from __future__ import annotations

import configparser
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from tiercheck import cli
from tiercheck.agent.rundir import RunDirectory

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parents[2] / "docs" / "how-to" / "deploy"


def parsed(words: list[str]) -> dict[str, Any]:
    """The options of a ``tiercheck`` command, as the command line reads them. Nothing is run."""
    program, name, *rest = words
    assert Path(program).name == "tiercheck"
    command = typer.main.get_command(cli.app).commands[name]  # type: ignore[attr-defined]
    with command.make_context(name, rest) as context:
        return dict(context.params)


def test_the_systemd_unit() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(DEPLOY / "tiercheck-agent.service")
    service = unit["Service"]
    options = parsed(shlex.split(service["ExecStart"]))
    assert options["drain_s"] < int(service["TimeoutStopSec"]), "it would be killed while it drains"
    name, _, value = service["Environment"].partition("=")
    assert (name, value) == ("TIERCHECK_RUN_DIR", f"/run/{service['RuntimeDirectory']}")
    assert service["RuntimeDirectoryMode"] == "0700"


def test_the_daemon_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = yaml.safe_load((DEPLOY / "tiercheck-agent.yaml").read_text())["spec"]["template"]["spec"]
    (agent,) = spec["containers"]
    options = parsed([*agent["command"], *agent["args"]])
    assert options["drain_s"] < spec["terminationGracePeriodSeconds"]
    assert parsed(agent["livenessProbe"]["exec"]["command"])["status"] is True
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in (*spec["containers"], *spec["initContainers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    variables = {each["name"]: each.get("value") for each in agent["env"]}
    assert str(options["keys"]) in spec["initContainers"][0]["args"][0]
    assert variables["TIERCHECK_RUN_DIR"] in spec["initContainers"][0]["args"][0]
    monkeypatch.setenv("TIERCHECK_RUN_DIR", str(tmp_path / "run"))
    RunDirectory.of("ip-10-0-12-34.eu-west-1.internal")  # as nodes are called there
