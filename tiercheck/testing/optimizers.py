"""The kit for replayable optimizers: every form against the optimizer itself, bit for bit.

An optimizer's own test file names it::

    class TestLion(OptimizerTests):
        kind = "lion_optimizer.Lion"

It is made through its entry point, as a recovery makes it. Needs pytest, Hypothesis and torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercheck.testing.plugin  # noqa: F401  (registers the kit's assertions for rewriting)
from tiercheck.errors import ConfigurationError
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.kernels import SparseGradient
from tiercheck.kernels.gradients import Gradient, dense
from tiercheck.streams.optimizers import certification
from tiercheck.streams.optimizers.optimizer import Array, Form, ReplayableOptimizer
from tiercheck.streams.optimizers.registry import optimizer_of
from tiercheck.streams.optimizers.replay import Replay, Setting, replay_for
from tiercheck.streams.replay.fidelity import Tally
from tiercheck.streams.replay.kernel_selection import kernel_for
from tiercheck.streams.replay.replay import Replayer
from tiercheck.streams.replay.runs import Run, Step
from tiercheck.testing.contents import names_that_differ

__all__ = ["OptimizerTests"]

EXAMPLES = settings(max_examples=40, deadline=None)

SPECIAL = np.array([0.0, -0.0, 1e-45, -3e-42, 1e-30, -1e-19, 1e10, 3e38, -3e38, np.inf, np.nan], np.float32)

MASTERS = {"embedding": (37,), "weight": (16, 9), "bias": (5,)}


class OptimizerTests:
    """The whole kit: subclass it, set :attr:`kind`, name it ``Test...``."""

    kind: str
    """The optimizer's class by its qualified name."""

    implementations_of_every_step: frozenset[str] = frozenset()
    """Implementations of the optimizer that fail themselves if a parameter gets its first gradient late."""

    @pytest.fixture(autouse=True)
    def torch_runs_on_one_thread(self) -> Iterator[None]:
        """Small tensors are not worth two, and the number must not matter."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    @property
    def optimizer(self) -> ReplayableOptimizer[Any]:
        return optimizer_of(self.kind)

    @property
    def variants(self) -> list[dict[str, Any]]:
        return list(self.optimizer.variants())

    def setting(self, implementation: str) -> Setting:
        return Setting(implementation, *certification.environment(), "cpu")

    def replays(self) -> Iterator[Replay]:
        """Each form for each implementation that it stands for, if it says that it runs here."""
        for form in self.optimizer.forms:
            if self.runs_here(form):
                for implementation in sorted(form.implementations):
                    found = replay_for(self.optimizer, self.setting(implementation), choose=form.name)
                    assert found is not None
                    yield found

    @staticmethod
    def runs_here(form: Form) -> bool:
        return form.instruction_sets is None or certification.environment()[1] in form.instruction_sets

    # what it says of itself

    def test_it_comes_through_the_door_and_names_a_class(self) -> None:
        assert self.optimizer.kind == self.kind
        assert issubclass(certification.class_of(self.kind), torch.optim.Optimizer)
        names = [form.name for form in self.optimizer.forms]
        assert len(set(names)) == len(names), "a form is chosen by its name"
        assert any(form.needs == "numpy" for form in self.optimizer.forms), "the reference is NumPy alone"
        assert len(self.variants) > 1, "certify every path that the step can take"

    def test_every_form_is_certified(self) -> None:
        """A choice by name raises what is wrong with it."""
        assert [replay.name for replay in self.replays()]

    def test_another_environment_is_nobodys(self) -> None:
        for replay in self.replays():
            version, instruction_set = certification.environment()
            for elsewhere in (
                Setting(replay.implementation, "1.0.0", instruction_set, "cpu"),
                Setting(replay.implementation, version, "SVE256", "cpu"),
                Setting(replay.implementation, version, instruction_set, "cuda"),
            ):
                assert replay_for(self.optimizer, elsewhere) is None

    def test_the_options_of_the_real_optimizer_are_understood(self) -> None:
        for variant in self.variants:
            group = certification.class_of(self.kind)([torch.nn.Parameter(torch.zeros(3))], **variant).param_groups[0]
            assert self.optimizer.reason_not_replayable(group) is None
            assert self.optimizer.step(group, 2) == self.optimizer.step({**group, "params": []}, 2)
            assert set(self.optimizer.needs(self.optimizer.step(group, 2))) <= set(self.optimizer.state)
            assert set(self.optimizer.moments(group)) <= set(self.optimizer.state)
            assert all(0 <= beta < 1 for beta in self.optimizer.moments(group).values())

    def test_options_that_it_does_not_know_are_left_to_the_optimizer(self) -> None:
        assert self.optimizer.reason_not_replayable({}) is not None
        with pytest.raises(ConfigurationError):
            self.optimizer.step({}, 2)

    # the same bits

    def trained(
        self, implementation: str, start: Array, gradients: Sequence[Gradient], schedule: Sequence[Mapping[str, Any]]
    ) -> tuple[certification.Held, certification.Held]:
        """After the first step and after all, each with its own options."""
        parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
        arguments = {**self.optimizer.arguments(implementation), **schedule[0]}
        optimizer = certification.class_of(self.kind)([parameter], **arguments)
        first: dict[str, Array] = {}
        held: dict[str, Array] = {}
        for gradient, options in zip(gradients, schedule, strict=True):
            optimizer.param_groups[0].update(options)
            parameter.grad = torch.from_numpy(dense(gradient, start.size).copy())
            optimizer.step()
            state = optimizer.state[parameter]
            arrays = {name: state[name] for name in self.optimizer.state if state.get(name) is not None}
            held = {name: each.detach().numpy().copy() for name, each in {"param": parameter, **arrays}.items()}
            first = first or held
        return first, held

    def gets_its_bits(
        self,
        replay: Replay,
        start: Array,
        gradients: Sequence[Gradient],
        schedule: Sequence[Mapping[str, Any]],
        *,
        batch: int,
        threads: int = 1,
    ) -> None:
        """From the state that the optimizer's first step made, in batches: as a recovery replays."""
        first, expected = self.trained(replay.implementation, start, gradients, schedule)
        held = {name: array.copy() for name, array in first.items()}
        param = held.pop("param")
        counts = range(2, len(gradients) + 1) if self.optimizer.counter else [2] * (len(gradients) - 1)
        steps = [self.optimizer.step(each, count) for each, count in zip(schedule[1:], counts, strict=True)]
        held = {name: held[name] for name in self.optimizer.needs(steps[0])} if steps else held
        for begin in range(0, len(steps), batch):
            some = slice(begin, begin + batch)
            replay(param, held, gradients[1:][some], steps[some], threads=threads)
        differing = certification.differing_values({"param": param, **held}, expected)
        assert differing == 0, f"{replay.name} for {replay.implementation}: {differing} values differ"

    def problem(self, size: int, steps: int, seed: int, density: float = 1.0) -> tuple[Array, list[Gradient]]:
        generator = np.random.default_rng([size, seed])
        start = generator.standard_normal(size, dtype=np.float32)
        gradients: list[Gradient] = []
        for index in range(steps):
            gradient = generator.standard_normal(size, dtype=np.float32) * np.float32(1e-2)
            if density < 1 and index % 3:
                kept = np.flatnonzero(generator.random(size) < density).astype(np.uint32)
                gradients.append(SparseGradient(kept, gradient[kept]))
            else:
                gradients.append(gradient)
        return start, gradients

    def test_any_problem(self) -> None:
        """Sizes around every vector's end, each variant, batches, threads, sparse gradients, another rate each step."""
        for replay in self.replays():

            @EXAMPLES
            @given(st.data(), st.just(replay))
            def check(data: st.DataObject, replay: Replay) -> None:
                size, steps = data.draw(st.integers(1, 70) | st.integers(71, 5000)), data.draw(st.integers(2, 9))
                variant, seed = data.draw(st.sampled_from(self.variants)), data.draw(st.integers(0, 99))
                density = data.draw(st.sampled_from([1.0, 0.0, 0.05, 0.5]))
                rates = data.draw(st.lists(st.floats(1e-6, 0.5), min_size=steps, max_size=steps))
                start, gradients = self.problem(size, steps, seed, density)
                schedule = [{**variant, "lr": rate} for rate in rates]
                batch, threads = data.draw(st.integers(1, steps)), data.draw(st.integers(1, 3))
                self.gets_its_bits(replay, start, gradients, schedule, batch=batch, threads=threads)

            check()

    def test_hundreds_of_steps(self) -> None:
        for replay in self.replays():
            start, gradients = self.problem(37, 200, 0)
            self.gets_its_bits(replay, start, gradients, [self.variants[0]] * 200, batch=50)

    def test_a_large_tensor_on_threads(self) -> None:
        """Threads cut tensors, and the cut must not be seen."""
        torch.set_num_threads(2)
        for replay in self.replays():
            if "reference" in replay.name:
                continue  # the slow one
            start, gradients = self.problem(300_007, 3, 1)
            for threads in (1, 2, 3):
                self.gets_its_bits(replay, start, gradients, [self.variants[0]] * 3, batch=2, threads=threads)

    def test_zeros_denormals_and_the_largest_numbers(self) -> None:
        start = np.repeat(SPECIAL, SPECIAL.size)
        gradients: list[Gradient] = [np.roll(np.tile(SPECIAL, SPECIAL.size), shift) for shift in (0, 1, 0)]
        for replay in self.replays():
            for variant in self.variants:
                self.gets_its_bits(replay, start, gradients, [variant] * 3, batch=3)

    def test_no_steps_and_no_elements_change_nothing(self) -> None:
        for replay in self.replays():
            step = self.optimizer.step(self.variants[0], 2)
            needed = self.optimizer.needs(step)
            state = {name: np.full(9, 2.0, np.float32) for name in needed}
            param = np.full(9, 2.0, np.float32)
            replay(param, state, [], [])
            assert all(np.all(each == 2) for each in (param, *state.values()))
            empty = {name: np.zeros(0, np.float32) for name in needed}
            replay(np.zeros(0, np.float32), empty, [np.zeros(0, np.float32)], [step])

    # in a recovery

    def provider(self, implementation: str, variant: Mapping[str, Any]) -> ModuleProvider:
        """Tensors of odd sizes in two parameter groups of other rates."""
        model = torch.nn.Module()
        generator = torch.Generator().manual_seed(0)
        for name, shape in MASTERS.items():
            model.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=generator)))
        parameters = dict(model.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [parameters["embedding"], parameters["bias"]]},
            {"params": [parameters["weight"]], "lr": 3e-3},
        ]
        arguments = {**self.optimizer.arguments(implementation), **variant}
        return ModuleProvider(model, certification.class_of(self.kind)(groups, **arguments))

    def recovers(self, implementation: str, variant: Mapping[str, Any], absent: Sequence[Sequence[str]]) -> None:
        """Some tensors have no gradient in some steps. Half of the way is replayed, then the rest."""
        training, recovering = (self.provider(implementation, variant) for _ in range(2))
        options = training.hyperparameters()
        called: list[int] = []
        steps: list[Step] = []
        for version, without in enumerate(absent, start=1):
            generator = torch.Generator().manual_seed(version)
            gradients = {
                name: torch.randn(shape, generator=generator) * 1e-2
                for name, shape in MASTERS.items()
                if name not in without
            }
            training.apply(gradients, options)
            steps.append(Step(version, options, gradients))
        apply = recovering.apply

        def counted(*arguments: Any) -> None:
            called.append(1)
            apply(*arguments)

        recovering.apply = counted  # type: ignore[method-assign, assignment]  # the kit counts calls
        replayer = Replayer(recovering)
        for some in (steps[: len(steps) // 2], steps[len(steps) // 2 :]):
            replayer.apply(Run(some[0].version, some[-1].version, tuple(some), {}, {}, Tally()))
        assert replayer.approximated == 0
        assert not names_that_differ(bits_of(recovering), bits_of(training))
        assert len(called) < len(steps), "a kernel replayed none of the steps"
        assert kernel_for(recovering, steps[-1:]) is not None

    def test_groups_and_missing_gradients_and_going_on_in_the_middle(self) -> None:
        absent: list[list[str]] = [["bias"], [], ["embedding"], ["weight", "bias"], [], ["bias"], [], []]
        implementations = {each for form in self.optimizer.forms if form.automatic for each in form.implementations}
        for implementation in sorted(implementations):
            late = implementation not in self.implementations_of_every_step
            for variant in self.variants:
                self.recovers(implementation, variant, absent if late else [[], *absent[1:]])
            if late:
                self.recovers(implementation, self.variants[0], [["weight"]] * 7)


def bits_of(provider: ModuleProvider) -> dict[str, bytes]:
    """Every bit of the masters and of the optimizer's tensors."""
    found = {name: master.numpy().tobytes() for name, master in provider.masters().items()}
    for name, state in provider.optimizer_state().items():
        for key, value in state.items():
            plain = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
            found[f"{name} {key}"] = plain
    return found
