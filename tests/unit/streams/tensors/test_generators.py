"""What is recorded of the random generators brings them back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training import Training, memory
from tiercheck.format import host_state
from tiercheck.hierarchy import Hierarchy
from tiercheck.streams.tensors import generators
from tiercheck.streams.tensors.generators import random_state, restore_random_state
from tiercheck.types import Fidelity

DRAWS: dict[str, Callable[[], object]] = {
    "random": random.random,
    "a Gaussian": lambda: random.gauss(0, 1),
    "many": lambda: random.sample(range(9999), 700),
    "a seed": lambda: random.seed("x"),
}


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    python, numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(of_torch)


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=9))
def test_pythons_state_comes_back_as_it_was(draws: list[str]) -> None:
    for draw in draws:
        DRAWS[draw]()
    before = random.getstate()
    state = host_state.unpack(host_state.pack(random_state()))
    random.seed(99)
    restore_random_state(state)
    assert random.getstate() == before


def test_all_of_them_go_on_as_they_would_have() -> None:
    def drawn() -> list[object]:
        numbers = [random.random(), random.gauss(0, 1), np.random.random(), np.random.standard_normal()]
        return [*numbers, torch.rand(3).tolist()]

    for _ in range(3):
        drawn()
        state = host_state.unpack(host_state.pack(random_state()))
        expected = [drawn(), drawn()]
        restore_random_state(state)
        assert [drawn(), drawn()] == expected


def test_a_state_whose_words_are_numbers_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an interpreter whose generator is another one."""
    monkeypatch.setattr(generators, "TWISTER_VERSION", 0)
    before = random.getstate()
    state = host_state.unpack(host_state.pack(random_state()))
    assert state["python"] == before
    random.seed(99)
    restore_random_state(state)
    assert random.getstate() == before


class Gpus:
    """As many as are set, each with a generator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: list[torch.Tensor] = []
        monkeypatch.setattr(generators, "gpus_here", lambda: len(self.states))
        monkeypatch.setattr("torch.cuda.get_rng_state_all", lambda: [each.clone() for each in self.states])
        monkeypatch.setattr("torch.cuda.get_rng_state", lambda index: self.states[index].clone())
        monkeypatch.setattr("torch.cuda.set_rng_state", self.set)

    def set(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state.clone()

    def reset(self, *values: int) -> None:
        self.states = [torch.full((16,), value, dtype=torch.uint8) for value in values]

    @property
    def values(self) -> list[int]:
        return [int(each[0]) for each in self.states]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


@pytest.mark.parametrize(
    ("saved", "here", "after", "told"),
    [
        ((1, 2), (8, 9), [1, 2], None),
        ((1, 2, 3, 4), (8, 9), [1, 2], "of 4 GPUs, and 2 are visible here: those of cuda:2 to cuda:3 are not restored"),
        ((1,), (8, 9), [1, 9], "of 1 GPUs, and 2 are visible here: those of cuda:1 begin as they are"),
        ((1,), (), [], "of 1 GPUs, and 0 are visible here: those of cuda:0 are not restored"),
        ((), (8,), [8], "of 0 GPUs, and 1 are visible here: those of cuda:0 begin as they are"),
    ],
)
def test_a_job_that_sees_other_gpus_resumes_and_says_which_generators_are_not_restored(
    gpus: Gpus, saved: tuple[int, ...], here: tuple[int, ...], after: list[int], told: str | None
) -> None:
    hierarchy = Hierarchy.of(memory())
    gpus.reset(*saved)
    before = Training()
    with before.attach(hierarchy):
        before.step(1)
    gpus.reset(*here)
    training = Training()
    with training.attach(hierarchy) as checkpointer:
        recovery = checkpointer.recovery
        training.backward(2)
        assert gpus.values == after
    assert training.parameters() == before.states[1]
    assert (recovery.version, recovery.fidelity is Fidelity.EXACT) == (1, told is None)
    assert told is None or any(told in note for note in recovery.notes)
