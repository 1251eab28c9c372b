"""The commands that read checkpoints: what they print, as JSON and for people, and their exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

import tiercheck
from tests.archived import FIRST_LIFE, LAST, WORLD, Left, bits
from tests.shared_memory import root_of
from tiercheck.archive.change.removal import Removal
from tiercheck.archive.inventory import Inventory
from tiercheck.cli import commands
from tiercheck.cli.checkpoints import with_version
from tiercheck.cli.removal import tell
from tiercheck.errors import RecoveryError
from tiercheck.tiers.shm.namespaces import hold_namespace, release_namespace


def printed(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(commands.app, list(arguments), env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.stdout


def told(*arguments: str, code: int = 0) -> Any:
    return json.loads(printed(*arguments, "--json", code=code))


def test_ls_tells_generations_versions_bytes_and_ages(finished: Left) -> None:
    found = told("ls", finished.url)
    assert (found["versions"], found["newest"], found["problems"]) == ([[0, LAST]], LAST, [])
    (tier,) = found["tiers"]
    assert (tier["name"], tier["survives"], tier["away"]) == ("nvme", "rack", None)
    second = found["generations"][1]
    assert (second["parent"], second["left_at"], second["world_size"]) == (1, FIRST_LIFE, WORLD)
    held = next(each for each in second["stored"] if each["kind"] == "base")["tiers"][0]
    assert held.keys() == {"tier", "ranks", "versions", "bytes", "committed", "written_s"}
    text = printed("ls", finished.url)
    assert f"Versions that can be read: 0..{LAST}" in text
    assert "2 of 2" in text
    assert "committed" in text


def test_ls_names_the_ranks_that_are_missing(left: Left) -> None:
    shutil.rmtree(left.root / "r00000/g000002")
    assert "1 of 2 (not 0)" in printed("ls", left.url)
    assert told("ls", left.url)["newest"] == FIRST_LIFE


def test_plan_tells_what_is_read_from_where(finished: Left) -> None:
    found = told("plan", finished.url)
    assert (found["version"], found["world_size"]) == (LAST, WORLD)
    sources = [source for rank in found["ranks"] for source in rank["sources"]]
    assert found["bytes"] == sum(source["bytes"] for source in sources)
    assert all((finished.root / source["object"]).stat().st_size == source["bytes"] for source in sources)
    assert [row["ranks"] for row in found["matrix"]] == [[[0, 1]]]
    shortest, longest = found["time"]["seconds"]
    assert 0 < shortest <= longest
    assert (found["time"]["tiers"][0]["bytes"], found["time"]["replay"]["steps"]) == (found["bytes"], 1)
    assert told("plan", finished.url, "--no-time")["time"] is None
    text = printed("plan", finished.url)
    assert f"Version {LAST}, of {WORLD} ranks" in text
    assert "Expected to take" in text
    assert "1 replayed step included" in " ".join(text.split())
    rows = [line.split() for line in printed("plan", finished.url, "--version", "6", "--generation", "1").splitlines()]
    assert [row[:3] for row in rows if row[:1] == ["1"]] == [["1", "base", "4"]]
    assert [row[:2] for row in rows if row[:1] == ["differential"]] == [["differential", "5..6"]] * WORLD
    assert told("plan", finished.url, "--version", "5", "--generation", "1")["ranks"][0]["anchor"] == 4


def test_show_tells_tensors_host_state_and_who_wrote_it(finished: Left) -> None:
    found = told("show", finished.url, "--rank", "1")
    assert (found["framework"], found["world_size"], found["rank"]) == ("torch", WORLD, 1)
    assert found["optimizer"]["kind"] == "torch.optim.adamw.AdamW"
    assert {"name": "master/0.weight", "dtype": "F32", "shape": [5, 3], "bytes": 60} in found["tensors"]
    assert len(found["hyperparameters"]) == 2
    with tiercheck.open(finished.url) as archive:
        rates = [group["lr"] for group in archive.rebuild(1).hyperparameters]
    assert [group["lr"] for group in found["hyperparameters"]] == rates, "as of the version, and not of its base"
    assert {"options", "random", "after_step"} <= found["host_state"].keys()
    assert found["lineage"] == [{"generation": 2, "until": None}, {"generation": 1, "until": FIRST_LIFE}]
    text = printed("show", finished.url)
    assert "torch.optim.adamw.AdamW (single_tensor)" in text
    assert "master/0.weight" in text


def test_show_takes_the_version_behind_the_tiers_or_by_option(finished: Left) -> None:
    by_option = told("show", finished.url, "--version", str(FIRST_LIFE))
    assert by_option["version"] == FIRST_LIFE
    assert told("show", finished.url, str(FIRST_LIFE)) == by_option
    assert told("plan", finished.url, "8", "--no-time") == told("plan", finished.url, "--version", "8", "--no-time")
    assert told("rm", finished.url, "4") == told("rm", finished.url, "--version", "4")
    with pytest.raises(typer.BadParameter, match="given twice: 8, and 9 by --version"):
        with_version([finished.url, "8"], 9)
    with pytest.raises(typer.BadParameter, match="version 8 of what"):
        with_version(["8"], None)


def test_verify_fails_where_a_version_is_lost_and_only_there(left: Left, finished: Left) -> None:
    assert told("verify", left.url)["healthy"] is True
    left.flip(f"r00001/g000002/differential/{LAST:012d}-*")
    found = told("verify", left.url, code=1)
    assert (found["lost"], found["newest"]) == ([[LAST, LAST]], LAST - 1)
    assert [each["object"][:23] for each in found["damaged"]] == ["r00001/g000002/differen"]
    text = printed("verify", left.url, code=1)
    assert f"lost: version {LAST}; the newest that can be read is {LAST - 1}" in text
    assert told("verify", left.url, f"nvme://{finished.root}")["lost"] == []
    assert "nothing is lost" in printed("verify", left.url, f"nvme://{finished.root}")


def test_verify_of_a_place_without_any_job_fails(tmp_path: Path) -> None:
    """A URL with a slip must not look like a healthy checkpoint."""
    (tmp_path / "not-ours").write_bytes(b"x")
    with pytest.raises(RecoveryError, match=f"nothing to verify: no job has an object in nvme://{tmp_path}; check the"):
        CliRunner().invoke(commands.app, ["verify", f"nvme://{tmp_path}"], catch_exceptions=False)


def test_listing_and_verifying_need_no_torch(finished: Left) -> None:
    program = f"""
import sys
sys.modules["torch"] = None
from typer.testing import CliRunner
from tiercheck.cli import commands, main
for command in ("ls", "plan", "verify"):
    done = CliRunner().invoke(commands.app, [command, {finished.url!r}, "--json"])
    assert done.exit_code == 0, done.output
sys.argv = ["tiercheck", "show", {finished.url!r}]
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: to look into versions needs torch: pip install 'tiercheck[torch]'\n"


def test_export_writes_the_model_and_says_how_true_it_is(finished: Left, tmp_path: Path) -> None:
    target = str(tmp_path / "model.safetensors")
    found = told("export", finished.url, "--to", target, "--version", "5")
    assert (found["version"], found["fidelity"], found["format"], found["notes"]) == (5, "exact", "safetensors", [])
    assert bits(load_file(target)) == finished.weights[0, 5]
    again = printed("export", finished.url, "--to", target, "--overwrite", "--dtype", "model")
    assert f"version {LAST}, exact, 9 tensors" in again
    rounded = printed("export", finished.url, "5", "--to", target, "--overwrite", "--dtype", "bf16")
    assert "version 5, approximate, 9 tensors" in rounded
    assert "6 tensors are rounded from F32 to BF16; the model has them in F32" in rounded
    with safe_open(target, "pt") as file:
        assert file.metadata()["tiercheck"] == "version 5 of generation 1, approximate"
    assert CliRunner().invoke(commands.app, ["export", finished.url, "--to", target]).exit_code != 0


def test_diff_names_what_differs_most_first(finished: Left, left: Left) -> None:
    found = told("diff", finished.url, "5", str(LAST), "--optimizer")
    assert (found["before"], found["after"]) == (
        {"version": 5, "generation": 1, "world_size": WORLD},
        {"version": LAST, "generation": 2, "world_size": WORLD},
    )
    assert (found["same"], found["fidelity"], found["host_state"]) == (False, "exact", [])
    assert {each["state"] for each in found["tensors"]} == {None, "step", "exp_avg", "exp_avg_sq"}
    norms = [each["relative"] for each in found["tensors"]]
    assert norms == sorted(norms, reverse=True)
    text = printed("diff", finished.url, "5", str(LAST))
    assert "7 of 9 tensors differ" in text
    assert "1.num_batches_tracked" in text
    assert "0 of 9 tensors differ" in printed("diff", finished.url, "9", "9", "--against", left.url)
    assert told("diff", finished.url, "6", "6", "--generation", "1")["same"] is True


def test_copy_brings_a_version_elsewhere_and_fails_if_something_was_left_out(left: Left, tmp_path: Path) -> None:
    target = f"nvme://{tmp_path}/copy?survives=rack"
    assert told("copy", left.url, target, "8")["version"] == 8
    shutil.rmtree(tmp_path / "copy")
    found = told("copy", left.url, target)
    assert (found["version"], found["damaged"], found["present"]) == (LAST, [], 0)
    assert found["versions"][-1][1] == LAST
    assert f"{found['objects']} were there already" in printed("copy", left.url, target)
    left.flip("r00000/g000001/base/*")
    assert told("copy", left.url, target, "--all", code=1)["damaged"]
    assert told("ls", target)["problems"] == []


def test_what_stays_all_the_same_is_not_taken_for_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    removal = Removal(Inventory(()), {}, ("base 3 of generation 1: a copy of another rank is needed",))
    tell(removal, done=False, as_json=False)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "What stays although the options do not keep it:",
        "  base 3 of generation 1: a copy of another rank is needed",
    ]


def test_prune_says_what_would_go_and_does_it_only_when_told(left: Left) -> None:
    dry = told("prune", left.url, "--keep-last", "1", "--keep-versions", "5")
    assert (dry["done"], dry["refused"]) == (False, [])
    assert (dry["lost"], dry["versions"]) == ([[0, 3], [7, 11]], [[4, 6], [12, 13]])
    gone = [each for tier in dry["tiers"] for each in tier["gone"]]
    assert dry["bytes"] == sum((left.root / each["object"]).stat().st_size for each in gone)
    assert "would go; nothing was removed: --yes does it" in printed("prune", left.url, "--keep-last", "1")
    assert told("ls", left.url)["versions"] == [[0, LAST]]
    done = told("prune", left.url, "--keep-last", "1", "--keep-versions", "5", "--yes")
    assert done == {**dry, "done": True}
    assert told("ls", left.url)["versions"] == dry["versions"]


def test_rm_asks_for_the_name_of_the_job_or_for_yes(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    dry = told("rm", left.url, "--job", "--job-is-dead")
    assert (dry["done"], dry["versions"]) == (False, [])
    monkeypatch.setattr("tiercheck.cli.removal.is_asked", lambda: True)
    asked = CliRunner().invoke(commands.app, ["rm", left.url, "--job", "--job-is-dead"], input="other\n")
    assert str(asked.exception) == "the name is another one: nothing is removed"
    assert told("ls", left.url)["newest"] == LAST
    asked = CliRunner().invoke(commands.app, ["rm", left.url, "--job", "--job-is-dead"], input="run\n")
    assert (asked.exit_code, "To delete this type run" in asked.output) == (0, True)
    assert told("ls", left.url)["generations"] == []


def test_what_a_live_job_needs_is_refused_in_one_line(
    finished: Left, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tiercheck", "rm", finished.url, "--generation", "2", "--yes"])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as exit_:
        commands.run()
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("error: rm is refused: it would delete ")
    assert line.endswith("(job_is_dead=True, or --job-is-dead)")


def test_gc_says_what_would_go_and_does_it_only_when_told(name: str, left: Left) -> None:
    root = root_of(name)
    release_namespace(hold_namespace(root))

    def mine(*options: str) -> Any:
        (found,) = [each for each in told("gc", *options)["leftovers"] if each["name"] == name]
        return found

    assert mine()["stays"] == "changed in the last 24 h: a job may come back for it"
    dry = mine("--older-than-h", "0")
    assert (dry["stays"], dry["removed"], dry["where"]) == (None, False, f"shm://{name}")
    assert "--yes does it" in printed("gc", "--older-than-h", "0")
    assert root.exists()
    assert told("gc", left.url, "--yes") == {"done": True, "leftovers": []}
    assert "0 removed, 0 B" in printed("gc", left.url, "--yes")


@pytest.mark.parametrize(
    ("command", "url", "said"),
    [
        *((each, "nvme:///proc/missing", "there is no directory /proc") for each in ("ls", "show", "verify", "plan")),
        ("ls", "shm://test-missing", "this node has no such shared memory (/dev/shm/"),
    ],
)
def test_an_error_is_one_line(
    command: str, url: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tiercheck", command, url])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as exit_:
        commands.run()
    assert exit_.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")
