"""``prepare`` compiles what every step calls; what is called seldom is compiled once it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.forks import Forks
from tiercheck import kernels
from tiercheck.config import CheckpointConfig
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.kernels import Kernel
from tiercheck.streams.codecs import codec
from tiercheck.streams.records.stream_factory import kernels_used
from tiercheck.streams.tensors.tensor_state import TensorState

SCRIPT = """
import itertools, sys
import numba.core.dispatcher
import numpy as np
import torch
from tests.encoding import encode, gradient, hold
from tiercheck import kernels
from tiercheck.config import CheckpointConfig
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.streams.codecs import codec, codec_names, FLOATS, decode, decode_sparse
from tiercheck.streams.gradients import gathered
from tiercheck.streams.tensors.tensor_state import TensorState

def compiled():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("tiercheck.kernels.cpu"):
            for each in vars(module).values():
                if isinstance(each, numba.core.dispatcher.Dispatcher):
                    found[f"{each.py_func.__module__}.{each.__name__}"] = list(map(str, each.signatures))
    return found

def optimizers(parameters):
    yield torch.optim.Adam(parameters, fused=True, amsgrad=True)
    yield torch.optim.AdamW(parameters, foreach=True)
    yield torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

model = torch.nn.Linear(3, 2)
made = itertools.cycle(optimizers(list(model.parameters())))
for name, optimizer in zip(["snapshot", "snapshot+nf4", *codec_names()], made):
    TensorState(ModuleProvider(model, optimizer), CheckpointConfig(codec=name, exact_replay=False)).prepare()
kernels.warm_up([*codec("exact").kernels_used(), *gathered.KERNELS_USED])
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
late = {name: found for name, found in compiled().items() if found != before.get(name)}
assert not late, late
"""


PLAIN = """
import sys
import torch
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
checkpointer = attach(model, optimizer, Hierarchy.of("memory://plain"))
for _ in range(3):
    model(torch.randn(5, 64)).square().mean().backward()
    optimizer.step()
    checkpointer.end_iteration()
checkpointer.close()
assert not [name for name in sys.modules if name.startswith("tiercheck.kernels.cpu.")]
"""


def test_plain_training_loads_no_kernel(tmp_path: Path, forks: Forks) -> None:
    code, printed = forks.run_script(PLAIN, folder=tmp_path)
    assert code == 0, printed


def test_nothing_is_compiled_after_it(tmp_path: Path, forks: Forks) -> None:
    code, printed = forks.run_script(SCRIPT, folder=tmp_path)
    assert code == 0, printed


@pytest.mark.parametrize("name", ["exact", "sparse", "int8+feedback", "snapshot+nf4"])
def test_only_the_kernels_in_use_are_warmed_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(3, 2)
    state = TensorState(ModuleProvider(model, torch.optim.Adagrad(model.parameters())), CheckpointConfig(codec=name))
    warmed: list[Kernel[..., object]] = []
    monkeypatch.setattr(Kernel, "warm_up", lambda kernel: warmed.append(kernel))
    state.prepare(["exact+entropy"])
    every_step = () if name == "exact" else kernels_used(name)
    assert set(warmed) == {*every_step, *codec("exact+entropy").kernels_used()}
    assert set(warmed) < set(kernels.KERNELS.values())


def test_training_on_the_compressed_gradient_also_scatters() -> None:
    assert kernels.scatter in kernels_used("sparse", train_on_compressed=True)
    assert kernels.scatter not in kernels_used("sparse")
