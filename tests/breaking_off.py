"""A run of pytest that breaks off says at its very end why: what ended it, which tests had failed and which were under
way.

pytest-xdist prints what a worker raises between its tests in the midst of pages of its own frames, and pytest then
leaves out its list of what failed.
"""

from __future__ import annotations

import pytest

__all__ = ["listen"]

LINES = 12


class LastWords:
    """Listens to all workers, in the process that starts them."""

    def __init__(self) -> None:
        self._under_way: dict[str, None] = {}
        self._failed: list[str] = []
        self._errors: list[str] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._under_way[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._under_way.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext)
            self._failed.append(f"{report.nodeid} ({report.when}): {reason.partition(chr(10))[0]}")

    def pytest_internalerror(self, excrepr: object) -> None:
        self._errors.append("\n".join([line for line in str(excrepr).splitlines() if line.strip()][-LINES:]))

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        terminal = config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None or not self._errors:
            return
        terminal.section("the run broke off", sep="=")
        # What comes first is the cause: pytest-xdist's own error follows from it.
        terminal.write_line(self._errors[0])
        for what, tests in (("failed before", self._failed), ("under way", [*self._under_way])):
            terminal.write_line(f"{what}: {len(tests)}")
            for each in tests[-LINES:]:
                terminal.write_line(f"  {each}")


def listen(config: pytest.Config) -> None:
    """From now on, if this process is not a worker."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(LastWords(), "last-words")
