"""``python -m tiercheck.folding LAUNCH``: the process that folds. LAUNCH is JSON.

It ends with its owner, however that ends: the channel closes, or, if a process that the owner has forked holds its end
open, the owner's process descriptor tells.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec

from tiercheck.folding.launch import Launch, SocketChannel
from tiercheck.folding.messages import FoldTarget
from tiercheck.folding.server import FoldServer
from tiercheck.hierarchy import OpenTier
from tiercheck.replication.fold_executor import FoldExecutor, LocalFoldExecutor
from tiercheck.runtime.descriptors import allow_many_descriptors
from tiercheck.runtime.priority import ends_first_without_memory
from tiercheck.streams.errors import NotExact
from tiercheck.streams.state import FoldShards
from tiercheck.tiers.registry import make_driver

__all__ = ["main"]


def main(text: str) -> int:
    launch = msgspec.json.decode(text, type=Launch)
    os.umask(0o077)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s fold process %(process)d: %(message)s")
    launch.settings.bind()
    allow_many_descriptors()
    ends_first_without_memory()  # its end costs the work, and a trainer's end costs the run
    end_with(launch.owner)
    importing = threading.Thread(target=import_folding, name="import", daemon=True) if launch.is_waited_for else None
    if importing is not None:
        importing.start()
    else:
        launch.settings.stand_back()  # threads started later inherit this
    asyncio.run(live(launch, importing))
    return 0


def import_folding() -> None:
    with suppress(NotExact):  # it is told to whoever asks for a fold
        folding()


def end_with(owner: int) -> None:
    """End this process as soon as its owner has ended."""
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(0)
    except OSError:  # a system without process descriptors: the channel tells
        return
    if os.getppid() != owner:  # it has ended, and another process has its number
        os._exit(0)

    def watch() -> None:
        select.select([descriptor], [], [])
        os._exit(0)

    threading.Thread(target=watch, name="owner", daemon=True).start()


async def live(launch: Launch, importing: threading.Thread | None) -> None:
    """``importing``: imports what replays. Until then nothing stands back, and no work begins."""

    def stand_back() -> None:
        if importing is not None:
            importing.join()
            launch.settings.stand_back()

    channel = await SocketChannel.over(socket.socket(fileno=launch.descriptor))
    executor = ThreadPoolExecutor(launch.settings.threads, thread_name_prefix="fold", initializer=stand_back)
    try:
        await FoldServer(channel, partial(folds_at, executor), launch.settings.threads).serve()
    finally:
        os._exit(0)  # a kernel that is being compiled is not waited for


@asynccontextmanager
async def folds_at(executor: Executor, target: FoldTarget) -> AsyncIterator[FoldExecutor]:
    shards = await asyncio.get_running_loop().run_in_executor(executor, replays, target.certified)
    async with make_driver(target.url) as driver:
        yield LocalFoldExecutor(shards, OpenTier(0, target.name, driver), executor)


def replays(certified: bool) -> FoldShards:
    """Errors: ``NotExact``."""
    module = folding()
    module.on_one_thread()
    found: FoldShards = module.TensorFolding(certified=certified)
    return found


def folding() -> Any:
    """What replays, with torch: seconds of a processor. Errors: ``NotExact``."""
    try:
        from tiercheck.streams.rebuilding import folding
    except ImportError as error:
        raise NotExact(f"bases cannot be folded: {error}; install torch where folds run") from error
    return folding


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
