"""A tier that is opened to read stays as it is, and whoever writes to it meanwhile is not kept from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercheck.errors import NotFound, Unsupported
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.shm.namespaces import namespace_path, remove_namespace
from tiercheck.tiers.wrappers import ReadOnlyDriver
from tiercheck.types import ByteRange


def tree(root: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in [root, *root.rglob("*")]}


@pytest.mark.parametrize("scheme", ["shm", "nvme", "lustre"])
async def test_it_is_read_as_it_lies(scheme: str, name: str, tmp_path: Path) -> None:
    url = f"shm://{name}" if scheme == "shm" else f"{scheme}://{tmp_path}/tier"
    root = namespace_path(name) if scheme == "shm" else tmp_path / "tier"
    async with make_driver(url) as writer:
        await writer.put("a/b", [b"x" * 200_000])
        await writer.put("a/c", [b"y"])
        before = tree(root)
        async with ReadOnlyDriver(make_driver(url)) as reader:
            found = [info async for info in reader.list()]
            assert [info.key for info in found] == ["a/b", "a/c"]
            assert all(info.written_s is not None for info in found)
            assert bytes(await reader.get("a/b", range=ByteRange(0, 3))) == b"xxx"
            content = await reader.get("a/b")
            assert (await reader.stat("a/c")).nbytes == 1
            with pytest.raises(NotFound):
                await reader.get("a/d")
            assert not (reader.capabilities.mappable or reader.capabilities.conditional_put)
            for call in (reader.put("k", [b""]), reader.delete(["a/b"]), reader.reserve("k", 1)):
                with pytest.raises(Unsupported, match="opened to read"):
                    await call
            assert tree(root) == before
            await writer.delete(["a/b"])
            assert bytes(content) == b"x" * 200_000


async def test_a_namespace_may_be_removed_while_it_is_read(name: str) -> None:
    async with make_driver(f"shm://{name}") as writer:
        await writer.put("a", [b"x" * 200_000])
    async with ReadOnlyDriver(make_driver(f"shm://{name}")) as reader:
        content = await reader.get("a")
        remove_namespace(name)
        assert bytes(content[:3]) == b"xxx"
        with pytest.raises(NotFound):
            await reader.get("a")


@pytest.mark.parametrize("url", ["shm://nobody-has-made-this", "nvme:///nobody/has/made/this"])
async def test_a_place_that_is_not_there_is_not_made(url: str) -> None:
    with pytest.raises(NotFound, match=r"there is no|no such shared memory"):
        await ReadOnlyDriver(make_driver(url)).open()
    assert not Path("/nobody").exists()
