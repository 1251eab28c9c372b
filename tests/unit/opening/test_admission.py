"""Admission: what it asks for is what a job comes to hold, however far the durable tier lags behind."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tests.failing import Failing
from tests.training import Training
from tiercheck.config import CheckpointConfig
from tiercheck.errors import CapacityExceeded, SaveError, Transient
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.keys import CommitKey, Key, ShardKey, Stream, parse
from tiercheck.opening.admission import Demand
from tiercheck.opening.policies import settle_policies
from tiercheck.policy.first_tier import BASES_MAX, Sizes, holding
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.placement import Placement
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.policy.watermark import BASES_IN_VOLATILE_TIERS, Retention
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.wrappers.base import Call, Operation, WrappingDriver
from tiercheck.types import Survives

T = TypeVar("T")

ROLES = (Role(0, "shm", Survives.PROCESS), Role(1, "nvme", Survives.RACK))
SIZES = Sizes(base_nbytes=100, record_nbytes=10, record_nbytes_max=10)
LINEAGE = Lineage.of([Branch(1, 0, 0, 1, "0" * 16)])


@pytest.mark.parametrize("base_every", [1, 2, 7, 50])
@pytest.mark.parametrize("batch", [1, 5])
def test_a_durable_tier_that_lags_as_far_as_it_may(base_every: int, batch: int) -> None:
    """Each base drains only when training waits for it: then memory holds the most."""
    held: set[Key] = {ShardKey.base(1, 0, 0)}
    durable: set[Key] = set()
    bases = differentials = 0

    def reclaim() -> None:
        contents = tuple(Contents.of((key, 1) for key in keys) for keys in (held, durable))
        seen = Observation(ROLES, contents, 0, 1, 1, LINEAGE)
        held.difference_update(Retention(placement=Placement(batch)).reclaimable(seen)[0])

    for version in range(1, 6 * base_every + 1):
        held.add(ShardKey.differential(1, version, version, 0))
        if version % base_every == 0:
            while len(undrained := sorted(key for key in held - durable if is_base(key))) >= BASES_IN_VOLATILE_TIERS:
                durable |= {undrained[0], CommitKey(1, undrained[0].first)}
                differentials = max(differentials, sum(not is_base(key) for key in held))
                reclaim()
            held.add(ShardKey.base(1, version, 0))
            bases = max(bases, sum(map(is_base, held)))
    assert differentials == 3 * base_every
    held = holding(SIZES, interval=base_every, batch=batch, fold_every=0, each_commits=True)
    assert differentials < held.records_lagging
    assert bases == BASES_MAX


def is_base(key: Key) -> bool:
    return isinstance(key, ShardKey) and key.stream is Stream.BASE


class Lagging(WrappingDriver):
    """Takes a base only when training is so many versions further."""

    def __init__(self, inner: TierDriver, training: Training, behind: int) -> None:
        super().__init__(inner)
        self.training = training
        self.behind = behind

    async def around(self, call: Call, work: Callable[[], Awaitable[T]]) -> T:
        key = parse(call.key or "")
        if call.operation is Operation.PUT and key is not None and is_base(key):
            assert isinstance(key, ShardKey)
            # The training's thread counts versions, and signals nothing.
            while self.training.checkpointer.version < key.first + self.behind:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return await work()


@pytest.mark.parametrize(("lags", "behind"), [(False, 2), (True, 16)], ids=["keeping up", "lagging as far as it may"])
def test_a_tier_as_large_as_admission_asks_for_is_large_enough(tmp_path: Path, lags: bool, behind: int) -> None:
    base_every = 8
    training = Training()

    def hierarchy(size: int, name: str) -> Hierarchy:
        durable = Tier(f"nvme://{tmp_path}/{name}?survives=rack", wrap=lambda driver: Lagging(driver, training, behind))
        return Hierarchy.of(f"memory://{name}-{tmp_path.name}?size={size}", durable)

    wanted = r"the first tier must hold 3 bases of .* and 15 differentials of .* bytes a trained parameter"
    with pytest.raises(CapacityExceeded, match=wanted) as small:
        training.attach(hierarchy(1000, "small"), base_every=base_every)
    assert "give it more (size=), or lower base_every (now 8)" in str(small.value)
    roomy = training.attach(hierarchy(1 << 30, "roomy"), base_every=base_every)
    stream = roomy._job.recorder._stream
    sizes = Sizes(stream.base_nbytes, stream.nbytes_expected, stream.nbytes_max)
    held = holding(sizes, interval=base_every, batch=5, fold_every=0, each_commits=True)
    roomy.abort()
    size = held.nbytes_max if lags else held.nbytes_least
    checkpointer = training.attach(hierarchy(size, "enough"), base_every=base_every)
    for version in range(1, 5 * base_every):
        training.step(version)
    assert checkpointer.stats.drain_stall_s > 0 or not lags
    checkpointer.abort()


def refusal(
    *,
    ranks: int = 1,
    sizes: Sizes = SIZES,
    fold_every: int = 0,
    each_commits: bool = True,
    foldable: bool = False,
    **options: object,
) -> str:
    """What is said of a first tier that has room for three bases and ten differentials of each rank."""
    config, policies = settle_policies(CheckpointConfig.from_mapping(options), None)
    held = holding(
        sizes, interval=config.base_every, batch=policies.batch, fold_every=fold_every, each_commits=each_commits
    )
    with pytest.raises(CapacityExceeded) as refused:
        Demand(held, ranks).check(
            400 * ranks, config, policies.cadence, tier="memory://first", foldable=lambda: foldable
        )
    return refused.value.message.partition(" B: ")[2]


def test_a_refusal_names_only_what_lets_the_job_fit() -> None:
    fold = 'have bases folded (bases="fold")'
    more, fewer = "give it more (size=)", "have fewer ranks on a node"
    assert refusal(foldable=True) == f"{more}, or lower base_every (now 50; 7 would fit), or {fold}"
    assert refusal(ranks=2, foldable=True).startswith(f"{more}, or {fewer}, or lower base_every")


def test_fewer_differentials_fit_if_no_base_is_committed() -> None:
    """Then they stay for as long as there are three bases."""
    said = refusal(each_commits=False, batch=1, base_every=9)
    assert said.startswith("give it more (size=), or lower base_every (now 9; 2 would fit)")


def test_ranks_that_agree_on_a_mark_may_hold_one_base_more() -> None:
    told = {"interval": 9, "batch": 1, "fold_every": 0, "each_commits": False}
    alone, agreeing = (holding(SIZES, agrees=agrees, **told) for agrees in (False, True))
    assert (alone.bases_max, agreeing.bases_max) == (BASES_MAX, BASES_MAX + 1)
    assert agreeing.nbytes_least - alone.nbytes_least == SIZES.base_nbytes


def test_snapshots_need_as_much_room_at_any_interval_and_are_not_folded() -> None:
    snapshots = replace(SIZES, record_nbytes=60, record_nbytes_max=60, supersedes=True)
    assert refusal(sizes=snapshots, foldable=True) == "give it more (size=)"
    assert refusal(sizes=snapshots, ranks=2) == "give it more (size=), or have fewer ranks on a node"


@pytest.mark.parametrize("bases", ["fold", "auto"])
def test_folding_is_not_advised_to_a_job_that_has_it(bases: str) -> None:
    assert refusal(bases=bases) == "give it more (size=), or lower base_every (now 50; 7 would fit)"


@pytest.mark.parametrize(
    ("options", "advised"),
    [
        ({"bases": "capture"}, True),
        ({"bases": "auto"}, True),  # captures: no other process opens the first tier
        ({"bases": "fold"}, False),
        ({"bases": "capture", "codec": "nf4"}, False),
        ({"bases": "auto", "codec": "nf4"}, False),
    ],
)
def test_folding_is_advised_to_a_job_that_captures_what_could_be_folded(
    tmp_path: Path, options: dict[str, str], advised: bool
) -> None:
    tiers = Hierarchy.of(f"memory://advised-{uuid.uuid4().hex}?size=1000", f"nvme://{tmp_path}/run?survives=rack")
    with pytest.raises(CapacityExceeded) as refused:
        Training().attach(tiers, **options)
    assert ('have bases folded (bases="fold")' in refused.value.message) is advised


def test_a_job_with_a_cadence_is_told_to_change_that() -> None:
    cadence = "the interval of cadence (now 50; 7 would fit)"
    seconds = refusal(cadence="every_seconds?seconds=600&versions_max=50", foldable=True)
    assert seconds.endswith(f"or lower {cadence}")
    assert f"or lower {cadence}, or have bases folded" in refusal(cadence="every_versions?n=50", foldable=True)


def test_a_batch_is_to_be_lowered_only_if_that_helps() -> None:
    assert refusal(sizes=Sizes(100, 10, 10), fold_every=5, batch=4) == "give it more (size=), or lower batch (now 4)"
    large = Sizes(100, 90, 90)
    assert [refusal(sizes=large, fold_every=5, batch=each) for each in (4, 1)] == ["give it more (size=)"] * 2


@pytest.mark.parametrize("size", ["1MiB", "50KiB", "3MiB"])
def test_the_room_that_a_refusal_names_is_enough(size: str) -> None:
    large = Training()
    large.model = torch.nn.Sequential(torch.nn.Linear(300, 301), torch.nn.Linear(301, 77))
    large.optimizer = torch.optim.AdamW(large.model.parameters())
    place = f"memory://named-{uuid.uuid4().hex}"
    with pytest.raises(CapacityExceeded) as refused:
        large.attach(Hierarchy.of(f"{place}?size={size}"), batch=5)
    named = refused.value.message.partition(" in all")[0].rpartition(", ")[2].replace(" ", "")
    large.attach(Hierarchy.of(f"{place}?size={named}"), batch=5).abort()


class NeverReady(WrappingDriver):
    """Makes memory ready for ever."""

    def __init__(self, inner: TierDriver) -> None:
        super().__init__(inner)
        self.asked: list[tuple[int, int]] = []
        self.ended = False

    async def prepare_reservations(self, sizes: Sequence[tuple[int, int]]) -> None:
        self.asked = list(sizes)
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


def test_nobody_waits_for_memory_that_is_made_ready(tmp_path: Path) -> None:
    training, drivers = Training(), list[NeverReady]()

    def wrap(driver: TierDriver) -> TierDriver:
        drivers.append(NeverReady(driver))
        return drivers[-1]

    first = Tier(f"memory://ready-{tmp_path.name}?size={1 << 30}", wrap=wrap)
    checkpointer = training.attach(Hierarchy.of(first, f"nvme://{tmp_path}/durable?survives=rack"), base_every=4)
    for version in range(1, 10):
        training.step(version)
    checkpointer.close()
    (driver,) = drivers
    assert driver.ended
    assert [count for _, count in driver.asked] == [4, 1, 3], "of records an interval, then those that come beside"


def test_bases_are_made_ready_before_anything_else_if_room_is_short() -> None:
    demand = Demand(holding(SIZES, interval=17, batch=5, fold_every=0, each_commits=True))
    assert demand.reservations(1000, 5, 95) == [(10, 5), (100, 1), (10, 19)]
    assert demand.reservations(130, 5, 95) == [(10, 3), (100, 1), (10, 0)]
    assert demand.reservations(50, 5, 95) == [(10, 5), (100, 0), (10, 0)]
    assert demand.reservations(0, 5, 95) == [(10, 0), (100, 0), (10, 0)]


def test_the_pages_are_told_of_if_much_memory_is_to_be_made(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    demand = Demand(
        holding(replace(SIZES, base_nbytes=100 << 20), interval=5, batch=5, fold_every=0, each_commits=True)
    )
    demand.tell("shm://run", "4 KiB")
    assert "pages" not in caplog.text
    replace(demand, ranks=8).tell("shm://run", "4 KiB")
    assert "the pages of shm://run are 4 KiB" in caplog.text
    caplog.clear()
    replace(demand, ranks=8).tell("memory://run")
    assert "pages" not in caplog.text


def test_as_many_bases_are_made_ready_as_will_be_there_at_a_time() -> None:
    def ready(opening_nbytes: int, **options: Any) -> int:
        demand = Demand(holding(SIZES, interval=17, batch=5, **options))
        (_, (nbytes, count), _) = demand.reservations(10_000, 5, opening_nbytes)
        assert nbytes == SIZES.base_nbytes
        return count

    kept = {"fold_every": 0, "each_commits": False}
    committed = {"fold_every": 0, "each_commits": True}
    assert (ready(95, **committed), ready(95, **kept)) == (1, 2), "beside the opening base, whose memory is used again"
    assert (ready(33, **committed), ready(33, **kept)) == (2, 3), "that of one without the optimizer's state is not"
    assert ready(33, fold_every=5, each_commits=True) == 1, "others make those that are folded"


def test_training_waits_by_name_before_memory_grows(tmp_path: Path) -> None:
    """Of the least room, and a durable tier that takes nothing after its first base; and goes on when it does."""
    refused: list[str] = []

    def away(call: Call) -> Exception | None:
        late = refused and call.operation is Operation.PUT
        return Transient(refused[0]) if late else None

    training = Training()
    durable = Tier(f"nvme://{tmp_path}/run?survives=rack", wrap=lambda driver: Failing(driver, away))
    sizes: list[int] = []
    for size in (1 << 30, 0):
        first = f"memory://waits-{tmp_path.name}-{size}?size={size or sizes[0]}"
        checkpointer = training.attach(Hierarchy.of(first, durable), base_every=6, batch=2, deadline_s=3.0)
        if size:
            stream = checkpointer._job.recorder._stream
            held = Sizes(stream.base_nbytes, stream.nbytes_expected, stream.nbytes_max)
            sizes.append(holding(held, interval=6, batch=2, fold_every=0, each_commits=True).nbytes_least)
            checkpointer.abort()
    training.step(1)
    checkpointer.flush()
    refused.append("the store is away")
    for version in range(2, 10):
        training.step(version)
    with pytest.raises(SaveError, match=r"holds 9 differentials and has room for 9.*the store is away"):
        training.step(10)
    checkpointer.abort()


def test_folding_adapts_to_the_room() -> None:
    sizes = Sizes(base_nbytes=12, record_nbytes=4, record_nbytes_max=4)
    told = {"interval": 50, "fold_every": 5, "each_commits": True}
    wide = holding(sizes, batch=5, **told)
    assert (wide.nbytes_usual, wide.nbytes_least) == (56, 68)
    halves = holding(Sizes(12, 2, 2), batch=5, **told)
    assert (halves.nbytes_usual, halves.nbytes_least) == (40, 52)
    narrow = holding(sizes, batch=2, room_nbytes=60, **told)
    assert (narrow.fold_every, narrow.records_usual, narrow.records_max) == (2, 5, 6)
    assert holding(sizes, batch=2, room_nbytes=100, **told).records_max == 8 + 8, "more may wait for a tier that lags"
    assert holding(sizes, batch=5, room_nbytes=60, **told).nbytes_least == 68, "a batch is as long: that is refused"
    captured = holding(sizes, interval=50, batch=5, fold_every=0, each_commits=True)
    assert (captured.records_usual, captured.records_lagging, captured.records_max) == (53, 155, None)
