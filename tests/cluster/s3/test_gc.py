"""``tiercheck gc`` on a bucket that a job is writing to: what dead clients left goes, and nothing else."""

from __future__ import annotations

import re
import uuid
from datetime import UTC, datetime, timedelta

import pytest

from tests.servers.s3_place import Place, place
from tests.servers.s3_proxy import Answer, Fault, Request, is_operation
from tests.training import Training
from tiercheck.archive.change.leftovers import collect
from tiercheck.hierarchy import Hierarchy
from tiercheck.tiers.memory import MemoryDriver

__all__ = ["place"]

pytestmark = pytest.mark.cluster

OLD = (datetime.now(UTC) - timedelta(days=2)).strftime("%Y-%m-%dT%H:%M:%SZ").encode()


def aged(place: Place, operation: str, item: bytes, time: bytes, names: list[str]) -> None:
    """From here on the server's answers to ``operation`` say of these ``names`` that they are two days old."""

    def age(request: Request, answer: Answer) -> Answer:
        def old(found: re.Match[bytes]) -> bytes:
            if not any(name.encode() in found[0] for name in names):
                return found[0]
            return re.sub(b"<%s>[^<]*<" % time, b"<%s>%s<" % (time, OLD), found[0])

        body = re.sub(b"<%s>.*?</%s>" % (item, item), old, answer.body, flags=re.DOTALL)
        headers = {name: value for name, value in answer.headers.items() if name.lower() != "content-length"}
        return Answer(answer.status, headers, body)

    place.proxy.add(Fault(is_operation(operation), 10**6, after=age))


def objects(place: Place) -> set[str]:
    pages = place.server.client.get_paginator("list_objects_v2")
    found = pages.paginate(Bucket=place.server.bucket, Prefix=f"{place.prefix}/")
    return {each["Key"].removeprefix(f"{place.prefix}/") for page in found for each in page.get("Contents", [])}


def test_what_dead_clients_left_goes_and_the_job_goes_on(place: Place) -> None:
    client, bucket = place.server.client, place.server.bucket
    name, url = f"gc-{uuid.uuid4().hex}", place.driver().url
    options = {"base_every": 3, "batch": 1, "mover": "trainer"}
    training = Training()
    checkpointer = training.attach(Hierarchy.of(f"memory://{name}", url), **options)  # type: ignore[arg-type]
    for version in range(1, 6):
        training.step(version)
    checkpointer.flush()
    there = objects(place)
    uploads = {
        what: client.create_multipart_upload(Bucket=bucket, Key=f"{place.prefix}/{what}")["UploadId"]
        for what in ("abandoned", "live")
    }
    dead_probe, new_probe = (f"{place.driver()._names.probe_root}{what}/a-b" for what in ("dead", "new"))
    for each in dead_probe, new_probe:
        client.put_object(Bucket=bucket, Key=each, Body=b"")
    aged(place, "ListMultipartUploads", b"Upload", b"Initiated", [uploads["abandoned"]])
    aged(place, "ListObjectsV2", b"Contents", b"LastModified", [dead_probe])
    dead = {f"{place.prefix}/abandoned", dead_probe}
    assert {each.left.name for each in collect(url, dry_run=True)} == dead
    assert (set(place.uploads()), there <= objects(place)) == (set(uploads.values()), True), "nothing went"
    done = collect(url)
    assert {each.left.name for each in done if each.removed} == dead
    assert set(place.uploads()) == {uploads["live"]}
    assert there | {new_probe.removeprefix(f"{place.prefix}/")} == objects(place)
    for version in range(6, 9):
        training.step(version)
    checkpointer.close()
    MemoryDriver.forget(name)
    after = Training()
    resumed = after.attach(Hierarchy.of(f"memory://{name}", url), **options)  # type: ignore[arg-type]
    assert (resumed.version, after.parameters()) == (8, training.states[8])
    resumed.close()
    MemoryDriver.forget(name)
