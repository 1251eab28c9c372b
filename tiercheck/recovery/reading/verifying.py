"""Verifying what was read, on several threads."""

from __future__ import annotations

from tiercheck.format.container import Shard, Verification
from tiercheck.runtime.waiting import in_threads

__all__ = ["verified"]


async def verified(shards: list[Shard], threads: int) -> None:
    """Check every byte of the shards, one shard after the other, each on ``threads`` of the event loop's threads.
    Errors: ``Corruption``."""
    for shard in shards:
        verification = Verification(shard)
        await in_threads(verification.parts, verification.hash, threads)
        verification.finish()
