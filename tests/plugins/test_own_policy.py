"""A policy from outside the repository: installed from a wheel, named by a trainer, loaded and obeyed by the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.cluster.agents.test_kills import end
from tests.plugins.outside import Outside
from tests.servers.agents import Node, node
from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.keys import CommitKey, parse

__all__ = ["node"]

pytestmark = pytest.mark.cluster

TRAINER = """
import sys, torch
from tiercheck import CheckpointConfig, Hierarchy
from tiercheck.integrations.torch import attach

first, durable, elsewhere = sys.argv[1:]
losses = {2: 1.0, 4: 0.95, 6: 0.5, 8: 0.49, 9: 0.1, 12: 0.1, 14: 0.09}

def train(retention, last):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    config = CheckpointConfig(base_every=2, batch=1, mover="agent", retention=retention, deadline_s=60.0)
    with attach(model, optimizer, Hierarchy.of(first, durable), config=config) as checkpointer:
        for version in range(checkpointer.version + 1, last + 1):
            model(torch.full((2, 4), 1 / version)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.end_iteration()
            if version in losses:
                checkpointer.report(loss=losses[version])
            checkpointer.flush()
        print("generation", checkpointer.generation, "errors", checkpointer.stats.mover.errors)

train("keep_last?n=1; keep_progress?metric=loss&by=0.1", 8)
train("keep_last?n=1; keep_progress?metric=loss&by=0.1", 14)
sys.path.insert(0, elsewhere)  # where the agent, which runs already, does not look
train("own?n=3", 16)
"""


@pytest.fixture
def place(node: Node) -> Iterator[Node]:
    """A node whose agent, started by a trainer, ends with the test."""
    yield node
    if RunDirectory.of(node.name).agent_lives():
        asyncio.run(end(node))


def test_an_agent_obeys_a_policy_that_was_installed_from_outside(outside: Outside, place: Node) -> None:
    """And goes on with it in the next generation; it refuses one that is found where the trainer runs alone."""
    elsewhere = outside.folder / "elsewhere"
    info = elsewhere / "own-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tiercheck.policies]\nown = own:Own\n")
    (elsewhere / "own.py").write_text(
        "from dataclasses import dataclass\nfrom tiercheck.policy.policies import KeepLast\n\n"
        "@dataclass(frozen=True)\nclass Own(KeepLast):\n    pass\n"
    )
    environment = {"TIERCHECK_AGENT_NODE": place.name, "OMP_NUM_THREADS": "1"}
    durable = f"nvme://{place.durable}?survives=rack"
    done = outside.run("-c", TRAINER, place.shm(), durable, str(elsewhere), environment=environment)
    for generation in (1, 2):
        assert f"generation {generation} errors {{}}" in done.stdout, done.stdout
    assert done.returncode != 0
    assert "there is no policy 'own'" in done.stdout, done.stdout
    assert "keep_progress" in done.stdout, "what there is is listed"
    keys = [parse(str(each.relative_to(place.durable))) for each in place.durable.glob("job/commits/*/*")]
    # 9 is no base: it stays with base 8 and the differential that leads to it. 14 is the last base, and 12 no progress.
    assert sorted(key.version for key in keys if isinstance(key, CommitKey)) == [2, 6, 8, 14]
    assert [each.stem for each in place.durable.rglob("differential/*")] == ["000000000009-000000000009"]
