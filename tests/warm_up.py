"""What every worker of a test run would otherwise compile for itself is compiled once, before the workers start.

``make pytest`` runs it on a fresh clone and after the kernels have changed. What was compiled before goes: Numba looks
only whether the file of a kernel has changed, and not whether one has that the kernel inlines. It compiles Numba's
kernels, and the bytecode of the tests with pytest's rewritten assertions. What cannot be collected is reported by the
run that follows.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

PROCESSES = 2
OPTIMIZERS = ("torch.optim.adam.Adam", "torch.optim.sgd.SGD")


def main() -> None:
    from tiercheck.kernels import KERNELS, cpu

    for compiled in Path(cpu.__path__[0]).rglob("__pycache__/*.nb[ci]"):
        compiled.unlink()
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
    """Each kernel that may stand for it takes two steps with eight elements, one step with a sparse gradient, for each
    of its variants."""
    import numpy as np

    from tiercheck.kernels import SparseGradient
    from tiercheck.kernels.gpu_adam import Powers
    from tiercheck.streams.optimizers import certification, replay
    from tiercheck.streams.optimizers.registry import optimizer_of

    optimizer = optimizer_of(kind)
    functions = [] if (approximation := optimizer.approximation()) is None else [approximation[1]]
    for implementation in ("fused", "foreach"):
        setting = replay.Setting(implementation, *certification.environment(), "cpu")
        functions += [
            replay.function_of(form, implementation, setting.instruction_set)
            for form in optimizer.forms
            if form.automatic and replay.unsupported(form, setting) is None
        ]
    of_a_gpu = [each for each in optimizer.candidates if each.powers is None]  # all of them are compiled by one
    functions += [each.on_host(Powers()) for each in of_a_gpu[:1]]
    gradient = np.linspace(-1, 1, 8, dtype=np.float32)
    for function, options in itertools.product(functions, optimizer.variants()):
        gradients = [gradient, SparseGradient(np.arange(1, dtype=np.uint32), gradient[:1])]
        steps = [optimizer.step(options, 2) for _ in gradients]
        state = {name: np.zeros_like(gradient) for name in optimizer.needs(steps[0])}
        with np.errstate(all="ignore"):
            function(np.zeros_like(gradient), state, gradients, steps)


if __name__ == "__main__":
    main()
