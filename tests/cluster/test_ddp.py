"""DistributedDataParallel over gloo: two ranks fail, come back, and train on to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster


def test_two_ranks_resume_bit_for_bit(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("ddp_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(worker)]
    done = subprocess.run(
        [*command, str(tmp_path)], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=180
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    for rank in range(2):
        # With a scheduler an iteration ends at the next forward pass, which the last one did not live to see.
        report = json.loads((tmp_path / f"r{rank}.json").read_text())
        assert report == {"recovered": 6, "same": True, "version": 11}
