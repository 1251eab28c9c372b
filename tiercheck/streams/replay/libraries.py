"""Which code an optimizer runs: what must be the same for a step that is replayed by calling it to be the same step.

Torch's own optimizers are told by torch's version. Any other is told by the version of the distribution that it comes
from (DeepSpeed, apex, bitsandbytes), and by a digest of its source: that of the functions of its class and of the
functions and classes of its module that these name, and so on. A user's own optimizer has no version, and a library
that is being worked on keeps its own while it changes. Compiled code that these call is told by the version alone.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from types import CodeType, FunctionType

__all__ = ["library_of"]

FUNCTIONS_MAX = 10_000


@cache
def library_of(kind: type) -> str:
    """Such as ``deepspeed 0.19.8, code 5f0c...``; empty for a class of torch's."""
    classes = [each for each in kind.__mro__ if top_level(each) not in ("torch", "builtins", "typing", "abc")]
    if not classes:
        return ""
    distributions = sorted({each for each in map(distribution_of, classes) if each})
    state = hashlib.sha256()
    for text in sorted(code_of(classes)):
        state.update(text.encode(errors="surrogatepass") + b"\0")
    return ", ".join([*distributions, f"code {state.hexdigest()[:16]}"])


def top_level(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def distribution_of(kind: type) -> str:
    """Name and version; empty for code that was not installed."""
    names = packages().get(top_level(kind), [])
    return ", ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names)))


@cache
def packages() -> dict[str, list[str]]:
    """The distributions that bring a top-level package. Reads what is installed: some tenths of a second."""
    return dict(metadata.packages_distributions())


def code_of(classes: list[type]) -> set[str]:
    """The source of all that the classes' functions run in their own modules."""
    waiting = [function for each in classes for function in functions_of(each)]
    seen: set[FunctionType] = set()
    while waiting and len(seen) < FUNCTIONS_MAX:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        for name in names_in(function.__code__):
            used = function.__globals__.get(name)
            if getattr(used, "__module__", None) == function.__module__:
                if isinstance(used, type):
                    waiting += functions_of(used)
                elif callable(used) and isinstance(plain := inspect.unwrap(used), FunctionType):
                    waiting.append(plain)
    return {source_of(each) for each in seen}


def functions_of(kind: type) -> list[FunctionType]:
    """The functions that the class itself defines, without what was wrapped around them."""
    values = list(vars(kind).values())
    within = [getattr(value, name, None) for value in values for name in ("__func__", "fget", "fset")]
    plain = [inspect.unwrap(each) for each in (*values, *within) if isinstance(each, FunctionType)]
    return [each for each in plain if isinstance(each, FunctionType)]


def names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from names_in(each)


def source_of(function: FunctionType) -> str:
    """Its source; if there is none (a notebook's cell that is gone), its byte code, which is this Python's."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return f"{sys.version_info[:2]} {compiled(function.__code__)}"


def compiled(code: CodeType) -> str:
    constants = [compiled(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
