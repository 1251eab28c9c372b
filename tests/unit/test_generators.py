"""What is recorded of the random generators brings them back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiercheck import objects
from tiercheck.streams import generators
from tiercheck.streams.generators import random_state, restore_random_state

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
    state = objects.unpack(objects.pack(random_state()))
    random.seed(99)
    restore_random_state(state)
    assert random.getstate() == before


def test_all_of_them_go_on_as_they_would_have() -> None:
    def drawn() -> list[object]:
        numbers = [random.random(), random.gauss(0, 1), np.random.random(), np.random.standard_normal()]
        return [*numbers, torch.rand(3).tolist()]

    for _ in range(3):
        drawn()
        state = objects.unpack(objects.pack(random_state()))
        expected = [drawn(), drawn()]
        restore_random_state(state)
        assert [drawn(), drawn()] == expected


def test_a_state_whose_words_are_numbers_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an interpreter whose generator is another one."""
    monkeypatch.setattr(generators, "TWISTER_VERSION", 0)
    before = random.getstate()
    state = objects.unpack(objects.pack(random_state()))
    assert state["python"] == before
    random.seed(99)
    restore_random_state(state)
    assert random.getstate() == before
