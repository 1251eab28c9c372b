"""The fsspec driver passes the kit on real servers: OpenSSH's SFTP, and Azure Blob Storage as Azurite plays it."""

import contextlib
import functools
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock
from urllib.parse import quote

import pytest
from azure.core.exceptions import ResourceNotFoundError
from azure.storage.blob import BlobServiceClient, ContainerClient
from hypothesis import HealthCheck, settings

from tests.file_tiers import FileTierTests
from tests.servers.azurite import Azurite
from tests.servers.sshd import Sshd
from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.faults import Killed
from tiercheck.testing.stateful import DriverMachine
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver

pytestmark = pytest.mark.cluster

SLOW = settings(max_examples=4, stateful_step_count=25, suppress_health_check=list(HealthCheck))


class TestSftp(FileTierTests):
    listed = 300  # a server tells of some 100 names at a time
    overwrites = 12  # each sends twelve parts through ssh; the local file system runs all 30
    kill_nbytes = 2 << 20  # eight parts

    @pytest.fixture(autouse=True)
    def directory(self, sshd: Sshd) -> Iterator[None]:
        self.server = sshd
        # In memory: the kit makes thousands of files, and each put waits for its fsync.
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tiercheck-sftp-") as folder:
            self.root = Path(folder) / "some dir" / "tier"
            yield

    def url_with(self, options: str) -> str:
        return f"fsspec+sftp://127.0.0.1{quote(str(self.root))}?{self.server.client_options}&{options}"

    async def make_driver(self) -> TierDriver:
        return make_driver(self.url_with("part=256KiB"))

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return make_driver(self.url_with("survives=rack"))

    def client_factory(self, driver: TierDriver) -> Callable[[], TierDriver]:
        return functools.partial(make_driver, self.url_with("part=256KiB"))

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object]:
        return mock.patch("tiercheck.tiers.fsspec.renaming.SftpBackend.replace", side_effect=Killed)


def container_of(server: Azurite) -> ContainerClient:
    client = BlobServiceClient.from_connection_string(server.connection_string)
    return client.create_container(f"c{secrets.token_hex(6)}")


def azure_url(server: Azurite, container: ContainerClient, options: str = "") -> str:
    return (
        f"fsspec+abfs://{container.container_name}/some/run"
        f"?fs.connection_string={quote(server.connection_string)}&{options}"
    ).rstrip("&")


class TestAzure(TierDriverTests):
    listed = 100  # a page has 5,000 names, more than any test puts
    overwrites = 12  # each sends twelve blocks to a server in Node; the local file system runs all 30
    kill_nbytes = 2 << 20  # eight parts

    @pytest.fixture(autouse=True)
    def container(self, azurite: Azurite) -> Iterator[None]:
        self.server = azurite
        with container_of(azurite) as self.raw:
            yield

    async def make_driver(self) -> TierDriver:
        return make_driver(azure_url(self.server, self.raw, "part=256KiB"))

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return make_driver(azure_url(self.server, self.raw, "survives=site"))

    def client_factory(self, driver: TierDriver) -> Callable[[], TierDriver]:
        return functools.partial(make_driver, azure_url(self.server, self.raw, "part=256KiB"))

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        try:
            return self.raw.download_blob(f"some/run/{key}").readall()
        except ResourceNotFoundError:
            return None

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        self.raw.upload_blob(f"some/run/{key}", content, overwrite=True)

    def crash_before_publish(self, driver: TierDriver) -> None:
        return None  # the server publishes in the request that ends the upload


@pytest.mark.parametrize("kind", ["sftp", "azure"])
def test_against_a_dictionary(kind: str, sshd: Sshd, azurite: Azurite, tmp_path: Path) -> None:
    class ServerMachine(DriverMachine):
        etags_may_return = kind == "sftp"

        def make_driver(self) -> TierDriver:
            if kind == "sftp":
                self.root = getattr(self, "root", None) or tmp_path / secrets.token_hex(4)
                return make_driver(f"fsspec+sftp://127.0.0.1{self.root}?{sshd.client_options}")
            self.container = getattr(self, "container", None) or container_of(azurite)
            return make_driver(azure_url(azurite, self.container))

        def remove_tier(self) -> None:
            if kind == "azure":
                self.container.delete_container()

    machine = ServerMachine.TestCase
    machine.settings = SLOW
    machine("runTest").debug()
