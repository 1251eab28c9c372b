"""The doctor's look at the GPU, by stand-ins: a device in Python, and a driver library in C."""

from __future__ import annotations

import json
import subprocess
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.servers.programs import need
from tiercheck.cli import tiers
from tiercheck.cli.commands import app
from tiercheck.diagnostics import gpu as gpus
from tiercheck.diagnostics.costs import costs_of
from tiercheck.diagnostics.doctor import Diagnosis
from tiercheck.diagnostics.fit import JobSize
from tiercheck.diagnostics.gpu import CudaGpu, Gpu, GpuDiagnosis, GpuError, examine_gpu
from tiercheck.diagnostics.measure import Point

DRIVER = """
#include <stdlib.h>
#include <string.h>
static int live;
int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 7; return getenv("FAKE_NO_DEVICE") ? 100 : 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "Fake 9000", length); return device != 7; }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
int cuDeviceTotalMem_v2(size_t *nbytes, int device) { *nbytes = 80ull << 30; return device != 7; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &live; live++; return device != 7; }
int cuDevicePrimaryCtxRelease_v2(int device) { live--; return device != 7; }
int cuCtxSetCurrent(void *context) { return context != &live; }
int cuMemAlloc_v2(unsigned long long *there, size_t nbytes) {
    *there = (unsigned long long)calloc(1, nbytes); live++; return 0;
}
int cuMemFree_v2(unsigned long long there) { free((void *)there); live--; return 0; }
int cuMemHostRegister_v2(void *here, size_t nbytes, unsigned flags) {
    if (getenv("FAKE_NO_PINNING")) return 2;
    memset(here, 1, nbytes); live++; return flags;
}
int cuMemHostUnregister(void *here) { live--; return !here; }
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t nbytes) { memcpy(to, (void *)from, nbytes); return 0; }
int cuGetErrorString(int code, const char **text) {
    *text = code == 100 ? "no CUDA-capable device is detected" : "out of memory"; return 0;
}
int alive(void) { return live; }
"""


class FakeGpu:
    name, driver, memory_nbytes = "Fake 9000", "13.2", 80 << 30

    def __init__(self, *, pins: bool = True) -> None:
        self.pins = pins

    def copy_s(self, nbytes: int, *, pinned: bool) -> float:
        if pinned and not self.pins:
            raise GpuError("cuMemHostRegister_v2: out of memory")
        return nbytes / (50e9 if pinned else 5e9)


def opened(gpu: Gpu) -> AbstractContextManager[Gpu]:
    return nullcontext(gpu)


def test_a_gpu_is_told_with_what_was_measured() -> None:
    found = examine_gpu(lambda: opened(FakeGpu()))
    assert (found.name, found.driver, found.memory_nbytes, found.obstacle) == ("Fake 9000", "13.2", 80 << 30, "")
    assert found.pinned_bytes_per_s == pytest.approx(50e9)
    assert found.pageable_bytes_per_s == pytest.approx(5e9)


def test_memory_that_cannot_be_pinned_is_told() -> None:
    found = examine_gpu(lambda: opened(FakeGpu(pins=False)))
    assert (found.pinned_bytes_per_s, found.pinning_obstacle) == (0, "cuMemHostRegister_v2: out of memory")
    assert costs_of(JobSize(1000), found, []) == []


def test_without_a_driver_one_line_says_so() -> None:
    found = examine_gpu(lambda: CudaGpu("libcuda-that-nobody-has.so.1"))
    assert found.obstacle.startswith("there is no CUDA driver (libcuda-that-nobody-has.so.1: ")
    assert "\n" not in found.obstacle


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(DRIVER)
    command = [str(need("gcc", package="gcc")), "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return library


class TestDriverLibrary:
    def test_it_is_asked_as_the_driver_api_says_and_everything_is_given_back(self, library: Path) -> None:
        with CudaGpu(str(library)) as gpu:
            assert (gpu.name, gpu.driver, gpu.memory_nbytes) == ("Fake 9000", "13.2", 80 << 30)
            assert all(gpu.copy_s(1 << 20, pinned=pinned) > 0 for pinned in (True, False))
        assert gpu._driver.alive() == 0

    def test_what_it_refuses_is_said(self, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpus, "COPY_NBYTES", 1 << 20)
        monkeypatch.setenv("FAKE_NO_PINNING", "1")
        found = examine_gpu(lambda: CudaGpu(str(library)))
        assert found.pageable_bytes_per_s > 0
        assert found.pinning_obstacle == "cuMemHostRegister_v2: out of memory"
        monkeypatch.setenv("FAKE_NO_DEVICE", "1")
        assert examine_gpu(lambda: CudaGpu(str(library))).obstacle == (
            "cuDeviceGet: no CUDA-capable device is detected"
        )
        assert CudaGpu.__init__.__defaults__ == ("libcuda.so.1",)


def test_what_a_version_costs() -> None:
    """A differential of 4 bytes a parameter, a base of 12; the ranks of a node share what was measured."""
    slow, fast = (Point("put", nbytes, 1, 1, 0.1, 0.1, rate, 1) for nbytes, rate in ((4096, 1e6), (32 << 20, 2e9)))
    tier = Diagnosis("nvme:///disk", points=(fast, slow))
    gpu = GpuDiagnosis(name="Fake", pinned_bytes_per_s=50e9)
    costs = costs_of(JobSize(1_000_000_000, ranks=2), gpu, [tier, Diagnosis("shm://run")])
    told = [(each.what, each.place, each.nbytes, each.seconds) for each in costs]
    assert told == [
        ("differential", "device", 4_000_000_000, pytest.approx(0.16)),
        ("base", "device", 12_000_000_000, pytest.approx(0.48)),
        ("differential", "nvme:///disk", 4_000_000_000, pytest.approx(4)),
        ("base", "nvme:///disk", 12_000_000_000, pytest.approx(12)),
    ]
    assert str(costs[0]).endswith("a rank takes 0.16 s from the device, at 46.6 GiB/s")


class TestCommand:
    def test_the_gpu_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = examine_gpu(lambda: opened(FakeGpu()))
        monkeypatch.setattr(tiers, "examine_gpu", lambda: found)
        shown = CliRunner().invoke(app, ["doctor", "--parameters", "1e9"])
        assert shown.exit_code == 0
        assert "Fake 9000" in shown.stdout and "driver for 13.2" in shown.stdout and "46.6 GiB/s" in shown.stdout
        assert "a differential of" in shown.stdout
        (told,) = json.loads(CliRunner().invoke(app, ["doctor", "--parameters", "1e9", "--json"]).stdout)
        assert told["device"]["name"] == "Fake 9000"
        assert [each["what"] for each in told["costs"]] == ["differential", "base"]

    def test_without_a_gpu_tiers_are_told_all_the_same(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tiers, "examine_gpu", lambda: GpuDiagnosis(obstacle="there is no CUDA driver"))
        url = f"nvme://{tmp_path}/tier"
        shown = CliRunner().invoke(app, ["doctor", url, "--measure-s", "1", "--parameters", "1e6"])
        assert "no GPU: there is no CUDA driver\n" in shown.stdout
        assert f"s into {url}" in shown.stdout.replace("\n", "")
        answer = CliRunner().invoke(app, ["doctor", url, "--measure-s", "0", "--json"])
        (told,) = json.loads(answer.stdout)
        assert (told["url"], told["device"]["obstacle"], told["costs"]) == (url, "there is no CUDA driver", [])
