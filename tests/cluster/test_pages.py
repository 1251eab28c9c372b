"""The documentation cannot rot: the programs of every page run, and print what the page shows.

Of ``python`` blocks, those that begin with ``# file: NAME`` are written to NAME in a fresh directory; the page's
commands run there; then all other ``python`` blocks of the page run in order as one program. ``<!-- setup: ... -->``
holds code that this program needs and a reader does not.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.test_snippets import COMMANDS, ROOT, RUN, Block, entry_points_in, of_language
from tests.forks import Forks
from tiercheck.tiers.shm.namespaces import namespaces, remove_namespace

pytestmark = pytest.mark.cluster

DEADLINE_S = 240
LONG = "many_pages or another_client or kill_9 or parts or ADictionary"
"""What takes longest of the kit for drivers. The whole kit runs for the same driver, whose page and distribution are
alike, in tests/plugins, and for nvme in tests/conformance."""
ENVIRONMENT = {"PYTEST_ADDOPTS": f"-k 'not ({LONG})'"}
TORCH = re.compile(r"^(import|from) (torch|tiercheck\.integrations)\b", re.MULTILINE)


@dataclass(frozen=True)
class Place:
    """A directory of the page's own, and its own name in shared memory, for the names that the page uses."""

    directory: Path
    name: str
    logs: Path
    forks: Callable[[], Forks]
    """For programs that import torch."""

    def here(self, text: str) -> str:
        for ours, theirs in (
            ("my-run", self.name),
            ("/shared/", f"{self.directory}/"),
            ("/mnt/", f"{self.directory}/"),
        ):
            text = text.replace(ours, theirs)
        return text

    def run(self, command: list[str]) -> tuple[int, str]:
        """The exit status, and what was printed."""
        if command[0] == "torchrun":
            return self.launch(*command[1:])
        if any(TORCH.search(text) for text in self.sources_of(command)):
            script, *arguments = command[1:] if command[0] == "python" else [str(self.pytest()), *command[1:]]
            log = self.logs / f"{len(list(self.logs.iterdir()))}.log"
            (code,) = self.forks().run(
                script, *arguments, log=log, directory=self.directory, deadline_s=DEADLINE_S, environment=ENVIRONMENT
            )
            return code, log.read_text()
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        done = subprocess.run(
            command,
            cwd=self.directory,
            env={**os.environ, "PATH": paths, "OMP_NUM_THREADS": "1", **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        return done.returncode, done.stdout

    def launch(self, option: str, ranks: str, script: str, *arguments: str) -> tuple[int, str]:
        """What torchrun does."""
        assert option == "--nproc-per-node"
        log, directory = self.logs / f"{len(list(self.logs.iterdir()))}.log", self.directory
        worker, count = "tests.cluster.torchrun", int(ranks)
        codes = self.forks().run(worker, script, *arguments, ranks=count, log=log, directory=directory)
        return max(codes, key=abs), log.read_text()

    def sources_of(self, command: list[str]) -> list[str]:
        """The file that the command runs; for pytest also those beside it, which tests import."""
        if command[0] == "python":
            return [(self.directory / command[1]).read_text()]
        return [path.read_text() for path in self.directory.glob("*.py")] if command[0] == "pytest" else []

    def pytest(self) -> Path:
        """A program that does what the command of that name does."""
        path = self.logs / "pytest_command.py"
        path.write_text("import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))\n")
        return path


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    name = f"test-docs-{secrets.token_hex(6)}"
    # In memory: pages make thousands of files, and each waits for its fsync.
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="page-") as folder:
        yield Place(Path(folder), name, tmp_path, lambda: request.getfixturevalue("forks"))
    for namespace in namespaces():
        if namespace.name.startswith(name):
            remove_namespace(namespace.name)


def program_of(blocks: list[Block]) -> str:
    """The blocks as one program whose lines are those of the page, so that a traceback shows where."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.text.splitlines()
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "page", sorted({block.page for block in of_language("python")}), ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_page_runs(page: Path, place: Place) -> None:
    python = [block for block in of_language("python", "setup") if block.page == page]
    for block in python:
        if block.file:
            (place.directory / block.file).write_text(place.here(block.text))
    for block in of_language("toml"):
        if block.page == page:
            install(block, place)
    for block, command, shown in COMMANDS:
        if block.page == page and shlex.split(command)[0] in RUN:
            check_command(block, place.here(command), shown, place)
    program = program_of([block for block in python if not block.file])
    if program.strip():
        script = place.directory / f"{page.name}.py"
        script.write_text(place.here(program))
        code, printed = place.run(["python", script.name])
        assert code == 0, f"{page.relative_to(ROOT)} (its lines are the program's):\n{printed}"


def install(block: Block, place: Place) -> None:
    """As ``pip install`` of the page's distribution would: what is run in the directory finds its entry points."""
    info = place.directory / "page-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: page\nVersion: 1.0\n")
    with (info / "entry_points.txt").open("a") as file:
        for group, entries in entry_points_in(block).items():
            file.write(f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items()))


def check_command(block: Block, command: str, shown: list[str], place: Place) -> None:
    """What is shown is what is printed. ``Killed`` is the shell's word for a death by SIGKILL."""
    killed = "Killed" in shown
    code, printed = place.run(shlex.split(command))
    assert code == (-signal.SIGKILL if killed else 0), f"{block.where}: $ {command}\n{printed}"
    expected = [line for line in shown if line != "Killed"]
    if command.startswith("torchrun"):  # all ranks print at a time
        assert all(line in printed for line in expected), f"{block.where}: $ {command}\n{printed}"
    elif expected or shlex.split(command)[0] == "diff":
        assert printed.splitlines() == expected, f"{block.where}: $ {command}"
