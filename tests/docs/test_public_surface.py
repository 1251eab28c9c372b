"""The public names: they exist, are documented, and are the ones the type checker sees."""

import argparse
import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import tiercheck
from benchmarks.__main__ import parser

ROOT = Path(__file__).parents[2]
MODULES = (
    "tiercheck",
    "tiercheck.errors",
    "tiercheck.types",
    "tiercheck.hierarchy",
    "tiercheck.config",
    "tiercheck.tiers.driver",
    "tiercheck.tiers.registry",
    "tiercheck.integrations.torch",
    "tiercheck.integrations.deepspeed",
    "tiercheck.testing.conformance",
    "tiercheck.testing.stateful",
    "tiercheck.testing.faults",
    "tiercheck.recording.recorder",
    "tiercheck.recovery.restorer",
    "tiercheck.checkpointer",
    "tiercheck.policy.policies",
    "tiercheck.testing.policies",
    "tiercheck.testing.providers",
    "tiercheck.streams.tensors.provider",
)


def names_for_the_type_checker() -> dict[str, str]:
    """Each name imported under TYPE_CHECKING in tiercheck/__init__.py, and the module it comes from."""
    tree = ast.parse((ROOT / "tiercheck" / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def test_all_three_lists_of_names_agree() -> None:
    lazy = tiercheck._MODULES | {"errors": "tiercheck"}
    assert names_for_the_type_checker() == lazy
    assert set(tiercheck.__all__) == {*lazy, "__version__"}


@pytest.mark.parametrize("name", tiercheck.__all__)
def test_each_name_is_the_one_its_module_defines(name: str) -> None:
    value = getattr(tiercheck, name)
    if name in tiercheck._MODULES:
        assert value.__module__ == tiercheck._MODULES[name]
        assert value.__name__ == name
    assert name in dir(tiercheck)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Hierachy'"):
        _ = tiercheck.Hierachy
    with pytest.raises(ImportError, match="Hierachy"):
        exec("from tiercheck import Hierachy", {})


@pytest.mark.parametrize("module_name", MODULES)
def test_what_is_public_exists_and_says_what_it_is_for(module_name: str) -> None:
    module = importlib.import_module(module_name)
    assert module.__doc__
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{module_name}.{name} has no docstring"


@pytest.mark.parametrize("module_name", MODULES)
def test_public_methods_say_what_they_do(module_name: str) -> None:
    module = importlib.import_module(module_name)
    bare: list[str] = []
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) and value.__module__.startswith("tiercheck") and "testing" not in value.__module__:
            bare += [f"{name}.{method}" for method in undocumented_methods(value)]
    assert not bare


def undocumented_methods(owner: type) -> list[str]:
    """Public methods defined by ``owner`` that are documented neither there nor where they were first declared."""
    return [
        name
        for name, value in vars(owner).items()
        if inspect.isfunction(value) and not name.startswith("_") and not inspect.getdoc(getattr(owner, name))
    ]


def test_the_index_names_every_decision_by_its_title() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for path in sorted((ROOT / "docs" / "adr").glob("[0-9]*.md")):
        number, title = path.read_text().splitlines()[0].removeprefix("# ").split(". ", 1)
        assert f"{number}. [{title}](adr/{path.name})" in index
        assert path.read_text().splitlines()[2].startswith("**Status**: "), path.name


def test_the_index_leads_to_every_page() -> None:
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text()
    pages = {str(path.relative_to(docs)) for folder in ("", "how-to/") for path in docs.glob(f"{folder}*.md")}
    assert not [page for page in pages - {"index.md"} if f"({page})" not in index]


def test_the_page_on_benchmarks_names_every_command_and_its_options() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    intro, *parts = page.split("\n## ")
    commands = commands_of(parser())
    assert re.findall(r"^\| `python -m benchmarks (\w+)`", intro, re.MULTILINE) == list(commands)
    for name, command in commands.items():
        text = "".join(part for part in parts if f"`python -m benchmarks {name}" in part)
        if name == "kernels":  # its options are those of the tiers, and more
            text += next(part for part in parts if part.startswith("Tiers\n"))
        options = {each for action in command._actions for each in action.option_strings if each.startswith("--")}
        missing = [each for each in options - {"--help"} if not re.search(rf"{each}(?![-\w])", text)]
        assert not missing, f"the part on {name} lacks {missing}"


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (choosing,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return dict(choosing.choices)
