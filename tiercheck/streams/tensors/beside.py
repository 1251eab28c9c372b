"""What a loop holds beside the model and its optimizer, and as of which moment each version holds it.

An iteration ends in the user's code, behind the optimizer's step, and two kinds of things change between that step and
the next forward pass. Some belong to the iteration that ends: schedulers, averages, counters, the best metric. Others
belong to the next one: its batch is drawn from a data loader and from random generators. A version holds the first as
they are after the change, and the second as they were before it.

If the loop says where its iterations end (``end_iteration()``), that is one moment. If not, what is drawn from is saved
as of the end of the optimizer's step, and the rest as of the next forward pass. Of an object that may be either, nobody
can say: it is saved as of the step, and if it moves before the next forward pass, the version says so
(:class:`~tiercheck.streams.doubts.Doubts`).

What a process does between ``attach`` and its first iteration may draw random numbers too: ``iter(DataLoader)`` draws a
seed. So generators are put back twice, the second time when the first forward pass of training begins. What they were
there in the interrupted run is known if the version was published there. If ``end_iteration()`` published it, they were
as of then, unless the loop draws between its iterations; whether it does was observed in the iterations before. If it
said that an epoch ends there, the process that resumes draws what the interrupted run would have drawn.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tiercheck.errors import ConfigurationError, Mismatch, UnsupportedSetup
from tiercheck.format import host_state
from tiercheck.streams.doubts import Doubts
from tiercheck.streams.tensors.generators import (
    differing,
    not_restored,
    of_gpus_here,
    random_state,
    restore_random_state,
)
from tiercheck.streams.tensors.storable import from_storable, to_storable

__all__ = ["Beside", "End", "draws_batches", "is_users", "steps_after"]

log = logging.getLogger(__name__)

OUR_OWN = "tiercheck."
"""How the names of what integrations themselves put among the user's objects begin."""
HABIT_WITHIN = 64
"""Iterations. What a loop does twice within so many is a habit, and no end of an epoch."""


class End(enum.Enum):
    """Who tells that an iteration is over."""

    SAID = "the loop"
    FORWARD = "the next forward pass of training, which begins now"
    UNSEEN = "the next step, or the end of the job, since no forward pass was seen before it"


class Beside:
    """The random generators, and what the user passed: each has ``state_dict`` and ``load_state_dict``.

    ``after_step`` is what the loop changes after the optimizer's step; ``stateful`` is anything else. An integration
    calls :meth:`end_of_step` after the step, :meth:`end_of_iteration` before it publishes and :meth:`published` after
    that, and :meth:`begin_iteration` when a forward pass of training begins. Errors: ``UnsupportedSetup``;
    ``ConfigurationError``.
    """

    def __init__(self, after_step: Mapping[str, Any] | None = None, stateful: Mapping[str, Any] | None = None) -> None:
        given = dict(stateful or {})
        if clash := sorted(given.keys() & (after_step or {}).keys()):
            raise ConfigurationError(f"stateful= has the name {clash[0]!r}, which another argument stands for")
        self._after = {**(after_step or {}), **{name: each for name, each in given.items() if steps_after(each)}}
        self._drawn_from = {name: each for name, each in given.items() if name not in self._after}
        self._unclear = {name: each for name, each in self._drawn_from.items() if not draws_batches(each)}
        for name, each in {**self._after, **given}.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise UnsupportedSetup(
                    f"{name} ({type(each).__name__}) has no state_dict and load_state_dict: it cannot be saved"
                )
        self._at_step: dict[str, Any] | None = None
        """As of the end of the last step, until its version is published."""
        self._published: dict[str, Any] | None = None
        """The same, of the version that was published last."""
        self._at_forward: dict[str, Any] | None = None
        """The generators when the next forward pass began, if the version is published there."""
        self._doubts = Doubts()
        self._ended: dict[str, Any] | None = None
        """The generators as the last version holds them."""
        self._quiet: tuple[frozenset[str], ...] = ()
        """In each of the last two iterations seen, the generators that the loop did not use before its forward pass.
        Here or in the process that saved what was restored."""
        self._wanted: dict[str, Any] = {}
        """After a recovery, the generators as they must be when the first forward pass begins, as far as known."""
        self._used: frozenset[str] = frozenset()
        """Those of them that the loop has used between the end of the iteration before and then."""
        self._unsure: dict[str, Any] = {}
        """The others, as they were at the end of the iteration before."""
        self.later = False
        """Of a framework whose step does everything: versions are published behind it all the same, since the loop says
        where its iterations end, or writes after the step. The next process begins like that."""
        self.says_end = False
        """The loop says where its iterations end. That of the next process does so, too."""
        self.ends_epoch = False
        """The loop says that an epoch ends with the version that is published next."""
        self.begins = True
        """The loop has not begun: what the next process draws until then, this one draws, too."""
        self.passes_behind = False
        """A forward pass without gradients belongs to the iteration before, since the loop steps something behind it.
        That of the next process does so, too."""
        self._saved_at_forward = False
        """The last version was saved when the forward pass after it began, and knows the generators there."""
        self._at_times: frozenset[str] = frozenset()
        """The generators that the loop makes a habit of using behind the end of some iterations alone. Here or in
        the processes before."""
        self._since_draws = HABIT_WITHIN
        """So many iterations ago it did so last."""
        self._told_of_draws = False
        """It was told that the loop draws behind the end of an iteration."""
        self._loaded: dict[str, Any] = {}
        """What was put back last of what is drawn from, until :meth:`restore_generators`."""
        self._restored: dict[str, Any] | None = None
        """Until training begins, or somebody draws, what the version restored says of what is drawn from, and when. The
        generation's first base holds it: a loader may not say it before it has given a batch, and nobody has seen a
        forward pass yet."""
        self._warned = False
        self._new: tuple[str, ...] = ()
        """What was attached now, and not when the version restored was saved."""
        self._not_restored: list[str] = []
        """Why generators of GPUs are not as they were saved."""

    def given(self) -> Iterator[Any]:
        """Everything the user passed."""
        yield from self._after.values()
        yield from self._drawn_from.values()

    def let_go(self) -> None:
        """Hold none of it any more. Workers of a data loader end badly when the garbage collector finds them: it cuts
        the line that tells them to end, waits for each, and does so in whatever thread it happens to run in."""
        self._after, self._drawn_from, self._unclear = {}, {}, {}

    # The moments

    def end_of_step(self) -> None:
        """The optimizer has stepped: keep what the next batch will be drawn from."""
        self._at_step = self._drawn()
        self._at_forward, self._restored, self._doubts = None, None, Doubts()
        self.begins = self.ends_epoch = self._saved_at_forward = False

    def end_of_iteration(self, end: End) -> None:
        """The iteration is over, and ``end`` says who tells."""
        if end is End.SAID:
            self._at_step = self._at_forward = None  # all of it as it is now
            self._saved_at_forward = False
        elif end is End.FORWARD:
            self.forward_begins()
        elif not self._saved_at_forward:
            self._look_at_unclear()

    def forward_begins(self) -> None:
        """The first forward pass after the step begins, and the version is published now or later."""
        if not self._saved_at_forward:
            self._at_forward, self._saved_at_forward = random_state(), True
            self._look_at_unclear()

    def _look_at_unclear(self) -> None:
        if self._at_step is not None:
            before, now = self._at_step["stateful"], _states(self._unclear)
            self._tell(tuple(name for name in now if host_state.pack(now[name]) != host_state.pack(before[name])))

    def _tell(self, moved: tuple[str, ...]) -> None:
        self._doubts = Doubts(moved=moved)
        if moved and not self._warned:
            self._warned = True
            log.warning("versions from here on are approximate: %s", self._doubts.notes(replayed=True)[0])

    def tell_moved(self, what: str) -> None:
        """Nothing tells whether that belongs to the version that is published next, or to the iteration after it."""
        self._tell((*self._doubts.moved, what))

    def skipped(self) -> None:
        """The iteration's step was skipped, and the next forward pass has begun: what it is drawn from was not kept."""
        self.begins = False
        quiet = frozenset[str]().union(*self._quiet)
        used = [f"the generators of {kind}" for kind in sorted(random_state().keys() - quiet)]
        self._tell((*self._drawn_from, *used))

    def published(self) -> None:
        """The version is saved: what is asked from here on is asked of a later moment."""
        self._ended = self._drawn_random()
        self._published, self._at_step, self._at_forward = self._at_step, None, None
        self._doubts = Doubts()

    def publish_as_of_now(self) -> None:
        """A forward pass begins, and the version that was published last is saved again: as all is now, but for what
        the next batch is drawn from. :meth:`published` follows."""
        self._at_step, self._at_forward = self._published, random_state()

    def publish_again(self) -> None:
        """A forward pass begins, and the version that was published last may be saved again: with the generators as it
        had them, before the next batch was drawn. :meth:`published` follows."""
        if self._ended is not None:
            self._at_step = {"random": self._ended, "stateful": _states(self._drawn_from)}
            self._at_forward = random_state()

    def begin_iteration(self) -> None:
        """A forward pass of training begins. The first one after :meth:`restore_generators` puts the generators where
        the interrupted run had them then; the first one after :meth:`published` sees which of them the loop has used.
        """
        if self._wanted or self._unsure:
            self._first_forward()
        elif self._ended is not None and not self.ends_epoch:  # what begins an epoch is no habit of its loop
            now = random_state()
            used = differing(self._ended, now)
            self._tell_of_draws(used)
            self._quiet = (*self._quiet, frozenset(now) - used)[-2:]
        self._restored = None
        self.begins = self.ends_epoch = False
        self._ended = None  # what a process draws while it starts is no habit of its loop

    def _tell_of_draws(self, used: frozenset[str]) -> None:
        """``used``: the generators that the loop has used since the last version was saved."""
        at_times = used & frozenset[str]().union(*self._quiet)
        self._since_draws += 1
        if self._saved_at_forward or not at_times:
            return
        if self._since_draws <= HABIT_WITHIN:
            self._at_times |= at_times
        self._since_draws = 0
        if self._told_of_draws:
            return
        self._told_of_draws = True
        log.warning(
            "the loop has used the generators of %s behind the end of its iteration, and in the iterations before it "
            "had not: a job that fails in between resumes with other random numbers. If an epoch ended there, say so: "
            "end_iteration(ends_epoch=True). Else draw before end_iteration(), or from a generator of your own",
            ", ".join(sorted(used)),
        )

    def _first_forward(self) -> None:
        now = random_state()
        wanted, unsure = self._wanted, self._unsure
        self._wanted, self._unsure = {}, {}
        if moved := differing(wanted, {kind: each for kind, each in now.items() if kind in wanted}):
            log.info("random generators that were used since attach are put back: %s", ", ".join(sorted(moved)))
            restore_random_state(wanted)
        if moved & self._used:
            log.warning(
                "the loop draws from the generators of %s before its forward pass, and something else has done so "
                "since attach, as iter(DataLoader) does: what the loop has drawn is not what the interrupted run drew. "
                "Give the loader a generator= of its own",
                ", ".join(sorted(moved & self._used)),
            )
        if moved := differing(unsure, {kind: each for kind, each in now.items() if kind in unsure}):
            log.warning(
                "random numbers were drawn from the generators of %s between attach and the first forward pass, and "
                "the version does not say whether the interrupted run drew them there, too. If it did not "
                "(iter(DataLoader) draws a seed, also in the middle of an epoch), later random numbers differ from "
                "that run's",
                ", ".join(sorted(moved)),
            )

    # Saving and restoring

    def host_state(self) -> dict[str, Any]:
        """Errors: ``UnsupportedSetup`` for what no shard can hold."""
        found = self._restored
        if found is None or differing(found["random"], random_state()):
            drawn = self._at_step or self._drawn()
            found = {**drawn, "next": {**self._next(drawn["random"]), **self._told_by_the_loop()}}
        return self._doubts.saved_in({"after_step": self.after_step(), **found})

    def after_step(self) -> dict[str, Any]:
        """What the loop steps behind the optimizer, as it is now."""
        return _states(self._after)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`host_state` returned. What the checkpoint does not know begins as it is, and
        :meth:`caveats` tells. Errors: ``Mismatch``; what an object raises."""
        here = {**self._after, **self._drawn_from}
        saved = {**state["after_step"], **state["stateful"]}
        if missing := sorted(filter(is_users, saved.keys() - here.keys())):
            raise Mismatch(
                f"the checkpoint holds the state of {', '.join(missing)}, which this job does not attach, so that it "
                f"would be lost (attached: {', '.join(sorted(here)) or 'none'}): pass it under the same name, as "
                "scheduler=, scaler=, or in after_step= or stateful="
            )
        for name in here.keys() & saved.keys():
            here[name].load_state_dict(from_storable(saved[name]))
        self._loaded = {name: saved[name] for name in self._drawn_from if name in saved}
        self._new = tuple(sorted(filter(is_users, here.keys() - saved.keys())))

    def step(self, name: str) -> None:
        """Step what was restored under this name, a scheduler."""
        self._after[name].step()

    def caveats(self) -> list[str]:
        """What the state that was restored does not hold."""
        new = [f"the checkpoint holds no state of {name}, which begins as it is" for name in self._new]
        unclear = sorted(self._at_times & self._wanted.keys() - self._used)
        draws = [
            f"behind the end of some iterations the loop draws from the generators of {', '.join(unclear)}, and "
            "nothing tells whether it would have done so behind this one: draw before end_iteration(), or from a "
            "generator of your own; if that is where epochs end, say end_iteration(ends_epoch=True) there"
        ]
        return [*new, *self._not_restored, *(draws if unclear else ())]

    def restore_generators(self, state: Mapping[str, Any]) -> None:
        """Last of all: what is restored before may draw."""
        self._not_restored = not_restored(state["random"])
        generators, following = of_gpus_here(state["random"]), state["next"]
        following_used = of_gpus_here(following["used"])
        restore_random_state(following_used)  # what is no state fails here, and not when training has begun
        restore_random_state(generators)
        self.later = following.get("later") is True
        self.says_end = following.get("says_end") is True
        self.begins = following.get("begins") is True
        self.ends_epoch = following.get("ends_epoch") is True
        self.passes_behind = following.get("passes_behind") is True
        self._at_times = frozenset(following.get("at_times", ()))
        known = {kind: generators[kind] for kind in following["quiet"] if kind in generators}
        self._wanted = {**known, **following_used}
        self._used = frozenset(following_used)
        self._unsure = {kind: each for kind, each in generators.items() if kind not in self._wanted}
        if self.ends_epoch or self.begins:  # what this process draws now, the interrupted run would have drawn
            self._wanted, self._unsure = {}, {}
        others = {name: each for name, each in self._drawn_from.items() if name not in self._loaded}
        self._restored = {
            "random": generators,
            "stateful": {**_states(others), **self._loaded},
            "next": {"quiet": following["quiet"], "used": following_used, **self._told_by_the_loop()},
        }
        self._loaded = {}
        self._ended = None
        self._quiet = (frozenset(following["quiet"]),)

    def _next(self, ended: Mapping[str, Any]) -> dict[str, Any]:
        """What is known of the generators when the next forward pass begins: which are as they are now, and what the
        others are."""
        if self._at_forward is not None:
            used = differing(ended, self._at_forward)
            return {
                "quiet": sorted(self._at_forward.keys() - used),
                "used": {kind: self._at_forward[kind] for kind in sorted(used) if kind in self._at_forward},
            }
        return {"quiet": sorted(frozenset[str]().union(*self._quiet)), "used": {}}

    def _told_by_the_loop(self) -> dict[str, Any]:
        told = ("begins", "later", "says_end", "ends_epoch", "passes_behind")
        at_times = {"at_times": sorted(self._at_times)} if self._at_times else {}
        return {**{name: True for name in told if getattr(self, name)}, **at_times}

    def _drawn(self) -> dict[str, Any]:
        return {"random": random_state(), "stateful": _states(self._drawn_from)}

    def _drawn_random(self) -> dict[str, Any]:
        return random_state() if self._at_step is None else dict(self._at_step["random"])


def is_users(name: str) -> bool:
    """Whether the user gave the object of this name."""
    return not name.startswith(OUR_OWN)


def steps_after(value: Any) -> bool:
    """Whether it is of a type that no batch is drawn from, so that a change of it belongs to the iteration before."""
    return isinstance(
        value, torch.nn.Module | torch.optim.lr_scheduler.LRScheduler | torch.optim.Optimizer | torch.amp.GradScaler
    )


def draws_batches(value: Any) -> bool:
    """Whether it is plainly something that batches are drawn from."""
    data = torch.utils.data
    known = isinstance(value, data.DataLoader | data.Sampler | data.Dataset)
    return known or hasattr(value, "__next__") or (hasattr(value, "__iter__") and not hasattr(value, "keys"))


def _states(held: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_storable(_state_of(each, name), name) for name, each in held.items()}


def _state_of(held: Any, name: str) -> Any:
    """Errors: ``UnsupportedSetup`` if it cannot say it: some objects have the method, and not always a state."""
    try:
        return held.state_dict()
    except (AttributeError, NotImplementedError) as error:
        raise UnsupportedSetup(
            f"{name} ({type(held).__name__}) cannot be saved: its state_dict() raised {type(error).__name__}: {error}"
        ) from error
