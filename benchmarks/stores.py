"""Real servers for the benchmarks: those that the tests use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import pytest

from benchmarks.figures import Unavailable

if TYPE_CHECKING:
    from tests.servers.seaweed import Seaweed

__all__ = ["environment", "needed", "running_seaweed"]


@contextmanager
def needed() -> Iterator[None]:
    """A program that the tests would skip for makes a figure unavailable, and one that CI must have makes it fail."""
    try:
        yield
    except pytest.skip.Exception as missing:
        raise Unavailable(str(missing)) from None
    except pytest.fail.Exception as missing:
        raise RuntimeError(str(missing)) from None


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """``variables`` in this process's environment and its children's, for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@asynccontextmanager
async def running_seaweed() -> AsyncIterator[Seaweed]:
    """A SeaweedFS of the benchmark's own, and its credentials in the environment."""
    from tests.servers.seaweed import Seaweed

    with needed():
        server = Seaweed()
    await asyncio.to_thread(server.__enter__)
    try:
        with environment(server.environment):
            yield server
    finally:
        await asyncio.to_thread(server.__exit__)
