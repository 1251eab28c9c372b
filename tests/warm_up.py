"""What every worker of a test run would otherwise compile for itself is compiled once, before the workers start.

``make pytest`` runs it on a fresh clone and after the kernels have changed. It compiles Numba's kernels, and the
bytecode of the tests with pytest's rewritten assertions. What cannot be collected is reported by the run that follows.
"""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import get_context

PROCESSES = 2
OPTIMIZERS = ("torch.optim.adam.Adam", "torch.optim.sgd.SGD")


def main() -> None:
    from tiercheck.kernels import KERNELS

    tasks = [("collect", ""), *(("optimizer", name) for name in OPTIMIZERS), *(("kernel", name) for name in KERNELS)]
    with get_context("fork").Pool(PROCESSES) as pool:
        pool.starmap(do, tasks, chunksize=1)


def do(task: str, argument: str) -> None:
    if task == "collect":
        subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"],
            stdout=subprocess.DEVNULL,
            check=False,
        )
    elif task == "kernel":
        from tiercheck.kernels import KERNELS

        KERNELS[argument].warm_up()
    else:
        warm_up_optimizer(argument)


def warm_up_optimizer(kind: str) -> None:
    from tiercheck.streams.optimizers import certification, replay
    from tiercheck.streams.optimizers.registry import optimizer_of

    for implementation in ("fused", "foreach"):
        setting = replay.Setting(implementation, *certification.environment(), "cpu")
        replay.warm_up(optimizer_of(kind), setting, exact=False)


if __name__ == "__main__":
    main()
