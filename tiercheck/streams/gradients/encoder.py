"""Error feedback, and training on the compressed gradient.

What an approximate codec leaves out of a gradient is lost to a replay. Two things make up for it, and go together:

- **Error feedback**: the codec encodes gradient plus *residual*, and the residual becomes what the encoding has left
  out, so that it is sent later instead of never. Source: Seide et al., "1-Bit Stochastic Gradient Descent" (2014),
  section 2; Karimireddy et al., "Error Feedback Fixes SignSGD" (2019).
- **Training on the compressed gradient**: the optimizer steps with what the encoding decodes to. Then nothing is lost:
  the replay of the recorded gradients is the training itself, bit for bit. Source: LowDiff (2025), which reuses the
  compressed gradients of the training as differential checkpoints.

A residual is fp32, one element for each of its master's: four bytes a parameter. It is in host memory, or in a GPU's if
that encodes (:class:`~tiercheck.streams.gradients.device.DeviceResiduals`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.errors import ConfigurationError, Mismatch
from tiercheck.format.container import TensorSpec
from tiercheck.kernels import HalfGradient, SparseGradient, widened
from tiercheck.streams.codecs import DTYPES, Codec, Encoding, Slot, decode, decode_sparse
from tiercheck.streams.tensors.as_bytes import array_of, dtype_name, tensor_of
from tiercheck.types import Fidelity

__all__ = ["KERNELS_USED", "GradientEncoder", "forget_sent", "scratch"]

KERNELS_USED = (kernels.scatter,)
"""What training on the compressed gradient calls, beside the kernels of the codec."""


@dataclass(frozen=True)
class Written:
    """A part just encoded, where it lies: what a codec decodes it from."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class GradientEncoder:
    """Encodes one rank's gradients, and keeps the residual of each master from one version to the next.

    ``train_on_compressed``: :meth:`encode` also makes each gradient what its encoding decodes to, so that the
    optimizer steps with that. Then the residuals belong to the training: they shape every later gradient. Else they
    belong to the chain of differentials, and begin at zero with each base.

    Errors: ``ConfigurationError`` if training on the compressed gradient is asked of a codec that keeps every bit.
    """

    def __init__(
        self, codec: Codec, masters: Mapping[str, TensorSpec], *, train_on_compressed: bool = False, threads: int = 1
    ) -> None:
        if train_on_compressed and codec.fidelity is Fidelity.EXACT:
            raise ConfigurationError(
                f"train_on_compressed=True needs a codec that compresses with loss, such as 'sparse' or 'int8'; the "
                f"codec {codec.name!r} keeps every bit, so that the gradient would be the same without it"
            )
        self.codec = codec
        self.train_on_compressed = train_on_compressed
        self._threads = threads
        self._residuals: dict[str, NDArray[np.float32]] = {
            name: np.zeros(size, np.float32)
            for name, spec in masters.items()
            if (size := codec.residual_size(spec.dtype, spec.shape))
        }

    @property
    def residuals(self) -> Mapping[str, NDArray[np.float32]]:
        """What has not been encoded yet of each master's gradients so far, live: 1-D, fp32. Empty without error
        feedback."""
        return MappingProxyType(self._residuals)

    def give_up_residuals(self, names: Iterable[str]) -> dict[str, int]:
        """Somebody else keeps those of these masters, and encodes their gradients. Returns how many elements each
        has."""
        return {name: self._residuals.pop(name).size for name in names if name in self._residuals}

    def encode(self, name: str, gradient: torch.Tensor, *, seed: int, slot: Slot) -> Encoding:
        """Encode the gradient of the master ``name`` into memory from ``slot``. If training uses the compressed
        gradient, ``gradient`` is then what that memory decodes to, in its own dtype.

        Errors: those of :meth:`~tiercheck.streams.codecs.Codec.encode` and of ``slot``; after an error of ``slot`` the
        residual is worth nothing.
        """
        parts: dict[str, Written] = {}

        def noted(suffix: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
            memory = slot(suffix, dtype, shape)
            parts[suffix] = Written(dtype, tuple(shape), memory)
            return memory

        encoding = self.codec.encode(
            array_of(gradient),
            dtype_name(gradient, name),
            seed=seed,
            slot=noted,
            residual=self._residuals.get(name),
            threads=self._threads,
        )
        if not self.train_on_compressed:
            return encoding
        self._decode_into(gradient, encoding, parts)
        return replace(encoding, trained_on=True)

    def _decode_into(self, gradient: torch.Tensor, encoding: Encoding, parts: Mapping[str, Written]) -> None:
        description = encoding.to_object()
        if gradient.dtype is torch.float32 and gradient.device.type == "cpu" and gradient.is_contiguous():
            sparse = decode_sparse(description, parts, threads=self._threads)
            if sparse is not None:  # in place, without a dense copy in between
                kernels.scatter(sparse.indices, sparse.values, array_of(gradient).reshape(-1))
                return
        with torch.no_grad():
            gradient.copy_(tensor_of(decode(description, parts, threads=self._threads), encoding.dtype))

    def base_begun(self) -> None:
        """What was captured so far is in a base: a chain that starts there owes nothing of it."""
        if not self.train_on_compressed:
            for residual in self._residuals.values():
                residual.fill(0)

    def saved_with_bases(self) -> dict[str, torch.Tensor]:
        """The residuals, live, where they are part of the training's state; else nothing."""
        return {name: torch.from_numpy(each) for name, each in self._residuals.items() if self.train_on_compressed}

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take over (copied) what :meth:`saved_with_bases` returned; what is missing there starts from zero.

        Errors: ``Mismatch`` if a residual is of another master's size; nothing was changed then.
        """
        known = {name: tensor for name, tensor in saved.items() if name in self._residuals}
        for name, tensor in known.items():
            if tensor.dtype is not torch.float32 or tensor.numel() != self._residuals[name].size:
                raise Mismatch(
                    f"the residual of {name} is {tensor.dtype} {tuple(tensor.shape)} in the checkpoint and has "
                    f"{self._residuals[name].size} elements of fp32 in the job"
                )
        for name, residual in self._residuals.items():
            if name in known:
                residual[:] = known[name].reshape(-1).numpy()
            else:
                residual.fill(0)


def forget_sent(
    residuals: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor | SparseGradient | HalfGradient]
) -> None:
    """Take out of residuals, in place, what later encodings have sent, given what these decode to.

    An element that was sent took all of its residual with it; one that comes back as zero has left it where it was.
    Over the versions after a base this leaves of the base's residuals what no replay has applied. The true ones also
    hold what was left out of those versions' own gradients, which nobody has recorded.
    """
    for name, residual in residuals.items():
        gradient = gradients.get(name)
        if isinstance(gradient, SparseGradient):
            residual.numpy()[gradient.indices] = 0
        elif isinstance(gradient, HalfGradient):
            residual.numpy()[widened(gradient) != 0] = 0
        elif gradient is not None:
            residual.masked_fill_(gradient.reshape(-1) != 0, 0)


def scratch(suffix: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
    """Memory for a part that no tier is to have: a :data:`~tiercheck.streams.codecs.Slot`."""
    return np.empty(math.prod(shape) * DTYPES[dtype].itemsize, np.uint8).data
