"""What each rank of ``test_ddp_compressed`` runs: its arguments are a directory, and the checks.

Writes ``DIRECTORY/r{rank}.json``: by check the list of what did not hold.
"""

from __future__ import annotations

import json
import sys
import traceback
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel

from tests.forks import join
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError, Mismatch
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import Compression, attach, compressed_all_reduce
from tiercheck.tiers.shm.namespaces import remove_namespace
from tiercheck.types import Fidelity

BASE_EVERY, FAILED_AT, LAST = 4, 7, 10


@dataclass
class Run:
    """A model under DDP. ``hook``: the codec of the all-reduce; ``saved``: whether its residuals are saved, too."""

    codec: str
    trains: bool = False
    hook: str | None = None
    saved: bool = False
    losses: dict[int, str] = field(default_factory=dict)
    widest: float = 0.0
    """The largest share of elements of a gradient that were not zero when the optimizer stepped."""

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        network = torch.nn.Sequential(
            torch.nn.Linear(16, 200), torch.nn.GELU(), torch.nn.Linear(200, 100), torch.nn.Dropout(0.2)
        )
        torch.manual_seed(2 + dist.get_rank())
        # Small buckets: several of them, which DDP makes anew after the first backward pass.
        self.model = DistributedDataParallel(network, bucket_cap_mb=0.02)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.compression = None
        if self.hook:
            self.compression = Compression(self.model, codec_name=self.hook)
            self.model.register_comm_hook(self.compression, compressed_all_reduce)

    def attach(self, hierarchy: Hierarchy) -> Checkpointer:
        config = CheckpointConfig(
            base_every=BASE_EVERY,
            batch=2,
            deadline_s=60,
            bases="capture",
            codec=self.codec,
            train_on_compressed=self.trains,
        )
        stateful = {"compression": self.compression} if self.saved else None
        checkpointer = attach(self.model, self.optimizer, hierarchy, stateful=stateful, config=config)
        self.end_iteration = checkpointer.end_iteration
        self.optimizer.register_step_post_hook(self.look)
        return checkpointer

    def look(self, *_: Any) -> None:
        for parameter in self.model.parameters():
            if parameter.numel() > 1000:
                self.widest = max(self.widest, float((parameter.grad != 0).float().mean()))

    def train(self, first: int, last: int) -> None:
        for version in range(first + 1, last + 1):
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * version + dist.get_rank()))
            loss = self.model(batch).pow(2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
            self.optimizer.step()
            self.end_iteration()
            self.losses[version] = loss.item().hex()

    def state(self) -> str:
        tensors = [parameter.detach() for parameter in self.model.parameters()]
        for state in self.optimizer.state.values():
            tensors += [state["exp_avg"], state["exp_avg_sq"]]
        return xxhash.xxh3_128_hexdigest(b"".join(each.numpy().tobytes() for each in tensors))


def check(directory: Path, check_name: str, sparse: bool, **options: Any) -> Iterable[str]:
    """Fail after FAILED_AT versions, resume, go on; compare with a run that never failed."""
    name = [f"test-ddp-{uuid.uuid4().hex[:12]}"]
    dist.broadcast_object_list(name)
    namespaces: list[str] = []

    def tiers(which: str) -> Hierarchy:
        namespaces.append(f"{name[0]}-{which}-{dist.get_rank()}")
        return Hierarchy.of(
            f"shm://{name[0]}-{which}-{{rank}}?size=64MiB", f"nvme://{directory}/{check_name}-{which}?survives=rack"
        )

    reference = Run(**options)
    checkpointer = reference.attach(tiers("never"))
    reference.train(0, FAILED_AT)
    at_failure = reference.state()
    reference.train(FAILED_AT, LAST)
    checkpointer.close()
    if sparse and reference.widest > 0.013 * (dist.get_world_size() if reference.hook else 1):
        yield f"the optimizer saw gradients of which {reference.widest:.1%} are not zero"

    hierarchy = tiers("failing")
    failing = Run(**options)
    checkpointer = failing.attach(hierarchy)
    failing.train(0, FAILED_AT)
    checkpointer.abort()
    dist.barrier()
    resumed = Run(**options)
    checkpointer = resumed.attach(hierarchy)
    recovery = checkpointer.recovery
    if recovery is None or (recovery.point.anchor, recovery.version) != (BASE_EVERY, FAILED_AT):
        yield f"recovered {recovery}, not {BASE_EVERY} + {FAILED_AT - BASE_EVERY}"
    else:
        loses = "+feedback" in options.get("hook", "") and not options.get("saved")  # the hook's residuals
        if recovery.fidelity is not (Fidelity.APPROXIMATE if loses else Fidelity.EXACT):
            yield f"the recovery is {recovery.fidelity}: {recovery.notes}"
    if resumed.state() != at_failure:
        yield "the restored state is not the one that was"
    resumed.train(checkpointer.version, LAST)
    checkpointer.close()
    feedback = "+feedback" in (options.get("hook") or options["codec"])
    if (options.get("saved") or not feedback) and {**failing.losses, **resumed.losses} != reference.losses:
        yield "the losses are not those of the uninterrupted run"
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, (reference.state(), resumed.state()))
    if len(set(states)) != 1:
        yield f"the ranks' parameters differ: {states}"
    for each in namespaces:
        remove_namespace(each)


def sums_in_the_order_of_the_ranks() -> Iterable[str]:
    """The mean is that of what each rank has sent, which is its gradient but for the residual, in fp32 and in bf16."""
    for dtype in (torch.float32, torch.bfloat16):
        for codec in ("int8", "sparse+feedback"):
            torch.manual_seed(1)
            model = DistributedDataParallel(torch.nn.Linear(300, 200, bias=False).to(dtype))
            compression = Compression(model, codec_name=codec)
            model.register_comm_hook(compression, compressed_all_reduce)
            given = torch.randn(200, 300, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
            (model(torch.eye(300, dtype=dtype)) * given.t()).sum().backward()
            gradient = model.module.weight.grad
            residual = compression.residual("weight")
            sent = given.float() if residual is None else given.float() - torch.from_numpy(residual).view_as(given)
            gathered = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, sent.contiguous())
            error = (sum(gathered) / len(gathered) - gradient.float()).abs().max().item()
            exact = residual is not None and dtype is torch.float32
            if error > (2e-6 if exact else 0.03) or gradient.dtype is not dtype:
                yield f"{codec} of {dtype} is off by {error}"
            digests: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(digests, xxhash.xxh3_128_hexdigest(gradient.float().numpy().tobytes()))
            if len(set(digests)) != 1:
                yield f"{codec} of {dtype}: the ranks got {digests}"


def refusals() -> Iterable[str]:
    model = DistributedDataParallel(torch.nn.Linear(30, 20))
    for error, call in (
        (ConfigurationError, lambda: Compression(model, codec_name="exact")),
        (ConfigurationError, lambda: Compression(model).name_of(torch.zeros(3))),
        (Mismatch, lambda: Compression(model).load_state_dict({"residuals": {"weight": torch.zeros(3)}, "scale": 1.0})),
        (Mismatch, lambda: Compression(model).load_state_dict({"weight": torch.zeros(3)})),
    ):
        try:
            call()
        except error:
            continue
        yield f"no {error.__name__}"
    compression = Compression(model)
    residuals = {"weight": torch.ones(600), "bias": torch.zeros(20)}
    compression.load_state_dict({"residuals": residuals, "scale": 1.0})
    if not compression.residual("weight").all() or compression.residual("bias").any():
        yield "the residuals were not loaded"


class LossScale:
    """A scaler, as far as a compression asks it."""

    def get_scale(self) -> float:
        return self.scale

    scale = 1.0


def residuals_under_a_loss_scale() -> Iterable[str]:
    """All of a gradient is sent or left over, at whatever scales it came, also after a restart in between."""
    scaler = LossScale()
    model = DistributedDataParallel(torch.nn.Linear(300, 200, bias=False))
    holder = {"now": Compression(model, scaler=scaler)}
    model.register_comm_hook(None, lambda _, bucket: compressed_all_reduce(holder["now"], bucket))
    given = torch.randn(200, 300, generator=torch.Generator().manual_seed(3))
    sent = torch.zeros_like(given)
    scales = [65536.0] * 4 + [1024.0] * 4 + [2048.0] * 4
    for turn, scale in enumerate(scales):
        if turn == 6:
            state = holder["now"].state_dict()
            holder["now"] = Compression(model, scaler=scaler)
            holder["now"].load_state_dict(state)
        scaler.scale = scale
        model.zero_grad()
        ((model(torch.eye(300)) * given.t()).sum() * scale).backward()
        sent += model.module.weight.grad / scale
    left = torch.from_numpy(holder["now"].residual("weight")).view_as(given) / scales[-1]
    error = (sent + left - len(scales) * given).abs().max().item()
    if error > 1e-4:
        yield f"what was sent and what is left over differ from the gradients by {error}"


def checks(directory: Path) -> dict[str, Callable[[], Iterable[str]]]:
    runs = {
        "hook-of-the-step": {"codec": "sparse", "trains": True},
        "hook-of-the-step-with-feedback": {"codec": "sparse+feedback", "trains": True},
        "all-reduce": {"codec": "nonzero", "hook": "sparse"},
        "all-reduce-with-feedback": {"codec": "nonzero", "hook": "sparse+feedback"},
        "all-reduce-with-feedback-saved": {"codec": "nonzero", "hook": "sparse+feedback", "saved": True},
    }
    return {
        "sums": sums_in_the_order_of_the_ranks,
        "refusals": refusals,
        "loss-scale": residuals_under_a_loss_scale,
        **{name: lambda name=name, run=run: check(directory, name, True, **run) for name, run in runs.items()},
        "all-reduce-int8": lambda: check(directory, "all-reduce-int8", False, codec="exact", hook="int8"),
    }


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    join()
    known, results = checks(directory), dict[str, list[str]]()
    assert set(names) <= set(known), f"there are {set(known)}"
    for name in names:
        try:
            results[name] = list(known[name]())
        except Exception:  # the other ranks may wait for this one in a collective: end all
            results[name] = [traceback.format_exc()]
            raise
        finally:
            (directory / f"r{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
