"""The server's protocol without I/O: frames, outcomes and time in; replies and tasks out.

::

    protocol = ServerProtocol(PeerLimits(), incarnation=...)
    for effect in protocol.receive(peer, frames, now): ...      # a Reply to send, or Work to do
    for effect in protocol.done(work.number, outcome, now): ...
    for effect in protocol.tick(now): ...                       # now and then

Nothing that a peer can send raises: what is no message is counted by its reason and dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from types import MappingProxyType

from tiercheck.errors import Corruption, NotFound, Unsupported
from tiercheck.keys import validate_key
from tiercheck.tiers.peer.checksums import KnownChecksums
from tiercheck.tiers.peer.client.content import populate
from tiercheck.tiers.peer.messages import (
    AbortPut,
    BadFrame,
    BeginGet,
    BeginPut,
    Data,
    Delete,
    EndGet,
    Forgotten,
    GetChunk,
    GetState,
    Hello,
    Info,
    ListPage,
    MeasureUsage,
    Message,
    NotUnderstood,
    Page,
    PutChunk,
    Stat,
    UsageIs,
    Welcome,
    checksum,
    decode,
)
from tiercheck.tiers.peer.server.copies import CopyBudget
from tiercheck.tiers.peer.server.effects import (
    Desk,
    Greet,
    ListObjects,
    OpenObject,
    ReadableObject,
    ReadChunk,
    Reply,
    StatObject,
    Task,
    UsageOf,
    Work,
    failure_of,
)
from tiercheck.tiers.peer.server.limits import CHUNK_BYTES_MIN, PeerLimits, PeerStatistics
from tiercheck.tiers.peer.server.put import Puts
from tiercheck.types import Buffer, ByteRange, ObjectInfo, Usage

__all__ = ["Gets", "ServerProtocol"]


@dataclass
class Outgoing:
    """An object that is being read. ``source`` is ``None`` until it is open."""

    begin: BeginGet
    peer: bytes
    request_id: int
    touched: float
    source: ReadableObject | None = None
    opening: int = 0
    asked: bytearray = field(default_factory=bytearray)
    """A bit for each chunk that was asked for, lowest first."""

    def ask(self, index: int) -> bool:
        """Whether that chunk was asked for before."""
        bit = 1 << (index & 7)
        before = self.asked[index >> 3] & bit
        self.asked[index >> 3] |= bit
        return bool(before)


class Gets:
    """The server's side of gets: each chunk is sent when the reader asks for it, which is the reader's credit."""

    def __init__(self, desk: Desk, incarnation: int, known: KnownChecksums) -> None:
        self._desk = desk
        self._incarnation = incarnation
        self._known = known
        self.under_way: OrderedDict[bytes, Outgoing] = OrderedDict()
        self.copies = CopyBudget(desk.limits.buffer_bytes)
        """The shell gives back what is sent."""
        self.objects = 0
        self.nbytes = 0
        self._openings = incarnation

    def begin(self, peer: bytes, request_id: int, begin: BeginGet, now: float) -> None:
        get = self.under_way.get(begin.transfer)
        if get is not None:
            get.peer, get.request_id, get.touched = peer, request_id, now
            if get.source is not None:
                self._reply_state(get, get.source)
            return
        if not CHUNK_BYTES_MIN <= begin.chunk_bytes <= self._desk.limits.chunk_bytes or begin.start > begin.stop:
            raise BadFrame("malformed", "a get's range or size of chunks is impossible")
        if len(self.under_way) >= self._desk.limits.transfers:
            self.under_way.popitem(last=False)
            self._desk.drop("crowded out")
        get = Outgoing(begin, peer, request_id, now)
        self.under_way[begin.transfer] = get
        wanted = None if begin.whole else ByteRange(begin.start, begin.stop)
        task = OpenObject(begin.namespace, checked_key(begin.key), wanted, begin.chunk_bytes)
        self._desk.ask(task, lambda outcome, now: self._opened(get, outcome, now))

    def send_chunk(self, peer: bytes, request_id: int, wanted: GetChunk, now: float) -> None:
        get = self.under_way.get(wanted.transfer)
        if get is None or get.source is None or get.opening != wanted.opening:
            self._desk.reply(peer, request_id, Forgotten(wanted.transfer, self._incarnation))
            return
        get.touched = now
        self.under_way.move_to_end(wanted.transfer)
        source, chunk_bytes = get.source, get.begin.chunk_bytes
        start = wanted.index * chunk_bytes
        stop = min(start + chunk_bytes, len(source.wanted))
        if start >= stop:
            raise BadFrame("malformed", f"chunk {wanted.index} is past the end")
        part = ByteRange(source.wanted.start + start, source.wanted.start + stop)
        if source.content is not None:
            content = source.content[start:stop]
            known = self._known.find(source.namespace, source.key, source.etag, part)
            # A chunk that is asked for again was lost, or it is not what was put: then asking would never end.
            if known is not None and get.ask(wanted.index) and checksum(content) != known:
                self._desk.drop("decayed")
                decayed = Corruption(f"{part} of {source.key!r} in the peer's memory is not what was put there")
                self._desk.reply(peer, request_id, failure_of(decayed, wanted.transfer))
            else:
                self._send(peer, request_id, wanted, content, known)
            return
        if not self.copies.take(peer, len(part)):
            self._desk.drop("no buffer")  # its client asks again
            return

        def read(outcome: object, now: float) -> None:
            if isinstance(outcome, memoryview):
                self._send(peer, request_id, wanted, outcome, copied_bytes=len(part))
                return
            self.copies.give_back(peer, len(part))
            assert isinstance(outcome, BaseException)
            if isinstance(outcome, NotFound):  # overwritten meanwhile: the reader begins again
                self.under_way.pop(wanted.transfer, None)
                self._desk.reply(peer, request_id, Forgotten(wanted.transfer, self._incarnation))
            else:
                self._desk.reply(peer, request_id, failure_of(outcome, wanted.transfer))

        self._desk.ask(ReadChunk(source, part), read)

    def end(self, end: EndGet) -> None:
        self.under_way.pop(end.transfer, None)

    def tick(self, now: float) -> None:
        oldest = now - self._desk.limits.idle_s
        for transfer, get in list(self.under_way.items()):
            if get.touched < oldest and get.source is not None:
                self._desk.drop("abandoned")
                del self.under_way[transfer]

    def _opened(self, get: Outgoing, outcome: object, now: float) -> None:
        transfer = get.begin.transfer
        if isinstance(outcome, BaseException):
            self.under_way.pop(transfer, None)
            self._desk.reply(get.peer, get.request_id, failure_of(outcome, transfer))
            return
        assert isinstance(outcome, ReadableObject)
        self._openings += 1
        get.source, get.opening, get.touched = outcome, self._openings, now
        get.asked = bytearray(-(-len(outcome.wanted) // get.begin.chunk_bytes) // 8 + 1)
        self.objects += 1
        self._reply_state(get, outcome)

    def _reply_state(self, get: Outgoing, source: ReadableObject) -> None:
        transfer, nbytes = get.begin.transfer, len(source.wanted)
        if nbytes <= get.begin.chunk_bytes and source.content is not None:
            self.under_way.pop(transfer, None)
            copied_bytes = nbytes if source.copied else 0
            if copied_bytes and not self.copies.take(get.peer, copied_bytes):
                self._desk.drop("no buffer")  # its client asks again
                return
            self.nbytes += nbytes
            state = GetState(transfer, nbytes, source.etag, checksum(source.content), get.opening)
            self._desk.reply(get.peer, get.request_id, state, source.content, copied_bytes)
        else:
            self._desk.reply(get.peer, get.request_id, GetState(transfer, nbytes, source.etag, 0, get.opening))

    def _send(
        self,
        peer: bytes,
        request_id: int,
        wanted: GetChunk,
        content: memoryview,
        known: int | None = None,
        copied_bytes: int = 0,
    ) -> None:
        self.nbytes += content.nbytes
        if known is None:
            known = checksum(content)
        else:
            populate(content)
        data = Data(wanted.transfer, wanted.index, known)
        self._desk.reply(peer, request_id, data, content, copied_bytes)


class ServerProtocol:
    """One server's conversations with all its clients. Times are seconds of any clock that never goes back."""

    def __init__(self, limits: PeerLimits, incarnation: int) -> None:
        self.desk = Desk(limits)
        self.incarnation = incarnation
        known = KnownChecksums()
        self.puts = Puts(self.desk, incarnation, known)
        self.gets = Gets(self.desk, incarnation, known)

    @property
    def saturated(self) -> bool:
        """As many tasks are under way as there may be, or as many bytes with them: take no further message before
        one is done."""
        limits = self.desk.limits
        return self.desk.working >= limits.calls or self.puts.whole_bytes >= limits.in_flight_bytes

    def receive(self, peer: bytes, frames: Sequence[Buffer], now: float, owner: str = "") -> list[Reply | Work]:
        """One message: its head and, where its kind has it, its data. ``owner``: whose client has sent it, if another
        one's than the server's."""
        try:
            if not 1 <= len(frames) <= 2:
                raise BadFrame("malformed", f"a message has {len(frames)} frames")
            request_id, message = decode(frames[0])
            message = of_owner(message, owner)
            self._dispatch(peer, request_id, message, frames[1] if len(frames) == 2 else None, now)
        except NotUnderstood as unknown:
            self.desk.drop(unknown.reason)
            server = f"the peer server, of TierCheck {version('tiercheck')},"
            refusal = Unsupported(f"{server} does not understand its client, of another release: {unknown}")
            self.desk.reply(peer, unknown.request_id, failure_of(refusal))
        except BadFrame as bad:
            self.desk.drop(bad.reason)
        return self.desk.take_effects()

    def done(self, number: int, outcome: object, now: float) -> list[Reply | Work]:
        """The outcome of a task: its value, or the exception that it raised."""
        self.desk.done(number, outcome, now)
        return self.desk.take_effects()

    def tick(self, now: float) -> list[Reply | Work]:
        """Let go of what nobody asked for in a long time. Once a second is often enough."""
        self.puts.tick(now)
        self.gets.tick(now)
        return self.desk.take_effects()

    def statistics(self, clients: int) -> PeerStatistics:
        return PeerStatistics(
            objects_put=self.puts.objects,
            bytes_put=self.puts.nbytes,
            objects_got=self.gets.objects,
            bytes_got=self.gets.nbytes,
            clients=clients,
            bytes_in_flight=self.puts.credit_bytes + self.gets.copies.held_bytes,
            transfers=len(self.puts.under_way) + len(self.gets.under_way),
            dropped=MappingProxyType(dict(self.desk.dropped)),
        )

    def _dispatch(self, peer: bytes, request_id: int, message: Message, data: Buffer | None, now: float) -> None:
        if data is not None and not isinstance(message, BeginPut | PutChunk):
            raise BadFrame("malformed", f"{type(message).__name__} comes with data")
        match message:
            case PutChunk():
                if data is None:
                    raise BadFrame("truncated", "a chunk comes without its data")
                self.puts.take_chunk(peer, request_id, message, data, now)
            case GetChunk():
                self.gets.send_chunk(peer, request_id, message, now)
            case BeginPut():
                self.puts.begin(peer, request_id, message, data, now)
            case BeginGet():
                self.gets.begin(peer, request_id, message, now)
            case EndGet():
                self.gets.end(message)
            case AbortPut():
                self.puts.abort(peer, request_id, message, now)
            case Delete():
                for key in message.keys:
                    checked_key(key)
                self.puts.delete(peer, request_id, message, now)
            case Hello() | Stat() | ListPage() | MeasureUsage():
                self._call(peer, request_id, message)
            case _:
                raise BadFrame("unasked", f"{type(message).__name__} is for clients")

    def _call(self, peer: bytes, request_id: int, message: Hello | Stat | ListPage | MeasureUsage) -> None:
        task: Task
        match message:
            case Hello(namespace):
                task = Greet(namespace)
            case Stat(namespace, key):
                task = StatObject(namespace, checked_key(key))
            case ListPage(namespace, prefix, after):
                task = ListObjects(namespace, prefix, after)
            case MeasureUsage(namespace):
                task = UsageOf(namespace)

        def answer(outcome: object, now: float) -> None:
            self.desk.reply(peer, request_id, self._answer(outcome))

        self.desk.ask(task, answer)

    def _answer(self, outcome: object) -> Message:
        match outcome:
            case None:
                return Welcome(self.incarnation, self.desk.limits.chunk_bytes)
            case ObjectInfo():
                return Info(outcome.nbytes, outcome.etag)
            case Page():
                return outcome
            case Usage():
                limit = outcome.limit_bytes
                return UsageIs(outcome.used_bytes, limit is not None, limit or 0)
            case BaseException():
                return failure_of(outcome)
            case _:
                raise AssertionError(f"a task came to {outcome!r}")


def of_owner(message: Message, owner: str) -> Message:
    """The message about a namespace of its client's owner: another owner's of the same name is another one."""
    if not isinstance(message, Hello | Stat | ListPage | Delete | MeasureUsage | BeginPut | BeginGet):
        return message
    if "/" in message.namespace:
        raise BadFrame("malformed", "a namespace has a slash")
    return replace(message, namespace=f"{owner}/{message.namespace}") if owner else message


def checked_key(key: str) -> str:
    try:
        return validate_key(key)
    except ValueError as error:
        raise BadFrame("malformed", str(error)) from None
