"""A real browser without a window, which renders a page and tells what it sees."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.servers.programs import need

__all__ = ["Browser", "browser"]

LOAD_S_MAX = 90.0
SETTLE_MS = 1000
"""Of the browser's own time: what the page does by itself soon after it was loaded."""


class Browser:
    """Headless Chromium, started anew for each look, with a profile of its own that goes with it."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def dom(self, url: str) -> str:
        """The document as it stands after the page's scripts have run."""
        return self._run(url, "--dump-dom")

    def screenshot(self, url: str, target: Path, *, dark: bool = False, width: int = 1240, height: int = 900) -> Path:
        """A PNG of what is to be seen."""
        dark_mode = ["--blink-settings=preferredColorScheme=0"] if dark else []
        self._run(url, f"--screenshot={target}", f"--window-size={width},{height}", "--hide-scrollbars", *dark_mode)
        assert target.read_bytes().startswith(b"\x89PNG")
        return target

    def _run(self, url: str, *arguments: str) -> str:
        profile = tempfile.mkdtemp(prefix="tc-browser-")
        try:
            done = subprocess.run(
                [
                    self._program,
                    "--headless",
                    "--disable-gpu",
                    "--disable-dev-shm-usage",
                    "--no-first-run",
                    "--disable-background-networking",
                    "--disable-component-update",
                    "--disable-sync",
                    "--no-proxy-server",
                    f"--user-data-dir={profile}",
                    f"--virtual-time-budget={SETTLE_MS}",
                    # A container's root has no name spaces to build Chromium's own sandbox from.
                    *(["--no-sandbox"] if os.geteuid() == 0 else []),
                    *arguments,
                    url,
                ],
                capture_output=True,
                text=True,
                timeout=LOAD_S_MAX,
                check=False,
            )
        finally:
            shutil.rmtree(profile, ignore_errors=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout


@pytest.fixture(scope="session")
def browser() -> Browser:
    return Browser(need("chromium", package="chromium"))
