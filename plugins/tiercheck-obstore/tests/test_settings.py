"""URLs, payloads in parts, and errors: what needs no server."""

from __future__ import annotations

import itertools
import random

import pytest
from obstore import exceptions as foreign
from tiercheck_obstore.failures import mapped_errors
from tiercheck_obstore.parts import parts_of
from tiercheck_obstore.stores import AzureDriver, GcsDriver

from tiercheck import errors
from tiercheck.tiers.registry import make_driver
from tiercheck.types import Survives


@pytest.mark.parametrize(
    ("url", "kind", "shown"),
    [
        ("gs://bucket/run", GcsDriver, "gs://bucket/run"),
        ("az://container/a/b?account=me", AzureDriver, "az://container/a/b"),
        ("gs://bucket/run?endpoint=http://h:1&part=5MiB", GcsDriver, "gs://bucket/run?endpoint=http://h:1"),
    ],
)
def test_urls(url: str, kind: type, shown: str) -> None:
    driver = make_driver(url)
    assert isinstance(driver, kind)
    assert driver.url == shown
    assert driver.capabilities.survives is Survives.RACK


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://", "gs:// needs a bucket"),
        ("az:///x", "az:// needs a container|'x'"),
        ("gs://b?colour=1", "colour"),
        ("gs://b?part=1MiB", "no parts of less than 5.0 MiB"),
        ("az://b?part=0", "less than 1 B"),
        ("gs://b?parts_in_flight=0", "parts_in_flight"),
        ("gs://b?conditional=maybe", "none of on, off, auto"),
        ("gs://b?deadline=0", "deadline"),
    ],
)
def test_urls_that_are_refused(url: str, message: str) -> None:
    if url == "az:///x":
        assert make_driver(url).url == "az://x"
        return
    with pytest.raises(errors.ConfigurationError, match=message):
        make_driver(url)


def test_an_upload_has_no_more_parts_than_stores_take() -> None:
    driver = make_driver("gs://bucket/run?part=5MiB")
    assert isinstance(driver, GcsDriver)
    assert [driver._part_bytes(nbytes) for nbytes in (1, 10_000 * (5 << 20))] == [5 << 20] * 2
    nbytes = 10_000 * (5 << 20) + 1
    assert -(-nbytes // driver._part_bytes(nbytes)) <= 10_000


def test_parts_are_copies_of_the_payload() -> None:
    chance = random.Random(5)
    content = chance.randbytes(1000)
    for part_bytes in (1, 7, 333, 1000, 1001):
        cuts = sorted(chance.choices(range(1001), k=9))
        views = [memoryview(content)[a:b] for a, b in itertools.pairwise([0, *cuts, 1000])]
        parts = list(parts_of(views, part_bytes))
        assert b"".join(parts) == content
        assert all(len(part) == part_bytes for part in parts[:-1])
        assert 0 < len(parts[-1]) <= part_bytes
    assert list(parts_of([], 5)) == []
    assert list(parts_of([memoryview(b"")], 5)) == []


def test_no_view_of_the_payload_is_left() -> None:
    buffer = bytearray(100)
    with memoryview(buffer) as view:
        for _ in parts_of([view], 33):
            pass
    buffer.append(0)  # BufferError, were there still a view of it


@pytest.mark.parametrize(
    ("raised", "meant"),
    [
        (FileNotFoundError("gone"), errors.NotFound),
        (foreign.AlreadyExistsError("there"), errors.AlreadyExists),
        (foreign.PreconditionError("changed"), errors.PreconditionFailed),
        (foreign.PermissionDeniedError("no"), errors.Unauthorized),
        (foreign.UnauthenticatedError("who?"), errors.Unauthorized),
        (foreign.NotSupportedError("never"), errors.Unsupported),
        (NotImplementedError("not yet"), errors.Unsupported),
        (foreign.GenericError("Server returned non-2xx status code: 503 Service Unavailable"), errors.Transient),
        (foreign.GenericError("error sending request for url (http://h/x)"), errors.Transient),
        (foreign.GenericError("the code is SignatureDoesNotMatch"), errors.Unauthorized),
        (foreign.GenericError("error sending request for url (http://exp-401/credentials/x)"), errors.Transient),
        (foreign.GenericError("something else"), errors.TierError),
    ],
)
def test_errors_are_mapped_once(raised: Exception, meant: type[errors.TierError]) -> None:
    with pytest.raises(errors.TierError) as caught, mapped_errors("gs://bucket", "key"):
        raise raised
    assert type(caught.value) is meant
    assert (caught.value.tier, caught.value.key) == ("gs://bucket", "key")


def test_a_missing_bucket_is_the_urls_fault() -> None:
    with pytest.raises(errors.ConfigurationError, match="gs://bucket does not exist"), mapped_errors("gs://bucket"):
        raise FileNotFoundError("<Code>NoSuchBucket</Code>")


def test_messages_carry_no_signature_and_no_debugging_detail() -> None:
    text = "error sending request for url (https://me.blob/c/k?sig=hunter2&se=1)\n\nDebug source:\nGeneric { hunter2 }"
    with pytest.raises(errors.Transient) as caught, mapped_errors("az://c", "k"):
        raise foreign.GenericError(text)
    assert "hunter2" not in str(caught.value)
    assert "https://me.blob/c/k?..." in str(caught.value)
