"""How many files a process of TierCheck's own may have open."""

from __future__ import annotations

import resource
from contextlib import suppress

__all__ = ["allow_many_descriptors"]

DESCRIPTORS_MAX = 1 << 16


def allow_many_descriptors() -> None:
    """Raise this process's limit as far as it may: each object of a shared memory that it has mapped holds one. By
    default it is 1,024, for the sake of programs that use ``select``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
