"""What the server can do, found out by trying it on objects of the probe's own; and what dead clients left behind.

Conditions: some servers ignore ``If-None-Match`` and ``If-Match`` instead of refusing them, so an object that must not
be overwritten is put twice. Order: two names that a walk over folders puts the wrong way round.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from tiercheck.errors import ConfigurationError, NotFound, PreconditionFailed, Transient, Unauthorized
from tiercheck.runtime.waiting import each_of, settled
from tiercheck.tiers.s3.checksums import CRC32C
from tiercheck.tiers.s3.client import Answer, S3Client
from tiercheck.tiers.s3.failures import UNAUTHORIZED, Refused
from tiercheck.tiers.s3.listing import pages
from tiercheck.tiers.s3.names import Names, new_token

__all__ = ["Findings", "abandoned", "check_layout", "dead_probes", "delete_names", "probe", "sweep"]

DELETE_BATCH = 1000
SWEPT_AT_ONCE = 8
ERRORS_SHOWN = 5
CONDITIONS_REFUSED = frozenset({"NotImplemented", "501", "InvalidArgument", "InvalidRequest", "400", "405"})


@dataclass(frozen=True)
class Findings:
    """``conditions``: both conditions on PutObject hold. ``ordered``: listings are in byte order."""

    conditions: bool
    ordered: bool


async def check_layout(client: S3Client, names: Names) -> None:
    """One listing of the prefix: the first request of all, and the check that others use as many shards.

    Errors: ``ConfigurationError`` if objects lie there under another number of shards; the request's own.
    """
    root = client.settings.root
    answer = await client.ask("ListObjectsV2", Prefix=root, Delimiter="/")
    stranger = names.stranger([item["Prefix"] for item in answer.get("CommonPrefixes", [])])
    if stranger is not None:
        raise ConfigurationError(
            f"{client.tier} says shards={client.settings.shards}, but {client.settings.place} holds {root}{stranger}, "
            "which belongs to another number of shards: all clients of a tier must use one"
        )


async def probe(client: S3Client, names: Names) -> Findings:
    """Try it. Errors: ``Unauthorized`` if the credentials do not allow to write and delete."""
    root = f"{names.probe_root}{new_token()}/"
    below, beside = f"{root}a/b", f"{root}a-b"
    try:
        await asyncio.gather(*(put_empty(client, name) for name in (below, beside)))
        create, update, listed = await asyncio.gather(
            holds(client, below, IfNoneMatch="*"),
            holds(client, beside, IfMatch='"00000000000000000000000000000000"'),
            names_of(client, root),
        )
        return Findings(create and update, listed == [beside, below])
    except Unauthorized as error:
        raise Unauthorized(
            f"{error.message}; to write needs PutObject, DeleteObject and ListBucket under the prefix, and a client "
            "that only reads says access=read",
            tier=client.tier,
        ) from error
    finally:
        await settled(delete_names(client, [below, beside]))


async def put_empty(client: S3Client, name: str, **condition: Any) -> None:
    """As objects are put: a bucket's policy may refuse any other put."""
    checksum: dict[str, Any] = {CRC32C.field: CRC32C.encode(0)}
    await client.ask("PutObject", Key=name, Body=b"", **checksum, **client.settings.put_arguments, **condition)


async def holds(client: S3Client, name: str, **condition: Any) -> bool:
    """Whether the server keeps a condition that is not met."""
    try:
        await put_empty(client, name, **condition)
    except PreconditionFailed:
        return True
    except Refused as error:
        if error.code in CONDITIONS_REFUSED:
            return False
        raise
    return False


async def names_of(client: S3Client, prefix: str) -> list[str]:
    return [entry.name async for page in pages(client, prefix) for entry in page]


async def sweep(client: S3Client, names: Names) -> None:
    """Abort uploads under the prefix, and delete probes, whose clients are gone.

    An upload counts as live as long as it, or a part of it, is younger than ``abandoned_after``, by the server's
    clock on both sides: another client's upload under way is left alone, however long it takes.
    """

    async def abort(upload: dict[str, Any]) -> None:
        # It may be completed, or swept by another client, since it was listed.
        with contextlib.suppress(Refused, NotFound):
            await client.ask("AbortMultipartUpload", upload["Key"], Key=upload["Key"], UploadId=upload["UploadId"])

    await each_of([upload for upload, _ in await abandoned(client)], abort, SWEPT_AT_ONCE)
    await delete_names(client, list(await dead_probes(client, names)))


async def dead_probes(client: S3Client, names: Names) -> dict[str, float]:
    """The objects of probes whose clients are gone, and how many seconds old each is."""
    answer = await client.ask("ListObjectsV2", Prefix=names.probe_root)
    ages_s = {
        each["Key"]: (clock(answer) - each["LastModified"]).total_seconds() for each in answer.get("Contents", [])
    }
    return {name: age_s for name, age_s in ages_s.items() if age_s > client.settings.abandoned_after_s}


async def abandoned(client: S3Client) -> list[tuple[dict[str, Any], float]]:
    """The uploads under the prefix whose clients are gone, and for how many seconds nobody has added to each."""
    oldest_s = client.settings.abandoned_after_s
    found: list[tuple[dict[str, Any], float]] = []

    async def look(listed: tuple[dict[str, Any], datetime]) -> None:
        upload, now = listed
        idle_s = (now - await last_part(client, upload)).total_seconds()
        if idle_s > oldest_s:
            found.append((upload, idle_s))

    begun = [(upload, now) async for upload, now in uploads(client)]
    old = [each for each in begun if (each[1] - each[0]["Initiated"]).total_seconds() > oldest_s]
    await each_of(old, look, SWEPT_AT_ONCE)
    return found


async def uploads(client: S3Client) -> AsyncIterator[tuple[dict[str, Any], datetime]]:
    """Unfinished uploads under the prefix, and the server's time."""
    markers: dict[str, Any] = {}
    while True:
        answer = await client.ask("ListMultipartUploads", Prefix=client.settings.root, **markers)
        for upload in answer.get("Uploads", []):
            if upload["Key"].startswith(client.settings.root):
                yield upload, clock(answer)
        following = {
            "KeyMarker": answer.get("NextKeyMarker") or "",
            "UploadIdMarker": answer.get("NextUploadIdMarker") or "",
        }
        if not answer.get("IsTruncated") or not following["KeyMarker"] or following == markers:
            return
        markers = following


async def last_part(client: S3Client, upload: dict[str, Any]) -> datetime:
    """When the upload last got a part; its beginning if it has none, or is gone."""
    latest: datetime = upload["Initiated"]
    marker: dict[str, int] = {}
    while True:
        try:
            answer = await client.ask(
                "ListParts", upload["Key"], Key=upload["Key"], UploadId=upload["UploadId"], **marker
            )
        except (Refused, NotFound):
            return latest
        latest = max([latest, *(part["LastModified"] for part in answer.get("Parts", []))])
        if not answer.get("IsTruncated") or not answer.get("NextPartNumberMarker"):
            return latest
        marker = {"PartNumberMarker": int(answer["NextPartNumberMarker"])}


def clock(answer: Answer) -> datetime:
    """The server's time, from its answer."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(date) if date else datetime.now(UTC)


async def delete_names(client: S3Client, doomed: list[str]) -> None:
    """Delete objects a thousand a request. Errors: the first refusal's kind; the message names the first few."""
    refused: list[dict[str, str]] = []
    for start in range(0, len(doomed), DELETE_BATCH):
        objects = [{"Key": name} for name in doomed[start : start + DELETE_BATCH]]
        answer = await client.ask("DeleteObjects", Delete={"Objects": objects, "Quiet": True})
        refused += [item for item in answer.get("Errors", []) if item.get("Code") not in ("NoSuchKey", "NotFound")]
    if not refused:
        return
    shown = "; ".join(
        f"{item.get('Key')}: {item.get('Code')} {item.get('Message', '')}" for item in refused[:ERRORS_SHOWN]
    )
    more = f" and {len(refused) - ERRORS_SHOWN} more" if len(refused) > ERRORS_SHOWN else ""
    message = f"{len(refused)} of {len(doomed)} objects could not be deleted: {shown}{more}"
    denied = any(item.get("Code") in UNAUTHORIZED for item in refused)
    raise (Unauthorized if denied else Transient)(message, tier=client.tier)
