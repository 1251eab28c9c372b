"""The loops. Each trains a small model as a user might, with one thing of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel

from benchmarks.lives.life import Life

__all__ = ["LOOPS", "Loop"]


@dataclass(frozen=True)
class Loop:
    run: Callable[[Life], None]
    ranks: int = 1


LOOPS: dict[str, Loop] = {}
"""By name."""


def loop(run: Callable[[Life], None]) -> Callable[[Life], None]:
    LOOPS[run.__name__.replace("_", "-")] = Loop(run)
    return run


def on_two_ranks(run: Callable[[Life], None]) -> Callable[[Life], None]:
    LOOPS[run.__name__.replace("_", "-")] = Loop(run, ranks=2)
    return run


def perceptron(*between: nn.Module, dropout: float = 0.1) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), *between, nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)
    )


def batch(version: int, rank: int = 0, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(version * 1000 + rank * 100 + part)
    return torch.randn(8, 8, generator=drawn), torch.randn(8, 4, generator=drawn)


def backward(loss: Any) -> None:
    """A backward pass; torch's method has no types."""
    loss.backward()


def mean_square(model: nn.Module, data: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(model(data), wanted)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain(
    life: Life,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss_of: Callable[[int], torch.Tensor] | None = None,
    step: Callable[[torch.Tensor, int], object] | None = None,
    behind_step: Callable[[int], object] = lambda version: None,
    keeps_gradients: bool = False,
    beside: Iterable[Any] = (),
    **options: Any,
) -> None:
    """The loop that everybody knows. By default the loss is that of the version's batch, and ``step`` is the backward
    pass and the optimizer's step. ``beside``, ``options``: as of :meth:`Life.attached`."""

    def usual_loss(version: int) -> torch.Tensor:
        return mean_square(model, *batch(version, life.rank))

    def usual_step(loss: torch.Tensor, version: int) -> None:
        backward(loss)
        optimizer.step()

    with life.attached(model, optimizer, beside=beside, **options) as checkpointer:
        for version in range(checkpointer.version + 1, life.versions + 1):
            loss = (loss_of or usual_loss)(version)
            (step or usual_step)(loss, version)
            optimizer.zero_grad(set_to_none=not keeps_gradients)
            behind_step(version)
            life.record(version, loss)
            checkpointer.end_iteration()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda held: torch.optim.SGD(held, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-fused": lambda held: torch.optim.SGD(held, lr=0.05, momentum=0.9, fused=True),
    "adam-amsgrad": lambda held: torch.optim.Adam(held, amsgrad=True, weight_decay=0.1),
    "adam-foreach": lambda held: torch.optim.Adam(held, foreach=True, maximize=True),
    "adamw-fused": lambda held: torch.optim.AdamW(held, fused=True),
    "adamw-tensor-lr": lambda held: torch.optim.AdamW(held, lr=torch.tensor(1e-3)),
    "adafactor": lambda held: torch.optim.Adafactor(held, lr=0.01),
    "nadam": lambda held: torch.optim.NAdam(held, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "asgd": lambda held: torch.optim.ASGD(held, t0=7, weight_decay=0.1),
    "adagrad": lambda held: torch.optim.Adagrad(held, lr_decay=0.01),
    "rmsprop": lambda held: torch.optim.RMSprop(held, centered=True, momentum=0.9),
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "onecycle": lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=1000),
    "sequential": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, total_iters=7), schedulers.CosineAnnealingLR(optimizer, 30)],
        milestones=[7],
    ),
    "warm-restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 5, 2),
    "plateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=1, factor=0.7),
    "multiplicative": lambda optimizer: schedulers.MultiplicativeLR(optimizer, lambda epoch: 0.99),
}


def with_optimizer(make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float32) -> Loop:
    def run(life: Life) -> None:
        model = perceptron().to(dtype)

        def loss_of(version: int) -> torch.Tensor:
            return mean_square(model, *(each.to(dtype) for each in batch(version)))

        plain(life, model, make(model.parameters()), loss_of=loss_of)

    return Loop(run)


def with_scheduler(make: Callable[[torch.optim.Optimizer], Any]) -> Loop:
    def run(life: Life) -> None:
        model = perceptron()
        optimizer = adamw(model)
        scheduler = make(optimizer)

        def step(loss: torch.Tensor, version: int) -> None:
            backward(loss)
            optimizer.step()
            scheduler.step(*([loss.item()] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))

        plain(life, model, optimizer, step=step, beside=[scheduler], scheduler=scheduler)

    return Loop(run)


LOOPS |= {f"optimizer-{name}": with_optimizer(make) for name, make in OPTIMIZERS.items()}
LOOPS |= {f"bf16-{name}": with_optimizer(OPTIMIZERS[name], torch.bfloat16) for name in ("sgd", "adamw-fused", "nadam")}
LOOPS |= {f"fp64-{name}": with_optimizer(OPTIMIZERS[name], torch.float64) for name in ("sgd", "adam-amsgrad", "rprop")}
LOOPS |= {f"scheduler-{name}": with_scheduler(make) for name, make in SCHEDULERS.items()}


@loop
def clipped(life: Life) -> None:
    model = perceptron()
    optimizer = adamw(model)

    def step(loss: torch.Tensor, version: int) -> None:
        backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    plain(life, model, optimizer, step=step)


@loop
def batch_norm(life: Life) -> None:
    model = perceptron(nn.BatchNorm1d(32))
    plain(life, model, adamw(model))


@loop
def spectral_norm(life: Life) -> None:
    model = perceptron(nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)))
    plain(life, model, adamw(model))


@loop
def weight_norm(life: Life) -> None:
    model = perceptron(nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)))
    plain(life, model, adamw(model))


@loop
def thawed(life: Life) -> None:
    """Its first layer is trained every third iteration alone."""
    model = perceptron()

    def loss_of(version: int) -> torch.Tensor:
        model[0].requires_grad_(version % 3 == 0)
        return mean_square(model, *batch(version))

    plain(life, model, adamw(model), loss_of=loss_of)


@loop
def pruned(life: Life) -> None:
    """It writes to its parameters behind the step."""
    model = perceptron()

    def prune(version: int) -> None:
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(each.abs() > 1e-3)

    plain(life, model, adamw(model), behind_step=prune)


@loop
def moments_cleared(life: Life) -> None:
    model = perceptron()
    optimizer = adamw(model)

    def clear(version: int) -> None:
        if version % 7 == 0:
            optimizer.state.clear()

    plain(life, model, optimizer, behind_step=clear)


@loop
def denormals_flushed(life: Life) -> None:
    """After it has attached, its thread takes numbers for zero that others do not."""
    model = perceptron()

    def tiny_loss(version: int) -> torch.Tensor:
        torch.set_flush_denormal(True)
        return mean_square(model, *batch(version)) * 1e-19

    plain(life, model, adamw(model), loss_of=tiny_loss)


@loop
def accumulated(life: Life) -> None:
    """Of one to three passes an iteration."""
    model = perceptron()

    def last_of_several(version: int) -> torch.Tensor:
        for part in range(1, 1 + version % 3):
            backward(mean_square(model, *batch(version, part=part)))
        return mean_square(model, *batch(version))

    plain(life, model, adamw(model), loss_of=last_of_several)


@loop
def averaged(life: Life) -> None:
    model = perceptron()
    average = AveragedModel(model, avg_fn=lambda held, new, count: 0.9 * held + 0.1 * new)

    def update(version: int) -> None:
        average.update_parameters(model)

    plain(life, model, adamw(model), behind_step=update, beside=[average], after_step={"average": average})


@loop
def scaled(life: Life) -> None:
    """Some of its steps are skipped, which makes no version, and then taken with a smaller scale."""
    model = perceptron()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)

    def step(loss: torch.Tensor, version: int) -> None:
        for factor in (float("inf"), 1.0) if version % 6 == 5 else (1.0,):
            optimizer.zero_grad()
            loss.backward(scaler.scale(torch.tensor(factor)), retain_graph=True)  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()

    plain(life, model, optimizer, step=step, beside=[scaler], scaler=scaler)


@loop
def validated(life: Life) -> None:
    """Every fourth iteration it looks at other data, and keeps what was best there."""
    model = perceptron()
    best = AveragedModel(model).eval()  # it holds a copy, and a count of how often that was replaced

    def validate(version: int) -> None:
        if version % 4:
            return
        model.eval()
        with torch.no_grad():
            now, before = (mean_square(each, *batch(0, part=1)) for each in (model, best))
            if now < before:
                best.module.load_state_dict(model.state_dict())
                best.n_averaged += 1
        model.train()

    plain(life, model, adamw(model), behind_step=validate, beside=[best], after_step={"best": best})


@loop
def adversarial(life: Life) -> None:
    """Two optimizers, one after the other."""
    model = nn.ModuleDict(
        {"maker": nn.Linear(8, 4), "judge": nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))}
    )
    maker, judge = torch.optim.Adam(model["maker"].parameters()), torch.optim.SGD(model["judge"].parameters(), lr=0.01)
    with life.attached(model, maker, judge) as checkpointer:
        for version in range(checkpointer.version + 1, life.versions + 1):
            data, wanted = batch(version)
            loss = (model["judge"](model["maker"](data).detach()) - model["judge"](wanted)).mean()
            backward(loss)
            judge.step()
            judge.zero_grad()
            loss = -model["judge"](model["maker"](data)).mean()
            backward(loss)
            maker.step()
            maker.zero_grad()
            judge.zero_grad()
            life.record(version, loss)
            checkpointer.end_iteration()


@on_two_ranks
def ddp(life: Life) -> None:
    model = DistributedDataParallel(perceptron())
    plain(life, model, adamw(model))


@on_two_ranks
def ddp_accumulated(life: Life) -> None:
    """Of two passes, one of them unsynchronised; gradients stay in DDP's buckets."""
    model = DistributedDataParallel(perceptron(), gradient_as_bucket_view=True)

    def last_of_two(version: int) -> torch.Tensor:
        with model.no_sync():
            backward(mean_square(model, *batch(version, life.rank, part=1)))
        return mean_square(model, *batch(version, life.rank))

    plain(life, model, adamw(model), loss_of=last_of_two, keeps_gradients=True)


@on_two_ranks
def fsdp(life: Life) -> None:
    from torch.distributed.fsdp import fully_shard

    model = perceptron()
    for each in model:
        if isinstance(each, nn.Linear):
            fully_shard(each)
    fully_shard(model)
    plain(life, model, adamw(model))


def begin(rank: int, ranks: int, rendezvous: str) -> None:
    """A rank of a job, if that has several."""
    torch.manual_seed(0)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
