"""The room that gradients take in a record: as in the last one. Before there is one, as the provider expects them.

Gradients of half-precision training come as fp32, and are stored as the bf16 or fp16 numbers that they were made of:
half of what their dtype takes.
If more was reserved than a record keeps, the rest is memory that holds nothing. If a record needs more than was
reserved, it goes on in longer memory (:meth:`~tiercheck.streams.records.iteration.IterationCapture.move`).
"""

from __future__ import annotations

from collections.abc import Mapping

from tiercheck.format.container import TensorSpec, header_room
from tiercheck.format.header import round_up
from tiercheck.streams.codecs import Codec
from tiercheck.streams.codecs.exact import Exact
from tiercheck.streams.records.record_names import gradient_name

__all__ = ["GradientRoom"]

NARROWED = {"F32": ("BF16", "F16")}
"""As which dtypes the exact codec may store gradients of a dtype, beside their own."""


class GradientRoom:
    """Of one rank's gradients. ``expected``: by master, the dtype that should hold what its gradient holds."""

    def __init__(self, codec: Codec, masters: Mapping[str, TensorSpec], expected: Mapping[str, str]) -> None:
        self._codec = codec
        self._masters = masters
        own = {name: spec.dtype for name, spec in masters.items()}
        specs = self._specs(own)
        self.count = len(specs)
        self.header_nbytes = header_room(specs)
        self.nbytes_most = self._nbytes(own)
        """Of gradients in the masters' dtypes."""
        self.dtypes: Mapping[str, str] = own
        """By master, as which dtype its gradient is stored, as far as is known."""
        self._noted: Mapping[str, str] = own
        self.nbytes = self.nbytes_most
        """Of gradients in these."""
        if type(codec) is Exact:
            self.note({name: expected[name] for name in own if expected.get(name) in NARROWED.get(own[name], ())})

    def note(self, stored: Mapping[str, str]) -> None:
        """By master, the dtypes in which a record stores its gradients. The mapping never changes."""
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
