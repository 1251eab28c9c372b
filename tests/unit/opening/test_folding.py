"""Whether a processor is free for folds, and who says that none is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError
from tiercheck.opening.folding import no_free_processor, settle_folding, tell_folding

EACH_OWN = [range(8 * rank, 8 * rank + 8) for rank in range(8)]


@pytest.mark.parametrize(
    ("bound", "local", "quota", "free"),
    [
        ([range(2)], 1, None, True),
        ([range(1)], 1, None, False),
        ([range(8)] * 8, 8, None, False),
        ([range(9)] * 8, 8, None, True),
        (EACH_OWN, 8, None, True),
        (EACH_OWN, 8, 8, False),
        (EACH_OWN, 8, 9, True),
        ([[rank] for rank in range(8)], 8, None, False),
        ([range(4)] * 4 + [range(4, 8)] * 4, 8, None, False),
        ([range(5)] * 4 + [range(5, 10)] * 4, 8, None, True),
        ([range(4)] * 6, 2, None, True),
        ([range(4)] * 6, None, None, False),
        ([range(7)] * 6, None, None, True),
    ],
    ids=[
        "one to spare",
        "none to spare",
        "shared by all",
        "shared by all, one to spare",
        "bound to eight each",
        "bound to eight each, with time for eight",
        "bound to eight each, with time for nine",
        "bound to one each",
        "four share four",
        "four share five",
        "three nodes of two",
        "nobody says how many are on a node",
        "nobody says how many are on a node, and there are enough",
    ],
)
def test_a_processor_is_free(bound: list[range], local: int | None, quota: int | None, free: bool) -> None:
    environment = {} if local is None else {"LOCAL_WORLD_SIZE": str(local)}
    lacking = [no_free_processor(rank, bound, quota, environment) for rank in range(len(bound))]
    assert [not each for each in lacking] == [free] * len(bound)
    assert free or all("no processor is free for folds" in each for each in lacking)


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (["", ""], []),
        (["none is free", "none is free"], ["bases of rank 0 are captured, and not folded: none is free"]),
        (["", "none is free"], ["bases of rank 1 are captured, and not folded: none is free"]),
        (
            ["none is free", ""],
            [
                "bases of rank 0 are captured, and not folded: none is free",
                "bases of rank 1 are folded, and those of rank 0 captured",
            ],
        ),
    ],
)
def test_a_rank_that_differs_from_rank_0_says_so(
    reasons: list[str], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for rank in range(len(reasons)):
        tell_folding(rank, reasons)
    assert [each.message for each in caplog.records] == said


def test_nothing_is_folded_by_an_agent_that_lacks_torch() -> None:
    folds = object()
    trained: Any = SimpleNamespace(check_foldable=lambda: None, folding=lambda *, certified: folds)
    machine: Any = SimpleNamespace(quota=None, environment={})

    def settled(bases: str, lacking: str) -> tuple[object, str]:
        agent: Any = SimpleNamespace(node="gpu1", lacks_to_fold=lacking)
        config = CheckpointConfig(bases=bases)
        return settle_folding(trained, config, 0, [range(1)], machine, agent=agent, apart=True)

    assert settled("auto", "") == (folds, "")
    assert settled("fold", "") == (folds, "")
    found, why = settled("auto", "torch")
    assert found is None
    assert why.startswith("torch is not installed where the agent of node 'gpu1' runs: install it there")
    with pytest.raises(ConfigurationError, match="torch is not installed where the agent"):
        settled("fold", "torch")
    assert settled("capture", "torch") == (None, "")


@pytest.mark.parametrize(("apart", "processors"), [(False, 4), (True, 1)])
def test_to_fold_is_not_advised_for_what_cannot_be_folded(apart: bool, processors: int) -> None:
    """An optimizer that nothing replays, say: bases="fold" would be refused. No kernel is tried to find out, which
    takes seconds on a GPU."""

    def check_foldable() -> None:
        raise ConfigurationError("nothing replays this optimizer")

    def folding(*, certified: bool) -> object:
        pytest.fail("kernels are tried")

    machine: Any = SimpleNamespace(quota=None, environment={})
    config = CheckpointConfig(bases="auto")
    trained: Any = SimpleNamespace(check_foldable=check_foldable, folding=folding)
    found = settle_folding(trained, config, 0, [range(processors)], machine, agent=None, apart=apart)
    assert found == (None, "nothing replays this optimizer")
    trained = SimpleNamespace(check_foldable=lambda: None, folding=folding)
    _, why = settle_folding(trained, config, 0, [range(processors)], machine, agent=None, apart=apart)
    assert 'bases="fold"' in why
