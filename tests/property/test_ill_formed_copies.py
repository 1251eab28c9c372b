"""Copies that are well checksummed and ill formed: whatever one says, a clean copy in the next tier wins."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.training import Training
from tiercheck.errors import Mismatch
from tiercheck.format import container
from tiercheck.format.container import TensorEntry
from tiercheck.hierarchy import Hierarchy
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.registry import make_driver

LAST = 6
SHARDS = ("base/000000000004", "differential/000000000005", "differential/000000000006")
FREE = ("scheduler", "stateful", "stepped_after", "gradients")
"""What cannot be told from another honest value: what the user's objects say, and which tensors had a gradient."""


class Model(Training):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)


class Left:
    """What a job left: its parameters, and what its memory and its durable tier hold."""

    def __init__(self) -> None:
        self.names = [f"ill-formed-{uuid.uuid4().hex}" for _ in range(2)]
        self.hierarchy = Hierarchy.of(*(f"memory://{name}" for name in self.names))
        training = Model()
        checkpointer = training.attach(self.hierarchy, base_every=4, batch=1)
        for version in range(1, LAST + 1):
            training.step(version)
        checkpointer.flush()
        checkpointer.abort()
        self.parameters = training.parameters()
        self.held = [asyncio.run(self.contents(name)) for name in self.names]

    async def contents(self, name: str) -> dict[str, bytes]:
        async with make_driver(f"memory://{name}") as driver:
            return {info.key: bytes(await driver.get(info.key)) async for info in driver.list()}

    def fill(self, **broken: bytes) -> None:
        """As it was left, but for the first tier's copies that are broken."""

        async def fill() -> None:
            for index, name in enumerate(self.names):
                MemoryDriver(name).store.objects.clear()
                async with make_driver(f"memory://{name}") as driver:
                    for key, content in {**self.held[index], **({} if index else broken)}.items():
                        await driver.put(key, [content])

        asyncio.run(fill())


@pytest.fixture(scope="module")
def left() -> Iterator[Left]:
    left = Left()
    for prefix in SHARDS:
        assert all(any(prefix in key for key in held) for held in left.held)
    yield left
    for name in left.names:
        MemoryDriver.forget(name)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if not any(part in FREE for part in path):
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*path, key))
    elif isinstance(value, list | tuple):
        for index in range(min(len(value), 4)):
            yield from paths(value[index], (*path, index))


def kind(value: Any) -> str:
    for name, kinds in {"number": (bool, int, float, np.generic), "sequence": (list, tuple)}.items():
        if isinstance(value, kinds):
            return name
    return type(value).__name__


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    step, rest = path[0], path[1:]
    if isinstance(value, tuple):
        return tuple(replaced(each, rest, new) if index == step else each for index, each in enumerate(value))
    changed = copy.copy(value)
    changed[step] = replaced(changed[step], rest, new)
    return changed


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


OTHER = st.sampled_from([7, "x", b"x", [], {}, [[1]], {"a": {}}, (1,), np.zeros((2, 3)), 1e308, -1])


def broken_objects(data: st.DataObject, held: dict[str, Any]) -> dict[str, Any]:
    name = data.draw(st.sampled_from(sorted(held)), label="object")
    path = data.draw(st.sampled_from(list(paths(held[name]))), label="path")
    before = at(held[name], path)
    new = data.draw(OTHER.filter(lambda each: kind(each) != kind(before)), label="instead")
    return {**held, name: replaced(held[name], path, new)}


def broken_tensors(data: st.DataObject, entries: list[TensorEntry]) -> list[TensorEntry]:
    index = data.draw(st.integers(0, len(entries) - 1), label="tensor")
    entry = entries[index]
    how = data.draw(st.sampled_from(["dtype", "shape", "name", "missing"]), label="how")
    nbytes = len(memoryview(entry.data).cast("B")) if 0 not in entry.shape else 0
    if how == "missing" or nbytes == 0:
        return entries[:index] + entries[index + 1 :]
    changed = {
        "dtype": TensorEntry(entry.name, "I8", (nbytes,), entry.data),
        "shape": TensorEntry(entry.name, "U8", (1, nbytes), entry.data),
        "name": TensorEntry(entry.name + "?", entry.dtype, entry.shape, entry.data),
    }[how]
    return [*entries[:index], changed, *entries[index + 1 :]]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_clean_copy_in_the_next_tier_wins(left: Left, data: st.DataObject) -> None:
    prefix = data.draw(st.sampled_from(SHARDS), label="shard")
    (key,) = (key for key in left.held[0] if prefix in key and key.endswith(".safetensors"))
    shard = container.parse(left.held[0][key])
    entries, objects = list(shard.entries()), shard.objects
    if data.draw(st.booleans(), label="an object"):
        objects = broken_objects(data, objects)
    else:
        entries = broken_tensors(data, entries)
    try:
        broken = b"".join(bytes(part) for part in container.payload(shard.metadata, entries, objects))
    except (TypeError, ValueError):
        return  # no writer writes it
    left.fill(**{key: broken})
    training = Model()
    checkpointer = training.attach(left.hierarchy)
    checkpointer.abort()
    assert checkpointer.recovery is not None
    assert (checkpointer.recovery.version, training.parameters()) == (LAST, left.parameters)


@pytest.mark.parametrize("on_nothing_left", ["refuse", "restart"])
def test_where_no_copy_of_this_form_is_left_the_job_is_refused_untouched(left: Left, on_nothing_left: str) -> None:
    whole = [dict(held) for held in left.held]
    for held in left.held:
        for key in [key for key in held if "base/" in key and key.endswith(".safetensors")]:
            shard = container.parse(held[key])
            optimizer = {**shard.objects["optimizer"], "hyperparameters": 5, "values": {}}
            objects = {**shard.objects, "optimizer": optimizer}
            held[key] = b"".join(map(bytes, container.payload(shard.metadata, list(shard.entries()), objects)))
    left.fill()
    broken, left.held = left.held, whole
    training = Model()
    fresh = training.parameters()
    where = "rank 0, tier memory: r00000/g000001/base/0"
    why = rf"version {LAST} was saved whole.*for a int of parameter groups, not 1 \({where}"
    with pytest.raises(Mismatch, match=why):
        training.attach(left.hierarchy, on_nothing_left=on_nothing_left)
    assert training.parameters() == fresh
    assert [asyncio.run(left.contents(name)) for name in left.names] == broken
