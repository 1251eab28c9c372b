"""What was read is copied once, to where it stays."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tiercheck.errors import Mismatch
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.streams.rebuilding.stored import StoredState
from tiercheck.streams.records.base import BaseState
from tiercheck.streams.tensors.placing import copies, placed

SHAPE = (64, 80)
DTYPES = (torch.float32, torch.bfloat16)


def saved_of(provider: ModuleProvider) -> BaseState:
    """Other values than the provider's, of each tensor."""

    def like(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape).to(tensor.dtype)

    masters = {name: like(each) for name, each in provider.masters().items()}
    states = {n: {"step": torch.tensor(3.0), "exp_avg": like(m), "exp_avg_sq": like(m)} for n, m in masters.items()}
    extras = {name: like(each) for name, each in provider.buffers().items()}
    return BaseState(provider.identity(), masters, states, extras, provider.hyperparameters(), {})


def load(provider: Any, state: BaseState) -> None:
    provider.load(
        masters=state.masters,
        optimizer_state=state.optimizer_state,
        extras=state.extras,
        hyperparameters=state.hyperparameters,
    )


def tensors_of(provider: Any) -> dict[str, torch.Tensor]:
    held = {f"{name}/{key}": each for name, state in provider.optimizer_state().items() for key, each in state.items()}
    return {**provider.masters(), **provider.buffers(), **held}


@pytest.fixture(params=DTYPES, ids=str)
def provider(request: pytest.FixtureRequest) -> ModuleProvider:
    model = torch.nn.Sequential(torch.nn.Linear(*SHAPE), torch.nn.BatchNorm1d(2000)).to(request.param)
    return ModuleProvider(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("threads", [1, 3])
def test_the_bits_are_those_of_a_load_without_it(provider: ModuleProvider, threads: int) -> None:
    saved = saved_of(provider)
    load(provider, placed(provider, saved, threads=threads))
    found = {name: each.clone() for name, each in tensors_of(provider).items()}
    load(provider, saved)
    wanted = tensors_of(provider)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_what_the_optimizer_lacks_is_given_to_it_and_not_copied_again(provider: ModuleProvider) -> None:
    saved = saved_of(provider)
    state = placed(provider, saved, threads=2)
    load(provider, state)
    for name, held in provider.optimizer_state().items():
        for key in ("exp_avg", "exp_avg_sq") if held["exp_avg"].nbytes > 4 << 10 else ():
            assert held[key].data_ptr() == state.optimizer_state[name][key].data_ptr()
            assert held[key].data_ptr() != saved.optimizer_state[name][key].data_ptr()


def test_what_the_optimizer_holds_is_overwritten_where_it_is_and_torch_counts_that(provider: ModuleProvider) -> None:
    load(provider, saved_of(provider))
    before = {name: each.data_ptr() for name, each in tensors_of(provider).items()}
    writes = {name: each._version for name, each in provider.masters().items()}
    again = saved_of(provider)
    load(provider, placed(provider, again, threads=2))
    assert {name: each.data_ptr() for name, each in tensors_of(provider).items()} == before
    assert all(torch.equal(each, again.masters[name]) for name, each in provider.masters().items())
    assert all(each._version > writes[name] for name, each in provider.masters().items())


def test_the_saved_state_is_not_changed_by_what_is_trained_on_it(provider: ModuleProvider) -> None:
    """It may be loaded again."""
    saved = saved_of(provider)
    before = {name: each["exp_avg"].clone() for name, each in saved.optimizer_state.items()}
    load(provider, placed(provider, saved, threads=2))
    provider.apply({name: torch.ones_like(each) for name, each in provider.masters().items()}, saved.hyperparameters)
    assert all(torch.equal(saved.optimizer_state[name]["exp_avg"], before[name]) for name in before)


def test_a_state_of_another_shape_is_refused_before_anything_is_changed(provider: ModuleProvider) -> None:
    saved = saved_of(provider)
    before = {name: each.clone() for name, each in provider.masters().items()}
    name = next(iter(saved.masters))
    with pytest.raises(Mismatch, match=name):
        placed(provider, replace(saved, masters={**saved.masters, name: torch.zeros(3)}), threads=2)
    assert all(torch.equal(each, before[name]) for name, each in provider.masters().items())


def test_a_state_without_a_model_gets_all_of_its_memory(provider: ModuleProvider) -> None:
    saved = saved_of(provider)
    stored = StoredState(saved.identity, dict.fromkeys(saved.masters, 0))
    state = placed(stored, saved, threads=2)
    load(stored, state)
    assert all(torch.equal(each, saved.masters[name]) for name, each in stored.masters().items())
    name = "0.weight"
    assert stored.masters()[name].data_ptr() == state.masters[name].data_ptr()
    assert stored.masters()[name].data_ptr() != saved.masters[name].data_ptr()


def test_copies_of_gradients_are_the_optimizer_s_to_write_to_and_keep() -> None:
    masters = {
        "long": torch.zeros(64, 80),
        "short": torch.zeros(3),
        "half": torch.zeros(80, 64, dtype=torch.bfloat16),
        "none": torch.zeros(5),
    }
    read = {name: torch.randn(masters[name].shape) for name in ("long", "short", "half")}
    before = {name: each.clone() for name, each in read.items()}
    first, second = copies(read, masters), copies(read, masters)
    assert list(first) == ["long", "short", "half"], "none for what has no gradient"
    for name, each in first.items():
        assert (each.dtype, each.shape) == (masters[name].dtype, masters[name].shape)
        assert torch.equal(each, before[name].to(each.dtype))
        each.fill_(7)
    assert all(torch.equal(read[name], before[name]) for name in read)
    assert all(torch.equal(second[name], before[name].to(second[name].dtype)) for name in read)


def test_copies_of_what_nobody_can_write_to() -> None:
    values = np.arange(4096, dtype=np.float32)
    values.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = torch.from_numpy(values)
    (copied,) = copies({"a": read}, {"a": torch.zeros(4096)}).values()
    copied.zero_()
    assert values[-1] == 4095
