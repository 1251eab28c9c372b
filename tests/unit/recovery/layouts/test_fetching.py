"""What several ranks of a node read of what other ranks saved leaves the store once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.unit.recovery.layouts.test_relayout import FAILED_AT, Job, job, joined, parts
from tiercheck.errors import CapacityExceeded
from tiercheck.keys import ShardKey, Stream, parse
from tiercheck.policy.recovery.relayout import fetchers
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.wrappers.base import Call, Operation

__all__ = ["job"]

NODE = "one-node"


@pytest.fixture
def shared(job: Job) -> Iterator[Job]:
    """Saved by three ranks, and resumed by ranks of one node."""
    yield job
    MemoryDriver.forget(f"{job.name}-{NODE}")


def test_each_fetches_about_as_much_for_the_others_of_its_place() -> None:
    reads = [("a", [0, 1, 2]), ("a", [1, 2]), ("b", [1]), ("", [1]), ("b", [3, 1]), ("", [1])]
    assert fetchers(reads) == {("a", 1): 0, ("a", 2): 1, ("b", 1): 2}
    assert fetchers([("", [0]), ("", [0])]) == {}


@pytest.mark.parametrize("known", [True, False], ids=["the launcher names the node", "nobody does"])
def test_one_rank_of_a_node_fetches_what_several_read(
    shared: Job, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    saved = parts(shared, 3, FAILED_AT)
    shared.lose_memory()
    if known:
        monkeypatch.setenv("TIERCHECK_NODE", "0")
    gets: Counter[ShardKey] = Counter()

    def count(rank: int, call: Call) -> None:
        key = parse(call.key or "")
        if call.operation is Operation.GET and isinstance(key, ShardKey) and key.stream is Stream.DIFFERENTIAL:
            gets[key] += 1

    resumed = parts(shared, 2, FAILED_AT, memory=NODE, trouble=count)
    assert joined(resumed, FAILED_AT) == joined(saved, FAILED_AT)
    read_by_both = {count for key, count in gets.items() if key.rank == 1}
    assert read_by_both == {1 if known else 2}
    noted = [note for recovery, _ in resumed for note in recovery.notes if "fetched" in note]
    assert noted == (["objects that this rank fetched for several of its node: 3 from nvme"] if known else [])
    left = map(parse, MemoryDriver(f"{shared.name}-{NODE}").store.objects)
    assert {key.generation for key in left if isinstance(key, ShardKey)} == {2}, "what was fetched is deleted"


def test_what_does_not_fit_is_read_by_each(shared: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = parts(shared, 3, FAILED_AT)
    shared.lose_memory()
    monkeypatch.setenv("TIERCHECK_NODE", "0")
    put = MemoryDriver.put

    async def full(self: MemoryDriver, key: str, *arguments: object, **options: object) -> object:
        if key.startswith("r00001/g000001/differential"):
            raise CapacityExceeded("no room")
        return await put(self, key, *arguments, **options)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(MemoryDriver, "put", full)
    resumed = parts(shared, 2, FAILED_AT, memory=NODE)
    assert joined(resumed, FAILED_AT) == joined(saved, FAILED_AT)
