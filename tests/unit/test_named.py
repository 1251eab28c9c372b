"""Texts that name something, and entry points that are found by them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.errors import ConfigurationError
from tiercheck.named import NamedGroup, format_text, parse_text

GROUP = NamedGroup("tiercheck.tests", "thing")
MODULE = """
from dataclasses import dataclass
from enum import StrEnum

class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"

@dataclass(frozen=True)
class Thing:
    size: int
    share: float = 0.5
    name: str = ""
    quick: bool = False
    colour: Colour = Colour.RED

    def __post_init__(self):
        if self.size > 100:
            raise ValueError("too large")

@dataclass(frozen=True)
class Unnamed:
    pass

@dataclass(frozen=True)
class Holding:
    content: tuple = ()

def function():
    pass
"""
ENTRY_POINTS = """[tiercheck.tests]
broken = tiercheck_things:Nothing
function = tiercheck_things:function
holding = tiercheck_things:Holding
missing = tiercheck_no_such_module:Thing [extra]
thing = tiercheck_things:Thing
"""


@pytest.fixture(autouse=True, scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A distribution that was never built."""
    site = tmp_path_factory.mktemp("site")
    (site / "tiercheck_things.py").write_text(MODULE)
    install(site, "things", ENTRY_POINTS)
    sys.path.insert(0, str(site))
    yield site
    sys.path.remove(str(site))
    sys.modules.pop("tiercheck_things", None)


def install(site: Path, name: str, entry_points: str) -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


@given(
    st.from_regex(r"[a-z_]{1,12}", fullmatch=True),
    st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.text(st.characters(codec="utf-8"), max_size=9)),
)
def test_a_text_says_what_it_was_made_from(name: str, options: dict[str, str]) -> None:
    options = dict(list(options.items())[:8])
    assert parse_text(format_text(name, options)) == (name, options)


@pytest.mark.parametrize("text", ["", "?a=1", "two words", "name?a", "name?a=1&a=2", "name?a=%ff", "n" * 2000])
def test_what_is_no_such_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_text(text)


def test_options_become_fields_and_fields_options() -> None:
    made = GROUP.make("thing?size=7&share=0.25&name=a%26b&quick=true&colour=blue")
    assert (made.size, made.share, made.name, made.quick, made.colour) == (7, 0.25, "a&b", True, "blue")
    assert GROUP.text_of(made) == "thing?size=7&share=0.25&name=a%26b&quick=true&colour=blue"
    assert GROUP.text_of(GROUP.make("thing?size=7&share=0.5")) == "thing?size=7", "a default is not repeated"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thin?size=1", r"no thing 'thin' .*installed are: broken, function, .*did you mean 'thing'"),
        ("thing", "needs the option 'size', as in thing\\?size="),
        ("thing?size=1&weight=2", "does not know the option 'weight'; it knows: size, share, name, quick, colour"),
        ("thing?size=one", "'one' is no whole number"),
        ("thing?size=1&quick=yes", "neither true nor false"),
        ("thing?size=1&colour=green", "'green' is not a valid Colour"),
        ("thing?size=101", "too large"),
        ("holding?content=1", "cannot be given as a text"),
        ("broken", "registers 'tiercheck_things:Nothing' .*there is no such object"),
        ("missing", r"pip install 'things\[extra\]'"),
        ("function", "is no dataclass"),
    ],
)
def test_what_cannot_be_made_says_why_and_what_there_is(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GROUP.make(text)


def test_what_no_entry_point_names_says_what_to_register() -> None:
    GROUP.make("thing?size=1")
    things = sys.modules["tiercheck_things"]
    with pytest.raises(ConfigurationError, match=r'names the thing tiercheck_things:Unnamed: register it in .*"'):
        GROUP.text_of(things.Unnamed())
    with pytest.raises(ConfigurationError, match=r"the option 'content' of the thing 'holding' is .*no text says"):
        GROUP.text_of(things.Holding((1,)))


def test_a_name_of_two_distributions_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "others", "[tiercheck.tests]\nthing = elsewhere:Thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=r"others \(elsewhere:Thing\) and things \(tiercheck_things:Thing\)"):
        GROUP.make("thing?size=1")
