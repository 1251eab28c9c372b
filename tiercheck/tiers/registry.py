"""From a URL to a driver, through the entry-point group ``tiercheck.tiers``.

An entry point's name is the scheme and its object a callable ``TierURL -> TierDriver``. The drivers of this
package are registered the same way. Nothing is imported before a URL asks for it.
"""

from __future__ import annotations

import difflib
import functools
import sys
from importlib.metadata import EntryPoint, entry_points

from tiercheck.errors import ConfigurationError
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
    "schemes",
    "seconds_from",
    "size_from",
]

GROUP = "tiercheck.tiers"


def schemes() -> dict[str, str]:
    """Each scheme that is registered, and the distribution that provides it, in order of the schemes."""
    return {entry.name: distribution_of(entry) for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name)}


def make_driver(url: str | TierURL) -> TierDriver:
    """The driver for ``url``, not yet open.

    Errors: ``ConfigurationError`` if no distribution provides the scheme (similar schemes are suggested), two
    distributions provide it (both are named), the driver's dependencies are missing (the message says what to
    install), or the driver finds something wrong with the URL.
    """
    parsed = TierURL.parse(url) if isinstance(url, str) else url
    entry = find(parsed.scheme)
    try:
        factory = entry.load()
    except ImportError as error:
        distribution = distribution_of(entry)
        extras = f"[{','.join(entry.extras)}]" if entry.extras else ""
        raise ConfigurationError(
            f"the driver for {parsed.scheme}:// cannot be loaded: {error}; "
            f"install what it needs with: pip install '{distribution}{extras}'"
        ) from error
    except AttributeError as error:
        raise ConfigurationError(
            f"{distribution_of(entry)} registers {entry.value!r} for {parsed.scheme}://, but there is no such object; "
            f"the package is broken or half upgraded"
        ) from error
    driver = factory(parsed)
    if not isinstance(driver, TierDriver):
        raise ConfigurationError(
            f"{entry.value!r} of {distribution_of(entry)} made a {type(driver).__name__} for {parsed.scheme}://, "
            f"not a TierDriver"
        )
    return driver


async def open_driver(url: str | TierURL) -> TierDriver:
    """The driver for ``url``, open; the caller closes it. Errors: :func:`make_driver`'s and the driver's own."""
    driver = make_driver(url)
    await driver.open()
    return driver


def find(scheme: str) -> EntryPoint:
    """The one entry point for ``scheme``. Schemes such as ``fsspec+gs`` go to the entry point ``fsspec``."""
    return _find(scheme, tuple(sys.path))


@functools.lru_cache(maxsize=64)  # to read what every installed distribution registers takes milliseconds
def _find(scheme: str, path: tuple[str, ...]) -> EntryPoint:
    """``path``: where distributions are looked for. What is not found is looked for again each time."""
    del path
    name = "fsspec" if scheme.startswith("fsspec+") else scheme
    # One distribution may be twice on sys.path (an editable install and its source tree): that is no conflict.
    found = {(distribution_of(entry), entry.value): entry for entry in entry_points(group=GROUP, name=name)}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        owners = " and ".join(f"{distribution} ({value})" for distribution, value in sorted(found))
        raise ConfigurationError(f"{name}:// is registered more than once: by {owners}; uninstall all but one")
    known = sorted(schemes())
    close = difflib.get_close_matches(name, known, 3)
    hint = f"did you mean {' or '.join(f'{match}://' for match in close)}? Else " if close else ""
    raise ConfigurationError(
        f"no driver for {scheme}:// is installed (installed are: {', '.join(known) or 'none'}); "
        f"{hint}install the package that provides it (an entry point {name!r} in the group {GROUP!r})"
    )


def distribution_of(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unnamed distribution"
