"""Several optimizers of one model: each version has the bits of the run that did not fail."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tiercheck
from tests.training import memory
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError, Mismatch, UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.streams.tensors.joint import JointOptimizer, kind_of, kinds_in
from tiercheck.tiers.shm.namespaces import remove_namespace

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch.optim.Muon (torch 2.9)")

LAST = 12
Optimizers = list[torch.optim.Optimizer]


def matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [each for each in model.parameters() if each.ndim == 2]


def others(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [each for each in model.parameters() if each.ndim < 2]


def muon(model: torch.nn.Module) -> Optimizers:
    return [torch.optim.Muon(matrices(model), lr=1e-2), torch.optim.AdamW(others(model), lr=1e-2)]


def adamw(model: torch.nn.Module) -> Optimizers:
    fused: dict[str, Any] = {"lr": 1e-2, "fused": True}
    return [torch.optim.AdamW(matrices(model), weight_decay=0.1, **fused), torch.optim.AdamW(others(model), **fused)]


class Loop:
    """``between``: what it does between the two steps of ``version``. ``leaves_out``: versions without the second."""

    def __init__(self, seed: int, made: Callable[[torch.nn.Module], Optimizers]) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
        self.optimizers = made(self.model)
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in self.optimizers]
        self.between: Callable[[int], None] = lambda version: None
        self.leaves_out: Sequence[int] = ()
        self.says_end = True
        self.states: dict[int, list[bytes]] = {}
        self.checkpointer: Checkpointer | None = None

    def attach(self, *urls: str, **config: Any) -> Checkpointer:
        settings = CheckpointConfig(**{"deadline_s": 30, **config})
        beside = {str(at): each for at, each in enumerate(self.schedulers)}
        self.checkpointer = attach(self.model, self.optimizers, Hierarchy.of(*urls), config=settings, after_step=beside)
        return self.checkpointer

    def train(self, last: int) -> None:
        first = self.checkpointer.version + 1 if self.checkpointer else 1
        one, other = self.optimizers
        for version in range(first, last + 1):
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(version))
            one.zero_grad()
            (self.model(batch) - batch).pow(2).mean().backward()
            one.step()
            self.between(version)
            other.zero_grad()
            (self.model(batch) - batch).abs().mean().backward()  # as of a GAN, it leaves gradients of the first one
            if version not in self.leaves_out:
                other.step()
            for each in self.schedulers:
                each.step()
            if self.checkpointer is not None and self.says_end:
                self.checkpointer.end_iteration()
            self.states[version] = self.state()

    def state(self) -> list[bytes]:
        found = [each.detach().numpy().tobytes() for each in self.model.parameters()]
        for optimizer in self.optimizers:
            found += [repr(group["lr"]).encode() for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found += [each.numpy().tobytes() for _, each in sorted(optimizer.state[parameter].items())]
        return found


def clamped(loop: Loop) -> None:
    """As the critic of a Wasserstein GAN."""

    def clamp(version: int) -> None:
        if version % 3 == 0:
            with torch.no_grad():
                for parameter in matrices(loop.model):
                    parameter.clamp_(-0.2, 0.2)

    loop.between = clamp


def set_between(loop: Loop) -> None:
    def set_rate(version: int) -> None:
        loop.optimizers[1].param_groups[0]["lr"] = 1e-2 / version
        loop.optimizers[0].param_groups[0]["lr"] = 2e-2 / version  # of the next version

    loop.between = set_rate


def left_out(loop: Loop) -> None:
    """As by a ``GradScaler``, or every fourth generator's step of a GAN."""
    loop.leaves_out = (4, 8, 9)


@pytest.mark.parametrize("made", [muon, adamw])
@pytest.mark.parametrize("as_in", [lambda loop: None, clamped, set_between, left_out], ids=lambda each: each.__name__)
def test_every_version_is_resumed_bit_for_bit(
    made: Callable[[torch.nn.Module], Optimizers], as_in: Callable[[Loop], None]
) -> None:
    whole = Loop(1, made)
    as_in(whole)
    whole.train(LAST)
    url, reached = memory(), 0
    for seed, last in enumerate((2, 3, 8, 9, LAST), start=1):
        loop = Loop(seed, made)
        as_in(loop)
        checkpointer = loop.attach(url, base_every=5)
        assert checkpointer.version == reached
        if reached:
            assert checkpointer.recovery is not None
            assert (checkpointer.recovery.fidelity, loop.state()) == ("exact", whole.states[reached])
        loop.train(last)
        assert {version: loop.states[version] == whole.states[version] for version in loop.states} == dict.fromkeys(
            loop.states, True
        )
        checkpointer.abort()
        reached = last


def test_a_version_of_which_the_loop_does_not_say_the_end_is_there_when_the_job_closes() -> None:
    url, loop = memory(), Loop(1, muon)
    with loop.attach(url) as checkpointer:
        loop.says_end = False
        loop.train(1)
        assert checkpointer.version == 0
    again = Loop(2, muon)
    assert again.attach(url).version == 1
    assert again.state() == loop.states[1]
    again.checkpointer.abort()  # type: ignore[union-attr]


def test_a_second_step_in_one_iteration_is_refused() -> None:
    loop = Loop(1, muon)
    checkpointer = loop.attach(memory())
    loop.says_end = False
    with pytest.raises(UnsupportedSetup, match=r"Muon steps twice .* must call checkpointer\.end_iteration\(\)"):
        loop.train(2)
    checkpointer.abort()


def test_what_cannot_be_joined_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    one, other = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    with pytest.raises(UnsupportedSetup, match="two of the optimizers update the same parameter"):
        attach(model, [one, other], Hierarchy.of(memory()))
    with pytest.raises(ConfigurationError, match="optimizer= is empty"):
        attach(model, [], Hierarchy.of(memory()))
    with pytest.raises(UnsupportedSetup, match=r"not updated by the attached optimizer .*attach all optimizers, as \["):
        attach(model, [torch.optim.AdamW([model.weight])], Hierarchy.of(memory()))
    with pytest.raises(UnsupportedSetup, match=r"must be a torch\.optim\.Optimizer, not str"):
        attach(model, [one, "AdamW"], Hierarchy.of(memory()))  # type: ignore[list-item]


def test_a_scheduler_of_the_second_one_is_not_forgotten() -> None:
    loop = Loop(1, muon)
    first = loop.schedulers[0]
    for given in ({"scheduler": first}, {"after_step": {"one": first}}):
        with pytest.raises(UnsupportedSetup, match="a learning-rate scheduler was made for the optimizer"):
            attach(loop.model, loop.optimizers, Hierarchy.of(memory()), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [muon, adamw])
def test_bases_are_folded(made: Callable[[torch.nn.Module], Optimizers], tmp_path: Path) -> None:
    """By a kernel if all are of one class that has one, else by calling them. A process of its own does it, which
    imports torch first and gets a busy processor last."""
    name = f"test-joint-{uuid.uuid4().hex[:12]}"
    urls = f"shm://{name}?size=64MiB", f"nvme://{tmp_path}?survives=rack"
    loop = Loop(1, made)
    with loop.attach(*urls, base_every=4, bases="fold", deadline_s=200) as checkpointer:
        loop.train(LAST)
        checkpointer.flush()
        assert checkpointer.stats.mover.folded_bases
    remove_namespace(name)
    again = Loop(2, made)
    checkpointer = again.attach(memory(), f"nvme://{tmp_path}?survives=rack")
    assert (checkpointer.version, again.state()) == (LAST, loop.states[LAST])
    checkpointer.abort()


def test_steps_are_replayed_without_the_training_code(tmp_path: Path) -> None:
    url = f"nvme://{tmp_path / 'run'}?survives=rack"
    loop = Loop(1, muon)
    with loop.attach(memory(), url, base_every=5, batch=1) as checkpointer:
        loop.train(LAST)
        checkpointer.flush()
    with tiercheck.open(url) as archive:
        rebuilt = archive.rebuild(0, version=LAST)
    assert rebuilt.fidelity == "exact"
    found = {name: each.numpy().tobytes() for name, each in rebuilt.state.masters().items()}
    assert found == {name: each.detach().numpy().tobytes() for name, each in loop.model.named_parameters()}


def test_other_optimizers_are_refused_by_name() -> None:
    url = memory()
    loop = Loop(1, muon)
    loop.attach(url).abort()
    with pytest.raises(Mismatch, match=r"Muon \(1\) and torch\.optim\.adamw\.AdamW \(1\), this job has torch\.optim"):
        Loop(1, adamw).attach(url)


def test_the_kinds_of_a_joint_optimizer_are_told_and_read() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert kinds_in(kind_of(torch.optim.SGD(model.parameters()))) == [("torch.optim.sgd.SGD", None)]
    alike = JointOptimizer([torch.optim.SGD(each.parameters()) for each in model])
    assert kind_of(alike) == "torch.optim.sgd.SGD"
    groups = [{"params": [each]} for each in model[0].parameters()]
    mixed = JointOptimizer([torch.optim.SGD(groups), torch.optim.AdamW(model[1].parameters())])
    assert kinds_in(kind_of(mixed)) == [("torch.optim.sgd.SGD", 2), ("torch.optim.adamw.AdamW", 1)]
    assert len(mixed.state) == 0
    state = mixed.state.setdefault(model[1].weight, {})
    assert (mixed.parts[1].state[model[1].weight], list(mixed.state)) == (state, [model[1].weight])
    del mixed.state[model[1].weight]
    assert mixed.state.get(model[1].weight) is None
