"""The pytest plug-in ``tiercheck``, loaded wherever TierCheck is installed.

It explains the conformance kit's failing assertions, registers its marker, gives ``--tiercheck-url`` for
:mod:`tiercheck.testing.certify`, and ends a run that used the kit with a short report: which driver, which
capabilities, how many tests held each of them to its word, and what was not shown.

It loads nothing of TierCheck and costs a test run nothing that does not use the kit.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

KIT = "tiercheck.kit"
CERTIFIES = "tiercheck.certifies"
DRIVER = "tiercheck.driver"
CAPABILITY = "tiercheck.capability."
WHOLE = "tiercheck.whole"
OWN = "tiercheck.own"
OTHER_CLIENT = "tiercheck.other_client"
CRASHED = "tiercheck.crashed"
KILLED = "tiercheck.killed"
UNJOINED = "tiercheck.unjoined"
FILLED = "tiercheck.filled"
"""Names of the user properties that carry a test's part of the report, also to a pytest-xdist controller."""

REWRITTEN = (
    "certify",
    "codecs",
    "driver_kit.base",
    "driver_kit.other_clients",
    "driver_kit.limits",
    "driver_kit.objects",
    "driver_kit.reservations",
    "driver_kit.writers",
    "gradients",
    "optimizers",
    "providers",
    "stateful",
)
KIT_MODULES = "tiercheck.testing.driver_kit."

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
        whole = kit_tests(owner)
        item.user_properties += [(KIT, owner.__name__), (WHOLE, json.dumps(whole))]
        name = getattr(item, "originalname", item.name)
        # An author's own test of that name is not the kit's.
        if name in whole and getattr(owner, name).__module__.startswith(KIT_MODULES):
            item.user_properties.append((OWN, name))
        item.user_properties += [(CERTIFIES, str(mark.args[0])) for mark in item.iter_markers("certifies")]


def kit_tests(owner: type) -> dict[str, int]:
    """The tests that the kit holds a driver to, whatever ``owner`` made of them, and how often each runs."""
    bases = [base for base in owner.__mro__ if base.__module__.startswith(KIT_MODULES)]
    tests = {name: test for base in bases for name, test in vars(base).items() if name.startswith("test_")}
    return {name: times(test) for name, test in tests.items()}


def times(test: object) -> int:
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    return math.prod(len(mark.args[1]) for mark in marks)


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
    whole: dict[str, int] = field(default_factory=dict)
    """The kit's own tests, and how often each runs."""
    own: Counter[str] = field(default_factory=Counter)
    """Those of them that passed, and how often."""
    shown: dict[str, str] = field(default_factory=dict)
    """Where the other client was, which deaths were staged, and which bounds were reached."""

    @property
    def not_run(self) -> list[str]:
        """The kit's tests that were left out, replaced or skipped, in whole or in part."""
        return sorted(name for name, count in self.whole.items() if self.own[name] < count)

    @property
    def verdict(self) -> str:
        if self.failed:
            return "NOT certified"
        if self.skipped or self.not_run or not self.passed or not self.shown.keys() & {CRASHED, KILLED}:
            return "not certified whole"
        return "certified" if KILLED in self.shown else "certified within one process only"

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
        if self.capabilities.get("survives", "NOTHING") != "NOTHING":
            untested.append("durability (no test cuts the power)")
        if UNJOINED not in self.shown:
            untested.append("that payloads are not joined (its parts are too large to try)")
        if FILLED not in self.shown:
            untested.append("what a full tier says (make_small_driver gives none)")
        if untested:
            yield f"  on the author's word: {', '.join(untested)}"
        for remark in self.remarks():
            yield f"  not shown: {remark}"

    def remarks(self) -> Iterable[str]:
        """What the tests that ran do not say."""
        if self.not_run and not self.failed:
            few = ", ".join(self.not_run[:3]) + (", ..." if len(self.not_run) > 3 else "")
            yield f"{len(self.not_run)} of the kit's {len(self.whole)} tests did not pass whole: {few}"
        if KILLED not in self.shown:
            other = self.shown.get(OTHER_CLIENT)
            race = f"the other client was in {other}" if other else "no test raced one"
            yield f"atomicity and conditions against another process ({race}), and a writer's kill -9"
        if CRASHED not in self.shown:
            yield "a death right between write and publish; none was staged"


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
            elif name == WHOLE:
                found.whole = json.loads(str(value))
            elif name == OWN and report.passed:
                found.own[str(value)] += 1
            elif name in (OTHER_CLIENT, CRASHED, KILLED, UNJOINED, FILLED) and report.passed:
                found.shown[name] = str(value)
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
