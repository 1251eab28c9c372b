"""What a recovery says of itself: the worst of all that took part, and why. Nothing approximate is called exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.recorded import Trainer, fresh
from tiercheck.errors import Corruption
from tiercheck.streams.codecs import codec, codec_names
from tiercheck.streams.replay.fidelity import Tally, Way, reached
from tiercheck.streams.replay.replay import replay
from tiercheck.types import Fidelity


def described(codec: str, *, trained_on: bool = False, **scalars: int) -> dict[str, Any]:
    told = {"trained_on": True} if trained_on else {}
    return {"codec": codec, "dtype": "F32", "shape": [4], "parts": [""], "scalars": scalars, **told}


def told(*tallies: Tally, **here: Any) -> tuple[Fidelity, tuple[str, ...]]:
    identity = fresh().identity()
    now = replace(identity, optimizer=replace(identity.optimizer, **here))
    return reached(identity, now, sum(tallies, Tally()))


def test_every_codec_is_called_what_it_declares() -> None:
    for name in codec_names():
        fidelity, notes = told(Tally.of([described(name)]))
        assert fidelity is codec(name).fidelity, name
        assert bool(notes) == (fidelity is not Fidelity.EXACT), name


@pytest.mark.parametrize(
    ("before", "here", "said"),
    [
        ({"threads": 1}, {"threads": 2}, "threads 1 -> 2"),
        ({"threads": 1}, {"threads": 0}, "threads 1 -> 0"),
        ({}, {"memory_order": True}, "memory_order False -> True"),
    ],
)
def test_steps_that_this_process_would_take_with_other_bits_are_approximate(
    before: dict[str, Any], here: dict[str, Any], said: str
) -> None:
    identity = fresh().identity()
    saved, now = (replace(identity, optimizer=replace(identity.optimizer, **each)) for each in (before, here))
    fidelity, (note,) = reached(saved, now, Tally.of([described("exact")]))
    assert (fidelity, note.endswith(said)) == (Fidelity.APPROXIMATE, True)
    of_an_older_release = told(Tally.of([described("exact")]), threads=2)
    assert of_an_older_release == (Fidelity.EXACT, ()), "it does not say how many there were"


def test_the_worst_counts_and_each_is_told() -> None:
    exact = Tally.of([described("exact")])
    mixed = Tally.of([described("int8"), described("sparse"), described("exact")])
    fidelity, notes = told(exact, exact, mixed)
    assert fidelity is Fidelity.APPROXIMATE
    assert notes == (
        "1 of the 3 versions replayed were encoded by int8: approximate",
        "1 of the 3 versions replayed were encoded by sparse: approximate",
    )


def test_what_was_trained_on_is_exact_and_told() -> None:
    fidelity, notes = told(Tally.of([described("sparse", trained_on=True)]))
    assert fidelity is Fidelity.EXACT
    (note,) = notes
    assert note == (
        "1 of the 1 versions replayed were encoded by sparse: exact, since the optimizer stepped with the very "
        "gradients it decodes to"
    )
    both = told(Tally.of([described("sparse", trained_on=True), described("sparse")]))
    assert both[0] is Fidelity.APPROXIMATE
    assert len(both[1]) == 2


def test_a_codec_that_nobody_knows_is_not_exact() -> None:
    assert told(Tally.of([described("tomorrow")]))[0] is Fidelity.APPROXIMATE
    assert told(Tally.of([described("tomorrow", trained_on=True)]))[0] is Fidelity.APPROXIMATE


def test_another_optimizer_than_the_one_that_stepped() -> None:
    for name in ("implementation", "torch_version", "instruction_set", "device", "library"):
        fidelity, notes = told(Tally.of([described("exact")]), **{name: "another"})
        assert fidelity is Fidelity.APPROXIMATE, name
        assert f"{name} " in notes[0]
        assert "-> another" in notes[0]


def test_where_nothing_was_replayed_it_does_not_matter_who_would() -> None:
    assert told(Tally(), torch_version="another") == (Fidelity.EXACT, ())


def test_nonfinite_values_are_counted() -> None:
    strange = Tally.of([described("exact"), described("sparse", nonfinite=3), described("sparse", nonfinite=2)])
    _, notes = told(strange, Tally.of([described("exact")]))
    assert notes[-1] == "the gradients of 1 of the 2 versions replayed held 5 values that are not finite"


def test_a_description_of_nothing() -> None:
    with pytest.raises(Corruption):
        Tally.of([{"codec": "exact"}])


ways = st.builds(Way, st.sampled_from(["exact", "int8"]), st.sampled_from(list(Fidelity)), st.booleans())
tallies = st.builds(
    Tally,
    versions=st.integers(0, 9),
    ways=st.dictionaries(ways, st.integers(1, 9), max_size=3),
    nonfinite_values=st.integers(0, 9),
    nonfinite_versions=st.integers(0, 9),
    approximated=st.integers(0, 2),
)


@given(tallies, tallies, tallies)
def test_tallies_add_up_in_any_order(a: Tally, b: Tally, c: Tally) -> None:
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + Tally() == a
    assert (a + b).fidelity is Fidelity.worst(a.fidelity, b.fidelity)


class TestTheClosedForm:
    """Faster, and close; but only where it was asked for, and never called exact."""

    def test_it_is_told(self) -> None:
        trainer = Trainer(codec="sparse")
        differentials = [trainer.step() for _ in range(11)]
        exactly = replay(fresh(), differentials)
        assert exactly.tally.approximated == 0
        closely = replay(fresh(), differentials, exact=False)
        assert closely.tally.approximated == 10, "all but the first, for which the optimizer is called"
        fidelity, notes = told(Tally(approximated=10))
        assert fidelity is Fidelity.APPROXIMATE
        assert notes == ("10 steps were replayed by a closed form, as asked for: approximate",)

    def test_dense_steps_are_exact_all_the_same(self) -> None:
        trainer = Trainer()
        differentials = [trainer.step() for _ in range(6)]
        assert replay(fresh(), differentials, exact=False).tally == replay(fresh(), differentials).tally

    def test_it_is_close(self) -> None:
        trainer = Trainer(codec="sparse")
        start = {name: master.clone() for name, master in trainer.provider.masters().items()}
        differentials = [trainer.step() for _ in range(30)]
        exactly, closely = fresh(), fresh()
        replay(exactly, differentials)
        replay(closely, differentials, exact=False)
        for name, master in closely.masters().items():
            true = exactly.masters()[name]
            assert torch.dist(true, start[name]) > 0
            assert torch.dist(master, true) <= 2e-5 * torch.dist(true, start[name]), name
