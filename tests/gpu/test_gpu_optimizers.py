"""Optimizers on a real GPU: which candidate each follows, and its bits on the host and on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.machine import need_torch_on_gpu

need_torch_on_gpu()

# What follows imports CuPy, which was just asked for.
from tiercheck.errors import ConfigurationError  # noqa: E402
from tiercheck.integrations.torch.module_provider import ModuleProvider  # noqa: E402
from tiercheck.kernels import SparseGradient, cuda  # noqa: E402
from tiercheck.kernels.adam import AdamStep  # noqa: E402
from tiercheck.kernels.gpu_adam import FAST, Powers  # noqa: E402
from tiercheck.streams.optimizers.registry import optimizer_of  # noqa: E402
from tiercheck.streams.optimizers.stand_in import certified_function, find_stand_in  # noqa: E402
from tiercheck.streams.replay.fidelity import Tally  # noqa: E402
from tiercheck.streams.replay.kernel_selection import OnDevice, kernel_for  # noqa: E402
from tiercheck.streams.replay.replay import Replayer  # noqa: E402
from tiercheck.streams.replay.runs import Run, Step  # noqa: E402

pytestmark = pytest.mark.gpu

ADAM, ADAMW = "torch.optim.adam.Adam", "torch.optim.adamw.AdamW"
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
IMPLEMENTATIONS = ("fused", "foreach", "single_tensor")
OF_NO_CANDIDATE = {(ADAM, "fused")}
"""torch's kernel rounds L2 decay by an element's place in its thread (ADR 48)."""
Record = Callable[[str, object], None]


def made(kind: str, implementation: str, groups: Any) -> torch.optim.Optimizer:
    classes: dict[str, Any] = {ADAM: torch.optim.Adam, ADAMW: torch.optim.AdamW}
    return classes[kind](groups, **OPTIONS, **optimizer_of(kind).arguments(implementation))  # type: ignore[no-any-return]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.detach().cpu().numpy().tobytes() == other.detach().cpu().numpy().tobytes()


@pytest.mark.parametrize("kind", [ADAM, ADAMW])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_kernel_on_the_host_stands_in_for_it(kind: str, implementation: str, record_property: Record) -> None:
    """A million elements, over a hundred steps: the bits that the GPU has."""
    if (kind, implementation) in OF_NO_CANDIDATE:
        with pytest.raises(ConfigurationError, match="no kernel on the host has the bits of"):
            find_stand_in(kind, implementation, [OPTIONS], "cuda")
        return
    found = find_stand_in(kind, implementation, [OPTIONS], "cuda")
    record_property(f"{kind} {implementation} on {torch.cuda.get_device_name()}", found.candidate)
    function, size = certified_function(optimizer_of(kind), found), 1_000_003
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(size, generator=generator).cuda())
    start = parameter.detach().cpu().numpy().copy()
    optimizer = made(kind, implementation, [parameter])
    state = {name: np.zeros(size, np.float32) for name in ("exp_avg", "exp_avg_sq")}
    for count in range(1, 101):
        gradient = torch.randn(size, generator=generator) * 0.01
        parameter.grad = gradient.cuda()
        optimizer.step()
        function(start, state, [gradient.numpy()], [optimizer_of(kind).step(OPTIONS, count)])
        if count in (1, 2, 10, 100):
            held = optimizer.state[parameter]
            assert start.tobytes() == parameter.detach().cpu().numpy().tobytes(), count
            assert all(each.tobytes() == held[name].cpu().numpy().tobytes() for name, each in state.items()), count


class TestReplayOnTheDevice:
    def provider(self, kind: str, implementation: str) -> ModuleProvider:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(64, 1001), torch.nn.Linear(1001, 3)).cuda()
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 3e-3}]
        return ModuleProvider(model, made(kind, implementation, groups))

    def steps_of(self, provider: ModuleProvider, count: int) -> Iterator[Step]:
        for version in range(1, count + 1):
            generator = torch.Generator().manual_seed(version)
            gradients: dict[str, Any] = {
                name: torch.randn(master.shape, generator=generator) * 1e-2
                for name, master in provider.masters().items()
            }
            yield Step(version, provider.hyperparameters(), gradients)

    @pytest.mark.parametrize("kind", [ADAM, ADAMW])
    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_it_has_the_bits_of_the_steps(self, kind: str, implementation: str) -> None:
        training, recovering = (self.provider(kind, implementation) for _ in range(2))
        steps = list(self.steps_of(training, 12))
        for step in steps:
            training.apply(step.gradients, step.hyperparameters)  # type: ignore[arg-type]  # all are dense
        replayer = Replayer(recovering)
        for at in range(0, 12, 5):
            some = tuple(steps[at : at + 5])
            replayer.apply(Run(some[0].version, some[-1].version, some, {}, {}, Tally()))
        by_kernel = isinstance(kernel_for(recovering, steps[-1:]), OnDevice)
        assert by_kernel == ((kind, implementation) not in OF_NO_CANDIDATE), "else the optimizer itself is called"
        for name, master in training.masters().items():
            assert same_bits(master, recovering.masters()[name]), name
            for key, each in training.optimizer_state()[name].items():
                assert same_bits(each, recovering.optimizer_state()[name][key]), (name, key)

    def test_a_sparse_gradient_is_one_with_zeros(self) -> None:
        one, other = (self.provider(ADAMW, "fused") for _ in range(2))
        first, second = self.steps_of(one, 2)
        for each in (one, other):
            each.apply(first.gradients, first.hyperparameters)  # type: ignore[arg-type]
        sparse: dict[str, Any] = {}
        dense: dict[str, Any] = {}
        for name, gradient in second.gradients.items():
            flat = gradient.reshape(-1).numpy().copy()  # type: ignore[union-attr]
            flat[::3] = 0
            kept = np.flatnonzero(flat).astype(np.uint32)
            sparse[name] = SparseGradient(kept, flat[kept])
            dense[name] = torch.from_numpy(flat).view(one.masters()[name].shape)
        one.apply(dense, second.hyperparameters)
        replay = kernel_for(other, [Step(2, second.hyperparameters, sparse)])
        assert isinstance(replay, OnDevice)
        replay(other, [Step(2, second.hyperparameters, sparse)], threads=1)
        assert all(same_bits(master, other.masters()[name]) for name, master in one.masters().items())


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_candidate_has_the_bits_of_deepspeeds_fused_adam(decoupled: bool, record_property: Record) -> None:
    """Which is compiled here, with approximate divisions; no processor has its bits."""
    adam = pytest.importorskip("deepspeed.ops.adam", reason="needs DeepSpeed")
    size = 1_000_003
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(size, generator=generator).cuda())
    start = parameter.detach().clone()
    try:
        optimizer = adam.FusedAdam([parameter], **OPTIONS, adam_w_mode=decoupled)
    except Exception as error:
        pytest.skip(f"DeepSpeed cannot compile its FusedAdam here: {error}")
    gradients = [(torch.randn(size, generator=generator) * 0.01).cuda() for _ in range(4)]
    for each in gradients:
        parameter.grad = each.clone()
        optimizer.step()
    scalars = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decoupled": decoupled}
    steps = [AdamStep(step=1 + index, **scalars) for index in range(4)]
    stream = cuda.low_priority_stream()
    differing = {}
    for rounding in FAST:
        state = [start.clone(), torch.zeros_like(start), torch.zeros_like(start)]
        there = [cuda.borrow(each, stream) for each in (*state, *gradients)]
        cuda.replay_gpu_adam(*there[:3], there[3:], steps, rounding=rounding, powers=Powers(), stream=stream)
        stream.synchronize()
        held = optimizer.state[parameter]
        expected = (parameter.detach(), held["exp_avg"], held["exp_avg_sq"])
        differing[rounding.name] = sum(int((a != b).sum()) for a, b in zip(state, expected, strict=True))
    record_property(f"differing values, adam_w_mode={decoupled}", differing)
    assert 0 in differing.values(), differing
