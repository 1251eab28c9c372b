"""What each process of ``python -m benchmarks recover`` runs: a job that saves a state, or one that restores it.

Arguments: ``save | recover``, a JSON object (:class:`Order`). A recovery prints a JSON object. It is timed in a process
that has its model and an optimizer that has not stepped, as after a failure: memory and mappings are new to it.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import torch
import xxhash

from benchmarks.ceilings.buffers import empty_buffer, filled_buffer
from benchmarks.ceilings.direct import DirectFile, Shape
from benchmarks.tiers.nvme import drop_from_cache
from benchmarks.waking import WAKE, wake
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.recovery.ranks import Ranks
from tiercheck.recovery.reading import reader
from tiercheck.recovery.restorer import Restorer
from tiercheck.runtime.front import ThreadScheduler, run
from tiercheck.runtime.group import BlockingGroup, SingleProcess
from tiercheck.streams.tensors import tensor_state
from tiercheck.streams.tensors.tensor_state import TensorState

__all__ = ["RAW", "Order", "layers_of"]

WIDTH = 1024
STATE_BYTES = 12
"""Of a parameter: itself and two moments, in float32."""
ROWS = 4
DEADLINE_S = 120.0
WINDOW_BYTES = 256 << 20
"""Of each ceiling buffer: more than any cache holds. Longer states pass through it several times."""
CHUNK_BYTES = 4 << 20
RAW = "raw"
"""The file that is read past the page cache, in the job's directory."""


@dataclass(frozen=True)
class Order:
    """What one process does."""

    urls: tuple[str, ...]
    nbytes: int
    width: int
    replayed: int
    """Differentials after the base."""
    threads: int
    directory: str
    shape: tuple[int, int] | None = None
    """Of raw direct reads; ``None``: the ceiling is memory's."""
    ceiling_first: bool = False


def layers_of(nbytes: int, width: int) -> int:
    return max(1, round(nbytes / STATE_BYTES / width**2))


def made(order: Order, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = layers_of(order.nbytes, order.width)
    model = torch.nn.Sequential(*(torch.nn.Linear(order.width, order.width, bias=False) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def save(order: Order) -> None:
    """A base whose optimizer has stepped, and the differentials after it."""
    model, optimizer = made(order, seed=1)
    rows = torch.randn(ROWS, order.width)
    base = order.replayed + 1  # the next one would be due after all that is replayed
    config = CheckpointConfig(base_every=base, bases="capture", batch=base, deadline_s=DEADLINE_S)
    checkpointer = attach(model, optimizer, Hierarchy.of(*order.urls), config=config)
    for _ in range(base + order.replayed):
        optimizer.zero_grad(set_to_none=False)
        model(rows).square().mean().backward()
        optimizer.step()
        checkpointer.end_iteration()
    checkpointer.close()
    say(digest=digest(model, optimizer))


def recover(order: Order) -> None:
    model, optimizer = made(order, seed=2)
    provider = ModuleProvider(model, optimizer)
    scheduler = ThreadScheduler()
    ranks = Ranks(BlockingGroup(SingleProcess()), scheduler, DEADLINE_S)
    tiers = Hierarchy.of(*order.urls).open()
    run(ranks.call(tiers.opened(DEADLINE_S), "opening the tiers"))
    ceiling = direct_ceiling(order) if order.shape else memory_ceiling(order)
    drop(Path(order.directory))
    ceiling_s = [ceiling()] if order.ceiling_first else []
    state = TensorState(provider, CheckpointConfig(recovery_threads=order.threads))
    wake(min(WAKE * order.nbytes, psutil.virtual_memory().available // 2))
    with Phases() as phases:
        begun = time.perf_counter()
        restored = run(Restorer(tiers, state, ranks).restore())
        recovery_s = time.perf_counter() - begun
    if restored.recovery is None or restored.recovery.replayed != order.replayed:
        raise RuntimeError(f"something else was restored: {restored.recovery}")
    ceiling_s = ceiling_s or [ceiling()]
    say(
        recovery_s=recovery_s,
        ceiling_s=ceiling_s[0],
        phases=phases.seconds(begun),
        digest=digest(model, optimizer),
        read_bytes=restored.recovery.read_bytes,
    )
    run(ranks.call(tiers.__aexit__(None, None, None), "closing the tiers"))
    run(scheduler.close())


class Phases:
    """Seconds of the parts of a recovery, as they are called in this context. Some go on side by side."""

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._undo = ExitStack()

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def __enter__(self) -> Self:
        for owner, name, phase in (
            (reader.Reader, "verify", "read and verify"),
            (reader, "verified", "verify"),
            (tensor_state.TensorReader, "rebuild", "load and replay"),
            (tensor_state, "placed", "copy"),
            (ModuleProvider, "load", "load"),
            (tensor_state, "replay_runs", "replay"),
        ):
            self._watch(owner, name, phase)
        return self

    def _watch(self, owner: Any, name: str, phase: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        async def awaited(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return await original(*args, **options)
            finally:
                self._spans[phase].append((begun, time.perf_counter()))

        def called(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return original(*args, **options)
            finally:
                self._spans[phase].append((begun, time.perf_counter()))

        setattr(owner, name, awaited if inspect.iscoroutinefunction(original) else called)
        self._undo.callback(setattr, owner, name, original)

    def seconds(self, begun: float) -> dict[str, float]:
        found = {phase: sum(stop - start for start, stop in spans) for phase, spans in self._spans.items()}
        found["find"] = min(start for spans in self._spans.values() for start, _ in spans) - begun
        return {phase: round(taken, 5) for phase, taken in found.items()}


def memory_ceiling(order: Order) -> Callable[[], float]:
    """One memcpy and one XXH3 of as many bytes, by so many threads, in memory that is warm."""
    window = min(order.nbytes, WINDOW_BYTES)
    buffers = filled_buffer(window), empty_buffer(window)
    starts = [(at % window, min(CHUNK_BYTES, order.nbytes - at)) for at in range(0, order.nbytes, CHUNK_BYTES)]
    spans = [slice(at, min(at + nbytes, window)) for at, nbytes in starts]
    pool = ThreadPoolExecutor(order.threads)

    def copy(span: slice) -> None:
        source, target = (ctypes.addressof(ctypes.c_char.from_buffer(each, span.start)) for each in buffers)
        ctypes.memmove(target, source, span.stop - span.start)

    def shared(work: Callable[[slice], object]) -> None:
        def work_all(mine: Sequence[slice]) -> None:
            for span in mine:
                work(span)

        list(pool.map(work_all, [spans[number :: order.threads] for number in range(order.threads)]))

    def measure() -> float:
        begun = time.perf_counter()
        shared(copy)
        shared(lambda span: xxhash.xxh3_64_digest(buffers[0][span]))
        return time.perf_counter() - begun

    return measure


def direct_ceiling(order: Order) -> Callable[[], float]:
    """Raw reads past the page cache, of a file of as many bytes in the same file system."""
    assert order.shape is not None
    path = Path(order.directory, RAW)
    raw = DirectFile(path.parent, empty_buffer(path.stat().st_size))
    raw.read_shape = Shape(*order.shape)
    return lambda: asyncio.run(raw.read())


def drop(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with suppress(OSError):
                drop_from_cache(path)


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = xxhash.xxh3_128()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"], state["step"]):
            found.update(tensor.numpy().reshape(-1).data)
    return str(found.hexdigest())


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    what, given = sys.argv[1:]
    fields = json.loads(given)
    shape = fields["shape"] and tuple(fields["shape"])
    order = Order(**{**fields, "urls": tuple(fields["urls"]), "shape": shape})
    torch.set_num_threads(order.threads)
    {"save": save, "recover": recover}[what](order)
    sys.stdout.flush()
    os._exit(0)  # gigabytes need not be given back one by one


if __name__ == "__main__":
    main()
