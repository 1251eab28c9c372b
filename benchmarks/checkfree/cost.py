"""What each strategy takes on the wall clock, by a model whose every constant is stated here with its source.

The model is the paper's medium one, 500M parameters in six transformer stages (github.com/gensyn-ai/CheckFree,
simulate_training/500M_config.json): its trace is what our trainings live through.

- An **iteration** takes 68 s: where a stage fails in 10 % of the hours, its authors draw 0.002 an iteration (the
  same file), and ``1 - (1 - 0.002) ** n = 0.10`` for n = 53 iterations an hour. Their other rates give 63 and 83 s.
- **Redundant computation** repeats the next stage's forward pass on each node (Bamboo, Thorpe et al., NSDI 2023). A
  forward pass is a third of a step's arithmetic (Kaplan et al., arXiv 2001.08361, section 2.1: 2N of 6N operations a
  token), so an iteration takes 4/3. No bubble is filled with it: this speaks against redundant computation.
- The **links** carry 500 Mb/s, as the authors' blog assumes (gensyn.ai/articles/checkfree).
- A **state** has 12 bytes a parameter: fp32 weights and two moments. **Saving** costs nothing: it is asynchronous. This
  speaks for checkpoints.
- **Full roll-back**: each stage reads its state, all at once. **Partial roll-back**: one stage does. **CheckFree**: one
  stage reads the weights (4 bytes a parameter) of two neighbours; copying reads those of one.
- Finding and starting a new node is the same for all, and left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log

from benchmarks.checkfree.trace import RATES, Trace

__all__ = ["CHECKPOINTS", "CostModel", "Curve", "in_place", "redundant", "rolled_back", "steps_to"]

CHECKPOINTS = (10, 50, 100)
"""Steps between two checkpoints of a full roll-back."""

SECONDS_AN_HOUR = 3600.0

Curve = Sequence[tuple[float, float]]
"""Points (steps or hours, validation loss), in order."""


@dataclass(frozen=True)
class CostModel:
    """Seconds, bytes, and bytes a second."""

    iteration_s: float = SECONDS_AN_HOUR * -log(1 - RATES["10%"]) / -log(1 - 0.10)
    redundant_factor: float = 4 / 3
    stage_parameters: float = 500e6 / 6
    state_bytes: int = 12
    weight_bytes: int = 4
    link_bytes_s: float = 500e6 / 8

    @property
    def state_s(self) -> float:
        """Until one stage has read its state."""
        return self.stage_parameters * self.state_bytes / self.link_bytes_s

    def neighbours_s(self, count: int) -> float:
        """Until one stage has read the weights of so many others."""
        return count * self.stage_parameters * self.weight_bytes / self.link_bytes_s


def in_place(curve: Curve, recoveries: Sequence[tuple[int, float]], cost: CostModel) -> list[tuple[float, float]]:
    """The curve against hours. ``recoveries``: at which step, and how many seconds each took."""
    return [
        ((at * cost.iteration_s + sum(s for step, s in recoveries if step < at)) / SECONDS_AN_HOUR, loss)
        for at, loss in curve
    ]


def redundant(curve: Curve, cost: CostModel) -> list[tuple[float, float]]:
    """No stage is ever lost, and each iteration takes longer."""
    return [(at * cost.iteration_s * cost.redundant_factor / SECONDS_AN_HOUR, loss) for at, loss in curve]


def rolled_back(
    curve: Curve, trace: Trace, every: int, steps: int, horizon: int, cost: CostModel
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """A full roll-back to the last of the checkpoints at every ``every``-th step, against executed iterations and
    against hours.

    Training is deterministic: what is trained again has the same losses. A point is where its step is first reached. A
    training that does not reach all steps within ``horizon`` executed iterations has the points that it reaches.
    """
    wanted = [at for at, _ in curve]
    reached: dict[float, tuple[int, int]] = {}
    done = failures = 0
    for executed in range(horizon):
        if executed in trace.lost:
            failures += 1
            done = done // every * every
        done += 1
        if done in wanted and done not in reached:
            reached[done] = (executed + 1, failures)
        if done >= steps:
            break
    losses = dict(curve)
    by_iterations = [(float(executed), losses[at]) for at, (executed, _) in reached.items()]
    by_hours = [
        ((executed * cost.iteration_s + failed * cost.state_s) / SECONDS_AN_HOUR, losses[at])
        for at, (executed, failed) in reached.items()
    ]
    return by_iterations, by_hours


def steps_to(curve: Curve, target: float) -> float | None:
    """Where the loss first is at most the target, between two points on the straight line; ``None`` if nowhere."""
    if curve and curve[0][1] <= target:
        return curve[0][0]
    for (before, high), (after, low) in pairwise(curve):
        if low <= target < high:
            return before + (after - before) * (high - target) / (high - low)
    return None
