"""A tiny GPT-like model under DeepSpeed, an integration in miniature, and bit-for-bit comparison."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.cluster.deepspeed.plain_cpu_adam import PlainCPUAdam
from tiercheck.demo.training.deepspeed_cpu import prepare_cpu
from tiercheck.format.container import ShardWriter
from tiercheck.streams.records import constants
from tiercheck.streams.records.differential import DifferentialStream
from tiercheck.streams.tensors.provider import extras_of

prepare_cpu()

# What follows imports DeepSpeed, which looks at once for the accelerator that prepare_cpu() names.
import deepspeed  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.ops.adam import FusedAdam, cpu_adam  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402
from deepspeed.runtime.pipe.engine import PipelineEngine  # noqa: E402

from tiercheck.integrations.deepspeed.partitions import DeepSpeedProvider  # noqa: E402

constants.NBYTES_MIN, constants.SHARE = 5, 1 << 30  # what does not change is referred to, unless it is one number

WIDTH, VOCABULARY, LENGTH = 32, 61, 12
BASE, RESUME, END = 2, 4, 6


@dataclass(frozen=True)
class Case:
    stage: int
    bf16: bool
    accumulation: int = 1
    clipping: float = 0.0
    scheduler: str | None = "WarmupDecayLR"
    accumulate_fp32: bool = False
    communicate_fp32: bool = False
    managed: bool = True
    pipeline: bool = False
    fused: bool = False
    fp16: bool = False
    tensor_parallel: bool = False
    decay_in_gradient: bool = False
    offload: tuple[str, ...] = ()
    """To the CPU: ``optimizer``, ``param``."""
    cpu_adam: bool = False
    """DeepSpeed's compiled Adam, which it takes for what is offloaded, instead of torch's."""
    sequence_parallel: bool = False
    """All ranks share one sequence, as under Ulysses."""

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "steps_per_print": 10**9,
            "managed_gradient_accumulation": self.managed,
            "zero_optimization": {
                "stage": self.stage,
                "sub_group_size": 6000,
                "stage3_param_persistence_threshold": 100,
                "reduce_bucket_size": 20000,
                "stage3_prefetch_bucket_size": 4000,
            },
        }
        for what in self.offload:
            config["zero_optimization"][f"offload_{what}"] = {"device": "cpu", "pin_memory": False}
        if self.offload and not self.cpu_adam:
            config["zero_force_ds_cpu_optimizer"] = False
        if not self.fused:
            betas = [0.91, 0.98] if self.cpu_adam else [0.9, 0.95]  # whose powers differ in fp32 if multiplied on
            parameters = {"lr": 1e-2, "betas": betas, "torch_adam": not self.cpu_adam}
            config["optimizer"] = {"type": "AdamW", "params": parameters}
            if self.decay_in_gradient:
                config["optimizer"] = {"type": "Adam", "params": {**parameters, "adam_w_mode": False}}
        if self.bf16:
            config["bf16"] = {"enabled": True}
        if self.fp16:
            config["fp16"] = {"enabled": True, "initial_scale_power": 9, "loss_scale_window": 2, "hysteresis": 2}
        if self.sequence_parallel:
            config |= {"sequence_parallel_size": torch.distributed.get_world_size(), "data_parallel_size": 1}
        if self.tensor_parallel:
            kinds = {"expand": "column", "contract": "row"}
            specs = [{"patterns": [rf".*\.{name}\.weight$"], "partition_type": kind} for name, kind in kinds.items()]
            partition = {"use_default_specs": False, "layer_specs": specs}
            config["tensor_parallel"] = {"autotp_size": 2, "partition_config": partition}
        if self.communicate_fp32:
            config["communication_data_type"] = "fp32"
        if self.accumulate_fp32:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        if self.scheduler == "WarmupDecayLR":
            config["scheduler"] = {
                "type": self.scheduler,
                "params": {
                    "warmup_min_lr": 0.0,
                    "warmup_max_lr": 1e-2,
                    "warmup_num_steps": 3,
                    "total_num_steps": 20,
                },
            }
        return config


CASES = {
    "zero0-fp32": Case(0, False, accumulation=2, clipping=0.3, scheduler="cosine"),
    "zero1-fp32": Case(1, False, accumulation=2, clipping=0.3),
    "zero2-fp32": Case(2, False, scheduler="cosine", decay_in_gradient=True),
    "zero3-fp32": Case(3, False, accumulation=2, clipping=0.3),
    "zero0-bf16": Case(0, True, clipping=0.3),
    "zero1-bf16": Case(1, True, accumulation=2),
    "zero1-bf16-accumulate-fp32": Case(1, True, accumulation=2, clipping=0.3, accumulate_fp32=True),
    "zero2-bf16": Case(2, True, accumulation=2, clipping=0.3, scheduler="cosine"),
    "zero3-bf16": Case(3, True, clipping=0.3, scheduler=None, decay_in_gradient=True),
    "zero3-bf16-unclipped": Case(3, True, accumulation=2),
    "zero2-bf16-unmanaged": Case(2, True, accumulation=3, managed=False),
    "zero2-bf16-communicate-fp32": Case(2, True, accumulation=2, communicate_fp32=True),
    "zero0-bf16-fused": Case(0, True, accumulation=2, clipping=0.3, fused=True),
    "zero1-bf16-offload": Case(1, True, accumulation=2, clipping=0.3, offload=("optimizer",)),
    "zero2-fp32-offload-cpu-adam": Case(2, False, scheduler="cosine", offload=("optimizer",), cpu_adam=True),
    "zero3-bf16-offload-cpu-adam": Case(3, True, clipping=0.3, offload=("optimizer", "param"), cpu_adam=True),
    "zero0-fp16": Case(0, False, accumulation=2, clipping=0.3, fp16=True),
    "zero1-fp16": Case(1, False, accumulation=2, clipping=0.3, fp16=True),
    "zero3-fp16": Case(3, False, scheduler="cosine", fp16=True),
    "pipeline-zero1-bf16": Case(1, True, accumulation=2, clipping=0.3, pipeline=True),
    "pipeline-zero0-fp32": Case(0, False, accumulation=2, clipping=0.3, scheduler="cosine", pipeline=True),
    # The last of its launch: DeepSpeed builds no other engine in a process after a tensor-parallel one.
    "tensor-parallel-zero1-bf16": Case(1, True, accumulation=2, clipping=0.3, tensor_parallel=True),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        h = h + self.mix(h.transpose(1, 2)).transpose(1, 2)
        return x + self.dropout(self.contract(torch.nn.functional.gelu(self.expand(h))))


class First(nn.Module):
    """Embeds tokens, with a frozen parameter and a buffer that every forward pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Parameter(torch.randn(LENGTH, WIDTH), requires_grad=False)
        self.register_buffer("drift", torch.zeros(()))
        self.register_buffer("derived", torch.ones(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.drift += 0.125
        return self.embed(tokens) + self.frozen * (1 + self.drift / 100)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def objective(logits: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, factor = labels
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
    return loss * factor.flatten()[0]


class Model(nn.Module):
    """About 25,000 parameters, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([First(), Block(), Block(), Last()])

    def forward(self, tokens: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        x = tokens
        for layer in self.layers:
            x = layer(x)
        return objective(x, (tokens, factor))


class PlainFusedAdam(FusedAdam):
    """DeepSpeed's fused AdamW without its compiled kernel: the same state, its step count a Python integer."""

    def __init__(self, groups: Any) -> None:
        torch.optim.Optimizer.__init__(self, groups, {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                denominator = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1 ** state["step"]))


def build(case: Case, seed: int, *, stages: int = 2, **changes: Any) -> Any:
    """``stages``: of a pipeline."""
    """An engine with parameters and generators from ``seed``; ``changes`` go to ``deepspeed.initialize``."""
    if case.fp16:  # torch's CPU kernels compute in fp16; DeepSpeed only does not offer it there
        get_accelerator().is_fp16_supported = lambda: True
        get_accelerator().supported_dtypes = lambda: [torch.float, torch.bfloat16, torch.float16]
    if case.cpu_adam and not os.environ.get("TESTS_COMPILED_CPU_ADAM"):
        cpu_adam.CPUAdamBuilder = PlainCPUAdam
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model: nn.Module
    if case.pipeline:
        layers = [LayerSpec(First), LayerSpec(Block), LayerSpec(Block), LayerSpec(Last)]
        model = PipelineModule(layers, num_stages=stages, loss_fn=objective, base_seed=seed)
    else:
        model = Model()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    arguments: dict[str, Any] = {"model": model, "model_parameters": groups, "config": case.config()}
    if case.scheduler == "cosine":
        arguments["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)
    if case.fused:
        arguments["optimizer"] = PlainFusedAdam(groups)
        del arguments["model_parameters"]
    engine, *_ = deepspeed.initialize(**{**arguments, **changes})
    if engine.zero_optimization_stage() == 3:
        clear_padding(engine)
    torch.manual_seed(seed + 100 * torch.distributed.get_rank())
    return engine


def clear_padding(engine: Any) -> None:
    """ZeRO-3 never initialises what fills up the last rank's partitions, so that two engines differ in it."""
    if torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
        return
    for parameters, flat in zip(
        engine.optimizer.fp16_groups, engine.optimizer.fp32_partitioned_groups_flat, strict=True
    ):
        stop = 0
        for parameter in parameters:
            stop += parameter.partition_numel()
            padding = parameter.padding_size()
            flat.data[stop - padding : stop] = 0
            parameter.ds_tensor.data[parameter.partition_numel() - padding :] = 0


def batches(engine: Any, *, poison: bool = False) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One iteration's data: of the engine's counter, the data-parallel rank, and Python's and NumPy's generators."""
    for micro in range(engine.gradient_accumulation_steps()):
        data = torch.Generator().manual_seed(10_000 * engine.global_steps + 10 * micro + shard_of_data(engine))
        tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=data)
        factor = 0.5 + random.random() + float(np.random.rand())
        yield tokens, torch.tensor([[float("nan") if poison else factor]] * 2)


def shard_of_data(engine: Any) -> int:
    return 0 if isinstance(engine, PipelineEngine) or engine.autotp_size() > 1 else torch.distributed.get_rank()


def iterate(engine: Any, *, poison: bool = False) -> list[float]:
    """One iteration; the losses of its micro-batches (under a pipeline their mean)."""
    if isinstance(engine, PipelineEngine):
        data = ((tokens, (tokens, factor)) for tokens, factor in batches(engine, poison=poison))
        return [engine.train_batch(data_iter=data).item()]
    losses = []
    for tokens, factor in batches(engine, poison=poison):
        loss = engine(tokens, factor)
        engine.backward(loss)
        losses.append(loss.item())
        if engine.managed_gradient_accumulation():
            engine.step()
    if not engine.managed_gradient_accumulation():
        engine.step()
    return losses


def cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return {key: cloned(each) for key, each in value.items()} if isinstance(value, dict) else value


@dataclass
class Recorder:
    """What an integration does with the provider: gradients in pre-hooks, the rest when an iteration is complete."""

    provider: DeepSpeedProvider
    gradients: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    hyperparameters: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    host: dict[int, dict[str, Any]] = field(default_factory=dict)
    buffers: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    """The dtypes in which records would store the gradients."""
    calls: int = 0
    _visited: set[str] = field(default_factory=set)

    def attach(self) -> None:
        self.provider.optimizer.register_step_pre_hook(self.before)
        self.provider.optimizer.register_step_post_hook(self.after)

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.provider.replaying:
            return
        self.calls += 1
        self._visited |= self.provider.visited_in_hook(optimizer)
        gradients = self.provider.gradients_in_hook(optimizer)
        self.gradients.setdefault(self.provider.version, {}).update(cloned(gradients))
        gathering = DifferentialStream(self.provider, "exact", 1).gathered
        assert gathering is not None
        put = gathering.put(gradients, ShardWriter(memoryview(bytearray(1 << 20)), 1 << 16), self.provider.version)
        assert put is not None
        self.stored |= {put.stored[name] for name, gradient in gradients.items() if gradient.count_nonzero()}

    def after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.provider.replaying or self._visited != self.provider.expected():
            return
        self._visited = set()
        version = self.provider.version
        self.hyperparameters[version] = self.provider.hyperparameters()
        self.host[version] = self.provider.host_state()
        self.buffers[version] = cloned(dict(self.provider.buffers()))
        if version == BASE:
            self.base = snapshot(self.provider)


def snapshot(provider: DeepSpeedProvider) -> dict[str, Any]:
    return {
        "masters": cloned(dict(provider.masters())),
        "optimizer_state": cloned(dict(provider.optimizer_state())),
        "extras": cloned(extras_of(provider)),
        "hyperparameters": provider.hyperparameters(),
    }


def full_parameters(engine: Any) -> dict[str, torch.Tensor]:
    """The module's parameters as the forward pass sees them."""
    parameters = dict(engine.module.named_parameters())
    if engine.zero_optimization_stage() < 3:
        return cloned(parameters)
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return cloned(parameters)


def differences(path: str, left: Any, right: Any) -> Iterable[str]:
    """Where two nested values are not equal bit for bit."""
    if isinstance(left, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape or not torch.equal(left, right):
            yield path
    elif isinstance(left, np.ndarray):
        if not np.array_equal(left, right):
            yield path
    elif isinstance(left, dict):
        if left.keys() != right.keys():
            yield f"{path}: keys {sorted(left.keys() ^ right.keys())}"
        for key in left.keys() & right.keys():
            yield from differences(f"{path}.{key}", left[key], right[key])
    elif isinstance(left, list | tuple):
        if len(left) != len(right):
            yield f"{path}: length"
        for index, pair in enumerate(zip(left, right, strict=False)):
            yield from differences(f"{path}[{index}]", *pair)
    elif left != right:
        yield f"{path}: {left!r} is not {right!r}"


@dataclass
class Outcome:
    losses: dict[int, list[float]]
    state: dict[str, Any]
    parameters: dict[str, torch.Tensor]
    host: dict[str, Any]


def train(engine: Any, provider: DeepSpeedProvider, until: int) -> Outcome:
    losses = {}
    while engine.global_steps < until:
        version = engine.global_steps + 1
        losses[version] = iterate(engine)
    return Outcome(losses, snapshot(provider), full_parameters(engine), provider.host_state())
