"""The kernels' benchmark: every figure runs, says what it must, and notices a kernel that is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.ceilings.read import KERNELS, Read, parity, total, total_of_quarters
from benchmarks.figures import Unavailable
from benchmarks.kernels import compaction as compaction_figures
from benchmarks.kernels.compaction import Compaction
from benchmarks.kernels.device import cupy_with_device
from benchmarks.kernels.encode import pairs_of
from benchmarks.kernels.figures import FIGURES
from benchmarks.kernels.gradients import RATIO, SPARSE_STEPS, harvest, repeated, repeated_sparse, shuffled
from benchmarks.kernels.replay import closely, exactly
from benchmarks.kernels.settings import KernelSettings
from benchmarks.pairs import Pair, summarise_times
from benchmarks.report import ratio_text, rounded
from benchmarks.training import SetUp
from tiercheck import kernels
from tiercheck.demo.training.progress import RankProgress, Step
from tiercheck.streams.codecs import codec_names

TINY = SetUp(width=32, layers=1, heads=2, seed=3, sequence=32, micro_batch=1)

WANTED = {
    *("compaction/read_ceiling", "compaction.shuffled/read_ceiling", "compaction/torch_topk"),
    *("int8/read_ceiling", "nf4/read_ceiling", "onebit/read_ceiling"),
    *(f"replay.dense.n{steps}/torch_fused" for steps in (1, 2, 5, 10, 50)),
    *("replay.dense.n10/foreach", "replay.sparse.exact/torch_fused_scatter"),
    *(f"replay.sparse.closed_form.n{steps}/torch_fused_scatter" for steps in (10, 50)),
    *(f"encode.{family}.{name}/step" for family in ("total", "one_process") for name in codec_names()),
    *("encode.total.snapshot/step", "encode.total.snapshot+nf4/step"),
}


@pytest.fixture
def tiny() -> KernelSettings:
    """Sizes of which the times mean nothing: what is measured is whether it runs."""
    return KernelSettings(elements=1 << 17, replay_elements=20_000, pairs=5, threads=1, setup=TINY, encode_steps=3)


def test_every_figure_of_the_design_is_there() -> None:
    names = [figure.name for figure in FIGURES]
    assert len(set(names)) == len(names)
    assert set(names) >= WANTED


def measured_here(name: str) -> bool:
    """On a CPU; of the figures that differ in one number or in the codec alone, one or two."""
    if name.startswith("encode.one_process."):
        return name in ("encode.one_process.exact+entropy/step", "encode.one_process.sparse+feedback/step")
    return not name.startswith(("gpu.", "encode.total.", "replay.dense.n2/", "replay.dense.n5/"))


CPU_FIGURES = [figure for figure in FIGURES if measured_here(figure.name)]

DEMO_FIGURES = {figure.name: figure for figure in FIGURES if figure.name.startswith("encode.total.")}


@pytest.mark.parametrize("figure", CPU_FIGURES, ids=[figure.name for figure in CPU_FIGURES])
async def test_every_figure_runs(figure: Any, tiny: KernelSettings) -> None:
    """The checks of the results that are in the figures are made for each of them."""
    measured = await figure.measure(tiny)
    assert measured.summary.value > 0
    assert measured.summary.ceiling > 0
    assert measured.summary.ratio > 0
    assert measured.details["threads"] == 1
    assert measured.nbytes > 0


async def test_a_figure_of_the_demo_has_the_demos_threads(tiny: KernelSettings) -> None:
    with pytest.raises(Unavailable, match="one thread"):
        await DEMO_FIGURES["encode.total.exact/step"].measure(replace(tiny, threads=2))


def test_a_step_of_the_demo_is_compared_without_what_it_stood_still() -> None:
    steps = [Step(1, "0x0p0", 2.0, 0.5), Step(2, "0x0p0", 1.25, 0.75), Step(3, "0x0p0", 2.5, 1.25)]
    assert pairs_of(RankProgress(steps=steps)) == [Pair(0.25, 1.0), Pair(0.5, 2.0)]


async def test_figures_take_several_threads(tiny: KernelSettings) -> None:
    for figure in FIGURES:
        if figure.name in ("compaction/read_ceiling", "int8/read_ceiling", "replay.dense.n2/torch_fused"):
            measured = await figure.measure(replace(tiny, threads=2, replay_elements=1 << 17))
            assert measured.details["threads"] == 2


def test_a_line_has_what_the_design_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--quick", "--json", "--only", "compaction.matrix,replay.dense.n1"]) == 0
    machine, *lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert machine["figure"] == "machine"
    assert [line["figure"] for line in lines] == ["compaction.matrix/read_ceiling", "replay.dense.n1/torch_fused"]
    for line in lines:
        assert {"figure", "value", "ceiling", "ratio", "threads", "device"} <= line.keys()
    assert lines[0]["goal"] == ">= 0.65"
    assert lines[1]["differing"] == 0


def test_the_list_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [item.name for item in FIGURES]


@pytest.mark.parametrize(
    "arguments",
    [["kernels", "--threads", "0"], ["kernels", "--threads", "1,4096"], ["kernels", "--elements", "12"]],
)
def test_wrong_usage_is_told_and_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_an_unknown_figure_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--only", "int9"]) == 2
    assert "int8/read_ceiling" in capsys.readouterr().err


def test_without_a_gpu_its_figures_are_skipped_and_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        cupy_with_device()
    except Exception as error:
        reason = str(error)
    else:
        pytest.skip("there is a GPU here")
    assert main(["kernels", "--quick", "--json", "--only", "gpu"]) == 0
    _, *lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines
    assert all(line["skipped"] == reason for line in lines)


# The gradients.


def test_gradients_are_the_same_every_time_and_of_different_steps() -> None:
    found = harvest(TINY)
    harvest.cache_clear()
    again = harvest(TINY)
    assert all(np.array_equal(a, b) for a, b in zip(found.dense, again.dense, strict=True))
    assert not np.array_equal(found.dense[0], found.dense[-1])
    assert found.gradient.size == TINY.parameters
    assert len(found.sparse) == SPARSE_STEPS
    indices, values = found.sparse[-1]
    assert np.all(np.diff(indices.astype(np.int64)) > 0)
    assert np.array_equal(found.gradient[indices], values)
    assert RATIO / 2 < values.size / TINY.parameters < 4 * RATIO, "small tensors keep one element at least"


def test_repeated_gradients_are_repeated_and_shuffled_ones_have_the_same_elements() -> None:
    gradient = harvest(TINY).gradient
    size = 2 * gradient.size + 17
    twice = repeated(gradient, size)
    assert np.array_equal(twice[: gradient.size], gradient)
    assert np.array_equal(twice[gradient.size : 2 * gradient.size], gradient)
    assert np.array_equal(twice[2 * gradient.size :], gradient[:17])
    assert not np.array_equal(shuffled(gradient), gradient)
    assert np.array_equal(np.sort(shuffled(gradient)), np.sort(gradient))
    sparse = np.flatnonzero(gradient).astype(np.uint32), gradient[gradient != 0]
    indices, values = repeated_sparse(sparse, gradient.size, size)
    dense = np.zeros(size, np.float32)
    dense[indices] = values
    assert np.array_equal(dense, twice)


# The ceilings, and the checks.


@pytest.mark.parametrize(("size", "threads"), [(1, 1), (1000, 2), ((1 << 18) + 3, 1), ((1 << 18) + 3, 2)])
def test_a_read_reads_everything(size: int, threads: int) -> None:
    values = np.ones(size, np.float32)
    assert total(values) == total_of_quarters(values) == size
    assert parity(values) == (0x3F800000 if size % 2 else 0)
    read = Read(values, threads)
    seen: list[int] = []
    read.kernel = lambda piece: seen.append(piece.size)
    read()
    assert sum(seen) == size
    assert len(seen) == (threads if size > 1 << 17 else 1)
    read.calibrate()
    assert KERNELS[read.shape] is read.kernel


def test_a_compaction_that_loses_an_element_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    values = harvest(TINY).gradient
    right = kernels.compact_into

    def wrong(values: Any, threshold: float, indices: Any, survivors: Any, **more: Any) -> int:
        count = right(values, threshold, indices, survivors, **more)
        indices[count // 2] += 1
        return count

    assert Compaction.of(values, 1).check() > 0
    monkeypatch.setattr(compaction_figures.kernels, "compact_into", wrong)
    with pytest.raises(RuntimeError, match="other elements"):
        Compaction.of(values, 1).check()


def test_a_replay_that_is_off_is_no_figure() -> None:
    start = tuple(np.zeros(100, np.float32) for _ in range(3))
    true = tuple(np.ones(100, np.float32) for _ in range(3))
    off = tuple(each.copy() for each in true)
    off[1][7] = np.nextafter(np.float32(1), np.float32(2))
    assert exactly(true, true, start) == {"differing": 0}
    with pytest.raises(RuntimeError, match="1 values differ"):
        exactly(off, true, start)
    assert closely(off, true, start)["deviation"] == 0, "the closed form is judged by its parameters"
    off[0][:] = 1.0001
    with pytest.raises(RuntimeError, match="away"):
        closely(off, true, start)


def test_a_share_is_of_the_step_without_the_differential() -> None:
    found = summarise_times([Pair(0.01, 1.0), Pair(0.02, 1.0), Pair(0.03, 1.0)])
    assert found.ratio == 0.02
    assert found.value == 0.02
    assert found.ceiling == 1.0


def test_small_numbers_keep_their_digits() -> None:
    assert rounded(0.000123456) == 0.0001235
    assert rounded(2.345678) == 2.3457
    assert rounded(123456.7) == 123457
    assert ratio_text(0.0123) == "0.0123"
    assert ratio_text(12.341) == "12.34"


def test_a_gpu_that_is_asked_for_and_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        cupy_with_device()
    except Unavailable:
        pass
    else:
        pytest.skip("there is a GPU")
    assert main(["kernels", "--quick", "--device", "cuda"]) == 2
    printed = capsys.readouterr()
    assert "error: --device cuda measures on a GPU, and " in printed.err
    assert "/copy" not in printed.out
