"""The kit for state providers: what a recovery needs of a trainer's state, and of the hooks that save it.

An integration's own test file names its trainer::

    class TestMine(StateProviderTests):
        def make(self, seed): ...
        def iterate(self, trainer): ...
        def provider(self, trainer): ...
        def attach(self, trainer, hierarchy, config): ...

It trains for a few iterations, fails, and trains again; all that it compares is compared bit for bit. So keep the
trainer small, and let it do what real ones do: several tensors, schedules, random numbers, buffers. Needs pytest and
torch.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import tiercheck.testing.plugin  # noqa: F401  (registers the kit's assertions for rewriting)
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import Mismatch
from tiercheck.format.host_state import pack
from tiercheck.format.index.assemble import Holdings, assemble
from tiercheck.format.index.logical import LogicalIndex
from tiercheck.hierarchy import Hierarchy
from tiercheck.streams.tensors.provider import StateProvider, extras_of
from tiercheck.testing.contents import names_that_differ

__all__ = ["StateProviderTests"]

END, FAILURE = 6, 4
"""The versions that a run trains, and the one after which it fails."""
NO_BASES = 1000
"""An interval of bases that no run of the kit reaches."""


@dataclass(frozen=True)
class State:
    """A copy of what a base holds."""

    masters: dict[str, torch.Tensor]
    optimizer_state: dict[str, dict[str, Any]]
    extras: dict[str, torch.Tensor]
    hyperparameters: list[dict[str, Any]]

    @classmethod
    def of(cls, provider: StateProvider) -> State:
        return cls(
            copied(provider.masters()),
            {name: copied(each) for name, each in provider.optimizer_state().items()},
            copied(extras_of(provider)),
            [dict(group) for group in provider.hyperparameters()],
        )

    def load(self, provider: StateProvider) -> None:
        provider.load(
            masters=self.masters,
            optimizer_state=self.optimizer_state,
            extras=self.extras,
            hyperparameters=self.hyperparameters,
        )

    def bits(self, *, stepped: bool = False) -> dict[str, Any]:
        """By name, to compare. ``stepped``: only what the optimizer's step changes."""
        found = {f"master {name}": bits_of(each) for name, each in self.masters.items()}
        for name, held in self.optimizer_state.items():
            found |= {f"{key} of {name}": bits_of(each) for key, each in held.items()}
        if not stepped:
            found |= {f"extra {name}": bits_of(each) for name, each in self.extras.items()}
            found |= {f"options of group {index}": each for index, each in enumerate(self.hyperparameters)}
        return found


@dataclass
class Step:
    """What the hooks gave of one version, before the optimizer's step."""

    version: int
    before: State
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


class StateProviderTests:
    """The whole kit: subclass it, give the four methods, name it ``Test...``."""

    @abstractmethod
    def make(self, seed: int) -> Any:
        """A new trainer, as a new process makes it: the same model, with weights and generators of ``seed``."""

    @abstractmethod
    def iterate(self, trainer: Any) -> Any:
        """Train one iteration. Returns what it computed, such as the loss."""

    @abstractmethod
    def provider(self, trainer: Any) -> StateProvider:
        """The provider of the trainer's state, as :meth:`attach` makes one."""

    @abstractmethod
    def attach(self, trainer: Any, hierarchy: Hierarchy, config: CheckpointConfig) -> Checkpointer:
        """What a user of the integration calls."""

    def indexes(self, provider: StateProvider) -> Mapping[int, LogicalIndex]:
        """By rank, the index of each rank of the job. Override it if there are several: they tell each other theirs."""
        return {0: provider.index()}

    def hierarchy(self) -> Hierarchy:
        """Tiers that hold nothing yet, and keep what they hold until the test ends. Each rank may have its own."""
        return Hierarchy.of(f"memory://{secrets.token_hex(8)}")

    @contextmanager
    def attached(
        self, trainer: Any, hierarchy: Hierarchy | None = None, *, base_every: int = NO_BASES
    ) -> Iterator[tuple[Checkpointer, list[Step]]]:
        """A checkpointer, and the steps that the hooks give it from here on. It is gone at the end, as by a failure."""
        config = CheckpointConfig(base_every=base_every, deadline_s=60)
        checkpointer = self.attach(trainer, hierarchy or self.hierarchy(), config)
        provider, take, steps = self.provider(trainer), checkpointer.capture, list[Step]()

        def capture(version: int, gradients: Mapping[str, torch.Tensor]) -> None:
            if not steps or steps[-1].version != version:
                steps.append(Step(version, State.of(provider)))
            steps[-1].gradients.update(copied(gradients))
            take(version, gradients)

        checkpointer.capture = capture  # type: ignore[method-assign]  # this object's alone: it looks, and passes on
        try:
            yield checkpointer, steps
        finally:
            checkpointer.abort()

    # What it says of the state

    def test_every_process_has_the_same_names_and_shapes(self) -> None:
        first, second = (self.provider(self.make(seed)) for seed in (1, 2))
        assert first.masters(), "there is nothing to save"
        for one, other in (
            (first.masters(), second.masters()),
            (first.frozen(), second.frozen()),
            (first.buffers(), second.buffers()),
        ):
            assert described(one) == described(other)
        assert first.identity() == second.identity()
        assert first.group_of() == second.group_of()

    def test_its_parts_fit_together(self) -> None:
        trainer = self.make(1)
        provider = self.provider(trainer)
        self.iterate(trainer)
        masters, groups = provider.masters(), provider.hyperparameters()
        assert provider.group_of().keys() == masters.keys()
        assert set(provider.group_of().values()) <= set(range(len(groups)))
        assert not provider.frozen().keys() & provider.buffers().keys(), "a base has one place for both"
        for name, held in provider.optimizer_state().items():
            assert name in masters
            assert not [key for key in held if "/" in key], "a base separates the master's name from the key by a slash"
        pack(groups, name="hyperparameters")
        host_state = provider.host_state()
        assert "doubts" not in host_state, "that name is taken"
        pack(host_state, name="host state")

    def test_what_its_tensors_are_pieces_of(self) -> None:
        provider = self.provider(self.make(1))
        index = provider.index()
        assert index == self.provider(self.make(2)).index(), "every process has the same index"
        stored = {f"master/{name}": tensor for name, tensor in provider.masters().items()}
        stored |= {f"extra/{name}": tensor for name, tensor in extras_of(provider).items()}
        index.check({name: tuple(tensor.shape) for name, tensor in stored.items()})
        holdings = Holdings(self.indexes(provider))
        for tensor in holdings.tensors:
            missing = assemble(LogicalIndex.of_whole([tensor]), holdings).missing
            assert not missing, f"no rank has {', '.join(map(str, missing))}"

    def test_tensors_are_live(self) -> None:
        trainer = self.make(1)
        provider = self.provider(trainer)
        held, before = provider.masters(), State.of(provider)
        for _ in range(3):  # the first steps of a warm-up may have a rate of zero
            self.iterate(trainer)
        differ = names_that_differ(copied_bits(held), copied_bits(provider.masters()))
        assert not differ, f"the optimizer updates other memory: {differ}"
        assert names_that_differ(copied_bits(held), copied_bits(before.masters)), "the steps change nothing"

    # What a recovery does with it

    def test_what_is_loaded_is_copied_and_goes_on_alike(self) -> None:
        trainer = self.make(1)
        for _ in range(2):
            self.iterate(trainer)
        state, host_state = State.of(self.provider(trainer)), self.provider(trainer).host_state()
        wanted = state.bits()
        result, following = self.iterate(trainer), State.of(self.provider(trainer)).bits()

        trainer = self.make(2)
        provider = self.provider(trainer)
        state.load(provider)
        provider.refresh()
        provider.restore_host_state(host_state)
        for each in (state.masters, state.extras, *state.optimizer_state.values()):
            for tensor in (tensor for tensor in each.values() if isinstance(tensor, torch.Tensor)):
                tensor.zero_()  # its memory is somebody else's by now
        assert not names_that_differ(State.of(provider).bits(), wanted)
        assert self.iterate(trainer) == result
        assert not names_that_differ(State.of(self.provider(trainer)).bits(), following)

    def test_what_does_not_fit_is_refused_and_changes_nothing(self) -> None:
        trainer = self.make(1)
        self.iterate(trainer)
        state = State.of(self.provider(trainer))
        provider = self.provider(self.make(2))
        before = State.of(provider).bits()
        for tensors in (state.masters, state.extras):
            for wrong in ("shape", "name"):
                if not tensors:
                    continue
                name = list(tensors)[-1]
                right = tensors.pop(name)
                tensors[name if wrong == "shape" else "another"] = torch.zeros(right.numel() + 1, dtype=right.dtype)
                with pytest.raises(Mismatch):
                    state.load(provider)
                assert not names_that_differ(State.of(provider).bits(), before)
                tensors.popitem()
                tensors[name] = right

    def test_a_replayed_step_is_the_step(self) -> None:
        trainer = self.make(1)
        after: list[dict[str, Any]] = []
        with self.attached(trainer) as (_, steps):
            for _ in range(3):
                self.iterate(trainer)
                after.append(State.of(self.provider(trainer)).bits(stepped=True))
        assert [step.version for step in steps] == [1, 2, 3], "each step is one version"
        provider = self.provider(self.make(2))
        for step, wanted in zip(steps, after, strict=True):
            step.before.load(provider)
            assert step.gradients.keys() <= provider.masters().keys()
            gradients = copied(step.gradients)
            provider.apply(gradients, step.before.hyperparameters)
            differ = names_that_differ(State.of(provider).bits(stepped=True), wanted)
            assert not differ, f"it is another step, or gradients of another one: {differ}"
            differ = names_that_differ(copied_bits(gradients), copied_bits(step.gradients))
            assert not differ, f"a gradient was written to: {differ}"

    def test_a_master_without_a_gradient_is_left_out(self) -> None:
        trainer = self.make(1)
        for _ in range(2):
            self.iterate(trainer)
        provider = self.provider(trainer)
        before = State.of(provider)
        provider.apply({}, before.hyperparameters)
        assert not names_that_differ(State.of(provider).bits(stepped=True), before.bits(stepped=True))

    @pytest.mark.parametrize("base_every", [2, NO_BASES])
    def test_a_resumed_run_is_the_uninterrupted_one(self, base_every: int) -> None:
        trainer = self.make(1)
        results = [self.iterate(trainer) for _ in range(END)]
        wanted = State.of(self.provider(trainer)).bits()

        tiers, trainer = self.hierarchy(), self.make(1)
        with self.attached(trainer, tiers, base_every=base_every) as (checkpointer, _):
            assert [self.iterate(trainer) for _ in range(FAILURE)] == results[:FAILURE]
            assert checkpointer.version == FAILURE
            assert checkpointer.stats.failed_saves == 0

        trainer = self.make(2)
        with self.attached(trainer, tiers, base_every=base_every) as (checkpointer, _):
            recovery = checkpointer.recovery
            assert recovery is not None
            assert recovery.fidelity == "exact", recovery.notes
            # A loop that does not say where its iterations end loses the last one.
            assert recovery.version in (FAILURE - 1, FAILURE)
            assert [self.iterate(trainer) for _ in range(recovery.version, END)] == results[recovery.version :]
            assert not names_that_differ(State.of(self.provider(trainer)).bits(), wanted)

    def test_nothing_is_saved_after_the_end(self) -> None:
        trainer = self.make(1)
        with self.attached(trainer) as (checkpointer, steps):
            self.iterate(trainer)
        self.iterate(trainer)
        assert len(steps) == 1, "a hook stayed"
        assert checkpointer.version == 1


def copied(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each.detach().clone() if isinstance(each, torch.Tensor) else each for name, each in tensors.items()}


def described(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()]


def copied_bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: bits_of(each) for name, each in tensors.items()}


def bits_of(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach().cpu().contiguous()
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
