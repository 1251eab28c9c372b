"""Records and messages: bytes that stay as they are, and neighbouring releases that understand each other."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Any

import msgpack
import pytest
from msgspec import Meta

from tiercheck import schema
from tiercheck.agent.protocol import messages
from tiercheck.agent.protocol.messages import (
    Agree,
    Drain,
    Hello,
    HelloReply,
    Pause,
    RankReply,
    RegisterJob,
    Request,
    Status,
    Stop,
    pack_answer,
    pack_error,
    pack_request,
    parse_answer,
    parse_request,
)
from tiercheck.errors import NotFound
from tiercheck.keys import ClaimKey, CommitKey, JobKey, Key, LineageKey, MarkerKey
from tiercheck.policy.commit import CommitRecord
from tiercheck.policy.recovery.lineage import Branch
from tiercheck.replication.job import JobTier, ReplicationJob
from tiercheck.replication.mover import MoverStatus
from tiercheck.replication.objects.records import HEAD_NBYTES, seal, unseal
from tiercheck.tiers.peer import messages as peer

TOKEN = "ab" * 8
TRANSFER = bytes(range(16))
JOB = ReplicationJob((JobTier("shm", "shm://x"), JobTier("nvme", "nvme:///y", "zstd")), "n", 1, 2, 3, 4, 5)
BRANCH = Branch(2, 1, 7, 4, TOKEN)
MARKERS = [
    MarkerKey(CommitKey(2, 7), 0, 300, 8, "0123456789abcdef", TOKEN),
    MarkerKey(CommitKey(2, 7), 1, 70000, 8, "f" * 16, TOKEN),
]
COMMIT = CommitRecord.of(CommitKey(2, 7), MARKERS, "e" * 16)

RECORDS: list[tuple[Key, object, str]] = [
    (
        JobKey(1),
        JOB,
        "74696572636865636b2d7265636f72643a8219dfb9d0da202e7698cc8c8a552e8ca574696572739293a373686da77368"
        "6d3a2f2f78a093a46e766d65a96e766d653a2f2f2f79a47a737464a46e6f6465a16ea472616e6b01aa776f726c645f73"
        "697a6502aa67656e65726174696f6e03a5626174636804a8696e74657276616c05a5666f6c6473a26e6faa666f6c645f"
        "657665727900a9706c6163656d656e7491aa65766572797768657265a9726574656e74696f6e91a96b6565705f6c6173"
        "74a6706163696e6791a7756e7061636564",
    ),
    (
        LineageKey(2),
        BRANCH,
        "74696572636865636b2d7265636f7264f6aeeef7fdd063b82899aca83d28285789aa67656e65726174696f6e02a67061"
        "72656e7401a76c6566745f617407aa776f726c645f73697a6504a5746f6b656eb0616261626162616261626162616261"
        "62a66c61796f7574a0a561736b6564a0a46b65707490a46d61646590",
    ),
    (
        ClaimKey(2, TOKEN),
        BRANCH,
        "74696572636865636b2d7265636f726401a1ee82c09b9fed2efa4b73c817c25089aa67656e65726174696f6e02a67061"
        "72656e7401a76c6566745f617407aa776f726c645f73697a6504a5746f6b656eb0616261626162616261626162616261"
        "62a66c61796f7574a0a561736b6564a0a46b65707490a46d61646590",
    ),
    (
        CommitKey(2, 7),
        COMMIT,
        "74696572636865636b2d7265636f7264cf90f5cde4f680672580b92fecea54f286aa67656e65726174696f6e02a77665"
        "7273696f6e07a46261736507a5746f6b656eb061626162616261626162616261626162a67368617264739292cd012cb0"
        "3031323334353637383961626364656692ce00011170b066666666666666666666666666666666a66c61796f7574b065"
        "656565656565656565656565656565",
    ),
]
"""Bytes as they are written: those of a record that exists must not change."""

REQUESTS: list[tuple[Request, str]] = [
    (
        Hello(1.0),
        "940107a568656c6c6f81aa646561646c696e655f73cb3ff0000000000000",
    ),
    (
        Status(2.5),
        "940107a673746174757381aa646561646c696e655f73cb4004000000000000",
    ),
    (
        Stop(1.0, True),
        "940107a473746f7082aa646561646c696e655f73cb3ff0000000000000a5647261696ec3",
    ),
    (
        RegisterJob(1.0, "shm://x", 3, 2),
        "940107ac72656769737465722d6a6f6284aa646561646c696e655f73cb3ff0000000000000a96e616d657370616365a7"
        "73686d3a2f2f78a472616e6b03aa67656e65726174696f6e02",
    ),
    (
        Pause(1.0, "shm://x", 3),
        "940107a5706175736583aa646561646c696e655f73cb3ff0000000000000a96e616d657370616365a773686d3a2f2f78a472616e6b03",
    ),
    (
        Agree(1.0, "shm://x", 3, 2, 40),
        "940107a5616772656585aa646561646c696e655f73cb3ff0000000000000a96e616d657370616365a773686d3a2f2f78"
        "a472616e6b03aa67656e65726174696f6e02a46d61726b28",
    ),
    (
        Drain(300.0, "shm://x", 3, 2, True),
        "940107a5647261696e85aa646561646c696e655f73cb4072c00000000000a96e616d657370616365a773686d3a2f2f78"
        "a472616e6b03aa67656e65726174696f6e02a7636c6f73696e67c3",
    ),
]


@pytest.mark.parametrize(("key", "record", "written"), RECORDS, ids=[str(key) for key, _, _ in RECORDS])
def test_records_keep_their_bytes(key: Key, record: object, written: str) -> None:
    assert unseal(bytes.fromhex(written), type(record), key=key, tier="shm") == record
    assert seal(key, record) == bytes.fromhex(written)


@pytest.mark.parametrize(("key", "record", "written"), RECORDS, ids=[str(key) for key, _, _ in RECORDS])
def test_a_record_of_the_next_release_is_read_without_what_is_new(key: Key, record: object, written: str) -> None:
    fields = msgpack.unpackb(bytes.fromhex(written)[HEAD_NBYTES:])
    for name in ("tiers", "shards"):
        fields[name] = [[*each, "new"] for each in fields.get(name, [])]
    later = seal(key, {**fields, "new": {"in": ["the", "next", "release"]}})
    assert unseal(later, type(record), key=key, tier="shm") == record


@pytest.mark.parametrize(("request_", "written"), REQUESTS, ids=[type(each).__name__ for each, _ in REQUESTS])
def test_requests_keep_their_bytes(request_: Request, written: str) -> None:
    assert parse_request(bytes.fromhex(written)) == (7, request_)
    packed = msgpack.unpackb(pack_request(7, request_))
    packed[3].pop("protocols", None)  # one that the release before did not send
    assert msgpack.packb(packed) == bytes.fromhex(written)


def test_answers_keep_their_bytes() -> None:
    status = MoverStatus(watermark=3, copied_bytes=7, errors={"nvme": "full"}, reach=((1, 2),))
    reply = RankReply(status, "gone", True)
    written = bytes.fromhex(
        "940107c083a6737461747573de001aa977617465726d61726b03af756e647261696e65645f626173657300a469646c65"
        "c2ac636f706965645f627974657307ae636f706965645f6f626a6563747300af64656c657465645f6f626a6563747300"
        "a66572726f727381a46e766d65a466756c6cac736c6f775f76696577735f7380ac666f6c6465645f626173657300ad73"
        "6b69707065645f666f6c647300ae756e666f6c6465645f626173657300b1666f6c645f6c61675f76657273696f6e7300"
        "a8666f6c64735f746fffa5666f6c6473c2b070726570617265735f666f6c64696e67c2aa6e6f745f666f6c646564a0ad"
        "617564697465645f626173657300b1646966666572696e675f76657273696f6ec0a9646966666572696e6790a8686173"
        "5f726f6f6dc3a5726561636891920102b1626173655f6e65656465645f6166746572c0b0726561636865645f76657273"
        "696f6e7380aa68656c645f75705f6279a0ab6177616974735f62617365c2b1726566757365645f6465636973696f6e73"
        "00a8636f6e666c696374a4676f6e65a6726573756c74c3"
    )
    assert parse_answer(written).read(RankReply) == reply, "as the release before wrote it"
    # Which the release before did not send:
    has_room, newest_base = b"\xa8has_room\xc3", b"\xabnewest_base\xff"
    watermark, uncommitted = b"\xa9watermark\x03", b"\xabuncommitted\xa0"
    now = written.replace(b"status\xde\x00\x1a", b"status\xde\x00\x1c").replace(has_room, has_room + newest_base)
    now = now.replace(watermark, watermark + uncommitted)
    assert parse_answer(now).read(RankReply) == reply
    assert pack_answer(7, reply) == now
    hello = bytes.fromhex(
        "940107c089a776657273696f6ea5302e312e30a370696405a46e6f6465a16eab696e6361726e6174696f6ea26162a864"
        "65746163686564c3a468747470b2687474703a2f2f3132372e302e302e313a31ad706565725f656e64706f696e74c0af"
        "706565725f7365727665725f6b6579c0a7647261696e5f73cb404e000000000000"
    )
    before = parse_answer(hello).read(HelloReply)
    assert before == HelloReply("0.1.0", 5, "n", "ab", True, "http://127.0.0.1:1", None, None, 60.0)
    refused = parse_answer(bytes.fromhex("940107a84e6f74466f756e6483a76d657373616765a26e6fa474696572a174a36b6579a16b"))
    assert (type(refused.error), str(refused.error)) == (NotFound, str(NotFound("no", tier="t", key="k")))
    packed = msgpack.unpackb(pack_error(7, NotFound("no", tier="t", key="k")))
    assert packed[:3] == [messages.PROTOCOLS.newest, 7, "NotFound"]
    assert {name: packed[3][name] for name in ("message", "tier", "key")} == {"message": "no", "tier": "t", "key": "k"}


HEADS: list[tuple[peer.Message, str]] = [
    (
        peer.Hello("ns"),
        "94010109a26e73ffec34d97673012f",
    ),
    (
        peer.Stat("ns", "k"),
        "95010209a26e73a16b2e263dc952f90e32",
    ),
    (
        peer.BeginPut(TRANSFER, "ns", "k", 300, "create", "", 1 << 20, 4, 2**64 - 1, 0, 7),
        "9e010609c410000102030405060708090a0b0c0d0e0fa26e73a16bcd012ca6637265617465a0ce0010000004cfffffff"
        "ffffffffff00073f5de60eeedbb3e0",
    ),
    (
        peer.Page((("k", 1, "e"),), True),
        "950142099193a16b01a165c36078476e09e71270",
    ),
    (
        peer.PutState(TRANSFER, 1, 2, b"\x01"),
        "97014409c410000102030405060708090a0b0c0d0e0f0102c40101c8509ea95b1bfde3",
    ),
    (
        peer.PutState(TRANSFER, 1, 0, b"\x00", reserving=True),
        "98014409c410000102030405060708090a0b0c0d0e0f0100c40100c3f87cdcb39e5bac68",
    ),
    (
        peer.Delete(TRANSFER, "ns", ("a", "b")),
        "96010409c410000102030405060708090a0b0c0d0e0fa26e7392a161a162b2e7624b540cde26",
    ),
    (
        peer.Failure(TRANSFER, "NotFound", "no"),
        "96014a09c410000102030405060708090a0b0c0d0e0fa84e6f74466f756e64a26e6ff32ef9ac1c1daa05",
    ),
    (
        peer.Welcome(5, 1 << 20),
        "9501400905ce00100000013a764851476ceb",
    ),
]


@pytest.mark.parametrize(("message", "written"), HEADS, ids=[type(each).__name__ for each, _ in HEADS])
def test_a_peers_heads_keep_their_bytes(message: peer.Message, written: str) -> None:
    assert peer.decode(bytes.fromhex(written)) == (9, message)
    assert peer.encode(9, message) == bytes.fromhex(written)


class Color(enum.StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    size: Annotated[int, Meta(ge=1, le=9)]


@dataclass(frozen=True)
class Outer:
    name: schema.Name
    inner: Inner
    color: Color = Color.RED
    spans: tuple[tuple[int, int], ...] = ()
    note: str | None = None

    def __post_init__(self) -> None:
        if self.name == "evil":
            raise ValueError("it is evil")


SOUND: dict[str, Any] = {"name": "a", "inner": {"size": 3}, "color": "red", "spans": [[1, 2]], "note": None}


def test_a_value_comes_back_as_it_was() -> None:
    assert schema.plain(schema.read(Outer, SOUND)) == SOUND


def test_what_is_missing_has_its_default_and_what_is_unknown_is_ignored() -> None:
    assert schema.read(Outer, {"name": "a", "inner": {"size": 3, "new": 1}, "new": [1]}) == Outer("a", Inner(3))


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"name": 5}, r"\$\.name"),
        ({"name": "x" * 256}, r"\$\.name"),
        ({"name": None}, r"\$\.name"),
        ({"name": "evil"}, "it is evil"),
        ({"inner": {}}, "`size`"),
        ({"inner": {"size": 0}}, r"\$\.inner\.size"),
        ({"inner": {"size": 10**30}}, r"\$\.inner\.size"),
        ({"inner": {"size": True}}, r"\$\.inner\.size"),
        ({"inner": {"size": 1.0}}, r"\$\.inner\.size"),
        ({"inner": [3]}, r"\$\.inner"),
        ({"color": "b" * 60_000}, "enum"),
        ({"spans": [[1, 2, 3]]}, r"\$\.spans\[0\]"),
        ({"spans": {"1": 2}}, r"\$\.spans"),
        ({5: 1}, "key"),
    ],
)
def test_what_is_wrong_is_named_in_few_words(changes: dict[Any, Any], where: str) -> None:
    with pytest.raises(ValueError, match=rf"^invalid Outer: .*{where}") as refusal:
        schema.read(Outer, {**SOUND, **changes})
    assert len(str(refusal.value)) <= 200


def test_a_lineage_record_of_a_release_that_knew_no_stage_made_anew_is_read() -> None:
    written = (
        "74696572636865636b2d7265636f7264539325a65f071824b3d5cd3c33583fa088aa67656e65726174696f6e02a67061"
        "72656e7401a76c6566745f617407aa776f726c645f73697a6504a5746f6b656eb0616261626162616261626162616261"
        "62a66c61796f7574a0a561736b6564a0a46b65707490"
    )
    assert unseal(bytes.fromhex(written), Branch, key=LineageKey(2), tier="shm").made == ()
