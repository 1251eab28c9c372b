"""Whatever arrives, neither side raises, and the server holds no more than it may."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.peer_network import Network
from tiercheck.tiers.peer.client.content import PayloadChunks
from tiercheck.tiers.peer.client.get import Getting
from tiercheck.tiers.peer.client.put import Putting
from tiercheck.tiers.peer.driver import new_transfer
from tiercheck.tiers.peer.messages import (
    HEAD_BYTES_MAX,
    KINDS,
    AbortPut,
    BadFrame,
    BeginGet,
    BeginPut,
    EndGet,
    Failure,
    GetChunk,
    Message,
    PutChunk,
    Stat,
    checksum,
    decode,
    encode,
)
from tiercheck.tiers.peer.server.effects import Reply
from tiercheck.tiers.peer.server.limits import PeerLimits
from tiercheck.tiers.peer.server.protocol import ServerProtocol
from tiercheck.types import PutMode

CHUNK = 1 << 16
MANY = settings(max_examples=100, suppress_health_check=list(HealthCheck))

transfers = st.sampled_from([bytes([n]) * 16 for n in range(4)])
keys = st.sampled_from(["a", "b/c", "", "../up", "/abs", "k" * 600, "\0"])
numbers = st.sampled_from([0, 1, 2, 5, CHUNK, 3 * CHUNK + 1, 1 << 20, 1 << 40, 1 << 62])
FIELDS = {
    "transfer": transfers,
    "namespace": st.sampled_from(["n", "m", "", "x/y"]),
    "key": keys,
    "keys": st.lists(keys, max_size=3).map(tuple),
    "prefix": keys,
    "after": keys,
    "mode": st.sampled_from(["overwrite", "create", "update", "append", ""]),
    "etag": st.sampled_from(["", "1", "2"]),
    "error": st.sampled_from(["NotFound", "SystemExit", "TierError", ""]),
    "message": st.text(max_size=5),
    "whole": st.booleans(),
    "more": st.booleans(),
    "reserving": st.booleans(),
    "limited": st.booleans(),
    "incarnation": st.sampled_from([0, 1, 2]),
    "received": st.binary(max_size=3),
    "entries": st.just(()),
    "credit": st.sampled_from([0, 1, 5, 1 << 20]),
    "chunk_bytes_max": st.just(CHUNK),
    "opening": st.integers(0, 4),
    "chunk_bytes": st.sampled_from([0, 1, CHUNK, CHUNK + 1, 1 << 30]),
}


def messages_of(kind: type[Any]) -> st.SearchStrategy[Message]:
    fields = {item.name: FIELDS.get(item.name, numbers) for item in dataclasses.fields(kind)}
    fields |= {name: st.integers(0, 8) for name in fields if name == "index"}
    return st.builds(kind, **fields)


messages = st.one_of(*[messages_of(kind) for kind in KINDS.values()])
payloads = st.one_of(st.none(), st.sampled_from([b"", b"x", bytes(CHUNK), b"y" * CHUNK, bytes(3 * CHUNK)]))


def with_right_checksum(message: Message, data: bytes | None) -> Message:
    if data is not None and isinstance(message, BeginPut | PutChunk):
        return dataclasses.replace(message, checksum=checksum(data))
    return message


@given(st.binary(max_size=300))
@MANY
def test_any_bytes_are_a_head_or_a_bad_frame(head: bytes) -> None:
    for candidate in (head, head + checksum(head).to_bytes(8, "little")):
        try:
            request_id, message = decode(candidate)
        except BadFrame:
            continue
        assert decode(encode(request_id, message)) == (request_id, message)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=3) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=14) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)


@given(st.integers(0, 80), st.lists(plain, max_size=14))
@MANY
def test_any_well_packed_head_is_checked_field_by_field(kind: int, fields: list[Any]) -> None:
    body = msgpack.packb([1, kind, 7, *fields])
    try:
        _, message = decode(body + checksum(body).to_bytes(8, "little"))
    except BadFrame as bad:
        assert bad.reason in {"malformed", "unknown"}
    else:
        assert type(message) is KINDS[kind]


@given(messages)
@MANY
def test_heads_go_round_and_no_flipped_bit_passes(message: Message) -> None:
    head = encode(42, message)
    assert decode(head) == (42, message)
    assert len(head) <= HEAD_BYTES_MAX
    for position in random.Random(0).sample(range(len(head) * 8), 16):
        flipped = bytearray(head)
        flipped[position // 8] ^= 1 << position % 8
        try:
            decode(flipped)
        except BadFrame as bad:
            assert bad.reason == "corrupt"
        else:
            raise AssertionError("a flipped bit went unnoticed")


def test_deep_nesting_and_great_lengths_are_refused() -> None:
    later = b"\x95" + msgpack.packb([1, 1, 7, "n"])[1:]  # a Hello with a field more
    claims = (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff")
    for body in (b"\x91" * 100_000, *claims, later + b"\x91" * 100_000, *(later + claim for claim in claims)):
        try:
            decode(body + checksum(body).to_bytes(8, "little"))
        except BadFrame as bad:
            assert bad.reason == "malformed"
        else:
            raise AssertionError("taken")


def test_a_head_of_the_next_release_is_read_without_what_is_new() -> None:
    body = msgpack.packb([1, 2, 7, "n", "key", {"new": [1] * 20}])
    assert decode(body + checksum(body).to_bytes(8, "little")) == (7, Stat("n", "key"))


@pytest.mark.parametrize(("begins", "reason"), [([2, 2, 7], "speaks protocol 2, not 1"), ([1, 60, 7], "number 60")])
def test_a_head_of_another_protocol_or_kind_is_refused_in_words(begins: list[int], reason: str) -> None:
    body = msgpack.packb([*begins, "what", {"ever": 1}])
    server = ServerProtocol(PeerLimits(), incarnation=1)
    (reply,) = server.receive(b"p", [body + checksum(body).to_bytes(8, "little")], 0.0)
    assert isinstance(reply, Reply)
    request_id, failure = decode(reply.head)
    assert (request_id, type(failure)) == (7, Failure)
    assert isinstance(failure, Failure)
    assert failure.error == "Unsupported" and reason in failure.message
    assert sum(server.desk.dropped.values()) == 1


class Hostile(Network):
    """A network whose server takes messages that no client of ours sent."""

    def send(self, frames: list[bytes]) -> None:
        self.act_server(self.server.receive(b"9", list(frames), self.now))
        self.check()

    def check(self) -> None:
        server = self.server
        assert server.puts.credit_bytes <= self.limits.in_flight_bytes
        assert len(server.puts.under_way) <= self.limits.transfers
        assert len(server.gets.under_way) <= self.limits.transfers
        assert server.gets.copies.held_bytes <= self.limits.buffer_bytes
        assert len(self.server.puts.outcomes) <= self.limits.outcomes
        assert server.desk.working <= self.limits.calls + self.limits.transfers


LIMITS = PeerLimits(
    chunk_bytes=CHUNK, in_flight_bytes=4 * CHUNK, buffer_bytes=4 * CHUNK, transfers=3, outcomes=5, calls=4, idle_s=5
)


@given(
    st.integers(0, 1 << 32),
    st.lists(st.tuples(messages, payloads, st.booleans(), st.integers(0, 3)), max_size=60),
    st.booleans(),
)
@MANY
def test_hostile_messages_in_any_order(
    seed: int, script: list[tuple[Message, bytes | None, bool, int]], mappable: bool
) -> None:
    network = Hostile(seed, {}, limits=LIMITS, mappable=mappable)
    reserve = network.store.do

    def bounded(task: Any) -> object:
        # The driver refuses what is larger than it is, as a real one does.
        if getattr(task, "nbytes", 0) > 64 * CHUNK:
            return MemoryError()
        if type(task).__name__ in ("Greet", "ListObjects", "UsageOf"):
            return OSError("not in this test")
        return reserve(task)

    network.store.do = bounded  # type: ignore[method-assign]
    for message, data, honest, steps in script:
        if honest:
            message = with_right_checksum(message, data)
        network.send([encode(seed, message)] if data is None else [encode(seed, message), data])
        for _ in range(steps):
            network.step()
            network.check()
    network.send([])
    network.send([b"", b"", b""])
    # An honest client is served all the same, once what was abandoned has gone.
    network.rest(seconds=3 * LIMITS.idle_s)
    assert not network.server.puts.under_way
    assert not network.store.reserved
    data = random.Random(seed).randbytes(5 * CHUNK + 3)
    put = Putting("n", "honest", PayloadChunks([data]), PutMode.OVERWRITE, new_transfer)
    network.settle(network.begin(put))
    assert network.store.objects["honest"][0] == data
    (found,) = network.settle(network.begin(Getting("n", "honest", None, None, new_transfer)))
    assert found == data


@given(st.integers(0, 1 << 32), st.lists(st.tuples(messages, payloads), max_size=40))
@MANY
def test_a_hostile_server_gets_no_wrong_bytes_into_a_client(
    seed: int, script: list[tuple[Message, bytes | None]]
) -> None:
    network = Network(seed, {})
    data = random.Random(seed).randbytes(3 * CHUNK)
    network.store.publish("a", data, PutMode.OVERWRITE)
    number = network.begin(Getting("n", "a", None, None, new_transfer))
    for message, payload in script:
        frames = [encode(1, message)] if payload is None else [encode(1, message), payload]
        network.act_client(network.client.receive(1, list(frames), network.now))
        network.step()
    (result,) = network.settle(number)
    assert result == data


def test_every_abandoned_put_gives_its_memory_back() -> None:
    network = Hostile(1, {}, limits=LIMITS)
    for n in range(20):
        begin = BeginPut(bytes([n]) * 16, "n", "a", 3 * CHUNK, "overwrite", "", CHUNK, 99, 1, 0, 0)
        network.send([encode(n, begin)])
        network.rest()
    assert len(network.store.reserved) == LIMITS.transfers
    network.rest(seconds=2 * LIMITS.idle_s)
    assert not network.store.reserved
    assert network.server.puts.credit_bytes == 0
    assert network.server.desk.dropped["abandoned"] == LIMITS.transfers


def test_frames_are_counted_by_reason() -> None:
    network = Hostile(1, {}, limits=LIMITS)
    transfer = b"t" * 16
    begin = BeginPut(transfer, "n", "a", 2 * CHUNK, "overwrite", "", CHUNK, 9, 1, 0, 0)
    network.send([encode(1, begin)])
    network.rest()
    good = PutChunk(transfer, 0, checksum(bytes(CHUNK)))
    frames = {
        "malformed": [encode(1, dataclasses.replace(good, index=2)), bytes(CHUNK)],
        "truncated": [encode(1, good), bytes(CHUNK - 1)],
        "corrupt": [encode(1, good), b"\1" + bytes(CHUNK - 1)],
        "unasked": [encode(1, dataclasses.replace(good, transfer=b"u" * 16)), bytes(CHUNK)],
        "oversized": [bytes(HEAD_BYTES_MAX + 1)],
    }
    for reason, sent in frames.items():
        network.send(sent)
        assert network.server.desk.dropped == {reason: 1}
        network.server.desk.dropped.clear()
    network.send([encode(1, good), bytes(CHUNK)])
    assert network.server.desk.dropped == {}
    network.send([encode(1, good), bytes(CHUNK)])
    assert network.server.desk.dropped == {"replayed": 1}
    for message in (AbortPut(transfer), EndGet(transfer), GetChunk(transfer, 0, 1)):
        network.send([encode(2, message), b"data where none belongs"])
    assert network.server.desk.dropped["malformed"] == 3
    network.send([encode(3, BeginGet(transfer, "n", "../a", True, 0, 0, CHUNK))])
    assert network.server.desk.dropped["malformed"] == 4


def test_replies_are_small_unless_they_carry_what_was_asked_for() -> None:
    """A small request never draws an answer that is large: nobody can be flooded through the server."""
    network = Network(1, {}, limits=LIMITS)
    effects = network.server.receive(b"9", [encode(1, GetChunk(b"t" * 16, 0, 1))], 0.0)
    assert [type(effect) for effect in effects] == [Reply]
    assert len(effects[0].head) < 64  # type: ignore[union-attr]
