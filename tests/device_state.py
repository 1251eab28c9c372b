"""A training state in the memory of a :class:`~tests.reordering.Reordering`, and beside it what it should be."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tests.reordering import Reordering
from tiercheck.streams.tensors.provider import Identity, OptimizerIdentity, StateProvider

__all__ = ["DeviceState"]

SHAPES: Mapping[str, tuple[int, ...]] = {"one": (7, 9), "two": (130,), "three": (1,), "none": (0,)}


class DeviceState(StateProvider):
    """Plain momentum: each step writes to masters and moments in the current stream, and counts on the host."""

    def __init__(
        self, device: Reordering, *, dtype: torch.dtype = torch.float32, shapes: Mapping[str, tuple[int, ...]] = SHAPES
    ) -> None:
        self.device = device
        self.version = 0
        self.dtype = dtype
        self._masters = {name: values(shape, 97) for name, shape in shapes.items()}
        self._frozen = {"frozen": values((16_400,), 98)}
        self._buffers = {"mean": torch.zeros(3)}
        self._moments = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self._counts = {name: torch.zeros(()) for name in shapes}
        """On the host, as torch keeps Adam's."""
        self.gradients: dict[str, torch.Tensor] = {}
        self._true: dict[int, dict[str, Any]] = {0: self._copied()}
        for held in (self._masters, self._frozen, self._buffers, self._moments):
            for each in held.values():
                device.put(each)
        self._now = self._copied()
        self.frozen_bytes = self._frozen["frozen"].numpy().tobytes()

    # What a provider is asked

    def identity(self) -> Identity:
        return Identity.of("test", self, OptimizerIdentity.without_torch(type(self)))

    def masters(self) -> Mapping[str, torch.Tensor]:
        return self._masters

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        return {name: {"moment": self._moments[name], "step": self._counts[name]} for name in self._masters}

    def frozen(self) -> Mapping[str, torch.Tensor]:
        return self._frozen

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return self._buffers

    def hyperparameters(self) -> list[dict[str, Any]]:
        return [{"lr": 0.5}]

    def host_state(self) -> dict[str, Any]:
        return {"version": self.version}

    def load(self, **_: Any) -> None:
        raise NotImplementedError

    def apply(self, gradients: Mapping[str, torch.Tensor], hyperparameters: list[dict[str, Any]]) -> None:
        raise NotImplementedError

    def restore_host_state(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError

    # What a loop does

    def forward(self) -> None:
        """The forward pass writes to the running mean."""
        for held, write in ((self._now["extras"], direct), (self._buffers, self.device.write)):
            write(held["mean"], lambda mean: mean.add_(0.25))

    def backward(self) -> dict[str, torch.Tensor]:
        """New gradients, as the current stream computes them."""
        self.gradients = {}
        for name, value in self.true_gradients(self.version + 1).items():
            gradient = self.device.put(torch.full_like(value, -1))
            self.device.write(gradient, lambda memory, value=value: memory.copy_(value))
            self.gradients[name] = gradient
        return dict(self.gradients)

    def true_gradients(self, version: int) -> dict[str, torch.Tensor]:
        return {name: values(each.shape, version).to(self.dtype) for name, each in self._masters.items()}

    def step(self) -> None:
        if not self.gradients:
            self.backward()
        gradients, true = self.gradients, self.true_gradients(self.version + 1)
        self.version += 1
        for name in self._masters:
            self._counts[name].add_(1)
            self._now["state"][name]["step"].add_(1)
            stepped(self._now["masters"][name], self._now["state"][name]["moment"], true[name])
            self.device.write(
                self._moments[name], lambda moment, given=gradients[name]: moment.mul_(0.5).add_(given.float())
            )
            self.device.write(
                self._masters[name], lambda master, moment=self._moments[name]: master.sub_(moment, alpha=0.5)
            )
        self._true[self.version] = copy.deepcopy(self._now)
        self.gradients = {}

    def doubled(self, name: str) -> None:
        """Somebody has doubled this master."""
        self._now["masters"][name].mul_(2)

    def at(self, version: int) -> dict[str, Any]:
        """What the state was right after the step."""
        return self._true[version]

    def check_now(self) -> None:
        for name, tensor in self._now["masters"].items():
            assert torch.equal(self._masters[name], tensor), f"training went another way (seed {self.device.seed})"

    def _copied(self) -> dict[str, Any]:
        return {
            "masters": copy.deepcopy(self._masters),
            "state": {
                name: {"moment": self._moments[name].clone(), "step": self._counts[name].clone()}
                for name in self._masters
            },
            "extras": copy.deepcopy({**self._frozen, **self._buffers}),
        }


def values(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Numbers that bf16 holds, others for each seed."""
    size = torch.Size(shape).numel()
    return ((torch.arange(size, dtype=torch.float32) * 7 + seed * 13) % 31 - 15).div(8).view(tuple(shape))


def direct(tensor: torch.Tensor, work: Any) -> None:
    work(tensor)


def stepped(master: torch.Tensor, moment: torch.Tensor, gradient: torch.Tensor) -> None:
    moment.mul_(0.5).add_(gradient.float())
    master.sub_(moment, alpha=0.5)
