"""The order in which DDP adds up: recorded in the first iteration, applied before the first one after a restart."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.nn.parallel import DistributedDataParallel

from tiercheck.errors import UnsupportedSetup
from tiercheck.integrations.torch import bucket_order
from tiercheck.integrations.torch.all_reduce import Compression, compressed_all_reduce
from tiercheck.integrations.torch.bucket_order import BucketOrder


class LeftOver:
    """What :func:`one_scale` keeps, by bucket."""

    def __init__(self) -> None:
        self.of: dict[int, torch.Tensor] = {}

    def state_dict(self) -> dict[int, torch.Tensor]:
        return self.of

    def load_state_dict(self, state: dict[int, torch.Tensor]) -> None:
        self.of = dict(state)


def one_scale(left: LeftOver, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook, as PowerSGD is: what it makes of a number depends on the bucket that it lies in, and what
    it has left over is added to that bucket's numbers the next time, in place."""
    wanted = bucket.buffer() + left.of.get(bucket.index(), 0)
    sent = wanted.sign() * wanted.abs().mean()
    left.of.setdefault(bucket.index(), torch.empty_like(wanted)).copy_(wanted - sent)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(sent)
    return future


one_scale.__annotations__.update(
    {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
)  # DDP compares them with types, and here they are text

NAMES = ["first.weight", "first.bias", "second.weight", "second.bias"]


class Crossed(torch.nn.Module):
    """Its parts run in another order than they were made in. A buffer, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.frozen = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        result: torch.Tensor = self.first(self.second(batch)) + self.frozen
        return result


@pytest.fixture(autouse=True)
def one_rank_is_enough(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bucket_order, "RANKS_MIN", 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Crossed(), bucket_cap_mb=1e-6, **options)


def iterate(ddp: DistributedDataParallel) -> None:
    ddp(torch.ones(2, 4)).sum().backward()
    ddp.zero_grad()


def layout(ddp: DistributedDataParallel) -> list[str]:
    """The parameters in the order of the buckets that DDP has made anew, which it tells two iterations later."""
    iterate(ddp)
    iterate(ddp)
    told = ddp._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
    return [NAMES[int(index)] for index in told.replace(",", " ").split()]


def test_the_first_iteration_is_recorded() -> None:
    ddp = wrapped()
    order = BucketOrder(torch.nn.Sequential(ddp))
    order.prime()
    assert order.state_dict() == {"orders": [None], "kept": [False]}
    with ddp.no_sync():
        iterate(ddp)
    assert order.state_dict()["orders"] == [None], "nothing is reduced in no_sync"
    iterate(ddp)
    (recorded,) = order.state_dict()["orders"]
    assert recorded == ["first.bias", "first.weight", "second.bias", "second.weight"] == layout(ddp)
    assert not any(each._post_accumulate_grad_hooks for each in ddp.parameters())


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["", "views"])
def test_what_was_recorded_is_the_order_of_the_first_iteration_after(options: dict[str, bool]) -> None:
    recorded = [NAMES[index] for index in (1, 3, 0, 2)]
    ddp = wrapped(**options)
    before = {name: each.clone() for name, each in ddp.state_dict().items()}
    order = BucketOrder(ddp)
    order.load_state_dict({"orders": [recorded]})
    assert order.caveats() == []
    order.prime()
    assert all(torch.equal(each, before[name]) for name, each in ddp.state_dict().items())
    assert all(each.grad is None for each in ddp.parameters())
    assert isinstance(ddp.module, Crossed)
    ddp(torch.ones(2, 4)).sum().backward()
    plain = Crossed()
    plain.load_state_dict({name.removeprefix("module."): each for name, each in before.items()})
    plain(torch.ones(2, 4)).sum().backward()
    for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is None or torch.equal(ours.grad, theirs.grad)
    assert order.state_dict()["orders"] == [recorded]
    ddp.zero_grad()
    assert layout(ddp) == recorded


def test_an_order_of_other_parameters_is_none() -> None:
    order = BucketOrder(wrapped())
    assert "was not recorded" in order.caveats()[0]
    for other in (NAMES[1:], [*NAMES, "frozen"]):
        ddp = wrapped()
        order = BucketOrder(ddp)
        order.load_state_dict({"orders": [other]})
        assert "was not recorded" in order.caveats()[0]
        order.prime()
        iterate(ddp)
        (recorded,) = order.state_dict()["orders"]
        assert sorted(recorded) == sorted(NAMES), "it is recorded anew"


def test_recording_does_not_walk_the_model_for_every_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = wrapped()
    order = BucketOrder(ddp)
    order.prime()
    monkeypatch.setattr(ddp.module, "named_parameters", lambda: pytest.fail("the model is walked"))
    ddp(torch.ones(2, 4)).sum().backward()
    assert order.state_dict()["orders"] != [None]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"static_graph": True}, "static_graph=False does"), ({"hook": True}, "the communication hook one_scale, whose")],
    ids=["static graph", "hook"],
)
def test_what_cannot_be_primed_is_told_and_left_alone(options: dict[str, Any], reason: str) -> None:
    options = dict(options)
    strange = options.pop("hook", False)
    ddp = wrapped(**options)
    if strange:
        ddp.register_comm_hook(LeftOver(), one_scale)
    order = BucketOrder(ddp)
    order.load_state_dict({"orders": [NAMES]})
    (caveat,) = order.caveats()
    assert reason in caveat
    ddp.forward = None  # nobody calls it
    order.prime()


def test_hooks_of_the_users_on_parameters_see_no_zeros() -> None:
    ddp = wrapped()
    seen: list[torch.Tensor] = []
    ddp.module.first.weight.register_hook(seen.append)
    order = BucketOrder(ddp)
    order.load_state_dict({"orders": [NAMES]})
    assert "hooks on parameters, such as that on first.weight" in order.caveats()[0]
    order.prime()
    assert seen == []


def test_what_does_not_depend_on_the_order_has_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    compressed = wrapped()
    compressed.register_comm_hook(Compression(compressed, codec_name="int8"), compressed_all_reduce)
    for ddp in (compressed, wrapped(find_unused_parameters=True)):
        order = BucketOrder(ddp)
        assert order.caveats() == []
        ddp.forward = None  # nobody calls it
        order.prime()
    assert BucketOrder(wrapped(find_unused_parameters=True)).stateful.keys() == BucketOrder(wrapped()).stateful.keys()
    half = wrapped()
    half.register_comm_hook(None, fp16_compress_hook)
    assert "sums the gradients of the first step after a restart in another order" in BucketOrder(half).caveats()[0]
    assert BucketOrder(Crossed()).stateful == {}
    monkeypatch.setattr(bucket_order, "RANKS_MIN", 3)
    assert BucketOrder(wrapped()).stateful == {}, "the sum of two is the same either way"
    assert BucketOrder(half).stateful == {}, "each number is rounded for itself"


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_that_the_loop_keeps_in_the_buckets_lie_there_after_a_restart(unused: bool, to_none: bool) -> None:
    """DDP divides them by the number of ranks, and multiplies new ones by its inverse."""

    def places(ddp: DistributedDataParallel) -> list[int]:
        return [each.grad.data_ptr() for each in ddp.module.parameters() if each.grad is not None]

    ddp = wrapped(gradient_as_bucket_view=True, find_unused_parameters=unused)
    order = BucketOrder(torch.nn.Sequential(ddp))
    order.prime()
    ddp(torch.ones(2, 4)).sum().backward()
    ddp.zero_grad(set_to_none=to_none)
    state = order.state_dict()
    assert state["kept"] == [not to_none]
    again = wrapped(gradient_as_bucket_view=True, find_unused_parameters=unused)
    restored = BucketOrder(torch.nn.Sequential(again))
    restored.load_state_dict(state)
    assert restored.state_dict() == state, "its opening base tells it, too: it may die before its first iteration"
    restored.prime()
    assert restored.state_dict() == state
    assert len(places(again)) == len(places(ddp)) == (0 if to_none else 4)
    assert not any(each.grad.any() for each in again.module.parameters() if each.grad is not None)


def test_gradients_outside_of_the_buckets_are_not_looked_at() -> None:
    ddp = wrapped()
    order = BucketOrder(torch.nn.Sequential(ddp))
    ddp(torch.ones(2, 4)).sum().backward()
    assert order.state_dict()["kept"] == [False]


@pytest.mark.parametrize("ranks_min", [1, 3])
@pytest.mark.parametrize("cap", [1e-4, 25])
def test_a_communication_hook_goes_on_with_what_it_had_left_over(
    cap: float, ranks_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_order, "RANKS_MIN", ranks_min)  # what a bucket becomes depends on no number of ranks

    def job() -> tuple[DistributedDataParallel, LeftOver, torch.optim.Optimizer, BucketOrder]:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Crossed(), bucket_cap_mb=cap)
        left = LeftOver()
        ddp.register_comm_hook(left, one_scale)
        order = BucketOrder(ddp)
        order.note_states([left])
        return ddp, left, torch.optim.SGD(ddp.parameters(), lr=0.1), order

    def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            ddp(torch.arange(8.0).reshape(2, 4) * step).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    ddp, left, optimizer, order = job()
    order.prime()
    train(ddp, optimizer, range(1, 4))
    saved = copy.deepcopy((ddp.state_dict(), left.state_dict(), order.state_dict()))
    train(ddp, optimizer, range(4, 7))
    again, left_again, optimizer, order = job()
    for each, state in zip((again, left_again, order), saved, strict=True):
        each.load_state_dict(state)
    assert order.caveats() == []
    order.prime()
    assert all(torch.equal(left_again.of[index], each) for index, each in saved[1].items())
    train(again, optimizer, range(4, 7))
    assert all(each.isfinite().all() for each in ddp.parameters())
    for ours, theirs in zip(again.parameters(), ddp.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_a_hook_that_looks_at_whole_buckets_finds_anew_is_told_on_two_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bucket_order, "RANKS_MIN", 3)
    ddp = wrapped()
    left = LeftOver()
    ddp.register_comm_hook(left, one_scale)
    for given, why in (([], "one_scale, whose state is not in stateful="), ([left], "was not recorded")):
        order = BucketOrder(ddp)
        order.note_states(given)
        (caveat,) = order.caveats()
        assert "puts the gradients of the first step after a restart into other buckets" in caveat
        assert why in caveat


def test_a_hook_without_a_state_may_keep_something_unseen() -> None:
    ddp = wrapped()
    ddp.register_comm_hook(None, fp16_compress_wrapper(allreduce_hook))
    order = BucketOrder(ddp)
    order.note_states([])
    assert "which may keep something unseen, leaves no way around" in order.caveats()[0]


def test_what_a_hook_makes_of_the_stand_ins_zeros_is_nowhere_afterwards() -> None:
    """It draws random numbers, and makes something else of nothing."""

    def noise(left: LeftOver, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() + torch.randn(bucket.buffer().shape))
        return future

    noise.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})
    ddp = wrapped(gradient_as_bucket_view=True)
    left = LeftOver()
    ddp.register_comm_hook(left, noise)
    order = BucketOrder(ddp)
    order.note_states([left])
    order.load_state_dict({"orders": [NAMES], "kept": [True]})
    torch.manual_seed(7)
    before = torch.get_rng_state()
    order.prime()
    assert torch.equal(torch.get_rng_state(), before)
    gradients = [each.grad for each in ddp.module.parameters() if each.requires_grad]
    assert all(each is not None and not each.any() for each in gradients)


def test_a_parameter_that_had_no_gradient_has_none_after_the_stand_in() -> None:
    """No iteration had used it: the optimizer leaves it out, and steps those whose gradient is zero."""
    ddp = wrapped(gradient_as_bucket_view=True)
    left = LeftOver()
    ddp.register_comm_hook(left, one_scale)
    order = BucketOrder(ddp)
    order.note_states([left])
    order.load_state_dict({"orders": [NAMES], "kept": [True]})
    trained = {name: each for name, each in ddp.module.named_parameters() if each.requires_grad}
    for name, each in trained.items():
        each.grad = None if name == NAMES[0] else torch.zeros_like(each)
    order.prime()
    assert [name for name, each in trained.items() if each.grad is None] == [NAMES[0]]


def test_a_hooks_state_that_fails_is_named() -> None:
    class Broken(LeftOver):
        def state_dict(self) -> dict[int, torch.Tensor]:
            raise NotImplementedError("not yet")

    ddp = wrapped()
    left = Broken()
    ddp.register_comm_hook(left, one_scale)
    with pytest.raises(UnsupportedSetup, match=r"hook \(Broken\) cannot be saved: .* NotImplementedError: not yet"):
        BucketOrder(ddp).note_states([left])
