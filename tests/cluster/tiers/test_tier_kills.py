"""``kill -9`` at every point: what a tier holds is whole, and what the dead left is reclaimed."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tiercheck.errors import NotFound
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.shm.driver import namespaces

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[3]
VICTIM = [sys.executable, "-m", "tests.cluster.tiers.tier_victim"]


@pytest.fixture(params=["shm", "nvme"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "nvme":
        return f"nvme://{tmp_path}/tier"
    return f"shm://{request.getfixturevalue('name')}?size=32MiB"


def start_writer(url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*VICTIM, "write", url], cwd=ROOT, stdout=subprocess.PIPE)


def test_killed_before_every_call(url: str) -> None:
    done = subprocess.run([*VICTIM, "points", url], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50, "the writer makes more calls than this: were they not seen?"


async def test_killed_at_any_moment_while_another_process_reads(url: str) -> None:
    chance = random.Random(4)
    whole = 0
    for _ in range(3):
        writer = start_writer(url)
        try:
            assert writer.stdout is not None
            for _ in range(chance.randint(1, 4)):
                assert writer.stdout.readline().strip().isdigit()
            async with make_driver(url) as reader:
                for _ in range(chance.randint(5, 25)):
                    for key in ("base/put", "base/created", "base/reserved"):
                        try:
                            found = await reader.get(key)
                        except NotFound:
                            continue
                        assert found == bytes([found[0]]) * found.nbytes
                        assert found.nbytes == 300_000 + found[0]
                        whole += 1
        finally:
            writer.kill()
            writer.wait(timeout=10)
            writer.stdout.close()
        async with make_driver(url) as survivor:
            infos = [info async for info in survivor.list()]
            assert {"base/put"} <= {info.key for info in infos}
            for info in infos:
                found = await survivor.get(info.key)
                assert found == bytes([found[0]]) * info.nbytes
            assert (await survivor.usage()).used_bytes == sum(info.nbytes for info in infos)
    assert whole > 30


def test_a_dead_process_does_not_hold_its_namespace(name: str) -> None:
    writer = start_writer(f"shm://{name}?size=32MiB")
    assert writer.stdout is not None
    writer.stdout.readline()
    try:
        assert next(found for found in namespaces() if found.name == name).in_use
    finally:
        os.kill(writer.pid, 9)
        writer.wait(timeout=10)
        writer.stdout.close()
    found = next(found for found in namespaces() if found.name == name)
    assert not found.in_use
    assert found.used_bytes > 0
