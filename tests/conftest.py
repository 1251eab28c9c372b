"""What every test shares."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.servers.gluster import gluster
from tests.shared_memory import name

CLUSTER = Path(__file__).parent / "cluster"

__all__ = ["gluster", "name"]

# Two cores, several processes: threads that spin for one another cost more than they bring.
torch.set_num_threads(1)

# No example is timed, on however busy a machine, and one that fails prints what replays it.
settings.register_profile("tiercheck", deadline=None, print_blob=True)
settings.load_profile("tiercheck")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts whole jobs wants the machine for itself."""
    for item in items:
        if CLUSTER in item.path.parents:
            item.add_marker("alone")
