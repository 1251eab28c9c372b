"""The pytest plug-in ``tiercheck``, loaded wherever TierCheck is installed.

It explains the conformance kit's failing assertions, registers its marker, gives ``--tiercheck-url`` for
:mod:`tiercheck.testing.certify`, and ends a run that used the kit with a short report: which driver, which
capabilities, and how many tests held each of them to its word.

It loads nothing of TierCheck and costs a test run nothing that does not use the kit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

KIT = "tiercheck.kit"
CERTIFIES = "tiercheck.certifies"
DRIVER = "tiercheck.driver"
CAPABILITY = "tiercheck.capability."
"""Names of the user properties that carry a test's part of the report, also to a pytest-xdist controller."""

REWRITTEN = ("certify", "kit", "kit_objects", "kit_reservations", "kit_writers", "stateful")

# Before anything imports them: a failing assertion of the kit shows its values in the author's own test run.
pytest.register_assert_rewrite(*(f"tiercheck.testing.{name}" for name in REWRITTEN))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiercheck", "TierCheck's conformance kit")
    group.addoption(
        "--tiercheck-url",
        metavar="URL",
        help="The tier that 'pytest --pyargs tiercheck.testing.certify' certifies. It must be empty: whatever is put "
        "there is deleted.",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "certifies(capability): the flag of a driver's Capabilities that the test holds")
    config.pluginmanager.register(CertificationReport(), "tiercheck-report")


def pytest_itemcollected(item: pytest.Item) -> None:
    owner = getattr(item, "cls", None)
    if owner is not None and getattr(owner, "tiercheck_kit", False):
        item.user_properties.append((KIT, owner.__name__))
        item.user_properties += [(CERTIFIES, str(mark.args[0])) for mark in item.iter_markers("certifies")]


@dataclass
class Certification:
    """What is known of one test class."""

    driver: str = ""
    capabilities: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    held: dict[str, list[bool]] = field(default_factory=dict)
    """Per capability: whether each test that holds it passed."""

    @property
    def verdict(self) -> str:
        if self.failed:
            return "NOT certified"
        return "not certified whole" if self.skipped else "certified"

    def lines(self, name: str) -> Iterable[str]:
        counts = [f"{self.passed} passed"]
        others = (("failed", self.failed), ("skipped", self.skipped))
        counts += [f"{len(tests)} {word}" for word, tests in others if tests]
        yield f"{name} ({self.driver or 'no driver was opened'}): {self.verdict}, {', '.join(counts)}"
        for flag, tests in sorted(self.held.items()):
            claim = self.capabilities.get(flag, "unknown")
            broken = tests.count(False)
            verdict = f"broken in {broken} of" if broken else f"{KEPT.get(claim, 'kept')}, in"
            yield f"  {flag} = {claim}: {verdict} {len(tests)} tests"
        untested = [f"{flag} = {claim}" for flag, claim in sorted(self.capabilities.items()) if flag not in self.held]
        if untested:
            yield f"  on the author's word: {', '.join(untested)}"


KEPT = {"True": "can be done, and keeps its promises", "False": "is refused as Unsupported"}


class CertificationReport:
    """Collects the kit's outcomes, of this process or of all of xdist's."""

    def __init__(self) -> None:
        self.found: dict[str, Certification] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = list(report.user_properties)
        kit = next((str(value) for name, value in properties if name == KIT), None)
        if kit is None or (report.when != "call" and report.passed):
            return
        # Two modules may name their classes alike.
        found = self.found.setdefault(f"{report.nodeid.partition('::')[0]} {kit}".strip(), Certification())
        for name, value in properties:
            if name == DRIVER:
                found.driver = str(value)
            elif name.startswith(CAPABILITY):
                found.capabilities[name.removeprefix(CAPABILITY)] = str(value)
            elif name == CERTIFIES and not report.skipped:
                found.held.setdefault(str(value), []).append(report.passed)
        if report.passed:
            found.passed += 1
        else:
            (found.failed if report.failed else found.skipped).append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.found:
            return
        terminalreporter.section("tiercheck: drivers", sep="-")
        for nodeid, found in sorted(self.found.items()):
            for line in found.lines(nodeid):
                terminalreporter.write_line(line)
