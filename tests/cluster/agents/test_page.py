"""The status page of a real agent, looked at in a real browser."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.cluster.agents.test_kills import started
from tests.servers.agents import Node, base, capture, node, open_generation, record
from tests.servers.browser import Browser, browser
from tiercheck.agent.client.remote_mover import RemoteMover

__all__ = ["browser", "node"]

pytestmark = pytest.mark.cluster


async def test_a_browser_shows_versions_and_tiers(node: Node, browser: Browser, tmp_path: Path) -> None:
    job = node.job(node.shm(), batch=5)
    async with started(node) as client, node.open(job) as hierarchy:
        await open_generation(hierarchy)
        mover = RemoteMover(client, hierarchy.first.driver, job)
        await mover.register()
        await capture(hierarchy, base(0), base(10), *(record(version) for version in range(1, 14)))
        await mover.drain(30, closing=True)
        url = client.hello.http
        dom = await asyncio.to_thread(browser.dom, url)
        rows = dict(re.findall(r'<tr data-tier="(\w+)">(.*?)</tr>', dom, re.DOTALL))
        assert set(rows) == {"shm", "nvme"}
        assert "nvme: differentials 6 to 10; base 10, committed" in rows["nvme"]
        assert "shm: differential 13" in rows["shm"]
        assert "nvme: differentials 11 to 13" in rows["nvme"]
        assert ">base 10<" in dom, "the watermark"
        assert f'Node agent <span class="mono">{node.name}</span>' in dom
        assert 'class="lost"' not in dom, "the page's own script reaches the agent"
        picture = await asyncio.to_thread(browser.screenshot, url, tmp_path / "page.png")
        assert picture.stat().st_size > 10_000, "an empty page is smaller"
