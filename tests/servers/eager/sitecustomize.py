"""Interpreters that find this folder on their path run it first: an agent, or a process that folds, does not stand
back.

On a machine that other tests keep busy, an agent that stands back hardly runs, and what waits for it would wait for
the other tests. ``tests/unit/agent/test_process.py`` shows that agents stand back.
"""

import os

from tiercheck.runtime import priority

priority.stand_back = lambda *_: "nothing: a test waits for this agent"

if "TESTS_FORKS" in os.environ:
    from tests import forked_folds

    forked_folds.take_effect()
