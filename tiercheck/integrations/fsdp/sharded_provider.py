"""The state of a module under ``fully_shard``, under tensor parallelism, or both, and of its optimizer.

FSDP2 gives a rank its shard of each parameter as a ``DTensor``, and so are the gradients and the optimizer's state. So
does ``parallelize_module``, of the parameters that it divides; with FSDP2 after it, a rank has a shard of its slice.
What the optimizer updates is the local tensor in it: that is the master. It ends where the shard ends; the padding that
FSDP2 puts behind it for its collectives is no part of it.

While a forward or a backward pass runs, a module shows whole parameters that were gathered from the shards. So the
sharded ones are looked up once, at attach, and kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from msgspec import structs
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.torch_version import TorchVersion

from tiercheck.errors import UnsupportedSetup
from tiercheck.format.index.boxes import as_range
from tiercheck.format.index.logical import EXTRA, MASTER, Block, LogicalIndex
from tiercheck.integrations.fsdp.blocks import HeldBlock, block_of
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.streams.optimizers.elementwise import is_elementwise
from tiercheck.streams.tensors.as_bytes import counting_through
from tiercheck.streams.tensors.beside import Beside, End
from tiercheck.streams.tensors.joint import AnyOptimizer, parts_of
from tiercheck.streams.tensors.provider import Identity

__all__ = ["ShardedProvider"]

SUMMING = (
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)
"""See :func:`sums_first`."""
SUMS_WHAT_IS_COMPUTED = TorchVersion(torch.__version__) < TorchVersion("2.15")
"""Whether gradients are summed in the computation's dtype, if no ``reduce_dtype`` is given: else in the parameters'."""


class ShardedProvider(ModuleProvider):
    """A :class:`~tiercheck.integrations.torch.module_provider.ModuleProvider` of a model whose parameters are
    ``DTensor``, or some of them: the others (``ignored_params``) are saved whole by every rank. Errors:
    ``UnsupportedSetup``.
    """

    gathers = True

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: AnyOptimizer,
        *,
        beside: Beside | None = None,
    ) -> None:
        self._modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
        self.refresh()
        self._parameters = dict(model.named_parameters())
        """All of them, as they are between two iterations."""
        updated = {id(each): each for group in optimizer.param_groups for each in group["params"]}
        self._trained_modules = [
            module for module in self._modules if any(id(each) in updated for each in module.parameters())
        ]
        """A teacher in the model may stay gathered."""
        strangers = updated.keys() - set(map(id, self._parameters.values()))
        if strangers == updated.keys():
            raise UnsupportedSetup(
                "the optimizer updates none of the model's parameters: make it after fully_shard, which replaces them"
            )
        if any(isinstance(updated[each], DTensor) for each in strangers):
            raise UnsupportedSetup(
                "the optimizer updates sharded parameters that the model does not have: attach a Module that holds all"
            )
        self._others = {name: each for name, each in self._parameters.items() if id(each) not in updated}
        self._blocks = {name: block_held(each, name) for name, each in self._parameters.items()}
        self._framework = "-".join(["fsdp", *sorted(meshes_of(self._parameters.values()))])
        super().__init__(model, optimizer, beside=beside)

    def identity(self) -> Identity:
        described = [f"{name} {held}" for name, held in self._blocks.items()]
        optimizer = self._optimizer_identity()
        return Identity.of(self._framework, self, optimizer, parameters=described)

    def blocks(self) -> Mapping[str, HeldBlock]:
        """By name, as ``model.named_parameters`` has it, which block of the parameter this rank holds. The optimizer's
        tensors of the same shape are the same block."""
        return self._blocks

    @torch.no_grad()
    def masters(self) -> Mapping[str, torch.Tensor]:
        return {name: self.local(each, each, name) for name, each in self._masters.items()}

    def gradient_dtypes(self) -> Mapping[str, torch.dtype]:
        """Those in which they are summed over the ranks. They come in the parameters'."""
        summed: dict[int, torch.dtype | None] = {}
        for module in self._modules:  # of a parameter the innermost one, which is its own, comes last
            policy = module._get_fsdp_state()._mp_policy
            unless_said = policy.param_dtype if SUMS_WHAT_IS_COMPUTED else None
            summed |= dict.fromkeys(map(id, module.parameters()), policy.reduce_dtype or unless_said)
        found = {name: summed.get(id(each)) for name, each in self._masters.items()}
        return {name: dtype for name, dtype in found.items() if dtype is not None}

    @torch.no_grad()
    def frozen(self) -> Mapping[str, torch.Tensor]:
        return {name: self.local(each, each, name) for name, each in self._others.items()}

    @torch.no_grad()
    def index(self) -> LogicalIndex:
        """A block of each parameter that is sharded, and the whole of all else."""
        index = super().index()
        tensors, stored = dict(index.tensors), dict(index.stored)
        for name, held in self._blocks.items():
            model_name = self._tensors.model_name(name)
            tensors[model_name] = structs.replace(tensors[model_name], shape=held.shape)
            block = Block(model_name, held.offsets, held.lengths)
            stored[(EXTRA if name in self._others else MASTER) + name] = (as_range(block, held.shape),)
        return LogicalIndex(tensors, stored, index.aliases)

    def steps_together(self) -> bool:
        """An optimizer that does more than arithmetic on elements, as Muon multiplies matrices, does so over the ranks
        that hold their parts."""
        return not all(is_elementwise(type(each)) for each in parts_of(self._optimizer))

    @torch.no_grad()
    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        return super().optimizer_state()

    @torch.no_grad()
    def held_by_optimizer(self) -> Sequence[Any] | None:
        """Local tensors, too: torch counts what is written to one of them there, and not in the DTensor around it."""
        if (held := super().held_by_optimizer()) is None:
            return None
        return [*held, *(each.to_local() for each in held if isinstance(each, DTensor))]

    def held_here(self, master: str, state: dict[str, Any]) -> dict[str, Any]:
        def local(key: str, value: Any) -> Any:
            what = f"the optimizer's {key} of {master}"
            return self.local(value, self._masters[master], what) if isinstance(value, torch.Tensor) else value

        return {key: local(key, each) for key, each in state.items()}

    @torch.no_grad()
    def gradients(self) -> dict[str, torch.Tensor]:
        """See :meth:`ModuleProvider.gradients`. Errors: also ``UnsupportedSetup`` if a parameter was replaced since
        attach, or is still gathered."""
        self._refuse_other_parameters()
        return super().gradients()

    def local_gradients(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        group_of = self.group_of() if any(map(is_partial, gradients.values())) else {}
        found = {}
        for name, each in gradients.items():
            what = f"the gradient of {name}"
            parameter: torch.Tensor = self._masters[name]
            if isinstance(each, DTensor) and isinstance(parameter, DTensor) and is_partial(each):
                self._refuse_what_is_summed_late(self._optimizer.param_groups[group_of[name]], what)
                each = each.redistribute(placements=parameter.placements)
            found[name] = self.local(each, parameter, what)
        return found

    def _refuse_what_is_summed_late(self, options: Mapping[str, Any], what: str) -> None:
        """Of a gradient of which each rank holds a summand (``SequenceParallel``), which the step sums over the slices.
        What is captured is the sum, so the step must do nothing to the summands before."""
        if self.trains_on_compressed:
            raise UnsupportedSetup(
                f"train_on_compressed does not go with {what}, which the optimizer's step sums over the slices of the "
                "model: the step would take what was never encoded"
            )
        optimizer = next(each for each in parts_of(self._optimizer) if any(own is options for own in each.param_groups))
        if not sums_first(optimizer, options):
            raise UnsupportedSetup(
                f"{what} is summed over the slices of the model within the optimizer's step (SequenceParallel), and "
                f"{type(optimizer).__name__} with these options changes the summands before: its steps could not "
                "be replayed bit for bit. Use AdamW, or Adam with fused=True, or sum before each step: p.grad = "
                "p.grad.redistribute(placements=p.placements)"
            )

    def end_of_iteration(self, end: End) -> None:
        if end is not End.UNSEEN:  # no pass is under way
            for each in self._trained_modules:
                each.reshard()
        super().end_of_iteration(end)

    def refresh(self) -> None:
        """What was gathered is let go: the next forward pass gathers what the shards hold now."""
        for each in self._modules:
            each.reshard()

    def local(self, tensor: torch.Tensor, parameter: torch.Tensor, what: str) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return super().local(tensor, parameter, what)
        if not isinstance(tensor, DTensor):
            if tensor.shape == parameter.to_local().shape:
                raise UnsupportedSetup(f"{what} is as large as this rank's shard, and no DTensor as the parameter is")
            return tensor  # such as the count of steps
        if tensor is not parameter and not laid_out_alike(tensor, parameter):
            raise UnsupportedSetup(
                f"{what} is laid out as {layout_of(tensor)}, and the parameter as {layout_of(parameter)}: supported "
                "are gradients and optimizers' states that are sharded as their parameters"
            )
        return counting_through(tensor.to_local().detach(), tensor)

    @torch.no_grad()
    def placed(self, local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor) or local.shape != parameter.to_local().shape:
            return local
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def _refuse_other_parameters(self) -> None:
        now = self._tensors.parameters()
        if now.keys() != self._parameters.keys():
            differing = sorted(now.keys() ^ self._parameters.keys())
            raise UnsupportedSetup(
                f"the model's parameters have changed since attach, among them {', '.join(differing[:3])}: close the "
                "checkpointer, change them, and attach again"
            )
        for name, parameter in self._parameters.items():
            found = now[name]
            if found is parameter:
                continue
            gathered = isinstance(parameter, DTensor) and not (
                isinstance(found, DTensor) and found.device_mesh == parameter.device_mesh
            )
            if not gathered:
                raise UnsupportedSetup(
                    f"the parameter {name} was replaced since attach, and the new one would not be saved: close the "
                    "checkpointer, replace it, and attach again"
                )
            if name not in self._others:
                raise UnsupportedSetup(
                    f"the parameter {name} is still gathered while the optimizer steps, so that the next forward pass "
                    "would use what it was before the step: call set_reshard_after_backward(True) before the last "
                    "backward pass of a step, and reshard() on the model's modules after a forward pass between "
                    "that and the step"
                )


@torch.no_grad()
def block_held(parameter: torch.Tensor, name: str) -> HeldBlock:
    """Errors: ``UnsupportedSetup`` if it is placed otherwise than ``fully_shard`` does."""
    if not isinstance(parameter, DTensor):
        whole = tuple(parameter.shape)
        return HeldBlock(whole, (0,) * len(whole), whole)
    mesh, local = parameter.device_mesh, parameter.to_local()
    if (divided := divided_by(parameter)) is None:
        raise UnsupportedSetup(
            f"{name} is placed as {layout_of(parameter)}: supported is what fully_shard and parallelize_module do, "
            "each by itself or the first after the second"
        )
    if local.is_meta:
        raise UnsupportedSetup(f"{name} is on the meta device: materialise the model before attach")
    if local.device.type != mesh.device_type:
        raise UnsupportedSetup(
            f"{name} is on {local.device.type} and its mesh on {mesh.device_type}: an offload_policy is not supported"
        )
    coordinate = mesh.get_coordinate()
    block: HeldBlock | None = None
    if coordinate is not None:
        turns, sharded = divided
        sizes, at = [mesh.mesh.shape[each] for each in turns], [coordinate[each] for each in turns]
        block = block_of(parameter.shape, sizes, at, sharded)
    if block is None or block.lengths != tuple(local.shape):
        raise UnsupportedSetup(
            f"this rank holds {tuple(local.shape)} of {name}, which is no block of {layout_of(parameter)}"
        )
    return block


def divided_by(parameter: DTensor) -> tuple[list[int], list[int | None]] | None:
    """The dimensions of the mesh in the order in which they divide the parameter, and the dimension of the tensor that
    each divides, if it does. ``None`` if the placement is another than a block a rank.

    They divide from the first to the last. But if ``fully_shard`` came after tensor parallelism and divides the same
    dimension of the tensor, it divides the blocks of the other, and comes last (a strided shard, in torch's words).
    """
    placements, sizes = parameter.placements, parameter.device_mesh.mesh.shape
    sharded: list[int | None] = [getattr(each, "dim", None) for each in placements]
    first, last = list[int](), list[int]()
    for index, each in enumerate(placements):
        if (blocks := getattr(each, "split_factor", None)) is None:
            if type(each) not in (Shard, Replicate):
                return None
            first.append(index)
            continue
        inner = [other for other in range(index + 1, len(placements)) if sharded[other] == sharded[index]]
        if last or blocks != math.prod(sizes[other] for other in inner):
            return None
        last.append(index)
    turns = [*first, *last]
    return turns, [sharded[each] for each in turns]


def meshes_of(parameters: Iterable[torch.Tensor]) -> set[str]:
    """The sizes of their meshes, such as ``2x4``."""
    meshes = {each.device_mesh for each in parameters if isinstance(each, DTensor)}
    return {"x".join(map(str, each.mesh.shape)) for each in meshes}


def laid_out_alike(one: DTensor, other: DTensor) -> bool:
    return one.placements == other.placements and one.shape == other.shape and one.device_mesh == other.device_mesh


def is_partial(tensor: torch.Tensor) -> bool:
    """Whether each rank holds a summand."""
    return isinstance(tensor, DTensor) and any(isinstance(each, Partial) for each in tensor.placements)


def sums_first(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> bool:
    """Whether a step, before anything else, sums the gradient. Found by trial: it does if the gradient goes right into
    a tensor that the ranks hold alike; but adding the parameter to it, or a momentum, adds to the summands."""
    if type(optimizer) not in SUMMING:
        return False
    decoupled = options.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
    decays = options.get("weight_decay", 0) != 0 and not decoupled
    return (not decays or bool(options.get("fused"))) and not options.get("nesterov", False)


def layout_of(tensor: DTensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.placements} in a mesh {tuple(tensor.device_mesh.mesh.shape)}"
