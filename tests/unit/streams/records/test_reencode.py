"""A tier's own codec: what it holds takes less room, and decodes to the very bits that were captured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.encoding import APPROXIMATE, EXACT, encode
from tests.jobs import Job, uninterrupted
from tiercheck import schema
from tiercheck.errors import ConfigurationError, Corruption
from tiercheck.format import container, host_state
from tiercheck.format.container import PackedObject, Shard, ShardMetadata, TensorEntry
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.deepspeed import attaching, read_block
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.keys import ShardKey
from tiercheck.replication.job import JobTier, ReplicationJob
from tiercheck.streams.codecs import decode
from tiercheck.streams.records.differential import DifferentialStream
from tiercheck.streams.records.merge import as_stored, merge
from tiercheck.streams.records.record_names import buffer_prefix, gradient_name, gradient_parts, host_name, record_name
from tiercheck.streams.records.recorded import read_differentials
from tiercheck.streams.records.reencode import reencoded
from tiercheck.tiers.shm.namespaces import remove_namespace
from tiercheck.types import Fidelity

VERSIONS = range(7, 9)
LAST, FAILED_AT = 11, 7


def values(version: int) -> dict[str, tuple[str, NDArray[Any], str, bool]]:
    """By master: its dtype, its gradient, the codec it was captured with, whether training used what that kept."""
    chance = np.random.default_rng(version)
    odd = chance.standard_normal((3, 129), np.float32)
    odd.view(np.uint32)[0, :5] = [0x7FC00001, 0xFF800000, 0x80000000, 1, 0x7F800001]  # NaNs with payloads among them
    rare = np.where(chance.random(4000) < 0.01, chance.standard_normal(4000), 0).astype(np.float32)
    halves = chance.standard_normal(50).astype(np.float16)
    patterns = (chance.standard_normal(700, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return {
        "weight": ("F32", odd, "exact", False),
        "embedding": ("F32", rare, "exact", False),
        "narrow": ("F32", (patterns.astype(np.uint32) << 16).view(np.float32), "exact", False),
        "bf16": ("BF16", patterns[::-1].copy(), "exact", False),
        "fp16": ("F16", halves, "exact", False),
        "counts": ("I64", np.arange(6), "exact", False),
        "rare": ("F32", rare[::-1].copy(), "nonzero", False),
        "coded": ("F32", odd[::-1].copy(), "exact+entropy", False),
        "empty": ("F32", np.empty((0, 3), np.float32), "exact", False),
        "one": ("F32", np.float32(2.5).reshape(()), "exact", False),
        "lossy": ("F32", np.nan_to_num(odd), "int8", False),
        "used": ("F32", rare, "sparse", True),
    }


def shard_of(version: int, mangle: Any = None) -> Shard:
    key = ShardKey.differential(1, version, version, 0)
    tensors = [TensorEntry(buffer_prefix(version) + "seen", "F32", (3,), np.ones(3, np.float32))]
    encodings: dict[str, Any] = {}
    for master, (dtype, array, codec, used) in values(version).items():
        encoding, parts = encode(codec, array, dtype)
        encodings[master] = replace(encoding, trained_on=used).to_object()
        for suffix, part in parts.items():
            tensors.append(TensorEntry(gradient_name(version, master, suffix), part.dtype, part.shape, part.data))
    record = {"skipped": False, "hyperparameters": [{"lr": 1e-3}], "gradients": encodings}
    if mangle is not None:
        mangle(record, tensors)
    held = {record_name(version): record, host_name(version): {"step": version}}
    payload = container.payload(ShardMetadata(key.stream, 1, version, version, 0, 1), tensors, held)
    return container.parse(b"".join(payload), key=str(key), tier="shm")


def parsed(shard: Shard, codec: str) -> Shard:
    key = shard.metadata.key
    found = container.parse(b"".join(merge([reencoded(shard, codec)], key)), key=str(key), tier="nvme")
    found.verify()
    return found


def encodings_of(shard: Shard, version: int) -> dict[str, Any]:
    return shard.object(record_name(version))["gradients"]


def decoded(shard: Shard, version: int) -> dict[str, bytes]:
    return {
        master: decode(each, gradient_parts(shard, version, master, each["parts"])).tobytes()
        for master, each in encodings_of(shard, version).items()
    }


@pytest.mark.parametrize("codec", EXACT)
def test_every_gradient_decodes_to_the_bits_that_were_captured(codec: str) -> None:
    shard = shard_of(7)
    found = parsed(shard, codec)
    assert decoded(found, 7) == decoded(shard, 7)
    before, after = encodings_of(shard, 7), encodings_of(found, 7)
    assert after.keys() == before.keys()
    assert after["embedding"]["codec"] == codec
    assert all(before[each]["codec"] == "exact" for each in after if after[each] != before[each])
    for kept in ("coded", "rare", "lossy", "used"):  # somebody has chosen what they are in
        assert after[kept] == before[kept]
    (differential,) = read_differentials(found, tier="nvme")
    assert differential.fidelity is Fidelity.APPROXIMATE  # because of the lossy one, as before
    assert differential.hyperparameters == [{"lr": 1e-3}]
    assert differential.host_state == {"step": 7}
    assert differential.buffers()["seen"].tolist() == [1, 1, 1]


def test_it_takes_less_room_and_is_the_same_each_time() -> None:
    shard = shard_of(7)
    nbytes = {codec: sum(e.spec.nbytes for e in reencoded(shard, codec).tensors) for codec in EXACT}
    assert nbytes["exact+entropy"] < 0.97 * nbytes["exact"]
    assert nbytes["nonzero"] < nbytes["exact"]
    twice = [b"".join(merge([reencoded(shard, "exact+entropy")], shard.metadata.key)) for _ in range(2)]
    assert twice[0] == twice[1]


def test_a_batch_is_made_of_them() -> None:
    shards = [shard_of(version) for version in VERSIONS]
    target = ShardKey.differential(1, VERSIONS[0], VERSIONS[-1], 0)
    batch = container.parse(
        b"".join(merge([reencoded(shards[0], "exact+entropy"), as_stored(shards[1])], target)), key=str(target)
    )
    for version, shard in zip(VERSIONS, shards, strict=True):
        assert decoded(batch, version) == decoded(shard, version)
    whole = b"".join(merge([reencoded(batch, "nonzero")], target))  # a batch goes on to a third tier
    again = container.parse(whole, key=str(target))
    assert encodings_of(again, 7)["embedding"]["codec"] == "exact+entropy"
    assert encodings_of(again, 8)["embedding"]["codec"] == "nonzero"
    for version, shard in zip(VERSIONS, shards, strict=True):
        assert decoded(again, version) == decoded(shard, version)


def test_what_was_damaged_is_never_given_a_good_checksum() -> None:
    shard = shard_of(7)
    content = bytearray(b"".join(merge([as_stored(shard)], shard.metadata.key)))
    starts = {entry.name: bytes(entry.data) for entry in shard.raw_entries() if entry.spec.nbytes > 100}
    for name, data in starts.items():
        broken = bytearray(content)
        assert content.count(data) == 1
        broken[content.index(data) + 50] ^= 1
        damaged = container.parse(bytes(broken), key=str(shard.metadata.key), tier="shm")
        master = name.split("/")[-1].partition("#")[0]
        if master in ("rare", "coded", "lossy", "used"):  # handed through with the checksum it had
            result = container.parse(b"".join(merge([reencoded(damaged, "exact+entropy")], shard.metadata.key)))
            with pytest.raises(Corruption, match=master):
                result.verify()
        else:
            with pytest.raises(Corruption, match=rf"{master}.*tier 'shm', object 'r00000/g000001"):
                reencoded(damaged, "exact+entropy")


def without_part(record: dict[str, Any], tensors: list[TensorEntry]) -> None:
    tensors.pop(1)


def without_gradients(record: dict[str, Any], tensors: list[TensorEntry]) -> None:
    del record["gradients"]


def of_another_shape(record: dict[str, Any], tensors: list[TensorEntry]) -> None:
    record["gradients"]["weight"]["shape"] = [3, 130]


def of_no_codec(record: dict[str, Any], tensors: list[TensorEntry]) -> None:
    record["gradients"]["weight"] = 5


@pytest.mark.parametrize("mangle", [without_part, without_gradients, of_another_shape, of_no_codec])
def test_a_malformed_record_is_reported_as_damaged(mangle: Any) -> None:
    with pytest.raises(Corruption, match=r"tier 'shm', object 'r00000/g000001/differential"):
        reencoded(shard_of(7, mangle), "exact+entropy")


def test_a_codec_of_a_later_version_is_handed_through() -> None:
    def later(record: dict[str, Any], tensors: list[TensorEntry]) -> None:
        record["gradients"]["weight"]["codec"] = "fractal"

    shard = shard_of(7, later)
    found = parsed(shard, "exact+entropy")
    assert encodings_of(found, 7)["weight"] == encodings_of(shard, 7)["weight"]
    assert encodings_of(found, 7)["narrow"]["codec"] == "exact+entropy"


def test_objects_that_are_no_records_keep_their_bytes() -> None:
    shard = shard_of(7)
    host = reencoded(shard, "exact+entropy").objects[host_name(7)]
    assert isinstance(host, PackedObject)
    assert bytes(host.data) == host_state.pack({"step": 7})


# Through the whole hierarchy


@pytest.fixture
def name(name: str) -> Iterator[str]:
    """A namespace of shared memory; whatever job the test leaves open is closed before it goes."""
    yield name
    Job.abort_all()


@pytest.mark.parametrize("codec", ["exact+entropy", "nonzero"])
def test_a_run_resumed_from_the_reencoded_tier_is_the_uninterrupted_one(name: str, tmp_path: Path, codec: str) -> None:
    durable = Tier(f"nvme://{tmp_path}/durable?survives=rack", codec=codec)
    near = Tier(f"nvme://{tmp_path}/near?survives=node", name="near")
    hierarchy = Hierarchy.of(f"shm://{name}?size=64MiB", near, durable)
    before = Job()
    with before.attach(hierarchy):
        before.train(FAILED_AT)
    stored = {
        tier: {
            encoding["codec"]
            for path in (tmp_path / tier).glob("r*/g*/differential/*.safetensors")
            for shard in [container.parse(path.read_bytes())]
            for version in shard.metadata.key.versions
            for encoding in encodings_of(shard, version).values()
        }
        for tier in ("near", "durable")
    }
    # What has no zeros takes less as it is.
    assert stored == {"near": {"exact"}, "durable": {"exact" if codec == "nonzero" else codec}}
    remove_namespace(name)
    for path in (tmp_path / "near").glob("r*/g*/*/*"):
        path.unlink()
    after = Job()
    after.attach(hierarchy)
    recovery = after.checkpointer.recovery
    assert (recovery.version, recovery.fidelity) == (FAILED_AT, Fidelity.EXACT)
    assert {tier for _, tier in recovery.sources} == {"nvme"}
    after.train(LAST)
    assert {**before.losses, **after.losses} == uninterrupted(LAST).losses
    assert after.state() == uninterrupted(LAST).state()
    after.checkpointer.close()


@pytest.mark.parametrize("codec", ["snapshot", "sparse"])
def test_what_is_captured_with_loss_goes_on_as_it_is(name: str, tmp_path: Path, codec: str) -> None:
    durable = Tier(f"nvme://{tmp_path}/durable?survives=rack", codec="exact+entropy")
    job = Job()
    with job.attach(Hierarchy.of(f"shm://{name}?size=64MiB", durable), codec=codec):
        job.train(FAILED_AT)
    state = job.state()
    remove_namespace(name)
    again = Job()
    checkpointer = again.attach(Hierarchy.of(f"shm://{name}?size=64MiB", durable), codec=codec)
    assert (checkpointer.version, checkpointer.recovery.fidelity) == (FAILED_AT, Fidelity.APPROXIMATE)
    assert again.state().keys() == state.keys()
    checkpointer.close()


# What is refused


def test_a_codec_that_loses_bits_is_refused() -> None:
    told = r"of the tier s3 loses bits.* is one of exact, exact\+entropy, nonzero"
    for codec in (*APPROXIMATE, "int8+feedback"):
        with pytest.raises(ConfigurationError, match=told):
            Tier("s3://bucket/run", codec=codec)


def test_a_wrong_codec_and_one_of_the_first_tier_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no codec 'exact\+entropi'.*did you mean 'exact\+entropy'"):
        Tier("s3://bucket/run", codec="exact+entropi")
    with pytest.raises(ConfigurationError, match=r"no codec 'snapshot'"):
        Tier("s3://bucket/run", codec="snapshot")
    with pytest.raises(ConfigurationError, match=r"the first tier, shm, .*CheckpointConfig"):
        Hierarchy.of(Tier("shm://a", codec="nonzero"), "nvme:///b")


def test_the_block_of_a_deepspeed_configuration_takes_a_tier_with_its_fields() -> None:
    tiers = ["shm://a", {"url": "nvme:///b?survives=rack", "name": "disk", "codec": "exact+entropy"}]
    hierarchy, _ = read_block({"tiercheck": {"tiers": tiers}})
    assert hierarchy.tiers == (
        Tier("shm://a"),
        Tier("nvme:///b?survives=rack", name="disk", codec="exact+entropy"),
    )


def test_a_tier_in_the_block_with_wrong_fields_is_refused() -> None:
    for wrong in (5, {}, {"name": "x"}, {"url": 5}, {"url": "shm://a", "kodec": "exact"}, ["shm://a"]):
        with pytest.raises(ConfigurationError, match=r'each of the "tiers" in the "tiercheck" block'):
            read_block({"tiercheck": {"tiers": ["shm://a", wrong]}})


def test_a_nomination_says_it_to_the_agent() -> None:
    tiers = (JobTier("shm", "shm://a"), JobTier("disk", "nvme:///b?survives=rack", "exact+entropy"))
    job = ReplicationJob(tiers, "node", 0, 1, 1, 5)
    read = schema.read(ReplicationJob, schema.plain(job))
    assert read == job
    assert [tier.codec for tier in read.hierarchy.tiers] == ["", "exact+entropy"]
    assert [tier.codec for tier in read.hierarchy.open().tiers] == ["", "exact+entropy"]


def test_the_block_of_deepspeed_says_where_to_begin() -> None:
    block = {"tiers": ["shm://a"], "version": 6, "generation": 2, "keep_left_behind": False}
    _, config, request, *_ = attaching._read({"tiercheck": block})
    assert (str(request), config.keep_left_behind) == ("version=6, generation=2", False)
    with pytest.raises(ConfigurationError, match="fresh begins at version 0"):
        attaching._read({"tiercheck": {"tiers": ["shm://a"], "version": 6, "fresh": True}})


@pytest.mark.parametrize("codec", ["exact", "exact+entropy", "nonzero"])
def test_half_precision_numbers_that_clipping_has_widened_stay_as_they_are(codec: str) -> None:
    """Their products with the factor are fp32 numbers of twice the bytes."""
    model = torch.nn.Linear(64, 64)
    provider = ModuleProvider(model, torch.optim.SGD(model.parameters(), lr=0.1))
    stream = DifferentialStream(provider, "exact", 1)
    memory = bytearray(stream.nbytes_max)
    record = stream.begin(ShardKey.differential(1, 1, 1, 0), memoryview(memory))
    gradients = {name: torch.randn_like(each).bfloat16().float() * 0.37 for name, each in provider.masters().items()}
    record.add(gradients)
    shard = container.parse(bytes(memory[: record.finish(skipped=False)]))
    assert sum(each.spec.nbytes for each in reencoded(shard, codec).tensors) == sum(each.nbytes for each in shard.specs)
    (read,) = read_differentials(shard, tier="test")
    assert {each["dtype"] for each in read.encodings.values()} == {"F32"}
    assert sum(each.nbytes for each in shard.specs) < sum(2.1 * each.numel() for each in gradients.values())
