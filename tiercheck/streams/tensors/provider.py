"""Where the state of a rank comes from and goes back to.

A provider is the only thing that knows how a framework lays out its training state. The streams read it
through this protocol, and recovery writes it back through the same. Tensors are handed out *live*: what
:meth:`StateProvider.masters` returns is the memory the optimizer updates, so a capture must be done before
the next step, and a replay in place needs no copy. What is no tensor of torch's, such as a NumPy array, is handed out
as a tensor that shares its memory (``torch.from_numpy``).

``docs/how-to/write-an-integration.md`` writes one, and :class:`tiercheck.testing.providers.StateProviderTests`
certifies it.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any, Protocol

import torch

from tiercheck import schema
from tiercheck.errors import Mismatch, UnsupportedSetup
from tiercheck.format.index.logical import EXTRA, MASTER, LogicalIndex, LogicalTensor, Piece, Role, whole
from tiercheck.streams.optimizers.elementwise import is_elementwise
from tiercheck.streams.optimizers.stand_in import StandIn, known_stand_in
from tiercheck.streams.replay.libraries import library_of
from tiercheck.streams.tensors.as_bytes import dtype_name, is_given
from tiercheck.streams.tensors.joint import AnyOptimizer, kind_of, parts_of, qualified

__all__ = [
    "Form",
    "Identity",
    "OptimizerIdentity",
    "StateProvider",
    "check_shapes",
    "copy_into",
    "extras_of",
    "forms_of",
    "identity_digest",
    "loaded_value",
    "logical_tensor",
    "shown_form",
    "whole_index",
]


Form = tuple[torch.dtype, tuple[int, ...]]
"""A tensor's dtype and shape."""


@dataclass(frozen=True)
class OptimizerIdentity:
    """What must be equal for a replay to be bit for bit the original step.

    ``implementation`` is ``single_tensor``, ``foreach`` or ``fused`` for torch's Adam and AdamW, and
    ``called`` for any other, which is replayed by calling it.
    """

    kind: str
    implementation: str
    torch_version: str
    instruction_set: str
    device: str
    library: str = ""
    """Where the optimizer is not torch's own: whose it is, and a digest of its code
    (:mod:`tiercheck.streams.replay.libraries`)."""
    stand_in: StandIn | None = None
    """The kernel on the host that has the bits of an optimizer on a GPU. It says how a step may be replayed, and
    nothing of how it was taken."""
    threads: int = 0
    """If it sums over a tensor on the host: torch's threads, each of which sums a part. 0: they do not matter."""
    memory_order: bool = False
    """Some parameters are not contiguous, and a fused kernel on the host, which rounds the last elements in the order
    of memory otherwise, takes others for the last."""

    @classmethod
    def of(cls, optimizer: AnyOptimizer, device: torch.device) -> OptimizerIdentity:
        kind, implementation = kind_of(optimizer), implementation_of(optimizer, device)
        classes: list[type] = [type(part) for part in parts_of(optimizer)]
        libraries = dict.fromkeys(map(library_of, classes))
        sums = not all(is_elementwise(each) or each.__module__.startswith("deepspeed.") for each in classes)
        return cls(
            kind=kind,
            implementation=implementation,
            torch_version=str(torch.__version__),
            instruction_set=torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device_name(device),
            device=device.type,
            library=", ".join(filter(None, libraries)),
            stand_in=None if device.type == "cpu" else known_stand_in(kind, implementation),
            threads=torch.get_num_threads() if sums and device.type == "cpu" else 0,
            memory_order=device.type == "cpu" and steps_in_memory_order(optimizer),
        )

    @classmethod
    def without_torch(cls, kind: type, *, distributions: Sequence[str] = ()) -> OptimizerIdentity:
        """Of an optimizer whose class is not torch's, and which computes on the host. Its code and the version of its
        package are told by themselves; ``distributions`` are the others that its step computes with, such as ``numpy``.
        """
        used = [f"{name} {metadata.version(name)}" for name in distributions]
        return cls(
            kind=qualified(kind),
            implementation="called",
            torch_version="",
            instruction_set=torch.backends.cpu.get_cpu_capability(),
            device="cpu",
            library=", ".join([*used, library_of(kind)]),
        )


@schema.ready
@dataclass(frozen=True)
class Identity:
    """What a checkpoint must agree on with the job that loads it."""

    framework: str
    """The layout of the state, such as ``torch`` or ``deepspeed-zero1-bf16``."""
    model: str
    """A digest of the names, shapes and dtypes of this rank's tensors."""
    model_summary: str
    """The same in words, for the message that refuses another model."""
    optimizer: OptimizerIdentity

    @classmethod
    def of(
        cls,
        framework: str,
        provider: StateProvider,
        optimizer: OptimizerIdentity,
        *,
        parameters: Sequence[str] = (),
    ) -> Identity:
        """Of what a provider holds, by the names, shapes and dtypes of its tensors. ``parameters``: what the model is
        in words, one line each, if a rank's tensors do not tell."""
        masters, others = provider.masters(), extras_of(provider)
        tensors = [describe_tensor(name, tensor) for name, tensor in (*masters.items(), *others.items())]
        elements = sum(tensor.numel() for tensor in masters.values())
        model = f"{len(parameters)} parameters, and on this rank " if parameters else ""
        return cls(
            framework=framework,
            model=identity_digest([*parameters, *tensors]),
            model_summary=f"{model}{len(masters)} trained tensors of {elements:,} elements, {len(others)} others",
            optimizer=optimizer,
        )


class StateProvider(Protocol):
    """One rank's training state. A class that names this one as its base inherits the defaults of ten methods."""

    @abstractmethod
    def identity(self) -> Identity:
        """What this rank trains, and how (:meth:`Identity.of`)."""

    @abstractmethod
    def masters(self) -> Mapping[str, torch.Tensor]:
        """The tensors the optimizer updates, live, by a name that is stable across restarts.

        Under ZeRO these are the rank's full-precision partitions; names are unique within the rank.
        """

    def group_of(self) -> Mapping[str, int]:
        """The index of each master's parameter group. By default there is one group."""
        return dict.fromkeys(self.masters(), 0)

    def gradient_dtypes(self) -> Mapping[str, torch.dtype]:
        """By master, the dtype that should hold every value of its gradients, if that is another than the master's: of
        bf16 training they come as fp32, and bf16 holds them. Memory is made ready by it; from the first step on, what
        came counts. By default, the master's."""
        return {}

    def tell_of_forward(self, begins: Callable[[], None]) -> bool:
        """Call ``begins`` whenever a forward pass begins; returns whether copies from a GPU had better wait for that,
        since something waits for the whole GPU before (:class:`~tiercheck.streams.device.gate.Gate`). By default
        nothing does."""
        return False

    def steps_together(self) -> bool:
        """Whether the optimizer's step takes all ranks, since it communicates: a recovery has them replay the same
        steps. By default it is each rank's own."""
        return False

    @abstractmethod
    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        """Per master, the optimizer's tensors for it (``exp_avg``, ``step``...), live, and plain values. It may be
        empty before the first step."""

    def held_by_optimizer(self) -> Sequence[Any] | None:
        """What the optimizer holds of all masters: tensors and numbers alone, and each time the very objects, in the
        same order. It is asked several times an iteration, to see whether anything but the step has written to them.
        By default ``None``: :meth:`optimizer_state` is asked, which takes longer."""
        return None

    def frozen(self) -> Mapping[str, torch.Tensor]:
        """The parameters that no optimizer updates, live. By default there are none."""
        return {}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """What a forward pass may change, and no optimizer does (running statistics), live. By default there is
        nothing."""
        return {}

    def index(self) -> LogicalIndex:
        """What of the model each tensor of :meth:`masters` (``master/NAME``), :meth:`frozen` and :meth:`buffers`
        (``extra/NAME``) is. By default each is a whole tensor of the model, and named as it is: a rank that holds parts
        must say which. The names of the model's tensors are the same on all ranks and under every layout. It is asked
        again only if tensors were added, taken away or reshaped."""
        return whole_index(self)

    @abstractmethod
    def hyperparameters(self) -> list[dict[str, Any]]:
        """Per parameter group, its options as plain values (``lr``, ``betas``, ``weight_decay``...). If the loop moves
        ``lr``, ``initial_lr`` holds what it began with: a start compares that with the checkpoint's, and warns if they
        differ."""

    @abstractmethod
    def host_state(self) -> dict[str, Any]:
        """Everything else that the next iteration depends on: RNGs, schedulers, scalers, data position.

        Plain values, ``bytes`` and NumPy arrays only, as of the *end* of the current iteration. The name ``doubts`` is
        taken (:class:`~tiercheck.streams.doubts.Doubts`).
        """

    @abstractmethod
    def load(
        self,
        *,
        masters: Mapping[str, torch.Tensor],
        optimizer_state: Mapping[str, Mapping[str, Any]],
        extras: Mapping[str, torch.Tensor],
        hyperparameters: list[dict[str, Any]],
    ) -> None:
        """Make the given values the rank's state; they are copied, since their memory is another's, unless they are
        in the rank's own memory already (:func:`copy_into` and :func:`loaded_value` see to that). ``extras``: what
        :meth:`frozen` and :meth:`buffers` return. :meth:`refresh` follows. Errors: ``Mismatch`` if names or shapes
        differ, before anything is changed (:func:`copy_into`)."""

    @abstractmethod
    def apply(self, gradients: Mapping[str, torch.Tensor], hyperparameters: list[dict[str, Any]]) -> None:
        """Run the optimizer's own step on the masters with these gradients and options. A master without a
        gradient is left out, as the optimizer leaves out a parameter whose ``grad`` is ``None``. The gradients are not
        written to."""

    def refresh(self) -> None:
        """Rebuild what derives from the masters (low-precision copies, gathered parameters). Collective. By default
        nothing derives from them."""
        return

    def translated_host_state(self, state: Mapping[str, Any], version: int) -> dict[str, Any]:
        """What another provider's :meth:`host_state` said of this model at ``version``, by the names that this one
        uses; other names are ignored. By default, what both call the same."""
        return dict(state)

    @abstractmethod
    def restore_host_state(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`host_state` returned."""


def extras_of(provider: StateProvider) -> dict[str, torch.Tensor]:
    """All tensors that no optimizer updates, live."""
    return {**provider.frozen(), **provider.buffers()}


def whole_index(
    provider: StateProvider,
    name_of: Callable[[str], str] = str,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> LogicalIndex:
    """The index of a rank whose tensors are whole. ``name_of``: by the provider's name, the model's. Errors:
    ``UnsupportedSetup`` if two tensors have one name, or no shard can hold one."""
    tensors: dict[str, LogicalTensor] = {}
    stored: dict[str, tuple[Piece, ...]] = {}
    for prefix, role, held in (
        (MASTER, Role.PARAMETER, provider.masters()),
        (EXTRA, Role.PARAMETER, provider.frozen()),
        (EXTRA, Role.BUFFER, provider.buffers()),
    ):
        for name, tensor in held.items():
            logical = logical_tensor(name_of(name), tensor, role, trained=prefix == MASTER)
            if logical.name in tensors:
                raise UnsupportedSetup(
                    f"two tensors of the state have the name {logical.name}: if another tensor has taken the place of "
                    "the one that the optimizer updates, give that one to the optimizer, or copy into the old one; "
                    "else give each a name of its own"
                )
            tensors[logical.name], stored[prefix + name] = logical, (whole(logical),)
    return LogicalIndex(tensors, stored, dict(aliases))


def logical_tensor(name: str, tensor: torch.Tensor, role: Role, *, trained: bool = False) -> LogicalTensor:
    """A tensor of the model that this rank has whole."""
    return LogicalTensor(name, dtype_name(tensor, name), tuple(tensor.shape), role, trained)


def implementation_of(optimizer: AnyOptimizer, device: torch.device) -> str:
    """How torch's Adam and AdamW run on ``device``: the three differ in their last bits. ``called`` for others."""
    kinds = {type(part) for part in parts_of(optimizer)}
    if kinds not in ({torch.optim.Adam}, {torch.optim.AdamW}):
        return "called"
    chosen: set[str] = set()
    for group in optimizer.param_groups:
        if group.get("fused"):
            chosen.add("fused")
        elif group.get("foreach") or (group.get("foreach") is None and device.type != "cpu"):
            chosen.add("foreach")
        else:
            chosen.add("single_tensor")
    return chosen.pop() if len(chosen) == 1 else "called"


def steps_in_memory_order(optimizer: AnyOptimizer) -> bool:
    fused = [each for group in optimizer.param_groups if group.get("fused") for each in group["params"]]
    return not all(each.is_contiguous() for each in fused)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def forms_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Form]:
    """By name, each one's form."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def shown_form(form: Form | None) -> str:
    """In words. ``None``: of a tensor that is not there."""
    return "not there" if form is None else f"{form[1]} {form[0]}"


def describe_tensor(name: str, tensor: torch.Tensor) -> str:
    return f"{name} {tuple(tensor.shape)} {tensor.dtype}"


def identity_digest(lines: Iterable[str]) -> str:
    """Sixteen hexadecimal digits that differ where the lines do."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def check_shapes(targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    """Errors: ``Mismatch`` if the names or the shapes differ."""
    if targets.keys() != sources.keys():
        differing = ", ".join(sorted(targets.keys() ^ sources.keys())[:5])
        raise Mismatch(f"the checkpoint and the job hold different tensors, among them {differing}")
    for name, target in targets.items():
        if target.shape != sources[name].shape:
            raise Mismatch(
                f"{name} is {tuple(sources[name].shape)} in the checkpoint and {tuple(target.shape)} in the job"
            )


def loaded_value(current: Any, saved: Any, options: Mapping[str, Any], device: torch.device) -> Any:
    """A value of the optimizer's state as the optimizer keeps it: written into ``current``, which is there already, if
    that fits; else a copy where torch would keep it. ``options``: of the parameter's group; ``device``: where the
    parameter is."""
    if not isinstance(saved, torch.Tensor):
        return saved
    if type(current) is torch.Tensor and (current.shape, current.dtype) == (saved.shape, saved.dtype):
        copy_into({"": current}, {"": saved})
        return current
    if is_given(saved) and saved.device == device:
        return saved
    counts_on_device = options.get("fused") or options.get("capturable")
    return saved.to(device if saved.ndim > 0 or counts_on_device else "cpu", copy=True)


def copy_into(targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    """Copy each source into the target of its name, unless it is the same memory. Errors: those of
    :func:`check_shapes`, before any is copied."""
    check_shapes(targets, sources)
    with torch.no_grad():
        for name, target in targets.items():
            if not same_memory(target, sources[name]):
                target.copy_(sources[name])


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.device, one.dtype, one.stride()) == (other.device, other.dtype, other.stride())
    return alike and not one.is_meta and one.data_ptr() == other.data_ptr()
