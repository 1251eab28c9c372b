"""What every test shares."""

from __future__ import annotations

import torch

from tests.servers.gluster import gluster
from tests.shared_memory import name

__all__ = ["gluster", "name"]

# Two cores, several processes: threads that spin for one another cost more than they bring.
torch.set_num_threads(1)
