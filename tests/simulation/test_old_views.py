"""The same schedules, with movers that act on old views of the tiers outside of their node.

A view is what a listing showed while others went on: of the keys before some point what was there when it began, of
those behind it what was there when it ended. What a mover does itself is in its view at once, and its node's memory is
looked at each time. See ``docs/adr/0018-a-decision-is-fenced-not-its-view.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.cluster import Cluster
from tests.simulation.seeds import play_each
from tests.simulation.surveys import Found
from tests.simulation.test_policies_under_failures import MODES, SEEDS, cluster_of, run
from tests.simulation.tiers import Tier, under
from tiercheck.keys import CommitKey, Key, MarkerKey, ShardKey, Stream
from tiercheck.policy.commit import COORDINATOR
from tiercheck.policy.observation import Contents, Observation

RENEWED = 0.2
"""The chance that a view is renewed before a mover decides."""


class View:
    """What one rank knows of one tier; a listing of it is always under way."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.known, self.begun = set(tier), set(tier)
        self.unsure = False
        self._listed: dict[tuple[str, ...] | None, Contents] = {}

    def listed(self, prefixes: tuple[str, ...] | None) -> Contents:
        """What is known under these prefixes; ``None``: of all of it."""
        if prefixes not in self._listed:
            known = Contents.of((key, 1) for key in self.known)
            self._listed[prefixes] = known if prefixes is None else under(known, prefixes)
        return self._listed[prefixes]

    def renew(self, cut: str, rank: int) -> None:
        """The listing ends, and another begins. It was at ``cut`` when everything in between happened."""
        listed = {key for key in self.begun if str(key) < cut} | {key for key in self.tier if str(key) >= cut}
        self.unsure = rank != COORDINATOR and any(isinstance(key, CommitKey) for key in listed - self.known)
        if listed != self.known:
            self._listed = {}
        self.known, self.begun = listed, set(self.tier)

    def note(self, before: set[Key], after: set[Key]) -> None:
        """The mover itself has done that."""
        if before == after:
            return
        self._listed = {}
        for each in (self.known, self.begun):
            each -= before - after
            each |= after - before


class OldViews(Cluster):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.views: dict[tuple[int, int], View] = {}
        super().__init__(*arguments, **options)

    def open_generation(self, found: Found) -> bool:
        self.views = {}  # its processes have seen nothing yet
        return super().open_generation(found)

    def act(self, *, closing: bool = False) -> bool:
        for index in self.random.sample(range(self.world), self.world):
            seen, views = self.known(index)
            actions = [each for each in self.actions(index, seen, closing) if self.is_sure(each, views)]
            if actions:
                before = [set(view.tier) for view in views]
                self.random.choice(actions)()
                for view, keys in zip(views, before, strict=True):
                    view.note(keys, set(view.tier))
                return True
        self.views = {}
        return super().act(closing=closing)

    def known(self, index: int) -> tuple[Observation, list[View]]:
        """What the rank decides on."""
        seen = self.observe(index)
        views = [self.view(index, role.index) for role in self.roles[1:]]
        listed = (view.listed(self.prefixes(index) if view.tier is self.durable else None) for view in views)
        return replace(seen, contents=(seen.contents[0], *listed)), views

    def view(self, index: int, tier: int) -> View:
        held = self.tiers_of(index)[tier]
        view = self.views.setdefault((index, tier), View(held))
        assert view.tier is held
        if self.random.random() < RENEWED:
            view.renew(self.random.choice(sorted(map(str, held)) or [""]), index)
        return view

    def is_sure(self, action: Callable[[], None], views: list[View]) -> bool:
        """A mover deletes nothing from a shared tier while the last listing may have missed a commit."""
        func, arguments = action.func, action.args  # type: ignore[attr-defined]
        return func != self.do_delete or not any(view.unsure and view.tier is arguments[0] for view in views)

    # An action finds what there is

    def do_mark(self, shard: ShardKey) -> None:
        if shard in self.durable:
            super().do_mark(shard)

    def do_commit(self, index: int, key: CommitKey) -> None:
        for rank in range(self.world):
            shard = self.durable.contents.shard(key, rank)
            if shard is None or MarkerKey(key, rank, refers_to=shard.refers_to) not in self.durable:
                return
        super().do_commit(index, key)

    def do_delete(self, tier: Tier, index: int, key: Key) -> None:
        if key in tier:
            assert not self.is_kept(tier, key), "a committed base that the user keeps was deleted"
            super().do_delete(tier, index, key)

    def is_kept(self, tier: Tier, key: Key) -> bool:
        """Whether the user's ``keep_every`` holds this committed base."""
        if tier is not self.durable or not isinstance(key, ShardKey) or key.stream is not Stream.BASE:
            return False
        # A restart commits the version that it resumed from once more: the newest of these bases is kept.
        commits = (each for each in self.durable.contents.commits if each.version == key.first)
        own = [each.generation for each in commits if self.lineage.admits(each.generation, each.version)]
        return bool(self.keep_every) and key.first % self.keep_every == 0 and own[-1:] == [key.generation]


@pytest.mark.parametrize("mode", ["a shared tier", "a shared tier, snapshots", "no shared tier"])
def test_invariants_hold_however_old_a_view_is(mode: str) -> None:
    play_each(lambda seed: run(cluster_of(seed, OldViews, **MODES[mode])), SEEDS)
