"""Replaying what was recorded, a run at a time: overlapped, bounded, and the very steps the optimizer took."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.recorded import Trainer, fresh, gradients_of, state_of
from tests.replaying import one_by_one, replayed_runs
from tiercheck.errors import Corruption
from tiercheck.kernels import SparseGradient
from tiercheck.streams.codecs.sparse import Sparse
from tiercheck.streams.optimizers import replay as optimizers_replay
from tiercheck.streams.records.recorded import Differential
from tiercheck.streams.replay import replay as replaying
from tiercheck.streams.replay.fidelity import Tally
from tiercheck.streams.replay.kernel_selection import InPlace, kernel_for
from tiercheck.streams.replay.replay import SPARSE_STEPS_AT_ONCE, STEPS_AT_ONCE, dense, merged, nbytes_of, replay
from tiercheck.streams.replay.runs import Run, Step, decode_run, run_of

ADAMS = {
    "single_tensor": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
}


def recorded(trainer: Trainer, versions: int) -> list[Differential]:
    return [trainer.step() for _ in range(versions)]


def empty_runs(count: int) -> list[Run]:
    return [Run(version, version, (), {}, {"version": version}, Tally()) for version in range(1, count + 1)]


class TestOverlap:
    @pytest.mark.parametrize("threads", [2, 3])
    def test_the_next_run_is_made_while_one_is_applied(self, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither waits for the other: applying run k returns only once run k + 1 was begun."""
        begun = {version: threading.Event() for version in range(1, 5)}

        def make(granted: int) -> Generator[Run, None, None]:
            for run in empty_runs(4):
                begun[run.first].set()
                yield run

        def apply(self: Any, run: Run) -> None:
            assert run.last == 4 or begun[run.last + 1].wait(timeout=30)

        monkeypatch.setattr(replaying.Replayer, "apply", apply)
        replayed = replayed_runs(fresh(), make, threads=threads)
        assert replayed.host_state == {"version": 4}

    @pytest.mark.parametrize("threads", [1, 2, 4])
    def test_no_more_than_two_runs_are_alive(self, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        alive: set[int] = set()
        counts = []

        def make(granted: int) -> Generator[Run, None, None]:
            for version in range(1, 30):
                counts.append(len(alive) + 1)
                yield made(version)

        def made(version: int) -> Run:
            run = Run(version, version, (), {}, {}, Tally())
            alive.add(version)
            weakref.finalize(run, alive.discard, version)
            return run

        monkeypatch.setattr(replaying.Replayer, "apply", lambda self, run: None)
        replayed_runs(fresh(), make, threads=threads)
        assert len(counts) == 29
        assert max(counts) <= (1 if threads == 1 else 2)
        assert not alive

    def test_threads_are_shared_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shares = []

        def make(granted: int) -> Generator[Run, None, None]:
            shares.append(granted)
            yield from empty_runs(1)

        def apply(self: Any, run: Run) -> None:
            shares.append(self._threads)

        monkeypatch.setattr(replaying.Replayer, "apply", apply)
        for threads in (1, 2, 3, 8):
            replayed_runs(fresh(), make, threads=threads)
        assert shares == [1, 1, 1, 1, 1, 2, 4, 4]

    def test_an_error_of_either_side_ends_both(self) -> None:
        ended = []
        before = set(threading.enumerate())

        def make(granted: int) -> Generator[Run, None, None]:
            try:
                yield from empty_runs(2)
                raise Corruption("damaged")
            finally:
                ended.append(granted)

        with pytest.raises(Corruption, match="damaged"):
            replayed_runs(fresh(), make, threads=2)

        def unfit(granted: int) -> Generator[Run, None, None]:
            try:
                for run in empty_runs(5):
                    yield replace(run, buffers={"nobody's": torch.zeros(1)})
            finally:
                ended.append(granted)

        with pytest.raises(Corruption, match="nobody's"):
            replayed_runs(fresh(), unfit, threads=2)
        assert ended == [1, 1]
        assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("how", ADAMS)
class TestTheSameSteps:
    """Two groups with other learning rates, betas, decay and eps: the state is that of the training, bit for bit."""

    def check(self, trainer: Trainer, differentials: list[Differential]) -> None:
        optimizer = torch.optim.AdamW
        options = {key: trainer.optimizer.defaults[key] for key in ("foreach", "fused", "amsgrad", "maximize")}
        for threads in (1, 2):
            provider = fresh(optimizer, **options)
            replay(provider, differentials, threads=threads)
            assert state_of(provider) == trainer.state(), threads

    def test_groups_with_options_of_their_own(self, how: str) -> None:
        trainer = Trainer(torch.optim.AdamW, **ADAMS[how])
        self.check(trainer, recorded(trainer, 12))

    def test_options_that_change_from_step_to_step(self, how: str) -> None:
        trainer = Trainer(torch.optim.AdamW, **ADAMS[how])
        steps = [
            {"lr": 1e-2 / n, "betas": (0.8, 0.9 + 0.001 * n), "weight_decay": 0.01 * (n % 3)} for n in range(1, 13)
        ]
        self.check(trainer, [trainer.step(**options) for options in steps])

    def test_parameters_without_a_gradient_in_some_steps(self, how: str) -> None:
        """Their count of steps falls behind, and with it their bias correction. One has none in the first step."""
        trainer = Trainer(torch.optim.AdamW, **ADAMS[how])
        absent: list[list[str]] = [["bias"], [], ["embedding"], ["weight", "bias"], [], ["bias"], [], []]
        self.check(trainer, [trainer.step(without=names) for names in absent])

    def test_a_parameter_that_never_has_one(self, how: str) -> None:
        trainer = Trainer(torch.optim.AdamW, **ADAMS[how])
        self.check(trainer, [trainer.step(without=["weight"]) for _ in range(7)])

    def test_skipped_steps(self, how: str) -> None:
        trainer = Trainer(torch.optim.AdamW, **ADAMS[how])
        self.check(trainer, [trainer.step(skipped=version in (1, 4, 5, 12)) for version in range(1, 13)])


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.0}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {}),
        (torch.optim.NAdam, {}),
    ],
)
def test_optimizers_that_are_called(optimizer: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.recorded.Model.groups", lambda self: [{"params": list(self.parameters()), "lr": 1e-2}])
    trainer = Trainer(optimizer, **options)
    differentials = recorded(trainer, 7)
    for threads in (1, 2):
        provider = fresh(optimizer, **options)
        replay(provider, differentials, threads=threads)
        assert state_of(provider) == trainer.state()


class TestKernels:
    def test_one_call_makes_the_state_and_a_kernel_does_the_rest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = Trainer()
        differentials = recorded(trainer, 12)
        provider, calls = fresh(), []
        apply = provider.apply
        monkeypatch.setattr(provider, "apply", lambda *arguments: (calls.append(1), apply(*arguments)))
        replay(provider, differentials)
        assert len(calls) == 1
        assert state_of(provider) == trainer.state()

    def test_the_optimizer_is_called_for_little_work_until_a_kernel_is_ready(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(optimizers_replay, "_ready", set())
        trainer = Trainer()
        differentials = recorded(trainer, 12)
        elements = sum(master.numel() for master in fresh().masters().values())

        def calls(differentials: list[Differential]) -> int:
            provider, calls = fresh(), []
            apply = provider.apply
            monkeypatch.setattr(provider, "apply", lambda *arguments: (calls.append(1), apply(*arguments)))
            replayer = replaying.Replayer(provider, called_elements_max=5 * elements)
            for start in range(0, len(differentials), STEPS_AT_ONCE):
                replayer.apply(decode_run(differentials[start : start + STEPS_AT_ONCE], threads=1))
            if len(differentials) == 12:
                assert state_of(provider) == trainer.state()
            return len(calls)

        assert calls(differentials[:3]) == 3, "so few are called for"
        assert calls(differentials) == 5, "five make a run; what more comes is worth a kernel"
        assert calls(differentials) == 1, "a kernel is ready: only the state is made by a call"

    def test_tensors_that_no_threads_share_are_taken_by_one_each(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = Trainer()
        first, *differentials = recorded(trainer, 4)
        provider, both = fresh(), threading.Barrier(2)
        replay(provider, [first])
        met = set[int]()
        original = InPlace.apply

        def apply(self: InPlace, each: Any, threads: int) -> None:
            if each.name != "weight":  # the third of them
                both.wait(timeout=30)
            met.add(threading.get_ident())
            original(self, each, threads)

        monkeypatch.setattr(InPlace, "apply", apply)
        replay(provider, differentials, threads=2)
        assert len(met) == 2
        assert state_of(provider) == trainer.state()

    def test_an_optimizer_that_is_told_to_run_otherwise_in_between(self) -> None:
        """The two round differently: whichever took a step must replay it."""
        trainer = Trainer(foreach=False)
        found = recorded(trainer, 4)
        for group in trainer.optimizer.param_groups:
            group.update({"fused": True, "foreach": False})
        found += recorded(trainer, 9)
        provider = fresh(foreach=False)
        replay(provider, found, threads=2)
        assert state_of(provider) == trainer.state()
        run = decode_run(found[2:6])
        assert kernel_for(provider, run.steps) is None
        assert kernel_for(provider, run_of(found[5]).steps) is not None


class TestSparse:
    def test_the_kernel_gets_what_is_stored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Dense and sparse, the same bits."""
        trainer = Trainer(codec="sparse")
        differentials = recorded(trainer, 8)
        run = decode_run(differentials)
        assert all(isinstance(each, SparseGradient) for step in run.steps for each in step.gradients.values())
        sparse = fresh()
        replay(sparse, differentials)
        with monkeypatch.context() as patched:
            patched.setattr(Sparse, "decode_sparse", lambda self, encoding, parts, *, threads=1: None)
            assert not any(
                isinstance(each, SparseGradient) for each in run_of(differentials[0]).steps[0].gradients.values()
            )
            densely = fresh()
            replay(densely, differentials)
        assert state_of(sparse) == state_of(densely)

    def test_an_optimizer_that_is_called_gets_zeros(self) -> None:
        differential = Trainer(codec="sparse").step()
        sparse = run_of(differential).steps[0].gradients
        for name, master in fresh().masters().items():
            assert torch.equal(dense(sparse[name], master), differential.gradient(name)), name

    def test_a_lossless_one_is_the_gradient(self) -> None:
        """With a -0.0, which torch's optimizers see."""
        trainer = Trainer(codec="nonzero")
        gradients = gradients_of(1)
        differential = trainer.step()
        for name, master in fresh().masters().items():
            found = dense(run_of(differential).steps[0].gradients[name], master)
            assert np.array_equal(found.numpy().view(np.uint32), gradients[name].numpy().view(np.uint32))


class TestWhatDoesNotFit:
    def test_nothing_is_changed(self) -> None:
        trainer = Trainer()
        good, bad = recorded(trainer, 2)
        object.__setattr__(bad, "_encodings", {f"other.{name}": each for name, each in bad.encodings.items()})
        provider = fresh()
        before = state_of(provider)
        with pytest.raises(Corruption, match=r"differential 2 has a gradient for 'other.embedding'"):
            replay(provider, [good, bad])
        assert state_of(provider) == before

    def test_groups(self) -> None:
        differential = replace(Trainer().step(), hyperparameters=[{}])
        with pytest.raises(Corruption, match="options for 1 groups, not 2"):
            replay(fresh(), [differential])

    @pytest.mark.parametrize("threads", [0, -1])
    def test_threads(self, threads: int) -> None:
        with pytest.raises(ValueError, match="at least one thread"):
            replay(fresh(), [], threads=threads)
        with pytest.raises(ValueError, match="at least one thread"):
            decode_run([Trainer().step()], threads=threads)


def test_no_differentials_are_no_replay() -> None:
    replayed = replay(fresh(), [])
    assert (replayed.tally, replayed.host_state) == (Tally(), None)


def test_a_step_holds_what_it_says() -> None:
    (step,) = run_of(Trainer().step()).steps
    assert isinstance(step, Step)
    assert step.version == 1
    assert [group["lr"] for group in step.hyperparameters] == [1e-2, 3e-3]


class TestMerging:
    """Neighbouring runs become one as long as that takes no more memory than a run may."""

    @staticmethod
    def run(version: int, gradient: Any) -> Run:
        return Run(version, version, (Step(version, [], {"a": gradient}),), {}, {"version": version}, Tally())

    @staticmethod
    def sparse(count: int) -> SparseGradient:
        return SparseGradient(np.arange(count, dtype=np.uint32), np.ones(count, np.float32))

    def made(self, *gradients: Any) -> Generator[Run, None, None]:
        for version, gradient in enumerate(gradients, start=1):
            yield self.run(version, gradient)

    async def spans(self, *gradients: Any, nbytes_max: int) -> list[tuple[int, int]]:
        found = []
        async for run in merged(one_by_one(self.made(*gradients)), nbytes_max=nbytes_max):
            assert [step.version for step in run.steps] == list(range(run.first, run.last + 1))
            assert run.host_state == {"version": run.last}
            assert nbytes_of(run) <= nbytes_max or run.first == run.last
            found.append((run.first, run.last))
        return found

    async def test_as_far_as_bytes_and_steps_reach(self) -> None:
        assert await self.spans(nbytes_max=1 << 20) == []
        assert await self.spans(*[self.sparse(10)] * 9, nbytes_max=4 * 160) == [(1, 4), (5, 8), (9, 9)]
        assert await self.spans(*[self.sparse(1)] * 70, nbytes_max=1 << 20) == [(1, SPARSE_STEPS_AT_ONCE), (51, 70)]

    async def test_dense_runs_stay_as_they_are(self) -> None:
        assert await self.spans(*[torch.ones(100)] * 3, nbytes_max=400) == [(1, 1), (2, 2), (3, 3)]
        kinds = [self.sparse(1), torch.ones(100), self.sparse(1), self.sparse(1)]
        assert await self.spans(*kinds, nbytes_max=400) == [(1, 1), (2, 2), (3, 4)]

    async def test_nothing_is_made_ahead_of_what_is_full(self) -> None:
        made: list[int] = []

        def make() -> Generator[Run, None, None]:
            for run in self.made(*[torch.ones(100)] * 3):
                made.append(run.first)
                yield run

        count = 0
        async for _ in merged(one_by_one(make()), nbytes_max=400):
            count += 1
            assert made == list(range(1, count + 1))
