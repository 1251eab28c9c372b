"""What each rank of ``python -m benchmarks reshape`` runs, under torchrun: it saves, or it resumes on other ranks.

Arguments: ``save | resume``, a directory, the size in bytes, the number of pairs. Rank 0 prints a JSON object a line.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach

__all__ = ["main"]

STATE_BYTES = 12
"""Of a parameter: itself and two moments, in float32."""
WIDTH = 1022
"""No number of ranks divides it, and a rank's rows of a layer are a few blocks."""
CHUNK_BYTES = 16 << 20
SAVED_AT = 1

Resume = Callable[[torch.nn.Module, torch.optim.Optimizer, Path], Callable[[], None]]
"""Returns what ends it, which is not measured."""


def made(nbytes: int, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of about ``nbytes`` with its optimizer's state, sharded over all ranks, and no such state yet."""
    torch.manual_seed(seed)
    layers = max(1, round(nbytes / STATE_BYTES / (WIDTH * WIDTH)))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def hierarchy(directory: Path) -> Hierarchy:
    return Hierarchy.of("memory://reshape-{rank}", f"nvme://{directory}/tiercheck?survives=rack")


def save(directory: Path, nbytes: int) -> None:
    """One step, and then its state by both."""
    model, optimizer = made(nbytes, seed=1)
    config = CheckpointConfig(base_every=1, bases="capture", batch=1, deadline_s=120)
    checkpointer = attach(model, optimizer, hierarchy(directory), config=config)
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    checkpointer.end_iteration()
    checkpointer.close()
    weights, moments = get_state_dict(model, optimizer)
    both: dict[str, Any] = {"model": weights, "optim": moments}
    state_dict_saver.save(both, checkpoint_id=str(directory / "dcp"))
    told = digest(model, optimizer)
    if dist.get_rank() == 0:
        (directory / "digest").write_text(told)


def by_tiercheck(model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> Callable[[], None]:
    config = CheckpointConfig(base_every=1, bases="capture", batch=1, deadline_s=120)
    checkpointer = attach(model, optimizer, hierarchy(directory), config=config)
    assert checkpointer.recovery is not None
    assert (checkpointer.version, str(checkpointer.recovery.fidelity)) == (SAVED_AT, "exact"), (
        checkpointer.recovery.notes
    )
    return checkpointer.abort


def by_dcp(model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> Callable[[], None]:
    weights, moments = get_state_dict(model, optimizer)
    both: dict[str, Any] = {"model": weights, "optim": moments}
    state_dict_loader.load(both, checkpoint_id=str(directory / "dcp"))
    set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optim"])
    return lambda: None


def by_reading(model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> Callable[[], None]:
    """The ceiling: each rank reads its share of the bytes, and does nothing with them."""
    room = bytearray(CHUNK_BYTES)
    for number, (file, at) in enumerate(chunks(directory / "tiercheck")):
        if number % dist.get_world_size() == dist.get_rank():
            with file.open("rb", buffering=0) as opened:
                os.preadv(opened.fileno(), [room], at)
    return lambda: None


def chunks(directory: Path) -> Iterator[tuple[Path, int]]:
    for file in sorted(directory.rglob(f"base/{SAVED_AT:012}.safetensors")):
        yield from ((file, at) for at in range(0, file.stat().st_size, CHUNK_BYTES))


WAYS: dict[str, Resume] = {"tiercheck": by_tiercheck, "dcp": by_dcp, "reading": by_reading}


def resume(directory: Path, nbytes: int, pairs: int) -> None:
    """Each way once to warm up, and then in turns."""
    for number in range(pairs + 1):
        names = list(WAYS) if number % 2 else list(reversed(WAYS))
        for name in names:
            model, optimizer = made(nbytes, seed=2)
            seconds, peak, end = measured(WAYS[name], model, optimizer, directory)
            if number == 0 and name != "reading":
                same = digest(model, optimizer) == (directory / "digest").read_text()
                assert same, f"{name} has resumed another state"
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, (seconds, peak))
            end()
            if dist.get_rank() == 0 and number > 0:
                line = {
                    "pair": number,
                    "way": name,
                    "seconds": max(s for s, _ in told),
                    "peak": max(p for _, p in told),
                }
                print(json.dumps(line), flush=True)
            del model, optimizer, end
            gc.collect()


def measured(
    way: Resume, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path
) -> tuple[float, int, Callable[[], None]]:
    """Seconds until all ranks are done, and by how much this one's memory has grown at most."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    dist.barrier()
    began = time.perf_counter()
    end = way(model, optimizer, directory)
    dist.barrier()
    return time.perf_counter() - began, memory("VmHWM") - before, end


def memory(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of the whole parameters and moments. Collective."""
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        state = optimizer.state[parameter]
        sharded: list[Any] = [parameter, state["exp_avg"], state["exp_avg_sq"]]
        for each in sharded:
            found.update(each.full_tensor().detach().numpy().tobytes())
        found.update(f"{name} {float(state['step'])}".encode())
    return found.hexdigest()


def main() -> None:
    what, directory, nbytes, pairs = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    if what == "save":
        save(directory, nbytes)
    else:
        resume(directory, nbytes, pairs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
