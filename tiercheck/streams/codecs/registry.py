"""From a text such as ``sparse?ratio=0.001`` to a codec, through the entry-point group ``tiercheck.codecs``.

The codecs of this package are registered in the same way. Nothing is imported before a text names it.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from tiercheck.errors import ConfigurationError
from tiercheck.named import NamedGroup, format_text, parse_text
from tiercheck.streams.codecs.encoding import Codec
from tiercheck.streams.codecs.feedback import SUFFIX, Feedback
from tiercheck.types import Fidelity, shown

__all__ = ["GROUP", "TEXT_CHARS_MAX", "codec", "codec_names", "refuse_unknown", "registered"]

GROUP = NamedGroup("tiercheck.codecs", "codec")

TEXT_CHARS_MAX = 128
"""Every tensor's description repeats the text, and room for descriptions is kept beforehand."""


@lru_cache(maxsize=256)
def codec(text: str) -> Codec:
    """The codec that ``text`` names: ``NAME``, ``NAME+feedback``, ``NAME?option=value&...``.

    Errors: ``ConfigurationError`` if there is no such codec (those installed are listed), if it knows no such option
    (those that it knows are listed), if an option is out of range, or if two distributions register the name.
    """
    if len(text) > TEXT_CHARS_MAX:
        raise ConfigurationError(
            f"the codec {shown(text)} has {len(text)} characters; at most {TEXT_CHARS_MAX} are allowed"
        )
    name, options = parse_text(text)
    plain = name.removesuffix(SUFFIX)
    made = GROUP.make(format_text(plain, options))
    if not isinstance(made, Codec) or made.name != plain:
        raise ConfigurationError(f"the entry point {plain!r} in the group {GROUP.group!r} is no Codec of that name")
    if plain == name:
        return made
    if not made.feedback:
        raise ConfigurationError(f"there is no codec {name!r}: {plain!r} has no error feedback")
    return Feedback(made)


def registered() -> dict[str, str]:
    """The name of each registered codec, and the distribution that provides it. Imports none of them."""
    return GROUP.names()


def codec_names(fidelity: Fidelity | None = None) -> list[str]:
    """Every codec that can be had, without options: exact ones first, those with feedback last.

    Imports all of them. One that cannot be imported is left out. ``fidelity``: those alone that declare it.
    """
    found: list[Codec] = []
    for name in registered():
        try:
            found.append(codec(name))
        except ConfigurationError:
            continue
    found += [Feedback(each) for each in found if each.feedback]
    wanted = [each for each in found if fidelity in (None, each.fidelity)]
    wanted.sort(key=lambda each: (each.fidelity is not Fidelity.EXACT, isinstance(each, Feedback), each.name))
    return [each.name for each in wanted]


def refuse_unknown(text: str, others: Collection[str]) -> None:
    """Errors: ``ConfigurationError`` if ``text`` names no registered codec; the message also lists ``others``."""
    name = parse_text(text)[0].removesuffix(SUFFIX)
    if name not in others:
        GROUP.find(name, others)
