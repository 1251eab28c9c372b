"""Which tensors a base refers to: bits decide."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tiercheck.errors import Corruption
from tiercheck.format.container import Shard, parse
from tiercheck.format.references import read_references, referred
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.keys import ShardKey
from tiercheck.streams.records.base import BaseCapture, base_nbytes, read_base
from tiercheck.streams.records.constants import Constants

SIZE = 160


class Model(torch.nn.Module):
    def __init__(self, frozen: int = SIZE, buffer: int = 1) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.arange(float(frozen * frozen)).view(frozen, frozen), requires_grad=False)
        self.trained = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("mask", torch.ones(buffer))


class Bases:
    """The bases of one rank, one after the other."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.provider = ModuleProvider(model, torch.optim.AdamW([model.trained]))
        self.constants = Constants(self.provider)
        self.version = -1
        self.held: Shard | None = None
        """The newest constants."""

    def next(self, meanwhile: Callable[[], object] = lambda: None) -> Shard | None:
        """``None``: it is given up. ``meanwhile``: while it is on its way, and training goes on."""
        self.version += 1
        capture = BaseCapture(self.provider, ShardKey.base(1, self.version, 0), 1, constants=self.constants)
        made = capture.constants
        room = memoryview(bytearray(made.nbytes_max if made else 0))
        memory = memoryview(bytearray(capture.nbytes_max))
        if made is not None:
            made.copy(room)
        capture.copy(memory)
        length = made.finish() if made is not None else 0
        nbytes = capture.finish()
        if capture.disturbed:
            return None
        as_captured = self.model.frozen.clone()
        meanwhile()
        capture.arrived()
        if made is not None:
            self.held = parse(room[:length], key=str(made.key))
        base = parse(memory[:nbytes], key=str(capture.key))
        found = read_base(base, self.held if base.metadata.refers_to else None, tier="here").extras
        assert torch.equal(found["frozen"], as_captured)
        assert torch.equal(found["mask"], self.model.mask)
        return base


def test_frozen_parameters_are_referred_to_from_the_first_base_on() -> None:
    bases = Bases(Model())
    for version in range(3):
        base = bases.next()
        assert base is not None
        assert (base.metadata.refers_to, "extra/frozen" in base) == ((1, 0), False), version
    assert base.nbytes < 20_000


def test_few_bytes_are_stored_with_each_base() -> None:
    base = Bases(Model(frozen=8)).next()
    assert base is not None
    assert (base.metadata.refers_to, "extra/frozen" in base) == ((), True)


def test_a_write_that_no_sample_sees_costs_one_base_and_no_bit() -> None:
    bases = Bases(Model())
    bases.next()
    bases.model.frozen.data[5, 7] = -1  # past torch's counters, beside the elements that are sampled
    assert bases.next() is None
    base = bases.next()
    assert base is not None
    assert base.metadata.refers_to == (1, 2), "it is much, and stands still: others take its place"
    bases.model.frozen.data.mul_(2)
    assert bases.next() is not None


def test_a_write_that_is_seen_while_constants_are_on_their_way_costs_no_base() -> None:
    bases = Bases(Model())
    with torch.no_grad():
        bases.next(meanwhile=lambda: bases.model.frozen.mul_(2))
    base = bases.next()
    assert base is not None, "it was given up"
    assert base.metadata.refers_to != (1, 0), "not one tensor is what it was"


def test_what_changes_at_each_base_is_stored_with_it() -> None:
    bases = Bases(Model())
    bases.next()
    held = []
    for _ in range(4):
        with torch.no_grad():
            bases.model.frozen += 1
        base = bases.next()
        assert base is not None
        held.append("extra/frozen" in base)
    assert held == [False, True, True, True], "once it may be that other weights were loaded"
    base = bases.next()
    assert base is not None
    assert "extra/frozen" not in base, "it stands still again"


def test_buffers_are_referred_to_once_they_stood_still() -> None:
    bases = Bases(Model(frozen=1, buffer=SIZE * SIZE))
    three = [bases.next() for _ in range(3)]
    assert ["extra/mask" in base for base in three if base] == [True, False, False]
    bases.model.mask += 1
    base = bases.next()
    assert base is not None
    assert "extra/mask" in base


def test_other_constants_than_those_that_are_meant_are_refused() -> None:
    bases, others = Bases(Model()), Bases(Model())
    base = bases.next()
    with torch.no_grad():
        others.model.frozen += 1
    others.next()
    assert base is not None
    references = read_references(base)
    assert references is not None
    assert others.held is not None
    for constants in (others.held, base):
        try:
            list(referred(references, constants))
        except Corruption as error:
            assert "extra/frozen" in str(error)
        else:
            raise AssertionError("they were taken")


def test_admission_counts_apart_what_does_not_change() -> None:
    frozen = 4 * SIZE * SIZE
    base, constants = base_nbytes(Bases(Model()).provider)
    assert constants == frozen
    assert base < 1000
