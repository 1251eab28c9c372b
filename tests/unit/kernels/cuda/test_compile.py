"""The CUDA sources compile for every architecture we name, without a GPU: no spills, no approximate arithmetic."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.resources import files
from typing import Any

import pytest

from tests.gpu.machine import need_cupy

need_cupy()

# What follows imports CuPy, which was just asked for.
from tiercheck.errors import ConfigurationError  # noqa: E402
from tiercheck.kernels.cuda import module  # noqa: E402
from tiercheck.kernels.registry import cuda_sources  # noqa: E402

SOURCES = cuda_sources()
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


@pytest.fixture(scope="module")
def nvrtc() -> Any:
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except (RuntimeError, OSError) as error:
        message = f"NVRTC cannot be loaded ({error}); install nvidia-cuda-nvrtc to run this test"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return nvrtc


def compile_with(nvrtc: Any, source: str, *options: str) -> tuple[str, str]:
    """The log, and PTX."""
    program = nvrtc.createProgram(module.text_of(source), f"{source}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*module.OPTIONS, *options))
        ptx = nvrtc.getPTX(program)
        return nvrtc.getProgramLog(program), ptx.decode() if isinstance(ptx, bytes) else ptx
    finally:
        nvrtc.destroyProgram(program)


@pytest.mark.parametrize("source", SOURCES)
def test_it_compiles_keeps_to_registers_and_rounds_as_it_is_written(nvrtc: Any, source: str) -> None:
    """Nothing is flushed to zero, approximated, or left for the assembler to fuse."""
    for architecture in ARCHITECTURES:
        log, ptx = compile_with(nvrtc, source, f"--gpu-architecture={architecture}", "--ptxas-options=-v")
        assert "warning" not in log.lower(), architecture
        compiled = re.findall(r"Compiling entry function '(\w+)'", log)
        assert sorted(compiled) == sorted(SOURCES[source]), architecture
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
        assert len(frames) >= len(compiled), architecture
        assert all(sizes == ("0", "0", "0") for sizes in frames), architecture
    if source == "fast_adam":  # the one whose model approximates
        assert re.findall(r"div\.approx\.ftz\.f32", ptx) and re.findall(r"sqrt\.approx\.ftz\.f32", ptx)
        return
    arithmetic = r"^\s*(?:@!?%p\d+\s+)?((?:add|sub|mul|fma|mad|div|sqrt|rcp)\.\S*f(?:32|64))"
    operations = re.findall(arithmetic, ptx, re.M)
    assert not [operation for operation in operations if ".rn" not in operation]
    assert not re.findall(r"\.ftz|\.approx|\.full", ptx)
    if source in ("adam", "gpu_adam", "blocks"):
        assert operations, "the pattern finds operations at all"


def test_machine_code_comes_out(nvrtc: Any) -> None:
    code = module.compile_source("patterns", "sm_90")
    assert code.startswith(b"\x7fELF")
    assert all(kernel.encode() in code for kernel in SOURCES["patterns"])


def test_a_source_that_does_not_compile_is_told_with_its_line(nvrtc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "text_of", lambda source: '#line 7 "broken.cu"\nnothing of the kind;\n')
    with pytest.raises(ConfigurationError, match=r"broken\.cu\(7\)"):
        module.compile_source("adam", "sm_90")


def test_behind_a_header_lines_have_their_own_numbers() -> None:
    lines = module.text_of("threshold").splitlines()
    position = lines.index("struct Shared {")
    mark = max(at for at, line in enumerate(lines[:position]) if line.startswith("#line"))
    number, name = lines[mark].removeprefix("#line ").split(" ")
    original = (files("tiercheck.kernels.cuda") / "source" / name.strip('"')).read_text("utf-8").splitlines()
    assert name == '"threshold.cu"'
    assert original[int(number) - 1 + position - mark - 1] == "struct Shared {"
    assert lines.count('#line 1 "portable.cuh"') == 1, "a header comes once"


def test_kernels_import_no_cupy() -> None:
    code = "import sys, tiercheck, tiercheck.kernels; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_source_and_every_kernel_is_named() -> None:
    sources = (files("tiercheck.kernels.cuda") / "source").iterdir()
    assert {entry.name for entry in sources if entry.name.endswith(".cu")} == {f"{name}.cu" for name in SOURCES}
    declared = r'extern "C" __global__ void (?:__launch_bounds__\(\w+\)\s+)?(\w+)\('
    for source, kernels in SOURCES.items():
        assert sorted(re.findall(declared, module.text_of(source))) == sorted(kernels)
