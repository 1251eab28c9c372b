"""The demo itself, small, from the command line: real processes, real kills, real recoveries."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.demo.forked_demo import SMALL
from tests.cluster.demo.test_trainers import wait_until_gone
from tests.forks import Forks, tail
from tiercheck.cli import main

pytestmark = pytest.mark.cluster
COMMAND = [sys.executable, "-m", "tiercheck.cli", "demo", "--json"]
COMMAND += [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
REQUIRED = {
    "failure",
    "seed",
    "failed_at",
    "anchor",
    "replayed",
    "steps_lost",
    "sources",
    "recover_s",
    "rerun_s",
    "overhead",
    "loss_bit_identical",
    "params_bit_identical",
    "fidelity",
}
GONE_S_MAX = 10.0


def run_forked(forks: Forks, directory: Path, *names: str) -> Path:
    """Where demos ran that start no interpreter of their own."""
    codes = forks.run("tests.cluster.demo.forked_demo", directory, *names, log=directory / "log")
    assert codes == [0], tail(directory / "log")
    return directory


@pytest.fixture(scope="module")
def demos(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_forked(forks, tmp_path_factory.mktemp("demos"), "software", "node")


def checked(result: dict[str, Any], output: Path, told: str) -> dict[str, Any]:
    """The result of a demo that recovers exactly, after what holds for each of them was checked. ``told``: what the
    user saw."""
    shown(result, output, told)
    assert result["loss_bit_identical"] is True
    assert result["params_bit_identical"] is True
    assert result["fidelity"] == "exact"
    assert result["anchor"] + result["replayed"] == result["resumed_at"]
    return result


def shown(result: dict[str, Any], output: Path, told: str) -> None:
    assert set(result) >= REQUIRED
    assert json.loads((output / "report.json").read_text()) == result
    assert (output / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert not (output / "durable").exists(), "the durable tier is removed at the end"
    assert "What could be used" in told
    assert "The plan of the recovery" in told
    assert result["steps_lost"] == max(0, result["failed_at"] - result["resumed_at"])
    assert not leftovers()


def of_forked(directory: Path, failure: str) -> dict[str, Any]:
    result = json.loads((directory / f"{failure}.json").read_text())
    return checked(result, directory / failure, (directory / "log").read_text())


def leftovers() -> list[Path]:
    """Memory of a demo whose process is gone."""
    return [
        path
        for path in Path("/dev/shm").glob(f"tiercheck-{os.geteuid()}-demo-*")
        if not psutil.pid_exists(int(path.name.split("demo-")[1].split("-")[0]))
    ]


def test_a_software_failure_loses_nothing(demos: Path) -> None:
    result = of_forked(demos, "software")
    assert result["seed"] == 11
    assert result["steps_lost"] == 0
    assert set(result["sources"]) == {"shm"}
    assert result["nodes_lost"] == []
    held = result["bytes_per_parameter"]
    assert set(held) == {"shm", "peer", "nvme"}
    assert min(held.values()) > 12, "a base, at least"
    assert result["bases_captured"] >= 4, "each rank captures one at each start"
    assert result["bases_folded"] > 0


def test_a_lost_node_recovers_from_its_neighbours_memory(demos: Path) -> None:
    result = of_forked(demos, "node")
    assert len(result["nodes_lost"]) == 1
    # The very last version may not have left the node yet: then what both have is older, and still next door.
    assert {"shm", "peer"} <= set(result["sources"])


def test_other_ranks_go_on_with_the_same_bits(forks: Forks, tmp_path: Path) -> None:
    directory = run_forked(forks, tmp_path, "other-ranks", "fewer-ranks")
    for name, ranks in (("other-ranks", 3), ("fewer-ranks", 1)):
        result = of_forked(directory, name)
        assert (result["ranks"], result["resumed_on"]) == (2, ranks)
    said = (tmp_path / "log").read_text()
    assert "Then it goes on with 3 ranks." in said
    assert "Then it goes on with 1 rank." in said


def test_a_lost_stage_is_made_of_its_neighbours_and_the_others_keep_every_bit(forks: Forks, tmp_path: Path) -> None:
    directory = run_forked(forks, tmp_path, "stage")
    result = json.loads((directory / "stage.json").read_text())
    shown(result, directory / "stage", said := (directory / "log").read_text())
    lost = result["stage_lost"]
    assert lost in (1, 2), "an inner one"
    assert f"every copy of stage {lost} is lost" in said
    assert result["fidelity"] == "approximate"
    assert any(f"stage {lost} of 4" in note and f"of stage {lost + 1}" in note for note in result["notes"])
    assert result["survivors_bit_identical"] is True
    assert (result["loss_bit_identical"], result["params_bit_identical"]) == (False, False)
    assert result["first_difference"] == result["resumed_at"] + 1
    assert result["losses"]["16"] != result["uninterrupted_losses"]["16"]


def test_a_lost_rack_recovers_from_the_durable_tier(forks: Forks, tmp_path: Path) -> None:
    """From the command line, and by torchrun."""
    output, log = tmp_path / "out", tmp_path / "log"
    options = ["--output", str(output), "--seed", "13", "--failure", "rack", "--zero", "0"]
    codes = forks.run("tests.cluster.demo.forked_demo", "command", *COMMAND[3:], *options, log=log)
    told = log.read_text()
    assert codes == [0], told
    result = checked(json.loads(told.splitlines()[-1]), output, told)
    assert result["nodes_lost"] == [0, 1]
    assert set(result["sources"]) == {"nvme"}


def test_a_demo_that_is_ended_early_leaves_nothing_behind(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with subprocess.Popen(
        [*COMMAND, "--output", str(output)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as parent:
        assert parent.stderr is not None
        parent.stderr.readline()  # the introduction: the workspace exists and the trainers are next
        children = wait_for_children(psutil.Process(parent.pid))
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(60) == 128 + signal.SIGTERM
    assert not wait_until_gone(children, GONE_S_MAX)
    assert not (output / "durable").exists()
    assert not leftovers()


def wait_for_children(parent: psutil.Process) -> list[psutil.Process]:
    while parent.is_running():
        if children := parent.children(recursive=True):
            return list(children)
    raise AssertionError("the demo ended before it started trainers")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--failure", "flood"], "unknown failure 'flood': choose one of software, node, rack, stage"),
        (["--failure", "stage"], "only a pipeline can lose a stage: name its stages with --pipeline"),
        (["--on-lost-stage", "neighbours"], "only a pipeline can lose a stage: name its stages with --pipeline"),
        (["--pipeline", "2"], "a pipeline of 2 has no stage between two others: take 3"),
        (["--pipeline", "4"], "2 layers cannot be spread evenly over 4 stages"),
        (["--pipeline", "4", "--layers", "4", "--zero", "3"], "DeepSpeed's pipelines take ZeRO 0 or 1, not 3"),
        (["--pipeline", "4", "--resume-on", "2"], "a pipeline goes on with its stages"),
        (["--pipeline", "4", "--layers", "4", "--on-lost-stage", "hope"], "method must be one of neighbours, "),
        (["--dtype", "fp64"], "unknown dtype 'fp64': choose one of fp32, bf16"),
        (["--steps", "7"], "7 steps are too few"),
        (["--text", "/does/not/exist"], "the training text /does/not/exist does not exist"),
        (["--codec", "zip"], "there is no codec 'zip' (installed are: "),
        (["--seed", "-1"], "the seed must be in 0.."),
        (["--resume-on", "99"], "the demo runs on 8 ranks at most, not 99"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_no_traceback(
    tmp_path: Path, options: list[str], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(["--output", str(tmp_path / "out"), *options], monkeypatch) == 2
    printed = capfd.readouterr()
    assert printed.err.startswith(f"error: {message}")
    assert len(printed.err.splitlines()) == 1
    assert json.loads(printed.out)["error"]["message"].startswith(message)
    assert not (tmp_path / "out").exists()


def refused(options: list[str], monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """The exit status of a demo that does not begin, in this process."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the test run's own signals stay as they are
    monkeypatch.setattr(sys, "argv", [*COMMAND[2:], *options])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_a_folder_of_somebody_elses_is_not_touched(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "durable").mkdir()
    (tmp_path / "durable" / "thesis.txt").write_text("mine")
    assert refused(["--output", str(tmp_path)], monkeypatch) == 2
    assert "no earlier demo's output" in capfd.readouterr().err
    assert (tmp_path / "durable" / "thesis.txt").read_text() == "mine"


def test_an_unknown_option_is_an_error() -> None:
    done = subprocess.run([*COMMAND, "--zeros", "1"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "No such option: --zeros" in done.stderr
