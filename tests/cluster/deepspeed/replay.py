"""The claim on trial: load a base, replay gradients, go on training, and every bit is the uninterrupted run's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.utils import safe_get_full_optimizer_state

from tests.cluster.deepspeed.harness import (
    BASE,
    END,
    RESUME,
    Case,
    Outcome,
    Recorder,
    build,
    differences,
    iterate,
    train,
)
from tests.cluster.deepspeed.index import built_failures, index_failures
from tiercheck.integrations.deepspeed.partitions import DeepSpeedProvider
from tiercheck.streams.tensors.as_bytes import NAMES


def replay_in_place(provider: DeepSpeedProvider, gradients: dict[str, torch.Tensor], options: list[Any]) -> None:
    """What a kernel does: Adam or AdamW on the live tensors, past the engine's optimizer."""
    states, groups = provider.optimizer_state(), provider.group_of()
    masters = provider.masters()
    for name, gradient in gradients.items():
        master = masters[name]
        chosen = {k: options[groups[name]][k] for k in ("lr", "betas", "eps", "weight_decay")}
        kind = torch.optim.AdamW if options[groups[name]]["decoupled_weight_decay"] else torch.optim.Adam
        kernel = kind([master], **chosen)
        kernel.state[master] = dict(states[name])
        master.grad = gradient
        kernel.step()


def check_case(case: Case) -> list[str]:
    failures: list[str] = []
    engine = build(case, seed=1)
    provider = DeepSpeedProvider(engine)
    recorder = Recorder(provider)
    recorder.attach()
    identity = provider.identity()
    # A pipeline draws its parameters layer by layer, and the wrappers of stage 0 step once before training.
    if not (case.pipeline or (case.stage == 0 and (case.bf16 or case.fp16))):
        failures += built_failures(provider, seed=1)
    truth = train(engine, provider, END)
    failures += differences("host state at the end", recorder_tail(recorder.host[END]), recorder_tail(truth.host))
    trained = {
        name for name in provider.expected() if not name.endswith("frozen")
    }  # in fp32 at stage 0 the optimizer holds it, without a gradient
    if not all(set(recorder.gradients[version]) == trained for version in range(1, END + 1)):
        failures.append("some gradients were not seen")
    failures += dtype_failures(case, recorder)
    failures += index_failures(engine, provider)
    engine.destroy()

    replays: dict[str, Callable[..., None] | None] = {"apply": None}
    if not (case.fused or case.cpu_adam):  # whose step count is no tensor
        replays["in place"] = replay_in_place
    for name, replay in replays.items():
        engine = build(case, seed=2)
        provider = DeepSpeedProvider(engine)
        if provider.identity() != identity:
            failures.append(f"{name}: the identity of the same set-up differs")
        if name == "in place":
            iterate(engine)  # a used engine can be loaded too
        resumed = resume(engine, provider, recorder, replay)
        expected = {version: truth.losses[version] for version in (RESUME + 1, RESUME + 2)}
        failures += differences(f"{name}: losses", expected, resumed.losses)
        failures += differences(f"{name}: state", truth.state, resumed.state)
        failures += differences(f"{name}: parameters", truth.parameters, resumed.parameters)
        failures += differences(f"{name}: host state", truth.host, resumed.host)
        failures += link_failures(engine, provider)
        engine.destroy()
    return failures


def resume(engine: Any, provider: DeepSpeedProvider, recorder: Recorder, replay: Callable[..., None] | None) -> Outcome:
    provider.load(**recorder.base)
    for version in range(BASE + 1, RESUME + 1):
        if replay is None:
            provider.apply(recorder.gradients[version], recorder.hyperparameters[version])
        else:
            replay(provider, recorder.gradients[version], recorder.hyperparameters[version])
    for name, buffer in provider.buffers().items():
        buffer.copy_(recorder.buffers[RESUME][name])
    provider.refresh()
    provider.restore_host_state(recorder.host[RESUME])
    return train(engine, provider, END)


def recorder_tail(host: dict[str, Any]) -> dict[str, Any]:
    """What must agree between a host state taken inside the step and one taken after it."""
    return {key: host[key] for key in ("counters", "random", "sampler_epoch")}


def dtype_failures(case: Case, recorder: Recorder) -> Iterable[str]:
    """Half-precision gradients are stored as such, whatever DeepSpeed has multiplied them by."""
    half = "BF16" if case.bf16 and not case.accumulate_fp32 else "F16" if case.fp16 else "F32"
    if half != "F32" and (half not in recorder.stored or "F32" in recorder.stored):
        yield f"the gradients were stored as {recorder.stored}"
    foreseen = {NAMES[dtype] for dtype in recorder.provider.gradient_dtypes().values()} or {"F32"}
    if foreseen != {half}:
        yield f"the gradients were foreseen as {foreseen}"


def link_failures(engine: Any, provider: DeepSpeedProvider) -> Iterable[str]:
    """DeepSpeed's own view of the moments still shows the loaded ones."""
    if not 1 <= engine.zero_optimization_stage() <= 2:
        return
    before = [safe_get_full_optimizer_state(p, "exp_avg") for p in engine.module.parameters() if p.requires_grad]
    for state in provider.optimizer_state().values():
        state["exp_avg"].mul_(2)
    after = [safe_get_full_optimizer_state(p, "exp_avg") for p in engine.module.parameters() if p.requires_grad]
    yield from differences("DeepSpeed's moments", [each * 2 for each in before], after)
