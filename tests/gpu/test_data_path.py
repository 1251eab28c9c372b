"""The trainer's data path on a real GPU: whole jobs whose loop runs on a stream of its own, killed and resumed."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.machine import need_torch_on_gpu

need_torch_on_gpu()

from tiercheck.checkpointer import Checkpointer  # noqa: E402
from tiercheck.config import CheckpointConfig  # noqa: E402
from tiercheck.errors import UnsupportedSetup  # noqa: E402
from tiercheck.format import container  # noqa: E402
from tiercheck.hierarchy import Hierarchy  # noqa: E402
from tiercheck.integrations.torch import attach  # noqa: E402
from tiercheck.keys import ShardKey  # noqa: E402
from tiercheck.streams.codecs import codec as codec_of  # noqa: E402
from tiercheck.streams.codecs import decode  # noqa: E402
from tiercheck.streams.gradients.encoder import scratch  # noqa: E402
from tiercheck.streams.records.base import read_base  # noqa: E402
from tiercheck.streams.records.differential import DifferentialStream  # noqa: E402
from tiercheck.streams.records.recorded import read_differentials  # noqa: E402
from tiercheck.streams.tensors.as_bytes import array_of, dtype_name, tensor_of  # noqa: E402
from tiercheck.tiers.shm.namespaces import remove_namespace  # noqa: E402
from tiercheck.types import Fidelity  # noqa: E402

pytestmark = pytest.mark.gpu

STEPS = 14
KILLED_AT = 9
WIDTH = 1024
CODECS = [
    "exact",
    "int8",
    "nf4",
    "onebit",
    "sparse",
    "sparse+feedback",
    "int8+feedback",
    "nf4+feedback",
    "onebit+feedback",
]
BUSY_CYCLES = 200_000_000
"""About a tenth of a second."""


@pytest.fixture
def shm() -> Iterator[str]:
    name = f"gpu-{uuid.uuid4().hex[:8]}"
    yield f"shm://{name}?size=2GiB"
    remove_namespace(name)


class Job:
    """Dropout, so that it matters what the device's generator draws; and frozen weights."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, scaler: bool = False, frozen: Sequence[int] = (0,), **options: Any
    ) -> None:
        """``frozen``: layers that are not trained."""
        torch.manual_seed(7)
        layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 64)]
        self.model = torch.nn.Sequential(torch.nn.Linear(64, WIDTH), torch.nn.GELU(), *layers).to("cuda", dtype)
        for layer in frozen:
            self.model[layer].requires_grad_(False)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3, **options)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30) if scaler else None
        self.stream = torch.cuda.Stream()
        self.checkpointer: Checkpointer | None = None
        self.losses: dict[int, torch.Tensor] = {}

    def attach(self, url: str, **config: Any) -> Checkpointer:
        settings = CheckpointConfig(bases="capture", **{"base_every": 4, "deadline_s": 60.0, **config})
        with torch.cuda.stream(self.stream):
            self.checkpointer = attach(
                self.model, self.optimizer, Hierarchy.of(url), scaler=self.scaler, config=settings
            )
        return self.checkpointer

    def step(self, version: int) -> None:
        dtype = next(self.model.parameters()).dtype
        batch = torch.randn(256, 64, generator=torch.Generator().manual_seed(version)).to("cuda", dtype)
        autocast: AbstractContextManager[Any] = nullcontext()
        if self.scaler is not None:
            autocast = torch.autocast("cuda", torch.float16)
        with autocast:
            loss = (self.model(batch) - batch).float().square().mean()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=version % 2 == 0)
        self.losses[version] = loss.detach()
        if self.checkpointer is not None:
            self.checkpointer.end_iteration()

    def run(self, first: int, last: int) -> None:
        with torch.cuda.stream(self.stream):
            for version in range(first, last + 1):
                self.step(version)

    def bits(self) -> bytes:
        torch.cuda.synchronize()
        state = [each for held in self.optimizer.state.values() for each in held.values()]
        tensors = [*self.model.parameters(), *state]
        return b"".join(
            each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in tensors
        )


@pytest.mark.parametrize(
    "options",
    [{}, {"fused": True}, {"dtype": torch.bfloat16}, {"dtype": torch.float16, "eps": 1e-4}, {"scaler": True}],
    ids=["foreach", "fused", "bf16", "fp16", "GradScaler"],
)
def test_a_loop_on_a_stream_of_its_own_is_killed_and_resumes_bit_for_bit(shm: str, options: dict[str, Any]) -> None:
    steps = STEPS + 10 * bool(options.get("scaler"))  # its first steps are skipped
    true = Job(**options)
    true.run(1, steps)
    killed = Job(**options)
    killed.attach(shm)
    killed.run(1, steps - 5)
    assert killed.checkpointer is not None
    killed.checkpointer.abort()
    resumed = Job(**options)
    checkpointer = resumed.attach(shm)
    recovery = checkpointer.recovery
    assert recovery is not None and recovery.fidelity is Fidelity.EXACT, recovery
    skipped = steps - 5 - checkpointer.version if options.get("scaler") else 0
    if not skipped:
        assert checkpointer.version >= steps - 5 - 2, "at most two records were on their way"
    resumed.run(checkpointer.version + 1 + skipped, steps)
    for version, loss in resumed.losses.items():
        assert torch.equal(loss, true.losses[version]), f"the loss of version {version}"
    assert resumed.bits() == true.bits()
    checkpointer.close()


def test_no_step_waits_for_the_device(shm: str) -> None:
    job = Job(fused=True)
    checkpointer = job.attach(shm, base_every=100)
    job.run(1, 3)
    checkpointer.flush()
    torch.cuda.synchronize()
    with torch.cuda.stream(job.stream):
        torch.cuda._sleep(BUSY_CYCLES)
        busy = torch.cuda.Event()
        busy.record()
        mode = torch.cuda.get_sync_debug_mode()
        batch = torch.zeros(256, 64, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            job.model(batch).square().mean().backward()
            job.optimizer.step()
            checkpointer.end_iteration()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        assert not busy.query(), "the device was not held up: the test shows nothing"
    checkpointer.close()


def encoded_on_host(text: str, value: torch.Tensor, seed: int, residual: np.ndarray[Any, Any] | None) -> torch.Tensor:
    parts: dict[str, Any] = {}

    def slot(suffix: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
        parts[suffix] = container.TensorEntry("part", dtype, shape, scratch(suffix, dtype, shape), "")
        memory: memoryview = parts[suffix].data
        return memory

    dtype = dtype_name(value, "a gradient")
    encoding = codec_of(text).encode(array_of(value), dtype, seed=seed, slot=slot, residual=residual)
    return tensor_of(decode(encoding.to_object(), parts), dtype)


def overwritten(gradients: dict[str, torch.Tensor]) -> None:
    for each in gradients.values():
        each.fill_(float("nan"))


def freed_and_used_again(gradients: dict[str, torch.Tensor]) -> None:
    sizes = [(each.shape, each.dtype) for each in gradients.values()]
    gradients.clear()
    for shape, dtype in sizes * 3:
        torch.full(shape, float("nan"), dtype=dtype, device="cuda")


@pytest.mark.parametrize("spoil", [overwritten, freed_and_used_again])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_a_record_holds_what_the_step_was_given(
    spoil: Callable[[dict[str, torch.Tensor]], None], codec: str, dtype: torch.dtype, pinned: bool
) -> None:
    from tiercheck.integrations.torch.module_provider import ModuleProvider

    job = Job(dtype)
    stream = DifferentialStream(ModuleProvider(job.model, job.optimizer), codec, 1, gpu_staging_bytes=1 << 20)
    fed_back = codec.endswith("+feedback")
    residuals = {
        name: np.zeros(each.numel(), np.float32) for name, each in stream.provider.masters().items() if fed_back
    }
    with torch.cuda.stream(job.stream):
        for version in range(1, 4):
            masters = stream.provider.masters()
            torch.cuda._sleep(BUSY_CYCLES // 10)
            gradients = {name: torch.randn_like(each) * (1 + 2.0**-12) for name, each in masters.items()}
            true = {name: each.clone() for name, each in gradients.items()}
            memory = torch.zeros(stream.nbytes_max, dtype=torch.uint8, pin_memory=pinned).numpy().data
            record = stream.begin(ShardKey.differential(1, version, version, 0), memory)
            record.add(gradients)
            spoil(gradients)
            close = record.ended(skipped=False)
            (found,) = read_differentials(container.parse(bytes(memory[: close()])), tier="test")
            for name, value in true.items():
                expected = encoded_on_host(codec, value.cpu(), version, residuals.get(name))
                assert torch.equal(found.gradient(name), expected), name


def test_a_base_is_of_the_moment_it_was_made() -> None:
    from tiercheck.integrations.torch.module_provider import ModuleProvider

    job = Job(fused=True, frozen=(2,))
    job.run(1, 2)
    stream = DifferentialStream(ModuleProvider(job.model, job.optimizer), "exact", 1)
    with torch.cuda.stream(job.stream):
        torch.cuda._sleep(BUSY_CYCLES)
        job.step(3)
        true = {name: each.clone() for name, each in stream.provider.masters().items()}
        capture = stream.base(ShardKey.base(1, 3, 0))
    memory = torch.zeros(capture.nbytes_max, dtype=torch.uint8, pin_memory=True).numpy().data
    constants = capture.constants
    assert constants is not None
    constants.copy(torch.zeros(constants.nbytes_max, dtype=torch.uint8, pin_memory=True).numpy().data)
    capture.copy(memory)  # on the default stream, which does not wait for the loop's
    with torch.cuda.stream(job.stream):
        assert not capture.let_change()
        job.step(4)
    capture.arrive()
    assert not capture.disturbed
    constants.finish()
    base = read_base(container.parse(bytes(memory[: capture.finish()])), tier="test", alone=True)
    for name, tensor in true.items():
        assert np.array_equal(array_of(base.masters[name]), array_of(tensor)), name


def test_a_step_that_is_captured_into_a_graph_is_refused(shm: str) -> None:
    job = Job(capturable=True)
    checkpointer = job.attach(shm)
    job.run(1, 3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedSetup, match="CUDA graph"), torch.cuda.graph(graph):
        job.optimizer.step()
    checkpointer.abort()
