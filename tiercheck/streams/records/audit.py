"""An audit: a checksum of each tensor that training has at a version, to compare the folded base of that version with.

A folded base has the bits of the state, unless something has changed the state that no differential holds, or memory or
arithmetic has failed. The differential that leads to an audited version holds one object ``V/audit``: for each tensor
of the base, and for its objects ``optimizer`` and ``host``, the checksum that the base is to have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tiercheck.errors import Corruption
from tiercheck.format.checksums import DIGEST_NBYTES, checksum_of
from tiercheck.format.container import PackedObject, Shard
from tiercheck.format.host_state import pack
from tiercheck.format.index.logical import MASTER
from tiercheck.streams.records.base import HOST, OPTIMIZER, optimizer_object, tensors_of
from tiercheck.streams.records.record_names import audit_name
from tiercheck.streams.tensors.provider import StateProvider
from tiercheck.streams.tensors.writes import contents

__all__ = ["audit_nbytes_max", "audit_of", "read_audit"]

TENSORS_OF_MASTER = 8
"""Room for the checksums of a master and of what the optimizer keeps for it."""
BESIDE_NBYTES = 256
"""Of the object itself."""


def audit_nbytes_max(masters: int, extras: int) -> int:
    """The room to reserve for an audit of so many tensors."""
    return BESIDE_NBYTES + DIGEST_NBYTES * (TENSORS_OF_MASTER * masters + extras)


def audit_of(
    provider: StateProvider, host_state: PackedObject, known: Mapping[str, str], nbytes_max: int
) -> dict[str, Any] | None:
    """What ``V/audit`` holds. Reads every tensor that has no checksum in ``known``, by master. ``None``: a tensor is
    not on the host, or the audit needs more room than there is."""
    tensors, values = tensors_of(provider)
    found = {f"{MASTER}{master}": checksum for master, checksum in known.items()}
    found |= contents({name: tensor for name, tensor in tensors.items() if name not in found})
    if len(found) < len(tensors) or BESIDE_NBYTES + DIGEST_NBYTES * len(found) > nbytes_max:
        return None
    found[OPTIMIZER] = checksum_of(pack(optimizer_object(provider, values), name=OPTIMIZER))
    found[HOST] = checksum_of(host_state.data)
    names = sorted(found)
    return {"names": checksum_of_names(names), "digests": b"".join(bytes.fromhex(found[name]) for name in names)}


def read_audit(shard: Shard, version: int, tensors: Iterable[str]) -> dict[str, str]:
    """The checksums that a base of ``version`` with these ``tensors`` is to have, by name; empty if the version was not
    audited. If the job had other tensors, none has the checksum that it is to have. Errors: ``Corruption``."""
    if audit_name(version) not in shard.object_names:
        return {}
    names = sorted([*tensors, OPTIMIZER, HOST])
    audit: Any = shard.object(audit_name(version))
    try:
        digests = bytes(audit["digests"])
        if audit["names"] != checksum_of_names(names) or len(digests) != DIGEST_NBYTES * len(names):
            return dict.fromkeys(names, "")
    except (KeyError, TypeError, ValueError) as error:
        raise Corruption(f"the audit of version {version} lacks {error}", tier=shard.tier, key=shard.key) from error
    starts = range(0, len(digests), DIGEST_NBYTES)
    return {name: digests[at : at + DIGEST_NBYTES].hex() for name, at in zip(names, starts, strict=True)}


def checksum_of_names(names: Iterable[str]) -> str:
    return checksum_of("\0".join(names).encode())
