"""The registry of kernels: each is declared once, and all of its forms do the same."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import sys
import types
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.errors import ConfigurationError
from tiercheck.kernels import KERNELS, catalogue
from tiercheck.kernels.registry import WARM_UP_ELEMENTS, declare

EACH = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
FILLED_UP_TO_RESULT = {"compact_into": (2, 3), "pack_exponents": (1,), "split_and_pack_exponents": (2,)}
"""Buffers, by position, of which only as much is written as the call returns. Behind that may lie anything."""


class OnDevice:
    """An array on a GPU, as CuPy and torch show it."""

    __cuda_array_interface__: ClassVar[dict[str, Any]] = {"shape": (4,), "typestr": "<f4", "data": (0, False)}


def test_what_is_declared_is_what_is_public() -> None:
    assert set(catalogue.__all__) == set(KERNELS)
    assert all(getattr(kernels, name) is kernel for name, kernel in KERNELS.items())


def test_a_name_is_declared_once() -> None:
    def compact() -> None: ...

    with pytest.raises(ValueError, match="compact is declared twice"):
        declare(compact, cpu="compaction")


def test_every_form_has_the_arguments_of_the_reference() -> None:
    for kernel in KERNELS.values():
        forms = [inspect.signature(kernel.by(name)).parameters for name in ("reference", "numba")]
        assert list(forms[0]) == list(forms[1]) == list(inspect.signature(kernel).parameters), kernel


def test_an_array_on_a_gpu_is_refused_and_the_message_says_what_to_call() -> None:
    for kernel in KERNELS.values():
        with pytest.raises(ConfigurationError, match=r"tiercheck\.kernels\.cuda"):
            kernel(OnDevice())
    with pytest.raises(ConfigurationError, match="no form 'fortran': choose numba, reference or cuda"):
        kernels.compact.by("fortran")


@EACH
@given(size=st.integers(0, 700) | st.sampled_from([255, 256, 257, 4096, 70_001]), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_every_form_gives_the_bits_of_the_reference(kernel: kernels.Kernel[..., Any], size: int, seed: int) -> None:
    for args, named in kernel.examples(size, seed):
        takes_threads = "threads" in inspect.signature(kernel).parameters
        for threads in ({"threads": 1}, {"threads": 3}) if takes_threads else ({},):
            results = []
            for form in ("reference", "numba"):
                own_args, own_named = copy.deepcopy((args, named))
                with np.errstate(all="ignore"):
                    found = kernel.by(form)(*own_args, **own_named, **threads)
                outcome = found if isinstance(found, tuple) else (found,)
                written = [own_args[at][:found] for at in FILLED_UP_TO_RESULT.get(kernel.name, ())]
                kept = [each for at, each in enumerate(own_args) if at not in FILLED_UP_TO_RESULT.get(kernel.name, ())]
                results.append([*outcome, *kept, *written, *own_named.values()])
            for theirs, ours in zip(*results, strict=True):
                assert same(theirs, ours), kernel


def same(a: Any, b: Any) -> bool:
    """The same bits, but for the payloads of NaNs, which arithmetic does not keep."""
    if not isinstance(a, np.ndarray):
        return bool(a == b)
    return a.dtype == b.dtype and a.shape == b.shape and without_payloads(a) == without_payloads(b)


def without_payloads(array: NDArray[Any]) -> bytes:
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return array.tobytes()


def test_the_cuda_form_is_had_by_its_name_or_the_error_says_what_is_missing() -> None:
    for kernel in KERNELS.values():
        if not kernel.cuda:
            with pytest.raises(ConfigurationError, match="has no CUDA form"):
                kernel.by("cuda")
        elif importlib.util.find_spec("cupy") is None:
            with pytest.raises(ConfigurationError, match=r"pip install 'tiercheck\[gpu\]'"):
                kernel.by("cuda")
        else:
            assert kernel.by("cuda") is kernel.cuda[0].load(), kernel


def doubled(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The reference of a kernel that another distribution declares."""
    return 2 * values


def test_a_kernel_of_another_distribution_is_warmed_up_in_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    module = types.ModuleType("other_kernels")
    vars(module)["doubled"] = lambda values: calls.append(values.size) or values + values
    monkeypatch.setitem(sys.modules, "other_kernels", module)
    kernel = kernels.Kernel(doubled, cpu="other_kernels", examples=catalogue.float_calls)
    kernels.warm_up([kernel, kernel])
    assert calls == [WARM_UP_ELEMENTS]
    assert kernel(np.ones(2, np.float32)).tolist() == [2.0, 2.0]
    assert kernel.by("reference") is doubled
    assert kernel.name not in KERNELS


def test_what_runs_on_a_gpu_is_where_the_declaration_says() -> None:
    pytest.importorskip("cupy")
    for form in (form for kernel in KERNELS.values() for form in kernel.cuda):
        module, _, name = form.function.partition(":")
        assert name in importlib.import_module(f"tiercheck.kernels.cuda.{module}").__all__
        assert "stream" in inspect.signature(form.load()).parameters, form.function
