"""A user's machine in small: TierCheck and plug-ins installed as wheels, and pytest run somewhere else."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "plugins"
DEADLINE_S = 240.0


@dataclass(frozen=True)
class Outside:
    """``site``: where the wheels are unpacked; it comes before what this interpreter has installed."""

    site: Path
    folder: Path

    def run(self, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """``python ARGUMENTS`` in the folder, to its end."""
        with self.start(*arguments, environment=environment) as process:
            try:
                printed, _ = process.communicate(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired as late:
                os.killpg(process.pid, signal.SIGKILL)  # what it has started would compute on
                print(f"=== what it had printed by then ===\n{(late.output or b'').decode(errors='replace')}")
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, printed)

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """``python ARGUMENTS`` in the folder; what it prints comes through a pipe."""
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.site), "PYTHONDONTWRITEBYTECODE": "", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def pytest(self, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        """What a run of pytest prints; it must pass."""
        done = self.run("-m", "pytest", "-q", *arguments, environment=environment)
        assert done.returncode == 0, done.stdout
        return done.stdout


def install(site: Path, *projects: Path) -> None:
    """Build a wheel of each project and unpack it into ``site``, from what is here: nothing is fetched."""
    copies = site.parent / "sources"
    for project in projects:
        # What is built is a copy: a build may leave traces beside its sources.
        ignored = shutil.ignore_patterns(".*", "__pycache__", "node_modules", "tests", "benchmarks", "demo-output")
        shutil.copytree(project, copies / project.name, ignore=ignored, dirs_exist_ok=True)
    options = ["--quiet", "--no-input", "--disable-pip-version-check"]
    options += ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", *options]
    command += [str(copies / project.name) for project in projects]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(copies)
