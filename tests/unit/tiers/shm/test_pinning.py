"""Page-locked segments, against a library that stands in for CUDA's: compiled here, it writes down its calls."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercheck.errors import ConfigurationError
from tiercheck.tiers.shm.driver import ShmDriver
from tiercheck.tiers.shm.namespaces import namespace_path
from tiercheck.tiers.shm.numa import Locality
from tiercheck.tiers.shm.pinning import DEINITIALIZED, CudaPinning

MIB = 1 << 20
SOURCE = Path(__file__).with_name("fake_cuda.c")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    target = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", target, SOURCE], check=True, timeout=60)
    return target


@pytest.fixture
def cuda(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    monkeypatch.setattr("tiercheck.tiers.shm.pinning.LIBRARY", str(library))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    fake = ctypes.CDLL(str(library))
    fake.fake_log.restype = ctypes.c_char_p
    fake.fake_forget()
    fake.fake_devices(2)
    fake.fake_fail(b"", 0)
    yield fake
    assert (fake.fake_registered(), fake.fake_depth()) == (0, 0)


def calls(fake: ctypes.CDLL) -> list[str]:
    text = fake.fake_log().decode().split("\n")[:-1]
    fake.fake_forget()
    return list(text)


async def test_what_is_made_ready_is_pinned_once(cuda: ctypes.CDLL, name: str) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        await driver.put("a", [bytes(MIB)])
        await (await driver.reserve("b", MIB)).publish()
        assert calls(cuda) == [], "who makes nothing ready has nothing to do with CUDA"
        await driver.prepare_reservations([(4 * MIB, 2)])
        assert calls(cuda) == [
            "cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetPCIBusId", "retain 10", "register", "register",
        ]  # fmt: skip
        assert driver.facts()["pinned"] == "2 of the segments that are mapped"
        for n in range(6):
            # What is somewhat longer or shorter than what was made ready uses it, too, and may fill it to its end.
            reservation = await driver.reserve("a", 4 * MIB + 5000 * (n - 3))
            assert reservation._segment._region.is_pinned  # type: ignore[attr-defined]
            segment = os.fstat(reservation._segment._head.fd).st_ino  # type: ignore[attr-defined]
            length = len(reservation.buffer)
            reservation.buffer[:] = bytes([n]) * length
            await reservation.publish(length - n)
            assert bytes(await driver.get("a")) == bytes([n]) * (length - n)
            assert (namespace_path(name) / "a").stat().st_ino == segment, "nothing was copied"
            await (await driver.reserve("a", 4 * MIB)).drop()
        await driver.prepare_reservations([(4 * MIB, 1)])
        assert [call for call in calls(cuda) if "register" in call] == []
    assert calls(cuda) == ["unregister", "unregister", "release"]


async def test_memory_that_was_needed_before_it_was_ready_is_pinned_when_it_is_used(
    cuda: ctypes.CDLL, name: str
) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        await (await driver.reserve("opening", 6 * MIB)).publish()  # before anybody has said that there is a GPU
        await driver.prepare_reservations([(4 * MIB, 1)])
        calls(cuda)
        held = [await driver.reserve(f"a{n}", 4 * MIB) for n in range(2)]
        assert calls(cuda) == [], "one was ready, and nobody has asked for the other one"
        for each in held:
            assert len(each.buffer) > 4 * MIB, "with a margin, so that it can be used for what is somewhat longer"
            assert each._segment._region.is_pinned  # type: ignore[attr-defined]
            await each.publish()
        assert calls(cuda) == ["register"]
        await driver.delete(["opening", "a0", "a1"])
        for nbytes in (6 * MIB, 4 * MIB + 5000, 4 * MIB - 5000):
            again = await driver.reserve("b", nbytes)
            assert len(again.buffer) >= nbytes
            assert again._segment._region.is_pinned  # type: ignore[attr-defined]
            await again.publish()
        assert calls(cuda) == ["register"], "what the opening object had"
    calls(cuda)


async def test_what_is_made_ready_is_not_given_back_for_being_somewhat_longer(cuda: ctypes.CDLL, name: str) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        await driver.expect(16 * MIB)
        await driver.prepare_reservations([(4 * MIB, 4)])
        assert calls(cuda).count("register") == 4
        assert driver.facts()["pinned"] == "4 of the segments that are mapped"
        held = [await driver.reserve(f"a{n}", 4 * MIB) for n in range(4)]
        # Only the segment tells that its memory comes out of the pool, margin and all.
        assert all(each._segment._head.recycled_bytes > 4 * MIB for each in held)  # type: ignore[attr-defined]
        assert len([each.buffer for each in held]) == 4
        assert "register" not in calls(cuda), "each was ready"
        for each in held:
            await each.drop()
    calls(cuda)


async def test_several_threads_make_it_ready_if_there_are_processors(
    cuda: ctypes.CDLL, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercheck.tiers.shm.mapping.os.sched_getaffinity", lambda _: set(range(64)))
    async with ShmDriver(name, size=64 * MIB) as driver:
        await driver.prepare_reservations([(4 * MIB, 5), (MIB, 3)])
        assert calls(cuda).count("register") == 8
        assert driver.facts()["pinned"] == "8 of the segments that are mapped"
    calls(cuda)


async def test_whoever_reads_a_pinned_segment_does_not_keep_it_pinned(cuda: ctypes.CDLL, name: str) -> None:
    driver = ShmDriver(name, size=64 * MIB)
    await driver.open()
    await driver.prepare_reservations([(4 * MIB, 1)])
    reservation = await driver.reserve("a", 4 * MIB)
    reservation.buffer[: 4 * MIB] = b"x" * (4 * MIB)
    await reservation.publish()
    held = await driver.get("a")
    calls(cuda)
    await driver.close()
    assert calls(cuda) == ["unregister", "release"]
    assert held == b"x" * (4 * MIB)
    held.release()
    assert calls(cuda) == []


async def test_a_pinned_segment_is_never_cut(cuda: ctypes.CDLL, name: str) -> None:
    """The GPU would go on writing to the pages that were there before. What it wrote is copied instead."""
    async with ShmDriver(name, size=64 * MIB) as driver:
        await driver.prepare_reservations([(4 * MIB, 2)])
        calls(cuda)
        kept = set()
        for n in range(6):
            reservation = await driver.reserve("a", 4 * MIB)
            kept.add(os.fstat(reservation._segment._head.fd).st_ino)  # type: ignore[attr-defined]
            reservation.buffer[: 4 * MIB] = bytes([n]) * (4 * MIB)
            await reservation.publish(3 * MIB)
            assert bytes(await driver.get("a")) == bytes([n]) * (3 * MIB)
            assert (await driver.stat("a")).nbytes == 3 * MIB
            await driver.put("b", [bytes(5 * MIB)])  # another use for a file of about that size
        assert len(kept) <= 2
        assert driver.facts()["pinned"] == "2 of the segments that are mapped"
        assert calls(cuda) == []


async def test_without_room_for_a_copy_it_is_unpinned_first(cuda: ctypes.CDLL, name: str) -> None:
    async with ShmDriver(name, size=6 * MIB, pool=6 * MIB) as driver:
        await driver.prepare_reservations([(4 * MIB, 1)])
        calls(cuda)
        reservation = await driver.reserve("a", 4 * MIB)
        reservation.buffer[: 4 * MIB] = b"x" * (4 * MIB)
        await reservation.publish(3 * MIB)
        assert bytes(await driver.get("a")) == b"x" * (3 * MIB)
        assert calls(cuda) == ["unregister"]


async def test_a_segment_that_others_have_had_is_pinned_anew(cuda: ctypes.CDLL, name: str) -> None:
    """Its pages may be other ones by now."""
    async with ShmDriver(name, size=64 * MIB) as driver, ShmDriver(name, size=64 * MIB, pin="off") as other:
        await driver.prepare_reservations([(4 * MIB, 1)])
        calls(cuda)
        for nbytes in (3 * MIB, 4 * MIB):  # cut, and made as long as it was
            reservation = await other.reserve("a", nbytes)
            await reservation.publish()
            await other.delete(["a"])
        reservation = await driver.reserve("a", 4 * MIB)
        assert not reservation._segment._region.is_pinned  # type: ignore[attr-defined]
        assert calls(cuda) == ["unregister"]
        await reservation.drop()
        await driver.prepare_reservations([(4 * MIB, 1)])
        assert calls(cuda) == ["cuDeviceGetPCIBusId", "register"]


async def test_memory_that_somebody_still_has_stays_pinned_until_they_let_go(cuda: ctypes.CDLL, name: str) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        await driver.prepare_reservations([(4 * MIB, 1)])
        reservation = await driver.reserve("a", 4 * MIB)
        lingering = reservation.buffer[:10]
        await reservation.publish()
        calls(cuda)
        assert cuda.fake_registered() == 1
        lingering[:] = b"0123456789"
        del lingering, reservation
        gc.collect()
        assert calls(cuda) == ["unregister"]


async def test_the_device_is_that_of_the_local_rank(
    cuda: ctypes.CDLL, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    pinning = CudaPinning("auto")
    assert pinning.pci_bus_id() == "0000:3b:00.1"
    async with ShmDriver(name, size=64 * MIB) as driver:
        await driver.prepare_reservations([(MIB, 1)])
        assert "retain 11" in calls(cuda)


async def test_memory_that_cannot_be_pinned_is_used_all_the_same(cuda: ctypes.CDLL, name: str) -> None:
    cuda.fake_fail(b"register", 2)
    async with ShmDriver(name, size=64 * MIB) as driver:
        await driver.prepare_reservations([(MIB, 2)])
        assert driver.facts()["pinned"] == "refused (cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2))"
        assert len(driver._mapped.cache._kept) == 2
        assert calls(cuda).count("register") == 1, "it is not tried again and again"


async def test_unless_it_must_be(cuda: ctypes.CDLL, name: str) -> None:
    cuda.fake_fail(b"register", 2)
    async with ShmDriver(name, size=64 * MIB, pin="on") as driver:
        with pytest.raises(ConfigurationError, match=r"pin=on, but 1114112 bytes .* CUDA_ERROR_OUT_OF_MEMORY"):
            await driver.prepare_reservations([(MIB, 2)])
        assert (await driver.usage()).used_bytes == 0
        assert list(Path(driver.segments.root / ".tiercheck/tmp").iterdir()) == []


async def test_a_step_does_not_fail_for_memory_that_must_be_pinned(
    cuda: ctypes.CDLL, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with ShmDriver(name, size=64 * MIB, pin="on") as driver:
        await driver.prepare_reservations([(MIB, 1)])
        cuda.fake_fail(b"register", 2)
        for n in range(3):
            reservation = await driver.reserve(f"a{n}", 4 * MIB)
            reservation.buffer[: 4 * MIB] = bytes([n]) * (4 * MIB)
            await reservation.publish(4 * MIB)
        assert [record.message for record in caplog.records if "pin=on, but" in record.message] == [
            "pin=on, but 4259840 bytes cannot be page-locked: cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2); "
            "copies to it go by way of other memory"
        ], "once"
    calls(cuda)


@pytest.mark.parametrize(
    ("fail", "devices", "reason"),
    [(b"cuInit", 2, "cuInit: CUDA_ERROR"), (b"", 0, "CUDA sees none"), (b"cuDeviceGet", 1, "cuDeviceGet: CUDA")],
)
async def test_no_gpu(cuda: ctypes.CDLL, name: str, fail: bytes, devices: int, reason: str) -> None:
    cuda.fake_fail(fail, 100)
    cuda.fake_devices(devices)
    async with ShmDriver(name, size=64 * MIB) as driver:
        await driver.prepare_reservations([(MIB, 1)])
        assert driver.facts()["pinned"].startswith(f"no GPU ({reason}")
    with pytest.raises(ConfigurationError, match="pin=on needs a GPU that CUDA can use"):
        await ShmDriver(name, size=64 * MIB, pin="on").open()


async def test_no_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercheck.tiers.shm.pinning.LIBRARY", "libabsent-cuda.so.1")
    async with ShmDriver(name, size=64 * MIB) as driver:
        await driver.prepare_reservations([(MIB, 1)])
        assert driver.facts()["pinned"].startswith("no GPU (libabsent-cuda.so.1")
    with pytest.raises(ConfigurationError, match="libabsent"):
        await ShmDriver(name, size=64 * MIB, pin="on").open()


def test_a_library_that_is_not_cudas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercheck.tiers.shm.pinning.LIBRARY", "libc.so.6")
    pinning = CudaPinning("auto")
    assert not pinning.available()
    assert "cuInit" in pinning.obstacle


def test_off_is_off(cuda: ctypes.CDLL) -> None:
    pinning = CudaPinning("off")
    assert pinning.pin(4096, 4096) is None
    assert pinning.pci_bus_id() is None
    pinning.check()
    pinning.close()
    assert calls(cuda) == []


def test_at_the_end_of_the_process_cuda_may_be_gone_first(cuda: ctypes.CDLL) -> None:
    memory = ctypes.create_string_buffer(3 * 4096)
    address = -(-ctypes.addressof(memory) // 4096) * 4096
    pinning = CudaPinning("on")
    undo = pinning.pin(address, 4096)
    assert undo is not None
    cuda.fake_fail(b"unregister", DEINITIALIZED)
    undo()
    cuda.fake_fail(b"", 0)
    undo()
    with pytest.raises(Exception, match="cuMemHostUnregister"):
        undo()
    pinning.close()


def test_a_forked_child_leaves_cuda_alone(cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ctypes.create_string_buffer(3 * 4096)
    pinning = CudaPinning("on")
    undo = pinning.pin(-(-ctypes.addressof(memory) // 4096) * 4096, 4096)
    assert undo is not None
    calls(cuda)
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)
        undo()
    assert calls(cuda) == []
    undo()
    assert calls(cuda) == ["unregister"]
    pinning.close()


def test_the_gpus_node_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercheck.tiers.shm.numa.numa_nodes", lambda: {0: frozenset({0}), 1: frozenset({999})})
    monkeypatch.setattr("tiercheck.tiers.shm.numa.DEVICES", tmp_path)
    device = tmp_path / "0000:3b:00.1"
    device.mkdir()
    (device / "numa_node").write_text("1\n")
    locality = Locality("auto")
    locality.near_device("0000:3b:00.1")
    assert (locality.node, locality.text) == (1, "node 1 (the GPU's)")
