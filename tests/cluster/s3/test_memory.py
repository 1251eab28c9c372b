"""A put and a get take no more memory than the driver says, however large the object is."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.seaweed import Seaweed

pytestmark = pytest.mark.cluster

OBJECT_BYTES = 256 << 20


def resident_bytes(field: str) -> int:
    """``VmRSS``, or its peak ``VmHWM``."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


async def measured(url: str) -> None:
    """Put and get; prints the budget and the two peaks. Runs in a process of its own."""
    from tiercheck.tiers.s3 import S3Driver
    from tiercheck.tiers.url import TierURL

    payload = memoryview(bytearray(b"\x5a" * OBJECT_BYTES))
    target = memoryview(bytearray(b"\x00" * OBJECT_BYTES))
    small = payload[: 40 << 20]
    async with S3Driver.from_url(TierURL.parse(url)) as driver:
        # What the interpreter and the libraries allocate once is no part of a put's cost.
        await driver.put("warm", [small])
        await driver.get("warm", into=target)
        print(driver.memory_bytes)
        for call in (lambda: driver.put("a", [payload[:1000], payload[1000:]]), lambda: driver.get("a", into=target)):
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
            before = resident_bytes("VmRSS")
            await call()
            print(resident_bytes("VmHWM") - before)
        assert target == payload


@pytest.mark.parametrize("options", ["", "&part=64MiB&parts_in_flight=3"])
def test_memory_stays_within_the_budget(s3_server: Seaweed, monkeypatch: pytest.MonkeyPatch, options: str) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    prefix = f"memory/{secrets.token_hex(4)}"
    url = s3_server.url(s3_server.bucket, prefix) + options
    script = f"import asyncio; from {__name__} import measured; asyncio.run(measured({url!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)
    s3_server.remove(s3_server.bucket, prefix)
    assert done.returncode == 0, done.stderr
    budget, put_peak, get_peak = map(int, done.stdout.split())
    print(f"budget {budget >> 10} KiB, put {put_peak >> 10} KiB, get {get_peak >> 10} KiB")
    assert budget < OBJECT_BYTES / 8
    assert put_peak <= budget
    assert get_peak <= budget
