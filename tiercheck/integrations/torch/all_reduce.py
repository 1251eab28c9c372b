"""DDP's all-reduce of compressed gradients: what crosses the network is what the codec keeps.

Each rank encodes its own gradients, with a residual of its own; all ranks gather all encodings, decode them, and add
them up in the order of the ranks. So all ranks get the same bits, and zeros where no rank has sent anything: with
``codec="nonzero"`` the differentials hold the sum without loss, and so small, whatever clipping does to it afterwards.

Source: Deep Gradient Compression (Lin et al., 2018), section 3; of error feedback, see
:mod:`tiercheck.streams.gradients.encoder`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.errors import ConfigurationError, Mismatch
from tiercheck.format import host_state
from tiercheck.streams.codecs import DTYPES, codec, decode, decode_sparse
from tiercheck.streams.tensors.as_bytes import array_of, dtype_name, tensor_of
from tiercheck.types import Fidelity

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

__all__ = ["Compression", "compressed_all_reduce"]

ALIGNMENT = 64
DESCRIPTION_NBYTES = 512
"""Room for what describes one tensor's encoding in a message, since all ranks' messages must be equally long."""
SEED_ELEMENTS = 1024
"""Elements of a gradient from which the seed of its encoding comes."""


class Scaler(Protocol):
    """A ``torch.amp.GradScaler``."""

    def get_scale(self) -> float: ...


class Compression:
    """What :func:`compressed_all_reduce` keeps for one model from one iteration to the next: the residuals.

    It has ``state_dict`` and ``load_state_dict``. Passed to ``attach`` in ``stateful=`` it is saved with every version,
    four bytes a trained element: then a resumed run is the uninterrupted one, bit for bit. Else residuals begin at
    zero, and what they held is not trained on.

    ``codec_name``: any approximate one, with ``+feedback`` or without. ``threads``: the most that encode and decode.
    ``group``: the process group; the default one if it is ``None``. ``scaler``: the ``GradScaler`` of the loss, if
    there is one: gradients come multiplied by its scale, and what is left of them has to follow if that changes.
    Errors: ``ConfigurationError``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        codec_name: str = "sparse+feedback",
        threads: int = 1,
        group: dist.ProcessGroup | None = None,
        scaler: Scaler | None = None,
    ) -> None:
        self.codec = codec(codec_name)
        if self.codec.fidelity is Fidelity.EXACT:
            raise ConfigurationError(f"the codec {codec_name!r} keeps every bit: without a hook DDP is faster")
        kernels.warm_up((*self.codec.kernels_used(), kernels.scatter_add))
        self.threads = threads
        self.group = group
        self._scaler = scaler
        self._scale = 1.0
        """Of the gradients that the residuals are left of."""
        self._names = {id(p): name.removeprefix("module.") for name, p in model.named_parameters() if p.requires_grad}
        self._residuals: dict[str, NDArray[np.float32]] = {}
        for name, parameter in model.named_parameters():
            size = self.codec.residual_size(dtype_name(parameter, name), tuple(parameter.shape))
            if parameter.requires_grad and size:
                self._residuals[self._names[id(parameter)]] = np.zeros(size, np.float32)

    def name_of(self, parameter: torch.Tensor) -> str:
        """Errors: ``ConfigurationError`` for a parameter of another model."""
        try:
            return self._names[id(parameter)]
        except KeyError:
            raise ConfigurationError(
                f"a parameter of shape {tuple(parameter.shape)} is none of the model's that Compression was made for"
            ) from None

    def residual(self, name: str) -> NDArray[np.float32] | None:
        """What of this rank's gradients for a parameter has not been sent yet, live; ``None`` without feedback."""
        return self._residuals.get(name)

    @property
    def has_residuals(self) -> bool:
        """Whether something of a step's gradients is left for the next ones."""
        return bool(self._residuals)

    def follow_scale(self) -> None:
        """Bring the residuals to the scale that the gradients have now."""
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        if scale != self._scale:
            for residual in self._residuals.values():
                residual *= np.float32(scale / self._scale)
            self._scale = scale

    def state_dict(self) -> dict[str, Any]:
        """A copy of the residuals by parameter, and the scale of the gradients that they are left of."""
        residuals = {name: torch.from_numpy(residual.copy()) for name, residual in self._residuals.items()}
        return {"residuals": residuals, "scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned. Errors: ``Mismatch``; nothing was changed then."""
        saved, sizes = state.get("residuals", {}), {name: residual.size for name, residual in self._residuals.items()}
        if {name: tensor.numel() for name, tensor in saved.items()} != sizes:
            raise Mismatch("the residuals in the checkpoint are of another model, or of a codec without feedback")
        for name, residual in self._residuals.items():
            residual[:] = saved[name].numpy()
        self._scale = float(state["scale"])


def compressed_all_reduce(compression: Compression, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook: ``model.register_comm_hook(Compression(model), compressed_all_reduce)``.

    The bucket's gradients become the mean over the ranks of what their encodings decode to: summed in fp32 in the order
    of the ranks, then divided by their number, in the gradients' own dtype.

    Each rank receives the encodings of all, so that it pays while their number times the codec's ratio is well below 1.
    """
    compression.follow_scale()
    gradients = bucket.gradients()
    layout = MessageLayout.of(compression, gradients)
    message = np.zeros(layout.nbytes, np.uint8)
    descriptions = []
    for index, (parameter, gradient) in enumerate(zip(bucket.parameters(), gradients, strict=True)):
        name, array = compression.name_of(parameter), array_of(gradient).reshape(-1)
        allocator = PartAllocator(message.data[layout.starts[index] : layout.starts[index + 1]])
        encoding = compression.codec.encode(
            array,
            dtype_name(gradient, name),
            seed=seed_of(array),
            slot=allocator.slot,
            residual=compression.residual(name),
            threads=compression.threads,
        )
        descriptions.append({"encoding": encoding.to_object(), "parts": allocator.parts})
    layout.describe(message, descriptions)

    buffer: torch.Tensor = bucket.buffer()
    sent = torch.from_numpy(message).to(buffer.device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(compression.group))]
    work = dist.all_gather(received, sent, group=compression.group, async_op=True)

    def average(done: torch.futures.Future[Any]) -> torch.Tensor:
        done.value()  # raises what went wrong
        messages = [Received.of(array_of(each), layout) for each in received]
        for index, gradient in enumerate(gradients):
            total = np.zeros(gradient.numel(), np.float32)
            for each in messages:
                each.add_to(total, index, compression.threads)
            gradient.copy_(torch.from_numpy(total).div_(len(messages)).view(gradient.shape))
        return buffer

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(average)
    return future


# DDP compares a hook's annotations with types, and these are strings: without any it asks nothing.
compressed_all_reduce.__annotations__.clear()


@dataclass(frozen=True)
class MessageLayout:
    """Where a message has what: the same on all ranks, since it depends on the tensors' sizes alone."""

    starts: tuple[int, ...]
    """Where the parts of each tensor begin, and behind the last where the descriptions do."""
    nbytes: int

    @classmethod
    def of(cls, compression: Compression, gradients: Sequence[torch.Tensor]) -> MessageLayout:
        rooms = [
            sum(
                round_up(part.nbytes)
                for part in compression.codec.plan(dtype_name(each, "a gradient"), (each.numel(),))
            )
            for each in gradients
        ]
        starts = tuple(accumulate(rooms, initial=0))
        return cls(starts, starts[-1] + DESCRIPTION_NBYTES * (1 + len(gradients)))

    def describe(self, message: NDArray[np.uint8], descriptions: Sequence[Mapping[str, Any]]) -> None:
        packed = host_state.pack(list(descriptions))
        start = self.starts[-1]
        if start + 8 + len(packed) > self.nbytes:
            raise AssertionError(f"{len(descriptions)} encodings take {len(packed)} bytes to describe")
        message[start : start + 8].view(np.uint64)[0] = len(packed)
        message[start + 8 : start + 8 + len(packed)] = np.frombuffer(packed, np.uint8)


@dataclass
class PartAllocator:
    """The room of one tensor's parts in a message, given out from the front."""

    memory: memoryview
    parts: dict[str, list[Any]] = field(default_factory=dict)
    """By suffix: dtype, shape, where it begins."""
    _used: int = 0

    def slot(self, suffix: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
        start, nbytes = self._used, math.prod(shape) * DTYPES[dtype].itemsize
        self.parts[suffix] = [dtype, list(shape), start]
        self._used = start + round_up(nbytes)
        return self.memory[start : start + nbytes]


@dataclass(frozen=True)
class ReceivedPart:
    """A part in another rank's message."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True)
class Received:
    """One rank's message."""

    memory: memoryview
    layout: MessageLayout
    descriptions: Sequence[Any]

    @classmethod
    def of(cls, message: NDArray[np.uint8], layout: MessageLayout) -> Received:
        memory, start = message.data, layout.starts[-1]
        length = int.from_bytes(memory[start : start + 8], "little")
        descriptions: Any = host_state.unpack(memory[start + 8 : start + 8 + length])
        return cls(memory, layout, descriptions)

    def add_to(self, total: NDArray[np.float32], index: int, threads: int) -> None:
        """Add what the rank has sent for the tensor ``index``. Errors: ``Corruption``."""
        encoding, start = self.descriptions[index]["encoding"], self.layout.starts[index]
        parts = {
            suffix: ReceivedPart(
                dtype, tuple(shape), self.memory[start + at :][: math.prod(shape) * DTYPES[dtype].itemsize]
            )
            for suffix, (dtype, shape, at) in self.descriptions[index]["parts"].items()
        }
        sparse = decode_sparse(encoding, parts, threads=threads)
        if sparse is not None:
            kernels.scatter_add(sparse.indices, sparse.values, total)
        else:
            total += tensor_of(decode(encoding, parts, threads=threads), encoding["dtype"]).float().numpy()


def round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def seed_of(gradient: NDArray[Any]) -> int:
    """A seed that a resumed run comes to, too: it depends on nothing but the gradient."""
    return xxhash.xxh32_intdigest(gradient[:SEED_ELEMENTS].tobytes())
