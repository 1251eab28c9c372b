"""Differentials made without a job: what a stream records of given gradients, read back from memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tiercheck.format import container
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.keys import ShardKey
from tiercheck.streams.records.differential import DifferentialStream
from tiercheck.streams.records.recorded import Differential, read_differentials

SIZES = {"embedding": (37,), "weight": (16, 9), "bias": (5,)}


class Model(torch.nn.Module):
    """Tensors of odd sizes, in two parameter groups that differ in every option; and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SIZES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=generator)))
        self.register_buffer("seen", torch.zeros(3))

    def groups(self) -> list[dict[str, Any]]:
        return [
            {"params": [self.embedding, self.bias], "lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.0},
            {"params": [self.weight], "lr": 3e-3, "betas": (0.4, 0.999), "weight_decay": 0.1, "eps": 1e-6},
        ]


class Trainer:
    """Steps a model with gradients of a seed, recording each; :meth:`state` compares bit for bit."""

    def __init__(
        self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, codec: str = "exact", **options: Any
    ):
        self.model = Model()
        self.optimizer = optimizer(self.model.groups(), **options)
        self.provider = ModuleProvider(self.model, self.optimizer)
        self.stream = DifferentialStream(self.provider, codec, 1)
        self.version = 0

    def step(self, *, without: Sequence[str] = (), skipped: bool = False, **options: Any) -> Differential:
        """One version. ``without``: parameters that have no gradient; ``options`` go to the first group."""
        self.version += 1
        self.optimizer.param_groups[0].update(options)
        gradients = gradients_of(self.version, without)
        key = ShardKey.differential(1, self.version, self.version, 0)
        capture = self.stream.begin(key, memory := memoryview(bytearray(self.stream.nbytes_max)))
        if not skipped:
            capture.add(gradients)
            for name, parameter in self.model.named_parameters():
                parameter.grad = gradients[name].clone() if name in gradients else None
            self.optimizer.step()
        if self.version % 2:
            self.model.seen += self.version
        nbytes = capture.finish(skipped=skipped)
        (differential,) = read_differentials(container.parse(memory[:nbytes].toreadonly()), tier="memory")
        return differential

    def state(self) -> dict[str, bytes]:
        return state_of(self.provider)


def gradients_of(version: int, without: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        name: torch.randn(shape, generator=generator) * 1e-2 for name, shape in SIZES.items() if name not in without
    }


def state_of(provider: ModuleProvider) -> dict[str, bytes]:
    """Every bit of the masters, the optimizer's tensors and the buffers."""
    tensors: dict[str, torch.Tensor] = {**provider.masters(), **provider.buffers()}
    held: Mapping[str, Mapping[str, Any]] = provider.optimizer_state()
    for name, state in held.items():
        tensors |= {f"{name}.{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()}


def fresh(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> ModuleProvider:
    """The state before the first step."""
    model = Model()
    return ModuleProvider(model, optimizer(model.groups(), **options))
