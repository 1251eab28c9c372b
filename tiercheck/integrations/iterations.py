"""When an iteration is over, and its version is published.

An iteration ends in the user's loop, behind the optimizer's step: schedulers step, averages are updated, parameters are
clamped. Three things tell that it is over: the loop says so (``Checkpointer.end_iteration``); the next forward pass of
training begins; or, if neither was seen, the next step comes, or the job's end. Of a loop that says so a forward pass
ends no iteration: it may be one more look at the data, as for the statistics of batch norms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tiercheck.checkpointer import Checkpointer
from tiercheck.format import host_state
from tiercheck.integrations.stand_ins import stand_in
from tiercheck.streams.doubts import listed
from tiercheck.streams.tensors.beside import Beside, End

__all__ = ["Iterations", "Provider"]

log = logging.getLogger(__name__)

PASSED = (
    "what a forward pass of training changes (random generators, buffers; one that trains nothing is told by "
    "torch.no_grad() or model.eval())"
)


class Provider(Protocol):
    """Of a provider, what belongs to the moments of an iteration."""

    @property
    def beside(self) -> Beside: ...

    def hyperparameters(self) -> list[dict[str, Any]]: ...

    def end_of_step(self) -> None:
        """The optimizer has stepped."""

    def end_of_iteration(self, end: End) -> None:
        """The version is published next."""

    def published(self) -> None:
        """It was."""


class Iterations:
    """From the moments that an integration's hooks see to one rank's checkpointer.

    ``in_step``: a version is published before the step returns, until something is seen to change after it, here or by
    the process whose version was restored. That suits a framework whose step does everything, so that the loop has
    nothing left to do. ``meet``: called on every rank once between two steps, when the iteration is said or seen to be
    over, before anything of it is published. ``moved``: whether something of the version beside parameters and
    moments has changed since it was published in the step.
    """

    def __init__(
        self,
        provider: Provider,
        checkpointer: Checkpointer,
        *,
        in_step: bool = False,
        meet: Callable[[], None] = lambda: None,
        moved: Callable[[], bool] = lambda: False,
    ) -> None:
        self._provider = provider
        self._checkpointer = checkpointer
        self._in_step = in_step and not provider.beside.later
        self._meet = meet
        self._moved = moved
        self._is_to_meet = False
        """The optimizer has stepped since the last meeting."""
        self._pending: int | None = None
        """The version whose step is done, and whose iteration is not over."""
        self._ended = False
        """The last version was published when its iteration was said to be over, and no forward pass was seen since."""
        self._begun = False
        """A forward pass of training was seen since the last step."""
        self._idle = False
        """It was told that the loop trains without the attached optimizer."""
        self._told_of_epoch = False
        """It was told that the end of an epoch was said too late."""
        self._told_of_second_step = False
        """It was told that a step has come before the loop said that an iteration is over."""
        self._at_pass: bytes | None = None
        """What the loop may still step, as it was when a forward pass without gradients ended the iteration."""
        self._passed = False
        """One was seen that may be of the next iteration, and the loop had not said that this one is over."""

    @property
    def in_step(self) -> bool:
        """Whether versions are published before the step returns."""
        return self._in_step

    @property
    def begun(self) -> bool:
        """Whether a forward pass of training was seen since the last step."""
        return self._begun

    def stepped(self, version: int) -> None:
        """The optimizer's step is done."""
        self._begun = self._passed = False
        self._at_pass = None
        self._pending = version
        self._is_to_meet = True
        self._provider.end_of_step()
        self._checkpointer.stepped(version)
        if self._in_step:
            self._publish()

    def skipped(self) -> None:
        """The iteration has ended without a step, and its version is recorded. As behind a step, the next forward pass
        tells what the loop has written since."""
        self._begun = self._passed = False
        self._ended = True

    def said(self, ends_epoch: bool = False) -> None:
        """The loop says that its iteration is over, and perhaps an epoch with it."""
        self._meet_once()
        self._provider.beside.says_end = True
        self._provider.beside.ends_epoch |= ends_epoch
        if self._pending is None and self._ended and not self._begun:
            self._make_up()
        if self._pending is not None:
            self._end(End.SAID)
        elif self._in_step and self._ended:
            self._checkpointer.recapture(moved=self._moved() or ends_epoch)
        elif self._begun and not self._idle and (names := self._checkpointer.written()):
            self._idle = True
            log.warning(
                "the loop says that an iteration is over, and the attached optimizer has not stepped in it, but "
                "something wrote to %s: nothing of that is saved. If another optimizer steps now, close the "
                "checkpointer and attach that one",
                listed(names),
            )
        elif ends_epoch and self._ended and not self._told_of_epoch:
            self._told_of_epoch = True
            log.warning(
                "version %d was saved before the loop said that an epoch ends with it, and does not know so: say it in "
                "the call that ends its iteration, end_iteration(ends_epoch=...)",
                self._checkpointer.version,
            )
        self._publish_later()

    def forward(self) -> None:
        """A forward pass of training begins."""
        if stand_in():
            self._without_the_model()
            return
        self.over(End.FORWARD)
        if torch.is_grad_enabled():
            self._save_what_came_after_a_pass()
        if self._begun or self._pending is not None:
            return
        self._begun = True
        if self._ended:
            self._ended = False
            if not self._in_step:
                self._checkpointer.begin_iteration()
            else:
                self._recapture()
        self._provider.beside.begin_iteration()

    def _without_the_model(self) -> None:
        """A forward pass begins in which others stand in for the model's tensors. It changes nothing of the model, so
        that what is to be saved can be saved later; but the random generators are as of here."""
        beside = self._provider.beside
        if self._pending is None and not self._begun:
            beside.begin_iteration()
        elif self._pending is not None and not beside.says_end:
            beside.forward_begins()

    def over(self, end: End = End.UNSEEN) -> None:
        """The iteration is over, if one is open: the next one has begun, or the job ends. A forward pass does not tell
        so of a loop that has said so of others."""
        if end is End.FORWARD:
            if self._pending is not None and self._provider.beside.says_end:
                self._passed |= torch.is_grad_enabled()  # else nothing is trained on it
                return
            if self._pending is not None and self._provider.beside.passes_behind and not torch.is_grad_enabled():
                return
            self._meet_once()
        if self._pending is not None:
            self._end(end)
            self._ended = False
            if end is End.FORWARD and not torch.is_grad_enabled():
                self._at_pass = self._steps_behind()

    def step_comes(self) -> None:
        """The optimizer is about to step: that ends an iteration of which nothing else has told that it is over."""
        open_yet = self._pending is not None and self._provider.beside.says_end
        if open_yet and not self._told_of_second_step:
            self._told_of_second_step = True
            log.warning(
                "the optimizer steps a second time before the loop has said that its iteration is over: each step "
                "makes a version, also one that the loop takes back. Count by checkpointer.version, or call "
                "end_iteration() after each step"
            )
        self.over()

    def _save_what_came_after_a_pass(self) -> None:
        """A forward pass with gradients begins. The one before may have had none, as for a loss that is only logged: if
        the loop has stepped a scheduler since, that pass was none of the next iteration. The version that was published
        then is saved again, and later ones are published when a pass with gradients begins."""
        before, self._at_pass = self._at_pass, None
        if before is None or before == self._steps_behind():
            return
        self._provider.beside.passes_behind = True
        self._provider.beside.publish_as_of_now()
        try:
            self._checkpointer.recapture(moved=True)
        finally:
            self._provider.published()

    def _steps_behind(self) -> bytes:
        """What a loop steps behind the optimizer."""
        options = self._provider.hyperparameters()
        return host_state.pack({"options": options, "after_step": self._provider.beside.after_step()})

    def _end(self, end: End) -> None:
        self._provider.end_of_iteration(end)
        if self._passed:
            self._passed = False
            self._provider.beside.tell_moved(PASSED)
            self._provider.beside.says_end = end is End.SAID
        self._publish()

    def _meet_once(self) -> None:
        if self._is_to_meet:
            self._is_to_meet = False
            self._meet()

    def _recapture(self) -> None:
        """The version was published in the step: save it again if the loop has written to something since."""
        self._provider.beside.publish_again()
        try:
            if self._checkpointer.recapture(moved=self._moved()):
                self._publish_later()  # the loop writes after the step
        finally:
            self._provider.published()

    def _make_up(self) -> None:
        """The end of an iteration is said again: what was to be saved the first time may have been broken off."""
        self._provider.beside.publish_again()
        try:
            self._checkpointer.make_up()
        finally:
            self._provider.published()

    def _publish_later(self) -> None:
        if self._in_step:
            self._in_step, self._provider.beside.later = False, True

    def _publish(self) -> None:
        version, self._pending = self._pending, None
        self._ended = True
        assert version is not None
        try:
            self._checkpointer.complete(version)
        finally:
            self._provider.published()
