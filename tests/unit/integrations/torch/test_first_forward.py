"""Random generators are where the interrupted run had them when training goes on, whatever a process draws before."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.training import memory
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.iterations import Iterations
from tiercheck.integrations.torch import attach
from tiercheck.integrations.torch import attaching as integration
from tiercheck.tiers.registry import make_driver

EPOCH, LAST = 5, 14
"""Batches in an epoch, and versions of a run."""


class Data(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2 * EPOCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


class Shuffled(Sampler[int]):
    """An order for each epoch that does not depend on the process."""

    def __init__(self, epoch: int, skipped: int) -> None:
        order = torch.randperm(2 * EPOCH, generator=torch.Generator().manual_seed(epoch))
        self.order = order[2 * skipped :].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


MOMENTS = ("before the forward pass", "after the forward pass", "after the step", "after validation", "at the end")
"""Of an iteration."""


class Failed(Exception):
    """The process has, in the middle of its loop."""


class Run:
    """Epochs over a torch ``DataLoader``, which draws a seed whenever it is iterated over; a model with dropout."""

    def __init__(
        self,
        *,
        workers: int = 0,
        says_end: bool = True,
        says_epochs: bool = True,
        noise: bool = False,
        validates: bool = False,
    ) -> None:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.workers, self.noise, self.validates = workers, noise, validates
        self.says_end, self.says_epochs = says_end, says_epochs
        self.checkpointer: Checkpointer | None = None
        self.fails_at: tuple[int, str] | None = None
        self.losses: dict[int, str] = {}

    def attach(self, url: str) -> Checkpointer:
        config = CheckpointConfig(base_every=4, batch=2, deadline_s=30)
        self.checkpointer = attach(self.model, self.optimizer, Hierarchy.of(url), config=config)
        return self.checkpointer

    def train(self, last: int) -> None:
        done = self.checkpointer.version if self.checkpointer else 0
        while done < last:
            epoch, skipped = divmod(done, EPOCH)
            loader = DataLoader(Data(), batch_size=2, sampler=Shuffled(epoch, skipped), num_workers=self.workers)
            for batch in loader:
                done += 1
                self.iterate(batch, done)
                if done == last:
                    break

    def passes(self, version: int, moment: str) -> None:
        if self.fails_at == (version, moment):
            raise Failed

    def step(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()

    def iterate(self, batch: torch.Tensor, version: int) -> None:
        self.model.train()
        if self.noise:
            batch = batch + torch.randn_like(batch) + random.random()
        self.passes(version, MOMENTS[0])
        loss = self.model(batch).pow(2).mean()
        self.losses[version] = loss.item().hex()
        self.passes(version, MOMENTS[1])
        self.optimizer.zero_grad()
        self.step(loss)
        self.passes(version, MOMENTS[2])
        if self.validates and version % 4 == 0:
            self.model.eval()
            for each in DataLoader(Data(), batch_size=5):  # draws a seed, too
                self.model(each)
        self.passes(version, MOMENTS[3])
        if self.checkpointer is not None and self.says_end:
            self.checkpointer.end_iteration(ends_epoch=self.says_epochs and version % EPOCH == 0)
        self.passes(version, MOMENTS[4])


def resumed(
    failed_at: int, *, last: int = LAST, kind: type[Run] = Run, starts: int = 0, **options: Any
) -> tuple[Run, Run]:
    """A run that failed and was resumed, with the losses of both its lives; and one that did not fail. ``starts``: so
    many resumed it before, and failed in their first iteration."""
    url = memory()
    before = kind(**options)
    before.attach(url)
    before.train(failed_at)
    before.checkpointer.abort()  # type: ignore[union-attr]
    for _ in range(starts):
        between = kind(**options)
        checkpointer = between.attach(url)
        between.fails_at = checkpointer.version + 1, MOMENTS[1]
        with pytest.raises(Failed):
            between.train(last)
        checkpointer.abort()
    after = kind(**options)
    checkpointer = after.attach(url)
    assert checkpointer.version == (failed_at if before.says_end else failed_at - 1)
    after.train(last)
    checkpointer.abort()
    after.losses = {**before.losses, **after.losses}
    reference = kind(**options)
    reference.train(last)
    return after, reference


@pytest.mark.parametrize(
    ("failed_at", "validates", "says_end"),
    [
        (3, True, True),
        (3, False, False),
        (4, True, False),
        (4, False, True),
        (7, False, True),
        (7, True, False),
        (8, True, True),
        (8, False, False),
        (9, True, False),
        (9, False, True),
    ],
)
def test_a_loader_made_after_attach_does_not_change_what_is_drawn(
    failed_at: int, validates: bool, says_end: bool
) -> None:
    after, reference = resumed(failed_at, says_end=says_end, validates=validates)
    assert after.losses == reference.losses


@pytest.mark.parametrize("says_end", [True, False])
@pytest.mark.parametrize("failed_at", [3, 7])
@pytest.mark.parametrize("starts", [1, 2])
def test_nor_do_starts_that_failed_before_a_step(starts: int, failed_at: int, says_end: bool) -> None:
    """What is known of the generators is in the base that each start opens with."""
    after, reference = resumed(failed_at, starts=starts, says_end=says_end)
    assert after.losses == reference.losses


@pytest.mark.parametrize("starts", [0, 2])
@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("failed_at", [EPOCH, 2 * EPOCH])
def test_right_behind_an_epoch_the_next_one_begins_as_it_would_have(
    failed_at: int, noise: bool, starts: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The run that did not fail drew the loader's seed there, too."""
    after, reference = resumed(failed_at, noise=noise, starts=starts)
    assert after.losses == reference.losses
    assert "generators of" not in caplog.text


@pytest.mark.parametrize("starts", [0, 2])
@pytest.mark.parametrize("noise", [False, True])
def test_a_run_that_failed_before_its_first_version_begins_as_it_did(
    noise: bool, starts: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The loader's seed is drawn anew, as it was, and nobody is told of anything."""
    after, reference = resumed(0, noise=noise, starts=starts)
    assert after.losses == reference.losses
    assert "generators of" not in caplog.text
    # The version after it knows no more than ever.
    caplog.clear()
    after, reference = resumed(1, noise=noise, starts=starts)
    assert "random numbers were drawn from the generators of" in caplog.text


def test_what_is_known_of_a_loop_s_habits_outlives_the_end_of_an_epoch(caplog: pytest.LogCaptureFixture) -> None:
    """A process that begins with an epoch, and fails after an iteration, says of the generators what the one before
    knew."""
    url, losses = memory(), dict[int, str]()
    for last in (EPOCH, EPOCH + 1, 2 * EPOCH):
        run = Run()
        checkpointer = run.attach(url)
        run.train(last)
        checkpointer.abort()
        losses |= run.losses
    reference = Run()
    reference.train(2 * EPOCH)
    assert losses == reference.losses
    assert "generators of" not in caplog.text


def test_a_loop_that_draws_behind_the_end_of_an_iteration_is_told_once_how_to_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(says_epochs=False)
    checkpointer = run.attach(memory())
    run.train(EPOCH)
    assert "behind the end of its iteration" not in caplog.text
    run.train(2 * EPOCH + 1)
    checkpointer.abort()
    (told,) = [each.getMessage() for each in caplog.records if "behind the end of its iteration" in each.getMessage()]
    assert "the generators of torch" in told
    assert "end_iteration(ends_epoch=True)" in told


def test_a_call_that_says_nothing_more_takes_nothing_back(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    checkpointer = run.attach(memory())
    for last in (EPOCH, 2 * EPOCH, 2 * EPOCH + 1):
        run.train(last)
        checkpointer.end_iteration()
    checkpointer.abort()
    assert "behind the end of its iteration" not in caplog.text


def test_an_epoch_s_end_that_is_said_too_late_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    with run.attach(memory()) as checkpointer:
        for last in (2, 3):
            run.train(last)
            checkpointer.end_iteration(ends_epoch=True)
    (told,) = [each.getMessage() for each in caplog.records if "ends_epoch" in each.getMessage()]
    assert told.startswith("version 2 was saved before the loop said that an epoch ends with it")


@pytest.mark.parametrize("workers", [2])
def test_nor_does_one_with_workers(workers: int) -> None:
    after, reference = resumed(7, last=9, workers=workers)
    assert after.losses == reference.losses


class Trainer(Run):
    """Calls in the order of Hugging Face's Trainer, which goes through the batches of an epoch that were trained on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def attach(self, url: str) -> Checkpointer:
        config = CheckpointConfig(base_every=4, batch=2, deadline_s=30)
        hierarchy = Hierarchy.of(url)
        self.checkpointer = attach(self.model, self.optimizer, hierarchy, scheduler=self.scheduler, config=config)
        return self.checkpointer

    def train(self, last: int) -> None:
        done = self.checkpointer.version if self.checkpointer else 0
        self.model.zero_grad()
        for epoch in range(done // EPOCH, LAST // EPOCH + 1):
            loader = DataLoader(Data(), batch_size=2, sampler=Shuffled(epoch, 0), num_workers=self.workers)
            for version, batch in enumerate(loader, EPOCH * epoch + 1):
                if version <= done or version > last:
                    continue
                self.model.train()
                loss = self.model(batch).pow(2).mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.model.zero_grad()
                self.losses[version] = loss.item().hex()
                if self.checkpointer is not None and self.says_end:
                    self.checkpointer.end_iteration()  # a callback's on_step_end
            if last <= EPOCH * (epoch + 1):
                break


@pytest.mark.parametrize("says_end", [True, False])
@pytest.mark.parametrize("failed_at", [4, 8])
def test_nor_do_the_batches_that_a_trainer_passes_over(failed_at: int, says_end: bool) -> None:
    after, reference = resumed(failed_at, kind=Trainer, says_end=says_end)
    assert after.losses == reference.losses


@pytest.mark.parametrize("failed_at", [6, 11])
def test_a_version_saved_at_a_forward_pass_knows_when_an_epoch_has_just_ended(failed_at: int) -> None:
    """The uninterrupted run makes a loader there, too: the version before is an epoch's last."""
    after, reference = resumed(failed_at, says_end=False)
    assert after.losses == reference.losses


def test_generators_that_the_loop_uses_between_its_iterations_are_left_to_it(caplog: pytest.LogCaptureFixture) -> None:
    """The noise of the batch is drawn before the forward pass. What the process draws besides is told."""
    url = memory()
    before = Run(noise=True)
    before.attach(url)
    before.train(7)
    before.checkpointer.abort()  # type: ignore[union-attr]
    after = Run(noise=True)
    after.attach(url)
    sampler = Shuffled(1, 2)
    batches = DataLoader(Data(), batch_size=2, sampler=sampler, generator=torch.Generator())  # draws from its own
    for version, batch in enumerate(batches, 8):
        after.iterate(batch, version)
    after.checkpointer.abort()  # type: ignore[union-attr]
    reference = Run(noise=True)
    reference.train(10)
    assert {**before.losses, **after.losses} == reference.losses
    assert "between attach and the first forward pass" in caplog.text


def test_a_loop_that_draws_behind_a_loader_s_seed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A version that was saved at a forward pass has the generators of both moments."""
    after, reference = resumed(7, noise=True, says_end=False)
    assert after.losses[7] != reference.losses[7]
    assert "the loop draws from the generators of torch before its forward pass" in caplog.text


def test_the_first_forward_pass_alone_moves_generators() -> None:
    url = memory()
    before = Run()
    before.attach(url)
    before.train(3)
    before.checkpointer.abort()  # type: ignore[union-attr]
    after = Run()
    after.attach(url)
    after.model.eval()
    torch.rand(1)
    state = torch.get_rng_state()
    after.model(torch.ones(1, 4))
    assert torch.equal(torch.get_rng_state(), state), "validation is no iteration"
    after.model.train()
    after.model(torch.ones(1, 4))
    after.model(torch.ones(1, 4))
    drawn = torch.get_rng_state()
    after.checkpointer.abort()  # type: ignore[union-attr]
    again = Run()
    again.attach(url)
    for _ in range(2):
        again.model(torch.ones(1, 4))
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("says_end", [True, False])
def test_a_stateful_loader_that_shuffles_goes_on_where_it_was(workers: int, says_end: bool) -> None:
    def train(url: str | None, last: int) -> dict[int, str]:
        run = Run(says_end=says_end)
        loader = StatefulDataLoader(Data(), batch_size=2, shuffle=True, num_workers=workers)
        if url is not None:
            config = CheckpointConfig(base_every=4, batch=2, deadline_s=30)
            run.checkpointer = attach(
                run.model, run.optimizer, Hierarchy.of(url), stateful={"loader": loader}, config=config
            )
        done = run.checkpointer.version if run.checkpointer else 0
        while done < last:
            for batch in loader:
                done += 1
                run.iterate(batch, done)
                if done == last:
                    break
        if run.checkpointer is not None:
            run.checkpointer.abort()
        return run.losses

    url = memory()
    assert {**train(url, 7), **train(url, LAST)} == train(None, LAST)


@pytest.mark.parametrize("ends", [Checkpointer.close, Checkpointer.abort])
def test_a_loader_is_let_go_at_the_end_and_not_left_to_the_garbage_collector(
    ends: Callable[[Checkpointer], None],
) -> None:
    """Its workers would miss the word to end, and be waited for in whatever thread collects garbage."""
    run = Run()
    loader = StatefulDataLoader(Data(), batch_size=2, shuffle=True)
    checkpointer = attach(run.model, run.optimizer, Hierarchy.of(memory()), stateful={"loader": loader})
    for version, batch in enumerate(itertools.islice(loader, 2), 1):
        run.iterate(batch, version)
    alive = weakref.ref(loader)
    gc.disable()
    try:
        ends(checkpointer)
        del loader
        assert alive() is None
    finally:
        gc.enable()


class Clamps(Run):
    """Behind the step it writes to what was published in the step; before the forward pass it draws."""

    def train(self, last: int) -> None:
        for version in range((self.checkpointer.version if self.checkpointer else 0) + 1, last + 1):
            self.iterate(torch.ones(2, 4), version)

    def iterate(self, batch: torch.Tensor, version: int) -> None:
        super().iterate(batch, version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.clamp_(-0.1, 0.1)


def test_a_version_that_is_saved_again_at_the_forward_pass_has_the_generators_from_before_its_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(integration, "Iterations", functools.partial(Iterations, in_step=True))
    url = memory()
    options = {"says_end": False, "noise": True}
    before = Clamps(**options)
    checkpointer = before.attach(url)
    before.train(1)
    before.model.register_forward_hook(lambda *_: checkpointer.abort())  # version 1 is saved again before it
    before.train(2)
    after = Clamps(**options)
    checkpointer = after.attach(url)
    assert checkpointer.recovery is not None
    assert (checkpointer.version, checkpointer.recovery.fidelity) == (1, "exact")
    after.train(4)
    checkpointer.abort()
    reference = Clamps(**options)
    reference.train(4)
    assert [after.losses[version] for version in (2, 3, 4)] == [reference.losses[version] for version in (2, 3, 4)]


async def lose(url: str, name: str) -> None:
    """The one object whose key begins so."""
    async with make_driver(url) as driver:
        (found,) = [info.key async for info in driver.list(name)]
        await driver.delete([found])


def test_no_records_lead_past_a_version_that_was_saved_again_without_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record that was published in the step knows nothing of what was written behind it. The base that does may be
    lost, damaged or late."""
    monkeypatch.setattr(integration, "Iterations", functools.partial(Iterations, in_step=True))
    url, run = memory(), Run(says_end=False)
    checkpointer = run.attach(url)
    run.train(2)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.clamp_(-0.1, 0.1)
    run.train(3)
    weights = [parameter.detach().clone() for parameter in run.model.parameters()]
    run.train(4)
    checkpointer.abort()
    asyncio.run(lose(url, "r00000/g000001/base/000000000002"))
    after = Run(says_end=False)
    checkpointer = after.attach(url)
    assert checkpointer.recovery is not None
    assert (checkpointer.version, checkpointer.recovery.fidelity) == (3, "exact")
    assert all(map(torch.equal, after.model.parameters(), weights))
    checkpointer.abort()


class Augmented(Run):
    """Adds noise to every fourth batch, before the forward pass."""

    def iterate(self, batch: torch.Tensor, version: int) -> None:
        super().iterate(batch + 0.1 * torch.randn_like(batch) if version % 4 == 3 else batch, version)


@pytest.mark.parametrize(("last", "fidelity"), [(8, "approximate"), (13, "approximate"), (1, "exact"), (4, "exact")])
def test_a_loop_that_draws_before_some_forward_passes_alone_is_no_exact_one(last: int, fidelity: str) -> None:
    """Nothing tells whether it would have drawn before the next one, and so where the generators are to be there. Once
    may be an epoch's end, of which it says nothing."""
    url, run = memory(), Augmented()
    checkpointer = run.attach(url)
    run.train(last)
    checkpointer.abort()
    for _ in range(2):  # the next process knows it from the one before
        checkpointer = Augmented().attach(url)
        assert checkpointer.recovery is not None
        assert (checkpointer.recovery.version, checkpointer.recovery.fidelity) == (last, fidelity)
        assert ("draws from the generators of torch" in str(checkpointer.recovery.notes)) is (fidelity != "exact")
        checkpointer.abort()
