"""What one training run of the demo does, as a frozen value that travels to the ranks as a JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tiercheck.errors import ConfigurationError
from tiercheck.policy.recovery.lost_stage import LostStage

__all__ = ["DEVICES", "DTYPES", "RANKS", "RANKS_MAX", "RECOVERED", "ZERO_STAGES", "TrainingSettings"]

RANKS = 2
"""Each rank stands for a node and has a shared-memory namespace of its own."""
RANKS_MAX = 8
"""That a run resumes on: each is a process on this machine."""
STAGES_MIN = 3
"""One of them is to be lost that has two neighbours."""
ZERO_STAGES = (0, 1, 2, 3)
DTYPES = ("fp32", "bf16")
DEVICES = ("cpu", "cuda")
SEED_MAX = 2**31 - 1
RECOVERED = -1


@dataclass(frozen=True)
class TrainingSettings:
    """Model, data and checkpoints of one run. Without ``tiers`` nothing is checkpointed.

    Raises:
        ConfigurationError: a value that cannot be trained with; the message names it.
    """

    steps: int
    seed: int
    zero: int = 1
    dtype: str = "fp32"
    device: str = "cpu"
    """``cuda``: each rank has a GPU of its own."""
    width: int = 320
    layers: int = 5
    heads: int = 5
    sequence: int = 128
    micro_batch: int = 2
    dropout: float = 0.1
    text: str | None = None
    tiers: tuple[str, ...] = ()
    name: str = ""
    """Of the job: its nodes' agents are called after it."""
    base_every: int = 10
    batch: int = 5
    codec: str = "exact"
    ranks: int = RANKS
    stages: int = 0
    """Of a pipeline, one a rank. 0: each rank has a copy of the model."""
    on_lost_stage: str | None = None
    """The method, as ``attach`` takes it."""
    digest_at: int | None = None
    """Tell a digest of the state after this version; :data:`RECOVERED`: before the first step. In a pipeline it is of
    the rank's stage, and otherwise of the whole state, whoever holds which part of it."""

    killed_by: int | None = None
    """Of a life that is to be killed: behind this version it waits for that. The kill comes late on a busy machine, and
    some steps must be left for the life after it."""

    def __post_init__(self) -> None:
        for name in ("steps", "width", "layers", "heads", "sequence", "micro_batch", "base_every", "batch", "ranks"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.width % self.heads:
            raise ConfigurationError(f"the width {self.width} is no multiple of the {self.heads} attention heads")
        if self.ranks > RANKS_MAX:
            raise ConfigurationError(f"the demo runs on {RANKS_MAX} ranks at most, not {self.ranks}")
        if not 0 <= self.dropout < 1:
            raise ConfigurationError(f"dropout must be in [0, 1), not {self.dropout}")
        if not 0 <= self.seed <= SEED_MAX:
            raise ConfigurationError(f"the seed must be in 0..{SEED_MAX}, not {self.seed}")
        if self.zero not in ZERO_STAGES:
            raise ConfigurationError(f"ZeRO has the stages 0, 1, 2 and 3, not {self.zero}")
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"unknown dtype {self.dtype!r}: choose one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise ConfigurationError(f"unknown device {self.device!r}: choose one of {', '.join(DEVICES)}")

        if self.stages:
            self._check_pipeline()
        elif self.on_lost_stage is not None:
            raise ConfigurationError("only a pipeline can lose a stage: name its stages with --pipeline")

    def _check_pipeline(self) -> None:
        if self.stages < STAGES_MIN:
            raise ConfigurationError(
                f"a pipeline of {self.stages} has no stage between two others: take {STAGES_MIN} or more"
            )
        if self.stages != self.ranks:
            raise ConfigurationError(f"a pipeline of {self.stages} stages runs on as many ranks, not on {self.ranks}")
        if self.layers % self.stages:
            raise ConfigurationError(f"{self.layers} layers cannot be spread evenly over {self.stages} stages")
        if self.zero > 1:
            raise ConfigurationError(f"DeepSpeed's pipelines take ZeRO 0 or 1, not {self.zero}")
        if self.on_lost_stage is not None:
            LostStage(method=self.on_lost_stage)

    @property
    def micro_batches(self) -> int:
        """Of a step: as many as there are stages, so that all of them are at work."""
        return self.stages or 1

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> TrainingSettings:
        """The settings in the file; an unknown key or a missing one is a ``ConfigurationError``."""
        values = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ConfigurationError(f"{path} has unknown settings: {', '.join(unknown)}")
        if missing := sorted(known - set(values)):
            raise ConfigurationError(f"{path} lacks the settings {', '.join(missing)}")
        return cls(**{**values, "tiers": tuple(values["tiers"])})
