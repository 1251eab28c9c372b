"""A pipeline of six stages in one process: a byte-level GPT in training, whose stages can be taken out and made anew.

Embeddings, the last norm and the head are the *ends*: the paper copies them to neighbours at each step, so that they
are never lost. Everything is a pure function of the seed: data of (seed, step), no dropout, one thread.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck.demo.training.model import GPT, cross_entropy
from tiercheck.demo.training.model_size import parameter_count
from tiercheck.demo.training.text import batch_at, load_corpus
from tiercheck.policy.neighbours import Layer, RaisedRate

__all__ = ["RECORDED", "STAGES", "Floats", "Held", "Pipeline", "SetUp", "Stage"]

STAGES = 6
IN_ORDER = tuple(range(STAGES))
SWAPPED = (1, 0, *range(2, STAGES - 2), STAGES - 1, STAGES - 2)
"""CheckFree+: the first two and the last two stages change places, for every other micro-batch."""

VALIDATION_SHARE = 0.1
VALIDATION_SEED = 1_000_003
RECORDED = 2
"""Steps whose activations between the stages are kept."""

Floats = NDArray[np.float32]

Held = tuple[Floats, Floats, Floats, int]
"""Of one parameter, flat: its value, its two moments, and the steps that the moments have seen."""

Stage = Mapping[str, Held]
"""By parameter's name within the stage."""


@dataclass(frozen=True)
class SetUp:
    """The model and its training. ``raised``: the learning rate of a stage that was made from its neighbours."""

    name: str
    width: int
    heads: int
    seed: int
    steps: int
    layers_per_stage: int = 1
    sequence: int = 64
    micro_batches: int = 2
    micro_batch: int = 4
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup_steps: int = 50
    validation_windows: int = 24
    validate_every: int = 75
    base_every: int = 100
    """Steps between two bases of every stage, for partial roll-back."""
    raised: RaisedRate = field(default_factory=RaisedRate)

    @property
    def parameters(self) -> int:
        return parameter_count(width=self.width, layers=STAGES * self.layers_per_stage, sequence=self.sequence)


class Pipeline:
    """One training. ``version`` counts its steps; ``swaps``: train as CheckFree+ does."""

    def __init__(self, setup: SetUp, *, swaps: bool = False) -> None:
        self.setup, self.swaps, self.version = setup, swaps, 0
        torch.manual_seed(setup.seed)
        self.model = GPT(
            width=setup.width,
            layers=STAGES * setup.layers_per_stage,
            heads=setup.heads,
            sequence=setup.sequence,
            dropout=0.0,
        )
        per = setup.layers_per_stage
        blocks = list(self.model.blocks)
        self.stages = [torch.nn.ModuleList(blocks[per * at : per * at + per]) for at in range(STAGES)]
        inside = {id(each) for stage in self.stages for each in stage.parameters()}
        ends = [each for each in self.model.parameters() if id(each) not in inside]
        groups = [list(stage.parameters()) for stage in self.stages]
        self._parameters = [each for group in (*groups, ends) for each in group]
        place = {id(each): at for at, each in enumerate(self._parameters)}
        self._layers = [
            {name: each for name, each in stage.named_modules() if list(each.parameters(recurse=False))}
            for stage in self.stages
        ]
        self._places = [
            [[place[id(each)] for each in layer.parameters()] for layer in own.values()] for own in self._layers
        ]
        """By stage and layer, which of the parameters are its own."""
        self.optimizer = torch.optim.AdamW(
            [{"params": each} for each in (*groups, ends)],
            lr=setup.lr,
            betas=setup.betas,
            weight_decay=setup.weight_decay,
            fused=True,
        )
        self.layer_norms: dict[int, tuple[float, ...]] = {}
        """By stage, the gradient norm of each of its layers at the last step, before clipping."""
        self.raised_at: dict[int, int] = {}
        self.activations: deque[tuple[torch.Tensor, ...]] = deque(maxlen=RECORDED)
        """Of the last steps: what went into each stage, and what came out of the last one."""
        corpus = text()
        edge = int(corpus.size * (1 - VALIDATION_SHARE))
        self._text, self._validation_text = corpus[:edge], corpus[edge:]

    @property
    def norms(self) -> dict[int, float | None]:
        """By stage, the gradient norm at the last step."""
        return {stage: float(np.hypot.reduce(norms)) for stage, norms in self.layer_norms.items()}

    def step(self) -> float:
        """One iteration. Returns its loss, in nats a byte."""
        self.optimizer.zero_grad()
        setup = self.setup
        inputs, targets = self._windows(
            self._text, setup.seed, self.version + 1, setup.micro_batches * setup.micro_batch
        )
        loss = 0.0
        if self.swaps:
            for at in range(setup.micro_batches):
                own = slice(at * setup.micro_batch, (at + 1) * setup.micro_batch)
                order = SWAPPED if at % 2 else IN_ORDER
                part = self._loss(inputs[own], targets[own], order) / setup.micro_batches
                torch.autograd.backward(part)
                loss += float(part.item())
        else:  # micro-batches of one size in one go: the mean is the same
            whole = self._loss(inputs, targets, IN_ORDER, record=True)
            torch.autograd.backward(whole)
            loss = float(whole.item())
        self._measure_and_clip()
        self.version += 1
        for stage, group in enumerate(self.optimizer.param_groups):
            since = self.version - 1 - self.raised_at.get(stage, self.version)
            raised = setup.raised.at(since) if stage in self.raised_at else 1.0
            group["lr"] = setup.lr * min(1.0, self.version / setup.warmup_steps) * raised
        self.optimizer.step()
        return loss

    def validation_loss(self) -> float:
        """Mean cross-entropy in nats a byte, stages in order, on windows that are never trained on and always the
        same."""
        windows = self._windows(self._validation_text, VALIDATION_SEED, 0, self.setup.validation_windows)
        with torch.no_grad():
            return float(self._loss(*windows, IN_ORDER).item())

    def layer_names(self, at: int) -> list[str]:
        """Of a stage: its linear layers and its norms, in order."""
        return list(self._layers[at])

    def layers(self) -> dict[int, list[Layer]]:
        """What :func:`tiercheck.policy.neighbours.check_layers` compares."""
        return {
            at: [
                Layer(name, tuple((n, tuple(p.shape)) for n, p in each.named_parameters()))
                for name, each in own.items()
            ]
            for at, own in enumerate(self._layers)
        }

    def stage(self, at: int) -> dict[str, Held]:
        """A copy of a stage's state."""
        return {name: self._held(each) for name, each in self.stages[at].named_parameters()}

    def put(self, at: int, state: Stage) -> None:
        """Make a stage what ``state`` says; moments of 0 steps are none."""
        for name, parameter in self.stages[at].named_parameters():
            self._put(parameter, state[name])

    def whole(self) -> dict[str, Held]:
        return {name: self._held(each) for name, each in self.model.named_parameters()}

    def put_whole(self, version: int, state: Stage) -> None:
        self.version = version
        for name, parameter in self.model.named_parameters():
            self._put(parameter, state[name])

    def _loss(
        self, inputs: torch.Tensor, targets: torch.Tensor, order: Sequence[int], *, record: bool = False
    ) -> torch.Tensor:
        model = self.model
        hidden = model.embedding(inputs)
        between = [hidden]
        for stage in order:
            for layer in self.stages[stage]:
                hidden = layer(hidden)
            between.append(hidden)
        if record:
            self.activations.append(tuple(each.detach() for each in between))
        return cross_entropy(model.head(hidden), targets)

    def _measure_and_clip(self) -> None:
        """Each layer's gradient norm, and then no norm of the whole above the set-up's."""
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(each) for each in gradients]).numpy()
        self.layer_norms = {
            stage: tuple(float(np.hypot.reduce(norms[layer])) for layer in layers)
            for stage, layers in enumerate(self._places)
        }
        total = float(np.hypot.reduce(norms))
        if total > self.setup.clip:
            torch._foreach_mul_(gradients, self.setup.clip / total)

    def _windows(
        self, text: NDArray[np.uint8], seed: int, version: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sequence = self.setup.sequence
        windows = batch_at(text, seed=seed, version=version, rank=0, micro_batch=count, sequence=sequence)
        return torch.from_numpy(windows[0]), torch.from_numpy(windows[1])

    def _held(self, parameter: torch.nn.Parameter) -> Held:
        value = flat(parameter).copy()
        state = self.optimizer.state.get(parameter)
        if not state:
            return value, np.zeros_like(value), np.zeros_like(value), 0
        return value, flat(state["exp_avg"]).copy(), flat(state["exp_avg_sq"]).copy(), int(state["step"].item())

    def _put(self, parameter: torch.nn.Parameter, held: Held) -> None:
        value, first, second, steps = held
        np.copyto(flat(parameter), value)
        self.optimizer.state.pop(parameter, None)
        if steps:
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(steps)),
                "exp_avg": torch.from_numpy(first.copy()).view(parameter.shape),
                "exp_avg_sq": torch.from_numpy(second.copy()).view(parameter.shape),
            }


@functools.cache
def text() -> NDArray[np.uint8]:
    return load_corpus()


def flat(tensor: torch.Tensor) -> Floats:
    """The tensor's own memory as a 1-D array."""
    found: Floats = tensor.detach().view(-1).numpy()
    return found
