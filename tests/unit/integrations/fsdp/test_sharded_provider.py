"""The provider of a model under ``fully_shard`` passes the kit, in a mesh of one rank; and what it refuses."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.fsdp.sharded_provider import SUMS_WHAT_IS_COMPUTED, ShardedProvider, block_held
from tiercheck.integrations.torch import attach
from tiercheck.streams.replay.kernel_selection import kernel_for
from tiercheck.streams.replay.runs import Step
from tiercheck.streams.tensors.beside import Beside, End
from tiercheck.streams.tensors.provider import StateProvider
from tiercheck.testing.providers import State, StateProviderTests
from tiercheck.types import Fidelity

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)


@pytest.fixture(autouse=True)
def torch_distributed() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Job:
    """Three groups of FSDP's and two of the optimizer's, a frozen parameter, running statistics, dropout, a schedule,
    two backward passes a step, and clipping; batches from torch's generator."""

    def __init__(self, seed: int, *, policy: MixedPrecisionPolicy) -> None:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)]
        self.model = torch.nn.Sequential(*layers)
        layers[1].bias.requires_grad = False
        mesh = init_device_mesh("cpu", (1,))
        for each in (layers[0], layers[3]):
            fully_shard(each, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh)  # the normalisation, in fp32
        groups = [
            {"params": list(layers[0].parameters()), "weight_decay": 0.1},
            {"params": [layers[1].weight, *layers[3].parameters()], "lr": 3e-2},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.checkpointer: Checkpointer | None = None

    def backward(self) -> float:
        self.optimizer.zero_grad()
        loss = torch.zeros(())
        for last in (False, True):
            self.model.set_requires_gradient_sync(last)
            loss = (self.model(torch.randn(16, 5)) - 1).float().pow(2).mean()
            loss.backward()
        return loss.item()

    def iterate(self, *, says_end: bool = True) -> float:
        loss = self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.scheduler.step()
        if says_end and self.checkpointer is not None:
            self.checkpointer.end_iteration()
        return loss


class TestSharded(StateProviderTests):
    policy, says_end = MixedPrecisionPolicy(), True

    def make(self, seed: int) -> Job:
        return Job(seed, policy=self.policy)

    def iterate(self, trainer: Any) -> float:
        return float(trainer.iterate(says_end=self.says_end))

    def provider(self, trainer: Any) -> StateProvider:
        return ShardedProvider(trainer.model, trainer.optimizer, beside=Beside({"scheduler": trainer.scheduler}))

    def attach(self, trainer: Any, hierarchy: Hierarchy, config: CheckpointConfig) -> Checkpointer:
        checkpointer = attach(trainer.model, trainer.optimizer, hierarchy, scheduler=trainer.scheduler, config=config)
        trainer.checkpointer = checkpointer
        return checkpointer


class TestMixedAndUnsaid(TestSharded):
    policy, says_end = MIXED, False


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (MixedPrecisionPolicy(), None),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), torch.bfloat16 if SUMS_WHAT_IS_COMPUTED else None),
        (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), torch.bfloat16),
        (MIXED, torch.float32),
    ],
)
def test_gradients_are_expected_in_the_dtype_they_are_summed_in(
    policy: MixedPrecisionPolicy, expected: torch.dtype | None
) -> None:
    job = Job(1, policy=policy)
    provider = ShardedProvider(job.model, job.optimizer)
    job.backward()
    found = provider.gradient_dtypes()
    mixed = {name for name in provider.masters() if not name.startswith("1.")}  # all but the normalisation
    assert found == ({} if expected is None else dict.fromkeys(mixed, expected))
    for name, gradient in provider.gradients().items():
        assert torch.equal(gradient.to(found.get(name, gradient.dtype)).to(gradient.dtype), gradient), name


def test_clipped_gradients_that_were_summed_in_bf16_are_recorded_in_it_and_replayed_exactly() -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.float32)
    tiers = Hierarchy.of(f"memory://{secrets.token_hex(8)}")
    job = Job(1, policy=half)
    checkpointer = attached(job, tiers)
    for _ in range(3):
        job.iterate()
    stored = checkpointer._job.recorder._stream.room.dtypes
    assert {dtype for name, dtype in stored.items() if not name.startswith("1.")} == {"BF16"}
    checkpointer.abort()
    after = Job(2, policy=half)
    recovery = attached(after, tiers).recovery
    assert recovery is not None and (recovery.version, recovery.fidelity) == (3, Fidelity.EXACT)
    for one, other in zip(job.model.parameters(), after.model.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())
    after.checkpointer.abort()


def attached(job: Job, hierarchy: Hierarchy | None = None) -> Checkpointer:
    tiers = hierarchy or Hierarchy.of(f"memory://{secrets.token_hex(8)}")
    job.checkpointer = attach(job.model, job.optimizer, tiers, scheduler=job.scheduler)
    return job.checkpointer


def job() -> Job:
    return Job(1, policy=MixedPrecisionPolicy())


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_a_certified_kernel_replays_the_steps_of_sharded_parameters(options: dict[str, bool]) -> None:
    torch.manual_seed(1)
    model = fully_shard(torch.nn.Linear(13, 5), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    provider = ShardedProvider(model, optimizer)
    gradients = [{name: torch.randn_like(each) for name, each in provider.masters().items()} for _ in range(4)]
    provider.apply(gradients[0], provider.hyperparameters())  # which makes the optimizer's state
    before = State.of(provider)
    for each in gradients[1:]:
        provider.apply(each, provider.hyperparameters())
    wanted = State.of(provider).bits()

    before.load(provider)
    steps = [Step(1, provider.hyperparameters(), each) for each in gradients[1:]]
    kernel = kernel_for(provider, steps)
    assert kernel is not None
    assert kernel.exact
    kernel(provider, steps, threads=1)
    assert State.of(provider).bits() == wanted


def test_parameters_that_are_shared_or_ignored_are_saved_once_and_whole() -> None:
    layers = [torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 1)]
    layers[1].weight = layers[0].weight
    model = torch.nn.Sequential(*layers)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), ignored_params={layers[2].weight})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    provider = ShardedProvider(model, optimizer)
    assert {name: tuple(each.shape) for name, each in provider.masters().items()} == {
        "0.weight": (4, 4),
        "2.weight": (1, 4),
        "2.bias": (1,),
    }
    state, replayed = State.of(provider), list[dict[str, torch.Tensor]]()
    for _ in range(2):
        model(torch.ones(2, 4)).mean().backward()
        replayed.append({name: each.clone() for name, each in provider.gradients().items()})
        optimizer.step()
        optimizer.zero_grad()
    wanted = State.of(provider).bits()
    state.load(provider)
    for gradients in replayed:
        provider.apply(gradients, provider.hyperparameters())
    assert State.of(provider).bits() == wanted


def test_a_forward_pass_after_a_restart_gathers_what_was_restored() -> None:
    """Also if a module was left gathered, as the outermost one is after an evaluation."""
    trained, resumed = job(), job()
    trained.iterate()
    state = State.of(ShardedProvider(trained.model, trained.optimizer))
    with torch.no_grad():
        resumed.model.eval()(torch.ones(2, 5))
    provider = ShardedProvider(resumed.model, resumed.optimizer)
    with torch.no_grad():
        resumed.model(torch.ones(2, 5))
    state.load(provider)
    provider.refresh()
    with torch.no_grad():
        assert torch.equal(resumed.model(torch.ones(2, 5)), trained.model.eval()(torch.ones(2, 5)))


def test_a_sharded_average_beside_the_model_is_refused_by_name() -> None:
    trainer, average = job(), fully_shard(torch.nn.Linear(13, 5), mesh=init_device_mesh("cpu", (1,)))
    tiers = Hierarchy.of(f"memory://{secrets.token_hex(8)}")
    with pytest.raises(UnsupportedSetup, match=r"average\.weight is a DTensor, whose content .* make it a part of"):
        attach(trainer.model, trainer.optimizer, tiers, stateful={"average": average}, scheduler=trainer.scheduler)


@pytest.mark.parametrize("through", ["the parameter", "its local tensor", "all at once", "a state dict"])
def test_what_else_writes_to_sharded_parameters_is_seen(through: str) -> None:
    trainer, tiers = job(), Hierarchy.of(f"memory://{secrets.token_hex(8)}")
    with attached(trainer, tiers) as checkpointer:
        for _ in range(2):
            trainer.iterate(says_end=False)
            weight = trainer.model[3].weight
            with torch.no_grad():
                if through == "the parameter":
                    weight.clamp_(-0.1, 0.1)
                elif through == "its local tensor":
                    weight.to_local().clamp_(-0.1, 0.1)
                elif through == "all at once":
                    torch._foreach_mul_(list(trainer.model.parameters()), 0.5)  # which torch counts nowhere
                else:
                    trainer.model.load_state_dict({k: each / 2 for k, each in trainer.model.state_dict().items()})
            checkpointer.end_iteration()
        wanted = State.of(ShardedProvider(trainer.model, trainer.optimizer)).bits()
        checkpointer.abort()
    resumed = job()
    with attached(resumed, tiers) as checkpointer:
        assert checkpointer.recovery is not None
        assert (checkpointer.version, checkpointer.recovery.fidelity) == (2, "exact")
        assert State.of(ShardedProvider(resumed.model, resumed.optimizer)).bits() == wanted
        checkpointer.abort()


@pytest.mark.parametrize("through", ["the moment", "its local tensor", "another object", "no write"])
def test_what_else_writes_to_sharded_moments_is_seen(through: str) -> None:
    trainer, tiers = job(), Hierarchy.of(f"memory://{secrets.token_hex(8)}")
    with attached(trainer, tiers) as checkpointer:
        for _ in range(2):
            trainer.iterate(says_end=False)
            held = trainer.optimizer.state[trainer.model[3].weight]
            with torch.no_grad():
                if through == "the moment":
                    held["exp_avg"].mul_(0.5)
                elif through == "its local tensor":
                    held["exp_avg"].to_local().mul_(0.5)
                elif through == "another object":
                    held["exp_avg"] = held["exp_avg"] / 2
            checkpointer.end_iteration()
        wanted = State.of(ShardedProvider(trainer.model, trainer.optimizer)).bits()
        assert checkpointer.stats.bases == (1 if through == "no write" else 3)
        checkpointer.abort()
    resumed = job()
    with attached(resumed, tiers) as checkpointer:
        assert checkpointer.recovery is not None
        assert (checkpointer.version, checkpointer.recovery.fidelity) == (2, "exact")
        assert State.of(ShardedProvider(resumed.model, resumed.optimizer)).bits() == wanted
        checkpointer.abort()


@pytest.mark.parametrize("says_end", [True, False], ids=["said", "unsaid"])
def test_weights_that_are_swapped_for_an_evaluation_and_put_back_are_those_that_train_on(says_end: bool) -> None:
    """Though FSDP2 keeps what the evaluation has gathered."""

    def losses(trainer: Job, tiers: Hierarchy, last: int) -> dict[int, float]:
        found = {}
        parameters = [each for group in trainer.optimizer.param_groups for each in group["params"]]
        with attached(trainer, tiers) as checkpointer:
            for version in range(checkpointer.version + 1, last + 1):
                found[version] = trainer.iterate(says_end=False)
                with torch.no_grad():
                    for each in parameters:
                        each.mul_(0.5)
                    trainer.model.eval()(torch.ones(2, 5))
                    for each in parameters:
                        each.mul_(2)
                trainer.model.train()
                if says_end:
                    checkpointer.end_iteration()
            checkpointer.abort()
        return found

    tiers = [Hierarchy.of(f"memory://{secrets.token_hex(8)}") for _ in range(2)]
    whole = losses(job(), tiers[0], 4)
    assert losses(job(), tiers[1], 2).items() <= whole.items()
    resumed = losses(job(), tiers[1], 4)
    assert [*resumed] == ([3, 4] if says_end else [2, 3, 4])
    assert resumed.items() <= whole.items()


def test_a_teacher_stays_gathered() -> None:
    """Nothing changes it, and to gather it anew at each iteration would cost what its user did not want to pay."""
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.ModuleDict({"trained": torch.nn.Linear(2, 1), "teacher": torch.nn.Linear(2, 1)})
    for each in model.values():
        fully_shard(each, mesh=mesh)
    model["teacher"].requires_grad_(False)
    provider = ShardedProvider(model, torch.optim.AdamW(model["trained"].parameters()))
    held = provider.frozen()["teacher.weight"].clone()
    with torch.no_grad():
        for each in model.values():
            each(torch.ones(1, 2))
    provider.end_of_iteration(End.SAID)
    assert isinstance(model["trained"].weight, DTensor)
    assert not isinstance(model["teacher"].weight, DTensor)
    assert torch.equal(provider.frozen()["teacher.weight"], held)


# What is refused


def test_an_optimizer_made_before_fully_shard_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(UnsupportedSetup, match="make it after fully_shard"):
        attach(model, optimizer, Hierarchy.of("memory://"))


def test_sharded_parameters_that_are_not_in_the_attached_module_are_refused() -> None:
    trainer = job()
    with pytest.raises(UnsupportedSetup, match="that the model does not have: attach a Module that holds all"):
        attach(trainer.model[0], trainer.optimizer, Hierarchy.of("memory://"), scheduler=trainer.scheduler)


def test_slices_of_tensor_parallelism_need_no_fully_shard() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters())
    with attach(model, optimizer, Hierarchy.of(f"memory://{secrets.token_hex(8)}")) as checkpointer:
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        checkpointer.end_iteration()
        assert checkpointer.version == 1


def test_parameters_that_are_still_gathered_in_the_step_are_refused() -> None:
    """The next forward pass would use them as they are, and so another model than the one that is saved."""
    trainer = job()
    with attached(trainer):
        trainer.model.set_reshard_after_backward(False)
        with pytest.raises(UnsupportedSetup, match=r"0\.weight is still gathered .* set_reshard_after_backward"):
            trainer.iterate()
    trainer.iterate()


@pytest.mark.parametrize("how", ["replaced", "added"])
def test_parameters_that_change_between_attach_and_step_are_refused(how: str) -> None:
    trainer = job()
    with attached(trainer):
        trainer.backward()
        layer = trainer.model[3]
        if how == "replaced":
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
        else:
            layer.scale = torch.nn.Parameter(torch.ones(1))
        with pytest.raises(UnsupportedSetup, match=r"3\.(weight was replaced|scale: close)|among them 3\.scale"):
            trainer.optimizer.step()


@pytest.mark.parametrize(
    "placements", [(Replicate(), Partial()), (_StridedShard(0, split_factor=3), Shard(0))], ids=str
)
def test_other_placements_than_a_block_a_rank_are_refused(placements: tuple[Placement, ...]) -> None:
    mesh = init_device_mesh("cpu", (1, 1))
    tensor = DTensor.from_local(torch.ones(2, 3), mesh, placements, run_check=False)
    with pytest.raises(UnsupportedSetup, match=r"weight is placed as \(2, 3\) .*fully_shard and parallelize_module do"):
        block_held(tensor, "weight")


def test_a_shard_of_a_slice_is_the_block_that_torch_says() -> None:
    """``fully_shard`` after tensor parallelism, in a mesh of 2 x 3."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=6)
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(7, 12), torch.nn.Linear(12, 5))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        lengths, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
        found = block_held(parameter, name)
        assert (found.lengths, found.offsets) == (tuple(lengths), tuple(offsets))
        assert found.replicas == (3 if name == "1.bias" else 1)


@pytest.mark.skipif(
    not hasattr(DeviceMesh, "device_type"), reason="needs a torch whose meshes compute their device's type"
)
def test_parameters_elsewhere_than_their_mesh_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    meta = DTensor.from_local(torch.ones(2, device="meta"), mesh, [Shard(0)], run_check=False)
    with pytest.raises(UnsupportedSetup, match="materialise the model"):
        block_held(meta, "weight")
    offloaded = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    with (
        patch.object(DeviceMesh, "device_type", "cuda"),
        pytest.raises(UnsupportedSetup, match="weight is on cpu and its mesh on cuda: an offload_policy"),
    ):
        block_held(offloaded, "weight")


@pytest.mark.parametrize("state", ["another layout", "no layout"])
def test_an_optimizers_state_that_is_not_sharded_like_its_parameter_is_refused(state: str) -> None:
    trainer = job()
    provider = ShardedProvider(trainer.model, trainer.optimizer)
    trainer.iterate()
    weight = trainer.model[3].weight
    held = trainer.optimizer.state[weight]
    held["exp_avg"] = weight.detach().to_local() if state == "no layout" else weight.detach().sum(dim=1)
    with pytest.raises(UnsupportedSetup, match=r"the optimizer's exp_avg of 3\.weight is"):
        provider.optimizer_state()


def test_a_gradient_to_which_the_step_adds_before_it_is_summed_is_refused() -> None:
    """Which optimizers do so is tried on several ranks in tests/cluster/layouts/test_parallel.py."""
    norm = torch.nn.LayerNorm(4)
    parallelize_module(norm, init_device_mesh("cpu", (1,)), SequenceParallel())
    assert isinstance(norm.weight, DTensor)
    own = torch.ones(4)
    for each in norm.parameters():
        each.grad = DTensor.from_local(own, norm.weight.device_mesh, [Partial()], run_check=False)

    def groups() -> list[dict[str, Any]]:
        return [{"params": [norm.weight]}, {"params": [norm.bias], "weight_decay": 0.0}]

    provider = ShardedProvider(norm, torch.optim.AdamW(groups(), weight_decay=0.1))
    assert torch.equal(provider.gradients()["weight"], own)
    provider = ShardedProvider(norm, torch.optim.Adam(groups(), weight_decay=0.1))
    with pytest.raises(UnsupportedSetup, match=r"gradient of weight is summed .* Adam with these .*or sum before each"):
        provider.gradients()
    norm.weight.grad = norm.weight.grad.redistribute(placements=norm.weight.placements)
    assert provider.gradients().keys() == {"weight", "bias"}
    provider.trains_on_compressed = True
    with pytest.raises(UnsupportedSetup, match="train_on_compressed does not go with the gradient of bias"):
        provider.gradients()


def test_fsdp1_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    model.inner = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    torch.nn.Module.__init__(model.inner)
    with pytest.raises(UnsupportedSetup, match=r"FSDP1.*fully_shard"):
        attach(model, torch.optim.AdamW([model.weight]), Hierarchy.of("memory://"))
