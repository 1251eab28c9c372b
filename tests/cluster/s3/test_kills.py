"""The S3 server dies by SIGKILL in the middle of a put: the put finishes once it is back, or fails cleanly."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.servers.s3_proxy import Answer, Fault, Request, Reset, S3Proxy
from tests.servers.seaweed import Seaweed
from tiercheck.errors import NotFound, Transient
from tiercheck.tiers.registry import make_driver
from tiercheck.types import PutMode

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]

OLD = random.Random(4).randbytes(11 << 20)
NEW = random.Random(5).randbytes((26 << 20) + 5)


@pytest.fixture(scope="module")
def server() -> Iterator[Seaweed]:
    with Seaweed() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


VICTIM = """
import asyncio, sys
from tiercheck.tiers.registry import make_driver

async def put(url, nbytes):
    sys.stdin.read()
    async with make_driver(url) as driver:
        await driver.put("a", [b"v" * nbytes])

asyncio.run(put(sys.argv[1], int(sys.argv[2])))
"""


class Killer:
    """Kills the server at the ``nth`` request of an operation, before the server has it or once it has answered."""

    def __init__(self, server: Seaweed, operation: str, nth: int, *, answered: bool, back: bool) -> None:
        self._server = server
        self._left = nth
        self._operation = operation
        self._back = back
        self.restarting: threading.Thread | None = None
        self.fault = (
            Fault(self._counted, 1, after=self._after) if answered else Fault(self._counted, 1, before=self._before)
        )

    def _counted(self, request: Request) -> bool:
        if request.operation == self._operation:
            self._left -= 1
        return self._left == 0

    def _before(self, _: Request) -> Request:
        self._kill()
        raise Reset

    def _after(self, _: Request, answer: Answer) -> Answer:
        self._kill()
        raise Reset

    def _kill(self) -> None:
        self._server.kill()
        if self._back:
            self.restarting = threading.Thread(target=self._server.restart)
            self.restarting.start()

    async def settle(self) -> None:
        assert self.restarting is not None
        await asyncio.to_thread(self.restarting.join, 60)


@pytest.mark.parametrize(
    ("operation", "nth", "answered"),
    [
        ("CreateMultipartUpload", 1, True),
        ("UploadPart", 1, False),
        ("UploadPart", 4, True),
        ("CompleteMultipartUpload", 1, False),
        ("CompleteMultipartUpload", 1, True),
    ],
)
async def test_a_put_outlives_its_server(server: Seaweed, operation: str, nth: int, answered: bool) -> None:
    prefix = secrets.token_hex(4)
    with S3Proxy(server) as proxy:
        url = (
            f"s3://{server.bucket}/{prefix}?endpoint_url={proxy.endpoint_url}&part=5MiB&parts_in_flight=3&deadline=60s"
        )
        async with make_driver(url) as driver:
            await driver.put("a", [OLD])
            killer = Killer(server, operation, nth, answered=answered, back=True)
            proxy.add(killer.fault)
            info = await driver.put("a", [NEW[:100], NEW[100:]])
            await killer.settle()
            assert await driver.stat("a") == info
            assert await driver.get("a") == NEW
            assert [(found.key, found.nbytes) async for found in driver.list()] == [(info.key, info.nbytes)]


async def test_a_create_outlives_its_server(server: Seaweed) -> None:
    prefix = secrets.token_hex(4)
    with S3Proxy(server) as proxy:
        async with make_driver(
            f"s3://{server.bucket}/{prefix}?endpoint_url={proxy.endpoint_url}&deadline=60s"
        ) as driver:
            killer = Killer(server, "PutObject", 1, answered=True, back=True)
            proxy.add(killer.fault)
            info = await driver.put("record", [b"mine"], mode=PutMode.CREATE)
            await killer.settle()
            assert await driver.stat("record") == info


@pytest.mark.parametrize(("operation", "nth"), [("UploadPart", 2), ("CompleteMultipartUpload", 1), ("PutObject", 5)])
async def test_a_client_that_is_killed_publishes_nothing(server: Seaweed, operation: str, nth: int) -> None:
    """SIGKILL while a request of its put is on the way. (Four PutObject are the opening's.)"""
    prefix = secrets.token_hex(4)
    with S3Proxy(server) as proxy:
        url = f"s3://{server.bucket}/{prefix}?endpoint_url={proxy.endpoint_url}&part=5MiB&parts_in_flight=2"
        async with make_driver(url) as driver:
            await driver.put("a", [OLD])
        nbytes = 1000 if operation == "PutObject" else len(NEW)
        victim = await asyncio.create_subprocess_exec(
            sys.executable, "-c", VICTIM, url, str(nbytes), stdin=subprocess.PIPE
        )
        left = nth

        def counted(request: Request) -> bool:
            nonlocal left
            left -= request.operation == operation
            return left == 0

        def kill(_: Request) -> Request:
            os.kill(victim.pid, signal.SIGKILL)
            raise Reset

        proxy.add(Fault(counted, 1, before=kill))
        assert victim.stdin is not None
        victim.stdin.close()
        assert await asyncio.wait_for(victim.wait(), 60) == -signal.SIGKILL
        async with make_driver(url) as driver:
            assert [found.key async for found in driver.list()] == ["a"]
            assert await driver.get("a") == OLD
            await driver.put("a", [NEW])
            assert await driver.get("a") == NEW


async def test_a_put_whose_server_stays_away_fails_cleanly(server: Seaweed) -> None:
    prefix = secrets.token_hex(4)
    url = f"s3://{server.bucket}/{prefix}?endpoint_url={{}}&part=5MiB&parts_in_flight=3&deadline=1s"
    with S3Proxy(server) as proxy:
        async with make_driver(url.format(proxy.endpoint_url)) as driver:
            await driver.put("old", [OLD])
            killer = Killer(server, "UploadPart", 3, answered=False, back=False)
            proxy.add(killer.fault)
            for key in ("old", "new"):
                with pytest.raises(Transient, match=r"the connection failed.*\(tried \d+ times\)") as caught:
                    await driver.put(key, [NEW])
                assert caught.value.key == key
    await asyncio.to_thread(server.restart)
    async with make_driver(url.format(server.endpoint_url)) as driver:
        assert [found.key async for found in driver.list()] == ["old"]
        assert await driver.get("old") == OLD
        with pytest.raises(NotFound):
            await driver.stat("new")
        await driver.put("new", [NEW])
        assert await driver.get("new") == NEW
