"""Replays by the CUDA kernels: the bits of the reference, for torch's CPU rounding and for each candidate of a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu.inputs import Floats, adam_steps, gradient, powers_on_host, same
from tests.gpu.machine import Machine, need_cupy
from tiercheck.kernels.adam import AdamStep
from tiercheck.kernels.gpu_adam import ROUNDINGS, Rounding, Scheme
from tiercheck.kernels.gradients import SparseGradient
from tiercheck.kernels.reference import adam, gpu_adam

need_cupy()

from tiercheck.kernels import cuda  # noqa: E402  it imports CuPy, which was just asked for

__all__ = ["CudaReplayTests"]

GPU_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"decoupled": False, "maximize": True},
    {"weight_decay": 0.0, "beta1": 0.4},
    {"amsgrad": True, "gradient_scale": 0.37},
)


class CudaReplayTests:
    """Part of :class:`tests.gpu.kernel_tests.CudaKernelTests`."""

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"contracted": False},
            {"decoupled": False},
            {"decoupled": False, "contracted": False},
            {"weight_decay": 0.0, "beta1": 0.4},
            {"beta1": 0.5, "maximize": True},
            {"gradient_scale": 0.37, "decoupled": False, "maximize": True},
            {"amsgrad": True},
            {"amsgrad": True, "decoupled": False, "gradient_scale": 1 / 3},
            {"beta2": 0.0, "eps": 0.0},
        ],
    )
    def test_replay(self, machine: Machine, options: dict[str, Any]) -> None:
        options = dict(options)
        contracted = options.pop("contracted", True)
        for size in machine.sizes:
            dense = [gradient(size, seed, special=seed == 2) for seed in range(4)]
            dense[2][-1:] = np.nan
            steps = adam_steps(4, **options)
            self.replay_and_compare(machine, size, dense, steps, contracted)
            sparse: list[Any] = [self.some_of(each, seed) for seed, each in enumerate(dense)]
            self.replay_and_compare(machine, size, [*sparse, dense[0]], adam_steps(5, **options), contracted)

    def test_more_steps_than_a_launch_takes(self, machine: Machine) -> None:
        for count in (0, cuda.MOST_STEPS, cuda.MOST_STEPS + 1, 2 * cuda.MOST_STEPS + 3):
            dense = [gradient(67, seed, special=False) for seed in range(count)]
            mixed = [self.some_of(each, 0) if at % 3 else each for at, each in enumerate(dense)]
            self.replay_and_compare(machine, 67, dense, adam_steps(count, first=1_000), True)
            self.replay_and_compare(machine, 67, mixed, adam_steps(count), True)

    def some_of(self, dense: Floats, seed: int) -> SparseGradient:
        kept = np.flatnonzero(np.random.default_rng(seed).random(dense.size) < (0.02, 0.5, 0.0, 1.0)[seed % 4])
        return SparseGradient(kept.astype(np.uint32), dense[kept])

    def replay_and_compare(
        self, machine: Machine, size: int, gradients: list[Any], steps: list[AdamStep], contracted: bool
    ) -> None:
        amsgrad = bool(steps) and steps[0].amsgrad
        state = [gradient(size, 10, special=False) for _ in range(2)]
        state += [np.abs(gradient(size, 11 + each, special=False)) for each in range(1 + amsgrad)]
        there = [machine.put(array) for array in state]
        gradients_there = [
            cuda.SparseOnDevice(machine.put(each.indices), machine.put(each.values))
            if isinstance(each, SparseGradient)
            else machine.put(each)
            for each in gradients
        ]
        options: dict[str, Any] = {"contracted": contracted}
        largest: dict[str, Any] = {"max_exp_avg_sq": state[3]} if amsgrad else {}
        adam.replay_fused_adam(*state[:3], gradients, steps, **options, **largest)
        largest = {"max_exp_avg_sq": there[3]} if amsgrad else {}
        cuda.replay_fused_adam(*there[:3], gradients_there, steps, **options, **largest, stream=machine.stream)
        for actual, expected in zip(there, state, strict=True):
            assert same(machine.get(actual), expected)
            assert machine.intact(actual)

    @pytest.mark.parametrize("name", ROUNDINGS)
    def test_replay_as_a_gpu_rounds(self, machine: Machine, name: str) -> None:
        """Each candidate has the bits of its reference; the approximate ones are close where the device has them."""
        rounding = ROUNDINGS[name]
        for size in (machine.sizes[-1], 1, 0):
            dense = [gradient(size, seed, special=seed == 2) for seed in range(4)]
            for options in GPU_OPTIONS:
                if rounding.scheme is not Scheme.FAST or not options.get("amsgrad"):
                    self.replay_as_a_gpu(machine, rounding, dense, adam_steps(4, **options))
        few = [gradient(67, seed, special=False) for seed in range(cuda.MOST_STEPS + 3)]
        self.replay_as_a_gpu(machine, rounding, few, adam_steps(len(few)))

    def replay_as_a_gpu(
        self, machine: Machine, rounding: Rounding, gradients: list[Floats], steps: list[AdamStep]
    ) -> None:
        size, amsgrad = gradients[0].size, steps[0].amsgrad
        state = [gradient(size, 10, special=False), gradient(size, 11, special=False) * np.float32(1e-3)]
        state += [np.abs(gradient(size, 12 + each, special=False)) for each in range(1 + amsgrad)]
        start = [array.copy() for array in state]
        there = [machine.put(array) for array in state]
        powers = powers_on_host(rounding, {beta for step in steps for beta in (step.beta1, step.beta2)})
        arguments: dict[str, Any] = {"rounding": rounding, "powers": powers}
        largest = {"max_exp_avg_sq": state[3]} if amsgrad else {}
        gpu_adam.replay_gpu_adam(*state[:3], gradients, steps, **arguments, **largest)
        largest = {"max_exp_avg_sq": there[3]} if amsgrad else {}
        on_device = [machine.put(each) for each in gradients]
        cuda.replay_gpu_adam(*there[:3], on_device, steps, **arguments, **largest, stream=machine.stream)
        coupling = 0.0 if steps[0].decoupled else steps[0].weight_decay
        for actual, expected, begun in zip(there, state, start, strict=True):
            if rounding.scheme is Scheme.FAST and machine.stream is not None:
                finite = np.isfinite(expected) & (np.abs(expected) > 1e-30)
                most = rounding_errors(expected[finite], begun[finite], len(steps))
                if begun is not start[0]:
                    # L2 decay brings that share of the parameter's error into the moments; half a millionth at most.
                    coupled = coupling * rounding_errors(state[0][finite], start[0][finite], len(steps))
                    most += np.fmin(coupled, np.float32(5e-7))
                excess = np.abs(machine.get(actual)[finite] - expected[finite]) / most
                assert np.all(excess <= 1), f"{rounding.name}: {excess.max()} times what rounding allows"
            else:
                assert same(machine.get(actual), expected), rounding.name
            assert machine.intact(actual)


def rounding_errors(ended: Floats, begun: Floats, steps: int) -> Floats:
    """What approximate divisions and roots may make of a number. Each step rounds once more, by half a unit of a number
    that it may cancel nearly whole."""
    most: Floats = 2e-9 + 2e-5 * np.abs(ended) + steps * np.float32(2.0**-24) * np.abs(begun)
    return most
