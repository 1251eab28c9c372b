"""What torch multiplies half-precision gradients by costs no bytes, and no bit after a failure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training import Training, memory
from tiercheck.hierarchy import Hierarchy
from tiercheck.types import Fidelity


def under_autocast(training: Training, version: int, dtype: torch.dtype) -> torch.Tensor:
    """Each parameter is used once, so that its gradient is a number of ``dtype``."""
    batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(version))
    with torch.autocast("cpu", dtype):
        return training.model(batch).float().pow(2).mean()


class Clipped(Training):
    """In bf16, clipped."""

    dtype = torch.bfloat16

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def backward(self, version: int) -> None:
        self.optimizer.zero_grad()
        under_autocast(self, version, self.dtype).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)


class Unscaled(Clipped):
    """In fp16, with loss scaling, and clipped."""

    dtype = torch.float16

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)
        self.after_step = self.scaler.update

    def backward(self, version: int) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(under_autocast(self, version, self.dtype)).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)


@pytest.mark.parametrize("bases", ["capture", "fold"])
@pytest.mark.parametrize(("make", "stored"), [(Clipped, "BF16"), (Unscaled, "F16")])
def test_gradients_that_torch_has_multiplied_are_stored_as_they_were(
    make: Callable[[], Clipped], stored: str, bases: str, tmp_path: Path
) -> None:
    hierarchy = Hierarchy.of(memory(), f"nvme://{tmp_path}?survives=rack")
    training = make()
    training.attach(hierarchy, base_every=4, batch=1, bases=bases)
    for version in range(1, 8):
        training.step(version)
    assert training.checkpointer is not None
    training.checkpointer.flush()
    stream = training.checkpointer._job.recorder._stream
    assert set(stream.room.dtypes.values()) == {stored}
    training.checkpointer.abort()
    after = make()
    checkpointer = after.attach(hierarchy, base_every=4, batch=1, bases=bases)
    assert checkpointer.recovery is not None
    assert (checkpointer.recovery.version, checkpointer.recovery.fidelity) == (7, Fidelity.EXACT)
    assert after.parameters() == training.states[7]
    moments = [job.optimizer.state[job.model[0].weight]["exp_avg_sq"] for job in (training, after)]
    assert torch.equal(*moments)
    checkpointer.abort()
