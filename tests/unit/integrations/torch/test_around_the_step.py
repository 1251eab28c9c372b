"""What stands around the optimizer's step: a replay has what it did to the gradients, and does not do it again; what it
did to what the optimizer holds is seen."""

from __future__ import annotations

import copy
import io
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import update_bn

from tests.training import Training, life, memory
from tiercheck.errors import UnsupportedSetup
from tiercheck.hierarchy import Hierarchy

LAST, KILLED = 9, 5
ALL = {"base_every": 100}


def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A step pre-hook that is not idempotent."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(0.5)


class Hooked(Training):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.optimizer.register_step_pre_hook(halve)


class Patched(Training):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        step = self.optimizer.step

        def halved(closure: Any = None) -> Any:
            halve(self.optimizer, (), {})
            return step(closure)

        self.optimizer.step = halved


@pytest.fixture
def hooked_everywhere() -> Iterator[None]:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    hook = register_optimizer_step_pre_hook(halve)
    yield
    hook.remove()


def lives_of(make: Callable[[], Training], **config: Any) -> list[Any]:
    """Its ends, undisturbed and with a crash in the middle, which is recovered exactly."""
    ends: list[Any] = []
    for killed in (LAST, KILLED):
        url = memory()
        for last in dict.fromkeys((killed, LAST)):
            training = make()
            with training.attach(Hierarchy.of(url), **ALL | config) as checkpointer:
                if last != killed:
                    assert checkpointer.version == killed
                    assert checkpointer.recovery is not None
                    assert (checkpointer.recovery.fidelity, checkpointer.recovery.notes) == ("exact", ())
                for version in range(checkpointer.version + 1, last + 1):
                    training.step(version)
                checkpointer.flush()
                checkpointer.abort()
        held = [value for state in training.optimizer.state.values() for value in state.values()]
        ends.append((training.parameters(), [each.tolist() for each in held if isinstance(each, torch.Tensor)]))
    return ends


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("make", [Hooked, Patched])
def test_what_was_done_to_the_gradients_is_not_done_again(make: type[Training], optimizer: Any) -> None:
    undisturbed, resumed = lives_of(lambda: make(optimizer=optimizer))
    assert resumed == undisturbed


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_nor_by_a_hook_on_all_optimizers(hooked_everywhere: None, optimizer: Any) -> None:
    undisturbed, resumed = lives_of(lambda: Training(optimizer=optimizer))
    assert resumed == undisturbed


def scaled(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def replaced(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def begun_anew(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def counted_anew(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"].fill_(1.0)


class WritesToState(Training):
    """Its loop does, after the steps of some versions."""

    def __init__(self, write: Callable[[torch.optim.Optimizer], None], versions: set[int]) -> None:
        super().__init__()
        self._write, self._versions = write, versions

    def step(self, version: int) -> None:
        self.after_step = lambda: self._write(self.optimizer) if version in self._versions else None
        super().step(version)


@pytest.mark.parametrize("write", [scaled, replaced, begun_anew, counted_anew])
@pytest.mark.parametrize("version", [1, KILLED - 1, KILLED])
def test_a_write_to_what_the_optimizer_holds_is_in_the_version(
    write: Callable[[torch.optim.Optimizer], None], version: int, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed, resumed = lives_of(lambda: WritesToState(write, {version}))
    assert resumed == undisturbed
    assert "wrote to parameters, or to what the optimizer holds" in caplog.text


def test_a_write_to_what_the_optimizer_holds_after_the_end_of_an_iteration_is_told_of() -> None:
    url, training = memory(), Training()
    checkpointer = training.attach(Hierarchy.of(url), **ALL)
    for version in range(1, KILLED):
        training.step(version)
        scaled(training.optimizer)
    training.step(KILLED)
    checkpointer.abort()
    recovery = Training().attach(Hierarchy.of(url)).recovery
    assert recovery is not None
    assert (recovery.version, recovery.fidelity) == (KILLED, "approximate")
    assert "the loop wrote to what the optimizer holds after" in recovery.notes[0]


def test_no_step_is_taken_for_a_write() -> None:
    for optimizer in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adagrad):
        training = Training(optimizer=optimizer)
        with training.attach(Hierarchy.of(memory()), **ALL) as checkpointer:
            for version in range(1, KILLED + 1):
                training.step(version)
            assert (checkpointer.stats.differentials, checkpointer.stats.bases) == (KILLED, 1)


def test_what_no_base_could_hold_is_refused_at_the_first_step() -> None:
    class Keeps(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for each in group["params"]:
                    self.state[each].setdefault("last", deque(maxlen=2)).append(each.grad.clone())
            return super().step(closure)

    training = Training(optimizer=Keeps)
    with training.attach(Hierarchy.of(memory()), **ALL) as checkpointer:
        with pytest.raises(UnsupportedSetup, match=r"the optimizer's state of 0\.weight\.last\[0\] is a torch\.Tensor"):
            training.step(1)
        checkpointer.abort()


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_a_rate_that_is_a_tensor_of_one_element_comes_back(optimizer: Any) -> None:
    class Rated(Training):
        def __init__(self) -> None:
            super().__init__(optimizer=optimizer)
            self.optimizer.param_groups[0]["lr"] = torch.tensor([0.01])
            self.after_step = lambda: self.optimizer.param_groups[0]["lr"].mul_(0.9)

    undisturbed, resumed = lives_of(Rated)
    assert resumed == undisturbed


def test_a_rate_that_the_script_has_made_a_tensor_of_is_the_number_again_that_steps_were_taken_with() -> None:
    tiers, before = Hierarchy.of(memory()), Training(optimizer=torch.optim.AdamW)
    checkpointer = before.attach(tiers, **ALL)
    for version in range(1, LAST + 1):
        before.step(version)
    checkpointer.abort()
    after = Training(optimizer=torch.optim.AdamW)
    group = after.optimizer.param_groups[0]
    group["lr"] = torch.tensor(group["lr"])
    checkpointer = after.attach(tiers, **ALL)
    assert (checkpointer.version, checkpointer.recovery.fidelity) == (LAST, "exact")
    assert after.parameters() == before.states[LAST]
    assert type(group["lr"]) is float
    checkpointer.abort()


class Strided(Training):
    """Its first weight lies in memory in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0].weight = torch.nn.Parameter(torch.randn(40, 4).t().contiguous().t())
        self.model[0].bias = torch.nn.Parameter(torch.randn(40))
        self.model[1].weight = torch.nn.Parameter(torch.randn(1, 40))
        self.optimizer = torch.optim.Adafactor(self.model.parameters(), lr=1e-2)


def test_gradients_are_replayed_as_they_lay_in_memory() -> None:
    """A sum over them has other bits in another order."""
    undisturbed, resumed = lives_of(Strided)
    assert resumed == undisturbed


class Normed(Training):
    """After each step its loop looks at data once more, for the statistics of a batch norm."""

    def __init__(self, *, trains: bool = False) -> None:
        super().__init__()
        self.model.insert(1, torch.nn.BatchNorm1d(4))
        self.model.insert(2, torch.nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.after_step = self.look
        self._trains = trains

    def look(self) -> None:
        if self._trains:
            self.model(torch.ones(4, 4))
        else:
            update_bn([torch.randn(8, 4)], self.model)

    def parameters(self) -> bytes:
        tensors = self.model.state_dict().values()
        return torch.cat([each.detach().float().flatten() for each in tensors]).numpy().tobytes() + bytes(
            torch.get_rng_state().tolist()
        )


def test_a_forward_pass_before_the_loop_says_so_ends_no_iteration() -> None:
    undisturbed, resumed = lives_of(Normed)
    assert resumed == undisturbed


def test_one_that_may_be_of_the_next_iteration_is_told_of() -> None:
    url, training = memory(), Normed(trains=True)
    checkpointer = training.attach(Hierarchy.of(url), **ALL)
    for version in range(1, KILLED + 1):
        training.step(version)
    checkpointer.abort()
    recovery = Normed(trains=True).attach(Hierarchy.of(url)).recovery
    assert recovery is not None
    assert (recovery.version, recovery.fidelity) == (KILLED, "approximate")
    assert (
        "what a forward pass of training changes (random generators, buffers; one that trains nothing is told by"
        in (recovery.notes[0])
    )


class Looks(Training):
    """Does not say where its iterations end. Each has a look at the data that trains nothing, in training mode: before
    its scheduler steps, or at its beginning."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.model.insert(1, torch.nn.BatchNorm1d(4))
        self.model.insert(2, torch.nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.says_end, self._first = False, first
        self.after_step = self.look_and_schedule

    def step(self, version: int) -> None:
        if self._first:
            self.look()
        super().step(version)

    def look(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(8, 4))

    def look_and_schedule(self) -> None:
        if not self._first:
            self.look()
        self.scheduler.step()

    def parameters(self) -> bytes:
        tensors = [*self.model.state_dict().values(), torch.tensor(self.optimizer.param_groups[0]["lr"])]
        held = b"".join(each.detach().numpy().tobytes() for each in tensors)
        return held + bytes(torch.get_rng_state().tolist())


@pytest.mark.parametrize("killed", [2, 3, 5])
@pytest.mark.parametrize("first", [False, True])
def test_a_look_that_trains_nothing_is_of_the_iteration_whose_scheduler_steps_after_it(
    first: bool, killed: int
) -> None:
    """One version is in doubt, the first of the job's whose scheduler does. It is saved again when training goes on."""
    url, training = memory(), Looks(first=first)
    with life(training.attach(Hierarchy.of(url), scheduler=training.scheduler, **ALL), flush=False):
        for version in range(1, killed + 1):
            training.step(version)
    for last in (killed + 1, killed + 2):  # what is known of the loop is known to the next process
        training = Looks(first=first)
        checkpointer = training.attach(Hierarchy.of(url), scheduler=training.scheduler, **ALL)
        with life(checkpointer, flush=False):
            assert checkpointer.recovery is not None
            assert (checkpointer.recovery.fidelity, checkpointer.recovery.notes) == ("exact", ())
            for version in range(checkpointer.version + 1, last + 1):
                training.step(version)
    undisturbed = Looks(first=first)
    for version in range(1, killed + 3):
        undisturbed.step(version)
    assert training.parameters() == undisturbed.parameters()


def test_a_loop_that_says_no_more_where_its_iterations_end_is_believed_again() -> None:
    """One version is told of, and those after it end with the next forward pass, as of a loop that never says so."""
    url, training = memory(), Training()
    checkpointer = training.attach(Hierarchy.of(url), **ALL)
    training.step(1)
    training.says_end = False
    for version in range(2, 5):
        training.step(version)
    checkpointer.abort()
    recovery = Training().attach(Hierarchy.of(url)).recovery
    assert recovery is not None
    assert (recovery.version, recovery.fidelity) == (3, "exact")


class Langevin(torch.optim.SGD):
    """Draws random numbers in its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.add_(torch.randn_like(each), alpha=0.1)
        return super().step(closure)


def test_a_step_that_draws_random_numbers_leads_to_a_base(caplog: pytest.LogCaptureFixture) -> None:
    def life() -> Training:
        training = Training(optimizer=Langevin)
        torch.manual_seed(1)
        return training

    undisturbed, resumed = lives_of(life)
    assert resumed == undisturbed
    assert caplog.text.count("the optimizer draws from the generators of torch in its step") == 3, "once a life"


def test_a_step_that_takes_small_numbers_for_zero_leads_to_a_base(caplog: pytest.LogCaptureFixture) -> None:
    """Only its thread does: what replays is another one, of another process."""
    url, training = memory(), Training()
    checkpointer = training.attach(Hierarchy.of(url), **ALL)
    training.step(1)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        for version in (2, 3):
            training.step(version)
    finally:
        torch.set_flush_denormal(False)
    checkpointer.close()
    recovery = Training().attach(Hierarchy.of(url), **ALL).recovery
    assert recovery is not None
    assert (recovery.point.anchor, recovery.version, recovery.fidelity) == (3, 3, "exact")
    assert caplog.text.count("the step runs on threads that take denormals for zero (torch.set_flush_denormal") == 1
    assert "something other than" not in caplog.text


def test_a_loop_that_trains_with_another_optimizer_is_told(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    with training.attach(Hierarchy.of(memory()), **ALL) as checkpointer:
        training.step(1)
        assert checkpointer.version == 1
        training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)
        for version in (2, 3, 4):
            training.step(version)
    training.step(5)  # it is closed, and says so no more
    said = "the attached optimizer has not stepped in it, but something wrote to 0.weight"
    assert caplog.text.count(said) == 1


def test_a_parameter_that_was_replaced_is_named() -> None:
    training = Training()
    with training.attach(Hierarchy.of(memory()), **ALL) as checkpointer:
        training.step(1)
        training.model[1].weight = torch.nn.Parameter(torch.zeros(1, 4))
        training.optimizer.param_groups[0]["params"][2] = training.model[1].weight
        with pytest.raises(UnsupportedSetup, match="attach again"):
            training.step(2)
        checkpointer.abort()


def test_a_parameter_without_a_shape_is_refused() -> None:
    training = Training()
    training.model = torch.nn.Sequential(torch.nn.LazyLinear(4))
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedSetup, match=r"0\.weight has no shape yet .*run the model once"):
        training.attach(Hierarchy.of(memory()))


def test_a_scripted_module_is_refused() -> None:
    training = Training()
    training.model = torch.jit.script(training.model)
    training.optimizer = torch.optim.AdamW(training.model.parameters())
    with pytest.raises(UnsupportedSetup, match=r"is made by torch\.jit, which takes no hooks"):
        training.attach(Hierarchy.of(memory()))


def test_a_model_and_its_optimizer_are_pickled_and_copied_without_hooks() -> None:
    training = Training()
    with training.attach(Hierarchy.of(memory()), **ALL) as checkpointer:
        training.step(1)
        saved = io.BytesIO()
        torch.save((training.model, training.optimizer), saved)
        saved.seek(0)
        for model, optimizer in (
            torch.load(saved, weights_only=False),
            copy.deepcopy((training.model, training.optimizer)),
        ):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert checkpointer.version == 1
        training.step(2)
        assert checkpointer.version == 2


def test_a_buffer_that_changes_its_form_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    training.model.register_buffer("seen", torch.zeros(2))
    training.after_step = lambda: training.model.register_buffer("seen", torch.ones(3))
    with training.attach(Hierarchy.of(memory()), **ALL):
        for version in range(1, 4):
            training.step(version)
    said = "the buffer seen has changed its form, from (2,) torch.float32 to (3,) torch.float32"
    assert caplog.text.count(said) == 1
