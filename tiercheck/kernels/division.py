"""Division by a constant without a division instruction, with the rounding of the division.

Adam divides the square root of each second moment by a number c, which is the same for all elements of a step. Let
``RN`` round to the nearest fp32 number. With the reciprocal of c in two parts, ``high = RN(1 / c)`` and
``low = RN(1 / c - high)``, the quotient is ``fma(x, high, RN(x * low))``.

Source: Brisebarre, Muller and Raina, *Accelerating correctly rounded floating-point division when the divisor is known
in advance* (IEEE Transactions on Computers 53(8), 2004), section 4. The proof for fp32, and the ``x`` that must be
tried:

Let ``c = C / 2**23`` and ``x = X / 2**23`` with integers C and X in ``[2**23, 2**24)``. Other exponents scale every
quantity by the same power of two, as long as nothing underflows. Then ``|low| <= 2**-25``. The error of
``high + low`` is at most half a unit in the last place of low, ``2**-50``; times ``x < 2`` that is less than
``2**-49``. ``x * low`` is less than ``2**-24``, so its rounding error is at most ``2**-49``. The fma therefore rounds
a number that is within ``E < 2**-48`` of ``x / c``. Its result is wrong only if a midpoint of two neighbouring fp32
numbers is within E of ``x / c``.

- ``X >= C``: such a midpoint is ``(2 M + 1) / 2**24``. Its distance from ``X / C`` is ``|R| / (C * 2**24)`` with the
  integer ``R = X * 2**24 - C * (2 M + 1)``. R is not zero, since a quotient of fp32 numbers is never a midpoint. A
  distance less than E requires ``|R| < C * 2**-24 < 1``, which is impossible.
- ``X < C``: the midpoint is ``(2 M + 1) / 2**25`` and ``R = X * 2**25 - C * (2 M + 1)``. A distance less than E
  requires ``|R| < C * 2**-23 < 2``, so ``R = 1`` or ``R = -1``. Then C is odd and ``X = +-2**-25 (mod C)``: two
  candidates, which :func:`reciprocal` tries.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

__all__ = ["DIVISOR_MIN", "Reciprocal", "parts_of", "reciprocal"]

DIVISOR_MIN = 2.0**-27
"""The smallest divisor, of at most 1, for which nothing underflows with square roots (0, or from 2**-75 to 2**64):
``low`` is 0 or at least 2**-47, since ``1 - c * high`` is a multiple of 2**-47."""

BITS = 24


@dataclass(frozen=True)
class Reciprocal:
    """``1 / c`` in two parts. ``exact``: they divide every square root of an fp32 number as a division would."""

    high: np.float32
    low: np.float32
    exact: bool


@lru_cache(maxsize=4096)
def reciprocal(divisor: float) -> Reciprocal:
    """The reciprocal of ``divisor``, an fp32 number that is not zero. Cached."""
    c = Fraction(divisor)
    high = nearest(1 / c)
    low = nearest(1 / c - high)
    exact = DIVISOR_MIN <= divisor <= 1 and all(
        nearest(x * high + nearest(x * low)) == nearest(x / c) for x in candidates(divisor)
    )
    return Reciprocal(np.float32(float(high)), np.float32(float(low)), exact)


def parts_of(divisor: np.float32) -> tuple[np.float32, np.float32, bool]:
    """The parts of a divisor's reciprocal, and whether a root must be divided by it all the same."""
    if not divisor > 0:
        return np.float32(0), np.float32(0), True
    found = reciprocal(float(divisor))
    return found.high, found.low, not found.exact


def candidates(divisor: float) -> list[int]:
    """The only significands for which the two parts may give another quotient than the division."""
    significand = int(np.float32(divisor).view(np.uint32)) & 0x7FFFFF | 0x800000
    if significand % 2 == 0:
        return []
    one = pow(2, -(BITS + 1), significand)
    return [x for x in (one, significand - one) if x >= 1 << (BITS - 1)]


def nearest(value: Fraction) -> Fraction:
    """``value`` rounded to 24 bits, half to even, with an unbounded exponent."""
    if value == 0:
        return value
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    unit = Fraction(2) ** (exponent - BITS + (1 if abs(value) >= Fraction(2) ** exponent else 0))
    return round(value / unit) * unit
