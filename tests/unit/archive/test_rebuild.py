"""A rank's state at any version, by what the tiers hold alone."""

from __future__ import annotations

import pytest

import tiercheck
from tests.archived import LAST, WORLD, Left, bits
from tiercheck.errors import RecoveryError
from tiercheck.types import Fidelity


def test_every_version_of_every_rank_has_the_bits_of_the_job(finished: Left) -> None:
    with tiercheck.open(finished.url) as archive:
        versions = [version for first, last in archive.versions for version in range(first, last + 1)]
        assert len(versions) > 4
        for version in versions:
            for rank in range(WORLD):
                found = archive.rebuild(rank, version)
                assert (found.version, found.fidelity, found.notes) == (version, Fidelity.EXACT, ())
                tensors = {**found.state.masters(), **found.state.buffers()}
                assert bits(dict(tensors)) == finished.weights[rank, version], (version, rank)
        assert found.identity.optimizer.kind == "torch.optim.adamw.AdamW"
        assert set(found.state.group_of().values()) == {0, 1}
        rates = [group["lr"] for group in found.hyperparameters]
        assert rates == [group["lr"] for group in found.host_state["options"]]


def test_a_version_whose_copy_is_damaged_is_refused_and_an_older_one_is_not(left: Left) -> None:
    left.flip("r00000/g000002/differential/000000000013-*")
    with tiercheck.open(left.url) as archive:
        with pytest.raises(RecoveryError, match=rf"version {LAST} cannot be rebuilt: rank 0 .*differential/0"):
            archive.rebuild(0)
        assert archive.rebuild(0, 12).version == 12


def test_another_copy_is_taken_of_what_is_damaged(left: Left, finished: Left) -> None:
    left.flip("r00000/g000002/*/*")
    with tiercheck.open(left.url, f"nvme://{finished.root}") as archive:
        found = archive.rebuild(0)
        assert bits({**found.state.masters(), **found.state.buffers()}) == finished.weights[0, LAST]


def test_another_release_of_torch_is_told_of(finished: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "0.0")
    with tiercheck.open(finished.url) as archive:
        found = archive.rebuild(0)
        assert found.fidelity is Fidelity.APPROXIMATE
        assert any("torch_version" in note and "-> 0.0" in note for note in found.notes)
        assert archive.rebuild(0, 12).fidelity is Fidelity.EXACT  # a base: nothing is replayed
