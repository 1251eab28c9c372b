"""Each plug-in is certified from outside: installed from its wheel, found by its entry point, and run by its own tests
in another folder, where nothing of this repository can be imported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from azure.storage.blob import BlobServiceClient

from tests.plugins.outside import PLUGINS, Outside
from tests.servers.azurite import ACCOUNT, ACCOUNT_KEY, Azurite, azurite

__all__ = ["azurite"]

pytestmark = pytest.mark.cluster

DOCS = Path(__file__).parents[2] / "docs"


def copy_tests(plugin: str, outside: Outside, *names: str) -> None:
    for name in names:
        source = PLUGINS / plugin / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, outside.folder / name)


def test_what_is_installed_is_what_is_tested(outside: Outside) -> None:
    done = outside.run("-c", "import tiercheck, sqlite_tier, tiercheck_obstore as o; print(tiercheck, sqlite_tier, o)")
    assert done.stdout.count(str(outside.site)) == 3, done.stdout


def test_the_template_is_certified(outside: Outside) -> None:
    names = ("test_sqlite_tier.py", "test_distribution.py", "make_docs.py", "README.md", "pyproject.toml")
    copy_tests("tiercheck-template", outside, *names)
    printed = outside.pytest()
    assert "test_sqlite_tier.py TestSqlite" in printed
    assert "certified, " in printed
    assert "conditional_put = True: can be done, and keeps its promises" in printed
    assert "mappable = False: is refused as Unsupported" in printed


def test_the_template_s_codec_is_certified(outside: Outside) -> None:
    copy_tests("tiercheck-template", outside, "test_truncated_codec.py", "pyproject.toml")
    assert " passed" in outside.pytest("test_truncated_codec.py")


def test_the_template_s_policy_is_certified(outside: Outside) -> None:
    copy_tests("tiercheck-template", outside, "test_keep_progress.py", "pyproject.toml")
    assert " passed" in outside.pytest("test_keep_progress.py")


def test_obstore_passes_the_kit_in_memory(outside: Outside) -> None:
    copy_tests("tiercheck-obstore", outside, "tests", "pyproject.toml")
    printed = outside.pytest("tests/test_memory.py", "tests/test_settings.py", "tests/test_exit.py")
    assert "TestMemory (obstore+memory://" in printed
    assert "not certified whole, " in printed, "no other process can open it, and no death can be staged"
    assert (
        "not shown: atomicity and conditions against another process (the other client was in another thread)"
        in printed
    )


def test_obstore_is_certified_on_azure(outside: Outside, azurite: Azurite) -> None:
    copy_tests("tiercheck-obstore", outside, "tests", "pyproject.toml")
    with BlobServiceClient.from_connection_string(azurite.connection_string) as service:
        service.create_container("tiers")
    endpoint = f"http://127.0.0.1:{azurite.port}/{ACCOUNT}"
    environment = {
        "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
        "TIERCHECK_OBSTORE_AZ": f"az://tiers?account={ACCOUNT}&endpoint={endpoint}",
    }
    printed = outside.pytest("tests/test_servers.py", "-k", "Azure", environment=environment)
    assert "TestAzure (az://tiers/" in printed
    assert "certified, " in printed
    assert "skipped" not in printed


def test_the_plug_ins_are_listed(outside: Outside) -> None:
    program = (
        "import json; from tiercheck.diagnostics.doctor import installed_drivers;"
        "print(json.dumps([driver.to_object() for driver in installed_drivers()]))"
    )
    found = {each["scheme"]: each for each in json.loads(outside.run("-c", program).stdout)}
    assert found.keys() >= {"sqlite", "gs", "az", "obstore+memory", "memory"}
    assert found["sqlite"]["distribution"] == "tiercheck-template"
    assert found["sqlite"]["summary"] == "Objects as rows of a SQLite database"
    assert {option["name"] for option in found["az"]["options"]} >= {"account", "endpoint", "part", "survives"}
    ours = ("az", "gs", "obstore+memory", "sqlite")
    assert all(option["text"] for scheme in ours for option in found[scheme]["options"])
    assert all(found[scheme]["loadable"] for scheme in ours)


def test_any_url_is_certified_without_code(outside: Outside) -> None:
    url = f"sqlite://{outside.folder}/tier.db"
    printed = outside.pytest("--pyargs", "tiercheck.testing.certify", f"--tiercheck-url={url}")
    assert f"TestURL ({url}): certified, " in printed
    assert "not shown: a death right between write and publish; none was staged" in printed
    count = "SELECT count(*) FROM object"
    left = outside.run("-c", f"import sqlite3; print(*sqlite3.connect('tier.db').execute({count!r}))")
    assert left.stdout.strip() == "(0,)"


def test_certifying_refuses_what_it_would_destroy(outside: Outside) -> None:
    put = "from tiercheck.tiers.posix.nvme import NvmeDriver; import asyncio, pathlib\n" + (
        "async def main():\n"
        "    async with NvmeDriver(pathlib.Path.cwd() / 'tier') as driver: await driver.put('precious', [b'x'])\n"
        "asyncio.run(main())"
    )
    assert outside.run("-c", put).returncode == 0
    url = f"nvme://{outside.folder}/tier"
    done = outside.run("-m", "pytest", "-q", "--pyargs", "tiercheck.testing.certify", f"--tiercheck-url={url}")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "the tier holds 'precious'" in done.stdout
    assert (outside.folder / "tier" / "precious").read_bytes() == b"x"
    done = outside.run("-m", "pytest", "-q", "--pyargs", "tiercheck.testing.certify")
    assert done.returncode != 0
    assert "--tiercheck-url=" in done.stdout


BROKEN = """
from test_sqlite_tier import TestSqlite as Good
from sqlite_tier import SqliteDriver


class Garbling(SqliteDriver):
    async def put(self, key, payload, *, mode=None):
        return await super().put(key, [b"garbage"])


class TestGarbling(Good):
    async def make_driver(self):
        return Garbling(self.path)
"""


def test_a_failure_explains_itself_and_is_in_the_report(outside: Outside) -> None:
    """No configuration of pytest's at all, and strict markers."""
    copy_tests("tiercheck-template", outside, "test_sqlite_tier.py")
    (outside.folder / "test_broken.py").write_text(BROKEN)
    select = "TestGarbling and (test_create or test_overwriting or test_absent)"
    done = outside.run("-m", "pytest", "-q", "--strict-markers", "test_broken.py", "-k", select)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "b'garbage' == b'one'" in done.stdout, done.stdout
    assert "test_broken.py TestGarbling (sqlite://" in done.stdout
    assert "NOT certified, 1 passed, 2 failed" in done.stdout
    assert "conditional_put = True: broken in 1 of 1 tests" in done.stdout


def test_the_plug_in_costs_nothing_where_it_is_not_used(outside: Outside) -> None:
    (outside.folder / "test_other.py").write_text(
        "import sys\n\n\ndef test_other():\n"
        "    heavy = {'numpy', 'torch', 'msgpack', 'hypothesis', 'rich', 'typer', 'xxhash'}\n"
        "    assert not {name for name in sys.modules if name.startswith('tiercheck.')} - "
        "{'tiercheck.testing', 'tiercheck.testing.plugin'}\n"
        "    assert not heavy & {name for name, module in sys.modules.items() if module} - ALLOWED\n"
        "ALLOWED = {'hypothesis', 'rich', 'typer'}  # other plug-ins' own\n"
    )
    printed = outside.pytest("test_other.py")
    assert "tiercheck: drivers" not in printed
