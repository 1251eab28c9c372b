"""How many threads, and what each of them gets."""

from __future__ import annotations

import os

import pytest

from tiercheck.errors import ConfigurationError
from tiercheck.kernels.threads import processors_of_rank


def test_the_ranks_of_a_node_share_its_processors() -> None:
    processors = len(os.sched_getaffinity(0))
    assert processors_of_rank({}) == processors
    assert processors_of_rank({"LOCAL_WORLD_SIZE": str(processors)}) == 1
    assert processors_of_rank({"LOCAL_WORLD_SIZE": str(4 * processors)}) == 1
    with pytest.raises(ConfigurationError, match="LOCAL_WORLD_SIZE"):
        processors_of_rank({"LOCAL_WORLD_SIZE": "many"})
