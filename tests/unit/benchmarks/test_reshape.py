"""What the benchmark of resuming on other ranks concludes from what the ranks say."""

from __future__ import annotations

import json

import pytest

from benchmarks.report import JsonReport
from benchmarks.reshape.command import report_lines

SECONDS = {"tiercheck": 2.0, "dcp": 8.0, "reading": 1.0}
PEAKS = {"tiercheck": 150, "dcp": 300, "reading": 10}


def test_each_pair_is_compared_and_the_median_counts(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"pair": pair, "way": way, "seconds": SECONDS[way] * slow, "peak": PEAKS[way]}
        for pair, slow in enumerate((1, 3, 1, 1, 2), start=1)
        for way in SECONDS
    ]
    lines[0]["seconds"] = 1000.0  # one of ours was disturbed
    report_lines(JsonReport(), lines, 10**9, "a disk")
    _, *figures = map(json.loads, capsys.readouterr().out.splitlines())
    by_name = {line["figure"]: line for line in figures}
    assert {name: line["ratio"] for name, line in by_name.items()} == {
        "reshape.resume/dcp": 4.0,
        "reshape.resume/reading": 0.5,
        "reshape.peak/dcp": 0.5,
    }
    assert by_name["reshape.resume/dcp"]["met"] and by_name["reshape.peak/dcp"]["met"]
    assert by_name["reshape.resume/dcp"]["dcp_s"] == 8.0
    assert by_name["reshape.peak/dcp"]["value"] == 150
