"""Below the root of a tier of files no symbolic link is followed, and whoever else can write there is told of."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tiercheck.errors import TierError, Unauthorized
from tiercheck.tiers.posix import beneath, lustre
from tiercheck.tiers.posix.beneath import Beneath
from tiercheck.tiers.posix.directories import local
from tiercheck.tiers.posix.file_driver import FileDriver
from tiercheck.tiers.posix.lustre import LustreDriver
from tiercheck.tiers.posix.mounts import Traits
from tiercheck.tiers.posix.nvme import NvmeDriver


def go(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a path is followed from here on: by ``openat2``, or ``step by step``."""
    if way == "step by step":
        monkeypatch.setattr(beneath, "has_openat2", lambda: False)
    elif not beneath.has_openat2():
        pytest.skip("this kernel has no openat2")


@pytest.fixture(params=["openat2", "step by step"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    go(request.param, monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Somebody's files, which no tier may touch; what they are afterwards is compared."""
    for name in ("secret", "tmp/secret", ".tiercheck/tmp/secret", "v/secret"):
        path = tmp_path / "outside" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"theirs")
        os.utime(path, (0, 0))
    return tmp_path / "outside"


@pytest.fixture(
    params=[
        ("nvme", "openat2"),
        ("nvme", "step by step"),
        ("lustre", "openat2"),
        ("lustre that remembers", "step by step"),
    ],
    ids=", ".join,
)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, root: Path) -> Callable[[], FileDriver]:
    kind, way = request.param
    go(way, monkeypatch)
    if kind == "nvme":
        return lambda: NvmeDriver(root)
    traits = Traits(kind == "lustre", True, True)
    monkeypatch.setattr(lustre, "traits_of", lambda mount: traits)
    return lambda: LustreDriver(root)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestLinks:
    async def test_one_in_the_middle_of_a_path_is_not_followed(
        self, make: Callable[[], FileDriver], root: Path, outside: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = snapshot(outside)
        async with make() as driver:
            await driver.put("g/a", [b"ours"])
            (root / "d").symlink_to(outside)
            (root / "g" / "d").symlink_to(outside / "v")
            for key in ("d/secret", "d/v/secret", "g/d/secret"):
                for call in (lambda key=key: driver.get(key), lambda key=key: driver.stat(key)):
                    with pytest.raises(Unauthorized, match="symbolic link"):
                        await call()
                with pytest.raises(TierError):
                    await driver.put(key, [b"planted"])
                with pytest.raises(TierError):
                    await driver.put(f"{key}-new/x", [b"planted"])
                with pytest.raises(TierError):
                    await driver.delete([key])
            assert [info.key async for info in driver.list()] == ["g/a"]
            assert [info.key async for info in driver.list("g/")] == ["g/a"]
            await driver.delete(["g/a"])
        assert snapshot(outside) == before
        told = [record.getMessage() for record in caplog.records if "symbolic link" in record.getMessage()]
        assert len(told) == 2
        assert f"{root}/d is a symbolic link" in told[0]

    @pytest.mark.parametrize("at", [".tiercheck", ".tiercheck/tmp"])
    async def test_what_a_linked_control_directory_points_to_stays(
        self, make: Callable[[], FileDriver], root: Path, outside: Path, at: str
    ) -> None:
        (root / at).parent.mkdir(parents=True)
        (root / at).symlink_to(outside / at)
        before = snapshot(outside)
        with pytest.raises(Unauthorized, match=r"tiercheck.*symbolic link"):
            await make().open()
        assert snapshot(outside) == before

    async def test_nor_one_that_takes_its_place_while_the_tier_is_open(
        self, make: Callable[[], FileDriver], root: Path, outside: Path
    ) -> None:
        before = snapshot(outside)
        async with make() as driver:
            await driver.put("a", [b"ours"])
            (root / ".tiercheck").rename(root / "moved")
            (root / ".tiercheck").symlink_to(outside / ".tiercheck")
            with pytest.raises(TierError):
                await driver.put("b", [b"x" * (1 << 20)])
            with pytest.raises(TierError):
                await driver.delete(["a"])
        assert snapshot(outside) == before

    async def test_nor_one_that_takes_a_directorys_place_in_the_middle_of_a_call(
        self, make: Callable[[], FileDriver], root: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Looked at, then swapped, then deleted: the descriptor still is the directory's."""
        before = snapshot(outside)
        looked = local.ObjectDirectory.look_up

        def swap() -> None:
            if not (root / "v").is_symlink():
                (root / "v").rename(root / "old")
                (root / "v").symlink_to(outside / "v")

        def status_then_swapped(folder: int, name: str) -> os.stat_result:
            status = beneath.status_of(folder, name)
            if name == "secret":
                swap()
            return status

        def looked_up_then_swapped(self: local.ObjectDirectory, path: str) -> os.stat_result:
            status = looked(self, path)
            swap()
            return status

        async with make() as driver:
            await driver.put("v/secret", [b"ours"])
            monkeypatch.setattr(local, "status_of", status_then_swapped)
            monkeypatch.setattr(local.ObjectDirectory, "look_up", looked_up_then_swapped)
            with contextlib.suppress(TierError):  # refused is as good
                await driver.delete(["v/secret"])
        assert snapshot(outside) == before

    async def test_the_root_itself_may_be_one(self, make: Callable[[], FileDriver], root: Path, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        root.symlink_to(tmp_path / "real")
        async with make() as driver:
            await driver.put("v/a", [b"x"])
            assert bytes(await driver.get("v/a")) == b"x"
            assert [info.key async for info in driver.list()] == ["v/a"]
        assert (tmp_path / "real" / "v" / "a").read_bytes() == b"x"


class TestOwners:
    async def test_a_directory_that_everybody_may_write_is_refused(
        self, make: Callable[[], FileDriver], root: Path
    ) -> None:
        root.mkdir()
        root.chmod(0o777)
        with pytest.raises(Unauthorized, match=rf"every user may write to {root}.*use a directory inside of it"):
            await make().open()

    async def test_with_the_sticky_bit_there_is_a_warning(
        self, make: Callable[[], FileDriver], root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        root.mkdir()
        root.chmod(0o1777)
        async with make():
            pass
        assert f"{root} is not yours alone: every user can put objects there" in caplog.text

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
    async def test_another_users_directory_is_told_of_once(
        self, make: Callable[[], FileDriver], root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        root.mkdir()
        os.chown(root, 12345, -1)
        async with make():
            pass
        told = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(told) == 1
        assert f"{root} is not yours alone: user 12345" in told[0].getMessage()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
    async def test_a_control_directory_that_another_user_put_where_all_may_write_is_refused(
        self, make: Callable[[], FileDriver], root: Path
    ) -> None:
        (root / ".tiercheck" / "tmp").mkdir(parents=True)
        root.chmod(0o1777)
        os.chown(root / ".tiercheck", 12345, -1)
        with pytest.raises(Unauthorized, match="every user may write"):
            await make().open()

    async def test_a_directory_of_ones_own_is_no_matter(
        self, make: Callable[[], FileDriver], root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        root.mkdir(mode=0o700)
        root.chmod(0o775)
        async with make():
            pass
        assert not caplog.records


@pytest.mark.parametrize(
    ("number", "kind", "advice"),
    [
        (errno.EACCES, Unauthorized, "check the directory's owner and mode"),
        (errno.EROFS, Unauthorized, "mounted read-only"),
        (errno.ENOTDIR, TierError, "a file is in the way"),
        (errno.EEXIST, TierError, "a file is in the way"),
        (errno.ENOENT, TierError, "make the directories above it"),
    ],
)
async def test_a_directory_that_cannot_be_made_says_which_and_why(
    make: Callable[[], FileDriver],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[TierError],
    advice: str,
) -> None:
    def refused(path: Path, mode: int = 0o777) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", refused)
    said = rf"^the directory {root} cannot be made: {os.strerror(number)}: {root}; .*{advice}"
    with pytest.raises(kind, match=said) as caught:
        await make().open()
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("way")
class TestBeneath:
    def test_directories_are_made_and_removed_upwards(self, tmp_path: Path) -> None:
        below = Beneath(tmp_path)
        assert below.make("a/b/c")
        assert not below.make("a/b/c")
        assert not below.make("")
        assert (tmp_path / "a/b/c").stat().st_mode & 0o777 == 0o700
        (tmp_path / "a/kept").touch()
        assert below.remove_empty("a/b/c") == "a"
        assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["kept"]
        assert below.remove_empty("a/never/there") == "a"
        with pytest.raises(NotADirectoryError):
            below.make("a/kept/x")

    def test_what_is_held_stays_the_root(self, tmp_path: Path) -> None:
        (tmp_path / "root").mkdir()
        below = Beneath(tmp_path / "root")
        below.hold()
        below.hold()
        (tmp_path / "root").rename(tmp_path / "moved")
        assert below.make("a")
        below.release()
        below.release()
        assert (tmp_path / "moved" / "a").is_dir()
        with pytest.raises(FileNotFoundError):
            below.status("a")

    def test_a_link_is_an_error_or_itself(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        (tmp_path / "link").symlink_to("file")
        (tmp_path / "folder").symlink_to(tmp_path)
        below = Beneath(tmp_path)
        for path in ("link", "folder/file", "folder/a/b"):
            with pytest.raises(OSError) as caught:
                below.open(path, os.O_RDONLY)
            assert caught.value.errno == errno.ELOOP
        assert below.exists("link")
        assert below.status("link").st_ino == (tmp_path / "link").lstat().st_ino
        assert not below.exists("file/below")
        assert not below.exists("nothing")
