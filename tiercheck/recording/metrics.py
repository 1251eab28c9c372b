"""What the training loop reports of its versions."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from tiercheck.errors import ConfigurationError
from tiercheck.keys import MetricKey, is_metric_name
from tiercheck.types import shown

__all__ = ["Metrics"]

log = logging.getLogger(__name__)

METRICS_MAX = 64
"""So many metrics may be reported of one version."""


class Metrics:
    """The reports of one generation."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._version = -1
        self._reported: dict[str, float] = {}
        """Of that version."""

    def of(self, version: int, metrics: Mapping[str, object]) -> list[MetricKey]:
        """The keys of what is new among these metrics. Errors: ``ConfigurationError``; then nothing is reported."""
        reported = dict(self._reported) if version == self._version else {}
        found: list[MetricKey] = []
        for name, given in metrics.items():
            value = _number(name, given)
            if not math.isfinite(value):
                log.warning("the %s of version %d is %s, which no policy is told", name, version, value)
                continue
            if reported.setdefault(name, value) != value:
                raise ConfigurationError(
                    f"the {name} of version {version} was reported already, as {reported[name]}, and is {value} now: "
                    "report a metric once a version, when it is final"
                )
            if name not in self._reported or version != self._version:
                found.append(MetricKey(self._generation, version, name, value))
        if len(reported) > METRICS_MAX:
            raise ConfigurationError(f"at most {METRICS_MAX} metrics can be reported of a version, not {len(reported)}")
        self._version, self._reported = version, reported
        return found


def _number(name: str, value: object) -> float:
    if not is_metric_name(name):
        raise ConfigurationError(f"a metric has a name of at most 64 letters, digits and '_', not {shown(name)}")
    try:
        return float(value)  # type: ignore[arg-type]  # a tensor or an array of one element is a number, too
    except (TypeError, ValueError, OverflowError):
        raise ConfigurationError(f"the metric {name} must be a number, not {shown(value)}") from None
