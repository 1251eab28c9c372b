"""What a state provider need not say, and who its optimizer is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tiercheck.streams.replay.fidelity import Tally, reached
from tiercheck.streams.tensors import provider
from tiercheck.streams.tensors.provider import Identity, OptimizerIdentity, StateProvider, extras_of, loaded_value
from tiercheck.types import Fidelity

Tensors = Mapping[str, torch.Tensor]


class Sign:
    """An optimizer."""


class Least(StateProvider):
    def __init__(self, buffers: Tensors | None = None) -> None:
        self._buffers = buffers or {}

    def identity(self) -> Identity:
        return Identity.of("least", self, OptimizerIdentity.without_torch(Sign, distributions=["numpy"]))

    def masters(self) -> Tensors:
        return {"a": torch.zeros(2), "b": torch.zeros(3, 2)}

    def buffers(self) -> Tensors:
        return self._buffers

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        return {}

    def hyperparameters(self) -> list[dict[str, Any]]:
        return [{}]

    def host_state(self) -> dict[str, Any]:
        return {}

    def load(self, **_: Any) -> None:
        pass

    def apply(self, gradients: Tensors, hyperparameters: list[dict[str, Any]]) -> None:
        pass

    def restore_host_state(self, state: Mapping[str, Any]) -> None:
        pass


def test_what_it_does_not_say_is_nothing_or_one_group() -> None:
    least = Least()
    assert least.group_of() == {"a": 0, "b": 0}
    assert (least.frozen(), extras_of(least)) == ({}, {})
    least.refresh()


def test_what_is_missing_is_named_when_it_is_made() -> None:
    with pytest.raises(TypeError, match="apply"):
        type("Incomplete", (Least,), {"apply": StateProvider.apply})()


def test_a_model_is_told_by_the_names_shapes_and_dtypes_of_all_its_tensors() -> None:
    mean = {"mean": torch.zeros(4)}
    models = [Least(), Least(mean), Least({"other": torch.zeros(4)}), Least({"mean": torch.zeros(5)})]
    models.append(Least({"mean": torch.zeros(4, dtype=torch.float64)}))
    assert len({each.identity().model for each in models}) == len(models)
    assert Least(mean).identity() == Least({"mean": torch.ones(4)}).identity()
    assert Least(mean).identity().model_summary == "2 trained tensors of 8 elements, 1 others"


def test_another_version_of_a_library_takes_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Least().identity()
    monkeypatch.setattr(provider.metadata, "version", lambda name: "0.1")
    here = Least().identity()
    replayed = Tally(versions=1)
    assert reached(saved, saved, replayed)[0] == Fidelity.EXACT
    fidelity, notes = reached(saved, here, replayed)
    assert fidelity == Fidelity.APPROXIMATE
    assert "numpy 0.1" in notes[0]


@pytest.mark.parametrize(
    ("key", "options", "wanted"),
    [
        ("exp_avg", {"fused": None}, "meta"),
        ("step", {"fused": None, "capturable": False}, "cpu"),
        ("step", {"fused": True}, "meta"),
        ("step", {"capturable": True}, "meta"),
    ],
)
def test_the_optimizers_state_is_loaded_to_where_torch_keeps_it(key: str, options: dict[str, Any], wanted: str) -> None:
    """``meta`` stands for a GPU."""
    saved = torch.tensor(3.0) if key == "step" else torch.ones(4)
    assert loaded_value(None, saved, options, torch.device("meta")).device.type == wanted


def test_the_optimizers_state_is_loaded_into_the_memory_that_it_has() -> None:
    saved, current = torch.ones(4), torch.zeros(4)
    assert loaded_value(current, saved, {}, torch.device("cpu")) is current
    assert torch.equal(current, saved)
    for other in (None, torch.zeros(5), torch.zeros(4, dtype=torch.bfloat16)):
        loaded = loaded_value(other, saved, {}, torch.device("cpu"))
        assert loaded.data_ptr() != saved.data_ptr()
        assert torch.equal(loaded, saved)


class TestWhatElseTheBitsDependOn:
    """Where another process may compute otherwise: the identity differs, and what is replayed is not called exact."""

    HOST = torch.device("cpu")

    @pytest.mark.parametrize(("kind", "sums"), [(torch.optim.Adafactor, True), (torch.optim.RMSprop, False)])
    def test_an_optimizer_that_sums_over_a_tensor_names_its_threads(
        self, kind: type[torch.optim.Optimizer], sums: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: Any = kind
        optimizer = made([torch.nn.Parameter(torch.zeros(4, 4))])
        threads = []
        for count in (1, 2):
            monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
            threads.append(OptimizerIdentity.of(optimizer, self.HOST).threads)
        assert threads == ([1, 2] if sums else [0, 0])

    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
    def test_a_fused_optimizer_says_if_it_goes_by_the_order_in_memory(self, kind: type[torch.optim.Optimizer]) -> None:
        made: Any = kind
        laid_out = torch.zeros(2, 3, 3, 3).to(memory_format=torch.channels_last)
        orders = {
            (fused, each is laid_out): OptimizerIdentity.of(
                made([torch.nn.Parameter(each)], fused=fused), self.HOST
            ).memory_order
            for fused in (False, True)
            for each in (laid_out, torch.zeros(2, 3))
        }
        assert orders == {(False, False): False, (False, True): False, (True, False): False, (True, True): True}
