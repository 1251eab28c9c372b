"""What the kits say of large contents that are not alike: one line, at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiercheck.testing.contents import difference, names_that_differ

NBYTES = 1 << 20


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_alike(kind: type) -> None:
    assert difference(kind(b"abc"), b"abc") == ""
    assert difference(kind(b""), b"") == ""
    assert difference(None, None) == ""


@pytest.mark.parametrize(
    ("found", "expected", "said"),
    [
        (b"abd", b"abc", "1 of 3 bytes differ, from byte 2: 100, and not 99"),
        (b"xbd", b"abc", "2 of 3 bytes differ, from byte 0: 120, and not 97"),
        (b"ab", b"abc", "2 bytes, and not 3"),
        (b"axcd", b"abc", "4 bytes, and not 3; 1 of 3 bytes differ, from byte 1: 120, and not 98"),
        (b"", b"abc", "0 bytes, and not 3"),
        (None, b"abc", "nothing, and not 3 bytes"),
        (b"", None, "0 bytes, and not nothing"),
    ],
)
def test_what_differs(found: bytes | None, expected: bytes | None, said: str) -> None:
    assert difference(found, expected) == said


def test_names() -> None:
    nan = float("nan")
    assert names_that_differ({"a": 1, "b": nan}, {"b": nan, "a": 1}) == []
    assert names_that_differ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "d": 3}) == ["b", "c", "d"]


def test_a_driver_that_damages_a_megabyte_fails_at_once_in_ci(tmp_path: Path) -> None:
    """By pytest's own comparison, which CI is shown in full, each of these tests would take hours."""
    (tmp_path / "test_damage.py").write_text(
        "import pytest\n"
        "from tiercheck.streams.codecs.exact import Exact\n"
        "from tiercheck.testing.codecs import CodecTests\n"
        "encode = Exact.encode\n"
        "@pytest.fixture(autouse=True)\n"
        "def damage(monkeypatch):\n"
        "    lossy = lambda self, array, dtype, **named: encode(self, array * 0, dtype, **named)\n"
        "    monkeypatch.setattr(Exact, 'encode', lossy)\n"
        "class TestExact(CodecTests):\n"
        "    text = 'exact'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "60", "test_damage.py"]
    run = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"CI": "true"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 1, run.stdout
    assert "FAILED test_damage.py::TestExact::test_large_tensors_come_back" in run.stdout
    assert "bytes differ, from byte" in run.stdout
    assert "Timeout" not in run.stdout
