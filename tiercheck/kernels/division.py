"""Division by a constant without a divider, rounded as the division would be.

Adam divides the square root of every second moment by one number a step. With the reciprocal of that number in two
parts, ``high = RN(1 / c)`` and ``low = RN(1 / c - high)``, the quotient is ``fma(x, high, RN(x * low))``.

Source: Brisebarre, Muller and Raina, *Accelerating correctly rounded floating-point division when the divisor is known
in advance* (IEEE Transactions on Computers 53(8), 2004), section 4. The argument, for fp32, and which ``x`` have
to be tried:

Let ``c = C / 2**23`` and ``x = X / 2**23`` with integers in ``[2**23, 2**24)``; other exponents shift everything
alike, as long as nothing underflows. Then ``|low| <= 2**-25``. The reciprocal's error is at most half a unit of low's
last place, ``2**-50``, which ``x < 2`` makes less than ``2**-49``; the rounding of ``x * low``, less than ``2**-24``,
errs by at most ``2**-49``. So what the fma rounds lies within ``E < 2**-48`` of ``x / c``, and the result can be wrong
only where a middle of two neighbouring fp32 numbers lies within E of ``x / c``.

- ``X >= C``: such a middle is ``(2 M + 1) / 2**24``. Its distance from ``X / C`` is ``|R| / (C * 2**24)`` with the
  integer ``R = X * 2**24 - C * (2 M + 1)``, which is not zero (a quotient of fp32 numbers is never such a middle).
  Within E would mean ``|R| < C * 2**-24 < 1``: never.
- ``X < C``: the middle is ``(2 M + 1) / 2**25``, ``R = X * 2**25 - C * (2 M + 1)``, and within E means
  ``|R| < C * 2**-23 < 2``: only ``R = 1`` or ``R = -1``. Then C is odd and ``X = +-2**-25 (mod C)``: two candidates,
  which are tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

__all__ = ["DIVISOR_MIN", "Reciprocal", "reciprocal"]

DIVISOR_MIN = 2.0**-27
"""Of divisors from here to 1, and quotients of square roots (0, or from 2**-75 to 2**64), no part underflows:
``low`` is 0 or at least 2**-47, since ``1 - c * high`` is a multiple of 2**-47."""

BITS = 24


@dataclass(frozen=True)
class Reciprocal:
    """``1 / c`` in two parts; ``exact`` where they divide every square root as a division would."""

    high: np.float32
    low: np.float32
    exact: bool


@lru_cache(maxsize=4096)
def reciprocal(divisor: float) -> Reciprocal:
    """The reciprocal of an fp32 number that is not zero."""
    c = Fraction(divisor)
    high = nearest(1 / c)
    low = nearest(1 / c - high)
    exact = DIVISOR_MIN <= divisor <= 1 and all(
        nearest(x * high + nearest(x * low)) == nearest(x / c) for x in candidates(divisor)
    )
    return Reciprocal(np.float32(float(high)), np.float32(float(low)), exact)


def candidates(divisor: float) -> list[int]:
    """The only significands that may be divided wrongly."""
    significand = int(np.float32(divisor).view(np.uint32)) & 0x7FFFFF | 0x800000
    if significand % 2 == 0:
        return []
    one = pow(2, -(BITS + 1), significand)
    return [x for x in (one, significand - one) if x >= 1 << (BITS - 1)]


def nearest(value: Fraction) -> Fraction:
    """``value`` rounded to 24 bits, half to even, whatever its exponent."""
    if value == 0:
        return value
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    unit = Fraction(2) ** (exponent - BITS + (1 if abs(value) >= Fraction(2) ** exponent else 0))
    return round(value / unit) * unit
