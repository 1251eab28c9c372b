"""The demo's folder and memory: made for one demo, gone after it, and nobody else's touched."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tiercheck.agent.server.neighbours import kept_for_neighbours, shm_name
from tiercheck.demo import nodes as module
from tiercheck.demo.nodes import memory_bytes
from tiercheck.demo.requirements import check_requirements
from tiercheck.demo.settings import RANKS, TrainingSettings
from tiercheck.demo.workspace import Workspace
from tiercheck.errors import ConfigurationError
from tiercheck.hierarchy import Hierarchy
from tiercheck.tiers.shm.namespaces import namespaces

SETTINGS = TrainingSettings(steps=20, seed=1, width=16, heads=2, layers=1, sequence=8)


def names() -> set[str]:
    return {namespace.name for namespace in namespaces()}


async def fill(workspace: Workspace, nbytes: int) -> None:
    """What trainers and agents would have left: every tier of every rank holds an object."""
    nodes = workspace.nodes
    own, _, durable = nodes.tiers(SETTINGS, workspace.durable)
    for rank in range(RANKS):
        kept = kept_for_neighbours(shm_name(nodes.agent((rank + 1) % RANKS), nodes.name))
        async with Hierarchy.of(own, durable).open(rank=rank) as tiers, kept:
            for driver in (*(tier.driver for tier in tiers.tiers), kept):
                await driver.put(f"object-of-{rank}.safetensors", [b"x" * nbytes])


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, where a file takes whole pages and nothing else, whatever tmp_path's file system does."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tiercheck-test-") as made:
        yield Path(made)


async def test_memory_is_counted_lost_by_node_and_gone_at_the_end(folder: Path) -> None:
    with Workspace(folder / "out", keep=False) as workspace:
        await fill(workspace, 1000)
        nodes = workspace.nodes
        held = await asyncio.to_thread(nodes.held_bytes, workspace.durable)
        assert held == {"shm": 2000, "peer": 2000, "nvme": 2000}, "a shared tier is counted once"
        taken = nodes.occupied_bytes(workspace.durable)
        assert all(nbytes <= taken[tier] < nbytes + (1 << 20) for tier, nbytes in held.items()), (
            "whole pages, of all files"
        )
        nodes.fail([1])
        held = await asyncio.to_thread(nodes.held_bytes, workspace.durable)
        assert held == {"shm": 1000, "peer": 1000, "nvme": 2000}, "a node loses what it kept for its neighbour, too"
        assert {f"{nodes.name}-node0"} <= names()
    assert not any(nodes.name in name for name in names())
    assert not workspace.durable.exists()
    with Workspace(folder / "out", keep=True) as workspace:
        with pytest.raises(ConfigurationError, match=r"another demo runs in .*--output"):
            Workspace(folder / "out", keep=False).__enter__()
        await fill(workspace, 10)
    assert workspace.durable.exists(), "--keep"
    with Workspace(folder / "out", keep=True) as workspace:
        assert not workspace.durable.exists(), "a new demo begins with empty tiers"


@pytest.fixture
def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        return child.pid


async def test_what_a_killed_demo_left_is_removed_by_the_next(tmp_path: Path, dead_pid: int) -> None:
    orphan, living = Workspace(tmp_path / "orphan", keep=False), Workspace(tmp_path / "living", keep=False)
    orphan.nodes.name = f"demo-{dead_pid}-01234567"
    with living:
        await fill(orphan, 10)
        await fill(living, 10)
        with Workspace(tmp_path / "next", keep=False):
            assert f"{living.nodes.name}-node0" in names()
            assert not any(orphan.nodes.name in name for name in names())


def test_too_little_shared_memory_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(tmp_path, keep=False)
    workspace.nodes.check_memory(SETTINGS)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: module.shutil._ntuple_diskusage(1 << 26, 0, 1 << 26))
    with pytest.raises(ConfigurationError, match=r"64.0 MiB free .* need up to .*--shm-size"):
        workspace.nodes.check_memory(SETTINGS)


def test_a_missing_requirement_is_named_with_its_remedy() -> None:
    check_requirements()
    with pytest.raises(ConfigurationError, match=r"needs no_such_module: pip install 'tiercheck\[demo\]'"):
        check_requirements(("json", "no_such_module"))


def test_zero_divides_the_memory_among_the_ranks() -> None:
    large = TrainingSettings(steps=60, seed=1)
    assert memory_bytes(replace(large, zero=0)) > 1.7 * memory_bytes(large)


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot write"), Workspace(tmp_path / "file", keep=False):
        pass
