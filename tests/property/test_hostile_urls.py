"""Whatever a URL says, making its driver succeeds or raises ``ConfigurationError``."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tiercheck.errors import ConfigurationError
from tiercheck.tiers.registry import make_driver

OPTIONS = {
    "memory://x": ("size",),
    "shm://x": ("size", "pool", "mount", "threads", "pin", "numa"),
    "nvme:///tmp/x": ("survives", "io", "block", "depth"),
    "lustre:///tmp/x": ("survives", "stripe_count", "stripe_size"),
    "peer://x?at=127.0.0.1:7": ("at", "server_key", "keys", "connections", "credit", "deadline", "survives"),
    "s3://bucket/x": (
        "endpoint_url", "region", "profile", "addressing", "survives", "part", "parts_in_flight", "conditional",
        "listing", "access", "shards", "storage_class", "sse", "sse_kms_key", "timeout", "deadline", "abandoned_after",
    ),
    "fsspec+sftp://h/x": ("survives", "part", "parts_in_flight", "deadline", "publish", "fs.auto_mkdir", "fs.x"),
    "fsspec+memory://x": ("survives", "part", "deadline", "fs.key"),
}  # fmt: skip
NUMBERS = ("0", "-1", "nan", "inf", "-inf", "1e999", "9" * 5000, "0.0", "0B", "0s", "1e-400", "99999999PiB")
ODD = ("", " ", "..", "/", "//", "\ud800", "\x00", "%00", "%ff", "\n", "{rank}", "[", "http://[", "*", "\u0661")
VALUES = st.sampled_from((*NUMBERS, *ODD)) | st.text(max_size=12)
LOCATIONS = st.sampled_from(("", "/", "//", "/..", "/a/../b", "~", "a/b", "host", "u:p@h", *ODD)) | st.text(max_size=12)


def made(url: str) -> bool:
    try:
        make_driver(url)
    except ConfigurationError as error:
        str(error).encode()
        return False
    return True


def with_option(url: str, name: str, value: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{name}={value}"


def test_a_value_of_five_thousand_digits_is_a_configuration_error() -> None:
    for url, names in OPTIONS.items():
        for name in names:
            made(with_option(url, name, "9" * 5000))


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(sorted(OPTIONS)), st.data(), VALUES)
def test_hostile_options_are_configuration_errors(url: str, data: st.DataObject, value: str) -> None:
    made(with_option(url, data.draw(st.sampled_from(OPTIONS[url]) | st.text(max_size=8)), value))


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([url.partition(":")[0] for url in OPTIONS] + ["fsspec", "fsspec+"]), LOCATIONS)
@example("nvme", "/")
@example("lustre", "/tmp/\x00")
@example("fsspec+file", "/")
def test_hostile_locations_are_configuration_errors(scheme: str, location: str) -> None:
    made(f"{scheme}://{location}")


@pytest.mark.parametrize(
    "url",
    [
        "shm://x?size=0", "memory://x?size=0", "peer://x?at=a:1&credit=0", "peer://x?at=a:1&deadline=nan", "nvme:///",
        "nvme:///a/../b", "lustre:///", "fsspec+file:///", "fsspec+memory://x?deadline=nan", "nvme:///x\ud800",
        "fsspec+memory://x?parts_in_flight=0", "fsspec+memory://x?deadline=1e999", "shm://x?threads=-1",
        "s3://bucket/x?part=0", "s3://bucket/x?deadline=0s", "s3://bucket/x?endpoint_url=http://[",
        "s3://bucket/x?parts_in_flight=" + "9" * 5000,
        "nvme:///x?depth=0", "nvme:///x?block=0", "lustre:///x?stripe_size=0",
    ],
    ids=ascii,
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(url: str) -> None:
    assert not made(url)
