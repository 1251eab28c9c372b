"""One life of a training loop: what it did in each iteration, as digests, written where its parent reads it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach

__all__ = ["Entry", "Life", "Undisturbed", "entries"]


@dataclass(frozen=True)
class Entry:
    """A version as this life had it: after its iteration, or as it was restored."""

    version: int
    digest: str
    """Of parameters, buffers, the optimizers' state and options, and what else the loop depends on."""
    loss: str = ""
    """As hexadecimal digits; empty if the version was restored."""
    fidelity: str = ""
    """Of the recovery; empty if there was none."""
    notes: tuple[str, ...] = ()


class Undisturbed:
    """In the place of a checkpointer, for the run that nobody kills."""

    version = 0

    def end_iteration(self, *, ends_epoch: bool = False) -> None:
        self.version += 1


class Life:
    """What a loop is given. ``hierarchy``: ``None`` for the undisturbed run."""

    def __init__(
        self, log: Path, rank: int, versions: int, hierarchy: Hierarchy | None, config: CheckpointConfig
    ) -> None:
        self.rank = rank
        self.versions = versions
        """The loop ends with this one."""
        self._hierarchy = hierarchy
        self._config = config
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._held: Sequence[Any] = ()

    @contextmanager
    def attached(
        self, model: torch.nn.Module, *optimizers: torch.optim.Optimizer, beside: Iterable[Any] = (), **options: Any
    ) -> Iterator[Checkpointer | Undisturbed]:
        """``beside``: what else has a ``state_dict`` that must come back. ``options``: of ``attach``."""
        self._held = [model, *optimizers, *beside]
        if self._hierarchy is None:
            self._write(Entry(0, self._digest()))
            yield Undisturbed()
            return
        given = optimizers[0] if len(optimizers) == 1 else list(optimizers)
        with attach(model, given, self._hierarchy, config=self._config, **options) as checkpointer:
            recovery = checkpointer.recovery
            if recovery is not None:
                self._write(Entry(recovery.version, self._digest(), "", str(recovery.fidelity), recovery.notes))
            yield checkpointer

    def record(self, version: int, loss: torch.Tensor) -> None:
        """The iteration that makes ``version`` has trained; the loop has not ended it yet."""
        self._write(Entry(version, self._digest(), float(loss.detach()).hex()))

    def _write(self, entry: Entry) -> None:
        os.write(self._log, json.dumps(asdict(entry)).encode() + b"\n")

    def _digest(self) -> str:
        found = hashlib.sha256()
        for each in self._held:
            update(found, each.state_dict())
        return found.hexdigest()[:16]


def update(found: Any, value: Any) -> None:
    """``found``: a hash. Two values that differ in a bit, a type or a name are told apart."""
    if isinstance(value, torch.Tensor):
        whole = getattr(value, "full_tensor", lambda: value)()  # FSDP2's are sharded
        found.update(f"{whole.dtype}{tuple(whole.shape)}".encode())
        found.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for name, each in sorted(value.items(), key=lambda item: repr(item[0])):  # their order says nothing
            found.update(repr(name).encode())
            update(found, each)
    elif isinstance(value, list | tuple):
        for each in value:
            update(found, each)
    else:
        found.update(repr(value).encode())


def entries(log: Path) -> list[Entry]:
    """What a life has written, as far as it came."""
    try:
        text = log.read_text()
    except FileNotFoundError:
        return []
    lines = text[: text.rfind("\n") + 1].splitlines()
    found = [json.loads(line) for line in lines]
    return [Entry(**{**each, "notes": tuple(each["notes"])}) for each in found]
