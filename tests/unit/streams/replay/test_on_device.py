"""A kernel of the device replays what an optimizer did there: on an emulated device, beside a simulated optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.machine import need_cupy

need_cupy()

# What follows imports CuPy, which was just asked for.
from tests.gpu.emulation import Emulator, OnDevice, compile_for_host  # noqa: E402
from tests.simulated_gpu import DeviceMemoryOfTests, simulate  # noqa: E402
from tiercheck.kernels import SparseGradient  # noqa: E402
from tiercheck.kernels.cuda import module  # noqa: E402
from tiercheck.kernels.gpu_adam import FUSED, OPERATIONS, Fused, Rounding, Scheme  # noqa: E402
from tiercheck.streams.optimizers import device_trials  # noqa: E402
from tiercheck.streams.optimizers.registry import optimizer_of  # noqa: E402
from tiercheck.streams.optimizers.replay import Setting  # noqa: E402
from tiercheck.streams.replay import kernel_selection, on_device  # noqa: E402
from tiercheck.streams.replay.on_device import DeviceReplay, certified, device_replay_for, placed, with_betas  # noqa: E402
from tiercheck.streams.replay.runs import Step  # noqa: E402

KIND = "torch.optim.adamw.AdamW"
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(compile_for_host(tmp_path_factory.mktemp("kernels")))


@pytest.fixture(autouse=True)
def emulated(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "launch", emulator.launch)
    certified.cache_clear()
    yield
    certified.cache_clear()


def found_for(implementation: str = "fused") -> DeviceReplay | str:
    memory = DeviceMemoryOfTests(lambda array: array.view(OnDevice))
    setting = Setting(implementation, "2.13", "Simulated", "cpu")
    found = certified(optimizer_of(KIND), setting, memory)
    return found if isinstance(found, str) else with_betas(optimizer_of(KIND), found, (0.9, 0.99), "cpu", memory)


def replay_for(implementation: str = "fused") -> DeviceReplay:
    found = found_for(implementation)
    assert isinstance(found, DeviceReplay), found
    return found


@pytest.mark.parametrize(
    ("implementation", "rounding"),
    [("fused", FUSED[0]), ("fused", FUSED[2]), ("foreach", OPERATIONS[0]), ("single_tensor", OPERATIONS[2])],
    ids=lambda value: value.name if isinstance(value, Rounding) else value,
)
def test_the_optimizers_own_candidate_replays_it(
    implementation: str, rounding: Rounding, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, KIND, rounding)
    assert replay_for(implementation).name == rounding.name


def test_where_none_has_its_bits_the_optimizer_is_called(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simulate(monkeypatch, KIND, Rounding(Scheme.WEIGHTED, wide=True, second=Fused.NEITHER))
    found = found_for()
    assert isinstance(found, str) and found.startswith("no kernel has its bits on cpu; values that differ: fused32: ")
    caplog.set_level("INFO")
    setting = Setting("fused", "2.13", "Simulated", "cuda:77")
    for _ in range(2):
        assert device_replay_for(optimizer_of(KIND), setting, [OPTIONS]) is None
    assert "are replayed by calling it: the optimizer could not be tried on cuda:77" in caplog.text
    assert caplog.text.count("are replayed by calling it") == 1, "what was tried once is known"


def problem(size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[Any]]:
    generator = np.random.default_rng(size)
    drawn = [torch.from_numpy(generator.standard_normal(size).astype(np.float32)) for _ in range(7)]
    kept = np.flatnonzero(generator.random(size) < 0.3).astype(np.uint32)
    gradients: list[Any] = [*drawn[3:6], SparseGradient(kept, drawn[6].numpy()[kept])]
    return drawn[0], {"exp_avg": drawn[1], "exp_avg_sq": drawn[2].square()}, gradients


def test_several_steps_in_one_pass_have_the_bits_of_the_optimizers_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any shape, dense and sparse, in pieces; the parameter and its moments are worked on where they lie."""
    simulate(monkeypatch, KIND, FUSED[0])
    replay, size = replay_for(), 3001
    master, state, gradients = problem(size)
    parameter = torch.nn.Parameter(master.clone())
    optimizer: Any = device_trials.class_of(KIND)([parameter], **OPTIONS)
    parameter.grad = torch.zeros(size)
    optimizer.step()
    held = optimizer.state[parameter]
    for name, each in {"param": parameter.detach(), **{name: held[name] for name in state}}.items():
        each.copy_({"param": master, **state}[name])
    held["step"].fill_(4)
    for each in gradients:
        parameter.grad = placed(each, slice(0, size), torch.device("cpu")).clone()
        optimizer.step()
    steps = [optimizer_of(KIND).step(OPTIONS, 5 + index) for index in range(len(gradients))]
    for piece in (1000, size):
        monkeypatch.setattr(on_device, "PIECE", piece)
        own, moments = master.clone(), {name: each.clone() for name, each in state.items()}
        replay(own, moments, gradients, steps)
        assert own.numpy().tobytes() == parameter.detach().numpy().tobytes()
        assert all(each.numpy().tobytes() == held[name].numpy().tobytes() for name, each in moments.items())


@pytest.mark.parametrize(("implementation", "found"), [("fused", FUSED[0]), ("foreach", OPERATIONS[0])])
def test_a_schedule_of_betas_takes_one_certification(
    implementation: str, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, KIND, found)
    tried: list[int] = []
    outcomes_on_device = device_trials.outcomes_on_device

    def counted(*given: Any) -> Any:
        tried.append(1)
        return outcomes_on_device(*given)

    monkeypatch.setattr(device_trials, "outcomes_on_device", counted)
    monkeypatch.setattr(on_device, "CudaMemory", lambda: memory)
    memory = DeviceMemoryOfTests(lambda array: array.view(OnDevice))
    setting = Setting(implementation, "2.13", "Simulated", "cpu")
    master, state, gradients = problem(64)
    for beta in (0.95, 0.9, 0.85):
        options = {**OPTIONS, "betas": (beta, 0.99)}
        replay = device_replay_for(optimizer_of(KIND), setting, [options])
        assert replay is not None
        replay(master, state, gradients[:1], [optimizer_of(KIND).step(options, 5)])
    assert tried == [1]


def test_a_tensor_is_stepped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, KIND, OPERATIONS[0])
    replay = kernel_selection.OnDevice(replay_for("foreach"))
    master, state, gradients = problem(64)
    before, count = master.clone(), torch.tensor(3.0)
    steps = [Step(index, [OPTIONS], {"w": each}) for index, each in enumerate(gradients)]
    tensor = kernel_selection.Tensor("w", master, {**state, "step": count}, steps, [OPTIONS] * len(steps))
    assert tensor.is_taken(optimizer_of(KIND), "cpu")
    assert not tensor.is_taken(optimizer_of(KIND), "cuda")
    replay.apply(tensor, 1)
    assert float(count) == 7
    assert not torch.equal(master, before)
