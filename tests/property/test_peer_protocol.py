"""Both sides of the peer protocol over a network that loses, flips, replays, cuts and restarts."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.peer_network import Network
from tiercheck.errors import AlreadyExists, NotFound, PreconditionFailed, TierError, Transient
from tiercheck.tiers.peer.client.content import PayloadChunks
from tiercheck.tiers.peer.client.get import Getting
from tiercheck.tiers.peer.client.protocol import Call
from tiercheck.tiers.peer.client.put import Putting
from tiercheck.tiers.peer.driver import new_transfer, reader
from tiercheck.tiers.peer.messages import Delete, Done
from tiercheck.tiers.peer.server.limits import PeerLimits
from tiercheck.types import ByteRange, ObjectInfo, PutMode

CHUNK = 1 << 16
SLOW = settings(max_examples=60, suppress_health_check=list(HealthCheck))

seeds = st.integers(0, 1 << 32)
TROUBLE = ("cut", "swallow", "flip", "replay")
chances = st.fixed_dictionaries({name: st.sampled_from([0.0, 0.0, 0.02, 0.1]) for name in TROUBLE})
sizes = st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 12 * CHUNK + 77])


def content(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def putting(key: str, data: bytes, mode: PutMode = PutMode.OVERWRITE) -> Putting:
    third = len(data) // 3
    return Putting("n", key, PayloadChunks([data[:third], data[third:]]), mode, new_transfer)


@given(seeds, chances, sizes, st.integers(1, 3))
@SLOW
def test_a_put_is_stored_once_and_whole(seed: int, trouble: dict[str, float], nbytes: int, connections: int) -> None:
    network = Network(seed, trouble, connections=connections)
    data = content(seed, nbytes)
    (result,) = network.settle(network.begin(putting("a", data)))
    assert isinstance(result, ObjectInfo), result
    assert network.store.log == [("a", data)]
    assert result.etag == network.store.objects["a"][1]
    network.rest()
    assert network.store.log == [("a", data)], "what comes late or again is not stored again"
    assert network.client.caller.in_flight_bytes == 0
    assert network.server.puts.credit_bytes == 0


@given(seeds, chances, sizes, st.integers(1, 3), st.booleans())
@SLOW
def test_a_get_is_whole(seed: int, trouble: dict[str, float], nbytes: int, connections: int, mappable: bool) -> None:
    network = Network(seed, trouble, connections=connections, mappable=mappable)
    data = content(seed, nbytes)
    network.store.publish("a", data, PutMode.OVERWRITE)
    into = bytearray(nbytes + 3)
    wanted = ByteRange(nbytes // 3, nbytes)
    whole = network.begin(Getting("n", "a", None, None, new_transfer))
    part = network.begin(Getting("n", "a", wanted, memoryview(into), new_transfer))
    results = network.settle(whole, part)
    assert results == [data, data[wanted.start :]]
    assert into == data[wanted.start :] + bytes(nbytes + 3 - len(wanted))
    network.rest(seconds=2 * network.limits.idle_s)
    assert network.client.caller.in_flight_bytes == 0
    assert not network.server.gets.under_way
    assert network.server.gets.copies.held_bytes == 0


@given(seeds, chances, sizes, st.booleans())
@SLOW
def test_a_get_is_of_one_put_while_the_object_is_replaced(
    seed: int, trouble: dict[str, float], nbytes: int, mappable: bool
) -> None:
    network = Network(seed, {**trouble, "restart": 0.01}, mappable=mappable)
    versions = [content(seed + n, nbytes + n) for n in range(4)]
    network.store.publish("a", versions[0], PutMode.OVERWRITE)
    get = network.begin(Getting("n", "a", None, None, new_transfer))
    for version in versions[1:]:
        for _ in range(20):
            network.step()
        network.store.publish("a", version, PutMode.OVERWRITE)
    (result,) = network.settle(get)
    assert result in versions


@given(seeds, chances, sizes, st.integers(1, 2))
@SLOW
def test_one_of_two_creators_wins_and_knows_it(
    seed: int, trouble: dict[str, float], nbytes: int, connections: int
) -> None:
    network = Network(seed, trouble, connections=connections)
    contents = [content(seed + n, nbytes) + b"%d" % n for n in range(2)]
    results = network.settle(*[network.begin(putting("a", data, PutMode.CREATE)) for data in contents])
    network.rest()
    assert len(network.store.log) == 1
    won = contents.index(network.store.log[0][1])
    assert isinstance(results[won], ObjectInfo)
    assert isinstance(results[1 - won], AlreadyExists)


@given(seeds, chances, sizes, st.sampled_from([0.005, 0.02, 0.05]))
@SLOW
def test_a_restarted_server_never_makes_a_condition_lie(
    seed: int, trouble: dict[str, float], nbytes: int, restart: float
) -> None:
    """The answer is the truth, or says that it is not known; it is never the opposite."""
    network = Network(seed, {**trouble, "restart": restart})
    first = network.store.publish("a", b"first", PutMode.OVERWRITE)
    data = content(seed, nbytes) + b"."
    (result,) = network.settle(network.begin(putting("a", data, PutMode.UPDATE(first.etag))))
    network.rest()
    stored = [entry for entry in network.store.log if entry[1] == data]
    assert len(stored) <= 1
    if isinstance(result, ObjectInfo):
        assert stored
    elif isinstance(result, PreconditionFailed):
        assert not stored, "told to have lost, and won"
    else:
        assert isinstance(result, Transient), result


@given(seeds, chances, sizes, st.sampled_from([0.005, 0.02]))
@SLOW
def test_an_overwrite_outlives_restarts(seed: int, trouble: dict[str, float], nbytes: int, restart: float) -> None:
    network = Network(seed, {**trouble, "restart": restart})
    data = content(seed, nbytes)
    (result,) = network.settle(network.begin(putting("a", data)))
    assert isinstance(result, ObjectInfo), result
    network.rest()
    assert set(network.store.log) == {("a", data)}


@given(seeds, chances, sizes, st.sampled_from([0, 1, 2, 3, 5, 10, 30, 120]), st.integers(1, 3))
@SLOW
def test_a_cancelled_put_has_no_effect_to_come(
    seed: int, trouble: dict[str, float], nbytes: int, steps: int, connections: int
) -> None:
    # A replay of a message of the cancelled put must not bring it back, either.
    network = Network(seed, trouble, connections=connections)
    number = network.begin(putting("a", content(seed, nbytes) + b"cancelled"))
    for _ in range(steps):
        network.step()
    network.act_client(network.client.cancel(number, network.now))
    network.settle(number)
    network.chances = {}
    (second,) = network.settle(network.begin(putting("a", b"later")))
    assert isinstance(second, ObjectInfo)
    network.rest(seconds=2 * network.limits.idle_s)
    assert network.store.objects["a"][0] == b"later"
    assert not network.store.reserved, "what was reserved for it is dropped"
    assert network.server.puts.credit_bytes == 0
    assert network.client.caller.in_flight_bytes == 0


@given(seeds, chances)
@SLOW
def test_many_at_once_share_the_credit(seed: int, trouble: dict[str, float]) -> None:
    limits = PeerLimits(chunk_bytes=CHUNK, in_flight_bytes=3 * CHUNK, idle_s=60)
    network = Network(seed, trouble, connections=2, limits=limits, credit_bytes=2 * CHUNK)
    contents = {f"k{n}": content(seed + n, n * CHUNK + n) for n in range(6)}
    results = network.settle(*[network.begin(putting(key, data)) for key, data in contents.items()], steps=1500)
    assert all(isinstance(result, ObjectInfo) for result in results), results
    gets = [network.begin(Getting("n", key, None, None, new_transfer)) for key in contents]
    assert network.settle(*gets, steps=1500) == list(contents.values())


@given(seeds, chances)
@SLOW
def test_a_repeated_delete_deletes_once(seed: int, trouble: dict[str, float]) -> None:
    network = Network(seed, trouble)
    network.store.publish("a", b"old", PutMode.OVERWRITE)
    number = network.begin(Call(Delete(new_transfer(), "n", ("a",)), reader(Done)))
    while "a" in network.store.objects:
        network.step()
    network.store.publish("a", b"new", PutMode.CREATE)
    (result,) = network.settle(number)
    network.rest()
    assert isinstance(result, Done)
    assert network.store.objects["a"][0] == b"new"


@given(seeds, sizes)
@SLOW
def test_what_the_server_refuses_is_raised(seed: int, nbytes: int) -> None:
    network = Network(seed, {})
    (missing,) = network.settle(network.begin(Getting("n", "absent", None, None, new_transfer)))
    assert isinstance(missing, NotFound)
    network.store.publish("a", b"0123", PutMode.OVERWRITE)
    (past,) = network.settle(network.begin(Getting("n", "a", ByteRange(0, 5 + nbytes), None, new_transfer)))
    assert isinstance(past, ValueError)


def test_a_peer_that_is_silent_is_named_when_the_deadline_passes() -> None:
    network = Network(1, {"swallow": 1.0}, deadline_s=30.0)
    number = network.begin(putting("a", bytes(5 * CHUNK)))
    while number not in network.results:
        for pipe in network.pipes.values():
            pipe.up.clear()
            pipe.down.clear()
        network.step()
    result = network.results[number]
    assert isinstance(result, Transient)
    assert isinstance(result, TierError)
    assert "simulated:1" in str(result)
    assert "30 s" in str(result)
    assert 30 <= network.now < 32


def test_a_put_whose_chunks_break_every_connection_ends_with_its_deadline() -> None:
    network = Network(1, {}, deadline_s=3.0)
    number = network.begin(putting("a", bytes(5 * CHUNK)))
    while number not in network.results:
        if any(len(frames) > 1 for pipe in network.pipes.values() for frames in pipe.up):
            network.cut()
        network.step()
        network.act_client(network.client.tick(network.now))
        assert network.now < 4, "credit that leads to nothing counts as progress"
    assert isinstance(network.results[number], Transient)


@pytest.mark.parametrize("is_get", [True, False])
def test_a_short_transfer_does_not_wait_for_the_end_of_a_long_one(is_get: bool) -> None:
    network = Network(1, {}, credit_bytes=2 * CHUNK)
    sizes = {"long": 100 * CHUNK, "short": 4 * CHUNK}
    for key, nbytes in sizes.items():
        network.store.publish(key, bytes(nbytes), PutMode.OVERWRITE)
    long, short = (
        network.begin(Getting("n", key, None, None, new_transfer) if is_get else putting(key, bytes(nbytes)))
        for key, nbytes in sizes.items()
    )
    network.settle(short)
    assert long not in network.results
    network.settle(long)


def test_an_abort_that_overtakes_its_put_ends_it() -> None:
    network = Network(1, {}, connections=2)
    number = network.begin(putting("a", b"cancelled"))
    network.act_client(network.client.cancel(number, network.now))
    beginning, aborting = sorted(network.pipes.items(), key=lambda item: -len(item[1].up[0][0]))
    network.arrive(*aborting)
    network.arrive(*beginning)
    network.rest()
    assert number in network.results
    assert network.store.log == []
