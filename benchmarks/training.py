"""A seeded training run in one process, for benchmarks that need real gradients: the demo's GPT on the demo's text.

Its data are a pure function of (seed, version), it has no dropout, and its optimizer is torch's fused AdamW, which the
replay kernels reproduce bit for bit: what a benchmark branches off can be compared with what it branched off from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.figures import Unavailable
from tiercheck.demo.training.model import GPT
from tiercheck.demo.training.model_size import parameter_count
from tiercheck.demo.training.text import batch_at, load_corpus
from tiercheck.kernels import AdamStep
from tiercheck.streams.optimizers.replay import Replay, Setting, replay_for

__all__ = ["Floats", "Held", "SetUp", "State", "Training", "copied", "facts", "replay_of", "threads_of_torch"]

KIND = "torch.optim.adamw.AdamW"

VALIDATION_SHARE = 0.1
VALIDATION_SEED = 1_000_003
"""Of the validation windows, which are the same for every seed of the training."""

VALIDATION_BATCH = 8

EPS = 1e-8

Floats = NDArray[np.float32]

Held = tuple[Floats, Floats, Floats]
"""Of one tensor: its value, its first moment, its second moment."""


@dataclass(frozen=True)
class SetUp:
    """A byte-level GPT, and how it is trained. The learning rate rises linearly, and stays."""

    width: int
    layers: int
    heads: int
    seed: int
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup_steps: int = 10
    sequence: int = 128
    micro_batch: int = 2
    validation_windows: int = 32

    @property
    def parameters(self) -> int:
        return parameter_count(width=self.width, layers=self.layers, sequence=self.sequence)


@dataclass(frozen=True)
class State:
    """What an optimizer steps: by parameter, flat, as of ``version``."""

    version: int
    tensors: Mapping[str, Held]

    def copy(self) -> State:
        return State(self.version, {name: copied(held) for name, held in self.tensors.items()})

    def distance(self, other: State) -> float:
        """Between the parameters of both: the Euclidean norm, over all of them."""
        return float(sum(squared_distance(self.tensors[n][0], other.tensors[n][0]) for n in self.tensors) ** 0.5)

    def differing_bits(self, other: State) -> int:
        """How many of the fp32 values, moments included, are not the same to the last bit."""
        pairs = ((a, b) for name in self.tensors for a, b in zip(self.tensors[name], other.tensors[name], strict=True))
        return sum(int(np.count_nonzero(a.view(np.uint32) != b.view(np.uint32))) for a, b in pairs)


class Training:
    """One model in training. ``version`` counts its steps."""

    def __init__(self, setup: SetUp) -> None:
        self.setup = setup
        self.version = 0
        torch.manual_seed(setup.seed)
        self.model = GPT(
            width=setup.width, layers=setup.layers, heads=setup.heads, sequence=setup.sequence, dropout=0.0
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=setup.lr,
            betas=setup.betas,
            eps=EPS,
            weight_decay=setup.weight_decay,
            fused=True,
        )
        corpus = load_corpus()
        edge = int(corpus.size * (1 - VALIDATION_SHARE))
        self._text, self._validation_text = corpus[:edge], corpus[edge:]
        self._parameters = dict(self.model.named_parameters())

    @property
    def sizes(self) -> dict[str, int]:
        """Elements by parameter."""
        return {name: parameter.numel() for name, parameter in self._parameters.items()}

    def step_options(self, version: int) -> AdamStep:
        """The scalars of the step that leads to ``version``."""
        setup = self.setup
        return AdamStep(
            step=version,
            lr=setup.lr * min(1.0, version / setup.warmup_steps),
            beta1=setup.betas[0],
            beta2=setup.betas[1],
            eps=EPS,
            weight_decay=setup.weight_decay,
            decoupled=True,
        )

    def backward(self) -> float:
        """Forward and backward of the next version, clipped: the gradients are what the next step applies."""
        inputs, targets = self._batch(self._text, self.setup.seed, self.version + 1, self.setup.micro_batch)
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.setup.clip)
        return float(loss.item())

    def gradients(self) -> dict[str, Floats]:
        """By parameter, flat; the optimizer's own memory, which may be written to before the step."""
        return {name: flat(parameter.grad) for name, parameter in self._parameters.items()}

    def step(self) -> None:
        self.version += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.step_options(self.version).lr
        self.optimizer.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.step()

    def state(self) -> State:
        """A copy; after at least one step."""
        return State(self.version, {name: copied(held) for name, held in self._live().items()})

    def load(self, state: State) -> None:
        """Go on from ``state``; after at least one step."""
        for name, held in self._live().items():
            for live, wanted in zip(held, state.tensors[name], strict=True):
                np.copyto(live, wanted)
        for parameter in self._parameters.values():
            self.optimizer.state[parameter]["step"].fill_(state.version)
        self.version = state.version

    def validation_loss(self) -> float:
        """Mean cross-entropy in nats a byte, on windows that are never trained on and always the same."""
        batches = -(-self.setup.validation_windows // VALIDATION_BATCH)
        total = 0.0
        with torch.no_grad():
            for index in range(batches):
                windows = self._batch(self._validation_text, VALIDATION_SEED, index, VALIDATION_BATCH)
                total += float(self.model(*windows).item())
        return total / batches

    def _batch(
        self, text: NDArray[np.uint8], seed: int, version: int, micro_batch: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        windows = batch_at(
            text, seed=seed, version=version, rank=0, micro_batch=micro_batch, sequence=self.setup.sequence
        )
        return torch.from_numpy(windows[0]), torch.from_numpy(windows[1])

    def _live(self) -> dict[str, Held]:
        state = self.optimizer.state
        return {
            name: (flat(parameter), flat(state[parameter]["exp_avg"]), flat(state[parameter]["exp_avg_sq"]))
            for name, parameter in self._parameters.items()
        }


def replay_of(implementation: str, *, exact: bool = True) -> Replay:
    """The kernel that takes steps as torch's AdamW of this implementation does in this process, or the closed form.

    Errors: ``Unavailable`` where none gets the same bits here.
    """
    version, instruction_set = str(torch.__version__), str(torch.backends.cpu.get_cpu_capability())
    found = replay_for(KIND, Setting(implementation, version, instruction_set, "cpu"), exact=exact)
    if found is None:
        raise Unavailable(f"no kernel is bit-exact with torch {version}'s {implementation} AdamW on {instruction_set}")
    return found


def flat(tensor: torch.Tensor | None) -> Floats:
    """The tensor's own memory as a 1-D array."""
    if tensor is None or not tensor.is_contiguous() or tensor.dtype is not torch.float32:
        raise RuntimeError("the benchmark's training has contiguous fp32 tensors, with gradients, alone")
    array: Floats = tensor.detach().view(-1).numpy()
    return array


def copied(held: Held) -> Held:
    value, first, second = held
    return value.copy(), first.copy(), second.copy()


def squared_distance(a: Floats, b: Floats) -> float:
    difference = a.astype(np.float64) - b
    return float(difference @ difference)


@contextmanager
def threads_of_torch(threads: int) -> Iterator[None]:
    """torch works with so many threads, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def facts(setup: SetUp) -> dict[str, object]:
    """Plain values, for a line of JSON."""
    return {"parameters": setup.parameters, **asdict(setup)}
