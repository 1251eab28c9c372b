"""From an optimizer's class to what replays it: by its entry point, and only after it has been certified."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.recorded import Trainer, fresh, state_of
from tests.unit.streams.codecs.test_registry import register
from tiercheck.errors import ConfigurationError
from tiercheck.streams.optimizers import certification
from tiercheck.streams.optimizers.registry import find_optimizer, optimizer_of
from tiercheck.streams.optimizers.replay import Setting, replay_for
from tiercheck.streams.replay.fidelity import reached
from tiercheck.streams.replay.replay import replay
from tiercheck.testing.optimizers import OptimizerTests
from tiercheck.types import Fidelity

LION = """
from functools import partial
import numpy as np
import torch
from tiercheck.errors import ConfigurationError
from tiercheck.kernels.gradients import dense
from tiercheck.streams.optimizers.optimizer import Form, ReplayableOptimizer

class Lion(torch.optim.Optimizer):
    # Chen et al., Symbolic Discovery of Optimization Algorithms (2023), without decay.
    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                m.mul_(group["beta"]).add_(p.grad)
                p.sub_(torch.sign(m) * group["lr"])

def replay_lion(wrong, param, state, gradients, steps):
    m = state["exp_avg"]
    for gradient, (lr, beta) in zip(gradients, steps, strict=True):
        m *= np.float32(beta)
        m += dense(gradient, param.size)
        param -= np.where(np.isnan(m), np.float32(0), np.sign(m)) * np.float32(lr * wrong)  # as torch.sign

class Replayable(ReplayableOptimizer):
    kind = "lion_of_mine.Lion"
    state = ("exp_avg",)
    forms = (Form("reference", lambda implementation, instruction_set: partial(replay_lion, 1.0)),)
    def reason_not_replayable(self, options):
        return None if {"lr", "beta"} <= options.keys() else "its options lack lr or beta"
    def step(self, options, count):
        if reason := self.reason_not_replayable(options):
            raise ConfigurationError(reason)
        return options["lr"], options["beta"]
    def variants(self):
        for beta in (0.9, 0.5):
            yield {"lr": 1e-2, "beta": beta}

class Wrong(Replayable):
    kind = "lion_of_mine.Almost"
    forms = (Form("reference", lambda implementation, instruction_set: partial(replay_lion, 1.001)),)

class Almost(Lion):
    pass
"""


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("installed")
    (folder / "lion_of_mine.py").write_text(LION)
    entries = {
        "lion_of_mine.Lion": "lion_of_mine:Replayable",
        "lion_of_mine.Almost": "lion_of_mine:Wrong",
        "lion_of_mine.Another": "lion_of_mine:Replayable",
    }
    register(folder, "lion", group="tiercheck.optimizers", **entries)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for cached in (optimizer_of, find_optimizer):
            cached.cache_clear()
        yield
    for cached in (optimizer_of, find_optimizer):
        cached.cache_clear()
    sys.modules.pop("lion_of_mine", None)


class TestLion(OptimizerTests):
    """An optimizer from another distribution passes the kit."""

    kind = "lion_of_mine.Lion"


def trained(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Trainer, list[Any]]:
    groups = "tests.recorded.Model.groups"
    monkeypatch.setattr(groups, lambda self: [{"params": list(self.parameters()), "lr": 1e-2}])
    kind: Any = certification.class_of(f"lion_of_mine.{name}")
    trainer = Trainer(kind)
    return kind, trainer, [trainer.step() for _ in range(7)]


def test_its_recovery_is_exact_and_a_kernel_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, trainer, differentials = trained("Lion", monkeypatch)
    provider, calls = fresh(kind), list[int]()
    apply = provider.apply
    monkeypatch.setattr(provider, "apply", lambda *arguments: (calls.append(1), apply(*arguments)))
    replayed = replay(provider, differentials)
    assert state_of(provider) == trainer.state()
    assert len(calls) == 1, "the first step, which makes the state"
    assert reached(provider.identity(), provider.identity(), replayed.tally)[0] is Fidelity.EXACT


def test_one_that_is_almost_right_is_not_certified_and_the_optimizer_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, trainer, differentials = trained("Almost", monkeypatch)
    provider, calls = fresh(kind), list[int]()
    apply = provider.apply
    monkeypatch.setattr(provider, "apply", lambda *arguments: (calls.append(1), apply(*arguments)))
    replay(provider, differentials)
    assert len(calls) == 7
    assert state_of(provider) == trainer.state()
    here = Setting("single_tensor", *certification.environment(), "cpu")
    with pytest.raises(ConfigurationError, match="values of its self-test differ from the optimizer's own"):
        replay_for("lion_of_mine.Almost", here, choose="reference")


def test_a_broken_entry_point_is_passed_over_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert find_optimizer("lion_of_mine.Another") is None
    assert "does not replay lion_of_mine.Another" in caplog.text
    assert find_optimizer("torch.optim.rmsprop.RMSprop") is None
    with pytest.raises(ConfigurationError, match="there is no replayable optimizer"):
        optimizer_of("torch.optim.rmsprop.RMSprop")


def test_only_the_optimizer_that_runs_is_imported() -> None:
    assert type(optimizer_of("torch.optim.sgd.SGD")).__module__ == "tiercheck.streams.optimizers.sgd"
    assert certification.class_of("torch.optim.sgd.SGD") is torch.optim.SGD
    with pytest.raises(ConfigurationError, match="there is no optimizer"):
        certification.class_of("torch.optim.sgd.NoSuch")
