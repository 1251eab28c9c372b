"""Whatever framework trains, and however its ranks fail, life after life: every loss of every rank has the bits of a
run that did not fail. No version is lost that all ranks had ended, unless memory is."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.torch.stories import LAST, Story
from tests.forks import Forks, tail
from tests.simulation.seeds import play_each
from tiercheck.tiers.shm.namespaces import namespaces, remove_namespace

pytestmark = pytest.mark.cluster

SEEDS = (21, 13, 29)
"""DDP, FSDP2 and HSDP."""


class Lives:
    """Of the job of one story."""

    def __init__(self, forks: Forks, directory: Path, seed: int) -> None:
        self.forks, self.directory, self.seed = forks, directory, seed
        self.story = Story.of(seed)
        self.name = f"test-story-{secrets.token_hex(6)}"

    def __call__(self, life: object) -> list[list[dict[str, Any]]]:
        """What each rank says in the life of this number; ``whole``: of a run that does not fail."""
        log = self.directory / f"{life}.log"
        arguments = str(self.seed), str(life), self.directory, self.name
        codes = self.forks.run("tests.cluster.torch.story_worker", *arguments, ranks=self.story.ranks, log=log)
        if life == "whole" or life == len(self.story.failures) or self.story.failures[int(str(life))].killed is None:
            assert codes == [0] * self.story.ranks, tail(log)
        said = [self.directory / f"{life}-{rank}.jsonl" for rank in range(self.story.ranks)]
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in said]

    def lose(self, rank: int) -> None:
        remove_namespace(f"{self.name}-{rank}")

    def end(self) -> None:
        for namespace in namespaces():
            if namespace.name.startswith(self.name):
                remove_namespace(namespace.name)


def losses(said: list[dict[str, Any]]) -> dict[int, str]:
    return {each["version"]: each["loss"] for each in said if "loss" in each}


def play(lives: Lives) -> None:
    story = lives.story
    whole = [losses(said) for said in lives("whole")]
    kept, trained = 0, [dict[int, str]() for _ in range(story.ranks)]
    for life in range(len(story.failures) + 1):
        said = lives(life)
        recovered = {(each[0]["recovered"], each[0]["fidelity"]) for each in said}
        assert len(recovered) == 1, f"life {life}: ranks began with {recovered}"
        ((began_at, fidelity),) = recovered
        assert fidelity == "exact", f"life {life}"
        assert began_at >= kept, f"life {life}"
        for rank, each in enumerate(said):
            trained[rank] |= losses(each)
            differing = [version for version, loss in losses(each).items() if loss != whole[rank][version]]
            assert not differing, f"life {life}, began with {began_at}: rank {rank} differs in {differing}"
        ended = min(max((each["ended"] for each in one if "ended" in each), default=began_at) for one in said)
        kept = max(began_at, ended if story.says_end else ended - 1)
        if life < len(story.failures) and (lost := story.failures[life].lost):
            for rank in lost:
                lives.lose(rank)
            kept = 0
    assert all(sorted(each) == list(range(1, LAST + 1)) for each in trained)


def test_every_loss_has_the_bits_of_a_run_that_did_not_fail(forks: Forks, tmp_path: Path) -> None:
    def play_one(seed: int) -> None:
        directory = tmp_path / str(seed)
        directory.mkdir()
        lives = Lives(forks, directory, seed)
        try:
            play(lives)
        finally:
            lives.end()

    play_each(play_one, SEEDS)
