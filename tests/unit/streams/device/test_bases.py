"""Bases of a state on a device: read where training's stream stood, whatever runs when."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.device_state import DeviceState
from tests.reordering import Reordering, uncovered
from tiercheck.errors import UnsupportedSetup
from tiercheck.format import container
from tiercheck.keys import ShardKey
from tiercheck.streams.device import reading
from tiercheck.streams.records.base import BaseCapture, read_base
from tiercheck.streams.records.differential import DifferentialStream
from tiercheck.streams.tensors.writes import Watch

SEEDS = range(25)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK_NBYTES", 256)


def saved(capture: BaseCapture, memory: bytearray) -> Mapping[str, Any]:
    shard = container.parse(memoryview(memory)[: capture.finish()])
    shard.verify()
    constants = None
    base = read_base(shard, constants, tier="test", alone=True)
    return {
        "masters": copy.deepcopy(dict(base.masters)),
        "state": {name: copy.deepcopy(dict(each)) for name, each in base.optimizer_state.items()},
        "extras": {name: each.clone() for name, each in base.extras.items() if not each.is_meta},
    }


def check(found: Mapping[str, Any], expected: DeviceState, version: int, seed: int) -> None:
    true = expected.at(version)
    for name, tensor in true["masters"].items():
        assert torch.equal(found["masters"][name], tensor), f"master {name} of version {version} (seed {seed})"
    for name, held in true["state"].items():
        for key, tensor in held.items():
            assert torch.equal(found["state"][name][key], tensor), f"{key} of {name}, version {version} (seed {seed})"
    for name, tensor in found["extras"].items():
        assert torch.equal(tensor, true["extras"][name]), f"extra {name} of version {version} (seed {seed})"


def training_with_bases(device: Reordering, *, stream: str = "training") -> None:
    """Bases of three versions, each copied while the next iteration runs. The loop is on a stream of its own."""
    state = DeviceState(device)
    recorded = DifferentialStream(state, "exact", 1, device=device)
    with device.on(device.side(stream)):
        for version in range(1, 4):
            state.step()
            recorded.mark_stepped()
            capture = recorded.base(ShardKey.base(1, version, 0))
            recorded.mark_recorded()
            memory = bytearray(capture.nbytes_max)
            with device.on(device.default):  # another thread
                if capture.constants is not None:
                    constants = bytearray(capture.constants.nbytes_max)
                    capture.constants.copy(memoryview(constants))
                capture.copy(memoryview(memory))
            state.forward()
            assert not capture.let_change(), f"nothing wrote to it (seed {device.seed})"
            state.step()
            with device.on(device.default):
                capture.arrive()
            assert not capture.disturbed, f"nothing wrote to it (seed {device.seed})"
            if capture.constants is not None:
                nbytes = capture.constants.finish()
                frozen = container.parse(memoryview(constants)[:nbytes])
                frozen.verify()
                same = bytes(frozen.entry("extra/frozen").data) == state.frozen_bytes
                assert same, f"frozen (seed {device.seed})"  # not the bytes: explaining how they differ takes minutes
            check(saved(capture, memory), state, 2 * version - 1, device.seed)
            capture.arrived()
    device.finish()
    state.check_now()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stream", ["training", "default"])
def test_a_base_is_of_the_moment_it_was_made(seed: int, stream: str) -> None:
    training_with_bases(Reordering(seed), stream=stream)


def test_every_wait_of_a_base_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the samples, which are taken behind all copies, is waiting for these, too."""
    arriving = ("host wait", "reading.py")
    assert [site for site in uncovered(training_with_bases, SEEDS) if site[:2] != arriving] == []
    monkeypatch.setattr(Watch, "compared_in", lambda watch, stream: None)
    assert [site for site in uncovered(training_with_bases, SEEDS) if site[1] == "reading.py"] == []


def base_of(state: DeviceState, device: Reordering) -> tuple[BaseCapture, bytearray]:
    recorded = DifferentialStream(state, "exact", 1, device=device)
    capture = recorded.base(ShardKey.base(1, state.version, 0))
    memory = bytearray(capture.nbytes_max)
    constants = capture.constants
    assert constants is not None
    with device.on(device.default):
        constants.copy(memoryview(bytearray(constants.nbytes_max)))
        capture.copy(memoryview(memory))
    return capture, memory


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("seen", [True, False])
def test_a_base_that_was_written_to_while_it_was_read_is_none(seed: int, seen: bool) -> None:
    device = Reordering(seed)
    state = DeviceState(device)
    with device.on(device.side("training")):
        state.step()
        capture, memory = base_of(state, device)
        write = device.write if seen else device.write_unseen
        write(state.masters()["two"], lambda master: master.add_(1))
        write(state.frozen()["frozen"], lambda frozen: frozen.mul_(2))
        if seed % 2:
            assert capture.let_change() or not seen, f"seed {seed}"
        capture.arrive()
    if seen:
        assert capture.disturbed, f"seed {seed}"
    if not capture.disturbed:  # the write came behind the reading
        assert capture.constants is not None
        capture.constants.finish()
        check(saved(capture, memory), state, 1, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_write_after_the_step_was_let_go_on_does_no_harm(seed: int) -> None:
    device = Reordering(seed)
    state = DeviceState(device)
    with device.on(device.side("training")):
        state.step()
        capture, memory = base_of(state, device)
        assert not capture.let_change()
        device.write(state.masters()["two"], lambda master: master.add_(1))
        device.write_unseen(state.masters()["one"], lambda master: master.add_(1))
        capture.arrive()
    assert not capture.disturbed, f"seed {seed}"
    assert capture.constants is not None
    capture.constants.finish()
    check(saved(capture, memory), state, 1, seed)


def test_frozen_weights_are_not_cloned(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Reordering(0)
    state = DeviceState(device)
    made: list[torch.Tensor] = []
    like = device.like
    monkeypatch.setattr(device, "like", lambda tensor: made.append(tensor) or like(tensor))
    for _ in range(2):
        base_of(state, device)
    assert {id(each) for each in made} <= {id(each) for each in state.buffers().values()}


def test_a_graph_that_is_being_captured_takes_no_base() -> None:
    device = Reordering(0)
    state = DeviceState(device)
    recorded = DifferentialStream(state, "exact", 1, device=device)
    device.capturing = True
    with pytest.raises(UnsupportedSetup, match="graph"):
        recorded.base(ShardKey.base(1, 1, 0))
