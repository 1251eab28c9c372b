"""``python -m benchmarks tiers``, ``soak``, ``lives``, ``kernels``, ``fidelity``, ``scale``, ``reshape``, ``peers``,
``overhead``, ``recover`` and ``checkfree``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from benchmarks import measure
from benchmarks.checkfree import command as checkfree
from benchmarks.fidelity import command as fidelity
from benchmarks.kernels import command as kernels
from benchmarks.lives import command as lives
from benchmarks.overhead import command as overhead
from benchmarks.peers import command as peers
from benchmarks.recover import command as recover
from benchmarks.reshape import command as reshape
from benchmarks.scale import command as scale
from benchmarks.soak import command as soak


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 if something failed or was lost. Wrong usage exits with 2."""
    chosen = parser().parse_args(arguments)
    # Whatever ends this, servers are taken down, file systems unmounted and folders removed.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code: int = chosen.run(chosen)
    finally:
        signal.signal(signal.SIGTERM, before)
    return code


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = found.add_subparsers(dest="command", required=True)
    measure.add_command(commands.add_parser("tiers", help="what the tiers reach, against what the machine allows"))
    soak.add_command(commands.add_parser("soak", help="races under faults, and an account of what was lost"))
    lives.add_command(
        commands.add_parser("lives", help="training loops that are killed, and whether all bits are back")
    )
    kernels.add_command(commands.add_parser("kernels", help="what the kernels reach, against what the machine allows"))
    fidelity.add_command(commands.add_parser("fidelity", help="what a recovery by each codec restores"))
    scale.add_command(commands.add_parser("scale", help="what each step costs one rank of so many"))
    reshape.add_command(commands.add_parser("reshape", help="resuming on other ranks, against torch DCP"))
    peers.add_command(commands.add_parser("peers", help="saving and restarting, against what others use"))
    overhead.add_command(commands.add_parser("overhead", help="what saving costs the step"))
    recover.add_command(commands.add_parser("recover", help="what a recovery takes, against what its bytes need"))
    checkfree.add_command(commands.add_parser("checkfree", help="losing pipeline stages, by how they are made anew"))
    return found


if __name__ == "__main__":
    sys.exit(main())
