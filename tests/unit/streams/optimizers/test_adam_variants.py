"""Replays of amsgrad, maximize, scaled and sparse gradients end with the very bits of the torch optimizer too."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.replays import Positional, differing_values, replay_of, run_optimizer, run_replay
from tests.unit.streams.optimizers.test_adam import ADAM, ADAMW, CASES, CLASSES, OPTIONS, certain, random_problem
from tiercheck.errors import ConfigurationError
from tiercheck.kernels import accuracy
from tiercheck.kernels.adam import AdamStep, Coefficients, SparseGradient
from tiercheck.kernels.gradients import Gradient, dense
from tiercheck.kernels.runs import RUN_MAX, TOLERANCE, runs_of
from tiercheck.streams.optimizers.registry import optimizer_of

Array = NDArray[np.float32]
KINDS = [ADAM, ADAMW]


def trained(
    kind: str, implementation: str, start: Array, gradients: Sequence[Gradient], options: dict[str, Any]
) -> list[Array]:
    whole = [dense(each, start.size) for each in gradients]
    return run_optimizer(kind, implementation, start, whole, {**OPTIONS, **options})


def replayed(
    replay: Positional, start: Array, gradients: Sequence[Gradient], options: dict[str, Any], threads: int = 1
) -> list[Array]:
    return run_replay(replay, start, gradients, {**OPTIONS, **options}, threads=threads)


def sparse(gradient: Array, density: float, seed: int = 0) -> SparseGradient:
    kept = np.flatnonzero(np.random.default_rng(seed).random(gradient.size) < density).astype(np.uint32)
    return SparseGradient(kept, gradient[kept])


@pytest.mark.parametrize(("implementation", "choose"), CASES)
class TestVariants:
    @given(
        kind=st.sampled_from(KINDS),
        size=st.sampled_from([1, 7, 8, 9, 31, 513]) | st.integers(1, 600),
        seed=st.integers(0, 99),
        density=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
        options=st.fixed_dictionaries(
            {
                "lr": st.floats(1e-8, 1.0),
                "betas": st.tuples(st.floats(1e-6, 0.9999), st.floats(0.0, 0.99999)),
                "eps": st.sampled_from([1e-8, 1e-6, 1e-15]),
                "weight_decay": st.sampled_from([0.0, 1e-4, 0.1]),
                "amsgrad": st.booleans(),
                "maximize": st.booleans(),
            }
        ),
    )
    @settings(max_examples=30)
    def test_any_options(
        self,
        implementation: str,
        choose: str | None,
        kind: str,
        size: int,
        seed: int,
        density: float,
        options: dict[str, Any],
    ) -> None:
        replay = certain(kind, implementation, choose)
        start, gradients = random_problem(size, 4, seed)
        gradients[2] *= np.float32(0.1)  # so that a maximum stays
        some = [each if at == 1 else sparse(each, density, at) for at, each in enumerate(gradients)]
        expected = trained(kind, implementation, start, some, options)
        assert differing_values(replayed(replay, start, some, options), expected) == 0

    def test_a_maximum_of_infinities_and_nans(self, implementation: str, choose: str | None) -> None:
        """Where torch's vectors and what is behind the last of them treat a NaN otherwise."""
        replay = certain(ADAMW, implementation, choose)
        for size in (8, 13, 24):
            start, gradients = random_problem(size, 4)
            for position, value in ((0, np.nan), (size - 1, np.nan), (2, np.inf), (size - 2, -np.inf)):
                gradients[1][position] = value
            expected = trained(ADAMW, implementation, start, gradients, {"amsgrad": True})
            actual = replayed(replay, start, gradients, {"amsgrad": True})
            assert differing_values(actual, expected) == 0, size

    def test_a_clipped_gradient_with_its_coefficient(self, implementation: str, choose: str | None) -> None:
        """The gradient as it was before torch clipped it in place, and what torch multiplied it with."""
        start, gradients = random_problem(517, 3)
        flags = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
        for kind, optimizer_class in CLASSES.items():
            parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
            optimizer = optimizer_class([parameter], **OPTIONS, **flags)
            steps = []
            for count, gradient in enumerate(gradients, start=1):
                parameter.grad = torch.from_numpy(gradient.copy())
                norm = torch.nn.utils.clip_grad_norm_([parameter], 0.05)
                coefficient = torch.clamp(0.05 / (norm + 1e-6), max=1.0)
                assert coefficient < 1
                optimizer.step()
                steps.append(replace(optimizer_of(kind).step(OPTIONS, count), gradient_scale=coefficient.item()))
            held = optimizer.state[parameter]
            expected = [each.detach().numpy() for each in (parameter, held["exp_avg"], held["exp_avg_sq"])]
            state = [start.copy(), np.zeros_like(start), np.zeros_like(start)]
            certain(kind, implementation, choose)(*state, gradients, steps)
            assert differing_values(state, expected) == 0, kind


@given(data=st.data())
@settings(max_examples=25)
def test_sparse_is_dense_with_zeros_on_any_threads(data: st.DataObject) -> None:
    """Also over the pieces that threads take, and past the end of a tile."""
    replay = certain(ADAMW, "fused", "numba")
    size = data.draw(st.sampled_from([3, 511, 512, 513, 16_383, 16_385, 200_003]))
    seed, threads = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 3))
    start, whole = random_problem(size, 5, seed)
    gradients = [sparse(each, data.draw(st.sampled_from([0.0, 0.003, 0.2])), seed) for each in whole]
    options = {"betas": (data.draw(st.sampled_from([0.4, 0.9, 0.95])), 0.999), "amsgrad": data.draw(st.booleans())}
    expected = replayed(replay, start, [each.dense(size) for each in gradients], options)
    actual = replayed(replay, start, gradients, options, threads=threads)
    assert differing_values(actual, expected) == 0


class TestClosedForm:
    def problem(
        self, size: int, steps: int, scale: float, beta2: float, eps: float = 1e-8
    ) -> tuple[list[Array], list[Gradient], list[AdamStep]]:
        """State after some dense steps, gradients of magnitudes over several orders, and the sparse steps after."""
        generator = np.random.default_rng([size, steps])
        scales = (scale * np.exp(1.5 * generator.standard_normal(size))).astype(np.float32)
        options = {**OPTIONS, "betas": (0.9, beta2), "eps": eps}
        rates = {n: 1e-3 * (1 + 0.5 * np.sin(n)) for n in range(1, steps + 11)}
        counts = [optimizer_of(ADAMW).step({**options, "lr": lr}, n) for n, lr in rates.items()]
        draws = [generator.standard_normal(size, dtype=np.float32) * scales for _ in counts]
        state = [generator.standard_normal(size, dtype=np.float32) * np.float32(0.02), *np.zeros((2, size), np.float32)]
        certain(ADAMW, "fused", None)(*state, draws[:10], counts[:10])
        return state, [sparse(each, 0.01, seed) for seed, each in enumerate(draws[10:])], counts[10:]

    def error(self, state: list[Array], gradients: list[Gradient], steps: list[AdamStep], threads: int = 1) -> float:
        exact, actual = ([each.copy() for each in state] for _ in range(2))
        certain(ADAMW, "fused", None)(*exact, gradients, steps)
        closed_form()(*actual, gradients, steps, threads=threads)
        for ours, theirs in zip(actual[1:], exact[1:], strict=True):
            assert np.allclose(ours, theirs, rtol=1e-4, atol=1e-6 * float(np.abs(theirs).max()))
        off, moved = (np.linalg.norm(exact[0].astype(np.float64) - each[0]) for each in (actual, state))
        return float(off / moved)

    @pytest.mark.parametrize("steps", [1, 10, RUN_MAX + 3])
    def test_stays_within_its_bound(self, steps: int) -> None:
        """Roots far from eps, around it and far below."""
        for scale, beta2 in itertools.product((1e-3, 1e-6, 1e-8, 1e-10), (0.999, 0.95, 0.5)):
            assert self.error(*self.problem(9_001, steps, scale, beta2)) <= accuracy.ERROR_MAX, (scale, beta2)

    def test_without_eps_and_on_threads(self) -> None:
        problem = self.problem(140_001, 5, 1e-3, 0.99, eps=0.0)
        assert self.error(*problem, threads=2) <= accuracy.ERROR_MAX

    @pytest.mark.parametrize(("count", "beta2"), [(2, 0.9), (3, 0.95), (10, 0.999), (RUN_MAX, 0.95), (RUN_MAX, 0.999)])
    def test_two_fractions_stand_for_every_run(self, count: int, beta2: float) -> None:
        """In double precision, at the root from which on they may be used, and above."""
        steps = tuple(
            AdamStep(70 + n, 1e-3 * (1 - n / 200), 0.9, beta2, 1e-8, 0.1, decoupled=True) for n in range(1, count + 1)
        )
        runs = runs_of(steps)
        for first in {0, 1, count // 2, count}:
            run = runs[count, first]
            for root in (float(run["least"]) ** 0.5, 1e-8, 1e-6, 1e-2):
                if root**2 < 0.999 * run["least"]:
                    continue
                true, beta1s, beta2s = 0.0, 1.0, 1.0
                for index in range(max(first, 1), count + 1):
                    c = Coefficients.of(steps[index - 1])
                    if index > first:
                        beta1s, beta2s = beta1s * (1 - float(c.weight1)), beta2s * float(c.beta2)
                    divisor = beta2s**0.5 * root / float(c.root_correction) + float(c.eps)
                    true = true * float(c.decay) - float(c.negative_step_size) * beta1s / divisor
                found = sum(float(run[f"weight{n}"]) / (root + float(run[f"point{n}"])) for n in (1, 2))
                assert abs(found / true - 1) <= TOLERANCE + 2.0**-22, (first, root)

    def test_every_element_in_every_step(self) -> None:
        """Whole tiles are reached, again and again."""
        size = 4096 + 7
        start, whole = random_problem(size, 6)
        start *= np.float32(0.02)  # so that its own rounding is small beside the movement
        few = [sparse(each, 0.2, seed) for seed, each in enumerate(whole)]
        few[3] = SparseGradient(np.arange(900, dtype=np.uint32), whole[3][:900].copy())
        options = {"weight_decay": 0.1}
        expected = trained(ADAMW, "fused", start, few, options)
        actual = replayed(closed_form(), start, few, options)
        moved = np.linalg.norm(expected[0] - start)
        assert np.linalg.norm(actual[0] - expected[0]) <= accuracy.ERROR_MAX * moved

    def test_what_has_no_closed_form_is_exact(self) -> None:
        """Dense gradients, L2 decay and amsgrad."""
        for kind, options in ((ADAM, {}), (ADAMW, {"amsgrad": True})):
            start, whole = random_problem(3_001, 4)
            gradients = [sparse(each, 0.02, seed) for seed, each in enumerate(whole)]
            expected = replayed(certain(kind, "fused", "numba"), start, gradients, options)
            assert differing_values(replayed(closed_form(kind), start, gradients, options), expected) == 0

    def test_is_had_on_request_alone(self) -> None:
        assert certain(ADAMW, "fused", None).exact
        assert not closed_form().exact
        with pytest.raises(ConfigurationError, match="'numba' is exact"):
            closed_form(choose="numba")
        with pytest.raises(ConfigurationError, match="no replay kernel 'numba_closed_form'"):
            certain(ADAMW, "fused", "numba_closed_form")
        with pytest.raises(ConfigurationError, match=r"torch\.optim\.sgd\.SGD has no form that is not exact"):
            closed_form("torch.optim.sgd.SGD")

    def test_is_refused_where_its_self_test_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(accuracy, "movement_error", lambda replay: 1e-3)
        with pytest.raises(ConfigurationError, match=r"off by 1\.0e-03"):
            closed_form()

    def test_the_self_test_sees_a_run_forgotten(self) -> None:
        def forgetful(*arguments: Any, **named: Any) -> None:
            closed_form()(*arguments[:3], arguments[3][:-1], arguments[4][:-1])

        assert accuracy.movement_error(forgetful) > accuracy.ERROR_MAX


def closed_form(kind: str = ADAMW, choose: str | None = None) -> Positional:
    """Of an optimizer that ran anywhere."""
    elsewhere = {"torch_version": "1.0", "instruction_set": "SVE", "device": "cuda"}
    replay = replay_of(kind, "called", choose, exact=False, **elsewhere)
    assert replay is not None
    return replay


class TestRefusals:
    @pytest.mark.parametrize(
        ("indices", "values", "message"),
        [
            (np.array([1, 1], np.uint32), np.ones(2, np.float32), "must ascend"),
            (np.array([2, 1], np.uint32), np.ones(2, np.float32), "must ascend"),
            (np.array([1], np.int64), np.ones(1, np.float32), "indices must be 1-D uint32"),
            (np.array([1], np.uint32), np.ones(1, np.float64), "values must be 1-D float32"),
            (np.array([1], np.uint32), np.ones(2, np.float32), "1 indices do not fit 2 values"),
            (np.arange(4, dtype=np.uint32)[::2], np.ones(2, np.float32), "contiguous"),
        ],
    )
    def test_sparse_gradients_that_are_none(self, indices: Any, values: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            SparseGradient(indices, values)

    def test_nothing_is_written_out_of_bounds(self) -> None:
        state = [np.zeros(8, np.float32) for _ in range(3)]
        outside = SparseGradient(np.array([3, 8], np.uint32), np.ones(2, np.float32))
        with pytest.raises(ConfigurationError, match="has the index 8, and param 8 elements"):
            certain(ADAMW, "fused", None)(*state, [outside], [optimizer_of(ADAMW).step(OPTIONS, 1)])
        values = SparseGradient(np.array([0], np.uint32), state[0][:1])
        with pytest.raises(ConfigurationError, match="param overlaps gradients"):
            certain(ADAMW, "fused", None)(*state, [values], [optimizer_of(ADAMW).step(OPTIONS, 1)])

    def test_the_maximum_of_amsgrad_is_neither_missing_nor_ignored(self) -> None:
        p, m, v, x, g = (np.zeros(8, np.float32) for _ in range(5))
        replay = certain(ADAMW, "fused", None)
        plain, amsgrad = optimizer_of(ADAMW).step(OPTIONS, 1), optimizer_of(ADAMW).step({**OPTIONS, "amsgrad": True}, 1)
        for steps, largest in (([amsgrad], None), ([plain], x)):
            with pytest.raises(ConfigurationError, match="these steps need the state exp_avg, exp_avg_sq"):
                replay(p, m, v, [g], steps, max_exp_avg_sq=largest)
        with pytest.raises(ConfigurationError, match="all need the same state"):
            replay(p, m, v, [g, g], [plain, amsgrad], max_exp_avg_sq=x)
