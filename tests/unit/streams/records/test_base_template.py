"""What bases have in common is worked out once, and says the same of each."""

from __future__ import annotations

import pytest
import torch

from tiercheck.errors import UnsupportedSetup
from tiercheck.format.checksums import BLOCK_NBYTES, BLOCKS, block_digests
from tiercheck.format.container import Shard, parse
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.keys import ShardKey
from tiercheck.streams.records.base import GATHERED_NBYTES_MAX, BaseCapture
from tiercheck.streams.records.base_template import BaseTemplate
from tiercheck.streams.tensors.as_bytes import array_of
from tiercheck.streams.tensors.writes import Watch


class Provider(ModuleProvider):
    """A model of many kinds of tensors."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(5, 3)
        for name, tensor in {
            "complex": torch.randn(3, 2, dtype=torch.complex128),
            "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
            "negative": torch.randn(4, dtype=torch.complex128).conj().imag,
            "bfloat16s": torch.randn(7).to(torch.bfloat16),
            "empty": torch.empty(0, 4),
            "scalar": torch.tensor(3, dtype=torch.int64),
            "flags": torch.tensor([True, False, True]),
            "transposed": torch.randn(6, 5).t(),
            "longer": torch.randn(GATHERED_NBYTES_MAX // 4 + 3),
            "blocks": torch.randn(2 * BLOCK_NBYTES // 4 + 5),
        }.items():
            self.model.register_buffer(name, tensor)
        # Moments that are not stored in the order of their rows, and a long one.
        self.model.weight = torch.nn.Parameter(torch.randn(3, 5).t().contiguous().t())
        super().__init__(self.model, torch.optim.AdamW(self.model.parameters()))
        self.step()

    def step(self) -> None:
        self.model(torch.randn(2, 5)).sum().backward()
        self._optimizer.step()

    def live(self) -> dict[str, torch.Tensor]:
        found = {f"master/{name}": each for name, each in self.masters().items()}
        for name, state in self.optimizer_state().items():
            found |= {f"state/{name}/{key}": each for key, each in state.items() if isinstance(each, torch.Tensor)}
        return found | {f"extra/{name}": each for name, each in self.buffers().items()}


def base(provider: Provider, version: int, template: BaseTemplate, *, threads: int = 1) -> Shard:
    capture = BaseCapture(provider, ShardKey.base(1, version, 0), 1, template=template, threads=threads)
    memory = memoryview(bytearray(b"\xa5" * capture.nbytes_max))  # gaps are zeros, whatever was there
    capture.copy(memory)
    assert not capture.disturbed
    return parse(memory[: capture.finish()])


@pytest.mark.parametrize("threads", [1, 3])
def test_each_base_of_a_template_has_every_bit_of_the_state(threads: int) -> None:
    torch.manual_seed(1)
    provider, template = Provider(), BaseTemplate()
    for version in range(3):
        shard, live = base(provider, version, template, threads=threads), provider.live()
        shard.verify()
        assert set(shard.names) == live.keys()
        for name, tensor in live.items():
            entry = shard.entry(name)
            assert (entry.shape, bytes(entry.data)) == (tuple(tensor.shape), array_of(tensor).tobytes()), name
        assert shard.entry("extra/complex").dtype == "C128"
        digests = shard.object(BLOCKS)
        assert digests == {
            name: block_digests(array_of(each).tobytes()) for name, each in live.items() if each.nbytes > BLOCK_NBYTES
        }
        assert digests.keys() == {"extra/blocks"}
        provider.step()


def test_a_template_makes_the_shard_that_a_new_one_makes() -> None:
    provider, template = Provider(), BaseTemplate()
    base(provider, 0, template)
    provider.step()
    again, anew = base(provider, 1, template), base(provider, 1, BaseTemplate())
    assert again.digest == anew.digest


def test_other_tensors_are_laid_out_anew() -> None:
    template = BaseTemplate()
    tensors = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    first = template.layout(tensors)
    assert template.layout({name: torch.ones_like(each) for name, each in tensors.items()}) is first
    for other in (
        {"a": torch.zeros(3), "c": torch.zeros(2, 2)},
        {"a": torch.zeros(3), "b": torch.zeros(4)},
        {"a": torch.zeros(3, dtype=torch.int32), "b": torch.zeros(4)},
        {"b": torch.zeros(4), "a": torch.zeros(3, dtype=torch.int32)},
    ):
        layout = template.layout(other)
        assert layout is not first
        assert list(layout.specs) == list(other)
        first = layout


def test_after_a_tensor_that_no_shard_can_hold_the_template_is_as_new() -> None:
    template = BaseTemplate()
    tensors = {"a": torch.zeros(3)}
    template.layout(tensors)
    with pytest.raises(UnsupportedSetup, match="quantised has the dtype"):
        template.layout({"quantised": torch.empty(3, dtype=torch.float8_e4m3fnuz)})
    assert list(template.layout(tensors).specs) == ["a"]


def test_a_watch_goes_on_with_the_samples_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    choose = Watch._choose_samples

    def counted(self: Watch) -> None:
        chosen.append(len(self._live))
        choose(self)

    monkeypatch.setattr(Watch, "_choose_samples", counted)
    template = BaseTemplate()
    tensors = {"a": torch.zeros(3), "b": torch.zeros(100)}
    template.layout(tensors)
    first = template.watch(lambda: tensors, None)
    tensors["a"].data.fill_(1)  # past torch's counters
    assert first.written() == ("a",)
    second = template.watch(lambda: tensors, None)
    assert not second.written()
    assert chosen == [2]
    tensors["b"].data.fill_(1)
    assert second.written() == ("b",)
    assert first.written() == ("a", "b")
    tensors["b"] = torch.ones(100)  # it lies elsewhere
    template.layout(tensors)
    third = template.watch(lambda: tensors, None)
    assert chosen[-1] == 2
    assert len(chosen) > 1
    tensors["b"].data.fill_(2)
    assert third.written() == ("b",)
