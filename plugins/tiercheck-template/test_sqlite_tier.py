"""The SQLite driver passes the kit."""

import asyncio
import contextlib
import functools
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from sqlite_tier import SqliteDriver

from tiercheck.errors import NotFound, Transient
from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.faults import Killed
from tiercheck.testing.stateful import DriverMachine
from tiercheck.tiers.driver import TierDriver


class SmallSqliteDriver(SqliteDriver):
    """Of at most 3000 pages of 4096 bytes, which is soon full."""

    def commit(self, connection: sqlite3.Connection) -> None:
        super().commit(connection)
        connection.execute("PRAGMA max_page_count = 3000")


class TestSqlite(TierDriverTests):
    @pytest.fixture(autouse=True)
    def database(self, tmp_path: Path) -> None:
        self.path = tmp_path / "tier.db"

    async def make_driver(self) -> TierDriver:
        return SqliteDriver(self.path)

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return SqliteDriver(self.path)

    def client_factory(self, driver: TierDriver) -> Callable[[], TierDriver]:
        return functools.partial(SqliteDriver, self.path)

    async def make_small_driver(self) -> TierDriver:
        return SmallSqliteDriver(self.path)

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            row = connection.execute("SELECT content FROM object WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        with contextlib.closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute("INSERT OR REPLACE INTO object (key, content) VALUES (?, ?)", (key, content))

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object]:
        return mock.patch.object(SqliteDriver, "commit", side_effect=Killed)


@pytest.mark.asyncio
async def test_others_cannot_read_it(tmp_path: Path) -> None:
    async with SqliteDriver(tmp_path / "tier.db") as driver:
        await driver.put("a", [b"x"])
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("tier.db", "tier.db-wal", "tier.db-shm"), 0o600)


@pytest.mark.asyncio
async def test_who_reads_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no such file"):
        await SqliteDriver(tmp_path / "mistyped.db").open_to_read()
    assert not list(tmp_path.iterdir())


@pytest.mark.asyncio
async def test_opening_waits_for_another_process_beside_the_event_loop(tmp_path: Path) -> None:
    (tmp_path / "tier.db").touch()
    with contextlib.closing(sqlite3.connect(tmp_path / "tier.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        opening = asyncio.ensure_future(SqliteDriver(tmp_path / "tier.db", wait_s=0.2).open())
        turns = 0
        while not opening.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 10
        with pytest.raises(Transient):
            await opening
        other.execute("ROLLBACK")


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
