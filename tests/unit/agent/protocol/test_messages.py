"""What crosses between trainer and agent: strict, bounded, and harmless however it is mangled."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from tests.servers.agents import Node, fake_peer, node
from tiercheck import errors, schema
from tiercheck.agent.client import connection
from tiercheck.agent.client.client import connect_agent
from tiercheck.agent.client.remote_mover import RemoteMover
from tiercheck.agent.jobs.replicator import RankReplicator
from tiercheck.agent.protocol import messages
from tiercheck.agent.protocol.messages import (
    PROTOCOLS,
    REQUEST_BYTES_MAX,
    Agree,
    Cycle,
    Drain,
    Hello,
    Look,
    MakeRoom,
    Nudge,
    Pause,
    RankReply,
    RegisterJob,
    Request,
    RoomForBase,
    Status,
    Stop,
    Withdraw,
    pack_answer,
    pack_error,
    pack_request,
    parse_answer,
    parse_request,
)
from tiercheck.agent.protocol.settings import AgentSettings
from tiercheck.agent.server import router
from tiercheck.agent.server.service import Agent
from tiercheck.errors import (
    ConfigurationError,
    DeadlineExceeded,
    JobConflict,
    RanksLate,
    TierCheckError,
    TierError,
    Transient,
)
from tiercheck.format import host_state
from tiercheck.replication.mover import MoverStatus
from tiercheck.types import shown

__all__ = ["node"]

PROTOCOL = PROTOCOLS.newest

REQUESTS = (
    Hello(1.0),
    Status(2.5),
    Stop(1.0, True),
    RegisterJob(1.0, "shm://x", 3, 2),
    Pause(1.0, "shm://x", 3),
    Withdraw(1.0, "shm://x", 3, 2),
    Nudge(0.0, "shm://x", 3, 2),
    Nudge(0.0, "shm://x", 3, 2, hurry_s=10.0),
    Look(1.0, "shm://x", 3, 2),
    MakeRoom(300.0, "shm://x", 3, 2),
    Agree(1.0, "shm://x", 3, 2, 40),
    RoomForBase(300.0, "shm://x", 3, 2, (40, 50), True),
    Drain(300.0, "shm://x", 3, 2, True),
    Cycle(300.0, "shm://x", 3, 2, False),
)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_a_request_comes_across_as_it_is(request_: Request) -> None:
    assert parse_request(pack_request(7, request_)) == (7, request_)


def test_every_request_is_tried() -> None:
    assert {type(each) for each in REQUESTS} == set(messages._REQUESTS.values())


@given(st.sampled_from(REQUESTS), st.data())
def test_a_mangled_request_is_refused_or_is_a_request(request_: Request, data: st.DataObject) -> None:
    frame = bytearray(pack_request(7, request_))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        change = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        if change == "flip":
            frame[at] ^= data.draw(st.integers(1, 255))
        elif change == "cut":
            del frame[at : at + data.draw(st.integers(1, 8))]
        else:
            frame[at:at] = data.draw(st.binary(max_size=8))
        if not frame:
            break
    try:
        _, parsed = parse_request(bytes(frame))
    except ValueError:
        return
    assert isinstance(parsed, Request)


@given(st.binary(max_size=200))
def test_noise_is_no_message(noise: bytes) -> None:
    for parse in (parse_request, parse_answer):
        with pytest.raises(ValueError):
            parse(noise)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([PROTOCOL, 1, "hello"], "length 4"),
        ([PROTOCOL, -1, "hello", {}], r"`int` >= 0 - at `\$\[1\]`"),
        ([PROTOCOL, True, "hello", {}], r"got `bool` - at `\$\[1\]`"),
        ([PROTOCOL, 1, "shutdown", {}], "knows no request 'shutdown'"),
        ([PROTOCOL, 1, ["hello"], {}], "got `array`"),
        ([PROTOCOL, 1, "hello", []], "got `array`"),
        ([PROTOCOL, 1, "hello", {}], "missing required field `deadline_s`"),
        ([PROTOCOL, 1, "hello", {"deadline_s": float("nan")}], "deadline_s"),
        ([PROTOCOL, 1, "hello", {"deadline_s": -1.0}], "deadline_s"),
        ([PROTOCOL, 1, "hello", {"deadline_s": 1e9}], "deadline_s"),
        ([PROTOCOL, 1, "hello", {"deadline_s": True}], "deadline_s"),
        ([PROTOCOL, 1, "look", {"deadline_s": 1.0, "namespace": 3, "rank": 0}], "namespace"),
        ([PROTOCOL, 1, "look", {"deadline_s": 1.0, "namespace": "x" * 20_000, "rank": 0}], "namespace"),
        ([PROTOCOL, 1, "look", {"deadline_s": 1.0, "namespace": "x", "rank": 10**6}], "rank"),
        ([PROTOCOL + 1, 1, "look", {"deadline_s": 1.0}], "speaks protocol 1, and was sent a message of protocol 2"),
    ],
)
def test_what_is_wrong_is_said(parts: list[Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_request(host_state.pack(parts))


def test_a_request_that_is_too_long_is_not_even_read() -> None:
    with pytest.raises(ValueError, match="at most 65536"):
        parse_request(b"\x00" * (REQUEST_BYTES_MAX + 1))
    with pytest.raises(ValueError, match="no packed object"):
        parse_request(msgpack.packb([1])[:1] + b"\xdd\xff\xff\xff\xff")


HELLO = {"deadline_s": 1.0}
LOOK = {"deadline_s": 1.0, "namespace": "shm://x", "rank": 0, "generation": 1}


@pytest.mark.parametrize(
    "parts",
    [
        [PROTOCOL, 1, "hello", {"deadline_s": 10**400}],
        [PROTOCOL, 1, "hello", {"deadline_s": 2**64 - 1}],
        [PROTOCOL, 10**5000, "hello", HELLO],
        [10**5000, 1, "hello", HELLO],
        [[[10**5000]] * 9, 1, "hello", HELLO],
        [PROTOCOL, 1, 10**5000, HELLO],
        [PROTOCOL, 1, "hello", {10**5000: 1.0}],
        [PROTOCOL, 1, "look", {**LOOK, "rank": 10**5000}],
        [PROTOCOL, 1, "look", {**LOOK, "namespace": "shm://\udc80"}],
        [PROTOCOL, 1, "look", {**LOOK, "\udc80": 1}],
        [PROTOCOL, 1, "hello", [[HELLO] * 2000] * 2],
        [PROTOCOL, 1, "x" * 60_000, HELLO],
        [["x" * 30_000] * 2, 1, "hello", HELLO],
    ],
    ids=shown,
)
def test_no_value_of_a_message_is_too_large_to_be_refused(parts: list[Any]) -> None:
    for parse in (parse_request, parse_answer):
        with pytest.raises(ValueError) as refusal:
            parse(hostile(parts))
        assert len(str(refusal.value).encode()) < 300


def hostile(value: object) -> bytes:
    """``value`` as no TierCheck would pack it: with integers of any length, and lone surrogates."""

    def integer(value: int) -> msgpack.ExtType:
        return msgpack.ExtType(host_state.Extension.INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little"))

    return bytes(msgpack.packb(value, default=integer, unicode_errors="surrogatepass"))


@pytest.mark.parametrize("text", [f'{{"linger_s": 1{"0" * 400}}}', '{"linger_s": 1e999}', '{"node": "\\udc80"}'])
def test_no_value_of_a_setting_is_too_large_to_be_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        AgentSettings.from_json(text)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_comes_across_as_its_class(name: str) -> None:
    kind: type[TierCheckError] = getattr(errors, name)
    error = kind("it is so", tier="nvme:///x", key="k") if issubclass(kind, TierError) else kind("it is so")
    answer = parse_answer(pack_error(3, error))
    assert type(answer.error) is kind
    assert (answer.id, str(answer.error)) == (3, str(error))
    with pytest.raises(kind):
        answer.read(RankReply)


def test_an_unknown_error_is_the_nearest_known_one() -> None:
    class Odd(JobConflict):
        pass

    assert type(parse_answer(pack_error(3, Odd("so"))).error) is JobConflict
    late = parse_answer(pack_error(3, RanksLate("late", late=[1, 2]))).error
    assert isinstance(late, RanksLate)
    assert late.late == (1, 2)


@pytest.mark.parametrize("name", ["SystemExit", "Exception", "OSError", "__init__"])
def test_no_other_class_is_ever_made(name: str) -> None:
    for kinds in ([], [name], ["SystemExit", "__class__"]):
        answer = parse_answer(host_state.pack([PROTOCOL, 1, name, {"message": "x", "kinds": kinds}]))
        assert type(answer.error) is TierCheckError
    for malformed in (5, ["JobConflict"]):
        with pytest.raises(ValueError, match="invalid _Envelope"):
            parse_answer(host_state.pack([PROTOCOL, 1, malformed, {"message": "x"}]))


def test_an_answer_is_read_strictly() -> None:
    reply = RankReply(MoverStatus(watermark=3, copied_bytes=7, errors={"nvme": "full"}), "gone", True)
    assert parse_answer(pack_answer(1, reply)).read(RankReply) == reply
    fields = schema.plain(reply)
    fields["status"]["watermark"] = "3"
    with pytest.raises(ValueError, match=r"got `str` - at `\$\.status\.watermark`"):
        parse_answer(host_state.pack([PROTOCOL, 1, None, fields])).read(RankReply)


def test_settings_come_across_strictly(node: Node) -> None:
    settings = AgentSettings(node="n7", keys="/k", memory_bytes=1 << 30, detached=True, linger_s=5.0, fold_threads=2)
    assert AgentSettings.from_json(settings.to_json()) == settings
    for text in ("{", "[]", '{"nodes": "x"}', '{"detached": 1}', '{"linger_s": "5"}'):
        with pytest.raises(ConfigurationError, match="no settings of an agent"):
            AgentSettings.from_json(text)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"node": "a/b"}, "node name"),
        ({"node": ""}, "node name"),
        ({"node": "x" * 41}, "node name"),
        ({"bind": "127.0.0.1:0"}, "binds to an address"),
        ({"bind": "tcp://127.0.0.1:0"}, "needs keys"),
        ({"memory_bytes": -1}, "memory_bytes"),
        ({"http_port": 65536}, "http_port"),
        ({"linger_s": -1.0}, "linger_s"),
        ({"abandon_s": -1.0}, "abandon_s"),
    ],
)
def test_settings_that_cannot_be_are_refused(node: Node, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        AgentSettings(**changes)


def test_fields_with_a_default_may_be_missing() -> None:
    assert schema.read(MoverStatus, {"watermark": None}) == MoverStatus()


async def test_what_makes_no_sense_is_counted_and_stops_nothing(node: Node) -> None:
    async with Agent(node.settings(), make_peer_server=fake_peer) as agent, await connect_agent(node.name) as client:
        context = zmq.asyncio.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(agent.run.address)
        try:
            await stranger.send(b"\xc1")
            await stranger.send_multipart([b"", pack_request(1, Hello(1.0))])
            for number, (parts, kind, reason) in enumerate(
                (
                    ([PROTOCOL, 5, "hello", {}], ConfigurationError, "does not understand"),
                    ([PROTOCOL + 1, 6, "look", {}], ConfigurationError, "speaks protocol 1, and was sent"),
                )
            ):
                await stranger.send(host_state.pack(parts))
                refusal = parse_answer(await asyncio.wait_for(stranger.recv(), 10))
                assert (refusal.id, type(refusal.error)) == (5 + number, kind)
                assert reason in str(refusal.error)
            assert (await client.status())["dropped_messages"] == 4
            await stranger.send(b"x" * (REQUEST_BYTES_MAX + 1))  # the socket itself ends this connection
            assert (await client.status())["dropped_messages"] == 4
        finally:
            context.destroy(linger=0)


async def test_an_agent_turns_away_what_is_too_much(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercheck.agent.server.router.REQUESTS_MAX", 0)
    async with Agent(node.settings(), make_peer_server=fake_peer):
        with pytest.raises(Transient, match="0 requests already"):
            await connect_agent(node.name)


async def test_who_waits_for_nothing_waits_for_the_look_at_the_tiers(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a deadline of 0 s, whoever asks wants to know how it is, and a durable tier takes its time to be listed."""

    async def slow(self: RankReplicator, deadline_s: float, *due: object, patiently: bool) -> None:
        await asyncio.sleep(1.2)  # the listing's own time: longer than a client of this deadline would wait else
        raise DeadlineExceeded(f"2 bases have not reached the durable tier within {deadline_s:g} s")

    monkeypatch.setattr(RankReplicator, "room_for_base", slow)
    job = node.job(node.shm())
    async with (
        Agent(node.settings(), make_peer_server=fake_peer),
        await connect_agent(node.name) as client,
        node.open(job) as hierarchy,
    ):
        mover = RemoteMover(client, hierarchy.first.driver, job)
        await mover.register()
        with pytest.raises(DeadlineExceeded, match="2 bases have not reached the durable tier within 0 s"):
            await mover.room_for_base(0.0)


async def test_a_request_is_broken_off_in_the_end(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: Agent) -> tuple[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Agent, "_status_json", never)
    async with Agent(node.settings(), make_peer_server=fake_peer), await connect_agent(node.name) as client:
        with pytest.raises(DeadlineExceeded, match=r"Status took over 2\.75 s"):
            await client.status(deadline_s=3.0)


@given(st.sampled_from(REQUESTS), st.sampled_from([0.0, 0.1, 1.0, 30.0, 600.0]) | st.floats(0.01, 600.0))
def test_the_agent_speaks_before_its_client_gives_up(request_: Request, deadline_s: float) -> None:
    """And the client gives up at its deadline, if it has one."""
    request = replace(request_, deadline_s=deadline_s)
    waits_s = connection.answer_s_max(request)
    assert router.work_s_max(connection.as_told(request)) < waits_s
    assert waits_s == deadline_s or not deadline_s


def test_a_request_for_which_the_tiers_are_listed_has_time_for_that() -> None:
    for kind in map(type, REQUESTS):
        assert kind.look_s >= (30 if kind in (RoomForBase, Drain, Cycle) else 1), kind


async def test_a_bug_in_a_request_is_told_and_logged(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Agent) -> object:
        raise KeyError("oops")

    async with Agent(node.settings(), make_peer_server=fake_peer), await connect_agent(node.name) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Agent, "snapshot", broken)
            with pytest.raises(TierCheckError, match="Status failed in the agent: KeyError: 'oops'"):
                await client.status()
        assert "Status failed" in caplog.text
        assert (await client.status())["node"] == node.name


async def test_nobody_is_there(node: Node) -> None:
    with pytest.raises(Transient, match=r"no agent of node .* runs here"):
        await connect_agent(node.name)


async def test_an_agent_that_says_nothing_is_waited_for_no_longer_than_allowed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Agent(node.settings(), make_peer_server=fake_peer) as agent, await connect_agent(node.name) as client:
        assert agent._answering is not None
        agent._answering.cancel()
        lives = rf"the agent {node.name!r} of .* \(process {os.getpid()}\) lives, but has not answered Status within"
        with pytest.raises(DeadlineExceeded, match=lives):
            await client.status(deadline_s=0.1)
