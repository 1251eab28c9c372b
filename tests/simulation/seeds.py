"""A simulation with one seed after the other. A failure names its seed; ``TIERCHECK_SEED=n pytest ...`` replays it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

__all__ = ["play_each"]


def play_each(play: Callable[[int], object], seeds: Iterable[int]) -> None:
    """``play`` with each seed in turn, or with the one that the environment names."""
    for seed in [int(os.environ["TIERCHECK_SEED"])] if "TIERCHECK_SEED" in os.environ else seeds:
        try:
            play(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}: TIERCHECK_SEED={seed} replays it alone")
            raise
