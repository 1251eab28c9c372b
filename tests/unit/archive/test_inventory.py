"""What can be read of listings, as values."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tiercheck.archive.inventory import Inventory, spans_text
from tiercheck.archive.tiers import TierContents
from tiercheck.cli.as_json import listing_object
from tiercheck.cli.checkpoints import generation_text
from tiercheck.errors import RecoveryError
from tiercheck.keys import Key, LineageKey, ShardKey
from tiercheck.policy.observation import Copy, Role
from tiercheck.policy.recovery.lineage import Branch
from tiercheck.types import ObjectInfo, Survives

TOKEN = "0" * 16


def listing(shards: Iterable[ShardKey], *branches: Branch) -> Inventory:
    found: list[Key] = [*shards, *(LineageKey(branch.generation) for branch in branches)]
    objects = {key: ObjectInfo(str(key), 10, "") for key in found}
    return Inventory((TierContents(Role(0, "s3", Survives.RACK), "s3://x", objects=objects, branches=branches),))


def captured(generation: int, ranks: int, base: int, last: int) -> list[ShardKey]:
    bases = [ShardKey.base(generation, base, rank) for rank in range(ranks)]
    return bases + [ShardKey.differential(generation, base + 1, last, rank) for rank in range(ranks) if last > base]


def test_generations_of_another_number_of_ranks_are_chains_of_their_own() -> None:
    first, second = Branch(1, 0, 0, 3, TOKEN), Branch(2, 1, 6, 2, TOKEN)
    inventory = listing([*captured(1, 3, 4, 8), *captured(2, 2, 6, 9)], first, second)
    assert inventory.spans == ((4, 9),)
    assert inventory.at(5).world_size == 3
    assert {point.generation for point in inventory.at(6).points} == {2}
    assert inventory.at().world_size == 2
    # Ranks 0 and 1 of the one do not make up for a rank of the other that is missing.
    lost = inventory.less([Copy(0, ShardKey.base(1, 4, 2))])
    assert lost.spans == ((6, 9),)
    # What generation 1 wrote after it was left is another future, and is read as of that generation.
    with pytest.raises(RecoveryError, match=r"version 5 cannot be read; there are 6\.\.9"):
        lost.at(5)
    assert inventory.at(8, generation=1).world_size == 3


def test_layouts_of_as_many_ranks_are_chains_of_their_own() -> None:
    first, second = Branch(1, 0, 0, 2, TOKEN, "one"), Branch(2, 1, 6, 2, TOKEN, "other")
    inventory = listing([*captured(1, 2, 4, 8), *captured(2, 2, 6, 9)], first, second)
    assert inventory.spans == ((4, 9),)
    lost = inventory.less([Copy(0, ShardKey.base(2, 6, 1))])
    assert lost.spans == ((4, 6),)
    assert {point.generation for point in lost.at(6).points} == {1}, "ranks of two layouts do not make one version"


def test_a_version_needs_every_rank() -> None:
    branch = Branch(1, 0, 0, 2, TOKEN)
    shards = [*captured(1, 2, 4, 4), ShardKey.differential(1, 5, 7, 0), ShardKey.differential(1, 5, 6, 1)]
    inventory = listing(shards, branch)
    assert inventory.spans == ((4, 6),)
    (generation,) = inventory.generations
    differentials = generation.stored[-1].held[0]
    assert (differentials.ranks, differentials.versions) == ((0, 1), ((5, 6),))


def test_spans_are_told_in_short() -> None:
    assert spans_text([(0, 7), (12, 12)]) == "0..7, 12"
    assert spans_text([]) == "none"
    assert spans_text([(each, each) for each in range(0, 40, 2)]).startswith("(12 older ranges), 24")


def test_what_was_made_anew_is_told_of_all_that_comes_from_it_and_of_nothing_else() -> None:
    made = ("stage 1 is the average of 0 and 2", "the learning rate is raised")
    first, second, third = Branch(1, 0, 0, 2, TOKEN), Branch(2, 1, 6, 2, TOKEN, made=made), Branch(3, 2, 9, 2, TOKEN)
    shards = [*captured(1, 2, 4, 6), *captured(2, 2, 6, 9), *captured(3, 2, 9, 12)]
    inventory = listing(shards, first, second, third)
    assert inventory.made_before(1) == ()
    told = tuple(f"generation 2: {each}" for each in made)
    assert inventory.made_before(2) == inventory.made_before(3) == told
    (before, own, after) = listing_object(inventory)["generations"]
    assert [each["made_anew"] for each in (before, own, after)] == [[], list(made), []]
    assert "approximate: stage 1 is the average of 0 and 2; approximate: the" in generation_text(
        inventory.generations[1]
    )
