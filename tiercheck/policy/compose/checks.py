"""What the policies that a user composes have in common."""

from __future__ import annotations

from typing import Any, TypeVar

from tiercheck.errors import ConfigurationError

__all__ = ["POLICIES_MAX", "check_tier", "check_whole", "flat"]

POLICIES_MAX = 16
NAME_CHARS_MAX = 255

T = TypeVar("T")


def check_whole(option: str, value: object, least: int, most: int) -> None:
    """Errors: ``ConfigurationError`` unless ``value`` is a whole number within these bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigurationError(f"{option} must be a whole number from {least} to {most}, not {value!r}")


def check_tier(tier: object) -> None:
    """Errors: ``ConfigurationError`` unless ``tier`` can be the name of a tier."""
    if not isinstance(tier, str) or not 0 < len(tier) <= NAME_CHARS_MAX:
        raise ConfigurationError(f"tier must be the name of a tier, such as 's3', not {tier!r}")


def flat(combined: type, *policies: T) -> tuple[T, ...]:
    """The policies, with those that are combined already in parts. Errors: ``ConfigurationError`` for too many."""
    parts: list[Any] = []
    for each in policies:
        parts += each.policies if isinstance(each, combined) else (each,)  # type: ignore[attr-defined]  # each combined one has them
    if len(parts) > POLICIES_MAX:
        raise ConfigurationError(f"at most {POLICIES_MAX} policies can be combined, not {len(parts)}")
    return tuple(parts)
