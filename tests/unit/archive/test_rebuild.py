"""A rank's state at any version, by what the tiers hold alone."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch

import tiercheck
from tests.archived import LAST, WORLD, Left, bits
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError, RecoveryError
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.streams.tensors.provider import Identity
from tiercheck.tiers.memory import MemoryDriver
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


def test_an_older_base_leads_to_a_version_whose_own_is_damaged(left: Left, finished: Left) -> None:
    """As a recovery finds it."""
    newest = left.files("r00000/g000002/base/*")[-1]
    left.flip(str(newest.relative_to(left.root)))
    with tiercheck.open(left.url) as archive:
        assert archive.verify().lost == ()
        for rank in range(WORLD):
            found = archive.rebuild(rank, LAST)
            assert (found.version, found.fidelity) == (LAST, Fidelity.EXACT)
            assert bits({**found.state.masters(), **found.state.buffers()}) == finished.weights[rank, LAST]


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


class Sharded(ModuleProvider):
    """As a rank of FSDP2 has it: its part of the one weight."""

    def identity(self) -> Identity:
        return Identity.of("fsdp-2", self, self._optimizer_identity())


@pytest.mark.parametrize(
    ("kind", "said"), [(torch.optim.AdamW, None), (torch.optim.Adafactor, "Adafactor on tensors that lie on several")]
)
def test_a_step_on_whole_tensors_is_not_replayed_on_a_ranks_part(
    tmp_path: Path, kind: type[torch.optim.Optimizer], said: str | None
) -> None:
    """Under FSDP2 Adafactor takes means over rows that lie on several ranks."""
    model = torch.nn.Linear(3, 2)
    provider = Sharded(model, kind(model.parameters()))
    memory, url = f"sharded-{uuid.uuid4().hex}", f"nvme://{tmp_path}/run?survives=rack"
    config = CheckpointConfig(base_every=2, batch=1)
    with Checkpointer(provider, Hierarchy.of(f"memory://{memory}", url), config=config) as checkpointer:
        for version in range(1, 4):
            gradients = {name: torch.full_like(each, version) for name, each in provider.masters().items()}
            checkpointer.capture(version, gradients)
            provider.apply(gradients, provider.hyperparameters())
            checkpointer.stepped(version)
            checkpointer.complete(version)
    MemoryDriver.forget(memory)
    with tiercheck.open(url) as archive:
        assert archive.rebuild(0, 2).fidelity is Fidelity.EXACT
        if said is None:
            assert bits(dict(archive.rebuild(0, 3).state.masters())) == bits(dict(model.state_dict()))
            return
        for read in (lambda: archive.rebuild(0, 3), lambda: archive.export(tmp_path / "model", version=3)):
            with pytest.raises(ConfigurationError) as error:
                read()
            assert said in str(error.value)
            assert "only bases can be read: choose version 2, which is one" in str(error.value)
