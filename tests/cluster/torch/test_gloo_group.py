"""A group over gloo: a wait that ends names whom it waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

THREE_RANKS = """
import os, socket, sys, time
import torch.distributed as dist
from tiercheck.errors import GroupError, PeerLost, RanksLate
from tiercheck.runtime.group import TorchGroup

with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
children = []
for rank in range(3):  # forked, so that torch is imported once
    children.append(os.fork())
    if children[-1] == 0:
        break
else:
    sys.exit(max(os.waitpid(child, 0)[1] for child in children))
dist.init_process_group("gloo", init_method=sys.argv[2].format(port=port), rank=rank, world_size=3)
store = dist.distributed_c10d._get_default_store()
"""


WORKER = (
    THREE_RANKS
    + """
group = TorchGroup(deadline_s=60)
rank = group.rank
messages = [bytes([each]) * each for each in range(3)]
assert group.all_gather(messages[rank], what="first", deadline_s=30) == messages
assert group.all_gather(b"", what="nothing", deadline_s=30) == [b""] * 3
part = group.among([(0, 2), (1,)])
assert (part.rank, part.world_size) == ((0, 2), (0, 1), (1, 2))[rank]
assert part.all_gather(messages[rank], what="part", deadline_s=30) == ([messages[1]] if rank == 1 else messages[::2])
if rank == 0:
    try:
        part.all_gather(b"", what="late", deadline_s=0.2)
    except RanksLate as error:
        assert error.late == (2,), error
    else:
        raise AssertionError("rank 2 did not come")
try:
    if rank != 1:
        group.all_gather(b"", what="second", deadline_s=1)
except (RanksLate, PeerLost) as error:
    open(os.path.join(sys.argv[1], f"r{rank}"), "w").write(f"{type(error).__name__}|{error.late}|{error}")
else:
    open(os.path.join(sys.argv[1], f"r{rank}"), "w").write("none")
# Rank 1 stays until the others have given up on it: nothing here breaks its connections.
dist.get_rank() == 1 and store.wait(["done0", "done2"])
store.set(f"done{rank}", "1")
os._exit(0)
"""
)


KILLED = """
import os, signal, sys
import torch.distributed as dist
from tiercheck.errors import PeerLost
from tiercheck.runtime.group import TorchGroup

children = []
for rank in range(3):
    children.append(os.fork())
    if children[-1] == 0:
        break
else:
    sys.exit(max(os.waitpid(child, 0)[1] for child in (children[0], children[1])))
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=3)
group = TorchGroup(deadline_s=60)
group.all_gather(b"", what="first", deadline_s=60)
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    group.all_gather(b"", what="second", deadline_s=100)
except PeerLost as error:
    open(os.path.join(sys.argv[1], f"r{rank}"), "w").write(str(error))
os._exit(0)
"""


FIRST_IS_LATE = (
    THREE_RANKS
    + """
group = TorchGroup(deadline_s=60)
if rank:
    began = time.monotonic()
    try:
        group.all_gather(b"", what="second", deadline_s=1)
    except RanksLate as error:
        text = f"{error.late}|{error}|{time.monotonic() - began}"
        open(os.path.join(sys.argv[1], f"r{rank}"), "w").write(text)
else:
    store.wait(["done1", "done2"])
store.set(f"done{rank}", "1")
os._exit(0)
"""
)


NOT_MET = (
    THREE_RANKS
    + """
if rank == 1:
    store.wait(["done0", "done2"])
else:
    try:
        TorchGroup(deadline_s=1)
    except GroupError as error:
        open(os.path.join(sys.argv[1], f"r{rank}"), "w").write(f"{type(error).__name__}|{error}")
store.set(f"done{rank}", "1")
os._exit(0)
"""
)


def run(worker: str, tmp_path: Path, *arguments: str) -> None:
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(worker))
    command = [sys.executable, str(script), str(tmp_path), *arguments]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


def test_a_rank_that_was_killed_is_lost_and_not_late(tmp_path: Path) -> None:
    run(KILLED, tmp_path)
    message = (tmp_path / "r0").read_text()
    assert message.startswith("second: the connection to rank 2 broke: ")
    assert "waited" not in message


def test_gloo_names_the_late_rank(tmp_path: Path) -> None:
    run(WORKER, tmp_path, f"file://{tmp_path}/store")
    kind, late, message = (tmp_path / "r0").read_text().split("|")
    assert (kind, late) == ("RanksLate", "(1,)")
    assert message == "second: rank 0 waited 1 s for rank 1"
    kind, late, message = (tmp_path / "r2").read_text().split("|")
    assert (kind, late) == ("RanksLate", "(0,)")
    assert "its message names it" in message


def test_the_other_ranks_wait_no_longer_for_the_first_than_they_are_told(tmp_path: Path) -> None:
    run(FIRST_IS_LATE, tmp_path, f"file://{tmp_path}/store")
    for rank in (1, 2):
        late, message, waited_s = (tmp_path / f"r{rank}").read_text().split("|")
        assert (late, float(waited_s) < 30) == ("(0,)", True)
        assert message.startswith(f"second: rank {rank} waited 1 s for rank 0, which itself may be waiting for another")


@pytest.mark.parametrize(
    ("store", "named"),
    [("tcp://127.0.0.1:{port}", "rank 1: it"), ("file://{path}/store", "the others: one of them")],
    ids=["a store that names it", "a store that does not"],
)
def test_a_rank_that_does_not_come_to_the_group_is_named_at_the_deadline(
    tmp_path: Path, store: str, named: str
) -> None:
    run(NOT_MET, tmp_path, store.replace("{path}", str(tmp_path)))
    for rank in (0, 2):
        kind, message = (tmp_path / f"r{rank}").read_text().split("|")
        assert kind == "RanksLate", message
        assert message.startswith(f"connecting the ranks: rank {rank} waited 1 s for {named} has died, or has not come")
