"""What a sender is told where an answer was lost: the truth, or that nobody knows; and who holds credit meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.property.peer_network import Network
from tiercheck.errors import AlreadyExists, CapacityExceeded, Corruption, Transient, Unauthorized
from tiercheck.tiers.peer.client.content import PayloadChunks
from tiercheck.tiers.peer.client.get import Getting
from tiercheck.tiers.peer.client.protocol import ClientProtocol, ClientSettings, Effect, Finish, Send
from tiercheck.tiers.peer.client.put import Putting
from tiercheck.tiers.peer.driver import new_transfer
from tiercheck.tiers.peer.messages import (
    BeginPut,
    Data,
    Done,
    Forgotten,
    GetChunk,
    Message,
    PutChunk,
    PutState,
    checksum,
    decode,
    encode,
)
from tiercheck.tiers.peer.server.effects import PublishMemory, Reply, ReserveMemory, StoreWhole, Task
from tiercheck.tiers.peer.server.limits import PeerLimits
from tiercheck.tiers.peer.server.put import SILENT_S
from tiercheck.types import Buffer, ObjectInfo, PutMode

CHUNK = 1 << 16
LIMITS = PeerLimits(chunk_bytes=CHUNK, in_flight_bytes=8 * CHUNK, idle_s=60)


def putting(data: bytes, mode: PutMode = PutMode.OVERWRITE, key: str = "a") -> Putting:
    return Putting("n", key, PayloadChunks([data]), mode, new_transfer)


def step_until_stored(network: Network) -> None:
    while not network.store.log:
        network.step()


@pytest.mark.parametrize("nbytes", [CHUNK // 2, 4 * CHUNK])
@pytest.mark.parametrize("error", [CapacityExceeded("full"), Corruption("broken"), Unauthorized("no more")])
def test_what_was_stored_before_a_restart_is_not_denied_after_it(nbytes: int, error: Exception) -> None:
    network = Network(1, {})
    number = network.begin(putting(bytes(nbytes)))
    step_until_stored(network)
    honest = network.store.do

    def failing(task: Task) -> object:
        return error if isinstance(task, StoreWhole | ReserveMemory | PublishMemory) else honest(task)

    network.store.do = failing  # type: ignore[method-assign]
    network.restart()
    (result,) = network.settle(number)
    assert isinstance(result, Transient), result
    assert "may have been stored" in str(result)
    (result,) = network.settle(network.begin(putting(bytes(nbytes), key="b")))
    assert type(result) is type(error), "of another put it is the truth"


@pytest.mark.parametrize("nbytes", [CHUNK // 2, 4 * CHUNK])
def test_who_is_let_in_no_more_may_have_stored(nbytes: int) -> None:
    network = Network(1, {})
    number = network.begin(putting(bytes(nbytes)))
    step_until_stored(network)
    for link in list(network.pipes):
        del network.pipes[link]
        network.act_client(network.client.disconnected(link, network.now))
    network.act_client(network.client.refused("another key", network.now))
    assert isinstance(network.results[number], Transient)
    later = network.begin(putting(b"later"))
    assert isinstance(network.results[later], Unauthorized)


@pytest.mark.parametrize("mode", [PutMode.CREATE, PutMode.OVERWRITE])
@pytest.mark.parametrize("nbytes", [CHUNK // 2, 4 * CHUNK])
def test_a_repeated_put_is_not_done_again_where_its_outcome_was_in_doubt(nbytes: int, mode: PutMode) -> None:
    """The driver stores the object and then says Transient, as one may whose own answer was lost."""
    network = Network(1, {})
    honest = network.store.do
    published = 0

    def doubtful(task: Task) -> object:
        nonlocal published
        outcome = honest(task)
        if isinstance(task, StoreWhole | PublishMemory):
            published += 1
            assert not isinstance(outcome, AlreadyExists), "the put met itself"
            return Transient("no answer")
        return outcome

    network.store.do = doubtful  # type: ignore[method-assign]
    number = network.begin(putting(bytes(nbytes), mode))
    step_until_stored(network)
    for pipe in network.pipes.values():
        pipe.down.clear()
    (result,) = network.settle(number)
    assert isinstance(result, Transient)
    assert published == 1


def small_put(transfer: bytes, age_ms: int = 0) -> list[bytes]:
    begin = BeginPut(transfer, "n", "a", 1, "overwrite", "", CHUNK, 1, 1, age_ms, checksum(b"x"))
    return [encode(1, begin), b"x"]


def test_a_repetition_that_lay_queued_is_not_taken_for_a_new_put() -> None:
    """Its age says how old it was when it was sent; by now its outcome was crowded out."""
    network = Network(1, {}, limits=PeerLimits(chunk_bytes=CHUNK, in_flight_bytes=8 * CHUNK, outcomes=2))
    first = b"f" * 16

    def send(frames: list[bytes]) -> list[object]:
        link = next(iter(network.pipes))
        answers = network.pipes[link].down
        answers.clear()
        network.act_server(network.server.receive(b"%d" % link, list(frames), network.now))
        while network.tasks:
            network.finish_task()
        return [decode(frames[0])[1] for frames in answers]

    assert [type(answer) for answer in send(small_put(first))] == [Done]
    for n in range(4):
        send(small_put(bytes([n]) * 16))
    # Sent 2 s after the first, and under way for 20.
    network.now += 20
    assert [type(answer) for answer in send(small_put(first, age_ms=2000))] == [Forgotten]
    assert len(network.store.log) == 5


def hold_all_credit(network: Network, count: int) -> list[bytes]:
    """Puts that begin, get all the credit there is, and are never heard of again."""
    link = b"%d" % next(iter(network.pipes))
    transfers = [bytes([200 + n]) * 16 for n in range(count)]
    for transfer in transfers:
        begin = BeginPut(transfer, "n", "dead", 40 * CHUNK, "overwrite", "", CHUNK, 40, 1, 0, 0)
        network.act_server(network.server.receive(link, [encode(1, begin)], network.now))
    network.rest()
    assert network.server.puts.credit_bytes == LIMITS.in_flight_bytes
    return transfers


@pytest.mark.parametrize("dead", [1, 8, 30])
def test_dead_senders_hold_nobody_up_for_long(dead: int) -> None:
    network = Network(1, {}, limits=LIMITS)
    hold_all_credit(network, dead)
    started = network.now
    (result,) = network.settle(network.begin(putting(bytes(10 * CHUNK))))
    assert isinstance(result, ObjectInfo), result
    # Each time that some is taken back it goes to others; those that came first may be dead too.
    assert network.now - started < (SILENT_S + 3) * (1 + dead // 8)
    assert len(network.store.reserved) == dead, "only their credit was taken"


def test_a_sender_that_was_silent_goes_on_where_it_was() -> None:
    network = Network(1, {}, limits=LIMITS)
    (transfer,) = hold_all_credit(network, 1)
    (result,) = network.settle(network.begin(putting(bytes(10 * CHUNK))))
    assert isinstance(result, ObjectInfo)
    assert network.server.desk.dropped["credit taken back"] == 1
    data = random.Random(1).randbytes(CHUNK)

    def send(index: int) -> list[object]:
        chunk = encode(10 + index, PutChunk(transfer, index, checksum(data)))
        effects = network.server.receive(b"%d" % next(iter(network.pipes)), [chunk, data], network.now)
        network.act_server(effects)
        return [decode(effect.head)[1] for effect in effects if isinstance(effect, Reply)]

    # What was under way all the time counts; its sender hears what it has now.
    granted = [answer.credit for answer in send(0) if isinstance(answer, PutState)]
    assert granted == [0, 8]
    for index in range(1, 40):
        send(index)
    network.rest()
    assert network.store.objects["dead"][0] == 40 * data
    assert network.server.puts.credit_bytes == 0


def asks_of_the_newest(network: Network, frames: Sequence[Buffer]) -> bool:
    message = decode(frames[0])[1]
    get = next(iter(network.server.gets.under_way.values()), None)
    return isinstance(message, GetChunk) and get is not None and get.opening == message.opening


@pytest.mark.parametrize("seed", range(5))
def test_a_chunk_of_an_object_that_was_there_before_is_not_taken(seed: int) -> None:
    """The server forgets a get, opens a newer object for it, and only then the older one's chunk arrives."""
    network = Network(seed, {}, connections=2)
    old, new = (random.Random(seed + n).randbytes(8 * CHUNK) for n in range(2))
    network.store.publish("a", old, PutMode.OVERWRITE)
    number = network.begin(Getting("n", "a", None, None, new_transfer))
    while not any(isinstance(decode(frames[0])[1], Data) for pipe in network.pipes.values() for frames in pipe.down):
        network.step()
    late = [frames for pipe in network.pipes.values() for frames in pipe.down if len(frames) == 2]
    for pipe in network.pipes.values():
        pipe.down.clear()
        pipe.up.clear()
    network.server.gets.under_way.clear()
    network.store.publish("a", new, PutMode.OVERWRITE)
    while not any(asks_of_the_newest(network, frames) for pipe in network.pipes.values() for frames in pipe.up):
        network.step()
    dropped = network.client.dropped.get("unasked", 0)
    for frames in late:
        network.act_client(network.client.receive(1, frames, network.now))
    assert network.client.dropped["unasked"] == dropped + len(late)
    assert network.settle(number) == [new]


def test_a_chunk_asked_of_one_opening_is_not_answered_from_another() -> None:
    """The question is slow, and overtaken by another beginning: it must not draw bytes of an object it never meant."""
    network = Network(1, {}, connections=2)
    old, new = (random.Random(n).randbytes(8 * CHUNK) for n in range(2))
    network.store.publish("a", old, PutMode.OVERWRITE)
    number = network.begin(Getting("n", "a", None, None, new_transfer))
    while not any(len(pipe.up) >= 2 for pipe in network.pipes.values()):
        network.step()
    questions = [(link, frames) for link, pipe in network.pipes.items() for frames in pipe.up]
    for pipe in network.pipes.values():
        pipe.up.clear()
    network.server.gets.under_way.clear()
    network.store.publish("a", new, PutMode.OVERWRITE)
    while not network.server.gets.under_way or network.tasks:
        network.step()
    # The newer object is open, and the client does not know yet.
    states = {link: list(pipe.down) for link, pipe in network.pipes.items()}
    for pipe in network.pipes.values():
        pipe.down.clear()
    for link, frames in questions:
        effects = network.server.receive(b"%d" % link, frames, network.now)
        assert [type(decode(effect.head)[1]) for effect in effects if isinstance(effect, Reply)] == [Forgotten]
        network.act_server(effects)
    for link, frames_list in states.items():
        network.pipes[link].down.extend(frames_list)
    assert network.settle(number) == [new]


def test_a_put_that_begins_anew_has_no_credit_and_moves_on_when_it_gets_some() -> None:
    """What the server that was restarted gives is news; what the one before had given is worth nothing."""
    client = ClientProtocol(ClientSettings("peer", CHUNK, 8 * CHUNK, deadline_s=10))
    client.connected(1, 0.0)

    def sent(effects: list[Effect]) -> list[Message]:
        return [decode(effect.head)[1] for effect in effects if isinstance(effect, Send)]

    def answer(message: Message, now: float) -> list[Message]:
        return sent(client.receive(1, [encode(1, message)], now))

    (begin,) = sent(client.begin(putting(bytes(4 * CHUNK)), 1, 0.0))
    assert isinstance(begin, BeginPut)
    chunks = answer(PutState(begin.transfer, incarnation=1, credit=2, received=b"\0"), 1.0)
    assert [type(each) for each in chunks] == [PutChunk, PutChunk]
    (again,) = answer(Forgotten(begin.transfer, incarnation=2), 9.0)
    assert isinstance(again, BeginPut)
    assert again.transfer != begin.transfer
    assert answer(PutState(again.transfer, incarnation=2, credit=0, received=b"\0"), 9.1) == []
    chunks = answer(PutState(again.transfer, incarnation=2, credit=1, received=b"\0"), 9.5)
    assert [each.index for each in chunks if isinstance(each, PutChunk)] == [0]
    assert not any(isinstance(effect, Finish) for effect in client.tick(18.0)), "it moved 8.5 s ago"
    (late,) = [effect for effect in client.tick(19.6) if isinstance(effect, Finish)]
    assert isinstance(late.result, Transient)
