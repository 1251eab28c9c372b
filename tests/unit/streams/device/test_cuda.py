"""What can be said of the CUDA device without one: what it refuses, and that nothing of CUDA is touched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training import Training, memory
from tiercheck.errors import UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.streams.device.cuda import device_of, finish_all


def on(index: int | None) -> Any:
    return SimpleNamespace(is_cuda=index is not None, device=SimpleNamespace(index=index))


def test_a_state_on_the_host_has_no_device() -> None:
    assert device_of([torch.zeros(3), torch.zeros(0)]) is None
    finish_all([torch.zeros(3)])
    assert not torch.cuda.is_initialized()


def test_a_state_on_one_gpu_has_that_device() -> None:
    device = device_of([on(2), on(None), on(2)])
    assert device is not None and device.name == "cuda:2"
    assert device_of([on(2)]) is device, "with its streams"


def test_a_state_on_several_gpus_is_refused() -> None:
    with pytest.raises(UnsupportedSetup, match=r"several GPUs \(cuda:0, cuda:1\)"):
        device_of([on(1), on(0)])


def test_a_step_that_is_captured_into_a_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    with training.attach(Hierarchy.of(memory())):
        training.step(1)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(UnsupportedSetup, match="CUDA graph"):
            training.optimizer.step()
        monkeypatch.undo()
