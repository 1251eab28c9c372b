"""What all ranks of a job must say alike when they attach.

Ranks that have bases at other versions, or keep others, come to hold none in common: a restart would go back to the
beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError
from tiercheck.hierarchy import Hierarchy

__all__ = ["refuse_different", "settings_alike"]

SETTINGS = (
    "base_every",
    "batch",
    "train_on_compressed",
    "keep_last",
    "keep_every",
    "cadence",
    "placement",
    "retention",
    "replicas",
    "on_nothing_left",
    "keep_left_behind",
)


def settings_alike(config: CheckpointConfig, hierarchy: Hierarchy) -> dict[str, str]:
    """By name, in words."""
    told = {name: repr(getattr(config, name)) for name in SETTINGS}
    return {**told, "tiers": ", ".join(tier.name for tier in hierarchy.tiers)}


def refuse_different(asked: Sequence[str], settings: Sequence[Mapping[str, str]]) -> None:
    """``asked``: what the ranks ask for at this start; ``settings``: as of :func:`settings_alike`.

    Errors: ``ConfigurationError`` unless all ranks say the same.
    """
    for rank, each in enumerate(asked):
        if each != asked[0]:
            ours, first = each or "nothing", asked[0] or "nothing"
            raise ConfigurationError(f"rank {rank} asks for {ours}, and rank 0 for {first}: all must ask for the same")
    for rank, own in enumerate(settings):
        for name, value in own.items():
            if value != settings[0].get(name):
                raise ConfigurationError(
                    f"rank {rank} has {name}={value}, and rank 0 {name}={settings[0].get(name)}: all ranks must have "
                    "the same"
                )
