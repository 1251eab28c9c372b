"""Namespaces of shared memory that tests take, and where they lie."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercheck.tiers.shm.namespaces import remove_namespace

__all__ = ["name", "root_of"]


def root_of(name: str) -> Path:
    """The directory of the namespace ``name``."""
    return Path(f"/dev/shm/tiercheck-{os.geteuid()}-{name}")


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a namespace that nobody else has; removed with all that is in it, where the test has made it."""
    name = f"test-{secrets.token_hex(6)}"
    yield name
    if root_of(name).exists():
        remove_namespace(name)
