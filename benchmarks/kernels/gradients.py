"""Gradients as training makes them: heavy-tailed, clustered, different from step to step where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.training import Floats, Held, SetUp, State, Training, threads_of_torch
from tiercheck import kernels

__all__ = ["DENSE_STEPS", "RATIO", "SPARSE_STEPS", "Harvest", "harvest", "repeated", "repeated_sparse", "shuffled"]

WARMUP_STEPS = 20
SPARSE_STEPS = 50
DENSE_STEPS = 10
RATIO = 0.01


@dataclass(frozen=True)
class Harvest:
    """What a short training left. Arrays are flat, all parameters one after the other."""

    setup: SetUp
    state: Held
    """Parameters and moments after the last step."""
    dense: tuple[Floats, ...]
    """The gradients of the last :data:`DENSE_STEPS` steps, clipped, oldest first."""
    sparse: tuple[tuple[NDArray[np.uint32], Floats], ...]
    """Of each of the last :data:`SPARSE_STEPS` steps the largest hundredth of every tensor: indices, values."""
    matrix: Floats
    """The last gradient of one matrix, the largest there is."""

    @property
    def gradient(self) -> Floats:
        return self.dense[-1]


@lru_cache(maxsize=1)
def harvest(setup: SetUp) -> Harvest:
    """Train, and keep what the figures need. On one thread: on a busy machine torch's threads wait for each other."""
    with threads_of_torch(1):
        return reap(Training(setup))


def reap(training: Training) -> Harvest:
    training.train(WARMUP_STEPS)
    dense: list[Floats] = []
    sparse: list[tuple[NDArray[np.uint32], Floats]] = []
    for _ in range(SPARSE_STEPS):
        training.backward()
        gradients = training.gradients()
        sparse.append(largest(gradients, training.version))
        dense = [*dense[1 - DENSE_STEPS :], np.concatenate(list(gradients.values()))]
        training.step()
    matrix = max(gradients.values(), key=lambda gradient: gradient.size).copy()
    return Harvest(training.setup, one_array_each(training.state()), tuple(dense), tuple(sparse), matrix)


def one_array_each(state: State) -> Held:
    value, first, second = (np.concatenate([held[index] for held in state.tensors.values()]) for index in range(3))
    return value, first, second


def largest(gradients: Mapping[str, Floats], seed: int) -> tuple[NDArray[np.uint32], Floats]:
    """The largest hundredth of each tensor, as the codec ``sparse`` chooses them; indices into the concatenation."""
    offset = 0
    indices, values = [], []
    for gradient in gradients.values():
        found, kept = kernels.compact(gradient, kernels.select_threshold(gradient, RATIO, seed))
        indices.append(found + np.uint32(offset))
        values.append(kept)
        offset += gradient.size
    return np.concatenate(indices), np.concatenate(values)


def repeated(array: Floats, elements: int) -> Floats:
    """``elements`` of it, beginning anew where it ends; memory of its own."""
    return np.resize(array, elements)


def repeated_sparse(
    sparse: tuple[NDArray[np.uint32], Floats], period: int, elements: int
) -> tuple[NDArray[np.uint32], Floats]:
    """The same of a sparse gradient of ``period`` elements."""
    indices, values = sparse
    times = -(-elements // period)
    everywhere = np.concatenate([indices.astype(np.int64) + period * n for n in range(times)])
    within = everywhere < elements
    return everywhere[within].astype(np.uint32), np.tile(values, times)[within]


def shuffled(array: Floats) -> Floats:
    """In a random order, which is the same every time: nothing is clustered any more."""
    return np.random.default_rng(0).permutation(array)
