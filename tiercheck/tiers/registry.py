"""From a URL to a driver, through the entry-point group ``tiercheck.tiers``.

An entry point's name is the scheme and its object a callable ``TierURL -> TierDriver``. The drivers of this
package are registered the same way. Nothing is imported before a URL asks for it.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint

from tiercheck.entry_points import EntryPointGroup, distribution_of
from tiercheck.errors import ConfigurationError, TierCheckError
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.url import OptionReader, TierURL, number_from, parse_size, seconds_from, size_from

__all__ = [
    "GROUP",
    "OptionReader",
    "TierURL",
    "make_driver",
    "number_from",
    "open_driver",
    "parse_size",
    "registered",
    "schemes",
    "seconds_from",
    "size_from",
]

GROUP = EntryPointGroup("tiercheck.tiers", "driver", "{}://")
OF_FSSPEC = frozenset(("abfs", "abfss", "adl", "az", "gcs", "gs", "hdfs", "hf", "oss", "sftp", "smb", "ssh", "webhdfs"))
"""Schemes that are often written without ``fsspec+``."""


def schemes() -> dict[str, str]:
    """Each scheme that is registered, and the distribution that provides it, in order of the schemes."""
    return GROUP.names()


def make_driver(url: str | TierURL) -> TierDriver:
    """The driver for ``url``, not yet open.

    Errors: ``ConfigurationError`` if no distribution provides the scheme (what others call it is suggested), two
    distributions provide it (both are named), the driver's dependencies are missing (the message says what to
    install), or the driver finds something wrong with the URL.
    """
    parsed = TierURL.parse(url) if isinstance(url, str) else url
    entry = registered(parsed)
    factory = GROUP.load(entry.name)
    try:
        driver = factory(parsed)
    except TierCheckError:
        raise
    except Exception as error:  # of somebody else's code
        raise ConfigurationError(
            f"{entry.value!r} of {distribution_of(entry)} could not make a driver for {parsed.text}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(driver, TierDriver):
        raise ConfigurationError(
            f"{entry.value!r} of {distribution_of(entry)} made a {type(driver).__name__} for {parsed.scheme}://, "
            f"not a TierDriver"
        )
    return driver


def registered(url: TierURL) -> EntryPoint:
    """What makes the driver. Errors: ``ConfigurationError`` if nothing does, or several would."""
    name = entry_name(url.scheme)
    if name not in schemes() and (other := called_here(name)):
        raise ConfigurationError(f"there is no driver {name}://: {other}")
    return GROUP.find(name)


async def open_driver(url: str | TierURL) -> TierDriver:
    """The driver for ``url``, open; the caller closes it. Errors: :func:`make_driver`'s and the driver's own."""
    driver = make_driver(url)
    await driver.open()
    return driver


def entry_name(scheme: str) -> str:
    """The entry point that a scheme goes to: ``fsspec`` for ``fsspec+gs``, else its own."""
    return "fsspec" if scheme.startswith("fsspec+") else scheme


def called_here(scheme: str) -> str:
    """What to write instead of a scheme that other libraries know; empty if none is known."""
    if scheme in ("file", "local"):
        return "a directory is nvme:///PATH, or lustre:///PATH if all nodes see it"
    return f"write fsspec+{scheme}://, which goes to fsspec" if scheme in OF_FSSPEC else ""
