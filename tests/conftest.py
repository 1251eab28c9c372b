"""What every test shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.forks import forks
from tests.servers.gluster import gluster
from tests.shared_memory import name
from tiercheck.integrations import hooks

__all__ = ["forks", "gluster", "name"]

# Two cores, several processes: threads that spin for one another cost more than they bring.
torch.set_num_threads(1)

# No example is timed, on however busy a machine, and one that fails prints what replays it.
settings.register_profile("tiercheck", deadline=None, print_blob=True)
settings.load_profile("tiercheck")


@pytest.fixture(autouse=True)
def nothing_attached() -> Iterator[None]:
    """A test that fails leaves no checkpointer to the next one."""
    yield
    for checkpointer in hooks.attached():
        checkpointer.abort()
