"""Making one base in this process."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

import pytest

from tests.moving import base, capture, record
from tiercheck.errors import Transient
from tiercheck.format.container import Shard
from tiercheck.hierarchy import Hierarchy
from tiercheck.policy.folding import Fold
from tiercheck.replication.fold_executor import LocalFoldExecutor
from tiercheck.streams.state import StateCapture


class Short:
    """Never has memory enough."""

    def prepare(self, base: Shard) -> None:
        raise MemoryError("Unable to allocate 3 GiB")

    def __call__(
        self, base: Shard, differentials: Sequence[Shard], *, tier: str, check: Callable[[], None]
    ) -> StateCapture:
        raise MemoryError("Unable to allocate 12 GiB")


async def yes() -> bool:
    return True


async def test_a_lack_of_memory_passes_and_the_fold_is_tried_again() -> None:
    async with Hierarchy.of(f"memory://{uuid.uuid4().hex}").open() as tiers:
        await capture(tiers, base(0), record(1))
        executor = LocalFoldExecutor(Short(), tiers.first)
        with pytest.raises(
            Transient, match=r"Unable to allocate 12 GiB; free memory.*--fold-threads.*base/0+\.safetens"
        ):
            await executor.fold(Fold(base(0), (record(1),), 1), yes)
        with pytest.raises(Transient, match=r"Unable to allocate 3 GiB; free memory"):
            await executor.prepare(base(0))
