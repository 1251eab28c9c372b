"""The demo's ranks without torchrun: forked from a process that has everything imported.

A program that :class:`tests.forks.Forks` runs hands :func:`fork_ranks` to the demo; each rank is the ``main`` of this
module, which is the trainer's in a group of its launch.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.forks import ROOT, join, launch

__all__ = ["fork_ranks"]

RANKS_S_MAX = 200.0


def fork_ranks(ranks: int, arguments: Sequence[str], log: Path, variables: Mapping[str, str]) -> psutil.Process:
    """In the place of :func:`tiercheck.demo.launch.torchrun`: a process whose children the ranks are."""
    if pid := os.fork():
        return psutil.Process(pid)
    code = 1
    try:
        os.setsid()
        codes = launch(
            ranks,
            RANKS_S_MAX,
            program=__name__,
            arguments=arguments,
            log=str(log),
            directory=str(ROOT),
            environment=variables,
        )
        code = 1 if any(codes) else 0
    except BaseException:  # this process must not return into its parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    from tiercheck.demo.training import trainer

    join()
    trainer.main()
