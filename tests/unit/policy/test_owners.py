"""Who stores what several ranks hold alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercheck.policy.owners import owners, why_each
from tiercheck.types import Survives


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_each_tensor_has_one_owner_and_no_rank_more_than_its_share_and_one(nbytes: dict[str, int], ranks: int) -> None:
    found = owners(nbytes, ranks)
    assert found.keys() == nbytes.keys()
    load = [sum(nbytes[name] for name in found if found[name] == rank) for rank in range(ranks)]
    assert max(load) <= sum(load) / ranks + max(nbytes.values(), default=0)
    assert found == owners(dict(reversed(nbytes.items())), ranks), "whatever the order in which a rank lists them"


def test_every_rank_stores_the_whole_if_nothing_outlives_one_of_several_nodes() -> None:
    assert "no tier outlives a node" in why_each(Survives.PROCESS, ["a", "a", "b"])
    assert not why_each(Survives.PROCESS, ["a", "a", "a"]), "a node that is lost takes all copies with it"
    assert not why_each(Survives.NODE, ["a", "b"])
