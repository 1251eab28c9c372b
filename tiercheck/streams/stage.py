"""One rank's stage of a pipeline, as the core knows it: what a stage that is lost is made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tiercheck import schema
from tiercheck.format.index.boxes import Copy
from tiercheck.format.index.logical import LogicalIndex

__all__ = ["STATE", "Moments", "StagePlace", "StageState", "parameter_name", "state_name"]

STATE = "state/"


def state_name(stored: str, key: str) -> str:
    """The optimizer's tensor ``key`` of a stored master, to be read and added to as the master is."""
    return f"{STATE}{key}/{stored}"


def parameter_name(layer: str, name: str) -> str:
    """The model's name of a parameter that is called ``name`` in its layer; empty if the layer is a parameter."""
    return f"{layer}.{name}" if name else layer


@schema.ready
@dataclass(frozen=True)
class StagePlace:
    """Where a rank stands in a pipeline, and what its stage trains."""

    stage: int
    stages: int
    copies: int | None
    """How many ranks of the stage hold the same elements of a master; ``None``: all of them."""
    layers: tuple[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], ...]
    """In their order in the pipeline: the layer's name, and its trained parameters with their shapes, by their names in
    the layer (:func:`parameter_name`)."""
    tied: tuple[str, ...]
    """Those of the layers that other stages may train too, under the same name. No two stages have another layer of the
    same name, or the one could be taken for the other."""
    scheduled: bool
    """Whether a learning-rate schedule is attached."""
    kept: tuple[str, ...] = ()
    """What no optimizer updates (frozen parameters, buffers): of a stage that is made anew it keeps what the script
    made."""


@schema.ready
@dataclass(frozen=True)
class Moments:
    """What a rank's optimizer knows of a master, if it is known what that is."""

    steps: int
    """How many it has counted; 0 before the first one."""
    betas: Mapping[str, float]
    """By the key of a moment."""
    state: Mapping[str, Any]
    """As of :meth:`StageState.optimizer`."""


class StageState(Protocol):
    """What a stage of a pipeline that is lost is made of. Elements are those of masters, in fp32."""

    @property
    def place(self) -> StagePlace: ...

    def index(self) -> LogicalIndex:
        """What of the model this rank's masters are."""
        ...

    def norms(self, host_state: Mapping[str, Any]) -> Sequence[float | None]:
        """By layer of :attr:`place`, the sum of the squares of what this rank held of the last step's gradient, as a
        version's host state tells; ``None`` if it does not tell."""
        ...

    def clear(self, stored: Collection[str]) -> None:
        """Fill these masters with zeros. The optimizer's state stays as it is."""
        ...

    def optimizer(self, stored: str) -> Mapping[str, Any]:
        """The optimizer's state of a master, as plain values; of a tensor its shape, as a list. Errors:
        ``UnsupportedSetup`` for a tensor that is not fp32."""
        ...

    def moments(self) -> Mapping[str, Moments]:
        """By stored master. Errors: ``RecoveryError`` naming an optimizer of which it is not known what its moments
        are; as :meth:`optimizer`."""
        ...

    def expect_optimizer(self, stored: str, told: Mapping[str, Any], like_master: Collection[str] = ()) -> None:
        """Another rank's :meth:`optimizer` is to be that of this master. Its tensors are zeros until they are added to
        (:func:`state_name`), and take effect in :meth:`finish`. Those of ``like_master`` have this master's shape, and
        not the one that is told."""
        ...

    def finish(self) -> None:
        """All elements have come."""
        ...

    def read(self, stored: str, copy: Copy) -> bytes:
        """The elements on the source side of ``copy``, of the stored tensor of that name."""
        ...

    def add(self, stored: str, copy: Copy, elements: bytes, weight: float) -> None:
        """Add ``weight`` times these elements to those on the target side."""
        ...
