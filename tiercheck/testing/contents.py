"""Large contents are compared in a line.

pytest explains two values that are not equal by a diff of all that they hold: in CI in full, for two different contents
of a megabyte in hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["difference", "names_that_differ"]

Content = bytes | bytearray | memoryview


def difference(found: Content | None, expected: Content | None) -> str:
    """What sets ``found`` apart from ``expected``; empty if nothing does. ``None``: no object is there."""
    if found is None or expected is None:
        return "" if found is expected else f"{size_of(found)}, and not {size_of(expected)}"
    one, other = np.frombuffer(found, np.uint8), np.frombuffer(expected, np.uint8)
    lengths = "" if one.size == other.size else f"{one.size} bytes, and not {other.size}"
    both = min(one.size, other.size)
    differ = one[:both] != other[:both]
    if not differ.any():
        return lengths
    first = int(differ.argmax())
    off = f"{np.count_nonzero(differ)} of {both} bytes differ, from byte {first}: {one[first]}, and not {other[first]}"
    return f"{lengths}; {off}" if lengths else off


def size_of(content: Content | None) -> str:
    return "nothing" if content is None else f"{len(content)} bytes"


def names_that_differ(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Those whose values are not equal, and those that only one of the two has."""
    lacking = found.keys() ^ expected.keys()
    return sorted(lacking | {name for name in found.keys() & expected.keys() if not same(found[name], expected[name])})


def same(one: Any, other: Any) -> bool:
    """As a dictionary compares its values: the same NaN is equal to itself."""
    return one is other or bool(one == other)
