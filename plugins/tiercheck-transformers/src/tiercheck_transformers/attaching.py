"""A Trainer saves each iteration, and goes on where it was.

A Trainer chooses the epoch and the batch to begin with before the first of its callbacks runs, and the state can only
be restored after that: the model has to be wrapped, sharded, and in an engine first. So the state is restored in
``on_train_begin``, and the epochs and batches that the restored version has behind it are passed over by a wrapper of
the Trainer's ``_run_epoch``. An iteration ends when the Trainer asks for the next batches, behind logging, evaluation
and saving.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial, wraps
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError, UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach as attach_model
from tiercheck.policy.policies import Policies
from tiercheck.streams.loading import Loading
from tiercheck.streams.tensors.generators import differing, random_state, restore_random_state
from tiercheck_transformers.progress import Progress

__all__ = ["Attached", "attach"]

log = logging.getLogger(__name__)

PROGRESS = "trainer"
NEEDED = {
    "_run_epoch": {"model", "epoch", "epochs_trained", "steps_trained_in_current_epoch", "resume_from_checkpoint"},
    "_init_training_state": {"max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint"},
}
"""Methods of a Trainer that are not public, and arguments of theirs that a resumed job needs."""
REFUSED = {
    "auto_find_batch_size": "it begins anew with other batches within one call of train()",
    "dataloader_persistent_workers": "its loaders draw from torch's generator once in a process, not once in an epoch",
    "ignore_data_skip": "after a restart it trains on batches that it has already trained on",
}
"""Arguments of the training, and why a resumed job would not be the same."""


def attach(
    trainer: Trainer,
    hierarchy: Hierarchy | None = None,
    *,
    stateful: Mapping[str, Any] | None = None,
    config: CheckpointConfig | None = None,
    policies: Policies | None = None,
    version: int | None = None,
    generation: int | None = None,
    fresh: bool = False,
    loading: Loading | None = None,
) -> Attached:
    """Have the next ``trainer.train()`` restore the newest version, train on from there, and save each iteration.

    Everything else is as in :func:`tiercheck.integrations.torch.attach`, or with ``deepspeed=`` among the training's
    arguments as in :func:`tiercheck.integrations.deepspeed.attach`: there ``hierarchy`` may be left out, if the
    DeepSpeed JSON has a ``"tiercheck"`` block. ``stateful``: what else to save with each version, such as the state of
    a callback of your own.

    Errors: ``UnsupportedSetup`` for another version of transformers than this was made for, and for arguments of the
    training with which a resumed job cannot be the same; what the integrations raise comes from ``trainer.train()``.
    """
    for method, needed in NEEDED.items():
        if not inspect.signature(getattr(trainer, method, lambda: None)).parameters.keys() >= needed:
            raise UnsupportedSetup(
                f"this transformers has no Trainer.{method} as of 5.24: pip install 'transformers>=5.24,<6'"
            )
    for name, why in REFUSED.items():
        if getattr(trainer.args, name):
            raise UnsupportedSetup(f"{name}={getattr(trainer.args, name)!r} among the training's arguments: {why}")
    if trainer.args.world_size > 1 and not trainer.accelerator.use_seedable_sampler:
        raise UnsupportedSetup(
            "use_seedable_sampler=False with several processes: Accelerate draws the order of an epoch from a "
            "generator of its own, which nobody saves"
        )
    if trainer.args.n_gpu > 1:
        raise UnsupportedSetup(
            f"one process trains on {trainer.args.n_gpu} GPUs (DataParallel): start one for each GPU, by torchrun"
        )
    if hierarchy is None and not trainer.is_deepspeed_enabled:
        raise ConfigurationError("attach needs a hierarchy; only a DeepSpeed JSON can name the tiers instead")
    options = {"config": config, "policies": policies, "version": version, "generation": generation}
    return Attached(trainer, hierarchy, stateful, {**options, "fresh": fresh, "loading": loading})


class BeforeOthers(TrainerCallback):
    """The first of a Trainer's callbacks."""

    def __init__(self, tell_of_epoch: Callable[[], None]) -> None:
        self._tell_of_epoch = tell_of_epoch

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._tell_of_epoch()


class Attached(TrainerCallback):
    """A Trainer that saves what it trains. ``checkpointer`` is there while it trains, and after that."""

    def __init__(
        self,
        trainer: Trainer,
        hierarchy: Hierarchy | None,
        stateful: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> None:
        self.checkpointer: Checkpointer | None = None
        self._trainer = trainer
        self._hierarchy = hierarchy
        self._stateful = stateful
        self._options = options
        self._progress = Progress(trainer)
        self._resumes = False
        """The epoch that is trained next goes on where the restored version was."""
        self._resumed = False
        """One has done so: whatever checkpoint of its own the Trainer has loaded says nothing any more."""
        self._first_epoch: Callable[[], None] = nothing
        self._first_step: Callable[[], None] = nothing
        """What puts the random generators back when the first epoch that is trained, and its first step, begin."""
        self._told: dict[str, Any] = {}
        """The generators before callbacks were told of the epoch."""
        self._updates_of_epoch = 0
        self._epoch_is_over = False
        """The last of its batches have come: its end is the end of the iteration as well."""
        self._before_others = BeforeOthers(self._tell_of_epoch)
        trainer.add_callback(self)
        trainer.callback_handler.callbacks.insert(0, self._before_others)
        self._unwrap = [
            wrap(trainer, "train", self._train),
            wrap(trainer, "_init_training_state", self._begin),
            wrap(trainer, "_run_epoch", self._run_epoch),
            wrap(trainer, "get_batch_samples", self._next_batches),
        ]

    # What the Trainer calls, in the order in which it does.

    def _train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``Trainer.train``."""
        try:
            output = train(*args, **kwargs)
        except BaseException:
            if self.checkpointer is not None:
                self.checkpointer.abort()
            raise
        else:
            if self.checkpointer is not None:
                self.checkpointer.close()
        finally:
            self._detach()
        return output

    def _begin(self, begin: Callable[..., tuple[int, int]], *args: Any, **kwargs: Any) -> tuple[int, int]:
        """``Trainer._init_training_state``: where the Trainer itself begins, perhaps with a checkpoint of its own."""
        given = inspect.signature(begin).bind(*args, **kwargs).arguments
        self._progress.updates_of_epoch = self._updates_of_epoch = given["num_update_steps_per_epoch"]
        epoch, batches = begin(*args, **kwargs)
        progress = self._progress
        progress.epoch, progress.updates = epoch, batches // self._trainer.args.gradient_accumulation_steps
        if epoch or batches:
            progress.began_from = str(Path(given["resume_from_checkpoint"]).resolve())
        return epoch, batches

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model is wrapped, and the optimizer and the scheduler are made: restore them."""
        self.checkpointer = self._attach()
        if (recovery := self.checkpointer.recovery) is None:
            return
        self._resumes = True
        self._convert_updates(state)
        self._tell_of_order()
        if recovery.version == 0:  # what draws until the first epoch begins has drawn then, too
            return
        self._progress.began_from = None
        # Evaluating at the start draws, and so do other callbacks.
        self._first_epoch = partial(restore_random_state, random_state())
        if recovery.version == 1 and self._progress.updates:
            # A run's first version does not know whether its loop draws between two iterations. This one does not: if
            # something has drawn when the step begins, it is the loader, which only this process begins here.
            self._first_step = self._first_epoch
        if self._progress.has_stopped_early or state.global_step >= state.max_steps:
            control.should_training_stop = True
            why = "an EarlyStoppingCallback has stopped it" if self._progress.has_stopped_early else "that is all"
            log.warning("nothing is left to train: step %d of %d is made, %s", state.global_step, state.max_steps, why)

    def _convert_updates(self, state: TrainerState) -> None:
        """Another number of ranks, or another batch: the samples that the epoch has behind it are as many updates."""
        progress, trainer = self._progress, self._trainer
        before, now = progress.samples, progress.samples_now
        passed, by_epochs = progress.updates * before, trainer.args.max_steps <= 0
        if before != now or (by_epochs and progress.updates_of_epoch != self._updates_of_epoch):
            progress.updates = passed // now
            progress.ahead = state.global_step - progress.epoch * self._updates_of_epoch - progress.updates
        progress.updates_of_epoch = self._updates_of_epoch
        follows = True
        if by_epochs and progress.ahead:  # they say how long it trains, and the Trainer has counted their updates
            state.max_steps += progress.ahead
            follows = schedule_until(trainer, state.max_steps)
            if not follows:
                log.warning("the job ends after step %d, and its schedule of learning rates elsewhere", state.max_steps)
        if before == now or not trainer.is_world_process_zero():
            return
        log.warning(
            "an update takes %d samples, and took %d before: the %d samples that epoch %d has behind it are passed "
            "over, %d of them are trained again, and the job ends after step %d",
            now,
            before,
            passed,
            progress.epoch,
            passed % now,
            state.max_steps,
        )

    def _tell_of_order(self) -> None:
        """That the rest of an epoch is another one's."""
        progress, now = self._progress, self._progress.order_now
        if not progress.updates or progress.order == now or not self._trainer.is_world_process_zero():
            return
        before = progress.order
        changed = [
            f"{name} is {now[name]!r}, and was {before.get(name)!r}" for name in now if now[name] != before.get(name)
        ]
        log.warning(
            "%s: epoch %d goes on in another order, so that some of its samples are trained twice and some not",
            "; ".join(changed),
            progress.epoch,
        )

    def _tell_of_epoch(self) -> None:
        """Before any callback is told that an epoch begins. In a resumed one, whatever they draw is drawn again."""
        progress = self._progress
        if self._resumes and progress.told is not None:
            restore_random_state(progress.told)
        elif self._resumes and not progress.updates:
            self._first_epoch()
        self._told = random_state()

    def _run_epoch(self, run_epoch: Callable[..., None], **kwargs: Any) -> None:
        """``Trainer._run_epoch``: pass over what the restored version has behind it. If the Trainer begins later, with
        a checkpoint of its own, what lies between is trained first."""
        progress, trainer = self._progress, self._trainer
        # With max_steps the Trainer has counted the epochs that these take, had all of them been as long as now.
        is_last = kwargs["epoch"] == trainer.state.num_train_epochs - 1
        goes_on = is_last and trainer.args.max_steps > 0 and progress.ahead < 0
        if kwargs["epoch"] < progress.epoch and not goes_on:
            return
        first = progress.epoch if self._resumes else kwargs["epoch"]
        for epoch in count(first) if goes_on else range(first, kwargs["epoch"] + 1):
            if trainer.control.should_training_stop:
                return
            if epoch > first:  # the Trainer has told of the first one
                trainer.control = trainer.callback_handler.on_epoch_begin(trainer.args, trainer.state, trainer.control)
            self._run(run_epoch, {**kwargs, "epoch": epoch})

    def _run(self, run_epoch: Callable[..., None], kwargs: dict[str, Any]) -> None:
        progress, trainer = self._progress, self._trainer
        self._epoch_is_over = False
        if not (self._resumes and progress.updates):  # in the middle of an epoch nobody has drawn for the next one
            progress.told = self._told if differing(self._told, random_state()) else None
        if progress.updates or not self._resumes:  # else they were put back before callbacks were told
            self._first_epoch()
        self._first_epoch = nothing
        if self._resumes:
            self._resumes, self._resumed = False, True
            passed = progress.updates * trainer.args.gradient_accumulation_steps
            if passed and progress.begun is not None:  # the same order again; the first forward pass puts them back
                restore_random_state(progress.begun)
            kwargs |= {"epochs_trained": progress.epoch, "steps_trained_in_current_epoch": passed}
            # Any path has the Trainer pass over the batches. It looks for random states there, and finds none.
            kwargs["resume_from_checkpoint"] = progress.began_from or (os.devnull if passed else None)
        elif self._resumed:
            kwargs["resume_from_checkpoint"] = None
        progress.epoch = kwargs["epoch"]
        progress.begun = random_state() if draws_its_order(trainer) else None
        run_epoch(**kwargs)
        midway = trainer.control.should_training_stop and progress.updates < kwargs["num_update_steps_per_epoch"]
        if not midway:
            progress.epoch, progress.updates = progress.epoch + 1, 0
            progress.told = progress.begun = None
        if self.checkpointer is not None:
            self.checkpointer.end_iteration(ends_epoch=not midway)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._first_step()
        self._first_step = nothing

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._progress.updates += 1

    def _next_batches(
        self, get_batch_samples: Callable[..., Any], epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any
    ) -> Any:
        """``Trainer.get_batch_samples``: the iteration before is over, with what was logged and evaluated behind it.
        The Trainer asks for more behind the last of an epoch if the data has no length."""
        if self.checkpointer is not None and not self._epoch_is_over:
            self.checkpointer.end_iteration()
        batches, items = get_batch_samples(epoch_iterator, num_batches, *args, **kwargs)
        is_last = self._trainer.accelerator.gradient_state.end_of_dataloader
        self._epoch_is_over = is_last or len(batches) < num_batches
        return batches, items

    def _attach(self) -> Checkpointer:
        trainer = self._trainer
        after_step: dict[str, Any] = {PROGRESS: self._progress}
        if trainer.is_deepspeed_enabled:
            from tiercheck.integrations.deepspeed import attach as attach_engine

            engine = trainer.model_wrapped
            if engine.lr_scheduler is None:  # DeepSpeed knows none that the Trainer has made
                after_step["scheduler"] = trainer.lr_scheduler
            return attach_engine(
                engine, self._hierarchy, stateful=self._stateful, after_step=after_step, **self._options
            )
        assert self._hierarchy is not None
        assert trainer.optimizer is not None
        return attach_model(
            trainer.model_wrapped,
            trainer.optimizer,
            self._hierarchy,
            scheduler=trainer.lr_scheduler,
            scaler=getattr(trainer.accelerator, "scaler", None),
            stateful=self._stateful,
            after_step=after_step,
            **self._options,
        )

    def _detach(self) -> None:
        for each in (self, self._before_others):
            self._trainer.remove_callback(each)
        for unwrap in reversed(self._unwrap):
            unwrap()


def schedule_until(trainer: Trainer, steps: int) -> bool:
    """Have the schedule of learning rates end with the job. Whether it does: it is one of functions of the step."""
    schedule, optimizer = trainer.lr_scheduler, trainer.optimizer
    if not isinstance(schedule, LambdaLR) or optimizer is None:
        return False
    # On the optimizer itself a schedule would set the learning rates of its first step.
    groups = [{"params": [torch.zeros(1)], "lr": float(rate)} for rate in schedule.base_lrs]
    trainer.lr_scheduler = None
    try:
        made = trainer.create_scheduler(steps, torch.optim.SGD(groups))
    finally:
        trainer.lr_scheduler = schedule
    if not isinstance(made, LambdaLR):
        return False
    schedule.lr_lambdas = made.lr_lambdas
    rates = [rate * each(schedule.last_epoch) for rate, each in zip(schedule.base_lrs, made.lr_lambdas, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates
    return True


def draws_its_order(trainer: Trainer) -> bool:
    """Whether an epoch's order of samples comes from torch's own generator, and not from one with a seed an epoch."""
    return trainer.args.train_sampling_strategy != "random" or not trainer.accelerator.use_seedable_sampler


def wrap(trainer: Trainer, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Have this Trainer call ``wrapper`` instead of a method of its own, with that method before the arguments. Returns
    what ends that."""
    method = getattr(trainer, name)
    before = vars(trainer).get(name)  # another one may have wrapped it on this Trainer

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(method, *args, **kwargs)

    def unwrap() -> None:
        if before is not None:
            setattr(trainer, name, before)
        else:
            vars(trainer).pop(name, None)

    setattr(trainer, name, wrapped)
    return unwrap


def nothing() -> None:
    pass
