"""What a provider must notice, refuse or survive, each on a real engine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.cluster.deepspeed.harness import (
    LENGTH,
    Case,
    Model,
    Recorder,
    build,
    cloned,
    differences,
    full_parameters,
    iterate,
    snapshot,
)
from tests.cluster.deepspeed.kit import certified
from tiercheck.errors import Mismatch, SaveError, TierCheckError, UnsupportedSetup
from tiercheck.format import host_state
from tiercheck.integrations.deepspeed.partitions import DeepSpeedProvider, supported
from tiercheck.integrations.deepspeed.replicated import EngineReplicas
from tiercheck.integrations.replicas import Alike
from tiercheck.streams.tensors.generators import random_state

__all__ = ["EDGES"]


def raises(error: type[TierCheckError], words: str, call: Callable[[], Any]) -> Iterable[str]:
    try:
        call()
    except error as raised:
        if words not in str(raised):
            yield f"{words!r} is not in {raised}"
    else:
        yield f"no {error.__name__} saying {words!r}"


def skipped_iterations(case: Case) -> Iterable[str]:
    """Versions 3 and 4 are skipped for infinite gradients: noticed, and resumed from as from any other."""
    engine = build(case, seed=1)
    provider = DeepSpeedProvider(engine)
    recorder = Recorder(provider)
    recorder.attach()
    ended: dict[int, dict[str, Any]] = {}
    buffers: dict[int, dict[str, torch.Tensor]] = {}

    def at_forward(*_: Any) -> None:
        """What an integration does in the engine's forward pre-hook: write down what ended without an update."""
        seen = max([*recorder.host, *ended], default=0)
        before = recorder.host.get(seen) or ended.get(seen)
        skips = 0 if before is None else before["counters"]["skipped_steps"]
        for version in provider.skipped_after(seen, skips):
            ended[version] = provider.host_state()
            buffers[version] = cloned(dict(provider.buffers()))

    handle = engine.register_forward_pre_hook(at_forward)
    for version in range(1, 7):
        iterate(engine, poison=version in (3, 4))
        if version == 4:
            random_after_4 = random_state()
            scale_after_4 = getattr(engine.optimizer, "loss_scale", 1.0)
    handle.remove()
    truth, parameters = snapshot(provider), full_parameters(engine)
    if sorted(ended) != [3, 4] or sorted(recorder.host) != [1, 2, 5, 6]:
        yield f"skipped versions {sorted(ended)}, applied {sorted(recorder.host)}"
    if 3 in recorder.gradients or 4 in recorder.gradients:
        yield "a skipped version has gradients"
    yield from raises(SaveError, "ended unseen", lambda: provider.skipped_after(1, 0))
    engine.destroy()

    engine = build(case, seed=2)
    provider = DeepSpeedProvider(engine)
    provider.load(**recorder.base)
    for name, buffer in provider.buffers().items():
        buffer.copy_(buffers[4][name])
    provider.refresh()
    # The skip shows at the next forward pass, when the script has drawn that pass's data already.
    yield from differences("torch's generator", random_after_4["torch"], ended[4]["random"]["torch"])
    provider.restore_host_state({**ended[4], "random": random_after_4})
    resumed = provider.host_state()
    for part in ("counters", "hyperparameters"):
        yield from differences(part, ended[4][part], resumed[part])
    yield from differences("loss scale", scale_after_4, getattr(engine.optimizer, "loss_scale", 1.0))
    if provider.version != 4 or provider.skipped_steps() != 2:
        yield f"resumed at {provider.version} after {provider.skipped_steps()} skips"
    iterate(engine)
    iterate(engine)
    yield from differences("after the skips", truth, snapshot(provider))
    yield from differences("parameters", parameters, full_parameters(engine))
    engine.destroy()


def skipped_in_a_pipeline() -> Iterable[str]:
    """A pipeline has no forward hook: the skip shows in the next step's first pre-hook, and on every stage."""
    engine = build(Case(1, True, accumulation=2, pipeline=True), seed=1)
    provider = DeepSpeedProvider(engine)
    seen: dict[int, dict[str, Any]] = {0: provider.host_state()}

    visited: set[str] = set()

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        first = not visited
        visited.update(provider.visited_in_hook(optimizer))
        if not first:
            return
        version = max(seen)
        for skipped in provider.skipped_after(version, seen[version]["counters"]["skipped_steps"]):
            with provider.between_iterations():
                seen[skipped] = provider.host_state()

    def after(*_: Any) -> None:
        if visited == provider.expected():
            visited.clear()
            seen[provider.version] = provider.host_state()

    provider.optimizer.register_step_pre_hook(before)
    provider.optimizer.register_step_post_hook(after)
    ended: dict[int, dict[str, Any]] = {}
    for version in range(1, 5):
        iterate(engine, poison=version == 3)
        ended[version] = provider.host_state()
    if sorted(seen) != [0, 1, 2, 3, 4]:
        yield f"the versions seen were {sorted(seen)}"
    for version, host in ended.items():
        yield from differences(f"counters of {version}", host["counters"], seen[version]["counters"])
    yield from differences("scheduler of 3", ended[3]["scheduler"], seen[3]["scheduler"])
    engine.destroy()


def half_accumulated() -> Iterable[str]:
    engine = build(Case(1, True, accumulation=2), seed=1)
    provider = DeepSpeedProvider(engine)
    iterate(engine)
    provider.host_state()
    loss = engine(torch.zeros(2, LENGTH, dtype=torch.long), torch.ones(1))
    engine.backward(loss)
    engine.step()
    yield from raises(SaveError, "1 micro-batches", provider.host_state)
    engine.destroy()


def step_said_by_the_loop() -> Iterable[str]:
    """Accelerate says where a step's last micro-batch is, and calls ``engine.step`` there alone: one a step is counted.
    What resumes such a job has not said it yet."""
    case = Case(2, True, accumulation=2)
    engine = build(case, seed=1)
    provider = DeepSpeedProvider(engine)
    for last in (False, True):
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(engine(torch.zeros(2, LENGTH, dtype=torch.long), torch.ones(1)))
    engine.step()
    host = provider.host_state()
    if host["counters"]["micro_steps"] != 1:
        yield f"the counters are {host['counters']}"
    engine.destroy()
    engine = build(case, seed=1)
    provider = DeepSpeedProvider(engine)
    provider.restore_host_state(host)
    yield from differences("counters", host["counters"], provider.host_state()["counters"])
    engine.destroy()


def scheduler_moved_by_others() -> Iterable[str]:
    engine = build(Case(2, False), seed=1)
    provider = DeepSpeedProvider(engine)
    iterate(engine)
    provider.host_state()
    iterate(engine)
    provider.host_state()
    engine.lr_scheduler.step()
    iterate(engine)
    yield from raises(SaveError, "moved by 2 in 1 updates", provider.host_state)
    engine.destroy()


def base_of_version_zero() -> Iterable[str]:
    """A base from before the first step empties the optimizer of a used engine."""
    for case in (Case(1, True), Case(3, False)):
        engine = build(case, seed=1)
        provider = DeepSpeedProvider(engine)
        base, host = snapshot(provider), provider.host_state()
        first = [iterate(engine), iterate(engine)]
        truth = snapshot(provider)
        provider.load(**base)
        provider.refresh()
        provider.restore_host_state(host)
        if provider.version != 0 or provider.optimizer_state():
            yield "the engine is not as it was before training"
        yield from differences("losses", first, [iterate(engine), iterate(engine)])
        yield from differences("state", truth, snapshot(provider))
        engine.destroy()


def another_model() -> Iterable[str]:
    """What does not fit is refused, and nothing was touched."""
    engine = build(Case(1, False), seed=1)
    provider = DeepSpeedProvider(engine)
    iterate(engine)
    base = snapshot(provider)
    longer = {**base["masters"], "group1.partition": torch.zeros(7)}
    other = {"group0.partition": base["masters"]["group0.partition"]}
    changed = {name: each + 1 for name, each in base["masters"].items()}
    group = base["hyperparameters"]
    for words, parts in (
        ("group1.partition is (7,)", {"masters": longer}),
        ("different tensors", {"masters": other}),
        ("different tensors", {"masters": changed, "extras": {}}),
        ("group9.partition", {"masters": changed, "optimizer_state": {"group9.partition": {}}}),
        ("1 parameter groups", {"masters": changed, "hyperparameters": group[:1]}),
    ):
        yield from raises(Mismatch, words, lambda parts=parts: provider.load(**{**base, **parts}))
        yield from differences(f"after refusing {words}", base, snapshot(provider))
    yield from raises(Mismatch, "group9", lambda: provider.apply({"group9.partition": torch.zeros(1)}, group))
    short = {**base["masters"], "group1.partition": torch.zeros(3)}
    yield from raises(Mismatch, "3 elements", lambda: provider.apply(short, group))
    yield from differences("after refused replays", base, snapshot(provider))
    host = provider.host_state()
    yield from raises(Mismatch, "scheduler None", lambda: provider.restore_host_state({**host, "scheduler": None}))
    engine.destroy()


def own_checkpoints() -> Iterable[str]:
    """Hooks, names and groups outlive ``engine.load_checkpoint``, which replaces what they refer to."""
    for stage in (1, 3):
        engine = build(Case(stage, True), seed=1)
        provider = DeepSpeedProvider(engine)
        recorder = Recorder(provider)
        recorder.attach()
        iterate(engine)
        iterate(engine)
        folder = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
        torch.distributed.broadcast_object_list(folder)
        engine.save_checkpoint(folder[0], tag="two")
        iterate(engine)
        changed = provider.hyperparameters()
        engine.load_checkpoint(folder[0], tag="two")
        yield from raises(SaveError, "went back to version 2", lambda provider=provider: provider.skipped_after(3, 0))
        before = recorder.calls
        iterate(engine)
        if recorder.calls == before:
            yield f"stage {stage}: the hooks are gone"
        yield from differences(f"stage {stage}: groups", changed, provider.hyperparameters())
        for group in provider.optimizer.param_groups:
            group["lr"] = 0.5
        if any(options["lr"] != 0.5 for options in provider.hyperparameters()):
            yield f"stage {stage}: the options seen are not the optimizer's"
        engine.destroy()
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(folder[0])


def data_sampler() -> Iterable[str]:
    data = [torch.zeros(3)] * 8
    engine = build(Case(0, False), seed=1, training_data=data)
    engine.training_dataloader.data_sampler.set_epoch(3)
    host = DeepSpeedProvider(engine).host_state()
    engine.training_dataloader.data_sampler.set_epoch(0)
    DeepSpeedProvider(engine).restore_host_state(host)
    if engine.training_dataloader.data_sampler.epoch != 3:
        yield "the sampler's epoch is lost"
    engine.destroy()


def model_parallel_generators() -> Iterable[str]:
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    engine = build(Case(0, False), seed=1)
    provider = DeepSpeedProvider(engine)
    tracker = get_cuda_rng_tracker()
    tracker.set_states({"model-parallel-rng": torch.get_rng_state()})
    host = provider.host_state()
    with tracker.fork():
        expected = torch.rand(5)
    tracker.set_states({})
    provider.restore_host_state(host)
    with tracker.fork():
        yield from differences("model-parallel generator", expected, torch.rand(5))
    tracker.reset()
    engine.destroy()


class WithExtraState(Model):
    """As a layer of low precision, whose scales follow what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = torch.zeros(2)

    def forward(self, tokens: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        self.scales = self.scales + torch.tensor([1.0, float(tokens.sum())])
        return super().forward(tokens, factor) * (1 + self.scales[1].item() / 1e4)

    def get_extra_state(self) -> Any:
        return {"scales": self.scales}

    def set_extra_state(self, state: Any) -> None:
        self.scales = state["scales"]


def extra_state() -> Iterable[str]:
    """What a module keeps by itself is saved with the version, and the next loss depends on it."""
    case, made = Case(2, False), []
    for seed in (1, 2):
        model = WithExtraState()
        made.append(build(case, seed=seed, model=model, model_parameters=model.parameters()))
    engine, again = made
    for _ in range(2):
        iterate(engine)
    provider, other = DeepSpeedProvider(engine), DeepSpeedProvider(again)
    found = snapshot(provider)
    other.load(
        masters=found["masters"],
        optimizer_state=found["optimizer_state"],
        extras=found["extras"],
        hyperparameters=provider.hyperparameters(),
    )
    host = host_state.unpack(host_state.pack(provider.host_state()))
    other.refresh()
    other.restore_host_state(host)
    yield from differences("extra state", engine.module.scales, again.module.scales)
    resumed = iterate(again)
    provider.restore_host_state(host)  # generators are the process's
    yield from differences("loss", iterate(engine), resumed)
    if other.extra_state.caveats():
        yield f"{other.extra_state.caveats()}"
    other.restore_host_state({name: each for name, each in host.items() if name != "extra_state"})
    if not other.extra_state.caveats():
        yield "nothing is said of what the version lacks"
    for each in made:
        each.destroy()


def refused_setups() -> Iterable[str]:
    plateau = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}
    engine = build(Case(0, False, scheduler=None), seed=1, **plateau)
    yield from raises(UnsupportedSetup, "ReduceLROnPlateau", lambda: supported(engine))
    yield from raises(UnsupportedSetup, "Supported: ZeRO 0-3", lambda: DeepSpeedProvider(engine))
    engine.destroy()
    adagrad = Case(1, False, scheduler=None).config() | {"optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}}
    adagrad |= {"zero_allow_untested_optimizer": True}
    engine = build(Case(1, False, scheduler=None), seed=1, config=adagrad)
    yield from raises(UnsupportedSetup, "with Adagrad: one group", lambda: supported(engine))
    engine.destroy()
    engine = build(Case(1, False), seed=1)
    for words, name, found in (  # what cannot run here, as DeepSpeed would report it
        ("NVMe for what is offloaded", "zero_offload_param", lambda: SimpleNamespace(device="nvme")),
        ("a part of the optimizer", "zero_offload_optimizer", lambda: SimpleNamespace(device="cpu", ratio=0.5)),
        ("mixture of experts", "has_moe_layers", True),
        ("quantized weights", "zero_quantized_weights", lambda: True),
        ("hierarchical partitioning", "zero_hpz_partition_size", lambda: 2),
        ("DeepCompile", "is_deepcompile_enabled", lambda: True),
        ("curriculum data sampler", "curriculum_learning_enabled", lambda: True),
        ("low-precision master", "bf16_master_weights_and_gradients", lambda: True),
    ):
        usual = getattr(engine, name)
        setattr(engine, name, found)
        yield from raises(UnsupportedSetup, words, lambda: supported(engine))
        setattr(engine, name, usual)
    engine.optimizer.custom_loss_scaler = True
    yield from raises(UnsupportedSetup, "loss scale of the script's own", lambda: supported(engine))
    engine.optimizer.custom_loss_scaler = False
    hidden = type("OnebitAdam", (torch.optim.AdamW,), {"__module__": "deepspeed.runtime.fp16.onebit.adam"})
    kept, engine.optimizer.optimizer = engine.optimizer.optimizer, hidden([torch.zeros(1)])
    yield from raises(UnsupportedSetup, "onebit.adam.OnebitAdam", lambda: supported(engine))
    engine.optimizer.optimizer = kept
    inner, engine.optimizer.optimizer = engine.optimizer.optimizer, object()
    yield from raises(UnsupportedSetup, "builtins.object", lambda: supported(engine))
    engine.optimizer.optimizer = inner
    supported(engine)
    hook = engine.optimizer.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with suppress(ZeroDivisionError):
        iterate(engine)
    hook.remove()
    yield from raises(UnsupportedSetup, "was broken off by what was raised in it", lambda: supported(engine))
    engine._running_engine_step = False
    engine.destroy()
    engine.optimizer = nn.Identity()
    yield from raises(UnsupportedSetup, "Identity", lambda: supported(engine))
    engine.optimizer = None
    yield from raises(UnsupportedSetup, "no optimizer", lambda: supported(engine))
    yield from raises(
        UnsupportedSetup, "deepspeed.initialize returns first, not Identity", lambda: supported(nn.Identity())
    )


def replicas() -> Iterable[str]:
    """Under stage 0 every rank holds the same, as long as each step is on gradients that were summed."""
    engine = build(Case(0, False), seed=1)
    provider, kept = DeepSpeedProvider(engine), EngineReplicas(engine)
    if kept.alike(provider) != Alike(frozenset(provider.masters()), frozenset(provider.frozen())):
        yield f"not all of stage 0 is alike: {kept.alike(provider)}"
    with engine.no_sync():
        kept.forward()
    yield from raises(UnsupportedSetup, "were not summed over the ranks", kept.check_step)
    kept.forward()
    kept.check_step()
    engine.enable_backward_allreduce = False
    if "does not sum gradients" not in kept.alike(provider).obstacle:
        yield f"nothing sums gradients, and the replicas count: {kept.alike(provider)}"
    yield from raises(UnsupportedSetup, "replicas='each'", kept.check_step)
    engine.destroy()


EDGES: dict[str, Callable[[], Iterable[str]]] = {
    "replicas": replicas,
    "skipped-zero1-bf16": lambda: skipped_iterations(Case(1, True, clipping=0.3)),
    "skipped-zero1-bf16-accumulate-fp32": lambda: skipped_iterations(Case(1, True, accumulate_fp32=True)),
    "skipped-zero3-fp32": lambda: skipped_iterations(Case(3, False, scheduler="cosine")),
    "skipped-zero0-bf16": lambda: skipped_iterations(Case(0, True)),
    "skipped-zero1-fp16": lambda: skipped_iterations(Case(1, False, clipping=0.3, fp16=True)),
    "skipped-zero2-bf16-offload-cpu-adam": lambda: skipped_iterations(
        Case(2, True, clipping=0.3, offload=("optimizer",), cpu_adam=True)
    ),
    "skipped-zero0-fp16": lambda: skipped_iterations(Case(0, False, fp16=True)),
    "kit-zero1-bf16": certified(Case(1, True, clipping=0.3)),
    "half-accumulated": half_accumulated,
    "step-said-by-the-loop": step_said_by_the_loop,
    "scheduler-moved-by-others": scheduler_moved_by_others,
    "base-of-version-zero": base_of_version_zero,
    "another-model": another_model,
    "own-checkpoints": own_checkpoints,
    "data-sampler": data_sampler,
    "model-parallel-generators": model_parallel_generators,
    "extra-state": extra_state,
    "refused-setups": refused_setups,
    # The last of its launch: DeepSpeed builds no plain engine in a process after a pipeline.
    "skipped-in-a-pipeline": skipped_in_a_pipeline,
}
