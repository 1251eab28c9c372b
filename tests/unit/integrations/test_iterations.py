"""An iteration ends in the user's loop: what it changes after the optimizer's step is in the version, or the version
says that it may not be."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.training import Training, memory
from tests.unit.opening.test_attach import Accelerated
from tiercheck.checkpointer import Checkpointer
from tiercheck.errors import ConfigurationError, UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations import forgotten
from tiercheck.integrations.forgotten import scheduled_wrappers
from tiercheck.runtime.front import run

LAST = 6


class Best:
    """A counter and the best metric, as a loop keeps them."""

    def __init__(self) -> None:
        self.seen, self.best = 0, float("inf")

    def update(self, value: float) -> None:
        self.seen, self.best = self.seen + 1, min(self.best, value)

    def state_dict(self) -> dict[str, float]:
        return {"seen": self.seen, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.best = state["seen"], state["best"]


class Loop(Training):
    """Averages, counts, schedules and clamps, all behind the optimizer's step."""

    def __init__(self, *, clamps: bool = False) -> None:
        super().__init__()
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.best = Best()
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        self.clamps = clamps
        self.after_step = self.update
        self.ends: dict[int, list[Any]] = {}

    @property
    def beside(self) -> dict[str, Any]:
        return {"average": self.average, "best": self.best, "schedule": self.scheduler}

    def update(self) -> None:
        if self.clamps:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.clamp_(-0.1, 0.1)
        self.average.update_parameters(self.model)
        self.best.update(self.model[0].weight.detach().sum().item())
        self.scheduler.step()

    def end(self) -> list[Any]:
        """All that an iteration leaves behind."""
        average = [each.tolist() for each in self.average.state_dict().values()]
        return [self.parameters(), average, vars(self.best).copy(), self.optimizer.param_groups[0]["lr"]]

    def train(self, first: int, last: int) -> None:
        for version in range(first + 1, last + 1):
            self.step(version)
            self.ends[version] = self.end()


@pytest.mark.parametrize("clamps", [False, True])
@pytest.mark.parametrize("way", ["said", "after_step", "scheduler"])
def test_what_changes_after_the_step_comes_back_as_of_the_end_of_the_iteration(way: str, clamps: bool) -> None:
    def start(url: str) -> tuple[Loop, Checkpointer]:
        loop = Loop(clamps=clamps)
        loop.says_end = way == "said"
        given = {
            "said": {"stateful": loop.beside},
            "after_step": {"after_step": loop.beside},
            "scheduler": {
                "stateful": {"average": loop.average},
                "after_step": {"best": loop.best},
                "scheduler": loop.scheduler,
            },
        }
        return loop, loop.attach(Hierarchy.of(url), **given[way])

    url = memory()
    before, checkpointer = start(url)
    before.train(0, LAST)
    assert checkpointer.version == LAST
    checkpointer.abort()

    after, checkpointer = start(url)
    assert checkpointer.recovery is not None
    wanted = LAST if way == "said" else LAST - 1
    assert (checkpointer.version, checkpointer.recovery.fidelity, checkpointer.recovery.notes) == (wanted, "exact", ())
    assert after.end() == before.ends[wanted]
    after.train(wanted, LAST + 2)
    checkpointer.close()
    reference = Loop(clamps=clamps)
    reference.train(0, LAST + 2)
    assert after.end() == reference.end()


def test_the_last_iteration_of_a_loop_that_never_says_so_is_saved_when_it_closes() -> None:
    url = memory()
    loop = Loop()
    loop.says_end = False
    with loop.attach(Hierarchy.of(url), after_step=loop.beside):
        loop.train(0, 3)
    again = Loop()
    checkpointer = again.attach(Hierarchy.of(url), after_step=again.beside)
    assert (checkpointer.version, again.end()) == (3, loop.ends[3])


def test_validation_in_between_ends_no_iteration() -> None:
    url = memory()
    loop = Training()
    loop.says_end = False
    checkpointer = loop.attach(Hierarchy.of(url))
    loop.step(1)
    loop.model.eval()
    loop.model(torch.ones(2, 4))
    assert checkpointer.stats.differentials == 0
    loop.model.train()
    loop.model(torch.ones(2, 4))
    assert checkpointer.stats.differentials == 1


def test_a_loop_that_says_its_end_twice_or_before_a_step_saves_once() -> None:
    loop = Training()
    checkpointer = loop.attach(Hierarchy.of(memory()))
    checkpointer.end_iteration()
    loop.step(1)
    checkpointer.end_iteration()
    assert (checkpointer.version, checkpointer.stats.differentials) == (1, 1)


def test_a_step_that_the_loop_takes_back_is_a_version_too_and_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    loop = Training()
    checkpointer = loop.attach(Hierarchy.of(memory()))
    for version in (1, 2):
        loop.step(version)
    for version in (3, 4):
        before = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
        loop.backward(version)
        loop.optimizer.step()
        loop.model.load_state_dict(before[0])
        loop.optimizer.load_state_dict(before[1])
        loop.step(version)
    assert checkpointer.version == 6
    assert caplog.text.count("the optimizer steps a second time before the loop has said") == 1
    assert "each step makes a version" in caplog.text


def test_the_last_step_of_a_loop_that_breaks_off_behind_it_is_no_second_one(caplog: pytest.LogCaptureFixture) -> None:
    loop = Training()
    checkpointer = loop.attach(Hierarchy.of(memory()))
    for version in (1, 2):
        loop.step(version)
    loop.backward(3)
    loop.optimizer.step()
    checkpointer.close()
    assert checkpointer.version == 3
    assert "a second time" not in caplog.text


def test_what_may_be_either_is_told_of_unless_the_loop_says_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing tells a counter that the loop raises from a position in the data."""
    url = memory()
    loop = Training()
    loop.says_end = False
    best = Best()
    loop.after_step = lambda: best.update(1.0)
    checkpointer = loop.attach(Hierarchy.of(url), stateful={"best": best})
    for version in (1, 2, 3):
        loop.step(version)
    checkpointer.abort()
    assert caplog.text.count("best moved between the optimizer's step and the next forward pass") == 1
    again = Training()
    recovery = again.attach(Hierarchy.of(url), stateful={"best": Best()}).recovery
    assert recovery is not None
    assert (recovery.version, recovery.fidelity) == (2, "approximate")
    assert "call checkpointer.end_iteration()" in recovery.notes[0]


def bounded(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.05, 0.05)


@pytest.mark.parametrize("codec", ["exact", "snapshot"])
@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_a_write_after_the_end_of_an_iteration_is_called_approximate(
    last: int, codec: str, caplog: pytest.LogCaptureFixture
) -> None:
    """From the first one that was seen: the next forward pass does."""
    url = memory()
    loop = Training()
    checkpointer = loop.attach(Hierarchy.of(url), base_every=3, codec=codec)
    for version in range(1, last + 1):
        loop.step(version)
        bounded(loop.model)
    loop.backward(last + 1)
    checkpointer.abort()
    assert caplog.text.count("the loop wrote to 0.weight, 0.bias, 1.weight, 1.bias after versions had been saved") == 1
    recovery = Training().attach(Hierarchy.of(url)).recovery
    assert recovery is not None
    assert (recovery.version, recovery.fidelity) == (last, "approximate")
    assert any("0.weight" in note and "end_iteration" in note for note in recovery.notes)


def test_nothing_is_held_against_writes_before_the_first_iteration_or_within_one() -> None:
    url = memory()
    loop = Training()
    checkpointer = loop.attach(Hierarchy.of(url))
    bounded(loop.model)
    for version in range(1, 4):
        loop.backward(version)
        bounded(loop.model)
        loop.optimizer.step()
        checkpointer.end_iteration()
    loop.states[3] = loop.parameters()
    checkpointer.abort()
    again = Training()
    recovery = again.attach(Hierarchy.of(url)).recovery
    assert recovery is not None
    assert (recovery.version, recovery.fidelity, again.parameters()) == (3, "exact", loop.states[3])


def poke(model: torch.nn.Module) -> None:
    """Writes to one element that is none of those that are compared at each look, and past torch's counters."""
    model[1].weight.data[0, 1] += 1.0  # type: ignore[index, operator, union-attr]


class Wide(Training):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)


@pytest.mark.parametrize("last", [3, 4, 5, 8, 9])
def test_a_write_that_only_all_bits_tell_of_is_called_approximate_from_the_next_base_on(
    last: int, caplog: pytest.LogCaptureFixture
) -> None:
    url = memory()
    loop = Wide()
    loop.after_step = lambda: poke(loop.model)
    checkpointer = loop.attach(Hierarchy.of(url), base_every=3)
    for version in range(1, last + 1):
        loop.step(version)
        run(checkpointer._job.recorder.finish_base())  # type: ignore[union-attr]  # when the copy is whole is not the question
    checkpointer.abort()
    assert caplog.text.count("something wrote to 1.weight without torch counting it") == 1
    again = Wide()
    recovery = again.attach(Hierarchy.of(url), base_every=3).recovery
    assert recovery is not None
    assert recovery.version == last
    if last % 3 == 0:  # a base holds it
        assert (recovery.replayed, recovery.fidelity, again.parameters()) == (0, "exact", loop.states[last])
    else:
        assert recovery.fidelity == "approximate"
        assert any("1.weight" in note for note in recovery.notes)


class AcceleratedScheduler:
    """As ``accelerate.scheduler.AcceleratedScheduler``."""

    def __init__(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        self.scheduler = scheduler
        self.state_dict, self.load_state_dict = scheduler.state_dict, scheduler.load_state_dict


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_scheduler_that_was_forgotten_is_refused(made: str) -> None:
    loop = Training()
    if made == "before":
        torch.optim.lr_scheduler.StepLR(loop.optimizer, 2)
        with pytest.raises(UnsupportedSetup, match="scheduler was made for the optimizer and is not attached"):
            loop.attach(Hierarchy.of(memory()))
    else:
        loop.attach(Hierarchy.of(memory()))
        torch.optim.lr_scheduler.StepLR(loop.optimizer, 2)
        with pytest.raises(UnsupportedSetup, match="make it before attach, and pass it as scheduler="):
            loop.step(1)


def test_a_scheduler_of_a_wrapped_optimizer_is_not_forgotten_either() -> None:
    loop = Training()
    loop.optimizer = Accelerated(loop.optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 2)
    with pytest.raises(UnsupportedSetup, match="is not attached"):
        loop.attach(Hierarchy.of(memory()))
    loop.attach(Hierarchy.of(memory()), stateful={"it": scheduler})
    loop.step(1)


def test_a_scheduler_of_what_wraps_the_attached_optimizer_is_not_forgotten_either() -> None:
    """As Hugging Face's Trainer makes it: the optimizer that a DeepSpeed engine steps does not know the wrapper."""
    loop = Training()
    scheduler = torch.optim.lr_scheduler.StepLR(Accelerated(Accelerated(loop.optimizer)), 2)
    with pytest.raises(UnsupportedSetup, match=r"is not attached.* \(under DeepSpeed, after_step=\)"):
        loop.attach(Hierarchy.of(memory()))
    loop.attach(Hierarchy.of(memory()), stateful={"it": AcceleratedScheduler(scheduler)})
    loop.step(1)


def test_a_scheduler_that_leaves_no_trace_at_the_optimizer_is_not_forgotten_either() -> None:
    """``ReduceLROnPlateau`` wraps no step, and a second scheduler only the first one's."""
    torchs = torch.optim.lr_scheduler
    for passed in (False, True):
        loop = Training()
        scheduler: Any = torchs.StepLR(loop.optimizer, 2) if passed else None
        plateau = torchs.ReduceLROnPlateau(loop.optimizer)
        checkpointer = loop.attach(Hierarchy.of(memory()), scheduler=scheduler)
        with pytest.raises(UnsupportedSetup, match=f"a {type(plateau).__name__} was made for the optimizer and is not"):
            loop.step(1)
        checkpointer.abort()
    loop = Training()
    first, second = torchs.StepLR(loop.optimizer, 2), torchs.ReduceLROnPlateau(loop.optimizer)

    class Slots:
        __slots__ = ("step",)

        def __init__(self, step: Any) -> None:
            self.step = step

    class Both:
        def __init__(self) -> None:
            self.first, self.others = first, OrderedDict(each=[Slots(second.step)])

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    loop.attach(Hierarchy.of(memory()), after_step={"both": Both()})
    loop.step(1)


def test_a_scheduler_that_was_dropped_is_none() -> None:
    """A range test of learning rates has made it: it lies in a cycle until the garbage collector comes."""
    loop = Training()

    class Finder:
        def __init__(self) -> None:
            self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(loop.optimizer)
            self.itself = self

    Finder()
    loop.attach(Hierarchy.of(memory()))
    loop.step(1)


def test_large_data_that_was_passed_is_not_looked_through() -> None:
    loop = Training()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(loop.optimizer)

    class Data:
        def __init__(self) -> None:
            self.samples = [[[0] * 3 for _ in range(900)] for _ in range(900)]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    loop.attach(Hierarchy.of(memory()), stateful={"data": Data()}, after_step={"it": scheduler})
    loop.step(1)


def test_where_all_optimizers_are_torchs_own_nobody_looks_for_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look through all objects takes a large process half a second."""
    base = type("Optimizer", (), {})
    own: Any = type(
        "AdamW", (type("Adam", (base,), {"__module__": "torch.optim.adam"}),), {"__module__": "torch.optim"}
    )
    monkeypatch.setattr(torch.optim, "Optimizer", base)
    monkeypatch.setattr(forgotten, "holders", lambda held: pytest.fail("looked through all objects"))
    assert not [*scheduled_wrappers(own())]


def test_who_looks_for_wrappers_keeps_nobody_from_finishing_a_tuple() -> None:
    """A tuple that another thread is making can be seen by the garbage collector. If anything holds it, it cannot get
    its length, and that thread has a ``SystemError``. Here the tuple's own parts do the looking."""
    optimizer = Training().optimizer
    wrapper = Accelerated(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(wrapper, 2)
    looking = scheduled_wrappers(optimizer)

    def parts() -> Iterator[object]:
        yield next(looking)
        yield scheduler

    assert tuple(parts()) == (wrapper, scheduler)


@pytest.mark.parametrize("argument", ["scheduler", "stateful", "after_step"])
def test_a_scheduler_that_was_passed_in_any_way_is_accepted(argument: str) -> None:
    loop = Training()
    scheduler: Any = torch.optim.lr_scheduler.SequentialLR(
        loop.optimizer, [torch.optim.lr_scheduler.StepLR(loop.optimizer, 2) for _ in range(2)], [3]
    )
    loop.attach(Hierarchy.of(memory()), **{argument: scheduler if argument == "scheduler" else {"it": scheduler}})
    loop.step(1)


def test_a_second_attach_in_one_process_is_refused_until_the_first_is_closed() -> None:
    first, second = Training(), Training()
    checkpointer = first.attach(Hierarchy.of(memory()))
    with pytest.raises(UnsupportedSetup, match=r"attached in this process already.*close it first.*GAN"):
        second.attach(Hierarchy.of(memory()))
    first.step(1)
    checkpointer.close()
    second.attach(Hierarchy.of(memory()))
    second.step(1)


@pytest.mark.parametrize("argument", ["stateful", "after_step"])
def test_names_are_given_once(argument: str) -> None:
    loop = Loop()
    with pytest.raises(ConfigurationError, match="'scheduler' is the name of an argument"):
        loop.attach(Hierarchy.of(memory()), scheduler=loop.scheduler, **{argument: {"scheduler": loop.best}})
    twice = {"best": loop.best}
    with pytest.raises(ConfigurationError, match="'best'"):
        loop.attach(Hierarchy.of(memory()), scheduler=loop.scheduler, stateful=twice, after_step=twice)


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(UnsupportedSetup, match="counter \\(int\\) has no state_dict"):
        Training().attach(Hierarchy.of(memory()), after_step={"counter": 3})


class Holder:
    """Saves a scaler with its own state, as trainers of other libraries do."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        return {"scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state["scaler"])


def scaled_step(loop: Training, scaler: torch.amp.GradScaler) -> None:
    loop.optimizer.zero_grad()
    scaler.scale(loop.model(torch.ones(2, 4)).sum()).backward()
    scaler.step(loop.optimizer)
    scaler.update()


def test_a_scaler_that_was_forgotten_is_refused() -> None:
    loop, scaler = Training(), torch.amp.GradScaler("cpu", init_scale=4.0)
    loop.attach(Hierarchy.of(memory()))
    before = loop.parameters()
    with pytest.raises(UnsupportedSetup, match="a GradScaler makes the optimizer's step and is not attached"):
        scaled_step(loop, scaler)
    assert loop.parameters() == before
    scaled_step(loop, torch.amp.GradScaler("cpu", enabled=False))
    assert loop.parameters() != before


@pytest.mark.parametrize("argument", ["scaler", "stateful", "after_step", "holder"])
def test_a_scaler_that_was_passed_in_any_way_is_accepted(argument: str) -> None:
    loop, scaler = Training(), torch.amp.GradScaler("cpu", init_scale=4.0)
    given: dict[str, Any] = {argument: {"it": scaler}}
    if argument in ("scaler", "holder"):
        given = {"scaler": scaler} if argument == "scaler" else {"after_step": {"it": Holder(scaler)}}
    checkpointer = loop.attach(Hierarchy.of(memory()), **given)
    scaled_step(loop, scaler)
    assert checkpointer.version == 1
