"""The stall of many small tensors, on a small scale."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.overhead.command import summary_of
from benchmarks.pairs import Pair


def test_a_ratio_is_that_of_each_pair() -> None:
    found = summary_of([Pair(2.0, 1.0), Pair(6.0, 2.0), Pair(4.0, 1.0), Pair(3.0, 1.0), Pair(3.0, 1.0)])
    assert (found.value, found.ceiling, found.ratio, found.pairs) == (3.0, 1.0, 3.0, 5)


def test_each_number_of_tensors_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overhead", "--json", "--elements", "400", "--tensors", "20", "--pairs", "5"]) == 0
    machine, line = map(json.loads, capsys.readouterr().out.splitlines())
    assert machine["figure"] == "machine"
    assert (line["figure"], line["tensors"], line["bytes"], line["goal"]) == ("stall.tensors.20/10", 20, 1600, "<= 3")
    assert line["value"] > 0
