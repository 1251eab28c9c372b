"""Opening a job, the composition root: everything that saving needs is made here, and handed to what uses it.

All ranks take the same steps in the same order: look at what is to be saved; find the tiers and, if the job has any,
the agents; open the tiers; recover; open a generation; capture its first base; hand over to the mover. A step that
fails on one rank fails on all. Then the generation is taken back, and everything is given back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain
from typing import Any

from tiercheck import schema
from tiercheck.agent.client.endpoint import RankEndpoint, beside_neighbour
from tiercheck.agent.client.node_agent import FindAgent, NodeAgent
from tiercheck.agent.jobs.job_store import as_agent_opens
from tiercheck.config import CheckpointConfig, int_of
from tiercheck.errors import ConfigurationError, GroupError
from tiercheck.folding.messages import FoldTarget
from tiercheck.folding.owner import FoldProcess
from tiercheck.format.container import checksum_of
from tiercheck.hierarchy import Hierarchy, OpenHierarchy
from tiercheck.opening.admission import Demand, demand_of, prepare_memory, ranks_sharing, refuse_gaps, sizes_of
from tiercheck.opening.agreement import Agreement, clear_tiers
from tiercheck.opening.alike import refuse_different, settings_alike
from tiercheck.opening.announcement import (
    begun,
    doubtful_tiers,
    given_up,
    left_out,
    nothing_outlives_a_node,
    overruled_options,
    repeated,
    retention_without_effect,
    trained_again,
    turned,
)
from tiercheck.opening.constants import brought
from tiercheck.opening.folding import foldable, opens_elsewhere, settle_folding, tell_folding
from tiercheck.opening.generation import open_on_all_ranks, take_back
from tiercheck.opening.job import MoverLife, OpenedJob, Resources
from tiercheck.opening.policies import JobPolicies, settle_policies
from tiercheck.opening.restoring import kept_by, take_over
from tiercheck.opening.room import TierRoom, check_rooms, tell_rooms, tier_rooms, too_little_room
from tiercheck.opening.told import Told
from tiercheck.policy.first_tier import Sizes
from tiercheck.policy.neighbours import Method
from tiercheck.policy.policies import Policies
from tiercheck.policy.recovery.lineage import Branch, Layout, Lineage
from tiercheck.policy.recovery.lost_stage import LostStage
from tiercheck.policy.recovery.request import Request
from tiercheck.recording.cadence import Cadence
from tiercheck.recording.metrics import Metrics
from tiercheck.recording.recorder import Recorder
from tiercheck.recovery.finding.node_memory import NodeMemories, NodeMemory
from tiercheck.recovery.ranks import Ranks
from tiercheck.recovery.report import Recovery
from tiercheck.recovery.restored import Restored
from tiercheck.recovery.restorer import Restorer
from tiercheck.recovery.stages.places import StageTold, check_pipeline, not_to_be_averaged, stage_state, stage_told
from tiercheck.replication.fold_executor import FoldExecutor, LocalFoldExecutor
from tiercheck.replication.job import JobTier, ReplicationJob
from tiercheck.replication.mover import Mover, MoverHandle
from tiercheck.runtime.group import AsyncGroup
from tiercheck.runtime.runtime import Runtime
from tiercheck.streams.state import FoldShards, StateStream, TrainingState
from tiercheck.types import Survives

__all__ = ["open_job"]

log = logging.getLogger(__name__)

OPEN_S_MAX = 20.0
"""How long attaching waits for a store that is away before it sees whether it is needed."""


async def open_job(
    state: TrainingState,
    hierarchy: Hierarchy,
    *,
    group: AsyncGroup,
    runtime: Runtime,
    find_agent: FindAgent,
    fold_process: Callable[[Mapping[str, str], bool], FoldProcess] | None = None,
    config: CheckpointConfig,
    policies: Policies | None = None,
    request: Request | None = None,
    caveats: Callable[[], Sequence[str]],
    before_bases: Callable[[], None] | None = None,
    on_lost_stage: LostStage | None = None,
) -> OpenedJob:
    """Restore the newest version that every rank can reach, or the one that is asked for, and begin to record what
    follows it. Collective.

    If a step fails, the tiers hold what they held before, or an empty generation more if the last ones fail, and
    nothing stays open, ``group`` and the runtime's scheduler included. ``find_agent`` is called if the node's agent
    moves the data. ``fold_process`` gives the process that folds otherwise, as the environment says (``None``: the
    job's own). Other arguments and errors: as of :class:`tiercheck.checkpointer.Checkpointer`.
    """
    ranks = Ranks(group, runtime.scheduler, config.deadline_s)
    held = Resources(ranks)
    try:
        config, settled = settle_policies(config, policies)
        asked = request or Request()
        startup = _Startup(
            state, config, settled, asked, ranks, runtime, find_agent, fold_process, held, before_bases, on_lost_stage
        )
        return await startup.open(hierarchy, caveats)
    except BaseException:
        await held.give_back()
        raise


@dataclass(frozen=True)
class _State:
    """What is to be saved."""

    stream: StateStream
    given: Sequence[Mapping[str, Any]]
    """The optimizer's options as the script gave them."""


@dataclass(frozen=True)
class _OpenTiers:
    """The tiers, open."""

    hierarchy: Hierarchy
    """As this rank sees it: every field of its URLs is filled in."""
    tiers: OpenHierarchy
    demand: Demand
    rooms: Sequence[TierRoom]
    """What each tier will hold, and has room for."""
    policies: JobPolicies
    """Those of a job with these tiers."""
    agent: NodeAgent | None
    folds: FoldShards | None
    """``None``: bases are captured."""
    not_folded: str
    """Why, if folding was wanted."""
    apart: bool
    """Another process folds: it can open the first tier."""


@dataclass(frozen=True)
class _Start:
    """What the ranks have settled before anything is captured."""

    recovery: Recovery | None
    branch: Branch
    lineage: Lineage
    """With the branch in it."""

    @property
    def version(self) -> int:
        return self.recovery.version if self.recovery else 0


@dataclass(frozen=True)
class _Recording:
    """What records, and what the user is told of it."""

    recorder: Recorder
    mover: MoverHandle
    agreement: Agreement | None
    cautions: Sequence[str]


@dataclass(frozen=True)
class _Startup:
    """The steps. Each returns what it has found or made; what must be given back is noted in ``held`` as well."""

    trained: TrainingState
    config: CheckpointConfig
    policies: JobPolicies
    request: Request
    ranks: Ranks
    runtime: Runtime
    find_agent: FindAgent
    fold_process: Callable[[Mapping[str, str], bool], FoldProcess] | None
    held: Resources
    before_bases: Callable[[], None] | None
    on_lost_stage: LostStage | None

    async def open(self, hierarchy: Hierarchy, caveats: Callable[[], Sequence[str]]) -> OpenedJob:
        """All steps, in their order."""
        ranks, config = self.ranks, self.config
        settings = settings_alike(config, hierarchy)
        state, answers = await ranks.exchange("looking at what is to be saved", lambda: self.look(settings))
        told = [Told(*each) for each in answers]
        refuse_different([each.asked for each in told], [each.settings for each in told])
        if stages := [each.stage for each in told if each.stage is not None]:
            check_pipeline(stages)
            self.tell_of_stages(stages)
        layout = Layout(ranks.world_size, checksum_of("\n".join(each.layout for each in told).encode()))
        sizes, bound = [Sizes(*each.sizes) for each in told], [each.processors for each in told]
        (placed, agent), nodes = await ranks.exchange("finding the agents of the nodes", lambda: self.find(hierarchy))
        sharing = ranks_sharing(hierarchy.tiers[0].url, self.runtime.environment, ranks.world_size)
        opened, reasons = await ranks.exchange(
            "opening the tiers",
            lambda: self.open_tiers(state, placed, agent, nodes, sharing, sizes, bound, told[0].start),
        )
        tell_folding(ranks.rank, reasons)
        restart, keeps, asked = config.on_nothing_left == "restart", config.keep_left_behind, self.request
        memories = self.node_memories(hierarchy, opened.tiers, agent, nodes)
        lost = self.on_lost_stage
        restorer = Restorer(opened.tiers, self.trained, ranks, layout, restart, asked, keeps, memories, lost)
        restored = await restorer.restore()
        if restored.recovery is None:
            # A job that has something to go on from is not kept from it by a tier that is full.
            await ranks.gather("what the tiers have room for", lambda: check_rooms(opened.rooms, config))
        turn = restored.turn
        kept = turn.kept if turn else kept_by(restored) if keeps else ()
        taking = "taking over what was restored"
        recovery = await ranks.together(taking, lambda: take_over(restored, state.stream, caveats))
        token = self.runtime.token
        branch = await open_on_all_ranks(ranks, opened.tiers, restored, layout, token, asked=str(asked), kept=kept)
        start = _Start(recovery, branch, Lineage.of([*restored.past.branches, branch]))
        try:
            state.stream.token = branch.token
            mark = await clear_tiers(ranks, opened.tiers, restored, branch.generation)
            beginning = "beginning to save"
            recording, read_from = await ranks.exchange(beginning, lambda: self.begin(state, opened, start, restored))
        except GroupError:  # the ranks cannot agree to take it back
            raise
        except Exception:
            if self.held.recorder is not None:
                await self.held.recorder.close()
            await take_back(ranks, opened.tiers, branch)
            raise
        await self.hand_over(agent, recording.agreement, mark)
        mover_life = self.held.mover_life = MoverLife(recording.mover, ranks.scheduler)
        if ranks.rank == 0:
            nbytes = opened.demand.base_nbytes + opened.demand.constants_nbytes
            past, parent = restored.past, restored.parent
            saved_by = next((each.world_size for each in past.branches if each.generation == parent), 0)
            again = "" if restored.converted else trained_again(past, parent, restored.version)
            goes_on = begun(recovery, chain.from_iterable(read_from), opened.tiers, branch, nbytes, saved_by, again)
            log.log(logging.WARNING if again else logging.INFO, "%s", goes_on)
            first = opened.tiers.first.driver
            opened.demand.tell(first.url, first.facts().get("pages", ""))
            tell_rooms(opened.rooms)
            if (said := turned(turn, opened.tiers) if turn else repeated(self.request, recovery)) is not None:
                log.warning("%s", said)
            for said in restored.made:
                log.warning("the recovery is approximate: %s", said)
            if keeps and restored.dropped:
                log.warning("%s", left_out(restored.parent, opened.tiers))
            if not turn and not keeps and restored.past.kept:
                log.warning("%s", given_up(restored.past.kept))
        for caution in recording.cautions:
            log.warning("%s", caution)
        return OpenedJob(
            config=config,
            ranks=ranks,
            tiers=opened.tiers,
            generation=branch.generation,
            recovery=recovery,
            recorder=recording.recorder,
            mover=recording.mover,
            mover_life=mover_life,
            agent=agent,
            resources=self.held,
            metrics=Metrics(branch.generation),
        )

    async def look(self, settings: Mapping[str, str]) -> tuple[_State, tuple[Any, ...]]:
        """All that may refuse without a tier: the codec, and the state's being storable. And what the other ranks are
        told (:class:`Told`)."""
        given = self.trained.hyperparameters()
        stream = self.trained.stream(self.ranks.world_size)
        if self.config.bases == "fold":
            self.trained.folding(certified=False)
        asked, stage = str(self.request), None
        if self.on_lost_stage is not None:
            stage = stage_told(stage_state(self.trained.stage()).place)
            asked = " and ".join(filter(None, (asked, f"on_lost_stage={self.on_lost_stage}")))
        sizes, processors = astuple(sizes_of(stream)), sorted(self.runtime.processors)
        told = Told(self.trained.layout(), asked, settings, sizes, processors, self.runtime.start, stage)
        return _State(stream, given), tuple(told)

    def tell_of_stages(self, stages: Sequence[StageTold]) -> None:
        averages = self.on_lost_stage is not None and Method.AVERAGE in self.on_lost_stage.methods
        if averages and self.ranks.rank == 0 and (said := not_to_be_averaged(stages)) is not None:
            log.warning("on_lost_stage=%s: %s", self.on_lost_stage, said)

    def folding(
        self, agent: NodeAgent | None, bound: Sequence[Sequence[int]], *, apart: bool
    ) -> tuple[FoldShards | None, str]:
        """As of :func:`settle_folding`."""
        return settle_folding(self.trained, self.config, self.ranks.rank, bound, self.runtime, agent=agent, apart=apart)

    async def find(self, hierarchy: Hierarchy) -> tuple[tuple[Hierarchy, NodeAgent | None], Any]:
        """Fill in the fields of the hierarchy's URLs, and find this node's agent if it has the mover. Returns them, and
        what the other ranks need to know of the agent."""
        environment = self.runtime.environment
        node = int_of("TIERCHECK_NODE", int_of("GROUP_RANK", 0, environment), environment)
        local_rank = int_of("LOCAL_RANK", 0, environment)
        placed = hierarchy.resolved(rank=self.ranks.rank, local_rank=local_rank, node=node)
        if self.config.mover == "trainer" and placed.needs_peer:
            raise ConfigurationError(
                "a neighbour's memory (peer://) is served by the agents of the nodes: leave mover at 'auto'"
            )
        if self.config.mover == "trainer" or (self.config.mover == "auto" and not placed.needs_peer):
            return (placed, None), None
        agent = self.held.agent = await self.find_agent(
            placed, self.ranks.rank, self.ranks.scheduler, self.config.deadline_s, environment
        )
        return (placed, agent), schema.plain(agent.endpoint(node))

    def node_memories(
        self, hierarchy: Hierarchy, tiers: OpenHierarchy, agent: NodeAgent | None, nodes: Sequence[Any]
    ) -> NodeMemories:
        """The other nodes' memory, if each node has an agent. The first rank of a node tells of that node's."""
        ranks = self.ranks
        environment = self.runtime.environment
        node = environment.get("TIERCHECK_NODE") or environment.get("GROUP_RANK")
        place = f"{node} {tiers.first.driver.url}" if node else ""
        if agent is None or None in nodes:
            return NodeMemories(tiers, ranks, place=place)
        endpoints = [schema.read(RankEndpoint, each) for each in nodes]
        own = endpoints[ranks.rank]
        agents = [(each.host, each.endpoint) for each in endpoints]
        leads = agents.index((own.host, own.endpoint)) == ranks.rank

        async def tell() -> Sequence[NodeMemory]:
            return await agent.memories(hierarchy, own) if leads else ()

        # Where each tier is another one on another node, none of them tells of what was captured by another order.
        always = all("{" in tier.url for tier in hierarchy.tiers)
        return NodeMemories(tiers, ranks, tell, own.host, place and f"{own.host} {place}", always)

    async def open_tiers(
        self,
        state: _State,
        placed: Hierarchy,
        agent: NodeAgent | None,
        nodes: Sequence[Any],
        sharing: int,
        sizes: Sequence[Sizes],
        bound: Sequence[Sequence[int]],
        start: str,
    ) -> tuple[_OpenTiers, str]:
        """``nodes``: what each rank's :meth:`find` tells the others. ``sharing``: the ranks that share the tier.
        ``sizes``, ``bound``: of every rank, and the processors that it may use. ``start``: as rank 0 names it.
        Returns the tiers, and what the other ranks are told: why bases are not folded."""
        ranks, config, given = self.ranks, self.config, placed
        if placed.needs_peer:
            placed = beside_neighbour(placed, ranks.rank, [schema.read(RankEndpoint, each) for each in nodes])
        self.trained.prepare([tier.codec for tier in placed.tiers if tier.codec and agent is None])
        tiers = placed.lazily_opened(open_s=min(OPEN_S_MAX, config.deadline_s / 4)).open()
        lasting = [tier.driver.url for tier in tiers.tiers if tier.capabilities.survives > Survives.NOTHING]
        self.held.process_lock = self.runtime.lock(lasting, ranks.rank, start)
        # A little less than the deadline, so that the error names the tier.
        await ranks.call(tiers.opened(0.9 * config.deadline_s), "opening the tiers")
        self.held.tiers = tiers
        refuse_gaps(config, ranks.world_size, tiers.roles, together=self.trained.steps_together)
        self.policies.check(given, tiers)
        policies = self.policies
        wrapped = placed.tiers[0].wrap is not None
        shown = opens_elsewhere(tiers.first.capabilities.survives, wrapped=wrapped)
        apart = agent is not None or (shown and self.fold_process is not None)
        folds, not_folded = self.folding(agent, bound, apart=apart)
        agrees = Agreement.needed(tiers, ranks.group)
        if folds is not None:
            policies = policies.folding(agrees=agrees)
        usage = await ranks.call(tiers.first.driver.usage(), f"the usage of {tiers.first.name}")
        demand = demand_of(
            state.stream,
            config,
            fold_every=policies.fold_every,
            each_commits=policies.each_commits(tiers),
            agrees=agrees,
            ranks=sharing,
            limit_bytes=usage.limit_bytes,
        )
        policies = replace(policies, fold_every=demand.holding.fold_every)
        if usage.limit_bytes is not None:
            demand.check(
                usage.limit_bytes,
                config,
                policies.cadence,
                tier=tiers.first.driver.url,
                foldable=lambda: folds is None and foldable(self.trained),
            )
        rooms = await tier_rooms(ranks, tiers, demand, policies, sizes, usage.limit_bytes, agrees=agrees)
        opened = _OpenTiers(placed, tiers, demand, rooms, policies, agent, folds, not_folded, apart)
        return opened, not_folded

    async def begin(
        self, state: _State, opened: _OpenTiers, start: _Start, restored: Restored
    ) -> tuple[_Recording, list[str]]:
        """Capture the base that the generation opens with. No mover runs yet, so that it can be taken back. Returns
        what records, and the tiers that this rank's state was read from."""
        ranks, config = self.ranks, self.config
        mover = self.make_mover(opened, start)
        agreement = None
        if Agreement.needed(opened.tiers, ranks.group):
            agreement = Agreement(ranks.group, mover, ranks.scheduler, config.deadline_s)
        recorder = self.held.recorder = Recorder(
            state.stream,
            opened.tiers,
            mover,
            ranks.scheduler,
            placement=opened.policies.placement,
            cadence=self.make_cadence(start.version),
            config=config,
            rank=ranks.rank,
            generation=start.branch.generation,
            version=start.version,
            agreement=agreement,
            before_bases=self.before_bases,
            folds=opened.folds is not None,
            not_folded=opened.not_folded,
            holding=opened.demand.holding,
        )
        cautions = await self.cautions(state, opened, start.recovery)
        if (found := restored.constants) is not None:
            key, references = found[0].key, found[1]
            if await brought(ranks, opened.tiers, key, references, restored.sound):
                state.stream.refer_to(key, references)
        opening_nbytes = await recorder.begin()
        if (start.recovery is None or restored.made) and ranks.world_size > 1:
            # No rank of a job that begins anew goes on before every rank has its first base. A rank without one could
            # come to nothing, and the next start would have to take the others' versions for a loss. So it is with a
            # stage that was made anew.
            await recorder.finish_base()
        preparing = prepare_memory(opened.tiers.first, opened.demand, config.base_every, opening_nbytes)
        self.held.preparing = ranks.scheduler.start(preparing)
        read_from = [tier for _, tier in start.recovery.sources] if start.recovery else []
        return _Recording(recorder, mover, agreement, cautions), read_from

    def make_cadence(self, version: int) -> Cadence:
        """The cadence, from the version at which the generation opens."""
        ranks = self.ranks

        async def agree(due: bool) -> bool:
            return bool((await ranks.gather("whether a base is due", lambda: due))[0])

        return Cadence(self.policies.cadence, version, ranks.scheduler.time, agree if ranks.world_size > 1 else None)

    def folds_of(self, opened: _OpenTiers) -> FoldExecutor | None:
        """What folds for the mover in this process: a process of its own, if that can open the first tier."""
        if opened.folds is None:
            return None
        first = opened.hierarchy.tiers[0]
        if not opened.apart or self.fold_process is None:
            return LocalFoldExecutor(opened.folds, opened.tiers.first)
        waits = self.config.bases == "fold"
        process = self.held.fold_process = self.fold_process(self.runtime.environment, waits)
        return process.at(FoldTarget(as_agent_opens(first.url), first.name, self.config.bases == "auto"))

    def make_mover(self, opened: _OpenTiers, start: _Start) -> MoverHandle:
        """The mover, in this process; or what stands for it here, if the node's agent has it."""
        rank, world_size, generation = self.ranks.rank, self.ranks.world_size, start.branch.generation
        if opened.agent is None:
            return Mover(
                opened.tiers,
                rank=rank,
                world_size=world_size,
                generation=generation,
                placement=opened.policies.placement,
                retention=opened.policies.retention,
                pacing=self.policies.pacing,
                lineage=start.lineage,
                folds=self.folds_of(opened),
            )
        job = ReplicationJob(
            tuple(JobTier(tier.name, tier.url, tier.codec) for tier in opened.hierarchy.tiers),
            node=opened.agent.node,
            rank=rank,
            world_size=world_size,
            generation=generation,
            batch=self.policies.batch,
            interval=self.policies.cadence.interval,
            folds="no" if opened.folds is None else "certified" if self.config.bases == "auto" else "exactly",
            fold_every=opened.policies.fold_every,
            **self.policies.texts(),
        )
        return opened.agent.mover(job, opened.tiers.first.driver)

    async def cautions(self, state: _State, opened: _OpenTiers, recovery: Recovery | None) -> list[str]:
        """What the user may not have meant, told once a job."""
        if self.ranks.rank != 0:
            return []
        tiers, world_size = opened.tiers, self.ranks.world_size
        found = [nothing_outlives_a_node(tiers, world_size), doubtful_tiers(tiers)]
        found.append(retention_without_effect(tiers, self.policies.retaining))
        if recovery is not None:
            scheduled = self.trained.host_state().get("scheduler") is not None
            found.append(overruled_options(state.given, self.trained.hyperparameters(), scheduled=scheduled))
        found.append(too_little_room(opened.rooms, self.config))
        return [each for each in found if each is not None]

    async def hand_over(self, agent: NodeAgent | None, agreement: Agreement | None, mark: int) -> None:
        """Let what was captured be moved from here on, up to what the ranks have agreed on."""
        if agent is not None:
            await self.ranks.gather("handing the movers to the agents", agent.register)
        if agreement is not None:
            agreement.mark = mark
            await self.ranks.gather("telling the movers what is whole", agreement.begin)
