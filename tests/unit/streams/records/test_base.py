"""What a base carries beside its tensors."""

from __future__ import annotations

import pytest
import torch

from tiercheck.errors import Corruption, UnsupportedSetup
from tiercheck.format.container import Shard, ShardMetadata, TensorEntry, parse, payload
from tiercheck.format.index.logical import LogicalIndex
from tiercheck.format.index.message import index_of, plain_index
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.keys import ShardKey, Stream
from tiercheck.streams.records.base import BaseCapture, PackedIndex, read_base


class Provider(ModuleProvider):
    asked = 0

    def index(self) -> LogicalIndex:
        self.asked += 1
        return super().index()


def provider() -> Provider:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    return Provider(model, torch.optim.AdamW(model.parameters()))


def base(state: Provider, index: PackedIndex | None = None) -> Shard:
    capture = BaseCapture(state, ShardKey.base(1, 0, 0), 1, index=index)
    memory = memoryview(bytearray(capture.nbytes_max))
    capture.copy(memory)
    return parse(memory[: capture.finish()])


def test_a_base_says_what_its_tensors_are_pieces_of() -> None:
    state = provider()
    shard = base(state)
    assert index_of(shard) == state.index()
    trained = {name for name, tensor in state.index().tensors.items() if tensor.trained}
    assert read_base(shard, tier="here").masters.keys() == trained


def test_the_index_is_made_again_only_if_the_tensors_are_others() -> None:
    state = provider()
    index = PackedIndex(state)
    for _ in range(3):
        base(state, index)
    assert state.asked == 1
    state._model[1].register_buffer("another", torch.zeros(1))
    assert "1.another" in index_of(base(state, index)).tensors


def test_an_index_of_other_tensors_is_refused_before_anything_is_saved() -> None:
    class Empty(Provider):
        def index(self) -> LogicalIndex:
            return LogicalIndex({}, {})

    model = torch.nn.Linear(3, 2)
    with pytest.raises(UnsupportedSetup, match=r"index\(\) of Empty does not fit .* 'master/bias' is not in the index"):
        PackedIndex(Empty(model, torch.optim.SGD(model.parameters()))).of_now()


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({}, "has no index"),
        ({"index": 3}, "cannot be read"),
        ({"index": plain_index(LogicalIndex({}, {}))}, "'master/a' is not in the index"),
    ],
)
def test_a_base_without_an_index_of_its_tensors_is_damaged(objects: dict[str, object], message: str) -> None:
    written = payload(ShardMetadata(Stream.BASE, 1, 0, 0, 0, 1), [TensorEntry("master/a", "U8", (1,), b"a")], objects)
    with pytest.raises(Corruption, match=message):
        index_of(parse(b"".join(written)))
