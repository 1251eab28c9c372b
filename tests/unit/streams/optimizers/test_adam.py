"""A replay ends with the very bits of the torch optimizer it stands for."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.torch_version import TorchVersion

from tests.forks import Forks
from tests.replays import Positional, replay_of
from tiercheck.errors import ConfigurationError
from tiercheck.kernels import HalfGradient, SparseGradient, adam, widened
from tiercheck.streams.optimizers import certification
from tiercheck.streams.optimizers import replay as replaying
from tiercheck.streams.optimizers.adam import Adam
from tiercheck.streams.optimizers.registry import optimizer_of

Array = NDArray[np.float32]
ADAM, ADAMW = "torch.optim.adam.Adam", "torch.optim.adamw.AdamW"
CLASSES = {ADAM: torch.optim.Adam, ADAMW: torch.optim.AdamW}
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CASES = [
    ("single_tensor", "torch_tiles"),
    ("single_tensor", "numba_tiles"),
    ("foreach", "torch_tiles"),
    ("foreach", "numba_tiles"),
    ("fused", "numba"),
    ("fused", "reference"),
]


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    """torch splits large tensors among its threads, whose number must not matter."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def certain(kind: str, implementation: str, choose: str | None) -> Positional:
    replay = replay_of(kind, implementation, choose)
    assert replay is not None
    return replay


def train(
    kind: str, implementation: str, start: Array, gradients: Sequence[Array], schedule: Sequence[dict[str, Any]]
) -> list[Array]:
    """Parameter, exp_avg and exp_avg_sq after a real optimizer's steps."""
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    flags = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    optimizer = CLASSES[kind]([parameter], **{**OPTIONS, **schedule[0]}, **flags)
    for gradient, options in zip(gradients, schedule, strict=True):
        optimizer.param_groups[0].update(options)
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    state = optimizer.state[parameter]
    return [each.detach().numpy() for each in (parameter, state["exp_avg"], state["exp_avg_sq"])]


def replayed(
    replay: Positional,
    start: Array,
    gradients: Sequence[Array | SparseGradient | HalfGradient],
    schedule: Sequence[dict[str, Any]],
    batch: int,
    threads: int = 1,
) -> list[Array]:
    """The same by replay, in batches of so many steps."""
    state = [start.copy(), np.zeros_like(start), np.zeros_like(start)]
    steps = [
        optimizer_of(replay.kind).step({**OPTIONS, **options}, count) for count, options in enumerate(schedule, start=1)
    ]
    for first in range(0, len(steps), batch):
        replay(*state, gradients[first : first + batch], steps[first : first + batch], threads=threads)
    return state


def differing(ours: Sequence[Array], theirs: Sequence[Array]) -> int:
    """Values with other bits; NaNs count as equal to each other, since arithmetic does not keep their payload."""
    total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += int(np.count_nonzero((a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))))
    return total


def random_problem(size: int, steps: int, seed: int = 0) -> tuple[Array, list[Array]]:
    generator = np.random.default_rng([size, seed])
    start = generator.standard_normal(size, dtype=np.float32)
    return start, [generator.standard_normal(size, dtype=np.float32) * np.float32(1e-2) for _ in range(steps)]


# Whatever the optimizers' conformance kit shows of all of them is not shown here again.


@pytest.mark.parametrize(("implementation", "choose"), CASES)
class TestSameBits:
    def test_every_small_size(self, implementation: str, choose: str | None) -> None:
        """One optimizer over tensors of 1 to 40 elements."""
        replay = certain(ADAMW, implementation, choose)
        problems = [random_problem(size, 3) for size in range(1, 41)]
        parameters = [torch.nn.Parameter(torch.from_numpy(start.copy())) for start, _ in problems]
        flags = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
        optimizer = torch.optim.AdamW(parameters, **OPTIONS, **flags)
        for step in range(3):
            for parameter, (_, gradients) in zip(parameters, problems, strict=True):
                parameter.grad = torch.from_numpy(gradients[step].copy())
            optimizer.step()
        for parameter, (start, gradients) in zip(parameters, problems, strict=True):
            state = optimizer.state[parameter]
            expected = [each.detach().numpy() for each in (parameter, state["exp_avg"], state["exp_avg_sq"])]
            assert differing(replayed(replay, start, gradients, [{}] * 3, batch=2), expected) == 0, start.size

    @pytest.mark.parametrize("threads", [1, 2])
    def test_gradients_in_half_precision_are_those_numbers(
        self, implementation: str, choose: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Beside dense and sparse ones, in tensors that end in any place of the parts that are widened."""
        monkeypatch.setattr(replaying, "WIDENED", 1024)
        replay = certain(ADAMW, implementation, choose)
        for size in (1, 63, 1023, 1024, 1025, 5 * 1024 + 8, 140_003):
            start, gradients = random_problem(size, 4)
            halves = [HalfGradient((each.view(np.uint32) >> 16).astype(np.uint16)) for each in gradients]
            scaled = [HalfGradient(each.astype(np.float16), float(np.float32(0.3))) for each in gradients]
            kept = np.arange(0, size, 7, dtype=np.uint32)
            sparse = SparseGradient(kept, gradients[3][kept])
            stored = [halves[0], scaled[1], gradients[2], sparse]
            dense = [widened(halves[0]), widened(scaled[1]), gradients[2], sparse.dense(size)]
            ours = replayed(replay, start, stored, [OPTIONS] * 4, 4, threads)
            assert differing(ours, replayed(replay, start, dense, [OPTIONS] * 4, 4, threads)) == 0, size

    def test_a_schedule_in_batches_of_1_2_and_5(self, implementation: str, choose: str | None) -> None:
        """Learning rate, decay and betas change from step to step; past 5, both of torch's ways to lerp are used."""
        start, gradients = random_problem(4_111, 10)
        schedule: list[dict[str, Any]] = [
            {"lr": 1e-3 * 0.7**count, "weight_decay": 0.02 * (count % 3), "betas": (0.9 if count < 5 else 0.3, 0.999)}
            for count in range(10)
        ]
        for kind in CLASSES:
            replay = certain(kind, implementation, choose)
            expected = train(kind, implementation, start, gradients, schedule)
            for batch in (1, 2, 5, 10):
                assert differing(replayed(replay, start, gradients, schedule, batch), expected) == 0, (kind, batch)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch's x86 instruction sets")
@pytest.mark.skipif(
    TorchVersion(torch.__version__) < TorchVersion("2.13"),
    reason="torch 2.8 reads the variable when it is imported, which the process that forks has done",
)
@pytest.mark.parametrize("instruction_set", ["avx2", "default"])
def test_other_instruction_sets(instruction_set: str, tmp_path: Path, forks: Forks) -> None:
    """torch compiled the fused kernel otherwise for each: the self-test passes in a process that uses that one."""
    script = (
        "import torch; from tests.replays import replay_of\n"
        f"assert torch.backends.cpu.get_cpu_capability() == {instruction_set.upper()!r}\n"
        f"for kind in {[ADAM, ADAMW]}:\n"
        f"    for implementation, choose in {CASES[:5]}:\n"
        "        assert replay_of(kind, implementation, choose)\n"
        "for implementation in ('single_tensor', 'foreach', 'fused'):\n"
        "    assert replay_of('torch.optim.sgd.SGD', implementation)\n"
    )
    code, printed = forks.run_script(script, folder=tmp_path, environment={"ATEN_CPU_CAPABILITY": instruction_set})
    assert code == 0, printed[-2000:]


def test_a_state_of_any_shape_is_worked_on_in_place() -> None:
    replay = certain(ADAMW, "fused", "numba")
    start, gradients = random_problem(60, 1)
    flat = replayed(replay, start, gradients, [{}], batch=1)
    state = [start.copy().reshape(5, 12), np.zeros((5, 12), np.float32), np.zeros((5, 12), np.float32)]
    gradients[0].flags.writeable = False
    replay(*state, gradients, [optimizer_of(ADAMW).step(OPTIONS, 1)])
    assert differing([each.reshape(-1) for each in state], flat) == 0


@pytest.mark.parametrize("implementation", ["single_tensor", "fused"])
def test_no_steps_and_no_elements_change_nothing(implementation: str) -> None:
    replay = certain(ADAMW, implementation, None)
    state = [np.full(9, 2.0, np.float32) for _ in range(3)]
    replay(*state, [], [])
    assert all(np.all(each == 2) for each in state)
    empty = [np.zeros(0, np.float32) for _ in range(4)]
    replay(*empty[:3], empty[3:], [optimizer_of(ADAMW).step(OPTIONS, 1)])


class TestSupport:
    @pytest.mark.parametrize(
        "changed",
        [
            {"torch_version": "1.0.0"},
            {"instruction_set": "SVE256"},
            {"device": "cuda"},
        ],
    )
    @pytest.mark.parametrize("implementation", ["single_tensor", "fused"])
    def test_another_environment_is_nobodys(self, implementation: str, changed: dict[str, str]) -> None:
        assert replay_of(ADAMW, implementation, **changed) is None

    @pytest.mark.parametrize("implementation", ["called", "unheard-of"])
    def test_another_implementation_is_nobodys(self, implementation: str) -> None:
        assert replay_of(ADAMW, implementation) is None

    def test_another_optimizer_is_nobodys(self) -> None:
        assert replay_of("torch.optim.rmsprop.RMSprop", "foreach") is None

    def test_the_automatic_choices(self) -> None:
        assert certain(ADAMW, "single_tensor", None).name == "numba_tiles"
        assert certain(ADAMW, "fused", None).name == "numba"

    def test_without_numba_torch_replays_its_separate_operations(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "numba" else object())
        assert certain(ADAMW, "foreach", None).name == "torch_tiles"
        assert replay_of(ADAMW, "fused") is None

    @pytest.mark.parametrize(
        ("implementation", "choose", "message"),
        [
            ("foreach", "numba", "implementations fused"),
            ("fused", "torch_tiles", "implementations foreach, single_tensor"),
            ("fused", "cuda", "numba, numba_tiles, torch_tiles, reference"),
        ],
    )
    def test_a_choice_that_cannot_be_had_raises(self, implementation: str, choose: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            replay_of(ADAMW, implementation, choose)

    @pytest.mark.parametrize("implementation", ["single_tensor", "fused"])
    def test_flushed_denormals_are_nobodys(self, implementation: str) -> None:
        """``set_flush_denormal`` is a mode of one thread: torch's other threads go on as before."""
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush denormals")
        try:
            assert replay_of(ADAMW, implementation) is None
            with pytest.raises(ConfigurationError, match="flushes denormals"):
                replay_of(ADAMW, "fused", "numba")
        finally:
            torch.set_flush_denormal(False)
        assert replay_of(ADAMW, implementation) is not None

    def test_a_kernel_that_fails_its_self_test_is_not_offered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Had torch another rounding than we know, the experiment would find it."""
        form = Adam.forms[0]
        right = replaying.function_of(form, "fused", certification.environment()[1])

        def one_bit_off(param: Any, state: Any, gradients: Any, steps: Any) -> None:
            right(param, state, gradients, steps)
            state["exp_avg_sq"][-1:].view(np.uint32)[:] ^= 1

        monkeypatch.setattr(replaying, "function_of", lambda form, implementation, instruction_set: one_bit_off)
        assert replay_of(ADAMW, "fused") is None
        with pytest.raises(ConfigurationError, match="values of its self-test differ"):
            replay_of(ADAMW, "fused", "numba")


class TestRefusals:
    @pytest.mark.parametrize("variant", ["differentiable", "capturable"])
    def test_variants_are_left_to_the_optimizer(self, variant: str) -> None:
        options = {**OPTIONS, variant: True}
        assert optimizer_of(ADAMW).reason_not_replayable(options) == f"{variant} is on"
        with pytest.raises(ConfigurationError, match=f"{variant} is on; call the optimizer"):
            optimizer_of(ADAMW).step(options, 1)

    def test_without_a_first_moment_the_optimizer_is_called(self) -> None:
        """Behind its last whole vector torch makes another zero of a -0.0 in it."""
        for kind in CLASSES:
            for beta1 in (0.0, 1e-9):
                reason = optimizer_of(kind).reason_not_replayable({**OPTIONS, "betas": (beta1, 0.95)})
                assert reason is not None and reason.startswith("beta1 is 0")

    def test_the_options_of_real_optimizers_are_understood(self) -> None:
        parameter = torch.nn.Parameter(torch.zeros(1))
        for kind, optimizer in CLASSES.items():
            group = optimizer([parameter], weight_decay=0.5).param_groups[0]
            step = optimizer_of(kind).step(group, 3)
            assert (step.decoupled, step.weight_decay, step.lr) == (kind == ADAMW, 0.5, 1e-3)
        group = torch.optim.Adam([parameter], decoupled_weight_decay=True).param_groups[0]
        assert optimizer_of(ADAM).step(group, 1).decoupled

    def test_missing_options_are_named(self) -> None:
        reason = optimizer_of(ADAM).reason_not_replayable({"lr": 1.0, "betas": (0, 0)})
        assert reason == "its options lack eps, weight_decay"

    @pytest.mark.parametrize("step", [0, -1, adam.STEP_MAX])
    def test_step_counts_that_torch_cannot_count_are_refused(self, step: int) -> None:
        with pytest.raises(ConfigurationError, match="step count"):
            optimizer_of(ADAM).step(OPTIONS, step)

    @pytest.mark.parametrize(
        ("which", "bad", "message"),
        [
            (0, np.zeros(8, np.float64), "param is float64"),
            (1, np.zeros(16, np.float32)[::2], "exp_avg is not"),
            (2, np.zeros(9, np.float32), "exp_avg_sq has 9 elements"),
            (3, np.zeros(8, np.float16), r"gradients\[0\] is float16"),
            (0, np.broadcast_to(np.float32(0), (8,)), "param is not"),
        ],
    )
    def test_arrays_that_cannot_be_worked_on(self, which: int, bad: NDArray[Any], message: str) -> None:
        arrays: list[Any] = [np.zeros(8, np.float32) for _ in range(4)]
        arrays[which] = bad
        with pytest.raises(ConfigurationError, match=message):
            certain(ADAMW, "fused", None)(*arrays[:3], arrays[3:], [optimizer_of(ADAMW).step(OPTIONS, 1)])

    def test_read_only_and_overlapping_state(self) -> None:
        replay, step = certain(ADAMW, "fused", None), optimizer_of(ADAMW).step(OPTIONS, 1)
        p, m, v, g = (np.zeros(8, np.float32) for _ in range(4))
        with pytest.raises(ConfigurationError, match="param overlaps exp_avg"):
            replay(p, p, v, [g], [step])
        with pytest.raises(ConfigurationError, match="overlaps gradients"):
            replay(p, m, v, [v], [step])
        with pytest.raises(ConfigurationError, match="a gradient a step"):
            replay(p, m, v, [g, g], [step])
        with pytest.raises(ConfigurationError, match="at least one thread"):
            replay(p, m, v, [g], [step], threads=0)
        m.flags.writeable = False
        with pytest.raises(ConfigurationError, match="exp_avg is read-only"):
            replay(p, m, v, [g], [step])
