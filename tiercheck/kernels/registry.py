"""What a kernel is, in which forms it exists, and which form runs.

A kernel is declared once, in :mod:`tiercheck.kernels.catalogue`: its reference in NumPy, its Numba form, its CUDA
forms, and examples of calls. Everything else follows from the declaration: which form a call runs, what :func:`warm_up`
and NVRTC compile, and what the tests compare.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast, overload

from tiercheck.errors import ConfigurationError

__all__ = [
    "KERNELS",
    "Call",
    "CudaForm",
    "Examples",
    "Kernel",
    "cuda_sources",
    "declare",
    "has_numba",
    "load_numba",
    "of_each_type",
    "warm_up",
]

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
    """A kernel on an NVIDIA GPU: a function that takes a stream and the caller's buffers."""

    function: str
    """Its module in :mod:`tiercheck.kernels.cuda` and its name, such as ``blocks:quantise_into``."""
    entries: Mapping[str, tuple[str, ...]]
    """The ``__global__`` functions that it launches, by CUDA source."""

    def load(self) -> Callable[..., Any]:
        """The function. Errors: ``ImportError`` without CuPy."""
        module, _, name = self.function.partition(":")
        return cast(Callable[..., Any], getattr(importlib.import_module(f"tiercheck.kernels.cuda.{module}"), name))


class Kernel(Generic[P, R]):
    """One computation on arrays, in several forms that give the same bits, the payloads of NaNs aside.

    A call takes arrays in host memory. It runs the Numba form, or the reference if Numba is not installed. Each form
    checks its arguments; the reference's docstring names the errors. If the kernel takes ``threads``, that is the most
    threads that may run, the caller's included; no result depends on it.

    - ``reference``: the form in NumPy. It is the specification, and gives the kernel its name, types and docstring.
    - ``cpu``: the module of the Numba form, a function with the reference's name and arguments. The first call imports
      it.
    - ``cuda``: the forms on a GPU. The first of them gives the reference's bits.
    - ``examples``: calls with every dtype that the kernel takes. They warm it up, and tests compare the forms by them.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        *,
        cpu: str,
        cuda: tuple[CudaForm, ...] = (),
        examples: Examples | None = None,
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
                f"the kernel {self.name} takes arrays in host memory, and was given one on a GPU: {self._on_a_gpu()}"
            )
        run = self._automatic
        if run is None:
            run = self._automatic = self.by(automatic())
        return run(*args, **kwargs)

    @overload
    def by(self, form: Literal["cuda"]) -> Callable[..., Any]: ...
    @overload
    def by(self, form: str) -> Callable[P, R]: ...
    def by(self, form: str) -> Callable[..., Any]:
        """The form of this name: ``numba``, ``reference`` or ``cuda``.

        The CUDA form has arguments of its own: device arrays, results included, and a stream.
        Errors: ``ConfigurationError`` if there is no such form, or if what it needs is not installed.
        """
        if form == "reference":
            return self.reference
        if form == "numba":
            if not has_numba():
                raise ConfigurationError("the numba form was asked for, and numba is not installed: pip install numba")
            load_numba()
            return cast(Callable[P, R], getattr(importlib.import_module(self._cpu), self.name))
        if form != "cuda":
            raise ConfigurationError(f"a kernel has no form {form!r}: choose numba, reference or cuda")
        if not self.cuda:
            raise ConfigurationError(f"the kernel {self.name} has no CUDA form")
        try:
            return self.cuda[0].load()
        except ImportError as error:
            raise ConfigurationError(
                f"the cuda form was asked for, and CuPy cannot be imported ({error}): pip install 'tiercheck[gpu]'"
            ) from error

    def examples(self, size: int, seed: int) -> Iterator[Call]:
        """Calls with tensors of ``size`` elements. None for a kernel that replays an optimizer: the optimizer's
        certification compares its forms."""
        if self._examples is not None:
            yield from self._examples(size, seed)

    def warm_up(self) -> None:
        """Compile the Numba form for every example, or load it from Numba's cache. Without Numba, do nothing."""
        if automatic() == "numba":
            for args, kwargs in self.examples(WARM_UP_ELEMENTS, 0):
                self(*args, **kwargs)

    def forget(self) -> None:
        """Choose the form again at the next call."""
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
    """A :class:`Kernel` of this package, entered into :data:`KERNELS`. Errors: ``ValueError`` for a name that is taken.

    ``cpu``: a module inside of :mod:`tiercheck.kernels.cpu`. A kernel of another distribution is a ``Kernel(...)``.
    """
    kernel = Kernel(reference, cpu=f"tiercheck.kernels.cpu.{cpu}", cuda=cuda, examples=examples)
    if kernel.name in _declared:
        raise ValueError(f"the kernel {kernel.name} is declared twice")
    _declared[kernel.name] = kernel
    return kernel


@functools.cache
def automatic() -> str:
    """The fastest form that is installed for arrays in host memory. Logs a warning, once, if that is not Numba."""
    if has_numba():
        return "numba"
    logger.warning("numba is not installed: the kernels run in NumPy, several times slower")
    return "reference"


def has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def load_numba() -> None:
    """Import Numba: call it before a module of :mod:`tiercheck.kernels.cpu` is imported.

    Numba's modules import each other in circles. Two threads that begin with different ones of them break both imports;
    who asks for all of Numba waits until another thread has imported it.
    """
    importlib.import_module("numba")


def warm_up(kernels: Iterable[Kernel[..., Any]] | None = None) -> None:
    """Compile these kernels, or load them from Numba's cache, so that none compiles while training waits.

    Without an argument: all of :data:`KERNELS`. Takes milliseconds for each one that is cached, and seconds else. How
    many threads a call will have makes no difference.
    """
    for kernel in KERNELS.values() if kernels is None else dict.fromkeys(kernels):
        kernel.warm_up()


def of_each_type(entry: str) -> tuple[str, ...]:
    """A CUDA kernel's entries for fp32, fp16 and bf16 values."""
    return tuple(f"{entry}_{name}" for name in ("float32", "float16", "bfloat16"))


def cuda_sources() -> dict[str, tuple[str, ...]]:
    """Every CUDA source, and the ``__global__`` functions in it."""
    found: dict[str, dict[str, None]] = {}
    for kernel in KERNELS.values():
        for form in kernel.cuda:
            for source, entries in form.entries.items():
                found.setdefault(source, {}).update(dict.fromkeys(entries))
    return {source: tuple(entries) for source, entries in found.items()}
