"""Storage tiers for LLM training checkpoints: lose nothing, stall for nothing, resume bit for bit.

::

    from tiercheck import Hierarchy
    from tiercheck.integrations.torch import attach   # or tiercheck.integrations.deepspeed

    checkpointer = attach(model, optimizer, Hierarchy.of("shm://my-run", "nvme:///shared/my-run?survives=rack"))

The public names are imported when they are first used: ``import tiercheck`` alone brings neither torch nor any
driver's library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercheck import errors as errors
    from tiercheck.archive.archive import Archive as Archive
    from tiercheck.archive.archive import open as open  # noqa: A004  it is tiercheck.open(url)
    from tiercheck.archive.changeable import ChangeableArchive as ChangeableArchive
    from tiercheck.archive.changeable import open_to_change as open_to_change
    from tiercheck.checkpointer import Checkpointer as Checkpointer
    from tiercheck.config import CheckpointConfig as CheckpointConfig
    from tiercheck.errors import TierCheckError as TierCheckError
    from tiercheck.hierarchy import Hierarchy as Hierarchy
    from tiercheck.hierarchy import Tier as Tier
    from tiercheck.policy.policies import Policies as Policies
    from tiercheck.policy.recovery.lost_stage import LostStage as LostStage
    from tiercheck.recording.stats import Stats as Stats
    from tiercheck.recovery.report import Recovery as Recovery
    from tiercheck.streams.loading import Loading as Loading
    from tiercheck.tiers.driver import Reservation as Reservation
    from tiercheck.tiers.driver import TierDriver as TierDriver
    from tiercheck.types import Capabilities as Capabilities
    from tiercheck.types import Fidelity as Fidelity
    from tiercheck.types import Survives as Survives

    __version__: str

_MODULES = {
    "Archive": "tiercheck.archive.archive",
    "Capabilities": "tiercheck.types",
    "ChangeableArchive": "tiercheck.archive.changeable",
    "CheckpointConfig": "tiercheck.config",
    "Checkpointer": "tiercheck.checkpointer",
    "Fidelity": "tiercheck.types",
    "Hierarchy": "tiercheck.hierarchy",
    "Loading": "tiercheck.streams.loading",
    "LostStage": "tiercheck.policy.recovery.lost_stage",
    "Policies": "tiercheck.policy.policies",
    "Recovery": "tiercheck.recovery.report",
    "Reservation": "tiercheck.tiers.driver",
    "Stats": "tiercheck.recording.stats",
    "Survives": "tiercheck.types",
    "Tier": "tiercheck.hierarchy",
    "TierCheckError": "tiercheck.errors",
    "TierDriver": "tiercheck.tiers.driver",
    "open": "tiercheck.archive.archive",
    "open_to_change": "tiercheck.archive.changeable",
}
"""Where each public name is defined."""

__all__ = [
    "Archive",
    "Capabilities",
    "ChangeableArchive",
    "CheckpointConfig",
    "Checkpointer",
    "Fidelity",
    "Hierarchy",
    "Loading",
    "LostStage",
    "Policies",
    "Recovery",
    "Reservation",
    "Stats",
    "Survives",
    "Tier",
    "TierCheckError",
    "TierDriver",
    "__version__",
    "errors",
    "open",
    "open_to_change",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    elif name == "errors":
        value = importlib.import_module("tiercheck.errors")
    elif name == "__version__":
        from importlib.metadata import version

        value = version("tiercheck")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
