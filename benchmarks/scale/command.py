"""``python -m benchmarks scale``: what each step costs one rank, in a job of so many.

The real mover, survey and merge run for one rank, over a memory tier and a store that all ranks share. What other ranks
have brought is made up, as their movers would have brought it. Nothing here is a time of a store: a request counts as
one round trip, and requests that are under way together count as one *in turn*.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from benchmarks.report import progress
from benchmarks.scale.agent import agent_cost
from benchmarks.scale.relayout import Start
from benchmarks.scale.store import SharedStore, run
from tiercheck import schema
from tiercheck.format import container
from tiercheck.format.container import ShardMetadata, TensorEntry
from tiercheck.hierarchy import Hierarchy, OpenHierarchy, Tier
from tiercheck.keys import MARKERS, LineageKey, MarkerKey, ShardKey
from tiercheck.policy.placement import Placement
from tiercheck.policy.recovery.lineage import Branch, Lineage, LineageRecord
from tiercheck.policy.watermark import Retention
from tiercheck.recovery.finding import refusals
from tiercheck.recovery.finding.past import Past
from tiercheck.recovery.finding.survey import Survey, survey
from tiercheck.recovery.finding.told import Told, packed_others
from tiercheck.replication.actions import CHECKS_IN_FLIGHT
from tiercheck.replication.mover import Mover
from tiercheck.replication.objects.generation import open_generation
from tiercheck.replication.objects.records import marker_record, seal
from tiercheck.types import ObjectInfo

__all__ = ["Cost", "add_command", "costs"]

WORLDS = (10, 1_000, 4_096, 100_000)
COMMIT_WORLD_MAX = 4_096
"""Shards of a larger job would have to be made first: its commit is counted from this one's."""
BASE_EVERY, BATCH = 200, 5
SETTLE = 1.75
"""Times as long as a measurement an agent rests before the first one: pauses between looks grow to 30 s."""
PAST = 20
"""Restarts before this one, of which the newest two have left something."""
TOKEN = "ab" * 8


@dataclass(frozen=True)
class Cost:
    """What a step costs one rank."""

    step: str
    world: int
    who: str
    requests: float
    in_turn: float
    sent_bytes: float
    received_bytes: float
    processor_s: float
    told_bytes: int = 0
    """What the rank sends to the others."""
    counted: bool = True
    """Else it follows from what was counted in a smaller job."""


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS), metavar="RANKS", help="sizes of jobs")
    parser.add_argument(
        "--agent", type=int, nargs="+", default=[], metavar="RANKS", help="instead: what an agent of so many costs"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement of an agent (20)")
    parser.set_defaults(run=show)


def show(arguments: argparse.Namespace) -> int:
    for ranks in arguments.agent:
        progress(f"an agent of {ranks} ranks")
        found = asyncio.run(agent_cost(ranks, arguments.seconds, SETTLE * arguments.seconds))
        if arguments.json:
            print(json.dumps(dataclasses.asdict(found)))
        else:
            busy = f"{found.version_a_second:.1%} at a version a second"
            print(f"{ranks} ranks: {found.idle:.1%} of a processor at rest, {busy}", flush=True)
    if arguments.agent:
        return 0
    if not arguments.json:
        print("| step | ranks | of | requests | in turn | sent | received | told | processor |")
        print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for world in arguments.worlds:
        for cost in costs(world):
            if arguments.json:
                print(json.dumps(dataclasses.asdict(cost)))
                continue
            about = "" if cost.counted else "about "
            print(
                f"| {cost.step} | {cost.world:,} | {cost.who} | {about}{cost.requests:,g} | {about}{cost.in_turn:,g} "
                f"| {bytes_text(cost.sent_bytes)} | {bytes_text(cost.received_bytes)} | {cost.told_bytes or ''} "
                f"| {1e3 * cost.processor_s:,.1f} ms |"
            )
    return 0


def bytes_text(nbytes: float) -> str:
    return f"{nbytes:,.0f} B" if nbytes < 10_000 else f"{nbytes / 1e3:,.0f} kB"


def costs(world: int) -> Iterator[Cost]:
    """Every step's, in a job of so many ranks."""
    for rank, who in ((world - 1, "a rank"), (0, "rank 0")):
        progress(f"{world} ranks: {who}")
        yield from run(_moving(world, rank, who))
    yield run(_commit(world))
    yield from run(_recovery(world))
    yield run(_start_on_others(world))


# What a rank's mover does


async def _moving(world: int, rank: int, who: str) -> list[Cost]:
    async with _job(world, rank) as (hierarchy, store):
        mover = _mover(hierarchy, world, rank)
        await _capture(hierarchy, world, ShardKey.base(1, 0, rank))
        await mover.cycle()
        meter = _Meter(store, world, who)
        found = [await meter.measure("a look", mover.cycle)]
        await _capture(hierarchy, world, *(ShardKey.differential(1, v, v, rank) for v in range(1, BATCH + 1)))
        found.append((await meter.measure("a version", mover.cycle)).less(found[0], BATCH))
        await _capture(hierarchy, world, ShardKey.base(1, BASE_EVERY, rank))
        found.append((await meter.measure("a base", mover.cycle)).less(found[0]))
        return [each.cost for each in found]


async def _commit(world: int) -> Cost:
    counted = min(world, COMMIT_WORLD_MAX)
    async with _job(counted, 0, commits=True) as (hierarchy, store):
        for rank in range(counted):
            key = ShardKey.base(1, 0, rank)
            content = b"".join(map(bytes, _shard(key, counted)))
            header = container.header_length(content)
            marker = MarkerKey.of(key, len(content), header, container.checksum_of(content[:header]), "")
            await store.lay(str(key), [content])
            await store.lay(str(marker), [marker_record(marker)])
        processor = time.process_time()
        await _mover(hierarchy, counted, 0).cycle()
        processor_s = time.process_time() - processor
        assert store.at_commit is not None
        ended, counts = store.at_commit
    cost = Cost(
        "a commit",
        counted,
        "rank 0",
        counts.requests + 1,  # and once more it asks which generations have opened
        ended - store.began + 1,
        counts.sent_bytes,
        counts.received_bytes,
        processor_s,
    )
    if counted == world:
        return cost
    more = world / counted
    return dataclasses.replace(
        cost,
        world=world,
        requests=cost.requests + 2 * (world - counted),
        in_turn=cost.in_turn + 2 * math.ceil((world - counted) / CHECKS_IN_FLIGHT),
        sent_bytes=cost.sent_bytes * more,
        received_bytes=cost.received_bytes * more,
        processor_s=cost.processor_s * more,
        counted=False,
    )


# What a start does


async def _recovery(world: int) -> list[Cost]:
    rank = world - 1
    async with _job(world, rank) as (hierarchy, store):
        past = [Branch(number, number - 1, 100 * number, world, TOKEN) for number in range(1, PAST + 1)]
        for branch in past[-3:]:
            key = LineageKey(branch.generation)
            content = seal(key, LineageRecord.of(branch, past[-2:]))
            await hierarchy.first.driver.put(str(key), [content])
            await store.lay(str(key), [content])
        bases = [ShardKey.base(PAST, version, rank) for version in (0, BASE_EVERY)]
        for shard in [*bases, *(ShardKey.differential(PAST, v, v, rank) for v in range(1, 2 * BASE_EVERY))]:
            await hierarchy.first.driver.put(str(shard), _shard(shard, world))
            await store.lay(str(shard), _shard(shard, world))
        meter = _Meter(store, world, "a rank")
        surveys: list[Survey] = []

        async def look() -> None:
            surveys.append(await survey(hierarchy.tiers, rank, retry_s=9, answer_s=9_999))

        looking = await meter.measure("a recovery: the survey", look)
        (found,) = surveys
        names = [tier.name for tier in hierarchy.tiers]
        told, others = schema.pack(Told.of(found, names, rank)), packed_others(found)
        looked = dataclasses.replace(looking.cost, told_bytes=len(told) + len(others))
        # Most of what ranks tell is the same; what they see of others is not.
        messages = [schema.pack([msgspec.Raw(told), other.to_bytes(8, "big") + others]) for other in range(world)]
        began = time.process_time()
        read = msgspec.msgpack.Decoder(tuple[msgspec.Raw, bytes]).decode
        answers = [(bytes(each), beside) for each, beside in map(read, messages)]
        different = {each: msgspec.msgpack.decode(each, type=Told) for each, _ in answers}
        all_told, all_others = [different[each] for each, _ in answers], [beside for _, beside in answers]
        merged = Past(all_told, all_others, found.lineages, hierarchy.roles, "here")
        refusals.check(merged)
        assert merged.version() == 2 * BASE_EVERY - 1
        merging = Cost("a recovery: where to meet", world, "a rank", 0, 0, 0, 0, time.process_time() - began)
        branch = Branch(PAST + 1, PAST, 2 * BASE_EVERY - 1, world, TOKEN)
        opening = await meter.measure(
            "an opening", lambda: open_generation(hierarchy, branch, past=merged.worth_telling(PAST))
        )
        return [looked, merging, opening.cost]


async def _start_on_others(world: int) -> Cost:
    async with _job(world, 0) as (hierarchy, store):
        start = Start(hierarchy, world)
        await start.lay(store)
        meter = _Meter(store, world, "a rank")
        found = (await meter.measure("a start on other ranks: whom to read", start.look)).cost
    group = start.group
    return dataclasses.replace(
        found,
        told_bytes=group.told_bytes,
        received_bytes=found.received_bytes + group.received_bytes,
        processor_s=found.processor_s - group.made_s,
    )


# One rank in its job


class _Meter:
    def __init__(self, store: SharedStore, world: int, who: str) -> None:
        self._store, self._world, self._who = store, world, who

    async def measure(self, step: str, work: Callable[[], Awaitable[object]]) -> _Measured:
        loop = asyncio.get_running_loop()
        before, began, processor = self._store.counts, loop.time(), time.process_time()
        await work()
        processor_s = time.process_time() - processor
        counts = self._store.counts.since(before)
        return _Measured(
            Cost(
                step,
                self._world,
                self._who,
                counts.requests,
                round(loop.time() - began),
                counts.sent_bytes,
                counts.received_bytes,
                processor_s,
            )
        )


@dataclass(frozen=True)
class _Measured:
    cost: Cost

    def less(self, look: _Measured, times: int = 1) -> _Measured:
        """Without the look that came with it; of so many versions, one."""
        cost, other = self.cost, look.cost
        return _Measured(
            dataclasses.replace(
                cost,
                requests=max(0, cost.requests - other.requests) / times,
                in_turn=max(0, cost.in_turn - other.in_turn) / times,
                sent_bytes=max(0, cost.sent_bytes - other.sent_bytes) / times,
                received_bytes=max(0, cost.received_bytes - other.received_bytes) / times,
                processor_s=max(0.0, cost.processor_s - other.processor_s) / times,
            )
        )


@asynccontextmanager
async def _job(world: int, rank: int, *, commits: bool = False) -> AsyncIterator[tuple[OpenHierarchy, SharedStore]]:
    """Rank ``rank``'s tiers. All other ranks have marked a base that is under way; not with ``commits``."""

    def markers() -> Iterator[ObjectInfo]:
        for other in range(world):
            if other != rank:
                marker = MarkerKey.of(ShardKey.base(1, 2 * BASE_EVERY, other), 1, 1, "0" * 16, TOKEN)
                yield ObjectInfo(str(marker), 1, "1")

    stores: list[SharedStore] = []
    name = f"scale-{uuid.uuid4().hex}"

    def shared(driver: object) -> SharedStore:
        stores.append(SharedStore(name, {} if commits else {MARKERS: markers}))
        return stores[-1]

    hierarchy = Hierarchy.of(f"memory://{name}-first", Tier(f"memory://{name}", name="store", wrap=shared)).open()
    async with hierarchy:
        yield hierarchy, stores[0]
    SharedStore.forget(name)
    SharedStore.forget(f"{name}-first")


def _mover(hierarchy: OpenHierarchy, world: int, rank: int) -> Mover:
    return Mover(
        hierarchy,
        rank=rank,
        world_size=world,
        generation=1,
        placement=Placement(BATCH, interval=BASE_EVERY),
        retention=Retention(),
        lineage=Lineage(((1, None),)),
    )


async def _capture(hierarchy: OpenHierarchy, world: int, *keys: ShardKey) -> None:
    for key in keys:
        await hierarchy.first.driver.put(str(key), _shard(key, world))


def _shard(key: ShardKey, world: int) -> list[bytes | bytearray | memoryview]:
    metadata = ShardMetadata.of(key, world, "")
    return list(container.payload(metadata, [TensorEntry(f"{key.first}/x", "U8", (64,), bytes(64))]))
