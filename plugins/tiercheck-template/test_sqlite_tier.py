"""The SQLite driver passes the kit."""

import contextlib
import sqlite3
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from sqlite_tier import SqliteDriver

from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.faults import Killed
from tiercheck.testing.stateful import DriverMachine
from tiercheck.tiers.driver import TierDriver


class TestSqlite(TierDriverTests):
    @pytest.fixture(autouse=True)
    def database(self, tmp_path: Path) -> None:
        self.path = tmp_path / "tier.db"

    async def make_driver(self) -> TierDriver:
        return SqliteDriver(self.path)

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return SqliteDriver(self.path)

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            row = connection.execute("SELECT content FROM object WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        with contextlib.closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute("INSERT OR REPLACE INTO object (key, content) VALUES (?, ?)", (key, content))

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object]:
        return mock.patch.object(SqliteDriver, "commit", side_effect=Killed)


class SqliteMachine(DriverMachine):
    """Random calls of two clients, against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()

    def make_driver(self) -> TierDriver:
        return SqliteDriver(Path(self.folder.name) / "tier.db")

    def remove_tier(self) -> None:
        self.folder.cleanup()


TestSqliteAgainstADictionary = SqliteMachine.TestCase
TestSqliteAgainstADictionary.settings = settings(
    max_examples=20, deadline=None, suppress_health_check=list(HealthCheck)
)
