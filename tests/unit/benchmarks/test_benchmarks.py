"""The benchmarks' harness: what it reports is what was measured, and what cannot be measured is said."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.__main__ import main
from benchmarks.ceilings.buffers import empty_buffer, filled_buffer
from benchmarks.ceilings.child import Child
from benchmarks.ceilings.direct import DirectFile, Shape
from benchmarks.ceilings.memcpy import Memcpy
from benchmarks.ceilings.tcp import PIECES, TcpStream
from benchmarks.figures import Figure, Measured, Settings, Unavailable
from benchmarks.measure import chosen_figures, run_figures
from benchmarks.pairs import Pair, Summary, interleave, summarise, summarise_times
from benchmarks.report import JsonReport, TableReport
from benchmarks.tiers import FIGURES
from benchmarks.tiers.peak import budget_bytes, own_bytes, watch_put
from tiercheck.errors import ConfigurationError

ODD_NBYTES = (1 << 20) + 12_345

# Pairs.


async def measured_in_turns(pairs: int, warmups: int) -> str:
    order: list[str] = []

    def side(name: str):  # type: ignore[no-untyped-def]
        async def repetition() -> float:
            order.append(name)
            return 1.0

        return repetition

    found = await interleave(side("A"), side("B"), pairs=pairs, warmups=warmups)
    assert len(found) == pairs
    return "".join(order)


async def test_sides_take_turns_in_being_first() -> None:
    assert await measured_in_turns(6, 1) == "AB" + "ABBA" * 3


async def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 5"):
        await measured_in_turns(4, 0)


def test_the_ratio_is_that_of_pairs_and_not_of_medians() -> None:
    pairs = [Pair(1, 1), Pair(2, 2), Pair(10, 5), Pair(4, 4), Pair(3, 3)]
    found = summarise(pairs, 600)
    assert found == Summary(value=200, ceiling=200, ratio=1, spread=(1, 1), pairs=5)
    slow = summarise([Pair(pair.ceiling_s * 4, pair.ceiling_s) for pair in pairs], 600)
    assert slow.ratio == 0.25


def test_of_times_the_ratio_says_how_many_times_as_long_the_subject_took() -> None:
    pairs = [Pair(2.0, 1.0), Pair(6.0, 2.0), Pair(4.0, 1.0), Pair(3.0, 1.0), Pair(3.0, 1.0)]
    assert summarise_times(pairs) == Summary(value=3, ceiling=1, ratio=3, spread=(3, 3), pairs=5)


@given(
    ratio=st.floats(0.01, 100),
    drift=st.lists(st.floats(1e-6, 1e3), min_size=5, max_size=30),
)
def test_a_machine_that_slows_down_changes_no_ratio(ratio: float, drift: list[float]) -> None:
    found = summarise([Pair(factor / ratio, factor) for factor in drift], 1000)
    assert found.ratio == pytest.approx(ratio)
    assert found.spread == pytest.approx((ratio, ratio))


# The command.


def a_figure(name: str, result: Measured | Exception, goal: float | None = 0.9, *, at_most: bool = False) -> Figure:
    async def measure(settings: Settings) -> Measured:
        if isinstance(result, Exception):
            raise result
        return result

    return Figure(name, "a figure of the test's", measure, goal, at_most)


def some(ratio: float, unit: str = "bytes/s") -> Measured:
    summary = Summary(2e9, 2e9 / ratio, ratio, (ratio * 0.9, ratio * 1.1), 5)
    return Measured(summary, unit, "a device", 1000, {"threads": 2})


def missing_extra() -> ConfigurationError:
    error = ConfigurationError("the driver cannot be loaded")
    error.__cause__ = ImportError("no zmq")
    return error


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(size_bytes=1 << 20, peak_bytes=1 << 20, pairs=5, directory=tmp_path)


def test_what_cannot_be_measured_is_skipped_and_what_fails_fails(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [
        a_figure("a.put/b", some(0.95)),
        a_figure("a.get/b", some(0.5)),
        a_figure("a.peak_bytes", some(0.5, "bytes"), 1, at_most=True),
        a_figure("a.free/b", some(7), None),
        a_figure("c.put/d", Unavailable("weed is not installed")),
        a_figure("e.put/f", missing_extra()),
    ]
    assert run_figures(good, settings, JsonReport()) == 0
    machine, *lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert machine["figure"] == "machine"
    assert {"cpu", "memory_bytes", "kernel", "python"} <= machine.keys()
    assert [line.get("met") for line in lines] == [True, False, True, None, None, None]
    assert lines[0] == {
        "figure": "a.put/b",
        "value": 2_000_000_000,
        "ceiling": 2_105_263_158,
        "ratio": 0.95,
        "unit": "bytes/s",
        "spread": [0.855, 1.045],
        "pairs": 5,
        "bytes": 1000,
        "device": "a device",
        "goal": ">= 0.9",
        "met": True,
        "threads": 2,
    }
    assert lines[2]["goal"] == "<= 1"
    assert lines[4] == {"figure": "c.put/d", "skipped": "weed is not installed"}
    assert lines[5]["skipped"] == "the driver cannot be loaded"


@pytest.mark.parametrize("error", [RuntimeError("broken"), ConfigurationError("wrong"), ConnectionError("reset")])
def test_a_failure_is_a_failure_and_the_rest_is_measured(
    settings: Settings, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    assert run_figures([a_figure("x/y", error), a_figure("z/y", some(1))], settings, JsonReport()) == 1
    _, first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first == {"figure": "x/y", "failed": f"{type(error).__name__}: {error}"}
    assert second["ratio"] == 1


def test_the_table_shows_every_figure(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    figures = [
        a_figure("a.put/b", some(0.95)),
        a_figure("c.put/d", Unavailable("no [weed]")),
        a_figure("a.peak_bytes", some(0.5, "bytes"), 1, at_most=True),
        a_figure("x/y", RuntimeError("broken")),
    ]
    assert run_figures(figures, settings, TableReport()) == 1
    shown = capsys.readouterr().out
    for text in (
        "a.put/b",
        "2.00 GB/s",
        "0.95",
        "c.put/d skipped: no [weed]",
        "x/y failed: RuntimeError: broken",
        "1.9 GiB",
    ):
        assert text in " ".join(shown.split()), shown


def test_figures_are_chosen_by_pattern() -> None:
    def names(only: str) -> list[str]:
        return [figure.name for figure in chosen_figures(FIGURES, only)]

    assert names("shm.put/*") == ["shm.put/memcpy"]
    assert names("s3") == ["s3.put/raw_client", "s3.get/raw_client", "s3.peak_bytes"]
    assert names("peer.*curve, nvme.put*") == ["nvme.put/raw_direct", "peer.put/raw_curve", "peer.get/raw_curve"]
    assert names("nothing") == []
    assert names("*") == [figure.name for figure in FIGURES]
    assert len(set(names("*"))) == len(FIGURES)


@pytest.mark.parametrize(
    "arguments", [["tiers", "--pairs", "3"], ["tiers", "--size", "1kB"], ["soak", "--minutes", "0"], ["nothing"], []]
)
def test_wrong_usage_is_told_and_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["tiers", "--only", "smh"], ["soak", "--only", "smh"]])
def test_an_unknown_name_is_told_with_those_there_are(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert "smh" in told
    assert "shm" in told


def test_the_list_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiers", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [item.name for item in FIGURES]


def test_a_real_figure_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tiers", "--size", "16MiB", "--pairs", "5", "--json", "--only", "shm.*et*/memcpy"]
    arguments += ["--directory", str(tmp_path)]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    _, *lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [line["figure"] for line in lines] == ["shm.get/memcpy", "shm.get_touched/memcpy", "shm.get_into/memcpy"]
    mapped, touched, copied = lines
    assert mapped["ratio"] > touched["ratio"] > 0, "a mapping is faster than to look at each of its pages"
    assert copied["ratio"] > 0
    assert "[1/3] shm.get/memcpy" in captured.err
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


# The ceilings move the bytes they say.


@pytest.mark.parametrize(("nbytes", "threads"), [(1, 3), (4097, 1), (ODD_NBYTES, 1), (ODD_NBYTES, 3)])
async def test_memcpy_copies_every_byte(nbytes: int, threads: int) -> None:
    source, targets = filled_buffer(nbytes), [empty_buffer(nbytes), empty_buffer(nbytes)]
    with Memcpy(source, targets, threads) as copy:
        for target in targets:
            assert await copy() > 0
            assert bytes(target) == bytes(source)


async def test_the_tcp_stream_brings_every_byte_there_and_back() -> None:
    source, into = filled_buffer(ODD_NBYTES), empty_buffer(ODD_NBYTES)
    async with TcpStream(source, into) as stream:
        await stream.calibrate(1)
        for piece_bytes in PIECES:
            into[:] = bytes(ODD_NBYTES)
            stream.piece_bytes = piece_bytes
            await stream.put()
            await stream.get()
            assert bytes(into) == bytes(source)


async def test_the_curve_stream_brings_every_byte_there_and_back() -> None:
    curve = pytest.importorskip("benchmarks.ceilings.curve", exc_type=ImportError)
    source, into = filled_buffer(ODD_NBYTES), empty_buffer(ODD_NBYTES)
    async with curve.CurveStream(source, into) as stream:
        await stream.calibrate(1)
        for connections in (1, 2):
            into[:] = bytes(ODD_NBYTES)
            stream.connections = connections
            await stream.put()
            await stream.get()
            assert bytes(into) == bytes(source)


@pytest.mark.parametrize("shape", [Shape(1 << 20, 1), Shape(1 << 20, 3, preallocate=True)])
async def test_direct_files_hold_every_byte(tmp_path: Path, shape: Shape) -> None:
    buffer = filled_buffer(3 << 20)
    content = bytes(buffer)
    raw = DirectFile(tmp_path, buffer)
    try:
        raw.check()
    except Unavailable as reason:
        pytest.skip(str(reason))
    raw.write_shape = raw.read_shape = shape
    assert await raw.write() > 0
    assert (tmp_path / "raw").read_bytes() == content
    buffer[:] = bytes(buffer.nbytes)
    assert await raw.read() > 0
    assert bytes(buffer) == content


# Peak memory.


def grown_by_a_put(url: str, nbytes: int) -> int:
    with Child("benchmarks.one_put", url, str(nbytes)) as child:
        assert child.ready == "ready"
        return watch_put(child, child.pid)


def test_memory_that_a_put_takes_is_seen(tmp_path: Path) -> None:
    nbytes = 96 << 20
    assert nbytes <= grown_by_a_put("memory://", nbytes) < nbytes * 2, "this driver keeps a copy, in its own memory"
    url = f"nvme://{tmp_path}/tier"
    assert grown_by_a_put(url, nbytes) < budget_bytes(url) < nbytes
    assert (tmp_path / "tier" / "large").stat().st_size == nbytes


def test_memory_counts_where_it_is_the_process_s_own(tmp_path: Path) -> None:
    nbytes = 32 << 20
    before = own_bytes(os.getpid())
    private = empty_buffer(nbytes)
    assert own_bytes(os.getpid()) >= before + nbytes * 0.95
    shared = mmap.mmap(-1, nbytes)  # as a bounce buffer is made
    shared[:] = bytes(private)
    both = own_bytes(os.getpid())
    assert both >= before + nbytes * 1.95
    path = tmp_path / "object"
    path.write_bytes(bytes(nbytes))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), nbytes) as mapped:
        assert sum(mapped[::4096]) == 0
        assert own_bytes(os.getpid()) < both + nbytes * 0.5, "an object that is mapped is the tier, not the process"
    shared.close()


def test_a_put_that_fails_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="CapacityExceeded"):
        grown_by_a_put("memory://?size=1MiB", 8 << 20)


def test_a_child_that_ends_instead_of_being_ready_is_told() -> None:
    with pytest.raises(RuntimeError, match="ended with code 1"), Child("benchmarks.one_put", "nothing://", "1"):
        pass
