"""``python -m benchmarks soak``: every store at the same time, and one line for each."""

from __future__ import annotations

import argparse
import json
import secrets
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from benchmarks.measure import is_unavailable
from benchmarks.report import progress
from benchmarks.soak.stores import STORES
from benchmarks.soak.supervise import Account, soak

__all__ = ["add_command"]

TOLD_EVERY_S = 30.0
LONGER_S_MAX = 90.0
"""How much longer than it was told to a soak goes on for a driver that met no fault yet."""


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=minutes, default=1.0, help="how long every driver is soaked (1)")
    parser.add_argument("--only", metavar="DRIVER,...", default=None, help=f"of {', '.join(STORES)} (all of them)")
    parser.add_argument("--at-once", type=int, default=len(STORES), help="how many are soaked at a time (all)")
    parser.add_argument("--seed", type=int, default=None, help="the seed that another run printed")
    parser.set_defaults(run=run)


def minutes(text: str) -> float:
    value = float(text)
    if not 0 < value <= 60 * 24 * 7:
        raise argparse.ArgumentTypeError("give a time between 0 and a week")
    return value


def run(arguments: argparse.Namespace) -> int:
    names = list(STORES) if arguments.only is None else [name.strip() for name in arguments.only.split(",")]
    unknown = [name for name in names if name not in STORES]
    if unknown or arguments.at_once < 1:
        wrong = f"there is no {', '.join(unknown)}" if unknown else "--at-once must be at least 1"
        progress(f"error: {wrong}; there are {', '.join(STORES)}")
        return 2
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    progress(f"soaking {', '.join(names)} for {arguments.minutes:g} min; seed {seed}")
    stopping = threading.Event()
    pool = ThreadPoolExecutor(min(arguments.at_once, len(names)), thread_name_prefix="soak")
    try:
        seconds = arguments.minutes * 60
        options = {"seconds": seconds, "seconds_max": seconds + LONGER_S_MAX, "seed": seed, "stopping": stopping}
        running = {name: pool.submit(soak, name, STORES[name], **options) for name in names}
        return report(running)
    finally:
        # After Ctrl-C or SIGTERM, too, servers are taken down and file systems unmounted before this process ends.
        stopping.set()
        pool.shutdown(cancel_futures=True)


def report(running: Mapping[str, Future[Account]]) -> int:
    """A line for each store, in the order in which they end."""
    bad = False
    left = dict(running)
    told = time.monotonic()
    while left:
        for name in [name for name, future in left.items() if future.done()]:
            line, is_bad = outcome(name, left.pop(name))
            bad |= is_bad
            print(json.dumps(line), flush=True)
        if time.monotonic() - told > TOLD_EVERY_S:
            told = time.monotonic()
            progress(f"still soaking: {', '.join(left)}")
        wait(left.values(), timeout=TOLD_EVERY_S, return_when=FIRST_COMPLETED)
    return 1 if bad else 0


def outcome(name: str, future: Future[Account]) -> tuple[dict[str, Any], bool]:
    """The line, and whether it is bad news."""
    error = future.exception()
    if error is None:
        account = future.result()
        return account.line(), bool(account.losses)
    if isinstance(error, Exception) and is_unavailable(error):
        return {"soak": name, "skipped": str(error)}, False
    progress("".join(traceback.format_exception(error)))
    return {"soak": name, "failed": f"{type(error).__name__}: {error}"}, True
