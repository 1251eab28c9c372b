"""From a text to a codec: by its entry point, with options, and not a module more than was named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.encoding import APPROXIMATE, EXACT, FEEDBACK, as_stored, encode, gradient
from tiercheck.errors import ConfigurationError, Corruption
from tiercheck.streams.codecs import Encoding, codec, codec_names, decode, fidelity_of, registered
from tiercheck.streams.codecs.registry import TEXT_CHARS_MAX
from tiercheck.streams.codecs.sparse import Sparse
from tiercheck.types import Fidelity

MINE = """
from dataclasses import dataclass
from tiercheck.streams.codecs.exact import Exact

@dataclass(frozen=True)
class Mine(Exact):
    name = "mine"
    level: int = 3
    def __post_init__(self):
        if self.level > 9:
            raise ValueError(f"level must be at most 9, not {self.level}")

@dataclass(frozen=True)
class Another(Exact):
    name = "another"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A distribution with a codec, beside this one."""
    (tmp_path / "codec_of_mine.py").write_text(MINE)
    register(tmp_path, "mine", mine="codec_of_mine:Mine", misnamed="codec_of_mine:Another", gone="codec_of_mine:Gone")
    monkeypatch.syspath_prepend(str(tmp_path))
    codec.cache_clear()
    yield tmp_path
    codec.cache_clear()


def register(folder: Path, distribution: str, group: str = "tiercheck.codecs", **entries: str) -> None:
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


class TestNames:
    def test_the_built_in_ones_come_through_the_door(self) -> None:
        lossy = ["adaptive", "int8", "nf4", "onebit", "sparse"]
        assert EXACT == ["exact", "exact+entropy", "nonzero"]
        assert lossy == APPROXIMATE
        assert [f"{name}+feedback" for name in lossy] == FEEDBACK
        assert {name for name, provider in registered().items() if provider == "tiercheck"} == {*EXACT, *APPROXIMATE}
        assert codec_names() == [*EXACT, *APPROXIMATE, *FEEDBACK]

    def test_an_unknown_one_lists_what_there_is_and_says_what_to_install(self) -> None:
        with pytest.raises(ConfigurationError, match=r"no codec 'zip' \(installed are: adaptive, exact, exact"):
            codec("zip")
        with pytest.raises(ConfigurationError, match="an entry point 'zip' in the group"):
            codec("zip+feedback")

    @pytest.mark.parametrize(("typed", "meant"), [("nf5", "nf4"), ("int-8", "int8"), ("spars+feedback", "sparse")])
    def test_a_near_miss_is_told(self, typed: str, meant: str) -> None:
        with pytest.raises(ConfigurationError, match=f"did you mean '{meant}'"):
            codec(typed)

    def test_a_name_alone_imports_no_other_codec(self) -> None:
        script = (
            "import sys; from tiercheck.streams.codecs import codec, registered; codec('exact'); registered(); "
            "print(*sorted(name for name in sys.modules if name.startswith('tiercheck.streams.codecs.')))"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
        loaded = {name.rpartition(".")[2] for name in done.stdout.split()}
        assert loaded == {"checks", "encoding", "exact", "feedback", "registry"}


class TestOptions:
    def test_they_make_the_codec(self) -> None:
        assert codec("sparse?ratio=0.001") == Sparse(ratio=0.001) != codec("sparse")
        assert codec("sparse?ratio=0.01") == codec("sparse")
        assert [codec(text).text for text in ("sparse", "sparse?ratio=0.01", "sparse?ratio=1e-3")] == [
            "sparse",
            "sparse",
            "sparse?ratio=0.001",
        ]
        assert codec("sparse+feedback?ratio=0.5").text == "sparse+feedback?ratio=0.5"

    def test_they_are_obeyed_and_told_and_needed_to_decode(self) -> None:
        array = gradient(10_000)
        encoding, parts = encode("sparse+feedback?ratio=0.1", array, "F32")
        assert encoding.codec == "sparse?ratio=0.1"
        kept = np.count_nonzero(decode(as_stored(encoding), parts))
        assert 900 < kept < 1250
        with pytest.raises(Corruption, match="not of a tensor"):
            decode({**encoding.to_object(), "codec": "sparse"}, parts)
        assert encode("adaptive?small_elements=10&ratio=0.1", array, "F32")[0].codec == "sparse?ratio=0.1"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("sparse?rate=0.1", "does not know the option 'rate'; it knows: ratio"),
            ("exact?level=3", "does not know the option 'level'; it knows: none"),
            ("sparse?ratio=2", "ratio must be above 0 and at most 1, not 2"),
            ("sparse?ratio=nan", "ratio must be above 0 and at most 1, not nan"),
            ("sparse?ratio=much", "cannot be made"),
            ("adaptive?small_elements=1.5", "cannot be made"),
            ("adaptive?ratio=0", "ratio must be"),
            ("sparse?ratio", "must look like"),
            ("sparse?ratio=0.1&ratio=0.2", "names an option twice"),
            ("nonzero+feedback", "'nonzero' has no error feedback"),
            ("?ratio=1", "must look like"),
            ("sparse?ratio=0." + "0" * TEXT_CHARS_MAX + "1", "characters; at most 128 are allowed"),
        ],
    )
    def test_what_is_wrong_with_one_is_told(self, text: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            codec(text)

    def test_a_shard_that_names_options_nobody_knows_is_no_corruption(self) -> None:
        encoding, parts = encode("sparse", gradient(300), "F32")
        description = {**encoding.to_object(), "codec": "sparse?shape=round", "trained_on": True}
        with pytest.raises(ConfigurationError, match=r"encoded by 'sparse\?shape=round'.*it knows: ratio"):
            decode(description, parts)
        assert fidelity_of(description) is Fidelity.APPROXIMATE


@pytest.mark.usefixtures("installed")
class TestFromOutside:
    def test_a_codec_of_another_distribution_is_found_and_takes_options(self) -> None:
        assert registered()["mine"] == "mine"
        assert "mine" in codec_names(Fidelity.EXACT)
        array = gradient(100)
        encoding, parts = encode("mine?level=5", array, "F32")
        assert encoding.codec == "mine?level=5"
        assert decode(as_stored(encoding), parts).tobytes() == array.tobytes()
        with pytest.raises(ConfigurationError, match="level must be at most 9, not 10"):
            codec("mine?level=10")

    def test_one_that_is_gone_is_one_clear_error_at_recovery(self, monkeypatch: pytest.MonkeyPatch) -> None:
        encoding, parts = encode("mine", gradient(100), "F32")
        codec.cache_clear()
        monkeypatch.setattr(sys, "path", [each for each in sys.path if not Path(each, "codec_of_mine.py").exists()])
        with pytest.raises(ConfigurationError, match=r"encoded by 'mine'.*an entry point 'mine' in the group"):
            decode(as_stored(encoding), parts)

    def test_an_entry_point_that_leads_nowhere_or_elsewhere(self) -> None:
        with pytest.raises(ConfigurationError, match="there is no such object"):
            codec("gone")
        with pytest.raises(ConfigurationError, match=r"'misnamed'.*is no Codec of that name"):
            codec("misnamed")
        assert "gone" not in codec_names(), "a broken one takes none of the others away"

    def test_two_of_one_name_are_refused_by_the_names_of_both(self, installed: Path) -> None:
        register(installed, "theirs", mine="codec_of_mine:Another")
        with pytest.raises(ConfigurationError, match=r"registered more than once: by mine .* and theirs"):
            codec("mine")


class TestDescription:
    def test_trained_on_is_there_only_where_it_is_true(self) -> None:
        """What was written before there was such a thing is read as ever."""
        encoding, _ = encode("int8", gradient(5), "F32")
        assert "trained_on" not in encoding.to_object()
        assert Encoding.from_object(as_stored(encoding)) == encoding
        trained_on = replace(encoding, trained_on=True)
        assert Encoding.from_object(as_stored(trained_on)) == trained_on != encoding

    @pytest.mark.parametrize("value", [1, None, "yes"])
    def test_trained_on_is_true_or_false(self, value: object) -> None:
        encoding, _ = encode("int8", gradient(5), "F32")
        with pytest.raises(Corruption, match="trained_on"):
            Encoding.from_object({**encoding.to_object(), "trained_on": value})
