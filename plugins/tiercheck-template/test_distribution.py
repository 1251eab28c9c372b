"""What only holds once the distribution is installed: the scheme leads to the driver, and the docs are true."""

from pathlib import Path

from keep_progress import KeepProgress
from make_docs import README, rendered
from sqlite_tier import SqliteDriver

from tiercheck.replication.named_policies import parse_policy
from tiercheck.tiers.registry import make_driver, schemes


def test_the_scheme_leads_to_the_driver(tmp_path: Path) -> None:
    assert schemes()["sqlite"] == "tiercheck-template"
    driver = make_driver(f"sqlite://{tmp_path}/run.db?survives=rack&wait=2")
    assert isinstance(driver, SqliteDriver)
    assert driver.capabilities.survives.name == "RACK"


def test_the_name_leads_to_the_policy() -> None:
    assert parse_policy("retention", "keep_progress?metric=loss&by=0.2") == KeepProgress("loss", 0.2)


def test_the_readme_says_what_the_driver_says() -> None:
    text = README.read_text(encoding="utf-8")
    assert rendered(text) == text, "run python make_docs.py"
