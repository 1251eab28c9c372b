"""The same on a GPU: a GPT in bf16, whose steps are saved every time or not at all, in turns.

``--device cuda``. Two models of one shape are on the device. The host runs ahead of it, so that what is measured is a
block of steps, as the device sees them, without its first two: so the copies of steps before run beside all of them, as
in a long run. ``copy``: the ring's copies against ``cudaMemcpyAsync`` from the device to pinned memory; ``copy.tier``:
such a call into the first tier's memory.
"""

from __future__ import annotations

import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.figures import Figure, Measured, Unavailable
from benchmarks.pairs import Repetition, interleave, summarise, summarise_times
from benchmarks.report import progress
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.demo.training.model import GPT
from tiercheck.hierarchy import Hierarchy
from tiercheck.streams.device.cuda import device_of
from tiercheck.streams.gradients.staged import Ring, Sending
from tiercheck.tiers.shm.driver import ShmDriver
from tiercheck.tiers.shm.namespaces import remove_namespace

__all__ = ["CODECS", "COPIES", "SIZES", "Shape", "names", "need_gpu", "step_figure"]

LEAD_IN, MEASURED = 2, 10
"""Steps of a block."""
BASE_EVERY = MEASURED
"""So that there is one base in what is measured of a block. They are captured: what folds them takes processors, and
not the GPU."""
RATIO_MAX = 1.01
SETTLED = 0.97
"""Of what a step took in the block before, if it settles."""
SETTLING_MIN, SETTLING_MAX = 5, 12
"""Blocks. Until the fifth base is made, some of the memory that the first tier rotates is new."""
COPY_MIN = 0.9
COPY_NBYTES = 1 << 30
CODECS = ("exact", "nf4")


@dataclass(frozen=True)
class Shape:
    width: int
    layers: int
    heads: int
    batch: int
    micro_batches: int
    """Of a step. Together they have 32,768 tokens: what one of 16 GPUs has of half a million, as GPT-3's models of 350
    million parameters were trained (Brown et al. 2020, table 2.1)."""
    sequence: int = 1024

    @property
    def tokens(self) -> int:
        return self.sequence * self.batch * self.micro_batches


SIZES: Mapping[str, Shape] = MappingProxyType(
    {"350M": Shape(1024, 28, 16, batch=32, micro_batches=1), "1B": Shape(2048, 20, 16, batch=16, micro_batches=2)}
)


def need_gpu() -> str:
    """The GPU's name. Errors: ``Unavailable``."""
    if not torch.cuda.is_available():
        why = "this torch is built for CPUs" if torch.version.cuda is None else "torch finds none"
        raise Unavailable(f"--device cuda needs a GPU, and {why}")
    return torch.cuda.get_device_name()


class Training(ABC):
    """Its batches are drawn on the device; what they hold does not matter."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(1)
        sizes = {"width": shape.width, "layers": shape.layers, "heads": shape.heads, "sequence": shape.sequence}
        with torch.device("cuda"):  # where a billion numbers are drawn at once
            self.model: torch.nn.Module = GPT(**sizes, dropout=0.0)
        self._batches = torch.randint(256, (4, shape.micro_batches, shape.batch, shape.sequence), device="cuda")

    @abstractmethod
    def attach(self, hierarchy: Hierarchy, config: CheckpointConfig) -> Checkpointer: ...
    @abstractmethod
    def step(self, batches: torch.Tensor) -> None:
        """``batches``: the micro-batches of one step."""

    def steps(self, count: int, checkpointer: Checkpointer | None) -> None:
        for at in range(count):
            self.step(self._batches[at % 4])
            if checkpointer is not None:
                checkpointer.end_iteration()

    def block(self, checkpointer: Checkpointer | None) -> float:
        """Seconds a step that is measured."""
        event: Any = torch.cuda.Event
        begun, ended = (event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.steps(LEAD_IN, checkpointer)
        begun.record()
        self.steps(MEASURED, checkpointer)
        ended.record()
        torch.cuda.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3 / MEASURED


class TorchTraining(Training):
    """All of it in bf16, by torch's fused AdamW."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.model.to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def attach(self, hierarchy: Hierarchy, config: CheckpointConfig) -> Checkpointer:
        from tiercheck.integrations.torch import attach

        return attach(self.model, self.optimizer, hierarchy, config=config)

    def step(self, batches: torch.Tensor) -> None:
        for batch in batches:
            self.model(batch, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class ZeroTraining(Training):
    """DeepSpeed's ZeRO-1 in bf16 with fp32 masters, by torch's fused AdamW: a rank by itself."""

    def __init__(self, shape: Shape) -> None:
        import deepspeed

        super().__init__(shape)
        if not torch.distributed.is_initialized():
            os.environ.setdefault("LOCAL_RANK", "0")  # which DeepSpeed asks for
            # It is documented, and torch's own list of names leaves it out.
            store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
            torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=store)
        optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}}
        config = {
            "train_micro_batch_size_per_gpu": shape.batch,
            "gradient_accumulation_steps": shape.micro_batches,
            "steps_per_print": 10**9,
            "optimizer": optimizer,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_scatter": True},
        }
        parameters = self.model.parameters()
        self.engine, *_ = deepspeed.initialize(model=self.model, model_parameters=parameters, config=config)

    def attach(self, hierarchy: Hierarchy, config: CheckpointConfig) -> Checkpointer:
        from tiercheck.integrations.deepspeed import attach

        return attach(self.engine, hierarchy, config=config)

    def step(self, batches: torch.Tensor) -> None:
        for batch in batches:
            self.engine.backward(self.engine(batch, batch))
            self.engine.step()


FRAMEWORKS: Mapping[str, type[Training]] = MappingProxyType({"torch": TorchTraining, "zero1": ZeroTraining})


async def step_figure(framework: str, size: str, codec: str, pairs: int, memory: int) -> tuple[Figure[Any], Measured]:
    """``memory``: of the first tier, in bytes. Errors: ``Unavailable``; those of attaching."""
    gpu = need_gpu()
    try:
        saved, plain = (FRAMEWORKS[framework](SIZES[size]) for _ in range(2))
    except ImportError as error:
        raise Unavailable(f"DeepSpeed cannot be imported ({error})") from None
    name = f"benchmark-{uuid.uuid4().hex[:8]}"
    config = CheckpointConfig(base_every=BASE_EVERY, bases="capture", codec=codec)
    checkpointer = saved.attach(Hierarchy.of(f"shm://{name}?size={memory}"), config)
    try:

        async def with_saving() -> float:
            seconds = saved.block(checkpointer)
            checkpointer.flush()  # what is still on its way must not slow the other one down
            return seconds

        async def without() -> float:
            return plain.block(None)

        await settle(with_saving)
        found = await interleave(with_saving, without, pairs=pairs, warmups=1, progress=told)
        stats = checkpointer.stats
    finally:
        checkpointer.abort()
        remove_namespace(name)
    parameters = sum(each.numel() for each in saved.model.parameters())
    details: dict[str, Any] = {
        "ratios": [round(pair.subject_s / pair.ceiling_s, 4) for pair in found],
        "parameters": parameters,
        "tokens a step": SIZES[size].tokens,
        "base_every": BASE_EVERY,
        "stall a step": stats.differential_stall_s / max(1, stats.differentials),
        "stall a base": stats.base_stall_s / max(1, stats.bases),
        "bytes a step": stats.captured_bytes // max(1, stats.differentials),
    }
    meaning = (
        f"a step of {parameters:,} bf16 parameters under {framework} that is saved by {codec}, against one that is not"
    )
    figure: Figure[Any] = Figure(f"cuda.step.{framework}.{size}.{codec}", meaning, goal=RATIO_MAX, at_most=True)
    return figure, Measured(summarise_times(found), "s", gpu, 2 * parameters, details)


async def settle(with_saving: Repetition) -> None:
    """Until all memory of the first tier is ready, and page-locked, each block takes less than the one before."""
    before = await with_saving()
    for block in range(SETTLING_MAX):
        now = await with_saving()
        progress(f"block {block + 2}: {now * 1e3:.1f} ms a step")
        if now > SETTLED * before and block + 2 >= SETTLING_MIN:
            return
        before = now


def told(done: int, total: int) -> None:
    progress(f"pair {done} of {total}")


async def copy_figure(pairs: int) -> tuple[Figure[Any], Measured]:
    """Errors: ``Unavailable``."""
    gpu = need_gpu()
    source = torch.zeros(COPY_NBYTES, dtype=torch.uint8, device="cuda")
    target = torch.zeros(COPY_NBYTES, dtype=torch.uint8, pin_memory=True)
    device = device_of([source])
    assert device is not None
    ring = Ring(device, 512 << 20, COPY_NBYTES)

    sending = Sending(ring.route_to_host([source]), [source])

    def ours() -> None:
        ring.begin()
        ring.send(sending, target).land()

    found = await interleave(repeated(ours), repeated(lambda: waited(target, source)), pairs=pairs, warmups=2)
    meaning = "gradients by way of the ring, against one cudaMemcpyAsync to pinned memory"
    figure: Figure[Any] = Figure("cuda.copy/cudaMemcpyAsync", meaning, goal=COPY_MIN)
    return figure, Measured(summarise(found, COPY_NBYTES), "bytes/s", gpu, COPY_NBYTES)


async def tier_copy_figure(pairs: int) -> tuple[Figure[Any], Measured]:
    """Errors: ``Unavailable``; those of the first tier."""
    gpu = need_gpu()
    source = torch.zeros(COPY_NBYTES, dtype=torch.uint8, device="cuda")
    allocated = torch.zeros(COPY_NBYTES, dtype=torch.uint8, pin_memory=True)
    name = f"benchmark-{uuid.uuid4().hex[:8]}"
    try:
        async with ShmDriver(name, size=4 * COPY_NBYTES, pin="on") as driver:
            await driver.prepare_reservations([(COPY_NBYTES, 1)])
            reservation = await driver.reserve("copied", COPY_NBYTES)
            shared = torch.frombuffer(reservation.buffer, dtype=torch.uint8)[:COPY_NBYTES]
            found = await interleave(
                repeated(lambda: waited(shared, source)), repeated(lambda: waited(allocated, source)), pairs=pairs
            )
            await reservation.drop()
    finally:
        remove_namespace(name)
    meaning = "cudaMemcpyAsync to pinned memory of the first tier, against one to what CUDA has allocated"
    figure: Figure[Any] = Figure("cuda.copy.tier/cudaMemcpyAsync", meaning, goal=COPY_MIN)
    return figure, Measured(summarise(found, COPY_NBYTES), "bytes/s", gpu, COPY_NBYTES)


def waited(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source, non_blocking=True)
    torch.cuda.synchronize()


def repeated(work: Callable[[], None]) -> Repetition:
    async def repetition() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return repetition


def names(sizes: Sequence[str]) -> list[str]:
    steps = (f"cuda.step.{of}.{size}.{codec}" for size in sizes for of in FRAMEWORKS for codec in CODECS)
    return [*steps, *COPIES]


COPIES: Mapping[str, Callable[[int], Coroutine[Any, Any, tuple[Figure[Any], Measured]]]] = MappingProxyType(
    {"cuda.copy/cudaMemcpyAsync": copy_figure, "cuda.copy.tier/cudaMemcpyAsync": tier_copy_figure}
)
"""By name, what measures copies."""
