"""Doctor: what is installed, and what a URL is found to be."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.tiers.test_registry import install
from tiercheck.diagnostics.doctor import Diagnosis, cautions, examine, installed_drivers
from tiercheck.diagnostics.measure import Point, usage_in_time
from tiercheck.testing.checks import CHECKS
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.posix.nvme import NvmeDriver
from tiercheck.tiers.shm.driver import ShmDriver
from tiercheck.tiers.shm.namespaces import namespaces, remove_namespace
from tiercheck.types import Capabilities, Survives, Usage


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    return site


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{secrets.token_hex(6)}"
    yield name
    MemoryDriver.forget(name)


def broken(site: Path, methods: str) -> None:
    """The scheme ``broken``: the memory driver with ``methods`` in place of its own."""
    name = f"broken_{secrets.token_hex(4)}"  # imported once, so each test needs its own
    module = (
        "from tiercheck import errors\n"
        "from tiercheck.tiers.memory import MemoryDriver\n"
        "from tiercheck.types import PutMode\n\n"
        f"class Broken(MemoryDriver):\n{methods}\n\n"
        "def make(url):\n    return Broken(url.location)\n"
    )
    install(site, name, f"broken = {name}:make", module)


# What is installed.


def test_the_built_in_drivers_are_described() -> None:
    found = {driver.scheme: driver for driver in installed_drivers()}
    assert [*found] == sorted(found)
    memory = found["memory"]
    assert (memory.distribution, memory.missing) == ("tiercheck", "")
    assert memory.capabilities == Capabilities(survives=Survives.NOTHING, mappable=True, conditional_put=True)
    assert memory.description is not None
    assert memory.description.url_form == "memory://[name][?size=2GiB]"
    assert [option.name for option in memory.description.options] == ["size"]
    assert found["shm"].summary.startswith("Objects in this node's shared memory")
    assert found["nvme"].summary.startswith("Objects as files of a directory")
    assert all(driver.version for driver in found.values())
    assert json.loads(json.dumps([driver.to_object() for driver in found.values()]))[0]["scheme"]


def test_a_driver_that_cannot_be_loaded_says_what_is_missing(site: Path) -> None:
    install(site, "acme-cloud", "cloud = acme_cloud:make [aws]", "import a_module_nobody_has")
    install(site, "acme-void", "void = acme_void:make", "pass")
    install(site, "acme-bomb", "bomb = acme_bomb:make", "raise RuntimeError('imported')")
    install(site, "acme-shm", "shm = acme_shm:make", "")
    found = {(driver.scheme, driver.distribution): driver for driver in installed_drivers()}
    cloud = found["cloud", "acme-cloud"]
    assert "a_module_nobody_has" in cloud.missing
    assert "pip install 'acme-cloud[aws]'" in cloud.missing
    assert (cloud.summary, cloud.capabilities, cloud.to_object()["loadable"]) == ("", None, False)
    assert "no such object" in found["void", "acme-void"].missing
    assert "RuntimeError: imported" in found["bomb", "acme-bomb"].missing
    for owner in ("acme-shm", "tiercheck"):
        assert "registered more than once" in found["shm", owner].missing
    assert found["memory", "tiercheck"].missing == ""


# One tier.


async def test_a_good_tier(name: str) -> None:
    found = await examine(f"memory://{name}", measure_s=2)
    assert found.healthy
    assert (found.url, found.distribution) == (f"memory://{name}", "tiercheck")
    assert [check.name for check in found.checks] == [check for check, _ in CHECKS]
    assert all(check.passed and check.message for check in found.checks)
    assert {point.operation for point in found.points} == {"put", "get", "stat", "list"}
    assert json.loads(json.dumps(found.to_object()))["capabilities"]["survives"] == "nothing"
    async with MemoryDriver(name) as driver:
        assert [info async for info in driver.list()] == []


async def test_what_the_tier_holds_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()  # else its facts say who has made it
    async with NvmeDriver(tmp_path / "tier") as driver:
        info = await driver.put("g000001/base/000000000001/commit", [b"precious"])
        found = await examine(f"nvme://{tmp_path}/tier?survives=rack", measure_s=0)
        assert found.healthy
        assert found.capabilities is not None
        assert found.capabilities.survives is Survives.RACK
        assert found.points == ()
        assert found.facts == driver.facts()
        assert [item async for item in driver.list()] == [info]
    files = [Path(folder) / name for folder, _, names in os.walk(tmp_path / "tier") for name in names]
    assert sorted(file.name for file in files) == ["commit", "lock"]


async def test_a_new_namespace_of_shared_memory_goes_again(name: str) -> None:
    assert (await examine(f"shm://{name}?size=64MiB", measure_s=1)).healthy
    assert name not in {info.name for info in namespaces()}
    shm = await examine(f"shm://{name}?size=64MiB", measure_s=0)
    assert any("--shm-size" in problem.advice for problem in shm.problems), "64 MiB are little"


async def test_a_namespace_that_was_there_stays(name: str) -> None:
    async with ShmDriver(name, size=64 << 20) as driver:
        await driver.put("a", [b"precious"])
    try:
        assert (await examine(f"shm://{name}?size=64MiB", measure_s=0)).healthy
        async with ShmDriver(name, size=64 << 20) as driver:
            assert bytes(await driver.get("a")) == b"precious"
            assert [info.key async for info in driver.list()] == ["a"]
    finally:
        remove_namespace(name)


async def test_a_tier_that_is_too_small_says_so(name: str) -> None:
    found = await examine(f"memory://{name}?size=4MiB", measure_s=1)
    failed = [check for check in found.checks if not check.passed]
    assert failed
    assert "CapacityExceeded" in failed[0].message
    assert not found.healthy
    advice = {problem.advice for problem in found.problems if problem.what.startswith(failed[0].name)}
    assert advice == {"make room, or ask for less in the URL"}, "it breaks no word"
    assert found.points == (), "a tier that fails a check is not worth measuring"


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("zz", "looks like scheme://"),
        ("nothing://x", "no driver nothing:// (installed are"),
        ("memory://x?colour=1", "colour"),
        ("nvme://relative", "absolute"),
        ("shm://test-doctor-too-large?size=9999TiB", "does not fit"),
    ],
)
async def test_what_cannot_be_opened_is_a_problem_with_advice(url: str, what: str) -> None:
    found = await examine(url)
    assert not found.healthy
    (problem,) = found.problems
    assert what in problem.what
    assert problem.advice
    assert found.checks == ()
    json.dumps(found.to_object())


@pytest.mark.parametrize("url", ["nothing://me:hunter2@host/x?token=hunter2", "me:hunter2@host/x?token=hunter2"])
async def test_secrets_are_not_shown(url: str) -> None:
    assert "hunter2" not in json.dumps((await examine(url)).to_object())


@pytest.mark.parametrize(
    ("methods", "check", "message"),
    [
        (
            "    async def put(self, key, payload, *, mode=PutMode.OVERWRITE):\n"
            "        return await super().put(key, payload[:1], mode=mode)",
            "round trip",
            "reported|should be there",
        ),
        (
            "    async def stat(self, key):\n        raise KeyError(key)",
            "round trip",
            "a foreign KeyError reached the caller",
        ),
        ("    async def stat(self, key):\n        raise errors.NotFound('gone')", "round trip", "NotFound: gone"),
        (
            "    async def list(self, prefix=''):\n"
            "        found = [item async for item in super().list(prefix)]\n"
            "        for item in reversed(found): yield item",
            "listing",
            "the listing of",
        ),
        (
            "    async def delete(self, keys):\n        await super().delete([k for k in keys if 'gone' not in k])",
            "deleting",
            "no object should be there",
        ),
        (
            "    async def get(self, key, *, range=None, into=None):\n        return await super().get(key, into=into)",
            "ranges",
            r"came back as b'0123456789'",
        ),
        (
            "    async def put(self, key, payload, *, mode=PutMode.OVERWRITE):\n"
            "        return await super().put(key, payload)",
            "conditional puts",
            "1 must win, and 4 did",
        ),
        (
            "    async def put(self, key, payload, *, mode=PutMode.OVERWRITE):\n"
            "        await super().put(key, payload[:1], mode=mode)\n"
            "        return await super().put(key, payload)",
            "whole objects",
            "neither the old nor the new",
        ),
        ("    async def reserve(self, key, nbytes):\n        raise errors.Unsupported('no')", "reservations", "no"),
        (
            "    @property\n    def capabilities(self):\n"
            "        from dataclasses import replace\n"
            "        return replace(super().capabilities, mappable=False)",
            "reservations",
            "should raise Unsupported, and it was done",
        ),
        ("    async def close(self):\n        pass", "closing", "should raise Closed"),
        (
            "    def _find(self, key):\n        return super()._find('/'.join(key.split('/')[-2:]))\n"
            "    async def _enter(self, key=None):\n        self.check_open(key)",
            "keys",
            "unsafe key",
        ),
    ],
)
async def test_a_broken_promise_is_found(site: Path, name: str, methods: str, check: str, message: str) -> None:
    broken(site, methods)
    found = await examine(f"broken://{name}", measure_s=0)
    failed = {each.name: each.message for each in found.checks if not each.passed}
    assert check in failed, found
    assert re.search(message, failed[check]), failed
    assert not found.healthy
    assert any(problem.what.startswith(check) and "certify" in problem.advice for problem in found.problems)


async def test_a_foreign_exception_at_open_is_a_problem(site: Path, name: str) -> None:
    broken(site, "    async def open(self):\n        raise OSError('the disk is on fire')")
    found = await examine(f"broken://{name}")
    assert [problem.what for problem in found.problems] == ["a foreign OSError reached the caller: the disk is on fire"]


async def test_a_tier_that_does_not_open_is_a_problem(site: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercheck.testing.scratch.OPEN_S", 0.05)
    broken(site, "    async def open(self):\n        import asyncio\n        await asyncio.Event().wait()")
    (problem,) = (await examine(f"broken://{name}")).problems
    assert "opening it took over" in problem.what
    assert "server" in problem.advice


async def test_a_tier_too_large_to_be_counted_is_examined_all_the_same(
    site: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercheck.diagnostics.doctor.usage_in_time", lambda driver: usage_in_time(driver, 0.05))
    broken(site, "    async def usage(self):\n        import asyncio\n        await asyncio.Event().wait()")
    found = await examine(f"broken://{name}", measure_s=1)
    assert found.healthy
    assert found.usage is None
    assert all(check.passed for check in found.checks)
    assert {point.operation for point in found.points} == {"put", "get", "stat", "list"}
    assert any("could not say within 20 s what it holds" in problem.what for problem in found.problems)
    json.dumps(found.to_object())


async def test_a_cancelled_examination_leaves_nothing(name: str) -> None:
    for turns in (3, 10, 40, 100):
        examining = asyncio.create_task(examine(f"memory://{name}", measure_s=5))
        for _ in range(turns):
            await asyncio.sleep(0)
        examining.cancel()
        await asyncio.wait({examining})
        async with MemoryDriver(name) as driver:
            assert [info.key async for info in driver.list()] == []


# Cautions.


def point(seconds: float) -> Point:
    return Point("put", 4096, 1, 3, seconds, seconds, 4096 / seconds)


@pytest.mark.parametrize(
    ("capabilities", "usage", "points", "expected"),
    [
        (Capabilities(Survives.PROCESS, conditional_put=True), Usage(0, None), [], []),
        (Capabilities(Survives.PROCESS, conditional_put=True), Usage(0, 64 << 30), [point(0.1)], []),
        (Capabilities(Survives.PROCESS, mappable=True), Usage(0, 64 << 20), [], ["only 64.0 MiB are free"]),
        (Capabilities(Survives.PROCESS), Usage(99 << 30, 100 << 30), [], ["1.0 GiB of 100.0 GiB are free"]),
        (Capabilities(Survives.RACK), Usage(0, None), [], ["it takes no conditional puts"]),
        (Capabilities(Survives.NOTHING), Usage(0, None), [], ["what it holds goes with the process"]),
        (Capabilities(Survives.PROCESS), Usage(0, None), [point(2.5)], ["a put of 4.0 KiB takes 2.5 s"]),
    ],
)
def test_cautions(capabilities: Capabilities, usage: Usage, points: list[Point], expected: list[str]) -> None:
    found = cautions(capabilities, usage, points)
    assert len(found) == len(expected), found
    for problem, what in zip(found, expected, strict=True):
        assert problem.what.startswith(what)
        assert problem.advice
        assert not problem.serious
    assert Diagnosis("x://", problems=tuple(found)).healthy


def test_doctor_imports_no_test_tool() -> None:
    """It is part of the command line, where pytest and hypothesis need not be installed."""
    program = (
        "import sys, tiercheck.diagnostics.doctor; print({'pytest', 'hypothesis', 'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
