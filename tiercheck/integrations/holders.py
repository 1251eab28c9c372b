"""Who holds an object: what its holders do not tell, the garbage collector does (0.1 s a million objects).

It is not asked for all objects there are (``gc.get_objects``): among them are tuples that other threads are just
making, which they then cannot finish (https://github.com/python/cpython/issues/39117).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

__all__ = ["holders"]


def holders(held: Sequence[object]) -> Iterator[object]:
    """Objects that have one of these as an attribute, and others."""
    referrers = gc.get_referrers(*held)
    yield from referrers
    if attributes := [each for each in referrers if type(each) is dict]:
        yield from gc.get_referrers(*attributes)
