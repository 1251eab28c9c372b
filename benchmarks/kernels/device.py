"""The kernels on a GPU, against what the device copies: ratios are of bytes moved, read and written ones together."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.figures import Figure, Measured, Unavailable
from benchmarks.kernels.blocks import relative_error
from benchmarks.kernels.gradients import RATIO, harvest, repeated
from benchmarks.kernels.replay import exactly, start_of, steps_of
from benchmarks.kernels.settings import KernelSettings, compared
from benchmarks.pairs import Repetition
from benchmarks.training import copied, replay_of
from tiercheck import kernels

__all__ = ["FIGURES"]

CAPACITY = 1.25
COPY_BYTES = 256 << 20
LAUNCHES = 10
"""Of which one repetition is made: a launch alone is short."""


def cupy_with_device() -> Any:
    """CuPy. Errors: ``Unavailable`` where there is no GPU for it."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        raise Unavailable(f"CuPy cannot be imported ({error})") from None
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise Unavailable(f"there is no GPU here ({error})") from None
    if count == 0:
        raise Unavailable("there is no GPU here")
    return cupy


def device_text(cupy: Any) -> str:
    return str(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode())


def on_stream(cupy: Any, stream: Any, work: Callable[[], object], share: float = 1.0) -> Repetition:
    """Seconds that ``work`` takes on the device, by its own clock; times ``share``."""
    begun, ended = cupy.cuda.Event(), cupy.cuda.Event()

    async def repetition() -> float:
        begun.record(stream)
        for _ in range(LAUNCHES):
            work()
        ended.record(stream)
        ended.synchronize()
        seconds: float = cupy.cuda.get_elapsed_time(begun, ended) / 1e3 / LAUNCHES
        return seconds * share

    return repetition


async def against_copy(
    settings: KernelSettings, cupy: Any, stream: Any, work: Callable[[], object], nbytes: int, **details: Any
) -> Measured:
    """``work``, which moves ``nbytes``, against as many bytes of a copy on the device."""
    with stream:
        source, target = (cupy.zeros(COPY_BYTES, cupy.uint8) for _ in range(2))
        subject = on_stream(cupy, stream, work)
        ceiling = on_stream(cupy, stream, lambda: cupy.copyto(target, source), nbytes / (2 * COPY_BYTES))
        return await compared(settings, subject, ceiling, nbytes, details, device=device_text(cupy))


async def compaction(settings: KernelSettings) -> Measured:
    cupy = cupy_with_device()
    from tiercheck.kernels import cuda

    gradient = repeated(harvest(settings.setup).gradient, settings.elements)
    least = kernels.select_threshold(gradient, RATIO, 0)
    stream = cuda.low_priority_stream()
    with stream:
        values, threshold = cupy.asarray(gradient), cupy.full(1, least, cupy.float32)
        room = math.ceil(CAPACITY * RATIO * values.size)
        indices, survivors = cupy.empty(room, cupy.uint32), cupy.empty(room, cupy.float32)
        count = cupy.empty(1, cupy.uint32)
        workspace = cupy.empty(cuda.compact_workspace(values.size), cupy.uint64)

        def work() -> None:
            cuda.compact_into(values, threshold, indices, survivors, count, workspace, stream=stream)

        work()
        wanted, _ = kernels.compact(gradient, least)
        kept = min(int(count[0]), room)
        if int(count[0]) != wanted.size or not np.array_equal(cupy.asnumpy(indices[:kept]), wanted[:kept]):
            raise RuntimeError("the device's compaction found other elements than the processor's")
    nbytes = values.nbytes + 8 * kept
    return await against_copy(settings, cupy, stream, work, nbytes, kept=round(kept / values.size, 5))


async def quantisation(settings: KernelSettings, *, name: str, decode: bool) -> Measured:
    cupy = cupy_with_device()
    from tiercheck.kernels import cuda

    gradient = repeated(harvest(settings.setup).gradient, settings.elements)
    blocks = -(-gradient.size // kernels.BLOCK)
    stream = cuda.low_priority_stream()
    with stream:
        values, out = cupy.asarray(gradient), cupy.empty(gradient.size, cupy.float32)
        scales = cupy.empty(blocks, cupy.float32)
        if name == "int8":
            codes = cupy.empty(gradient.size, cupy.int8)
            encoder, decoder = cuda.quantise_into, cuda.dequantise_into
        else:
            codes = cupy.empty(blocks * kernels.BLOCK // 2, cupy.uint8)
            encoder, decoder = cuda.quantise_nf4_into, cuda.dequantise_nf4_into

        def encode_() -> None:
            encoder(values, codes, scales, stream=stream)

        def decode_() -> None:
            decoder(codes, scales, out, stream=stream)

        encode_()
        decode_()
        error = relative_error(cupy.asnumpy(out), gradient)
    nbytes = values.nbytes + codes.nbytes + scales.nbytes
    work = decode_ if decode else encode_
    return await against_copy(settings, cupy, stream, work, nbytes, relative_error=error)


async def replay_as_torch(settings: KernelSettings, *, steps: int) -> Measured:
    """The candidate that torch's fused optimizer follows on this GPU. Errors: ``Unavailable`` if none does."""
    cupy = cupy_with_device()
    from tiercheck.errors import ConfigurationError
    from tiercheck.kernels import cuda
    from tiercheck.kernels.gpu_adam import ROUNDINGS
    from tiercheck.streams.optimizers.stand_in import find_stand_in

    options = steps_of(steps)
    groups = [{"lr": 1e-3, "betas": (options[0].beta1, options[0].beta2), "eps": 1e-8, "weight_decay": 0.1}]
    try:
        found = find_stand_in("torch.optim.adamw.AdamW", "fused", groups, "cuda")
    except ConfigurationError as error:
        raise Unavailable(str(error)) from None
    harvested, elements = harvest(settings.setup), settings.elements
    start = start_of(harvested, elements)
    stream = cuda.low_priority_stream()
    with stream:
        state = [cupy.asarray(array) for array in start]
        dense = harvested.dense
        gradients = [cupy.asarray(repeated(dense[n % len(dense)], elements)) for n in range(steps)]
        how: Any = {"rounding": ROUNDINGS[found.candidate], "powers": found.powers, "stream": stream}
        param, *moments = state

        def work() -> None:
            cuda.replay_gpu_adam(param, moments[0], moments[1], gradients, options, **how)

        work()
    nbytes = (6 + steps) * start[0].nbytes
    return await against_copy(
        settings, cupy, stream, work, nbytes, steps=steps, elements=elements, candidate=found.candidate
    )


async def replay(settings: KernelSettings, *, steps: int) -> Measured:
    """Checked against the processor's kernel, bit for bit."""
    cupy = cupy_with_device()
    from tiercheck.kernels import cuda

    found, elements = harvest(settings.setup), settings.elements
    start, options = start_of(found, elements), steps_of(steps)
    gradients = [repeated(found.dense[n % len(found.dense)], elements) for n in range(steps)]
    stream = cuda.low_priority_stream()
    with stream:
        value, first, second = (cupy.asarray(array) for array in start)
        on_device = [cupy.asarray(gradient) for gradient in gradients]

        def work() -> None:
            cuda.replay_fused_adam(value, first, second, on_device, options, contracted=True, stream=stream)

        work()
        reached = cupy.asnumpy(value), cupy.asnumpy(first), cupy.asnumpy(second)
    expected = copied(start)
    param, *moments = expected
    state = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
    replay_of("fused")(param, state, gradients, options, threads=settings.threads)
    exactly(reached, expected, start)
    nbytes = (6 + steps) * start[0].nbytes
    return await against_copy(settings, cupy, stream, work, nbytes, steps=steps, elements=elements)


FIGURES: tuple[Figure[KernelSettings], ...] = (
    Figure("gpu.compaction/copy", "the largest hundredth of a real gradient, on a GPU", compaction, 0.85),
    *(
        Figure(
            f"gpu.{name}{'.decode' if decode else ''}/copy",
            f"{name} on a GPU, {'decoded' if decode else 'encoded'}",
            partial(quantisation, name=name, decode=decode),
            0.8,
        )
        for name in ("int8", "nf4")
        for decode in (False, True)
    ),
    *(
        Figure(
            f"gpu.replay.dense.n{steps}/copy",
            f"{steps} steps of AdamW replayed in one pass on a GPU",
            partial(replay, steps=steps),
            0.8 if steps <= 5 else None,
        )
        for steps in (1, 2, 5, 10)
    ),
    *(
        Figure(
            f"gpu.replay.as_torch.n{steps}/copy",
            f"{steps} steps of torch's fused AdamW on this GPU, replayed there in one pass",
            partial(replay_as_torch, steps=steps),
            0.8,
        )
        for steps in (1, 2, 5)
    ),
)
