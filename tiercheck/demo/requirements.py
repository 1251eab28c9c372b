"""What the demo needs beyond TierCheck's own requirements, looked for before any of it is imported."""

from __future__ import annotations

import importlib.util

from tiercheck.errors import ConfigurationError

__all__ = ["check_requirements"]

MODULES = ("torch", "numba", "deepspeed", "matplotlib", "psutil")


def check_requirements(modules: tuple[str, ...] = MODULES) -> None:
    """Errors: ``ConfigurationError`` naming what is missing, and how to install it."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"the demo needs {', '.join(missing)}: pip install 'tiercheck[demo]'")
