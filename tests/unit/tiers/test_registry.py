"""URLs, options, and finding drivers through entry points (of distributions made up on the spot)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tiercheck.errors import ConfigurationError
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.registry import TierURL, make_driver, open_driver, parse_size, schemes
from tiercheck.types import ByteRange, Survives


def install(directory: Path, distribution: str, entry_points: str, module: str = "") -> None:
    """A distribution on ``directory``, as pip would leave it there."""
    info = directory / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tiercheck.tiers]\n{entry_points}\n")
    if module:
        (directory / f"{distribution.replace('-', '_')}.py").write_text(module)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


class TestURL:
    def test_parts(self) -> None:
        url = TierURL.parse("s3://bucket/a%20prefix?endpoint_url=http://host:1/x&flag=")
        assert (url.scheme, url.location) == ("s3", "bucket/a prefix")
        assert url.options == {"endpoint_url": "http://host:1/x", "flag": ""}
        assert TierURL.parse("nvme:///mnt/ssd/run").location == "/mnt/ssd/run"
        plus = TierURL.parse("nvme:///mnt/a+b%2Bc?mount=/mnt/a+b%2Bc&x=%20")
        assert (plus.location, plus.options) == ("/mnt/a+b+c", {"mount": "/mnt/a+b+c", "x": " "})
        assert TierURL.parse("memory://") == TierURL("memory", "")

    def test_text_parses_to_the_same(self) -> None:
        for text in ("nvme:///mnt/a%20b", "shm://x?size=4GiB", "fsspec+gs://bucket/run", "nvme:///a%23b?survives=rack"):
            url = TierURL.parse(text)
            assert TierURL.parse(url.text) == url
            assert hash(TierURL.parse(url.text)) == hash(url)

    @pytest.mark.parametrize(
        "text",
        [
            "s3://me:hunter2@host/bucket",
            "s3://hunter2@host/bucket",
            "s3://b?secret_access_key=hunter2",
            "s3://b?password=hunter2",
            "s3://b?key=hunter2",
            "s3://b?SAS_TOKEN=hunter2",
            "s3://b?apikey=hunter2",
            "s3://b?pwd=hunter2",
            "s3://b?endpoint_url=https://me:hunter2@host/x",
            "fsspec+webdav://b?fs.base_url=https://me:hunter2@host",
            "fsspec+s3://b?fs.client_kwargs={%22aws_secret%22:%22hunter2%22}",
            "fsspec+x://b?fs.pin=hunter2",
            "fsspec+simplecache://ftp://me:hunter2@host/x",
        ],
    )
    def test_secrets_are_not_shown(self, text: str) -> None:
        url = TierURL.parse(text)
        assert "hunter2" not in url.text + str(url) + repr(url)
        assert "***" in url.text
        assert url.has_secret or text == "s3://hunter2@host/bucket"

    @pytest.mark.parametrize("text", ["acme://b?favourite=hunter2", "s3://b?endpoint_url=https://host/x?sig=hunter2"])
    def test_what_is_not_known_to_be_public_is_hidden(self, text: str) -> None:
        assert "hunter2" not in TierURL.parse(text).text

    def test_what_is_known_to_be_public_is_shown(self) -> None:
        for text in (
            "shm://x?size=4GiB&pool=1GiB&mount=/mnt/huge",
            "peer://x?at=%5B::1%5D:7&credit=8MiB&survives=rack&server_key=abab&keys=/home/me/keys",
            "s3://b?endpoint_url=http://host:1/x&region=eu&part=16MiB&profile=me",
            "fsspec+abfs://b?survives=site&fs.account_name=me",
            "fsspec+sftp://h/x?fs.port=22&fs.username=me&fs.client_keys=/home/me/key&fs.known_hosts=/home/me/hosts",
        ):
            url = TierURL.parse(text)
            assert "***" not in url.text
            assert TierURL.parse(url.text) == url
            assert not url.has_secret

    @pytest.mark.parametrize(
        "text",
        [
            "shm://x?mount=%ff", "nvme:///a%ffb", "nvme:///a%00b", "nvme:///a\ud800", "shm://x?mount=/\udc80",
            "shm://" + "x" * 9000,
        ],
        ids=ascii,
    )  # fmt: skip
    def test_what_no_name_can_hold_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            TierURL.parse(text)
        assert len(str(caught.value)) < 200
        str(caught.value).encode()

    @pytest.mark.parametrize("text", ["", "shm", "shm:/x", "://x", "S3 ://x", "shm://x?size", "shm://x?a=1&a=2"])
    def test_what_is_no_url_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigurationError):
            TierURL.parse(text)

    def test_a_refused_url_keeps_its_password(self) -> None:
        with pytest.raises(ConfigurationError) as caught:
            TierURL.parse("me:hunter2@host/x?token=hunter2")
        assert "hunter2" not in str(caught.value)

    def test_options_become_values_and_unknown_ones_are_refused(self) -> None:
        options = TierURL.parse("nvme:///x?survives=rack&sise=3").reader()
        assert options.take("survives", Survives.parse, Survives.NODE) is Survives.RACK
        assert options.take("size", parse_size, None) is None
        with pytest.raises(ConfigurationError, match=r"nvme.*'sise'.*'survives', 'size'.*did you mean 'size'"):
            options.finish()

    def test_a_bad_value_says_which_option(self) -> None:
        with pytest.raises(ConfigurationError, match=r"'size' of shm://x\?size=lots.*'lots' is no size"):
            make_driver("shm://x?size=lots")
        options = TierURL.parse("s3://x?token=hunter2").reader()
        with pytest.raises(ConfigurationError) as caught:
            options.take("token", int, None)
        assert "hunter2" not in str(caught.value)
        assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("4GiB", 4 << 30),
        ("4g", 4 << 30),
        ("4G", 4 << 30),
        ("500MB", 500_000_000),
        (" 1.5 KiB ", 1536),
        ("1TB", 10**12),
        ("9007199254740993", 9007199254740993),
        ("12B", 12),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "GiB", "4XB", "4 G B", "1e9", "4i", "nan", "99999999PiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|holds"):
        parse_size(text)


def test_an_empty_range_is_a_range() -> None:
    assert ByteRange(0, 0)
    assert len(ByteRange(0, 0)) == 0


class TestRegistry:
    def test_the_built_in_drivers_are_registered(self) -> None:
        assert {"memory", "shm", "nvme"} <= schemes().keys()
        assert isinstance(make_driver("memory://x"), MemoryDriver)

    async def test_open_driver(self) -> None:
        driver = await open_driver("memory://")
        await driver.put("a", [b"x"])
        await driver.close()

    def test_a_plug_in_is_found_and_given_its_url(self, site: Path) -> None:
        module = (
            "from tiercheck.tiers.memory import MemoryDriver\n"
            "def make(url):\n    return MemoryDriver(url.location + url.options['x'])\n"
        )
        install(site, "acme-tier", "acme = acme_tier:make", module)
        assert make_driver("acme://store?x=1").url == "memory://store1"
        assert schemes()["acme"] == "acme-tier"

    def test_fsspec_schemes_go_to_the_entry_point_fsspec(self) -> None:
        driver = make_driver("fsspec+memory://bucket")
        assert type(driver).__name__ == "FsspecDriver"
        assert driver.url == "fsspec+memory://bucket"

    def test_nothing_is_imported_before_it_is_asked_for(self, site: Path) -> None:
        install(site, "acme-bomb", "bomb = acme_bomb:make", "raise RuntimeError('imported')")
        assert schemes()["bomb"] == "acme-bomb"
        make_driver("memory://")
        assert "acme_bomb" not in sys.modules

    def test_an_unknown_scheme_lists_the_known_and_suggests_close_ones(self) -> None:
        with pytest.raises(ConfigurationError, match=r"no driver memroy://.*nvme.*shm.*did you mean memory://"):
            make_driver("memroy://x")
        with pytest.raises(ConfigurationError, match=r"no driver zzzzz://.*install the package"):
            make_driver("zzzzz://x")

    @pytest.mark.parametrize(
        ("url", "instead"),
        [
            ("file:///data/run", "a directory is nvme:///PATH, or lustre:///PATH if all nodes"),
            ("gs://b", "fsspec+gs://"),
        ],
    )
    def test_what_other_libraries_call_it_has_another_name_here(self, url: str, instead: str) -> None:
        with pytest.raises(
            ConfigurationError, match=f"there is no driver {url.split(':')[0]}://: .*{re.escape(instead)}"
        ):
            make_driver(url)

    def test_a_missing_dependency_says_what_to_install(self, site: Path) -> None:
        install(site, "acme-cloud", "cloud = acme_cloud:make [aws]", "import a_module_nobody_has")
        with pytest.raises(ConfigurationError, match=r"a_module_nobody_has.*pip install 'acme-cloud\[aws\]'"):
            make_driver("cloud://x")

    def test_what_a_package_raises_when_it_is_imported_or_makes_a_driver_names_it(self, site: Path) -> None:
        install(site, "acme-half", "half = acme_half:make", "raise ValueError('numpy.dtype size changed')")
        with pytest.raises(ConfigurationError, match=r"half:// cannot be loaded.*acme-half.*ValueError: numpy\.dtype"):
            make_driver("half://x")
        install(site, "acme-made", "made = acme_made:make", "def make(url):\n    raise KeyError('region')\n")
        with pytest.raises(ConfigurationError, match=r"acme-made.* could not make a driver for made://x: KeyError"):
            make_driver("made://x")

    def test_an_entry_point_to_nothing(self, site: Path) -> None:
        install(site, "acme-void", "void = acme_void:make", "pass")
        with pytest.raises(ConfigurationError, match=r"acme-void.*no such object"):
            make_driver("void://x")

    def test_two_distributions_with_one_scheme(self, site: Path) -> None:
        install(site, "acme-one", "dup = acme_one:make")
        install(site, "acme-two", "dup = acme_two:make")
        with pytest.raises(ConfigurationError, match=r"dup://.*acme-one.*and acme-two"):
            make_driver("dup://x")

    def test_a_plug_in_cannot_take_a_built_in_scheme_silently(self, site: Path) -> None:
        install(site, "acme-shm", "shm = acme_shm:make")
        with pytest.raises(ConfigurationError, match=r"shm://.*acme-shm.*and tiercheck"):
            make_driver("shm://x")

    def test_a_factory_must_make_a_driver(self, site: Path) -> None:
        install(site, "acme-text", "text = acme_text:make", "def make(url):\n    return 'a driver'\n")
        with pytest.raises(ConfigurationError, match=r"made a str for text://"):
            make_driver("text://x")

    def test_unknown_options_are_errors_for_each_built_in(self) -> None:
        for url in ("memory://x?colour=1", "shm://x?colour=1", "nvme:///x?colour=1"):
            with pytest.raises(ConfigurationError, match="colour"):
                make_driver(url)
