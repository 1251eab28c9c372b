"""What a sound copy may say that the live state does not: it is no damage, and costs no version."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.training import Training, memory
from tiercheck.errors import Corruption, Mismatch
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.streams.records.base import BaseState
from tiercheck.streams.records.expected import Expected, alike_following, alike_generators
from tiercheck.streams.tensors.provider import extras_of
from tiercheck.tiers.memory import MemoryDriver

LAST = 6


@pytest.fixture
def hierarchy() -> Iterator[Hierarchy]:
    url = memory()
    yield Hierarchy.of(url)
    MemoryDriver.forget(url.removeprefix("memory://"))


def left_at_last(hierarchy: Hierarchy, **options: Any) -> Training:
    """A job that has ended; from its fourth step on its parameter group has these options, too."""
    training = Training()
    training.optimizer.param_groups[0].update(dict.fromkeys(options))
    with training.attach(hierarchy, base_every=4):
        for version in range(1, LAST + 1):
            if version == 4:
                training.optimizer.param_groups[0].update(options)
            training.step(version)
    return training


@pytest.mark.parametrize("value", [0.5, [1, 2], True])
def test_an_option_of_the_users_own_that_was_set_while_it_trained_costs_no_version(
    hierarchy: Hierarchy, value: Any
) -> None:
    before = left_at_last(hierarchy, best=value)
    training = Training()
    training.optimizer.param_groups[0]["best"] = None
    with training.attach(hierarchy) as checkpointer:
        assert checkpointer.recovery is not None
        assert (checkpointer.version, checkpointer.recovery.quarantined) == (LAST, ())
        assert training.parameters() == before.parameters()
        assert training.optimizer.param_groups[0]["best"] == value


def test_an_option_that_only_a_newer_optimizer_has_costs_no_version(hierarchy: Hierarchy) -> None:
    before = left_at_last(hierarchy)
    training = Training()
    training.optimizer.param_groups[0]["newer"] = True
    with training.attach(hierarchy) as checkpointer:
        assert checkpointer.recovery is not None
        assert (checkpointer.version, checkpointer.recovery.quarantined) == (LAST, ())
        assert training.parameters() == before.parameters()
        assert training.optimizer.param_groups[0]["newer"] is True


@pytest.mark.parametrize("on_nothing_left", ["refuse", "restart"])
def test_a_job_that_was_changed_is_refused_and_loses_nothing(hierarchy: Hierarchy, on_nothing_left: str) -> None:
    before = left_at_last(hierarchy)
    changed = Training()
    changed.optimizer = torch.optim.AdamW([{"params": layer.parameters()} for layer in changed.model], lr=1e-2)
    with pytest.raises(Mismatch, match=f"version {LAST} was saved whole.*it has options for 1 parameter groups, not 2"):
        changed.attach(hierarchy, on_nothing_left=on_nothing_left)
    training = Training()
    with training.attach(hierarchy) as checkpointer:
        assert (checkpointer.version, training.parameters()) == (LAST, before.parameters())


def test_an_integration_may_call_its_host_state_as_it_likes() -> None:
    """Names to which the integrations of this project give a form have none of their own."""
    own = {"random": [1, 2], "next": 7, "options": {"lr": 1}, "counters": "many"}
    training = Training()
    provider = ModuleProvider(training.model, training.optimizer)
    here, options = Expected.of(provider), provider.hyperparameters()
    base = BaseState(provider.identity(), provider.masters(), {}, extras_of(provider), options, own, {})
    replace(here, host_state=own).check_base(base)
    with pytest.raises(Corruption):  # they do give one
        here.check_base(base)


def generators(gpus: int | None) -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state().numpy()}
    return state if gpus is None else {**state, "cuda": [np.zeros(16, np.uint8)] * gpus}


def test_generators_may_be_of_another_number_of_gpus() -> None:
    for here, saved in itertools.product((None, 1, 8), repeat=2):
        assert alike_generators(generators(here), generators(saved)), (here, saved)


@pytest.mark.parametrize("used", [{}, {"torch": generators(None)["torch"]}, generators(2)])
def test_what_is_told_of_the_next_forward_pass_may_be_of_some_generators(used: dict[str, Any]) -> None:
    here = {**generators(1), "numpy": ("MT19937", 1)}
    assert alike_following(here, {"quiet": ["numpy"], "used": used})
    for saved in (7, {"quiet": [[]], "used": used}, {"quiet": "x", "used": used}, {"quiet": [], "used": "x"}):
        assert not alike_following(here, saved)
    assert not alike_following(here, {"quiet": [], "used": {**used, "torch": b"x"}})


def test_generators_of_another_form_are_none() -> None:
    for saved in ({}, {"torch": b"x"}, {**generators(None), "cuda": 7}, {**generators(None), "cuda": [b"x"]}):
        assert not alike_generators(generators(1), saved)
