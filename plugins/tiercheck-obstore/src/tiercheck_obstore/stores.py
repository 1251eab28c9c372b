"""The stores: what their URLs say, and how each is reached.

No URL carries a secret. Credentials come from where each cloud's own tools look for them: the environment, the files
of their command lines, or the machine's identity.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Self

from obstore.store import AzureStore, GCSStore
from obstore.store import MemoryStore as ObstoreMemory

from tiercheck.errors import ConfigurationError
from tiercheck.tiers.url import OptionReader, TierURL, parse_size
from tiercheck.types import Survives, bytes_text
from tiercheck_obstore.driver import ObstoreDriver, Settings
from tiercheck_obstore.tokens import MarkingDriver, TokenDriver

if TYPE_CHECKING:
    from obstore import ObjectMeta, UpdateVersion
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, ObjectStore, RetryConfig

__all__ = ["AzureDriver", "GcsDriver", "MemoryDriver"]

RETRIES_MAX = 1000
"""It is the deadline that ends the retries: a server that restarts must find its clients still trying."""
PART_BYTES_MIN = 5 << 20
"""The least that Google's store takes for a part that is not the last."""


def read_settings(options: OptionReader, survives: Survives, part_bytes_min: int = 1) -> Settings:
    """The options that every store has."""

    def part_size(text: str) -> int:
        nbytes = parse_size(text)
        if nbytes < part_bytes_min:
            raise ValueError(f"the store takes no parts of less than {bytes_text(part_bytes_min)}")
        return nbytes

    return Settings(
        survives=options.take("survives", Survives.parse, survives),
        part_bytes=options.take("part", part_size, Settings.part_bytes),
        parts_in_flight=options.take("parts_in_flight", positive, Settings.parts_in_flight),
        conditional=options.take("conditional", on_off_auto, None),
        deadline_s=options.take("deadline", seconds, Settings.deadline_s),
    )


def positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} is no number from 1 on")
    return int(text)


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 86400:
        raise ValueError(f"{text!r} is no number of seconds above 0 and below a day")
    return value


def on_off_auto(text: str) -> bool | None:
    choices = {"on": True, "off": False, "auto": None}
    if text not in choices:
        raise ValueError(f"{text!r} is none of {', '.join(choices)}")
    return choices[text]


class BucketDriver(ObstoreDriver):
    """A store of buckets that hold objects: the URL's location is ``bucket/prefix``."""

    scheme: ClassVar[str]
    called: ClassVar[str] = "bucket"

    def __init__(self, location: str, settings: Settings, *, endpoint: str | None = None) -> None:
        self.bucket, _, self.prefix = location.strip("/").partition("/")
        if not self.bucket:
            raise ConfigurationError(
                f"{self.scheme}:// needs a {self.called}, such as {self.scheme}://{self.called}/run"
            )
        self.endpoint = endpoint
        shown = {} if endpoint is None else {"endpoint": endpoint}
        super().__init__(TierURL(self.scheme, location.strip("/"), shown).text, settings)

    def client_options(self) -> ClientConfig:
        deadline = timedelta(seconds=self._settings.deadline_s)
        plain = self.endpoint is not None and self.endpoint.startswith("http://")
        return {"timeout": deadline, "connect_timeout": min(deadline, timedelta(seconds=10)), "allow_http": plain}

    def retry_config(self) -> RetryConfig:
        return {
            "max_retries": RETRIES_MAX,
            "retry_timeout": timedelta(seconds=self._settings.deadline_s),
            "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=5), "base": 2},
        }


class AzureDriver(MarkingDriver, BucketDriver):
    """``az://container/prefix[?account=NAME][&endpoint=http://host:port/account]``: Azure Blob Storage.

    Credentials come from ``AZURE_STORAGE_ACCOUNT_KEY``, ``AZURE_STORAGE_SAS_KEY``, a service principal's variables or
    the machine's identity. An etag is new with every put.

    - ``account``: the storage account; default: ``AZURE_STORAGE_ACCOUNT_NAME``.
    - ``endpoint``: another server than Azure, such as the Azurite emulator's, the account included.
    - ``survives``: the widest failure that the store outlives.
    - ``part``: the size of a block.
    - ``parts_in_flight``: blocks that are sent or fetched at once.
    - ``conditional``: ``on`` or ``off`` where it is known what the server does with conditions; ``auto`` tries at open.
    - ``deadline``: seconds a request may take, retries included.
    """

    scheme = "az"
    called = "container"
    field = "tiercheck_put"  # Azure takes identifiers only

    def __init__(
        self, location: str, settings: Settings, *, endpoint: str | None = None, account: str | None = None
    ) -> None:
        super().__init__(location, settings, endpoint=endpoint)
        self.account = account

    @classmethod
    def from_url(cls, url: TierURL) -> Self:
        options = url.reader()
        account = options.take("account", str, None)
        endpoint = options.take("endpoint", str, None)
        settings = read_settings(options, Survives.RACK)
        options.finish()
        return cls(url.location, settings, endpoint=endpoint, account=account)

    def connect(self) -> ObjectStore:
        config: AzureConfig = {}
        if self.endpoint is not None:
            config["endpoint"] = self.endpoint
        if self.account is not None:
            config["account_name"] = self.account
        return AzureStore(
            self.bucket,
            prefix=self.prefix or None,
            client_options=self.client_options(),
            retry_config=self.retry_config(),
            config=config,
        )


class GcsDriver(TokenDriver, BucketDriver):
    """``gs://bucket/prefix``: Google Cloud Storage.

    Credentials come from ``GOOGLE_SERVICE_ACCOUNT``, the application default credentials or the machine's identity. An
    ``UPDATE`` names the generation that has the etag, so that it misses no put in between.

    - ``endpoint``: another server than Google's.
    - ``survives``: the widest failure that the store outlives.
    - ``part``: the size of a part, at least 5MiB.
    - ``parts_in_flight``: parts that are sent or fetched at once.
    - ``conditional``: ``on`` or ``off`` where it is known what the server does with conditions; ``auto`` tries at open.
    - ``deadline``: seconds a request may take, retries included.
    """

    scheme = "gs"

    @classmethod
    def from_url(cls, url: TierURL) -> Self:
        options = url.reader()
        endpoint = options.take("endpoint", str, None)
        settings = read_settings(options, Survives.RACK, PART_BYTES_MIN)
        options.finish()
        return cls(url.location, settings, endpoint=endpoint)

    def connect(self) -> ObjectStore:
        config: GCSConfig = {} if self.endpoint is None else {"base_url": self.endpoint}
        return GCSStore(
            self.bucket,
            prefix=self.prefix or None,
            client_options=self.client_options(),
            retry_config=self.retry_config(),
            config=config,
        )

    def version_of(self, meta: ObjectMeta) -> UpdateVersion:
        return {"e_tag": meta["e_tag"], "version": meta["version"]}


class MemoryDriver(ObstoreDriver):
    """``obstore+memory://name``: obstore's memory store, for tests of the driver without a server.

    - ``part``: the size of a part.
    - ``parts_in_flight``: parts that are sent or fetched at once.
    - ``conditional``: as for the other stores.
    - ``survives``: as for the other stores, so that a hierarchy can be tried with it.
    - ``deadline``: as for the other stores; nothing here takes time.
    """

    _stores: ClassVar[dict[str, ObjectStore]] = {}

    def __init__(self, name: str, settings: Settings) -> None:
        super().__init__(TierURL("obstore+memory", name).text, settings)
        self.name = name

    @classmethod
    def from_url(cls, url: TierURL) -> Self:
        options = url.reader()
        settings = read_settings(options, Survives.NOTHING)
        options.finish()
        return cls(url.location, settings)

    @classmethod
    def forget(cls, name: str) -> None:
        """Drop the store of that name. Idempotent."""
        cls._stores.pop(name, None)

    def connect(self) -> ObjectStore:
        return self._stores.setdefault(self.name, ObstoreMemory())
