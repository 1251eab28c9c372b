"""A replay of SGD ends with the very bits of torch's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.replays import Positional, differing_values, replay_of, run_optimizer, run_replay
from tests.unit.streams.optimizers.test_adam import random_problem
from tests.unit.streams.optimizers.test_adam_variants import sparse
from tiercheck.errors import ConfigurationError
from tiercheck.kernels.gradients import Gradient, dense
from tiercheck.kernels.sgd import SgdStep
from tiercheck.streams.optimizers.registry import optimizer_of

SGD = "torch.optim.sgd.SGD"
OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    {"momentum": 0.95, "nesterov": True, "weight_decay": 0.1},
]
CASES = list(product(["single_tensor", "foreach", "fused"], ["numba_sgd", "reference_sgd"]))


def certain(implementation: str, choose: str | None = None) -> Positional:
    replay = replay_of(SGD, implementation, choose)
    assert replay is not None
    return replay


def differing(
    replay: Positional, size: int, gradients: Sequence[Gradient], options: dict[str, Any], threads: int
) -> int:
    start, settings = random_problem(size, 0)[0], {**OPTIONS, **options}
    whole = [dense(each, size) for each in gradients]
    expected = run_optimizer(SGD, replay.implementation, start, whole, settings)
    return differing_values(run_replay(replay, start, gradients, settings, threads=threads), expected)


@pytest.mark.parametrize(("implementation", "choose"), CASES)
def test_the_same_bits_with_sparse_gradients_denormals_and_the_largest(implementation: str, choose: str) -> None:
    """At every small size, and past a tile."""
    replay = certain(implementation, choose)
    for size, options in product((*range(1, 34, 4), 511, 513, 20_003), VARIANTS):
        whole = random_problem(size, 4)[1]
        for gradient in whole:
            gradient[::7] *= np.float32(1e-40)
            gradient[[min(5, size - 1), -1]] = 3e38, np.inf
        gradients: list[Gradient] = [sparse(each, 0.05, seed) for seed, each in enumerate(whole)]
        gradients[2] = whole[2]
        assert differing(replay, size, gradients, options, threads=1) == 0, (size, options)


@pytest.mark.parametrize("implementation", ["single_tensor", "fused"])
def test_a_large_tensor_on_threads_in_two_batches(implementation: str) -> None:
    replay = certain(implementation)
    start, gradients = random_problem(1_000_003, 4)
    options = {**OPTIONS, "momentum": 0.9}
    expected = run_optimizer(SGD, implementation, start, gradients, options)
    for threads in (1, 2, 3):
        param, buffer = start.copy(), np.full_like(start, np.nan)
        for first in (0, 2):
            steps = [optimizer_of(SGD).step(options, count + 1) for count in (first, first + 1)]
            replay(param, buffer, gradients[first : first + 2], steps, threads=threads)
        assert differing_values([param, buffer], expected) == 0


def test_a_sum_of_gradients_is_not_the_same() -> None:
    """Why differentials of SGD are not merged by adding them up."""
    start, gradients = random_problem(10_000, 2)
    stepped, summed = start.copy(), start.copy()
    step = optimizer_of(SGD).step(OPTIONS, 2)
    certain("fused")(stepped, None, gradients, [step, step])
    certain("fused")(summed, None, [gradients[0] + gradients[1]], [step])
    assert differing_values([summed], [stepped]) > 0


class TestRefusals:
    def test_what_cannot_be_replayed(self) -> None:
        assert optimizer_of(SGD).reason_not_replayable({**OPTIONS, "differentiable": True}) == "differentiable is on"
        assert optimizer_of(SGD).reason_not_replayable({"lr": 1.0}) is not None
        with pytest.raises(ConfigurationError, match="call the optimizer"):
            optimizer_of(SGD).step({"lr": 1.0}, 1)
        with pytest.raises(ConfigurationError, match="needs momentum"):
            SgdStep(lr=0.1, nesterov=True)

    def test_the_options_of_a_real_optimizer_are_understood(self) -> None:
        group = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.25).param_groups[0]
        assert optimizer_of(SGD).step(group, 1) == SgdStep(lr=0.5, momentum=0.25, first=True)

    def test_nesterov_s_step_while_the_momentum_is_warmed_up_from_zero_is_a_plain_one(self) -> None:
        """torch refuses that of a new optimizer, and steps so if a schedule sets it."""
        options = {**OPTIONS, "nesterov": True}
        assert optimizer_of(SGD).step(options, 2) == SgdStep(lr=0.1)
        start, gradients = random_problem(33, 0)
        parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
        made = torch.optim.SGD([parameter], lr=0.1, momentum=0.5, nesterov=True)
        made.param_groups[0]["momentum"] = 0.0
        for each in gradients:
            parameter.grad = torch.from_numpy(each.copy())
            made.step()
        replayed = run_replay(certain("single_tensor"), start, gradients, options, threads=1)
        assert differing_values(replayed, [parameter.detach().numpy()]) == 0

    def test_state_and_steps_that_do_not_fit(self) -> None:
        replay, p, b, g = certain("fused"), *np.zeros((3, 8), np.float32)
        plain, momentum = SgdStep(lr=0.1), SgdStep(lr=0.1, momentum=0.9)
        for buffer, step in ((None, momentum), (b, plain)):
            with pytest.raises(ConfigurationError, match="these steps need the state"):
                replay(p, buffer, [g], [step])
        first = SgdStep(lr=0.1, momentum=0.9, first=True)
        with pytest.raises(ConfigurationError, match="only the first"):
            replay(p, b, [g, g], [momentum, first])
        with pytest.raises(ConfigurationError, match="a gradient a step"):
            replay(p, None, [], [plain])
        with pytest.raises(ConfigurationError, match="at least one thread"):
            replay(p, None, [g], [plain], threads=0)

    def test_another_environment_is_nobodys(self) -> None:
        for changed in ({"torch_version": "1"}, {"instruction_set": "SVE"}, {"device": "cuda"}):
            assert replay_of(SGD, "fused", **changed) is None
        with pytest.raises(ConfigurationError, match="numba_sgd, reference_sgd"):
            certain("fused", "numba")
