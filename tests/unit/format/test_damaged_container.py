"""Shards that were damaged, cut off, or written by another program: none of it is taken for what was stored."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch

from tests.unit.format.shards import KEY, METADATA, OBJECTS, TIER, sample_entries, sample_file
from tiercheck.errors import Corruption
from tiercheck.format.checksums import BLOCK_NBYTES
from tiercheck.format.container import PackedObject, TensorEntry, Verification, parse, parse_header, payload


def test_every_flipped_bit_is_refused():
    file = bytearray(sample_file())
    ranges = parse_header(file, len(file)).ranges
    for position in range(len(file)):
        owner = next((name for name, at in ranges.items() if at.start <= position < at.stop), None)
        for bit in range(8):
            file[position] ^= 1 << bit
            with pytest.raises(Corruption) as caught:
                parse(file, key=KEY, tier=TIER).verify()
            file[position] ^= 1 << bit
            assert caught.value.key == KEY and caught.value.tier == TIER
            if owner is not None:
                assert repr(owner.removeprefix("__object__:")) in str(caught.value)
    parse(file).verify()


def test_a_damaged_tensor_leaves_the_others_readable():
    file = bytearray(sample_file())
    file[parse_header(file, len(file)).ranges["weight"].start] ^= 1
    shard = parse(file, key=KEY, tier=TIER)
    assert bytes(shard.entry("mask").data) == b"\1\0\1" and shard.object("host") == OBJECTS["host"]
    with pytest.raises(Corruption, match="the tensor 'weight' fails its checksum"):
        shard.entry("weight")
    file[parse_header(file, len(file)).ranges["__object__:host"].start] ^= 1
    with pytest.raises(Corruption, match="the packed object 'host' fails its checksum"):
        parse(file).object("host")


def test_every_truncation_and_extension_is_refused():
    file = sample_file()
    for length in range(len(file)):
        with pytest.raises(Corruption):
            parse(file[:length], key=KEY, tier=TIER)
    for extra in (b"\0", bytes(64), file):
        with pytest.raises(Corruption, match="bytes"):
            parse(file + extra)


def test_an_object_with_a_valid_checksum_that_is_no_msgpack_is_refused():
    file = b"".join(payload(METADATA, [], {"o": PackedObject(b"\xc1")}))
    with pytest.raises(Corruption, match="packed object 'o' cannot be read") as caught:
        parse(file, key=KEY, tier=TIER).object("o")
    assert caught.value.key == KEY and caught.value.tier == TIER


def test_another_programs_safetensors_file_is_refused():
    file = safetensors.numpy.save({"x": np.arange(100.0)})
    with pytest.raises(Corruption, match="format tiercheck/2"):
        parse(file)


def test_a_shard_of_another_format_is_refused_by_its_name():
    file = sample_file().replace(b"tiercheck/2", b"tiercheck/3")
    with pytest.raises(Corruption, match="of the format tiercheck/3, and this release reads tiercheck/2"):
        parse(file)


def test_a_shard_that_another_program_rewrote_is_refused():
    tensors = safetensors.torch.load(sample_file())
    with pytest.raises(Corruption, match="does not begin as a file of format tiercheck/2"):
        parse(safetensors.torch.save(tensors, {"format": "tiercheck/2"}))


class TestVerificationInParts:
    """What threads take in any order, with long tensors in several parts."""

    @pytest.fixture
    def content(self):
        nbytes = 2 * BLOCK_NBYTES + 100
        tensors = [
            *sample_entries(),
            TensorEntry("long", "U8", (nbytes,), np.random.default_rng(1).bytes(nbytes)),
            TensorEntry("block", "U8", (BLOCK_NBYTES,), bytes(BLOCK_NBYTES)),
        ]
        return bytearray(b"".join(payload(METADATA, tensors, OBJECTS)))

    def verify(self, content):
        verification = Verification(parse(content))
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(verification.hash, reversed(verification.parts)))
        verification.finish()

    def test_whole_blocks_are_shared_and_small_tensors_are_taken_together(self, content):
        parts = Verification(parse(content)).parts
        first, *long, last = [[(extent.spec.name, block) for extent, block in part] for part in parts]
        assert long == [[("long", 0)], [("long", 1)], [("long", 2)], [("block", 0)]]
        assert {name for name, _ in first} == {each.name for each in sample_entries()} and len(last) == len(OBJECTS)
        self.verify(content)

    def test_a_damaged_byte_is_found_wherever_it_is(self, content):
        shard = parse(content)
        for extent in shard.header.extents:
            start, stop = (shard.header.nbytes + each for each in (extent.start, extent.stop))
            blocks = range(start, stop, BLOCK_NBYTES)
            for at in {start, stop - 1, *blocks, *(block - 1 for block in blocks[1:])} if stop > start else ():
                content[at] ^= 1
                with pytest.raises(Corruption, match=extent.spec.name.rpartition(":")[2]):
                    self.verify(content)
                content[at] ^= 1
        self.verify(content)

    def test_what_was_verified_is_not_hashed_again(self, content):
        shard = parse(content)
        shard.verify()
        assert Verification(shard).parts == []
        Verification(shard).finish()
