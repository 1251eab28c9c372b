"""How much room gradients take in a record: as much as in the last record, and in the first one as the provider
expects.

Mixed-precision training hands its gradients over in fp32. They are stored as the bf16 or fp16 numbers that they were
computed as (:mod:`tiercheck.streams.gradients.scales`), in half the bytes. If more was reserved than a record needs,
the rest of that memory is unused. If a record needs more than was reserved, it is moved to longer memory
(:meth:`~tiercheck.streams.records.iteration.IterationCapture.move`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from tiercheck.format.container import TensorSpec, header_room
from tiercheck.format.header import round_up
from tiercheck.streams.codecs import Codec
from tiercheck.streams.codecs.exact import Exact
from tiercheck.streams.records.record_names import gradient_name

__all__ = ["GradientRoom"]

NARROWED = {"F32": ("BF16", "F16")}
"""By dtype of a gradient: the other dtypes in which the exact codec may store it."""


class GradientRoom:
    """The room of one rank's gradients. ``expected``: by master, the dtype in which the provider expects its gradient
    to be stored."""

    def __init__(self, codec: Codec, masters: Mapping[str, TensorSpec], expected: Mapping[str, str]) -> None:
        self._codec = codec
        self._masters = masters
        own = {name: spec.dtype for name, spec in masters.items()}
        specs = self._specs(own)
        self.count = len(specs)
        self.elements = {name: math.prod(spec.shape) for name, spec in masters.items()}
        self.header_nbytes = header_room(specs)
        self.nbytes_most = self._nbytes(own)
        """Bytes if every gradient is stored in its master's dtype."""
        self.dtypes: Mapping[str, str] = own
        """By master, the dtype in which its gradient was stored last, or is expected to be."""
        self._noted: Mapping[str, str] = own
        self.nbytes = self.nbytes_most
        """Bytes if the gradients are stored in :attr:`dtypes`."""
        if type(codec) is Exact:
            self.note({name: expected[name] for name in own if expected.get(name) in NARROWED.get(own[name], ())})

    def nbytes_given(self, halved: Collection[str]) -> int:
        """Bytes of gradients as they come, in their masters' dtypes; of those of ``halved`` half of that."""
        return sum(round_up(spec.nbytes // (1 + (name in halved))) for name, spec in self._masters.items())

    def note(self, stored: Mapping[str, str]) -> None:
        """Remember how a record stores its gradients: by master, the dtype. The mapping must not change afterwards."""
        if stored is self._noted or type(self._codec) is not Exact:
            return
        self._noted = stored
        if all(self.dtypes[name] == dtype for name, dtype in stored.items()):
            return
        self.dtypes = {**self.dtypes, **stored}
        self.nbytes = self._nbytes(self.dtypes)

    def _nbytes(self, dtypes: Mapping[str, str]) -> int:
        return self.header_nbytes + sum(round_up(spec.nbytes) for spec in self._specs(dtypes))

    def _specs(self, dtypes: Mapping[str, str]) -> list[TensorSpec]:
        return [
            TensorSpec(gradient_name(0, name, part.suffix), part.dtype, part.shape)
            for name, spec in self._masters.items()
            for part in self._codec.plan(dtypes[name], spec.shape)
        ]
