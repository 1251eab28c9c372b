"""What the commands that read checkpoints print with ``--json``: one object each, as ``docs/reference.md`` says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tiercheck.policy.recovery.plan import availability, held
from tiercheck.types import shown

if TYPE_CHECKING:
    from tiercheck.archive.change.copying import Copied
    from tiercheck.archive.change.leftovers import FoundLeftover
    from tiercheck.archive.change.removal import Removal
    from tiercheck.archive.compare.paths import PathDifference
    from tiercheck.archive.compare.versions import Compared, Form
    from tiercheck.archive.contents import Contents
    from tiercheck.archive.export.write import Exported
    from tiercheck.archive.inventory import Generation, Inventory, Recoverable
    from tiercheck.archive.verify import Verified
    from tiercheck.policy.recovery.consensus import RecoveryPoint

__all__ = [
    "compared_object",
    "contents_object",
    "copied_object",
    "exported_object",
    "leftovers_object",
    "listing_object",
    "plan_object",
    "removal_object",
    "verified_object",
]


def listing_object(inventory: Inventory) -> dict[str, Any]:
    return {
        "tiers": [
            {
                "name": tier.name,
                "url": tier.url,
                "survives": tier.role.survives.name.lower(),
                "objects": len(tier.objects),
                "bytes": tier.nbytes,
                "away": tier.away,
            }
            for tier in inventory.tiers
        ],
        "versions": [list(span) for span in inventory.spans],
        "newest": inventory.spans[-1][1] if inventory.spans else None,
        "generations": [generation_object(each) for each in inventory.generations],
        "problems": list(inventory.problems),
    }


def generation_object(generation: Generation) -> dict[str, Any]:
    branch = generation.branch
    return {
        "generation": generation.number,
        "parent": branch and branch.parent,
        "left_at": branch and branch.left_at,
        "world_size": branch and branch.world_size,
        "made_anew": list(branch.made) if branch else [],
        "counts": generation.counts,
        "until": generation.until,
        "kept_to": generation.kept_to,
        "stored": [
            {
                "kind": str(stored.stream),
                "first": stored.first,
                "last": stored.last,
                "tiers": [
                    {
                        "tier": held.tier,
                        "ranks": list(held.ranks),
                        "versions": [list(span) for span in held.versions],
                        "bytes": held.nbytes,
                        "committed": held.committed,
                        "written_s": held.written_s,
                    }
                    for held in stored.held
                ],
            }
            for stored in generation.stored
        ],
    }


def point_object(point: RecoveryPoint) -> dict[str, Any]:
    return {
        "generation": point.generation,
        "anchor": point.anchor,
        "replayed": point.replayed,
        "by_snapshot": point.by_snapshot,
    }


def plan_object(inventory: Inventory, chosen: Recoverable) -> dict[str, Any]:
    sources = [[(each, inventory.nbytes(each)) for each in plan.sources] for plan in chosen.plans]
    names = [tier.name for tier in inventory.tiers]
    here = [held(point, rank, len(names), inventory.copies[rank]) for rank, point in enumerate(chosen.points)]
    return {
        "version": chosen.version,
        "world_size": chosen.world_size,
        "bytes": sum(nbytes for each in sources for _, nbytes in each),
        "ranks": [
            {
                "rank": rank,
                **point_object(point),
                "sources": [
                    {"object": str(copy.key), "tier": names[copy.tier], "bytes": nbytes}
                    for copy, nbytes in sources[rank]
                ],
            }
            for rank, point in enumerate(chosen.points)
        ],
        "matrix": [
            {
                "ranks": [list(span) for span in row.ranks],
                "tier": row.tier,
                "anchor": row.anchor,
                "differentials": [list(span) for span in row.differentials],
            }
            for row in availability(names, here)
        ],
        "problems": list(inventory.problems),
    }


def contents_object(inventory: Inventory, contents: Contents) -> dict[str, Any]:
    identity = contents.identity
    optimizer = identity.optimizer
    return {
        "version": contents.version,
        "rank": contents.rank,
        **point_object(contents.point),
        "lineage": [
            {"generation": generation, "until": last}
            for generation, last in inventory.lineage(contents.point.generation).chain
        ],
        "made_anew": list(inventory.made_before(contents.point.generation)),
        "token": contents.token,
        "framework": identity.framework,
        "world_size": contents.world_size,
        "model": identity.model,
        "model_summary": identity.model_summary,
        "optimizer": {
            "kind": optimizer.kind,
            "implementation": optimizer.implementation,
            "torch_version": optimizer.torch_version,
            "instruction_set": optimizer.instruction_set,
            "device": optimizer.device,
            "library": optimizer.library,
        },
        "tensors": [
            {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "bytes": spec.nbytes}
            for spec in contents.tensors
        ],
        "hyperparameters": [
            {name: value if is_plain(value) else shown(value) for name, value in group.items()}
            for group in contents.hyperparameters
        ],
        "host_state": {name: shown(value) for name, value in contents.host_state.items()},
    }


def verified_object(found: Verified) -> dict[str, Any]:
    return {
        "objects": found.objects,
        "bytes": found.nbytes,
        "damaged": [
            {"object": each.key, "tier": each.tier, "reason": each.reason, "unread": each.unread}
            for each in found.damaged
        ],
        "gone": found.gone,
        "lost": [list(span) for span in found.lost],
        "newest": found.newest,
        "away": list(found.away),
        "healthy": found.healthy,
    }


def exported_object(made: Exported) -> dict[str, Any]:
    return {
        "path": str(made.path),
        "format": str(made.format),
        "version": made.version,
        "tensors": made.tensors,
        "bytes": made.nbytes,
        "aliases": dict(made.aliases),
        "fidelity": str(made.fidelity),
        "notes": list(made.notes),
    }


def compared_object(found: Compared) -> dict[str, Any]:
    before, after = (
        {"version": version, "generation": generation, "world_size": world_size}
        for version, generation, world_size in zip(found.versions, found.generations, found.world_sizes, strict=True)
    )
    return {
        "before": before,
        "after": after,
        "same": found.same,
        "tensors": [
            {
                "name": each.name,
                "slice": each.slice_name or None,
                "state": each.state or None,
                "before": form_object(each.before),
                "after": form_object(each.after),
                "elements": each.distance.elements,
                "changed": each.distance.changed,
                "not_finite": each.distance.not_finite,
                "l2": each.distance.l2,
                "relative": None if math.isinf(each.distance.relative) else each.distance.relative,
                "max_abs": each.distance.max_abs,
            }
            for each in found.tensors
        ],
        "host_state": paths_object(found.host_state),
        "written": paths_object(found.written),
        "fidelity": str(found.fidelity),
        "notes": list(found.notes),
    }


def copied_object(found: Copied) -> dict[str, Any]:
    return {
        "url": found.url,
        "version": found.version,
        "objects": found.objects,
        "bytes": found.nbytes,
        "present": found.present,
        "damaged": found.damaged,
        "gone": found.gone,
        "versions": [list(span) for span in found.versions],
    }


def removal_object(removal: Removal, *, done: bool) -> dict[str, Any]:
    tiers = removal.inventory.tiers
    return {
        "done": done,
        "objects": removal.objects,
        "bytes": removal.nbytes,
        "tiers": [
            {
                "tier": tiers[index].name,
                "gone": [{"object": str(key), "bytes": tiers[index].objects[key].nbytes} for key in keys],
            }
            for index, keys in removal.gone.items()
        ],
        "bases": [{"generation": generation, "version": version} for generation, version in removal.bases],
        "lost": [list(span) for span in removal.lost],
        "versions": [list(span) for span in removal.versions],
        "refused": list(removal.refused),
    }


def leftovers_object(found: Sequence[FoundLeftover], *, done: bool) -> dict[str, Any]:
    return {
        "done": done,
        "leftovers": [
            {
                "where": each.where,
                "what": each.left.what,
                "name": each.left.name,
                "bytes": each.left.nbytes,
                "age_s": each.left.age_s,
                "stays": each.stays,
                "removed": each.removed,
            }
            for each in found
        ],
    }


def form_object(form: Form | None) -> dict[str, Any] | None:
    if form is None:
        return None
    model_dtype = form.model_dtype or None
    return {"shape": list(form.shape), "dtype": form.dtype, "model_dtype": model_dtype, "trained": form.trained}


def paths_object(paths: Sequence[PathDifference]) -> list[dict[str, Any]]:
    return [{"path": each.path, "before": each.before, "after": each.after} for each in paths]


def is_plain(value: object) -> bool:
    """Whether JSON has it."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
