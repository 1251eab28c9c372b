"""The CUDA kernels on a real GPU: the reference's bits, nothing copied, nobody waits, nothing allocated."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.gpu.machine import Gpu, need_gpu

cupy = need_gpu()

# What follows imports CuPy, which was just asked for.
from tests.gpu.inputs import adam_steps, gradient, identical  # noqa: E402
from tests.gpu.kernel_tests import CudaKernelTests  # noqa: E402
from tiercheck.errors import ConfigurationError  # noqa: E402
from tiercheck.kernels import cuda  # noqa: E402
from tiercheck.kernels.reference import blocks, compaction, exponents  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def compiled() -> None:
    cuda.warm_up()


@pytest.fixture
def gpu(compiled: None) -> Gpu:
    return Gpu(cupy)


class TestKernelsOnGpu(CudaKernelTests):
    @pytest.fixture
    def machine(self, gpu: Gpu) -> Gpu:
        return gpu


def test_the_stream_has_the_lowest_priority_and_ignores_the_default_stream(gpu: Gpu) -> None:
    other = cupy.cuda.Stream(non_blocking=True, priority=-100)
    lowest = cupy.cuda.runtime.streamGetPriority(gpu.stream.ptr)
    assert lowest >= cupy.cuda.runtime.streamGetPriority(other.ptr)
    assert lowest == 0, "CUDA's lowest priority"
    assert gpu.stream.is_non_blocking


def test_every_call_returns_while_the_stream_is_held_up_and_allocates_nothing(gpu: Gpu) -> None:
    """The second time the stream waits for a function on the host, and every call must return all the same."""
    size = 300_001
    values, residual = gradient(size, special=False), gradient(size, 1, special=False)
    put, to = gpu.put, {"stream": gpu.stream}
    arrays = {
        "values": put(values),
        "lost": put(residual),
        "indices": put(np.zeros(size, np.uint32)),
        "survivors": put(np.zeros(size, np.float32)),
        "decoded": put(np.zeros(size, np.float32)),
        "halves": put(np.zeros(size, np.float16)),
        "samples": put(np.zeros(compaction.SAMPLES, np.uint32)),
        "room": put(np.zeros(cuda.exponents_workspace(size), np.uint64)),  # the larger one
        "codes": put(np.zeros(size, np.int8)),
        "nibbles": put(np.zeros(-(-size // 256) * 128, np.uint8)),
        "bits": put(np.zeros(-(-size // 128) * 16, np.uint8)),
        "scales": put(np.zeros(-(-size // 256), np.float32)),
        "patterns": put(np.zeros(-(-size // 128), np.uint16)),
        "plane": put(np.zeros(size, np.uint8)),
        "packed": put(np.zeros(exponents.packed_bytes_max(size), np.uint8)),
        "exp_avg": put(np.zeros(size, np.float32)),
        "exp_avg_sq": put(np.zeros(size, np.float32)),
    }
    words = {
        name: put(np.zeros(1, dtype))
        for name, dtype in (("count", "u4"), ("strange", "u4"), ("scale", "i4"), ("least", "f4"), ("length", "u8"))
    }
    a = arrays

    def everything() -> None:
        cuda.select_threshold(a["values"], 0.01, 1, words["least"], a["samples"], residual=a["lost"], **to)
        cuda.compact_into(
            a["values"],
            words["least"],
            a["indices"],
            a["survivors"],
            words["count"],
            a["room"],
            residual=a["lost"],
            **to,
        )
        cuda.keep_largest(
            a["values"], a["indices"], a["survivors"], words["count"], words["strange"], residual=a["lost"], **to
        )
        cuda.to_half(a["survivors"], a["halves"], words["scale"], a["samples"], count=words["count"], **to)
        cuda.from_half(a["halves"], words["scale"], a["decoded"], count=words["count"], **to)
        cuda.settle(a["lost"], a["indices"], a["survivors"], a["decoded"], count=words["count"], **to)
        cuda.scatter(a["indices"], a["survivors"], a["decoded"], count=words["count"], **to)
        cuda.quantise_into(a["values"], a["codes"], a["scales"], residual=a["lost"], **to)
        cuda.quantise_nf4_into(a["values"], a["nibbles"], a["scales"], residual=a["lost"], **to)
        cuda.quantise_onebit_into(a["values"], a["bits"], a["patterns"], residual=a["lost"], **to)
        cuda.pack_exponents(a["plane"], a["packed"], words["length"], a["room"], **to)
        cuda.unpack_exponents(a["packed"], a["plane"], words["count"], a["room"], **to)
        gradients = [a["values"], cuda.SparseOnDevice(a["indices"][:9], a["survivors"][:9])]
        cuda.replay_fused_adam(
            a["decoded"], a["exp_avg"], a["exp_avg_sq"], gradients, adam_steps(2), contracted=True, **to
        )

    everything()
    gpu.stream.synchronize()
    pool = cupy.get_default_memory_pool()
    gate = threading.Event()
    gpu.stream.launch_host_func(lambda _: gate.wait(60), None)
    before = pool.used_bytes(), pool.total_bytes()
    done = threading.Event()
    device = cupy.cuda.Device().id

    def call() -> None:
        cupy.cuda.Device(device).use()
        everything()
        done.set()

    caller = threading.Thread(target=call)
    caller.start()
    returned = done.wait(30)
    busy = not gpu.stream.done
    gate.set()
    caller.join()
    gpu.stream.synchronize()
    assert returned, "a call waited for the stream"
    assert busy, "the stream was not held up: the test shows nothing"
    assert (pool.used_bytes(), pool.total_bytes()) == before


def test_a_torch_tensor_is_worked_on_in_place(gpu: Gpu) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a torch that is built for CUDA")
    values = gradient(100_003, special=False)
    tensor = torch.from_numpy(values).cuda()
    borrowed = cuda.borrow(tensor, gpu.stream)
    assert borrowed.data.ptr == tensor.data_ptr()
    patterns = cuda.borrow(tensor.to(torch.bfloat16).view(torch.uint16), gpu.stream)
    assert patterns.dtype == np.uint16
    codes, scales = gpu.put(np.zeros(values.size, np.int8)), gpu.put(np.zeros(-(-values.size // 256), np.float32))
    cuda.quantise_into(borrowed, codes, scales, stream=gpu.stream)
    cuda.dequantise_into(codes, scales, borrowed, stream=gpu.stream)
    gpu.stream.synchronize()
    expected_codes, expected_scales = np.zeros(values.size, np.int8), np.zeros(-(-values.size // 256), np.float32)
    blocks.quantise_into(values, expected_codes, expected_scales)
    assert identical(gpu.get(codes), expected_codes)
    assert identical(tensor.cpu().numpy(), blocks.dequantise(expected_codes, expected_scales))


def test_memory_of_the_host_is_not_borrowed(gpu: Gpu) -> None:
    with pytest.raises(ConfigurationError, match="GPU memory"):
        cuda.borrow(np.zeros(3, np.float32), gpu.stream)


def test_an_array_of_another_device_is_refused(gpu: Gpu) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device(1):
        elsewhere = cupy.zeros(4, np.float32)
    with pytest.raises(ConfigurationError, match="device 1"):
        cuda.widen_into(gpu.put(np.zeros(4, np.uint16)), elsewhere, stream=gpu.stream)
