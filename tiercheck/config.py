"""What a user decides about checkpointing, apart from the tiers."""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from tiercheck.errors import ConfigurationError
from tiercheck.keys import VERSION_MAX

__all__ = ["CheckpointConfig", "int_of"]

ON_SAVE_ERROR = ("fail", "warn")
ON_NOTHING_LEFT = ("refuse", "restart")
MOVERS = ("auto", "trainer", "agent")
REPLICAS = ("auto", "owner", "each")
BASES = ("auto", "capture", "fold")
DEADLINE_S_MAX = 30 * 86_400.0
THREADS_MAX = 4096


@dataclass(frozen=True)
class CheckpointConfig:
    """How often, how, and what to do when a save fails."""

    base_every: int = 50
    """Versions from one base to the next."""
    batch: int = 5
    """Differentials in one object of the slower tiers, at most ``base_every``: a base supersedes those before it."""
    codec: str = "exact"
    """How gradients are encoded: see :mod:`tiercheck.streams.codecs`. A codec takes options by name, such as
    ``sparse?ratio=0.001``. ``NAME+feedback`` also encodes at each version
    what the versions before have left out. That takes four bytes a trained element."""
    train_on_compressed: bool = False
    """Make the optimizer step with the gradients as ``codec`` keeps them, so that replaying them is exact. This changes
    what is trained. What ``+feedback`` keeps is then part of the state, and bases hold it, too."""
    encode_threads: int = 1
    """The most threads that copy or encode gradients, the training's own among them."""
    gpu_staging_bytes: int = 0
    """The most GPU memory in which gradients are staged on their way to the first tier; 0: a fortieth of the GPU's
    memory. It is taken when the job is attached, and no more than one record needs. If a record needs more, the
    optimizer's step waits on the GPU for some of its copies. Jobs on CPUs take none."""
    gpu_feedback: bool = True
    """Whether what ``int8``, ``nf4``, ``onebit`` or ``sparse`` with ``+feedback`` has left out is kept in GPU memory,
    where the GPU encodes. ``False``: in host memory, where gradients are encoded then, beside training. With training
    on the compressed gradients, and with other codecs, it is in host memory."""
    recovery_threads: int = 0
    """The most threads that verify, copy, decode and replay in a recovery. 0: this rank's share of the processors that
    its process may use, if the ranks of its node (``LOCAL_WORLD_SIZE``) share them."""
    exact_replay: bool = True
    """Recover with the very bits of the optimizer's steps. If ``False``, Adam's steps over sparse gradients may be
    replayed in closed form: several times faster, within 2e-5 of the movement. The recovery says that it is
    approximate."""
    keep_last: int = 2
    """Committed bases kept in the tier that survives most."""
    keep_every: int = 0
    """Each base whose version is a multiple of this is kept, too (0: none)."""
    cadence: str = ""
    """When a base is due, by the names of policies instead of ``base_every``: ``every_seconds?seconds=600``."""
    placement: str = ""
    """Which shards go to which tier: ``bases_only?tier=s3; every_nth?tier=s3&n=10``. Empty: each goes to every tier."""
    retention: str = ""
    """Which bases stay, instead of ``keep_last`` and ``keep_every``: ``keep_last; keep_best?metric=eval_loss&n=3``."""
    pacing: str = ""
    """How fast each rank copies: ``spread``, or ``bytes_per_second?tier=s3&rate=2e8``. Empty: as fast as the tiers take
    it."""
    replicas: str = "auto"
    """What ranks hold alike, such as a model under DDP. ``owner``: each tensor is stored by one rank, evenly, and a
    recovery brings it to all; a job that cannot have that is refused. ``each``: every rank stores all of it. ``auto``:
    as ``owner`` if the ranks are known to stay alike, and the tiers outlive what a copy on every rank would; the log
    says which, and why."""
    lag_max: int = 0
    """The most versions that a slower tier may lack; before there are more, training waits, and says for which tier. 0:
    as many as the first tier has room for. Else at least two batches."""
    on_save_error: str = "fail"
    """What to do if a version cannot be saved.

    ``fail``: raise ``SaveError`` from the call that saves the version: the step, ``end_iteration``, or the next forward
    pass. ``warn``: log and count it, and go on training. A base is tried again at each version. If a tier has kept one
    base waiting for ``deadline_s``, later bases do not wait for that tier. Closing also logs what could not be moved to
    its tiers. A copy of the training state that does not end within ``deadline_s`` raises ``SaveError`` even so:
    training would change what is copied."""
    on_nothing_left: str = "refuse"
    """What to do if versions were saved, and none is left that every rank can reach, such as when a node is lost before
    its first base has left it. ``refuse``: raise ``RecoveryError``, which says what was found in which tier.
    ``restart``: begin anew at version 0, as a new lineage, and log that as an error. ``restart`` still refuses while a
    tier is away, or while every rank's versions lie somewhere."""
    keep_left_behind: bool = True
    """What a start with ``version=`` or ``fresh=`` leaves behind stays in the tiers that all ranks share. ``False``
    gives it up, and what earlier starts have left behind as well: it is deleted once there is a newer committed
    base."""
    bases: str = "auto"
    """Who makes the bases that are due.

    - ``capture``: the trainer copies its state.
    - ``fold``: the mover replays the differentials onto the base before, and gets the same bytes; what cannot be folded
      exactly is refused at the start.
    - ``auto`` folds if another process can open the first tier, the codec is exact, a kernel is certified for the
      optimizer, and an agent moves the data or a processor is free; else it captures, and says why
      (``Stats.not_folded``, and the log).

    A process of its own folds, from the first step on; with ``fold`` and a first tier that no other process can open,
    it is the mover's. If no kernel stands for the optimizer, a fold takes the memory of a base beside the first tier's.
    While the state holds a write that no version does, bases are captured; if folding turns out not to be exact, they
    are captured from then on.

    For a fold that does not keep up ``fold`` waits. ``auto`` captures the base; if memory for differentials is full as
    well, training waits up to 10 s once, and captures then.

    A processor is free if the node's ranks (``LOCAL_WORLD_SIZE``; without it, all ranks of the job) are fewer than the
    processors that they may use; where a launcher has bound ranks to processors of their own, only ranks that may use
    the same ones are counted together. If none is, give them more; or say ``mover="agent"`` (one process folds for all
    of them) or ``fold`` (each has one of its own), which take from training."""
    audit_every: int = 4
    """Of the folded bases that are due by the cadence, the first one and each n-th one after it is compared with what
    training had, by a checksum of each tensor that is taken at the end of that iteration (0: none is). If they differ,
    a base is captured, and the log names the tensors."""
    mover: str = "auto"
    """Which process moves what was captured. ``trainer``: the training process itself. ``agent``: the node's agent,
    which goes on while no trainer runs, and is started if the node has none. ``auto``: the agent if a tier is a
    neighbour's memory (``peer://``), which needs an agent anyway; else the trainer."""
    deadline_s: float = 300.0
    """The longest that any single wait may take: for other ranks, for a tier, for a base to drain, for reading a whole
    checkpoint. Make it longer than your slowest tier needs for the longest of these."""

    def __new__(cls, *values: Any, **options: Any) -> Self:
        refuse_unknown(options, [each.name for each in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for each in fields(self):
            value, wanted = getattr(self, each.name), type(each.default)
            accepted = (int, float) if wanted is float else wanted
            if isinstance(value, bool) != (wanted is bool) or not isinstance(value, accepted):
                raise ConfigurationError(f"{each.name} must be {wanted.__name__}, not {shown(value)}")
        for name, least, most in BOUNDS:
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigurationError(f"{name} must be at least {least} and at most {most}, not {shown(value)}")
        if not 0 < self.deadline_s <= DEADLINE_S_MAX:  # a NaN is neither
            raise ConfigurationError(
                f"deadline_s must be positive, and at most {DEADLINE_S_MAX:.0f} (30 days), not {shown(self.deadline_s)}"
            )
        if self.mover not in MOVERS:
            raise ConfigurationError(f"mover is one of {', '.join(MOVERS)}, not {self.mover!r}")
        if self.bases not in BASES:
            raise ConfigurationError(f"bases is one of {', '.join(BASES)}, not {self.bases!r}")
        if self.on_nothing_left not in ON_NOTHING_LEFT:
            raise ConfigurationError(
                f"on_nothing_left is one of {', '.join(ON_NOTHING_LEFT)}, not {self.on_nothing_left!r}"
            )
        if self.replicas not in REPLICAS:
            raise ConfigurationError(f"replicas is one of {', '.join(REPLICAS)}, not {self.replicas!r}")
        if self.on_save_error not in ON_SAVE_ERROR:
            raise ConfigurationError(f"on_save_error is one of {', '.join(ON_SAVE_ERROR)}, not {self.on_save_error!r}")

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Self:
        """A configuration from plain values. Errors: ``ConfigurationError`` for an unknown key or a wrong type."""
        refuse_unknown(options, [each.name for each in fields(cls)])
        return cls(**options)


BOUNDS = (
    ("base_every", 1, VERSION_MAX),
    ("batch", 1, VERSION_MAX),
    ("keep_last", 1, VERSION_MAX),
    ("keep_every", 0, VERSION_MAX),
    ("audit_every", 0, VERSION_MAX),
    ("lag_max", 0, VERSION_MAX),
    ("encode_threads", 1, THREADS_MAX),
    ("recovery_threads", 0, THREADS_MAX),
    ("gpu_staging_bytes", 0, 1 << 48),
)


def refuse_unknown(options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Errors: ``ConfigurationError`` for an unknown option; the message suggests a known name."""
    for key in options:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise ConfigurationError(f"unknown key {key!r} in the TierCheck configuration: {hint}")


def refuse_other_kind(name: str, given: object, kind: type) -> None:
    """Errors: ``ConfigurationError`` if the argument is neither left out nor of its kind."""
    if given is not None and not isinstance(given, kind):
        raise ConfigurationError(f"{name}= must be a {kind.__name__}, not {type(given).__name__}")


def shown(value: object) -> str:
    """A value for a message, cut if it is long. Of an integer that Python refuses to print, the size is shown."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)


def int_of(variable: str, default: int, environment: Mapping[str, str] = os.environ) -> int:
    """The environment variable as a number. Errors: ``ConfigurationError`` naming it."""
    text = environment.get(variable, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ConfigurationError(f"{variable} must be a number, not {text!r}") from None
