"""Replay of several steps at once, against torch's own optimizers taking them one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from benchmarks.figures import Figure, Measured
from benchmarks.kernels.gradients import Harvest, harvest, repeated, repeated_sparse
from benchmarks.kernels.settings import KernelSettings, clocked, compared
from benchmarks.training import Floats, Held, copied, replay_of, threads_of_torch
from tiercheck.kernels import AdamStep, SparseGradient
from tiercheck.streams.optimizers.replay import Replay

__all__ = ["FIGURES"]

VERSION = 70
"""The step at which a replay begins: the training behind the state took as many."""

DEVIATION_MAX = 2e-5
"""Of the closed form, relative to the movement."""


def steps_of(count: int) -> list[AdamStep]:
    """Decay, and a learning rate of each step's own."""
    return [
        AdamStep(
            step=VERSION + n,
            lr=1e-3 * (1 - n / 1000),
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            decoupled=True,
        )
        for n in range(1, count + 1)
    ]


class Replayed:
    """The kernel's side: the state goes back to where it was before each repetition."""

    def __init__(self, kernel: Replay, start: Held, threads: int) -> None:
        self._kernel = kernel
        self._start = start
        self._threads = threads
        self.state = copied(start)

    def reset(self) -> None:
        for held, wanted in zip(self.state, self._start, strict=True):
            np.copyto(held, wanted)

    def __call__(self, gradients: Sequence[Floats | SparseGradient], steps: Sequence[AdamStep]) -> None:
        param, first, second = self.state
        self._kernel(param, {"exp_avg": first, "exp_avg_sq": second}, gradients, steps, threads=self._threads)


class Stepped:
    """torch's side: one parameter, one step a gradient."""

    def __init__(self, start: Held, implementation: str) -> None:
        self._start = start
        self._parameter = torch.nn.Parameter(torch.from_numpy(start[0].copy()))
        options = steps_of(1)[0]
        self._optimizer = torch.optim.AdamW(
            [self._parameter],
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=implementation == "fused",
            foreach=implementation == "foreach",
        )
        self._parameter.grad = torch.zeros_like(self._parameter)
        self._optimizer.step()  # makes its state

    @property
    def state(self) -> Held:
        held = self._optimizer.state[self._parameter]
        value, first, second = (
            tensor.detach().numpy() for tensor in (self._parameter, held["exp_avg"], held["exp_avg_sq"])
        )
        return value, first, second

    def reset(self) -> None:
        for held, wanted in zip(self.state, self._start, strict=True):
            np.copyto(held, wanted)
        self._optimizer.state[self._parameter]["step"].fill_(VERSION)

    def dense(self, gradients: Sequence[torch.Tensor], steps: Sequence[AdamStep]) -> None:
        for gradient, options in zip(gradients, steps, strict=True):
            self._parameter.grad = gradient
            self._step(options)

    def scattered(
        self, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]], dense: torch.Tensor, steps: Sequence[AdamStep]
    ) -> None:
        """Each sparse gradient into a dense one, which is cleared before."""
        self._parameter.grad = dense
        for (indices, values), options in zip(gradients, steps, strict=True):
            dense.zero_()
            dense.scatter_(0, indices, values)
            self._step(options)

    def _step(self, options: AdamStep) -> None:
        self._optimizer.param_groups[0]["lr"] = options.lr
        self._optimizer.step()


def start_of(found: Harvest, elements: int) -> Held:
    value, first, second = (repeated(array, elements) for array in found.state)
    return value, first, second


def differing(a: Held, b: Held) -> int:
    return sum(int(np.count_nonzero(x.view(np.uint32) != y.view(np.uint32))) for x, y in zip(a, b, strict=True))


async def dense(settings: KernelSettings, *, steps: int, kernel: str, ceiling: str) -> Measured:
    """``kernel``: with which implementation of torch's the replay agrees. ``ceiling``: which one is timed."""
    found, elements = harvest(settings.setup), settings.replay_elements
    start, options = start_of(found, elements), steps_of(steps)
    gradients = [repeated(found.dense[n % len(found.dense)], elements) for n in range(steps)]
    ours, theirs = Replayed(replay_of(kernel), start, settings.threads), Stepped(start, ceiling)
    tensors = [torch.from_numpy(gradient) for gradient in gradients]
    return await compare(
        settings,
        ours,
        theirs,
        lambda: ours(gradients, options),
        lambda: theirs.dense(tensors, options),
        steps=steps,
        check=exactly if kernel == ceiling else None,
        start=start,
    )


async def sparse(settings: KernelSettings, *, steps: int, exact: bool) -> Measured:
    found, elements = harvest(settings.setup), settings.replay_elements
    start, options = start_of(found, elements), steps_of(steps)
    period = found.gradient.size
    chosen = [repeated_sparse(each, period, elements) for each in found.sparse[:steps]]
    gradients = [SparseGradient(indices, values) for indices, values in chosen]
    tensors = [(torch.from_numpy(i.astype(np.int64)), torch.from_numpy(values)) for i, values in chosen]
    scratch = torch.zeros(elements)
    ours, theirs = Replayed(replay_of("fused", exact=exact), start, settings.threads), Stepped(start, "fused")
    return await compare(
        settings,
        ours,
        theirs,
        lambda: ours(gradients, options),
        lambda: theirs.scattered(tensors, scratch, options),
        steps=steps,
        check=exactly if exact else closely,
        start=start,
    )


Check = Callable[[Held, Held, Held], dict[str, float]]
"""What (ours, theirs, start) tell after both have taken the same steps."""


def exactly(ours: Held, theirs: Held, start: Held) -> dict[str, float]:
    """Errors: ``RuntimeError`` where a bit differs."""
    if count := differing(ours, theirs):
        raise RuntimeError(f"the replay is not exact: {count} values differ from torch's")
    return {"differing": 0}


def closely(ours: Held, theirs: Held, start: Held) -> dict[str, float]:
    """Errors: ``RuntimeError`` where the parameters are farther away than the closed form may be."""
    moved = float(np.linalg.norm((theirs[0] - start[0]).astype(np.float64)))
    deviation = float(np.linalg.norm((ours[0] - theirs[0]).astype(np.float64))) / moved
    if not deviation <= DEVIATION_MAX:
        raise RuntimeError(f"the closed form is {deviation:.2g} of the movement away, more than {DEVIATION_MAX:g}")
    return {"deviation": float(f"{deviation:.3g}")}


async def compare(
    settings: KernelSettings,
    ours: Replayed,
    theirs: Stepped,
    subject: Callable[[], None],
    ceiling: Callable[[], None],
    *,
    steps: int,
    check: Check | None,
    start: Held,
) -> Measured:
    """Rates are bytes of state and gradients that the steps touch, as if each step read and wrote all of them."""
    with threads_of_torch(settings.threads):
        details: dict[str, object] = {"steps": steps, "elements": start[0].size}
        for side, work in ((ours, subject), (theirs, ceiling)):
            side.reset()
            work()
        if check is not None:
            details |= check(ours.state, theirs.state, start)
        return await compared(
            settings,
            clocked(subject, ours.reset),
            clocked(ceiling, theirs.reset),
            steps * 7 * start[0].nbytes,
            details,
        )


def dense_figure(name: str, steps: int, kernel: str, ceiling: str, goal: float | None) -> Figure[KernelSettings]:
    meaning = f"{steps} steps of AdamW replayed in one pass, against torch's {ceiling} one taking them"
    return Figure(
        f"replay.dense.{name}/{'torch_fused' if ceiling == 'fused' else ceiling}",
        meaning,
        partial(dense, steps=steps, kernel=kernel, ceiling=ceiling),
        goal,
    )


SCATTER = "torch's fused one with each gradient scattered into a dense one"

FIGURES: tuple[Figure[KernelSettings], ...] = (
    *(dense_figure(f"n{steps}", steps, "fused", "fused", 1.4 if steps == 5 else None) for steps in (1, 2, 5, 10, 50)),
    dense_figure("n10", 10, "fused", "foreach", 8),
    dense_figure("n10.same_rounding", 10, "foreach", "foreach", None),
    Figure(
        "replay.sparse.exact/torch_fused_scatter",
        f"10 steps with a hundredth of each gradient, bit for bit, against {SCATTER}",
        partial(sparse, steps=10, exact=True),
        1.7,
    ),
    *(
        Figure(
            f"replay.sparse.closed_form.n{steps}/torch_fused_scatter",
            f"{steps} such steps in closed form, against {SCATTER}",
            partial(sparse, steps=steps, exact=False),
            goal,
        )
        for steps, goal in ((10, 3.0), (50, 5.0))
    ),
)
