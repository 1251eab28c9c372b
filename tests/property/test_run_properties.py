"""However the differentials of a chain are halved, decoded and merged, the replay is the one of a single thread."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recorded import Trainer, fresh, state_of
from tests.replaying import replayed_runs
from tiercheck.streams.records.recorded import Differential
from tiercheck.streams.replay.replay import replay
from tiercheck.streams.replay.runs import Run, decode_run, run_of

VERSIONS = 9


@cache
def chain() -> tuple[tuple[Differential, ...], dict[str, bytes]]:
    """Differentials of which one was skipped and some lack a gradient, and the state they lead to."""
    trainer = Trainer()
    found = [
        trainer.step(skipped=version == 4, without=["weight"] if version % 3 == 0 else [], lr=1e-2 / version)
        for version in range(1, VERSIONS + 1)
    ]
    return tuple(found), trainer.state()


def trees(first: int, last: int) -> st.SearchStrategy[object]:
    """Every binary tree over ``range(first, last)``: a leaf is a number, a node a pair."""
    if last - first == 1:
        return st.just(first)
    return st.integers(first + 1, last - 1).flatmap(lambda cut: st.tuples(trees(first, cut), trees(cut, last)))


def merged(tree: object) -> Run:
    if isinstance(tree, tuple):
        earlier, later = tree
        return merged(earlier).then(merged(later))
    assert isinstance(tree, int)
    return run_of(chain()[0][tree])


@given(tree=trees(0, VERSIONS), threads=st.integers(1, 5))
@settings(max_examples=40)
def test_any_tree_gives_the_same_bits(tree: object, threads: int) -> None:
    provider = fresh()
    replayed_runs(provider, lambda granted: (run for run in [merged(tree)]), threads=threads)
    assert state_of(provider) == chain()[1]


@given(cuts=st.sets(st.integers(1, VERSIONS - 1)), threads=st.integers(1, 7))
@settings(max_examples=30)
def test_any_runs_and_any_number_of_threads_give_the_same_bits(cuts: set[int], threads: int) -> None:
    differentials, expected = chain()
    edges = [0, *sorted(cuts), VERSIONS]
    provider = fresh()
    replayed = replayed_runs(
        provider,
        lambda granted: (decode_run(differentials[start:stop], threads=granted) for start, stop in pairwise(edges)),
        threads=threads,
    )
    assert state_of(provider) == expected
    assert replayed.host_state == differentials[-1].host_state
    assert replayed.tally.versions == VERSIONS


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_what_is_merged(threads: int) -> None:
    differentials, _ = chain()
    run = decode_run(differentials, threads=threads)
    assert (run.first, run.last) == (1, VERSIONS)
    assert [step.version for step in run.steps] == [1, 2, 3, 5, 6, 7, 8, 9]
    assert [sorted(step.gradients) for step in run.steps][2] == ["bias", "embedding"]
    assert run.buffers["seen"].tolist() == [1 + 3 + 5 + 7 + 9] * 3
    assert run.tally.versions == VERSIONS


def test_a_gap_is_no_run() -> None:
    differentials, _ = chain()
    with pytest.raises(ValueError, match=r"the run 3..3 does not follow 1..1"):
        decode_run([differentials[0], differentials[2]])


def test_the_serial_replay_is_the_training() -> None:
    differentials, expected = chain()
    provider = fresh()
    replay(provider, differentials, threads=1)
    assert state_of(provider) == expected
