"""What a kernel is, in which forms it exists, and which of them runs.

A kernel is declared once, in :mod:`tiercheck.kernels.catalogue`: its reference in NumPy, which is its specification and
gives it its name and its types, the module of :mod:`tiercheck.kernels.cpu` that has it in Numba, what it is on a GPU,
and examples of calls. Everything else follows from that declaration: what a call runs, what :func:`warm_up` compiles,
what NVRTC compiles, and what the tests compare.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast

from tiercheck.errors import ConfigurationError

__all__ = ["KERNELS", "Call", "CudaForm", "Examples", "Kernel", "cuda_sources", "declare", "has_numba", "warm_up"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of one call, by position and by name."""

Examples = Callable[[int, int], Iterable[Call]]
"""``examples(size, seed)``: calls with tensors of ``size`` elements, of every dtype that the kernel takes."""

WARM_UP_ELEMENTS = 512


@dataclass(frozen=True)
class CudaForm:
    """A kernel on NVIDIA GPUs: a function that takes a stream and the caller's buffers."""

    function: str
    """Its module in :mod:`tiercheck.kernels.cuda` and its name there: ``blocks:quantise_into``."""
    entries: Mapping[str, tuple[str, ...]]
    """By CUDA source, the ``__global__`` functions that it launches."""

    def load(self) -> Callable[..., Any]:
        """The function. Errors: ``ImportError`` without CuPy."""
        module, _, name = self.function.partition(":")
        return cast(Callable[..., Any], getattr(importlib.import_module(f"tiercheck.kernels.cuda.{module}"), name))


class Kernel(Generic[P, R]):
    """A kernel for arrays in host memory. A call runs the Numba form, and without Numba the reference.

    Arrays are checked by each form as far as it trusts them. ``threads``, if the kernel takes it, is the most threads
    that may run, the caller's included; no result depends on it.
    """

    def __init__(
        self, reference: Callable[P, R], cpu: str, cuda: tuple[CudaForm, ...], examples: Examples | None
    ) -> None:
        functools.update_wrapper(self, reference)
        self.name = reference.__name__
        self.reference = reference
        self.cuda = cuda
        self._cpu = cpu
        self._examples = examples
        self._automatic: Callable[P, R] | None = None

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if args and hasattr(args[0], "__cuda_array_interface__"):
            raise ConfigurationError(
                f"the array is on a GPU, where a kernel needs a stream and the caller's buffers: {self._on_a_gpu()}"
            )
        run = self._automatic
        if run is None:
            run = self._automatic = self.by(automatic())
        return run(*args, **kwargs)

    def by(self, form: str) -> Callable[P, R]:
        """The form of this name: ``numba`` or ``reference``. Errors: ``ConfigurationError`` if it cannot be had."""
        if form == "reference":
            return self.reference
        if form != "numba":
            raise ConfigurationError(
                f"there are no {form!r} kernels for arrays in host memory: choose numba or reference"
            )
        if not has_numba():
            raise ConfigurationError("the numba kernels were asked for, and numba is not installed: pip install numba")
        module = importlib.import_module(f"tiercheck.kernels.cpu.{self._cpu}")
        return cast(Callable[P, R], getattr(module, self.name))

    def examples(self, size: int, seed: int) -> Iterator[Call]:
        """Calls to compare the forms by. A kernel that replays an optimizer has none: the optimizer certifies it."""
        if self._examples is not None:
            yield from self._examples(size, seed)

    def forget(self) -> None:
        """Choose again at the next call."""
        self._automatic = None

    def _on_a_gpu(self) -> str:
        names = [f"tiercheck.kernels.cuda.{form.function.replace(':', '.')}" for form in self.cuda]
        return f"call {' or '.join(names)}" if names else "there is no form of this one in tiercheck.kernels.cuda"


_declared: dict[str, Kernel[Any, Any]] = {}

KERNELS: Mapping[str, Kernel[Any, Any]] = _declared
"""Every kernel by name, once :mod:`tiercheck.kernels` is imported."""


def declare(
    reference: Callable[P, R], *, cpu: str, cuda: tuple[CudaForm, ...] = (), examples: Examples | None = None
) -> Kernel[P, R]:
    """The kernel that ``reference`` specifies, entered into :data:`KERNELS`. Errors: ``ValueError`` for a second one.

    ``cpu``: the module of :mod:`tiercheck.kernels.cpu` that has a function of the same name and the same arguments.
    """
    kernel = Kernel(reference, cpu, cuda, examples)
    if kernel.name in _declared:
        raise ValueError(f"the kernel {kernel.name} is declared twice")
    _declared[kernel.name] = kernel
    return kernel


@functools.cache
def automatic() -> str:
    """The fastest form that is installed. Says once that Numba is missing."""
    if has_numba():
        return "numba"
    logger.warning("numba is not installed: the kernels run in NumPy, several times slower")
    return "reference"


def has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def warm_up() -> None:
    """Compile (or load from the cache) every kernel, so that none compiles while training waits.

    What is compiled does not depend on the number of threads. The kernels that replay an optimizer are compiled when
    they are certified.
    """
    for kernel in KERNELS.values():
        for args, kwargs in kernel.examples(WARM_UP_ELEMENTS, 0):
            kernel(*args, **kwargs)


def cuda_sources() -> dict[str, tuple[str, ...]]:
    """Every CUDA source, and the ``__global__`` functions in it."""
    found: dict[str, dict[str, None]] = {}
    for kernel in KERNELS.values():
        for form in kernel.cuda:
            for source, entries in form.entries.items():
                found.setdefault(source, {}).update(dict.fromkeys(entries))
    return {source: tuple(entries) for source, entries in found.items()}
