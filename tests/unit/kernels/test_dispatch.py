"""One set of names for all kernels: what runs, is chosen by where the arrays are and by name."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import numpy as np
import pytest

from tiercheck import kernels
from tiercheck.errors import ConfigurationError
from tiercheck.kernels import dispatch, reference

FUNCTIONS = [name for name in dispatch.__all__ if name not in ("Backend", "backend")]


def arguments(function: Any) -> list[Any]:
    """Something for each argument that must be given."""
    needed = [each for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    return [OnDevice() for _ in needed]


class OnDevice:
    """An array on a GPU, as CuPy and torch show it."""

    __cuda_array_interface__: ClassVar[dict[str, Any]] = {"shape": (4,), "typestr": "<f4", "data": (0, False)}
    size = 4


@pytest.mark.parametrize("name", FUNCTIONS)
class TestEveryKernel:
    def test_has_its_public_name(self, name: str) -> None:
        assert getattr(kernels, name) is getattr(dispatch, name)
        assert name in kernels.__all__

    def test_refuses_an_array_on_a_gpu_and_says_what_to_call(self, name: str) -> None:
        function = getattr(kernels, name)
        with pytest.raises(ConfigurationError, match=r"tiercheck\.kernels\.cuda"):
            function(*arguments(function))

    def test_refuses_kernels_that_there_are_not(self, name: str) -> None:
        function = getattr(kernels, name)
        given = [np.zeros(0, np.float32) for _ in arguments(function)]
        for by in ("cuda", "fortran"):
            with pytest.raises(ConfigurationError, match=f"no '{by}' kernels for arrays in host memory: choose numba"):
                function(*given, by=by)

    def test_is_in_every_implementation_with_the_same_arguments(self, name: str) -> None:
        if name in ("narrow", "quantise"):  # built of others
            return
        from tiercheck.kernels import cpu

        signatures = [
            [each.name for each in inspect.signature(getattr(module, name)).parameters.values()]
            for module in (reference, cpu, dispatch.Backend)
        ]
        assert signatures[0] == signatures[1] == signatures[2][1:]
