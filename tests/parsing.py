"""Threads of one process that read source text do so in turns, on a CPython that needs it.

Until 3.11.8, CPython counts the depth of the tree that :func:`ast.parse` builds in one place for all threads, and
garbage that is collected meanwhile may let another thread run (https://github.com/python/cpython/issues/106905): either
may end with ``SystemError: AST constructor recursion depth mismatch``. Tests run the ranks of a job as threads, and
their first imports are read by pytest, which rewrites the assertions of what it imports, and by torch.
"""

from __future__ import annotations

import ast
import functools
import sys
import threading

__all__ = ["parse_in_turns"]


def parse_in_turns() -> None:
    if not (3, 11) <= sys.version_info < (3, 11, 8):
        return
    turn = threading.RLock()  # what is collected while a thread parses may parse something itself
    parse = ast.parse

    @functools.wraps(parse)
    def parse_alone(*args, **keywords):  # type: ignore[no-untyped-def]
        with turn:
            return parse(*args, **keywords)

    ast.parse = parse_alone
