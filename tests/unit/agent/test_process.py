"""What the agent's process is made of, and where it meets its trainers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.agents import Node, node
from tiercheck.agent.protocol.rundir import RunDirectory, lock_file
from tiercheck.agent.server.neighbours import shm_name
from tiercheck.errors import ConfigurationError

__all__ = ["node"]


def test_the_agent_imports_neither_torch_nor_numba() -> None:
    statement = (
        "import sys, tiercheck.agent.server.process\n"
        "import tiercheck.agent.client.client, tiercheck.agent.client.remote_mover\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, timeout=120, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "numba", "llvmlite", "deepspeed", "matplotlib", "pytest", "hypothesis"}
    assert "zmq" in loaded


def test_the_package_alone_brings_no_dependency() -> None:
    statement = "import tiercheck.agent, sys\nprint(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, timeout=120, check=True)
    assert not set(done.stdout.split()) & {"zmq", "msgpack", "numpy", "prometheus_client"}


def test_it_stands_back() -> None:
    statement = (
        "from tiercheck.runtime.priority import stand_back\nimport os\nsaid = stand_back()\n"
        "print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0) == os.SCHED_BATCH, said)"
    )
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith(f"{max(10, os.getpriority(os.PRIO_PROCESS, 0))} True nice 10, batch scheduling")


def test_a_session_of_its_own_stands_back_too() -> None:
    group = Path("/proc/self/autogroup")
    if not group.exists():
        pytest.skip("this kernel makes no groups of sessions (CONFIG_SCHED_AUTOGROUP)")
    statement = f"import tiercheck.runtime.priority as p\nprint(p.stand_back(), open({str(group)!r}).read())"
    command = [sys.executable, "-c", statement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, start_new_session=True)
    assert "session nice 10, " in done.stdout
    assert done.stdout.strip().endswith(" nice 10")
    before = group.read_text()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "session" not in done.stdout
    assert done.stdout.endswith(f"{before}\n")  # a session shared with others is not the agent's to lower


def test_the_meeting_place_is_the_users_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.of("n0")
    assert run.root.stat().st_mode & 0o777 == 0o700
    run.root.chmod(0o755)
    with pytest.raises(ConfigurationError, match="can be entered by other users; run 'chmod 700"):
        RunDirectory.of("n0")
    run.root.chmod(0o700)
    (node.folder / "link").symlink_to(run.root)
    monkeypatch.setenv("TIERCHECK_RUN_DIR", str(node.folder / "link"))
    with pytest.raises(ConfigurationError, match="no directory of this user's"):
        RunDirectory.of("n0")
    monkeypatch.setenv("TIERCHECK_RUN_DIR", str(node.folder / ("x" * 90)))
    with pytest.raises(ConfigurationError, match="too long for a socket"):
        RunDirectory.of("n0")
    (node.folder / "file").write_text("")
    monkeypatch.setenv("TIERCHECK_RUN_DIR", str(node.folder / "file" / "run"))
    with pytest.raises(ConfigurationError, match="point TIERCHECK_RUN_DIR at one"):
        RunDirectory.of("n0")


def test_a_job_is_told_the_meeting_place_by_its_own_environment(node: Node) -> None:
    place = node.folder / "elsewhere"
    assert RunDirectory.of("n0", {"TIERCHECK_RUN_DIR": str(place)}).root == place != RunDirectory.of("n0").root


def test_an_agent_lives_for_as_long_as_its_lock(node: Node) -> None:
    run = RunDirectory.of("n0")
    assert not run.agent_lives()
    held = lock_file(run.lock)
    assert held is not None
    assert run.agent_lives()
    assert lock_file(run.lock) is None
    os.close(held)
    assert not run.agent_lives()


def test_the_log_has_an_end(node: Node) -> None:
    run = RunDirectory.of("n0")
    assert run.log_tail() == "(there is no log)"
    run.log.write_text("")
    assert run.log_tail() == "(the log is empty)"
    run.log.write_text("\n".join(str(line) for line in range(100_000)))
    assert run.log_tail(3) == "99997\n99998\n99999"


@pytest.mark.parametrize("name", ["run-7", "r" * 60, "a/b", "é", ".."])
def test_each_neighbours_namespace_is_a_plain_one_of_its_own(name: str) -> None:
    from tiercheck.tiers.shm.namespaces import namespace_path

    made = shm_name("n" * 40, name)
    assert namespace_path(made, Path("/dev/shm")).parent == Path("/dev/shm")
    assert made != shm_name("n" * 40, name + "x")
    assert shm_name("n0", "run-7") == "peer-n0-run-7"
