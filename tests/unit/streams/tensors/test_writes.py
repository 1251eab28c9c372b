"""Writes to tensors are seen, whether torch counts them or not; what is not seen is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.training import Training, memory
from tiercheck.hierarchy import Hierarchy
from tiercheck.streams.tensors.as_bytes import counting_through
from tiercheck.streams.tensors.writes import FEW, Unmoved, Watch, contents

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "scalar": lambda: torch.tensor(1.5),
    "one": lambda: torch.ones(1),
    "vector": lambda: torch.arange(1000.0),
    "matrix": lambda: torch.ones(37, 501),
    "volume": lambda: torch.ones(3, 5, 7, 11, 2),
    "bf16": lambda: torch.ones(64, 9, dtype=torch.bfloat16),
    "fp8": lambda: torch.ones(64).to(torch.float8_e4m3fn),
    "double": lambda: torch.ones(3, 4, dtype=torch.float64),
    "complex": lambda: torch.ones(5, dtype=torch.complex64),
    "long complex": lambda: torch.ones(5, dtype=torch.complex128),
    "misaligned": lambda: torch.frombuffer(bytearray(b"\x01" * 33), dtype=torch.float32, offset=1),
    "bool": lambda: torch.zeros(40, dtype=torch.bool),
    "channels last": lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.ones(30, 40).T,
    "expanded": lambda: torch.ones(1, 4).expand(6, 4),
    "empty": lambda: torch.ones(0, 3),
}


def watch(tensors: dict[str, torch.Tensor]) -> Watch:
    return Watch(lambda: {name: tensor.detach() for name, tensor in tensors.items()})


@pytest.mark.parametrize("kind", TENSORS)
def test_what_is_rewritten_is_seen_with_and_without_torchs_counter(kind: str) -> None:
    held = {"other": torch.ones(3), kind: TENSORS[kind]()}
    watched = watch(held)
    assert watched.written() == ()
    held[kind].data = held[kind].data.clone()
    assert watched.written() == ((kind,) if held[kind].numel() else ()), "it lies elsewhere"
    watched.mark()
    if kind == "expanded":
        return
    before = contents(held)
    held[kind].data.copy_(torch.zeros_like(held[kind]) if kind != "bool" else torch.ones(40))
    seen = (kind,) if held[kind].numel() else ()
    assert watched.written() == seen
    assert tuple(name for name, each in contents(held).items() if each != before[name]) == seen
    watched.mark()
    assert watched.written() == ()


def test_of_many_tensors_those_that_were_rewritten_are_named() -> None:
    held = {kind: make() for kind, make in TENSORS.items() if kind not in ("expanded", "empty")}
    watched = watch(held)
    for kind, tensor in held.items():
        watched.mark()
        assert watched.written() == ()
        tensor.data.copy_(torch.zeros_like(tensor) if tensor.dtype is not torch.bool else torch.ones(40))
        assert watched.written() == (kind,)


def test_of_very_many_tensors_each_is_looked_at() -> None:
    held = {f"{index}": torch.zeros((5,) if index % 2 else (3, 4)) for index in range(FEW + 2)}
    watched = watch(held)
    for name in ("0", "1", str(FEW + 1)):
        watched.mark()
        held[name].data.fill_(1)
        assert watched.written() == (name,)


def test_tensors_that_are_said_to_lie_where_they_lay_are_not_asked_for_that() -> None:
    held = [Unmoved(weight=torch.ones(4))]
    watched = Watch(lambda: held[-1])
    with torch.no_grad():
        held[-1]["weight"] += 1
    assert watched.written() == ("weight",), "torch counted it"
    watched.mark()
    held[-1]["weight"].data.fill_(7)
    assert watched.written() == ("weight",), "torch did not"
    watched.mark()
    held.append(Unmoved(weight=torch.full((4,), 7.0)))
    assert watched.written() == ("weight",), "it lies elsewhere"


def test_a_write_that_torch_counts_is_seen_wherever_it_goes() -> None:
    held = {"weight": torch.ones(100, 100)}
    watched = watch(held)
    held["weight"][3, 4] += 1
    assert watched.written() == ("weight",)


def test_a_write_that_torch_counts_in_another_tensor_is_seen() -> None:
    local, wrapper = torch.ones(100, 100), torch.ones(1)
    watched = Watch(lambda: {"weight": counting_through(local.detach(), wrapper)})
    wrapper += 1
    assert watched.written() == ("weight",)


def test_tensors_that_come_and_go_are_seen() -> None:
    held = {"a": torch.ones(2)}
    watched = watch(held)
    held["b"] = torch.ones(2)
    assert watched.written() == ("b",)
    watched.mark()
    del held["a"]
    assert watched.written() == ("a",)


def test_one_element_past_torchs_counter_is_seen_only_where_all_bits_are_compared() -> None:
    held = {"weight": torch.ones(100, 100)}
    watched, before = watch(held), contents(held)
    held["weight"].data[0, 1] += 1
    assert watched.written() == ()
    assert contents(held) != before


def test_what_was_seen_needs_no_other_look() -> None:
    held, looks = {"weight": torch.ones(4)}, []

    def tensors() -> dict[str, torch.Tensor]:
        looks.append(1)
        return held

    watched = Watch(tensors)
    held["weight"] += 1
    assert watched.written() == ("weight",)
    held["weight"] += 1
    watched.mark_seen()
    assert len(looks) == 2
    assert watched.written() == ("weight",), "the second write came after the look"


@pytest.mark.parametrize(("says_end", "looks"), [(False, 3), (True, 4)])
def test_an_iteration_pays_so_many_looks(monkeypatch: pytest.MonkeyPatch, says_end: bool, looks: int) -> None:
    seen: list[int] = []
    training = Training()
    training.says_end = says_end
    checkpointer = training.attach(Hierarchy.of(memory()), base_every=100)
    training.step(1)
    training.step(2)
    assert checkpointer._job is not None
    watched = checkpointer._job.recorder._stream._masters
    monkeypatch.setattr(watched, "_tensors", lambda of=watched._tensors: seen.append(1) or of())
    training.step(3)
    checkpointer.abort()
    assert len(seen) == looks
