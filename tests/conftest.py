"""What every test shares."""

from __future__ import annotations

import torch

# Two cores, several processes: threads that spin for one another cost more than they bring.
torch.set_num_threads(1)
