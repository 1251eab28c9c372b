"""What several ranks hold alike is stored by one of them, if that is safe: the ranks settle it when they attach.

Under DDP and ZeRO-0 all ranks hold the same. Under HSDP those of a column of the mesh do: each column is a part of the
ranks, which shares out what its ranks hold as all ranks do otherwise.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from tiercheck.config import CheckpointConfig, int_of
from tiercheck.errors import ConfigurationError, UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.policy.owners import owners, why_each
from tiercheck.recovery.ranks import gather
from tiercheck.runtime.front import run
from tiercheck.runtime.group import BlockingGroup, Group
from tiercheck.streams.optimizers.registry import find_optimizer
from tiercheck.streams.rebuilding.stored import torch_optimizers
from tiercheck.streams.tensors.joint import kinds_in
from tiercheck.streams.tensors.owned import OwnedProvider, Owners
from tiercheck.streams.tensors.provider import StateProvider, identity_digest
from tiercheck.streams.tensors.sharing import digest, fingerprints
from tiercheck.types import Survives, bytes_text

__all__ = ["Alike", "share_out"]

log = logging.getLogger(__name__)

ACROSS_TENSORS = frozenset(("torch.optim.lbfgs.LBFGS",))
"""Of torch's optimizers, those whose step of one tensor depends on the others."""


@dataclass(frozen=True)
class Alike:
    """What an integration knows of the tensors that this rank and others hold alike."""

    masters: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    obstacle: str = ""
    """Why nobody can rely on that, if there are any."""
    parts: tuple[tuple[int, ...], ...] = ()
    """Of all ranks, each in one and in ascending order: those of a part hold the same. Empty: all ranks do."""
    nbytes: Mapping[str, int] = field(default_factory=dict)
    """By name, what storing the tensor costs the rank of a part that has most of it. Empty: as much as this rank."""


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others."""

    alike: bool
    wanted: str
    obstacle: str
    survives: int
    node: str
    contents: str
    """A digest of the names, shapes and bits of what is to be alike."""
    parts: str
    """A digest of :attr:`Alike.parts`."""


def share_out(
    provider: StateProvider, ask: Callable[[], Alike], hierarchy: Hierarchy, group: Group, config: CheckpointConfig
) -> OwnedProvider | None:
    """What this rank stores, if each replicated tensor is stored by one rank; ``None`` if every rank stores all that it
    holds. ``ask``: what the integration knows of them. Collective, and the same on every rank. Errors:
    ``UnsupportedSetup`` if the configuration asks for it, and it cannot be; ``ConfigurationError``; those of the group.
    """
    if group.world_size == 1:
        return None
    what = "looking at what the ranks hold alike"

    found: list[Alike] = []

    def look() -> _Told:
        found.append(ask())
        return told_of(provider, found[0], hierarchy, config)

    told = run(gather(BlockingGroup(group), what, look, deadline_s=config.deadline_s, kind=_Told))
    if not any(each.alike for each in told):
        return None
    alike = found[0]
    if len({each.wanted for each in told}) > 1:
        raise ConfigurationError("the ranks have different replicas= in their CheckpointConfig: give all of them one")
    why = why_not(told, alike.parts)
    if why and config.replicas == "owner":
        raise UnsupportedSetup(f"replicas='owner' cannot be had: {why}; use 'auto' or 'each'")
    if why:
        if group.rank == 0:
            log.info("every rank stores the whole of what all of them hold alike: %s", why)
        return None
    masters, frozen = provider.masters(), provider.frozen()
    nbytes = {name: each.numel() * each.element_size() for name, each in {**masters, **frozen}.items()}
    costs, ranks = {**nbytes, **alike.nbytes}, len(alike.parts[0]) if alike.parts else group.world_size
    owned = OwnedProvider(
        provider,
        Owners(
            group.among(alike.parts) if alike.parts else group,
            owners({name: costs[name] for name in masters if name in alike.masters}, ranks),
            owners({name: costs[name] for name in frozen if name in alike.frozen}, ranks),
            config.deadline_s,
        ),
    )
    if group.rank == 0:
        own = sum(nbytes[name] for name in (*owned.masters(), *owned.frozen()))
        log.info(
            "what %s hold alike is stored once: rank 0 stores parameters of %s, of %s that it has",
            f"the {ranks} replicas of each shard" if alike.parts else f"all {ranks} ranks",
            bytes_text(own),
            bytes_text(sum(nbytes.values())),
        )
    return owned


def told_of(provider: StateProvider, alike: Alike, hierarchy: Hierarchy, config: CheckpointConfig) -> _Told:
    there = bool(alike.masters or alike.frozen or alike.obstacle)
    obstacle = alike.obstacle or (obstacle_of(provider, config) if there else "")
    if not there or config.replicas == "each" or obstacle:
        return _Told(there, config.replicas, obstacle, 0, "", "", "")
    rank, local_rank = int_of("RANK", 0), int_of("LOCAL_RANK", 0)
    node = int_of("TIERCHECK_NODE", int_of("GROUP_RANK", 0))
    survives = Survives.NOTHING
    if isinstance(hierarchy, Hierarchy):  # anything else is refused next
        survives = hierarchy.promises(rank=rank, local_rank=local_rank, node=node)
    masters, frozen = provider.masters(), provider.frozen()
    tensors = {name: each for name, each in masters.items() if name in alike.masters}
    tensors |= {name: each for name, each in frozen.items() if name in alike.frozen}
    found = {f"{name} {tuple(tensors[name].shape)}": each for name, each in fingerprints(tensors).items()}
    parts = identity_digest(map(str, alike.parts))
    return _Told(True, config.replicas, "", int(survives), f"{socket.gethostname()} {node}", digest(found), parts)


def obstacle_of(provider: StateProvider, config: CheckpointConfig) -> str:
    for kind, _ in kinds_in(provider.identity().optimizer.kind):
        if kind in ACROSS_TENSORS or (kind not in torch_optimizers() and find_optimizer(kind) is None):
            return (
                f"{kind} may step one tensor by what it knows of others, which one rank's part of the steps does not "
                "tell: those of torch and those registered (entry-point group tiercheck.optimizers) are known not to"
            )
    if provider.steps_together():
        return "the optimizer's step takes all ranks that hold parts of a tensor"
    if config.train_on_compressed:
        return "with train_on_compressed each rank trains on its own encoding of the gradients"
    return ""


def why_not(told: Sequence[_Told], parts: Sequence[Sequence[int]]) -> str:
    """Why every rank is to store all that it holds; empty if it is not. ``parts``: as this rank knows them."""
    if told[0].wanted == "each":
        return "replicas='each' says so"
    for rank, each in enumerate(told):
        if each.obstacle or not each.alike:
            return each.obstacle or f"rank {rank} has nothing that others hold, too"
    every = [*range(len(told))]
    if len({each.parts for each in told}) > 1 or (parts and sorted(chain.from_iterable(parts)) != every):
        return "the ranks do not agree on which of them hold the same"
    survives = Survives(min(each.survives for each in told))
    for part in parts or [every]:
        if why := why_each(survives, [told[rank].node for rank in part]):
            return why
        if len({told[rank].contents for rank in part}) > 1:
            return "the ranks hold different values of it"
    return ""
