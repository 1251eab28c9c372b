"""Policies by name: as a configuration and the replication job say them, and as entry points register them.

A text names one policy, or several that are combined: ``keep_last?n=2; keep_best?metric=eval_loss&n=3``. Retention
policies and cadences are united (``|``), placement and pacing policies all apply (``&``). The entry-point group is
``tiercheck.policies``; the built-in policies are registered through it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from tiercheck.errors import ConfigurationError
from tiercheck.named import NamedGroup
from tiercheck.policy.compose.checks import POLICIES_MAX
from tiercheck.policy.policies import (
    KINDS,
    AllWant,
    AnyDue,
    AnyKeep,
    CadencePolicy,
    PacingPolicy,
    PlacementPolicy,
    Policies,
    RetentionPolicy,
    SlowestOf,
)

__all__ = ["GROUP", "InstalledPolicy", "installed_policies", "parse_policies", "parse_policy", "policy_texts"]

GROUP = NamedGroup("tiercheck.policies", "policy")
SEPARATOR = ";"
_COMBINED = (AllWant, AnyDue, AnyKeep, SlowestOf)


@dataclass(frozen=True)
class InstalledPolicy:
    """A policy that can be named."""

    name: str
    distribution: str
    kind: str
    """``cadence``, ``placement``, ``retention`` or ``pacing``; empty if it cannot be loaded."""
    summary: str
    """The first line of its docstring; if it cannot be loaded, why."""


def installed_policies() -> list[InstalledPolicy]:
    """Every policy that is installed, by name."""
    found: list[InstalledPolicy] = []
    for name, distribution in GROUP.names().items():
        try:
            loaded = GROUP.load(name)
        except ConfigurationError as error:
            found.append(InstalledPolicy(name, distribution, "", str(error)))
            continue
        kind = next((kind for kind, base in KINDS.items() if issubclass(loaded, base)), "")
        summary = (loaded.__doc__ or "").strip().partition("\n")[0]
        found.append(InstalledPolicy(name, distribution, kind, summary if kind else "it is no policy"))
    return found


def parse_policy(kind: str, text: str) -> Any:
    """The policy that ``text`` names, of this kind. Errors: ``ConfigurationError``, which lists what there is."""
    return combined(kind, [each for each in text.split(SEPARATOR) if each.strip()])


def parse_policies(**texts: str) -> Policies:
    """The policies that these texts name, by kind; an empty text: none. Errors: as :func:`parse_policy`."""
    return Policies(**{kind: parse_policy(kind, text) for kind, text in texts.items() if text})


def combined(kind: str, texts: Iterable[str]) -> Any:
    """One policy of those that the texts name. Errors: ``ConfigurationError``."""
    found = [_one(kind, text.strip()) for text in texts]
    if not 1 <= len(found) <= POLICIES_MAX:
        raise ConfigurationError(f"a {kind} is made of 1 to {POLICIES_MAX} policies, not {len(found)}")
    unites = kind in ("cadence", "retention")
    return reduce((lambda one, other: one | other) if unites else (lambda one, other: one & other), found)


def policy_texts(policy: CadencePolicy | PlacementPolicy | RetentionPolicy | PacingPolicy) -> tuple[str, ...]:
    """The texts that :func:`combined` makes the policy from. Errors: ``ConfigurationError`` if no entry point names it,
    which says what to do."""
    parts: Sequence[object] = policy.policies if isinstance(policy, _COMBINED) else (policy,)
    return tuple(map(GROUP.text_of, parts))


def _one(kind: str, text: str) -> Any:
    made = GROUP.make(text)
    if not isinstance(made, KINDS[kind]):
        actual = next((name for name, base in KINDS.items() if isinstance(made, base)), "no")
        fitting = ", ".join(each.name for each in installed_policies() if each.kind == kind)
        raise ConfigurationError(f"{text!r} is a {actual} policy, not a {kind} policy; such policies are: {fitting}")
    return made
