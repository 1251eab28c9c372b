"""Training on the compressed gradient, and error feedback: what is replayed is what the optimizer stepped with."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.jobs import Job, adamw, hierarchy, name
from tests.training import Training, faulty, memory
from tiercheck.config import CheckpointConfig
from tiercheck.errors import CapacityExceeded, ConfigurationError, Mismatch, SaveError
from tiercheck.format import container
from tiercheck.format.container import ShardWriter
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.kernels import SparseGradient
from tiercheck.keys import ShardKey
from tiercheck.streams.codecs import codec_names
from tiercheck.streams.gradients import encoder
from tiercheck.streams.gradients.encoder import forget_sent
from tiercheck.streams.records.differential import DifferentialStream
from tiercheck.streams.records.recorded import read_differentials
from tiercheck.tiers.shm.namespaces import remove_namespace
from tiercheck.types import Fidelity

__all__ = ["hierarchy", "name"]

LAST, FAILED_AT, BASE_EVERY = 11, 7, 4

LOSSY = codec_names(Fidelity.APPROXIMATE)

# Whole jobs are run with one codec that stores some elements and one that stores blocks: the kit has the codecs' own.
SOME_PLAIN, SOME_FEEDBACK = ["sparse", "int8"], ["sparse+feedback", "onebit+feedback"]

OPTIMIZERS = {
    "adamw": adamw,
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9),
}


def train(hierarchy: Hierarchy, codec: str, last: int, *, flushed: bool = False, **options: Any) -> Job:
    """To version ``last``, from where the tiers have it."""
    job = Job(**options)
    job.attach(hierarchy, codec=codec, train_on_compressed=True, base_every=BASE_EVERY)
    job.train(last)
    if flushed:
        job.checkpointer.flush()
    job.checkpointer.abort()
    return job


def never_failed(codec: str, last: int, **options: Any) -> Job:
    return train(Hierarchy.of(memory()), codec, last, **options)


@pytest.mark.parametrize("codec", SOME_PLAIN)
def test_the_resumed_run_is_the_uninterrupted_one(hierarchy: Hierarchy, codec: str) -> None:
    reference = never_failed(codec, LAST)
    before = train(hierarchy, codec, FAILED_AT)
    after = train(hierarchy, codec, LAST)
    recovery = after.checkpointer.recovery
    assert (recovery.version, recovery.point.anchor) == (FAILED_AT, BASE_EVERY)
    assert recovery.fidelity is Fidelity.EXACT
    assert {**before.losses, **after.losses} == reference.losses
    assert after.state() == reference.state()


@pytest.mark.parametrize(("optimizer", "scheduled"), [("adamw", True), ("fused", False), ("sgd", True)])
def test_whatever_optimizer_steps(hierarchy: Hierarchy, optimizer: str, scheduled: bool) -> None:
    options = {"optimizer_factory": OPTIMIZERS[optimizer], "scheduled": scheduled}
    reference = never_failed("sparse", LAST, **options)
    before = train(hierarchy, "sparse", FAILED_AT, **options)
    after = train(hierarchy, "sparse", LAST, **options)
    assert {**before.losses, **after.losses} == reference.losses
    assert after.state() == reference.state()


@pytest.mark.parametrize("codec", SOME_FEEDBACK)
def test_with_feedback_the_state_is_exact_and_what_was_not_sent_since_the_base_is_still_due(
    hierarchy: Hierarchy, codec: str
) -> None:
    reference = Job()
    checkpointer = reference.attach(
        Hierarchy.of(memory()), codec=codec, train_on_compressed=True, base_every=BASE_EVERY
    )
    reference.train(BASE_EVERY)
    at_base = residuals_of(reference)
    sent = np.zeros_like(at_base, bool)

    def note(*_: Any) -> None:
        sent[sent_by(reference)] = True

    reference.optimizer.register_step_post_hook(note)
    reference.train(FAILED_AT)
    true = residuals_of(reference)
    checkpointer.abort()
    train(hierarchy, codec, FAILED_AT)
    after = train(hierarchy, codec, FAILED_AT)
    recovery = after.checkpointer.recovery
    assert (recovery.version, recovery.point.anchor) == (FAILED_AT, BASE_EVERY)
    assert recovery.fidelity is Fidelity.EXACT
    assert after.state() == reference.state()
    assert any("error feedback" in note for note in recovery.notes)
    found = residuals_of(after)
    assert np.array_equal(found, np.where(sent, np.float32(0), at_base))
    assert np.any(sent & (at_base != 0))
    if codec == "sparse+feedback":  # most of it has not been sent: to know it is better than to know nothing
        assert np.linalg.norm(true - found) < 0.9 * np.linalg.norm(true)


def residuals_of(job: Job) -> np.ndarray[Any, Any]:
    return np.concatenate(list(job.checkpointer._job.recorder._stream.encoder.residuals.values()))


def sent_by(job: Job) -> np.ndarray[Any, Any]:
    """Which elements of the gradients the optimizer is to step with are not zero."""
    return np.concatenate([parameter.grad.numpy().reshape(-1) != 0 for parameter in job.model.parameters()])


@pytest.mark.parametrize("codec", SOME_FEEDBACK)
def test_with_feedback_a_run_resumed_at_a_base_is_the_uninterrupted_one(hierarchy: Hierarchy, codec: str) -> None:
    reference = never_failed(codec, LAST)
    before = train(hierarchy, codec, 2 * BASE_EVERY, flushed=True)
    after = train(hierarchy, codec, LAST)
    assert after.checkpointer.recovery.point.anchor == after.checkpointer.recovery.version == 2 * BASE_EVERY
    assert not any("error feedback" in note for note in after.checkpointer.recovery.notes)
    assert {**before.losses, **after.losses} == reference.losses
    assert after.state() == reference.state()


def test_it_trains_otherwise_than_without(name: str) -> None:
    plain = Job()
    plain.train(3)
    for codec in LOSSY:
        assert never_failed(codec, 3).losses != plain.losses, codec


def test_the_same_differentials_are_approximate_where_training_did_not_use_them(name: str) -> None:
    for trains, expected in ((False, False), (True, True)):
        tiers = Hierarchy.of(f"shm://{name}?size=64MiB")
        for _ in range(2):
            job = Job()
            job.attach(tiers, codec="sparse", train_on_compressed=trains)
            job.train(3)
            job.checkpointer.abort()
        assert (job.checkpointer.recovery.fidelity is Fidelity.EXACT) == expected
        remove_namespace(name)


def test_a_codec_that_keeps_every_bit_is_refused() -> None:
    for codec in codec_names(Fidelity.EXACT):
        with pytest.raises(ConfigurationError, match="keeps every bit"):
            Training().attach(Hierarchy.of(memory()), codec=codec, train_on_compressed=True)


@pytest.mark.parametrize(
    "wrong",
    [{"train_on_compressed": 1}, {"train_on_compressed": "yes"}, {"encode_threads": 0}, {"encode_threads": True}],
)
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        CheckpointConfig(**wrong)


@pytest.mark.parametrize(
    ("codec", "dtype"), [("sparse", torch.bfloat16), ("int8", torch.float16), ("sparse+feedback", torch.float16)]
)
def test_low_precision_gradients_are_decoded_in_their_own_dtype(codec: str, dtype: torch.dtype) -> None:
    model = torch.nn.Linear(32, 32, bias=False).to(dtype)
    stream = make_stream(model, torch.optim.SGD(model.parameters()), codec)
    gradient = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    stepped_with = gradient.clone()
    replayed = recorded(stream, {"weight": stepped_with}, 1)["weight"]
    assert replayed.dtype is dtype
    assert torch.equal(replayed, stepped_with)
    assert not torch.equal(stepped_with, gradient)


# What lies where


def test_the_optimizer_steps_with_what_lies_in_the_tiers_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that the codec wrote to, the memory that the gradient was decoded from, and the tier's are one."""
    given: dict[str, tuple[int, int]] = {}
    decoded: list[tuple[int, int]] = []
    reserved: list[tuple[int, int]] = []
    slot, decode = ShardWriter.slot, encoder.decode

    def watched_slot(self: ShardWriter, name: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
        given[name] = extent(area := slot(self, name, dtype, shape))
        return area

    def watched_decode(encoding: Any, parts: Any, **options: Any) -> Any:
        decoded.extend(extent(part.data) for part in parts.values())
        return decode(encoding, parts, **options)

    training = Training()
    checkpointer = training.attach(
        Hierarchy.of(f"shm://{name}?size=64MiB"), codec="int8+feedback", train_on_compressed=True
    )
    reserve = checkpointer._job.recorder._memory.reserve

    async def watched_reserve(key: ShardKey, nbytes: int) -> Any:
        reservation = await reserve(key, nbytes)
        reserved.append(extent(reservation.buffer))
        return reservation

    monkeypatch.setattr(ShardWriter, "slot", watched_slot)
    monkeypatch.setattr(encoder, "decode", watched_decode)
    monkeypatch.setattr(checkpointer._job.recorder._memory, "reserve", watched_reserve)
    training.backward(1)
    seen = {}
    training.optimizer.register_step_post_hook(
        lambda *_: seen.update({n: p.grad.clone() for n, p in training.model.named_parameters()})
    )
    training.optimizer.step()
    checkpointer.end_iteration()
    monkeypatch.undo()

    written = [place for tensor, place in given.items() if "/gradient/" in tensor]
    assert len(written) == 2 * len(seen) == len(decoded)
    assert written == decoded
    ((start, stop),) = reserved
    assert all(start <= begin <= end <= stop for begin, end in written)
    checkpointer.flush()
    (path,) = Path(f"/dev/shm/tiercheck-{os.getuid()}-{name}").glob("r*/g*/differential/*.safetensors")
    (differential,) = read_differentials(container.parse(path.read_bytes()), tier="shm")
    assert {n: g.numpy().tobytes() for n, g in differential.gradients().items()} == {
        n: g.numpy().tobytes() for n, g in seen.items()
    }
    checkpointer.abort()


def extent(area: Any) -> tuple[int, int]:
    """The addresses at which memory begins and ends."""
    array = np.frombuffer(area, np.uint8)
    return array.ctypes.data, array.ctypes.data + array.nbytes


# What is not saved is trained on all the same


@pytest.mark.parametrize(
    ("codec", "strikes"),
    [
        ("sparse+feedback", lambda at: at.call == "reserve" and at.nth > 0),
        ("int8+feedback", lambda at: at.call == "publish" and at.nth % 2),
        ("sparse+feedback", lambda at: at.call == "reserve" and at.nth in (3, 4)),
        ("sparse", lambda at: at.call == "publish" and at.nth % 2),
    ],
    ids=["no-room", "no-publication", "no-room-once", "no-publication-without-feedback"],
)
def test_training_does_not_depend_on_whether_saving_works(codec: str, strikes: Any) -> None:
    options = {"codec": codec, "train_on_compressed": True, "on_save_error": "warn", "base_every": 3}
    reference, troubled = Training(), Training()
    url = memory()
    for training, place in ((reference, Hierarchy.of(memory())), (troubled, Hierarchy.of(faulty(url, strikes)))):
        checkpointer = training.attach(place, **options)
        for version in range(1, 9):
            training.step(version)
        checkpointer.abort()
    assert checkpointer.stats.failed_saves
    assert troubled.states == reference.states
    after = Training()
    again = after.attach(Hierarchy.of(url))
    assert after.parameters() == reference.states[again.version]
    again.abort()


def test_a_record_that_is_too_long_is_trained_on_and_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier's memory runs out in the middle of a version: the rest is compressed elsewhere."""
    options = {"codec": "sparse+feedback", "train_on_compressed": True, "on_save_error": "warn"}
    reference, troubled = Training(), Training()
    url = memory()
    for training, where in ((reference, memory()), (troubled, url)):
        checkpointer = training.attach(Hierarchy.of(where), **options)
        for version in range(1, 5):
            if training is troubled and version == 2:
                monkeypatch.setattr(ShardWriter, "_place", short(ShardWriter._place))
            training.step(version)
            monkeypatch.undo()
        assert checkpointer.stats.failed_saves == (training is troubled)
        checkpointer.abort()
    assert troubled.states == reference.states
    after = Training()
    again = after.attach(Hierarchy.of(url))
    assert (again.version, after.parameters()) == (4, reference.states[4])
    again.abort()


def short(place: Any) -> Any:
    """``ShardWriter._place`` with room for three parts of gradients."""
    placed: list[str] = []

    def limited(self: ShardWriter, spec: Any) -> memoryview:
        if "/gradient/" in spec.name:
            placed.append(spec.name)
            if len(placed) > 3:
                raise CapacityExceeded("no room for a fourth part")
        return place(self, spec)

    return limited


def test_a_step_that_failed_to_save_is_not_taken() -> None:
    """With ``on_save_error="fail"`` the error comes out of the step before anything has changed."""
    training = Training()
    tier = faulty(memory(), lambda at: at.call == "reserve" and at.nth > 0)
    checkpointer = training.attach(Hierarchy.of(tier), codec="sparse", train_on_compressed=True)
    with pytest.raises(SaveError):
        training.step(1)
    assert training.states[1] == training.states[0]
    checkpointer.abort()


# Residuals


def make_stream(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, codec: str, **options: Any
) -> DifferentialStream:
    return DifferentialStream(ModuleProvider(model, optimizer), codec, 1, **{"train_on_compressed": True, **options})


def recorded(stream: DifferentialStream, gradients: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """What is replayed for these gradients."""
    key = ShardKey.differential(1, version, version, 0)
    room = bytearray(stream.nbytes_max)
    capture = stream.begin(key, memoryview(room))
    capture.add(gradients)
    nbytes = capture.finish(skipped=False)
    (differential,) = read_differentials(container.parse(bytes(room[:nbytes])), tier="memory")
    return differential.gradients()


def gradients_of(model: torch.nn.Module, version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def sum_of(many: list[dict[str, torch.Tensor]]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: sum(each[name].double() for each in many).numpy() for name in many[0]}


@pytest.mark.parametrize(
    ("codec", "trains"), [*itertools.product(SOME_FEEDBACK, (False, True)), ("nf4+feedback", True)]
)
def test_what_is_not_encoded_yet_is_in_the_residual(codec: str, trains: bool) -> None:
    training = Training()
    stream = make_stream(training.model, training.optimizer, codec, train_on_compressed=trains)
    true, replayed = [], []
    for version in range(1, 7):
        gradients = gradients_of(training.model, version)
        true.append({name: each.clone() for name, each in gradients.items()})
        replayed.append(recorded(stream, gradients, version))
        if trains:
            assert all(torch.equal(gradients[name], each) for name, each in replayed[-1].items())
        else:
            assert all(torch.equal(gradients[name], each) for name, each in true[-1].items())
    wanted, found = sum_of(true), sum_of(replayed)
    for tensor, residual in stream.encoder.residuals.items():
        np.testing.assert_allclose(found[tensor].reshape(-1) + residual, wanted[tensor].reshape(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("codec", SOME_FEEDBACK)
def test_a_base_settles_the_residuals_of_the_chain_but_not_those_of_the_training(codec: str) -> None:
    training = Training()
    for trains in (False, True):
        stream = make_stream(training.model, training.optimizer, codec, train_on_compressed=trains)
        recorded(stream, gradients_of(training.model, 1), 1)
        left = {name: residual.copy() for name, residual in stream.encoder.residuals.items()}
        assert any(residual.any() for residual in left.values())
        assert stream.encoder.saved_with_bases().keys() == (left.keys() if trains else set())
        stream.mark_recorded()
        for tensor, residual in stream.encoder.residuals.items():
            assert np.array_equal(residual, left[tensor] if trains else np.zeros_like(residual))


def test_feedback_after_a_given_up_version_counts_nothing_twice() -> None:
    """A version that was encoded and not published gets a base, and what follows owes nothing to it."""
    url = memory()
    tier = faulty(url, lambda at: at.call == "publish" and "000000000002-" in str(at.key))
    training = Training()
    checkpointer = training.attach(Hierarchy.of(tier), codec="int8+feedback", on_save_error="warn")
    residuals = checkpointer._job.recorder._stream.encoder.residuals
    training.step(1)
    assert any(each.any() for each in residuals.values())
    training.step(2)  # a base holds it
    assert not any(each.any() for each in residuals.values())
    training.step(3)
    checkpointer.abort()
    recovery = Training().attach(Hierarchy.of(url)).recovery
    assert (recovery.point.anchor, recovery.version) == (2, 3)


def test_what_was_sent_is_no_longer_due() -> None:
    residuals = {"a": torch.arange(1.0, 7.0), "b": torch.ones(4), "c": torch.ones(2)}
    sparse = SparseGradient(np.array([0, 5], np.uint32), np.array([3.0, 0.0], np.float32))
    forget_sent(residuals, {"a": sparse, "b": torch.tensor([[0.0, -0.0], [float("nan"), 2.0]])})
    assert {name: each.tolist() for name, each in residuals.items()} == {
        "a": [0.0, 2.0, 3.0, 4.0, 5.0, 0.0],
        "b": [1.0, 1.0, 0.0, 0.0],
        "c": [1.0, 1.0],
    }


def test_residuals_of_another_model_are_refused() -> None:
    training = Training()
    encoder = make_stream(training.model, training.optimizer, "int8+feedback").encoder
    saved = {name: each.clone() + 1 for name, each in encoder.saved_with_bases().items()}
    encoder.load(saved)
    assert all(np.all(each == 1) for each in encoder.residuals.values())
    first = next(iter(saved))
    with pytest.raises(Mismatch, match=first):
        encoder.load({**saved, first: torch.zeros(3)})
    assert all(np.all(each == 1) for each in encoder.residuals.values())
    encoder.load({})
    assert not any(each.any() for each in encoder.residuals.values())


def test_threads_change_nothing() -> None:
    for codec in ("sparse+feedback", "int8"):
        states = []
        for threads in (1, 2):
            training = Training()
            checkpointer = training.attach(
                Hierarchy.of(memory()), codec=codec, train_on_compressed=True, encode_threads=threads
            )
            for version in range(1, 4):
                training.step(version)
            checkpointer.abort()
            states.append(training.states)
        assert states[0] == states[1]
