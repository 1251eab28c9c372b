"""Jobs on a real GPU under DDP, FSDP2 and DeepSpeed, each a process of its own: killed, and resumed bit for bit.

One GPU has one rank: that ranks of several GPUs find each other's state is what the tests on CPUs show.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.framework_job import JOBS, KILLED_IN, LAST
from tests.gpu.machine import need_torch_on_gpu
from tiercheck.tiers.shm.namespaces import remove_namespace

need_torch_on_gpu()

pytestmark = pytest.mark.gpu

SECONDS_MAX = 240.0
ON_THEIR_WAY = 2
"""Versions whose records may not have arrived on the host when the process is killed."""
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "DS_ACCELERATOR": "cuda",
    "LOCAL_RANK": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def lived(job: str, directory: Path, name: str, life: str) -> int:
    log = directory / f"{life}.log"
    command = [sys.executable, "-m", "tests.gpu.framework_job", job, str(directory), name, life]
    with log.open("wb") as output:
        ended = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            timeout=SECONDS_MAX,
            check=False,
        )
    return ended.returncode


def told(directory: Path, life: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / f"{life}.json").read_text())
    return found


@pytest.mark.parametrize("job", JOBS)
def test_a_job_is_killed_and_resumes_bit_for_bit(job: str, tmp_path: Path) -> None:
    if job.startswith("zero"):
        pytest.importorskip("deepspeed", reason="needs DeepSpeed")
    name = f"gpu-{uuid.uuid4().hex[:8]}"
    try:
        for life, code in (("whole", 0), ("killed", -signal.SIGKILL), ("resumed", 0)):
            ended = lived(job, tmp_path, name, life)
            assert ended == code, (tmp_path / f"{life}.log").read_text()[-4000:]
    finally:
        remove_namespace(name)
    whole, resumed = told(tmp_path, "whole"), told(tmp_path, "resumed")
    assert resumed["fidelity"] == "exact", resumed["notes"]
    assert KILLED_IN - ON_THEIR_WAY <= resumed["recovered"] <= KILLED_IN
    assert resumed["losses"] == {
        str(version): whole["losses"][str(version)] for version in range(resumed["recovered"] + 1, LAST + 1)
    }
    assert resumed["state"] == whole["state"]
