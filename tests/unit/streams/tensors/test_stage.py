"""A stage's masters by element, and the norms of its gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.streams.tensors.test_provider import Least
from tiercheck.errors import RecoveryError, UnsupportedSetup
from tiercheck.format.index.boxes import Copy
from tiercheck.streams.stage import Moments, state_name
from tiercheck.streams.tensors.provider import Identity
from tiercheck.streams.tensors.stage import GradientNorms, PipelineStage, TensorStage, runs_of

STAGE = PipelineStage(1, 4, 1, {"3": {"w": (2, 3)}, "4": {"w": (2, 3)}}, tied=(), scheduled=False)


class Kept(Least):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"a": torch.ones(2), "b": torch.ones(3, 2)}

    def masters(self) -> dict[str, torch.Tensor]:
        return self.kept


def stage_of(provider: Least) -> TensorStage:
    return TensorStage(provider, STAGE)


def test_elements_are_read_and_added_where_they_lie() -> None:
    provider = Kept()
    name, master = "b", provider.kept["b"]
    stage = stage_of(provider)
    stage.clear(["master/b"])
    assert not master.any()
    assert provider.kept["a"].all()
    elements = torch.arange(master.numel(), dtype=torch.float32)
    every = Copy((master.numel(),), 0, (1,), 0, (1,))
    stage.add(f"master/{name}", every, elements.numpy().tobytes(), 0.5)
    stage.add(f"master/{name}", every, elements.numpy().tobytes(), 0.25)
    assert torch.equal(master.reshape(-1), 0.5 * elements + 0.25 * elements)
    one = Copy((1,), master.numel() - 1, (1,), 0, (1,))
    assert stage.read(f"master/{name}", one) == master.reshape(-1)[-1:].numpy().tobytes()


class Stepped(Kept):
    """With the state of an optimizer, which :meth:`load` takes over."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"a": {"exp_avg": torch.full((2,), 3.0), "step": torch.tensor(7.0), "kind": "x"}, "b": {"step": 1}}

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        return self.state

    def load(self, **given: Any) -> None:
        assert given["masters"] is self.kept
        self.state = given["optimizer_state"]


def test_the_optimizers_state_of_a_master_comes_from_another_rank() -> None:
    there, here = Stepped(), Stepped()
    here.state = {"b": {"step": 1}}
    source, target = stage_of(there), stage_of(here)
    told = source.optimizer("master/a")
    assert told == {"exp_avg": [2], "step": [], "kind": "x"}
    target.expect_optimizer("master/a", told)
    for key, size in (("exp_avg", 2), ("step", 1)):
        name, copy = state_name("master/a", key), Copy((size,), 0, (1,), 0, (1,))
        target.add(name, copy, source.read(name, copy), 1.0)
    assert here.state == {"b": {"step": 1}}, "not before all has come"
    target.finish()
    assert here.state["b"] == {"step": 1}
    assert here.state["a"]["kind"] == "x"
    assert here.state["a"]["exp_avg"].tolist() == [3.0, 3.0]
    assert here.state["a"]["step"].item() == 7.0
    target.finish()


def test_an_optimizers_tensor_that_is_not_fp32_is_refused_by_name() -> None:
    provider = Stepped()
    provider.state["a"]["exp_avg"] = torch.zeros(2, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedSetup, match=r"the optimizer's exp_avg of master/a is torch\.bfloat16"):
        stage_of(provider).optimizer("master/a")


class Adamlike(Stepped):
    """Of an optimizer by its name. Only ``a`` was stepped."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.kind, self.options = kind, options
        moments = {key: torch.full((2,), value) for key, value in (("exp_avg", 3.0), ("exp_avg_sq", 9.0))}
        self.state = {"a": {"step": torch.tensor(7.0), **moments}}

    def identity(self) -> Identity:
        found = super().identity()
        return replace(found, optimizer=replace(found.optimizer, kind=self.kind))

    def hyperparameters(self) -> list[dict[str, Any]]:
        return [{"lr": 0.1, **self.options}]


ADAM = "torch.optim.adam.Adam"
KINDS = [ADAM, "torch.optim.adamw.AdamW", "deepspeed.ops.adam.fused_adam.FusedAdam"]


@pytest.mark.parametrize("kind", KINDS)
def test_moments_and_their_betas_of_optimizers_that_are_known(kind: str) -> None:
    provider = Adamlike(kind, betas=(0.8, 0.95))
    betas = {"exp_avg": 0.8, "exp_avg_sq": 0.95}
    told = {"step": [], "exp_avg": [2], "exp_avg_sq": [2]}
    assert stage_of(provider).moments() == {"master/a": Moments(7, betas, told), "master/b": Moments(0, betas, {})}
    provider.state["a"]["step"] = 8  # as DeepSpeed's counts
    assert stage_of(provider).moments()["master/a"] == Moments(8, betas, {**told, "step": 8})


@pytest.mark.parametrize(
    ("kind", "options"),
    [("torch.optim.sgd.SGD", {"momentum": 0.9}), ("mine.Lion", {"betas": (0.9, 0.99)}), (ADAM, {"amsgrad": True})],
)
def test_of_any_other_optimizer_they_are_refused_by_its_name(kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(RecoveryError, match=rf"whose moments are known .* this one is {kind}: leave it out"):
        stage_of(Adamlike(kind, **{"betas": (0.9, 0.99), **options})).moments()


def test_a_moment_has_the_shape_of_its_own_master() -> None:
    provider = Adamlike(ADAM)
    stage = stage_of(provider)
    stage.expect_optimizer("master/b", {"exp_avg": [2], "step": []}, like_master=["exp_avg"])
    stage.finish()
    assert provider.state["b"]["exp_avg"].shape == provider.kept["b"].shape
    assert provider.state["b"]["step"].shape == ()


def test_a_master_whose_elements_are_in_another_order_is_refused() -> None:
    provider = Kept()
    provider.kept["b"] = torch.zeros(2, 3).T
    with pytest.raises(UnsupportedSetup, match="not contiguous"):
        stage_of(provider).read("master/b", Copy((1,), 0, (1,), 0, (1,)))


def test_the_stages_index_is_of_its_masters() -> None:
    index = stage_of(Least()).index()
    assert index.stored
    assert all(name.startswith("master/") for name in index.stored)


def test_rows_of_one_layer() -> None:
    spans = [("1", 3), ("1", 2), (None, 1), ("1", 1), ("2", 4), (None, 2)]
    assert list(runs_of(spans)) == [("1", 0, 5), ("1", 6, 7), ("2", 7, 11)]


def test_norms_by_layer_of_the_last_step_that_was_taken() -> None:
    norms = GradientNorms(["3", "4"], {"a": [("3", 0, 2), ("4", 2, 3)], "b": [("4", 0, 2)]})
    before = norms.host_state()["gradient_norms"]
    assert list(before) == ["3", "4"]
    assert all(math.isnan(each) for each in before.values()), "no step was taken"
    norms.measure({"a": torch.tensor([3.0, 4.0, 2.0])})
    norms.measure({"b": torch.tensor([[1.0], [2.0]])})
    assert norms.host_state() == {"gradient_norms": {"3": 25.0, "4": pytest.approx(9.0)}}
    kept = norms.host_state()
    assert norms.host_state() == kept, "a version whose step was skipped tells of the one before"

    again = GradientNorms(["4", "5"], {})
    again.restore(kept)
    found = again.host_state()["gradient_norms"]
    assert found["4"] == pytest.approx(9.0)
    assert math.isnan(found["5"]), "what another stage tells of other layers is not this one's"


def test_what_a_version_tells_is_by_layer_and_none_where_it_does_not() -> None:
    stage = stage_of(Least())
    assert stage.norms({"gradient_norms": {"4": 9.0, "3": math.nan}}) == [None, 9.0]
    assert stage.norms({}) == [None, None]
