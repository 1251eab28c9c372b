"""Host states, compared by path."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from tiercheck.archive.compare.paths import differing_paths


def paths(before: object, after: object) -> dict[str, tuple[Any, Any]]:
    return {each.path: (each.before, each.after) for each in differing_paths(before, after)}


def test_what_is_nested_is_named_by_its_path() -> None:
    before = {"options": [{"lr": 0.1, "betas": (0.9, 0.99)}], "gone": 1, "same": {"a": [1, 2]}}
    after = {"options": [{"lr": 0.2, "betas": (0.9, 0.95)}], "new": "x", "same": {"a": [1, 2]}}
    assert paths(before, after) == {
        "options.0.lr": ("0.1", "0.2"),
        "options.0.betas.1": ("0.99", "0.95"),
        "gone": ("1", None),
        "new": (None, "'x'"),
    }


def test_arrays_and_tensors_are_compared_by_their_bits() -> None:
    ones, other = np.ones(3, np.uint8), np.array([1, 1, 2], np.uint8)
    assert paths({"a": ones, "t": torch.ones(2)}, {"a": ones.copy(), "t": torch.ones(2)}) == {}
    before, after = paths({"a": ones}, {"a": other})["a"]
    assert before.startswith("uint8 [3] ")
    assert after.startswith("uint8 [3] ")
    assert before != after, "by a digest"
    assert paths({"t": torch.ones(2)}, {"t": torch.ones(3)}) == {"t": ("torch.float32 [2]", "torch.float32 [3]")}
    assert paths({"n": torch.tensor(math.nan), "f": math.nan}, {"n": torch.tensor(math.nan), "f": math.nan}) == {}


def test_a_value_of_another_type_differs() -> None:
    assert paths({"a": 1, "b": {}}, {"a": True, "b": []}) == {"a": ("1", "True"), "b": ("{}", "[]")}
    assert paths([1], [1, None]) == {"1": (None, "None")}


def test_lists_of_other_lengths_differ_by_their_ends() -> None:
    assert paths({"losses": [1, 2]}, {"losses": [1, 3, 4]}) == {"losses.1": ("2", "3"), "losses.2": (None, "4")}


def test_what_is_too_deep_is_compared_as_a_whole() -> None:
    def nested(value: object) -> object:
        for _ in range(200):
            value = [value]
        return value

    assert paths(nested(1), nested(1)) == {}
    assert len(paths(nested(1), nested(2))) == 1
