"""After ``warm_up`` nothing is compiled while training waits."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import itertools, sys
import numpy as np
import numba.core.dispatcher
from tests.encoding import encode, gradient, hold
from tiercheck import kernels
from tiercheck.streams.codecs import codec_names, FLOATS, decode, decode_sparse

def compiled():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("tiercheck.kernels.cpu"):
            for each in vars(module).values():
                if isinstance(each, numba.core.dispatcher.Dispatcher):
                    found[f"{each.py_func.__module__}.{each.__name__}"] = list(map(str, each.signatures))
    return found

kernels.warm_up()
before = compiled()
assert len(before) > 20, before
for name, dtype, size, threads in itertools.product(codec_names(), FLOATS, (0, 1, 700, 150_001), (1, 2)):
    array = hold(gradient(size), dtype)
    array[size // 3 : size // 2] = 0
    for content in (array, np.frombuffer(array.tobytes(), array.dtype)):
        encoding, parts = encode(name, content, dtype, threads=threads)
        decode(encoding.to_object(), parts, threads=threads)
        decode_sparse(encoding.to_object(), parts, threads=threads)
encode("exact", (gradient(999).view(np.uint32) & 0xFFFF0000).view(np.float32), "F32")
encode("sparse", np.ones(300_000, np.float32), "F32")
encode("sparse+feedback", np.ones(300_000, np.float32), "F32")
from tiercheck.kernels.cpu.replay import adam, closed_form, sgd
state = [np.ones(700, np.float32) for _ in range(3)]
few = kernels.SparseGradient(np.arange(3, dtype=np.uint32), np.ones(3, np.float32))
steps = [kernels.AdamStep(n, 1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled=True) for n in (1, 2)]
for gradients in ([few, few], [np.ones(700, np.float32), few]):
    adam.replay_fused_adam(*state, gradients, steps, contracted=True)
    adam.replay_fused_adam(*state, gradients, steps, contracted=False)
    closed_form.replay_sparse_adam(*state, gradients, steps)
    for momentum in (0.0, 0.9):
        scalars = [kernels.SgdStep(1e-3, momentum)] * 2
        sgd.replay_sgd(state[0], state[1] if momentum else None, gradients, scalars, fused=False, contracted=True)
late = {name: found for name, found in compiled().items() if found != before.get(name)}
assert not late, late
"""


def test_nothing_is_compiled_after_it() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
