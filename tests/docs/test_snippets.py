"""The documentation cannot rot: every code block of every page is run, or checked against what it speaks of.

A block's language says how. Of ``python`` blocks, those that begin with ``# file: NAME`` are written to NAME in a fresh
directory; the page's commands run there; then all other ``python`` blocks of the page run in order as one program.
``<!-- setup: ... -->`` holds code that this program needs and a reader does not.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import metadata
from pathlib import Path

import pytest
import typer
from rich.console import Console

from tests.forks import Forks
from tests.unit.demo.results.test_report import compared, runs
from tiercheck import keys
from tiercheck.cli import commands
from tiercheck.demo.results.report import render
from tiercheck.integrations.deepspeed import read_block
from tiercheck.tiers.shm.namespaces import namespaces, remove_namespace

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
DEADLINE_S = 240
BLOCK = re.compile(r"^(?P<fence>`{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)[ ]*$", re.DOTALL | re.MULTILINE)
SETUP = re.compile(r"^<!-- setup:\n(?P<text>.*?)^-->$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# file: (\S+)\n")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
RUN = ("python", "pytest", "diff")
LONG = "many_pages or elsewhere or kill_9 or parts or ADictionary"
"""What takes longest of the kit for drivers. The whole kit runs for the same driver, whose page and distribution are
alike, in tests/plugins, and for nvme in tests/conformance."""
ENVIRONMENT = {"PYTEST_ADDOPTS": f"-k 'not ({LONG})'"}
TORCH = re.compile(r"^(import|from) (torch|tiercheck\.integrations)\b", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    """The first line of the text, counted from 1."""
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that the block is, if it is one."""
        match = FILE.match(self.text)
        return match[1] if match else None

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [(match, match["language"].strip()) for match in BLOCK.finditer(text)]
    found += [(match, "setup") for match in SETUP.finditer(text)]
    return sorted(
        (
            Block(page, text.count("\n", 0, match.start("text")) + 1, language, match["text"])
            for match, language in found
        ),
        key=lambda block: block.line,
    )


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of_language(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def commands_in(block: Block) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the output that is shown for it."""
    commands: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        else:
            assert commands, f"{block.where}: output before the first command"
            commands[-1][1].append(line)
    return commands


COMMANDS = [(block, command, shown) for block in of_language("console") for command, shown in commands_in(block)]

# Nothing goes unchecked.

CHECKED = ("python", "console", "json", "toml", "text", "", "setup")


def test_pages_are_found() -> None:
    assert ROOT / "README.md" in PAGES
    assert {block.language for block in BLOCKS} >= {"python", "console", "json", "toml", "setup"}


def test_no_unvalidated_blocks() -> None:
    assert not [block.where for block in BLOCKS if block.language not in CHECKED]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_fence_belongs_to_a_block(page: Path) -> None:
    """A block that the pattern does not see, indented or never closed, would go unchecked."""
    without = BLOCK.sub("", page.read_text(encoding="utf-8"))
    assert "```" not in without
    assert "~~~" not in without


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(BLOCK.sub("", page.read_text())) if "://" not in target]
    assert not [target for target in targets if not (page.parent / target).exists()]


# Python, and the commands that run it.


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
    if expected or shlex.split(command)[0] == "diff":
        assert printed.splitlines() == expected, f"{block.where}: $ {command}"


# Commands that are too long to run here: what they name exists.


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        variable, assigned, _ = word.partition("=")
        pattern = rf"^{variable} \?=" if assigned else rf"^{word}:.* ## "
        assert re.search(pattern, makefile, re.MULTILINE), f"the Makefile knows no {word!r}"


def check_tiercheck(words: list[str]) -> None:
    """Parses the words as the command line does, and calls nothing."""
    group = typer.main.get_command(commands.app)
    name, *rest = words
    command = group.commands[name]  # type: ignore[attr-defined]
    command.make_context(name, rest).close()


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    extras = set(metadata("tiercheck").get_all("Provides-Extra") or [])
    for requirement in words[1:]:
        match = re.fullmatch(r"(?:tiercheck|\.)(?:\[([a-z,]+)\])?", requirement)
        assert match, f"{requirement!r} is not ours to promise"
        assert set((match[1] or "").split(",")) - {""} <= extras


CHECKS: dict[str, Callable[[list[str]], None]] = {"make": check_make, "tiercheck": check_tiercheck, "pip": check_pip}


@pytest.mark.parametrize(
    ("block", "command"), [(block, command) for block, command, _ in COMMANDS], ids=lambda each: str(each)[:60]
)
def test_a_command_exists(block: Block, command: str) -> None:
    program, *words = shlex.split(command)
    if program in RUN:
        files = {each.file for each in BLOCKS if each.page == block.page}
        assert any(word in files for word in words) or program == "diff", f"{block.where}: no file of the page is run"
        assert block.page in {each.page for each in of_language("python")}, f"{block.where}: nothing runs this"
    else:
        assert program in CHECKS, f"{block.where}: nobody checks {program!r}"
        CHECKS[program](words)


@pytest.mark.parametrize("wrong", ["make demos", "make DEMO_ARG=1 demo", "tiercheck dmo", "tiercheck demo --zro 1"])
def test_a_wrong_command_is_noticed(wrong: str) -> None:
    program, *words = shlex.split(wrong)
    with pytest.raises(Exception, match=r"Makefile knows no|dmo|zro"):
        CHECKS[program](words)


# Data.


@pytest.mark.parametrize("block", of_language("json"), ids=lambda block: block.where)
def test_json_is_a_configuration(block: Block) -> None:
    hierarchy, _ = read_block(json.loads(block.text))
    assert hierarchy.open().tiers


@pytest.mark.parametrize("block", of_language("toml"), ids=lambda block: block.where)
def test_toml_registers_what_the_page_defines(block: Block) -> None:
    groups = entry_points_in(block)
    sources = {each.file: each.text for each in BLOCKS if each.page == block.page and each.file}
    assert groups
    for target in (target for entries in groups.values() for target in entries.values()):
        module, _, path = target.partition(":")
        owner, _, method = path.partition(".")
        assert f"class {owner}(" in sources[f"{module}.py"]
        assert not method or f"def {method}(" in sources[f"{module}.py"]


def entry_points_in(block: Block) -> dict[str, dict[str, str]]:
    """By group and name."""
    groups: dict[str, dict[str, str]] = tomllib.loads(block.text)["project"]["entry-points"]
    assert all(group.startswith("tiercheck.") for group in groups)
    return groups


@pytest.mark.parametrize("block", of_language("text", ""), ids=lambda block: block.where)
def test_plain_text_lists_object_keys(block: Block) -> None:
    """Each line begins with the key of an object as :mod:`tiercheck.keys` writes it."""
    found = [line.split()[0] for line in block.text.splitlines()]
    assert found
    assert [str(keys.parse(key)) for key in found] == found


# What is said of the demo.


def test_every_line_of_the_demo_is_explained() -> None:
    console = Console(width=300, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(render(compared(*runs())))
    printed = re.findall(r"^  (\S.*?)  ", console.export_text(), re.MULTILINE)
    page = (ROOT / "docs" / "how-to" / "run-the-demo.md").read_text()
    section = page.partition("## The report")[2].partition("## Figures")[0]
    assert re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE) == printed
