"""One training, lost some steps after a base: what each scheme restores, and where training from there leads.

``error`` is how far the restored parameters are from the true ones, as a share of how far the true ones moved since
the base. The *gaps* are the validation loss minus that of the run that was never interrupted: at the version that is
resumed, and some steps later, trained on with the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.fidelity.schemes import EncodedGradients, Replayed, Scheme, schemes
from benchmarks.training import SetUp, State, Training, facts, replay_of

__all__ = ["Course", "Experiment"]


@dataclass(frozen=True)
class Course:
    """How many steps: to the base, from the base to the loss, and trained on afterwards."""

    to_base: int
    lost: int
    later: int


@dataclass(frozen=True)
class Losses:
    """Validation losses, in nats a byte, of one run: at the base, at the version that is lost, and later."""

    base: float
    lost: float
    later: float


@dataclass(frozen=True)
class Experiment:
    """One set-up and seed. ``trained_on`` are the codecs whose decoded gradients a training of its own steps with."""

    model: str
    setup: SetUp
    course: Course
    trained_on: tuple[str, ...]
    threads: int
    names: tuple[str, ...] | None = None
    """Of the schemes that are tried; all where there is none."""
    progress: Callable[[str], None] = lambda text: None

    def lines(self) -> Iterator[dict[str, Any]]:
        """A line for the run itself, and one for each scheme, as they are found."""
        training = Training(self.setup)
        self._tell(f"{self.course.to_base} steps to the base")
        training.train(self.course.to_base)
        base, base_loss = training.state(), training.validation_loss()
        tried = schemes(base, threads=self.threads, names=self.names)
        for n in range(self.course.lost):
            if n % 10 == 0:
                self._tell(f"step {n} of {self.course.lost} from the base, by {len(tried)} schemes")
            training.backward()
            gradients, step = training.gradients(), training.step_options(training.version + 1)
            for scheme in tried:
                scheme.take(gradients, step)
            training.step()
        true, lost_loss = training.state(), training.validation_loss()
        training.train(self.course.later)
        losses = Losses(base_loss, lost_loss, training.validation_loss())
        moved = true.distance(base)
        yield self._line("run", "uninterrupted", losses=vars(losses), moved=digits(moved), setup=facts(self.setup))
        while tried:
            scheme = tried.pop(0)  # its state is gone when the next one's turn comes
            scheme.end(true)
            yield self._judged(training, scheme, true, moved, losses)
        del training
        for name in self.trained_on if self.names is None else ():
            yield self._trained_on(name, losses)

    def _judged(self, training: Training, scheme: Scheme, true: State, moved: float, losses: Losses) -> dict[str, Any]:
        """Go on from what the scheme restores; where that is the true state, that was done already."""
        self._tell(f"{scheme.name}: {self.course.later} steps from what it restores")
        restored = scheme.restored()
        differing = restored.differing_bits(true)
        resumed, later = losses.lost, losses.later
        if differing:
            training.load(restored)
            resumed = training.validation_loss()
            training.train(self.course.later)
            later = training.validation_loss()
        return self._line(
            scheme.mode,
            scheme.name,
            **self._bits(scheme),
            error=digits(restored.distance(true) / moved),
            differing=differing,
            gap_resumed=digits(resumed - losses.lost),
            gap_later=digits(later - losses.later),
        )

    def _trained_on(self, name: str, plain: Losses) -> dict[str, Any]:
        """LowDiff: the training itself steps with what was decoded, from its first step on, residuals and all.

        Its recovery is exact, which is checked; what it costs is told by the losses, against the plain training's.
        """
        self._tell(f"{name}: a training of its own, which steps with what was decoded")
        training = Training(self.setup)
        encoded = EncodedGradients(name, training.sizes, self.threads, trained_on=True)
        self._step_with(training, encoded, self.course.to_base)
        base, base_loss = training.state(), training.validation_loss()
        # One encoding for both: what is stored is what is stepped with.
        scheme = Replayed(name, base, replay=replay_of("fused"), threads=self.threads, gradients=encoded)
        self._step_with(training, encoded, self.course.lost, scheme)
        true, lost_loss = training.state(), training.validation_loss()
        self._step_with(training, encoded, self.course.later)
        losses = Losses(base_loss, lost_loss, training.validation_loss())
        restored = scheme.restored()
        return self._line(
            "trained-on",
            name,
            **self._bits(scheme),
            error=digits(restored.distance(true) / true.distance(base)),
            differing=restored.differing_bits(true),
            gap_resumed=digits(losses.lost - plain.lost),
            gap_later=digits(losses.later - plain.later),
            losses=vars(losses),
        )

    def _step_with(
        self, training: Training, encoded: EncodedGradients, steps: int, scheme: Replayed | None = None
    ) -> None:
        for _ in range(steps):
            training.backward()
            encoded.encode(training.gradients(), training.version + 1)
            if scheme is not None:
                scheme.apply(training.step_options(training.version + 1))
            training.step()

    def _bits(self, scheme: Scheme) -> dict[str, float]:
        """Per parameter: written a step, and held in the end."""
        parameters, steps = self.setup.parameters, self.course.lost
        return {
            "bits": digits(8 * scheme.written_bytes / parameters / steps),
            "held_bits": digits(8 * scheme.held_bytes / parameters),
        }

    def _line(self, mode: str, scheme: str, **more: Any) -> dict[str, Any]:
        return {
            "figure": "fidelity",
            "model": self.model,
            "parameters": self.setup.parameters,
            "seed": self.setup.seed,
            "steps": self.course.lost,
            "later": self.course.later,
            "mode": mode,
            "scheme": scheme,
            **more,
        }

    def _tell(self, text: str) -> None:
        self.progress(f"{self.model} ({self.setup.parameters / 1e6:.1f}M), seed {self.setup.seed}: {text}")


def digits(number: float) -> float:
    """Four significant ones."""
    return float(f"{number:.4g}")
