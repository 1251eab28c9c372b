"""Replay: from a base to the version of the last differential, in temporal order.

A step is replayed by a kernel in place, several steps in one read and one write of the state, where a kernel is
bit-exact with the optimizer that took the steps. Everything else is replayed by calling the optimizer itself. So is
what ends sooner that way: a few steps, in a process that has not made a kernel ready.

The chain passes in runs of a few steps, or of more where gradients are sparse and the closed form may be used. While
one is replayed, the next one is made (read, verified, decoded) on another thread, and no more than that one: whatever
the chain's length, two runs are in memory beside the state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import torch

from tiercheck.errors import Corruption
from tiercheck.kernels import HalfGradient, SparseGradient
from tiercheck.runtime.runtime import Scheduler
from tiercheck.streams.records.recorded import Differential
from tiercheck.streams.replay.fidelity import Tally
from tiercheck.streams.replay.kernel_selection import is_kernel_ready, kernel_for
from tiercheck.streams.replay.runs import Gradient, Run, Step, check_fits, decode_run, wide
from tiercheck.streams.state import MakeRuns
from tiercheck.streams.tensors.provider import StateProvider

__all__ = ["SPARSE_STEPS_AT_ONCE", "STEPS_AT_ONCE", "Replayed", "Replayer", "replay", "replay_runs", "threads_granted"]

STEPS_AT_ONCE = 5
"""Versions in a run: what a kernel takes in one pass over the state. More of them gain little, and each costs a decoded
gradient of memory, twice."""

SPARSE_STEPS_AT_ONCE = 50
"""The same where sparse gradients are replayed in closed form, which costs an element little more for many steps than
for one. So many are merged as far as they take no more memory than a run of dense gradients."""


@dataclass(frozen=True)
class Replayed:
    """What a replay did."""

    tally: Tally
    host_state: Mapping[str, Any] | None
    """As of the last version; ``None`` if there was none."""


def replay(
    provider: StateProvider, differentials: Sequence[Differential], *, threads: int | None = None, exact: bool = True
) -> Replayed:
    """Apply the differentials, of consecutive versions, oldest first, to the state the provider holds.

    ``threads``, ``exact``: see :func:`replay_runs`. Errors: ``Corruption`` if one names a master or a group that
    the state does not have, before anything is changed; or if one cannot be decoded, when those before it may be
    applied.
    """

    groups = max(provider.group_of().values(), default=-1) + 1
    for each in differentials:
        check_fits(each, provider.masters(), groups)
    granted = threads_granted(threads)
    replaying = _Replaying(Replayer(provider, threads=granted, exact=exact))
    for start in range(0, len(differentials), STEPS_AT_ONCE):
        replaying.apply(decode_run(differentials[start : start + STEPS_AT_ONCE], threads=granted))
    return replaying.replayed


async def replay_runs(
    provider: StateProvider,
    make: MakeRuns,
    scheduler: Scheduler,
    *,
    threads: int | None = None,
    exact: bool = True,
    called_elements_max: int = 0,
    before: Callable[[Run], None] = lambda run: None,
) -> Replayed:
    """Apply runs, oldest first, to the state the provider holds; make the next one while one is applied.

    At most ``threads`` threads (default: torch's number of them) run kernels and codecs, the caller's included: half
    of them replay while the other half makes the next run. With one thread the two take turns. An optimizer that is
    called runs on as many as torch grants it. ``exact=False`` allows Adam's steps over sparse gradients to be
    replayed by a closed form, which is faster, and within 2e-5 of the movement of what the optimizer did; that is
    told in the tally. ``called_elements_max``: as of :class:`Replayer`. ``before`` is called with each run before it
    is applied, and must not keep it. The runs must fit the state
    (:func:`~tiercheck.streams.replay.runs.check_fits`). Errors: those of ``make``.
    """
    granted = threads_granted(threads)
    making = max(1, granted // 2)
    replayer = Replayer(
        provider, threads=max(1, granted - making), exact=exact, called_elements_max=called_elements_max
    )
    replaying = _Replaying(replayer)
    elements = sum(master.numel() for master in provider.masters().values())
    made = make(making)
    runs = _Runs(made if exact else merged(made, nbytes_max=4 * elements * STEPS_AT_ONCE), scheduler)
    try:
        runs.begin()
        while (run := await runs.next()) is not None:
            if granted > 1:  # it is gone before the one after the next is begun
                runs.begin()
            before(run)
            replaying.apply(run)
            del run
            if granted == 1:
                runs.begin()
    finally:
        await runs.close()
    return replaying.replayed


async def merged(runs: AsyncGenerator[Run, None], *, nbytes_max: int) -> AsyncGenerator[Run, None]:
    """Neighbouring runs as one, up to so many bytes and :data:`SPARSE_STEPS_AT_ONCE` steps; larger ones as they are.

    A run is handed out before another one is made that might not fit: two are in memory, as without merging.
    """
    waiting: list[Run] = []  # at most one; what is handed out is not named here
    async with aclosing(runs):
        while (run := await anext(runs, None)) is not None:
            more, steps = nbytes_of(run), len(run.steps)
            if waiting and nbytes_of(waiting[0]) + more > nbytes_max:
                yield waiting.pop()
            waiting.append(waiting.pop().then(run) if waiting else run)
            del run
            full = len(waiting[0].steps) + steps > SPARSE_STEPS_AT_ONCE
            if full or nbytes_of(waiting[0]) + more > nbytes_max:
                yield waiting.pop()
    if waiting:
        yield waiting.pop()


def nbytes_of(run: Run) -> int:
    """What its gradients take; sparse ones twice, since what they were decoded from may be kept with them."""
    gradients = (each for step in run.steps for each in step.gradients.values())
    return sum(
        2 * (g.indices.nbytes + g.values.nbytes) if isinstance(g, SparseGradient) else g.nbytes for g in gradients
    )


def threads_granted(threads: int | None) -> int:
    """``threads``, or torch's number of them. Errors: ``ValueError`` for less than one."""
    granted = torch.get_num_threads() if threads is None else threads
    if granted < 1:
        raise ValueError(f"a replay needs at least one thread, not {granted}")
    return granted


class _Replaying:
    """Applies runs, and counts what they were."""

    def __init__(self, replayer: Replayer) -> None:
        self._replayer = replayer
        self._tally = Tally()
        self._host_state: Mapping[str, Any] | None = None

    def apply(self, run: Run) -> None:
        self._replayer.apply(run)
        self._tally, self._host_state = self._tally + run.tally, run.host_state

    @property
    def replayed(self) -> Replayed:
        return Replayed(replace(self._tally, approximated=self._replayer.approximated), self._host_state)


class _Runs:
    """Runs that are made on the event loop, one at a time."""

    def __init__(self, runs: AsyncGenerator[Run, None], scheduler: Scheduler) -> None:
        self._runs = runs
        self._scheduler = scheduler
        self._turn = asyncio.Lock()
        self._made: Future[Run | None] | None = None

    def begin(self) -> None:
        """Have the next one made."""
        self._made = self._scheduler.start(self._advance())

    async def next(self) -> Run | None:
        """The one that was begun; ``None`` at the end. How long a read may take is up to those who make it."""
        made, self._made = self._made, None
        assert made is not None, "one was begun"
        await self._scheduler.ends(made, None)
        return made.result()

    async def close(self) -> None:
        if self._made is not None:
            self._made.cancel()
        await self._scheduler.ends(self._scheduler.start(self._close()), None)

    async def _advance(self) -> Run | None:
        async with self._turn:
            return await anext(self._runs, None)

    async def _close(self) -> None:
        async with self._turn:  # one that is being made ends first
            await self._runs.aclose()


class Replayer:
    """Applies runs to the state that a provider holds, which they fit, on at most ``threads`` threads.

    ``exact``: see :func:`replay_runs`. ``called_elements_max``: so many elements, of all steps together, are left to
    the optimizer while the process has no kernel ready. A call takes memory for the gradients once more.
    """

    def __init__(
        self, provider: StateProvider, *, threads: int = 1, exact: bool = True, called_elements_max: int = 0
    ) -> None:
        self._provider = provider
        self._threads = threads
        self._exact = exact
        self._called_elements_max = called_elements_max
        self._called_elements = 0
        self.approximated = 0
        """Steps that were replayed otherwise than bit for bit."""

    def apply(self, run: Run) -> None:
        """Apply the steps, then the buffers. Errors: ``Corruption`` for a buffer that the state does not have."""
        waiting = run.steps
        while waiting:
            kernel = None if self._is_little(waiting) else kernel_for(self._provider, waiting, exact=self._exact)
            if kernel is not None:
                kernel(self._provider, waiting, threads=self._threads)
                if not kernel.exact:
                    self.approximated += len(waiting)
                break
            # The first step makes the optimizer's state, or sets options: those after it may do without a call.
            self._call(waiting[0])
            waiting = waiting[1:]
        self._load(run.buffers)

    def _is_little(self, steps: Sequence[Step]) -> bool:
        """Whether so little is left that no kernel is worth being made ready for it."""
        if self._called_elements >= self._called_elements_max or is_kernel_ready(self._provider):
            return False
        gradients = [each for step in steps for each in step.gradients.values()]
        if any(isinstance(each, SparseGradient) for each in gradients):
            return False
        masters = self._provider.masters()
        elements = sum(masters[name].numel() for step in steps for name in step.gradients)
        return self._called_elements + elements <= self._called_elements_max

    def _call(self, step: Step) -> None:
        masters = self._provider.masters()
        gradients = {name: dense(gradient, masters[name]) for name, gradient in step.gradients.items()}
        self._called_elements += sum(each.numel() for each in gradients.values())
        self._provider.apply(gradients, step.hyperparameters)

    def _load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copied at once, run by run: a buffer that waited for a newer one would keep its whole shard in memory."""
        buffers = self._provider.buffers()
        with torch.no_grad():
            for name, value in values.items():
                if name not in buffers or buffers[name].shape != value.shape:
                    raise Corruption(f"a differential has the buffer {name!r}, which the state does not have")
                buffers[name].copy_(value)


def dense(gradient: Gradient, master: torch.Tensor) -> torch.Tensor:
    """The gradient as the optimizer takes it, in the master's shape."""
    if isinstance(gradient, torch.Tensor):
        return gradient
    if isinstance(gradient, HalfGradient):
        return wide(gradient).view(master.shape)
    return torch.from_numpy(gradient.dense(master.numel())).view(master.shape)
