"""A client that reads nothing leaves room for others, and what is sent counts no longer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercheck.tiers.peer.server.copies import CopyBudget


def take_all(budget: CopyBudget, client: bytes) -> int:
    count = 0
    while budget.take(client, 1):
        count += 1
    return count


def test_clients_that_stop_leave_room_for_the_next() -> None:
    budget = CopyBudget(24)
    assert take_all(budget, b"a") == 12
    assert take_all(budget, b"b") == 6
    assert take_all(budget, b"c") == 3
    assert take_all(budget, b"a") == 0
    assert budget.held_bytes == 21


def test_what_is_sent_is_free_again() -> None:
    budget = CopyBudget(24)
    take_all(budget, b"a")
    for _ in range(12):
        budget.give_back(b"a", 1)
    assert budget.held_bytes == 0
    assert take_all(budget, b"b") == 12


def test_an_object_larger_than_the_budget_goes_alone() -> None:
    budget = CopyBudget(24)
    assert budget.take(b"a", 100)
    assert not budget.take(b"b", 1)
    budget.give_back(b"a", 100)
    assert budget.take(b"b", 1)


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(1, 8)), max_size=50))
def test_a_budget_is_kept(asked: list[tuple[bytes, int]]) -> None:
    budget = CopyBudget(24)
    held = [item for item in asked if budget.take(*item)]
    assert budget.held_bytes == sum(nbytes for _, nbytes in held) <= 24
    for client, nbytes in held:
        budget.give_back(client, nbytes)
    assert budget.held_bytes == 0
    assert budget.take(b"a", 24)
