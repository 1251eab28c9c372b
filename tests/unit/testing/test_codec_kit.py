"""The kit for codecs finds one that loses data of some tensors alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from numpy.typing import NDArray

from tiercheck.streams.codecs.exact import Exact
from tiercheck.testing import codecs

Kit = codecs.CodecTests


class ExactTests(codecs.CodecTests):
    __test__ = False
    text = "exact"


BREAKS: dict[str, Callable[[NDArray[Any]], bool]] = {
    "more than 65,536 elements": lambda array: array.size > 65_536,
    "more than a million": lambda array: array.size > 1_000_000,
    "one row": lambda array: array.ndim == 2 and array.shape[0] == 1,
    "three dimensions": lambda array: array.ndim == 3,
}


@pytest.mark.parametrize("breaks", BREAKS.values(), ids=BREAKS)
def test_what_some_tensors_lose_is_found(
    breaks: Callable[[NDArray[Any]], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Exact.encode

    def loses(self: Exact, array: NDArray[Any], dtype: str, **named: Any) -> Any:
        return encode(self, array * 0 if breaks(array) else array, dtype, **named)

    tests = Kit.test_any_array_comes_back_in_its_dtype_and_shape, Kit.test_large_tensors_come_back
    for each in tests:
        each(ExactTests())
    monkeypatch.setattr(Exact, "encode", loses)
    found = 0
    for each in tests:
        try:
            each(ExactTests())
        except AssertionError:
            found += 1
    assert found
