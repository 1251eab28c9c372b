"""Differentials, decoded: runs of consecutive steps, that are merged in a tree.

What a replay needs of version after version can be prepared in any order: decoding and verifying a differential depends
on no other one, and two neighbouring runs merge into one whatever they were merged from. So the versions of a batch are
halved again and again, the halves decoded and merged each on a thread of its own, and what comes out is the run that a
single thread makes, bit for bit.

Source: LowDiff (2025), the section on parallel recovery, which merges differentials pairwise in a tree. There the
gradients of neighbours are summed. That is right for plain SGD, but in another rounding than the steps had; and
Adam's moments depend on each gradient by itself. So here a merge concatenates the steps, in order, and nothing is
rounded. What does get smaller on the way: of the buffers only the newest are kept, and of the host states the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch

from tiercheck.errors import Corruption
from tiercheck.kernels import HalfGradient, SparseGradient
from tiercheck.kernels.threads import run as on_threads
from tiercheck.streams.codecs import codec_of
from tiercheck.streams.errors import Undecodable
from tiercheck.streams.records.recorded import Differential
from tiercheck.streams.replay.fidelity import Tally
from tiercheck.streams.tensors.as_bytes import tensor_of

__all__ = ["Gradient", "GradientsOnDemand", "Run", "Step", "check_fits", "decode_run", "run_of", "wide"]

Gradient = torch.Tensor | SparseGradient | HalfGradient
"""In the master's shape, on the host; or of its flattened elements those that are not zero, as fp32; or all of them, as
they are stored."""


@dataclass(frozen=True)
class Step:
    """One step of the optimizer: the gradients it had, by master, and the options of each parameter group."""

    version: int
    hyperparameters: list[dict[str, Any]]
    gradients: Mapping[str, Gradient]


@dataclass(frozen=True)
class Run:
    """The versions ``first..last``, decoded. Tensors may lie over the memory of the shards they came from."""

    first: int
    last: int
    steps: tuple[Step, ...]
    """In temporal order; a version that was skipped has none."""
    buffers: Mapping[str, torch.Tensor]
    """As of ``last``, those that changed in one of the versions."""
    host_state: Mapping[str, Any]
    """As of ``last``."""
    tally: Tally

    def then(self, later: Run) -> Run:
        """This run and the one right after it as one. Associative. Errors: ``ValueError`` if versions lie between
        them."""
        if later.first != self.last + 1:
            raise ValueError(f"the run {later.first}..{later.last} does not follow {self.first}..{self.last}")
        return Run(
            first=self.first,
            last=later.last,
            steps=self.steps + later.steps,
            buffers={**self.buffers, **later.buffers},
            host_state=later.host_state,
            tally=self.tally + later.tally,
        )


def decode_run(differentials: Sequence[Differential], *, threads: int = 1) -> Run:
    """Decode at least one differential, of consecutive versions, into one run. Verifies what it reads.

    At most ``threads`` threads run, the caller's included; what comes out does not depend on their number.
    Errors: ``Undecodable``; ``ValueError`` for versions that are not consecutive.
    """
    if threads < 1:
        raise ValueError(f"decoding needs at least one thread, not {threads}")
    if len(differentials) == 1:
        return run_of(differentials[0], threads=threads)
    if threads == 1:
        return reduce(Run.then, map(run_of, differentials))
    return _halves(differentials, threads)


def _halves(differentials: Sequence[Differential], threads: int) -> Run:
    middle = len(differentials) // 2  # the later half is the longer one, and gets the odd thread
    halves = [(differentials[:middle], threads // 2), (differentials[middle:], threads - threads // 2)]

    def decode(piece: slice) -> Run:
        ((half, share),) = halves[piece]
        return decode_run(half, threads=share)

    earlier, later = on_threads(decode, [slice(0, 1), slice(1, 2)])
    return earlier.then(later)


def run_of(differential: Differential, *, threads: int = 1) -> Run:
    """A run of one version. Errors: ``Undecodable``."""
    version = differential.version
    try:
        gradients = _gradients(differential, threads)
        buffers = differential.buffers()
    except Corruption as error:
        raise Undecodable(version, error, whole=differential.is_whole()) from error
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        cause = Corruption(f"{type(error).__name__}: {error}")
        raise Undecodable(version, cause, whole=differential.is_whole()) from error
    step = Step(version, differential.hyperparameters, gradients)
    return Run(
        first=version,
        last=version,
        steps=() if differential.skipped else (step,),
        buffers=buffers,
        host_state=differential.host_state,
        tally=Tally.of(map(differential.encoding, differential.encodings)),
    )


def _gradients(differential: Differential, threads: int) -> dict[str, Gradient]:
    """Every gradient; the masters in as many contiguous pieces as there are threads, of about equal numbers."""
    names = list(differential.encodings)
    count = max(1, min(threads, len(names)))
    pieces = [slice(len(names) * index // count, len(names) * (index + 1) // count) for index in range(count)]

    def decode(piece: slice) -> dict[str, Gradient]:
        return {name: differential.gradient_as_stored(name, threads=threads // count) for name in names[piece]}

    return {name: each for found in on_threads(decode, pieces) for name, each in found.items()}


def wide(gradient: HalfGradient) -> torch.Tensor:
    """The gradient's elements (fp32, 1-D), by torch: who calls the optimizer needs no kernel. The bits are those
    of :func:`tiercheck.kernels.widened`."""
    halves = tensor_of(gradient.halves, "F16" if gradient.halves.dtype == np.float16 else "BF16").float()
    return halves if gradient.scale is None else halves.mul_(gradient.scale)


class GradientsOnDemand(Mapping[str, Gradient]):
    """A record's gradients by master. Each is decoded when it is asked for, and not kept. Errors: ``Corruption``."""

    def __init__(self, differential: Differential) -> None:
        self._differential = differential

    def __getitem__(self, name: str) -> Gradient:
        return self._differential.gradient_as_stored(name)

    def __contains__(self, name: object) -> bool:
        return name in self._differential.encodings

    def __iter__(self) -> Iterator[str]:
        return iter(self._differential.encodings)

    def __len__(self) -> int:
        return len(self._differential.encodings)


def check_fits(differential: Differential, masters: Mapping[str, torch.Tensor], groups: int) -> None:
    """Whether it is a differential of this state, without decoding it.

    Errors: ``Corruption`` if it names a master or a shape that the state does not have, or lacks the options of one
    of the ``groups`` parameter groups; ``ConfigurationError`` for a codec that this version does not have.
    """
    for name in differential.encodings:
        encoding = differential.encoding(name)
        codec_of(encoding)
        shape = encoding.shape
        if name not in masters or tuple(masters[name].shape) != shape:
            raise Corruption(
                f"differential {differential.version} has a gradient for {name!r} {shape}, which the state does "
                "not have"
            )
    if not differential.skipped and len(differential.hyperparameters) < groups:
        raise Corruption(
            f"differential {differential.version} has options for {len(differential.hyperparameters)} groups, "
            f"not {groups}"
        )
