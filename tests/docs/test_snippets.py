"""The documentation cannot rot: every code block of every page is checked against what it speaks of, or is run
(``tests/cluster/test_pages.py``).

A block's language says how.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import metadata
from pathlib import Path

import pytest
import typer
from rich.console import Console

from tests.unit.demo.results.test_report import compared, runs
from tiercheck import keys
from tiercheck.cli import commands
from tiercheck.demo.results.report import render
from tiercheck.integrations.deepspeed import read_block

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^(?P<fence>`{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)[ ]*$", re.DOTALL | re.MULTILINE)
SETUP = re.compile(r"^<!-- setup:\n(?P<text>.*?)^-->$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# file: (\S+)\n")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
RUN = ("python", "pytest", "diff", "torchrun")


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
