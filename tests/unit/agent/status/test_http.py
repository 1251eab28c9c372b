"""The agent's web server and what it shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tiercheck.agent.jobs.states import State
from tiercheck.agent.status.http import HEAD_BYTES_MAX, HttpServer
from tiercheck.agent.status.metrics import metrics_text
from tiercheck.agent.status.page import render
from tiercheck.agent.status.snapshot import AgentSnapshot, PeerSnapshot, RankSnapshot, TierSnapshot, Versions
from tiercheck.agent.status.throughput import Throughput
from tiercheck.replication.mover import MoverStatus

RANK = RankSnapshot(
    namespace="shm://run",
    rank=3,
    world_size=4,
    generation=2,
    state=State.MOVING,
    silent_s=1.0,
    mover=MoverStatus(
        watermark=40,
        undrained_bases=1,
        copied_bytes=5 << 20,
        copied_objects=6,
        slow_views_s={"s3": 130.0},
        reached_versions={"shm": 42, "s3": 35},
    ),
    conflict=None,
    bytes_per_s=1024.0,
    history=(0.0, 2.0, 1.0),
    tiers=(
        TierSnapshot("shm", "shm://run", "process", Versions((40, 50), (), ((41, 41), (42, 42)), 4, 100)),
        TierSnapshot("s3", "s3://bucket", "site", Versions((40,), (40,), ((36, 40), (41, 45)), 4, 100)),
    ),
)
AGENT = AgentSnapshot(
    node="n0",
    version="1.2.3",
    pid=77,
    http="http://127.0.0.1:9464/",
    detached=True,
    ending=False,
    uptime_s=3700.0,
    resident_bytes=30 << 20,
    dropped_messages=2,
    ranks=(RANK,),
    unreadable={},
    peer=PeerSnapshot("127.0.0.1:7070", True, {"bytes_put": 2048, "clients": 1}, {"truncated": 4}),
)


async def hello() -> tuple[str, str]:
    return "text/plain", "hello"


async def broken() -> tuple[str, str]:
    raise KeyError("secret")


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    made = HttpServer({"/": hello, "/broken": broken})
    await made.start()
    yield made
    await made.close()


async def ask(server: HttpServer, request: str | bytes, *, host: str | None = "own") -> tuple[str, str]:
    """Status line and headers; body. ``request``: the first line alone, or all of it as bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        if isinstance(request, str):
            name = f"Host: 127.0.0.1:{server.port}\r\n" if host == "own" else f"Host: {host}\r\n" if host else ""
            request = f"{request}\r\n{name}\r\n".encode()
        writer.write(request)
        answer = (await asyncio.wait_for(reader.read(), 10)).decode()
    finally:
        writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return head, body


async def test_a_page_is_had(server: HttpServer) -> None:
    head, body = await ask(server, "GET / HTTP/1.1")
    assert head.startswith("HTTP/1.1 200 OK")
    assert body == "hello"
    assert "default-src 'none'" in head
    assert (await ask(server, "GET /?x=1 HTTP/1.0"))[1] == "hello"
    head, body = await ask(server, "HEAD / HTTP/1.1")
    assert "Content-Length: 5" in head
    assert body == ""


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("POST / HTTP/1.1", 405),
        ("DELETE / HTTP/1.1", 405),
        ("GET /../etc/passwd HTTP/1.1", 404),
        ("GET /nothing HTTP/1.1", 404),
        ("GET /broken HTTP/1.1", 500),
        ("GET / HTTP/2", 400),
        ("GET /", 400),
        ("nonsense", 400),
    ],
)
async def test_whatever_else_is_refused(server: HttpServer, request_: str, status: int) -> None:
    head, body = await ask(server, request_)
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert "secret" not in body


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost", "127.0.0.1.evil:80", None])
async def test_another_name_for_it_is_refused(server: HttpServer, host: str | None) -> None:
    assert (await ask(server, "GET / HTTP/1.1", host=host))[0].startswith("HTTP/1.1 403 ")


async def test_it_answers_to_localhost_too(server: HttpServer) -> None:
    assert (await ask(server, "GET / HTTP/1.1", host=f"localhost:{server.port}"))[1] == "hello"


async def test_two_names_at_once_are_refused(server: HttpServer) -> None:
    own = f"Host: 127.0.0.1:{server.port}\r\n"
    head, _ = await ask(server, f"GET / HTTP/1.1\r\n{own}Host: evil\r\n\r\n".encode())
    assert head.startswith("HTTP/1.1 403 ")


async def test_a_request_is_bounded(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    head, _ = await ask(server, b"GET / HTTP/1.1\r\nX: " + b"x" * HEAD_BYTES_MAX + b"\r\n\r\n")
    assert head.startswith("HTTP/1.1 431 ")
    monkeypatch.setattr("tiercheck.agent.status.http.REQUEST_S_MAX", 0.05)
    assert (await ask(server, b"GET / HTTP/1.1\r\n"))[0].startswith("HTTP/1.1 408 ")
    assert (await ask(server, "GET / HTTP/1.1"))[1] == "hello"


async def test_connections_are_bounded(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercheck.agent.status.http.CONNECTIONS_MAX", 1)
    _, waiting = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        answer = await ask(server, "GET / HTTP/1.1")
    except ConnectionError:
        answer = ("", "")
    assert answer == ("", ""), "the connection was not just closed"
    waiting.close()


def test_the_page_shows_versions_and_tiers() -> None:
    page = render(AGENT)
    for text in (
        "Rank 3",
        "base 40",
        "s3: base 40, committed",
        "shm: base 50",
        "differentials 41 to 45",
        "127.0.0.1:70",
    ):
        assert text in page or text.replace("s3: ", "") in page, text
    assert "http" not in page.replace("http-equiv", ""), "it needs nothing from elsewhere"


def test_the_page_escapes_what_comes_from_outside() -> None:
    evil = "<script>alert(1)</script>"
    rank = replace(
        RANK,
        namespace=evil,
        conflict=evil,
        mover=replace(RANK.mover, errors={evil: evil}),
        tiers=tuple(replace(tier, name=evil, url=evil) for tier in RANK.tiers),
    )
    snapshot = replace(AGENT, node=evil, ranks=(rank,), unreadable={evil: evil}, version=evil)
    snapshot = replace(snapshot, peer=PeerSnapshot(evil, False, {evil: 1}, {evil: 2}))
    assert evil not in render(snapshot)


def test_the_page_bounds_what_it_shows() -> None:
    long_ago = Versions(tuple(range(0, 100_000, 100)), (), ((99_990, 99_999),), 1, 1)
    page = render(replace(AGENT, ranks=(replace(RANK, tiers=(TierSnapshot("shm", "shm://x", "process", long_ago),)),)))
    assert page.count("<td") < 80
    assert "base 99900" in page
    closed = replace(RANK, tiers=(TierSnapshot("shm", "shm://x"),), state=State.OPENING)
    assert "not open" in render(replace(AGENT, ranks=(closed,)))
    empty = replace(RANK, tiers=(TierSnapshot("shm", "shm://x", "process", Versions()),))
    assert "no version yet" in render(replace(AGENT, ranks=(empty,)))
    assert "No rank has registered" in render(replace(AGENT, ranks=(), peer=None))


def test_a_tier_that_was_not_listed_for_long_shows() -> None:
    page = render(AGENT)
    assert "<dt>s3 last listed</dt><dd>2 min ago</dd>" in page
    fresh = replace(RANK, mover=replace(RANK.mover, slow_views_s={}))
    assert "last listed" not in render(replace(AGENT, ranks=(fresh,)))


def test_metrics_are_what_prometheus_reads() -> None:
    kind, text = metrics_text(AGENT)
    assert kind.startswith("text/plain")
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    rank = (("namespace", "shm://run"), ("rank", "3"))
    assert samples["tiercheck_rank_watermark_version", rank] == 40
    assert samples["tiercheck_rank_differing_version", rank] == -1
    assert samples["tiercheck_rank_copied_bytes_total", rank] == 5 << 20
    assert samples["tiercheck_rank_state", (*rank, ("state", "moving"))] == 1
    assert samples["tiercheck_rank_state", (*rank, ("state", "paused"))] == 0
    assert samples["tiercheck_rank_lag_versions", (*rank, ("tier", "s3"))] == 7
    assert samples["tiercheck_rank_slow_view_seconds", (*rank, ("tier", "s3"))] == 130.0
    assert samples["tiercheck_peer_bytes_put", ()] == 2048
    assert samples["tiercheck_peer_dropped_frames_total", (("reason", "truncated"),)] == 4
    assert samples["tiercheck_agent_dropped_messages_total", ()] == 2


def test_a_snapshot_is_plain() -> None:
    assert json.loads(msgspec.json.encode(AGENT))["ranks"][0]["state"] == "moving"


def test_throughput_is_of_late() -> None:
    meter = Throughput()
    assert meter.rate(0.0) == 0.0
    for second in range(200):
        meter.note(float(second), 100 * min(second, 150))
    assert meter.rate(155.0) == pytest.approx(0.0, abs=60)
    assert meter.rate(199.0) == 0.0
    assert len(meter.history()) == 119
    assert max(meter.history()) == 100.0
    meter.note(199.0, 10**9)
    assert meter.rate(199.0) == 0.0, "two counts at one time make no rate"


@pytest.mark.parametrize(
    ("errors", "tiers"),
    [({}, 0), ({"s3": "no", "nvme": "no"}, 2), ({"agent": "cannot open"}, 1), ({"policies": "no", "mover": "no"}, 0)],
)
def test_only_tiers_are_tiers_in_trouble(errors: dict[str, str], tiers: int) -> None:
    rank = replace(RANK, mover=replace(RANK.mover, errors=errors))
    families = text_string_to_metric_families(metrics_text(replace(AGENT, ranks=(rank,)))[1])
    (found,) = [each for each in families if each.name == "tiercheck_rank_tiers_in_trouble"]
    assert [sample.value for sample in found.samples] == [tiers]
