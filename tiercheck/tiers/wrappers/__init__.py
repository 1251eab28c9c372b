"""Drivers around a driver: each adds one thing, keeps the contract, and says truthfully what it can do.

They compose in any order::

    Tier("s3://bucket/run", wrap=lambda driver: MeteredDriver(RetryingDriver(PrefixedDriver(driver, "job-7"))))
"""

from tiercheck.tiers.wrappers.base import Call, Operation, WrappingDriver, WrappingReservation
from tiercheck.tiers.wrappers.metered import Latency, MeteredDriver, Metrics, OperationMetrics
from tiercheck.tiers.wrappers.prefixed import PrefixedDriver
from tiercheck.tiers.wrappers.read_only import ReadOnlyDriver
from tiercheck.tiers.wrappers.retrying import RetryingDriver, RetryPolicy
from tiercheck.tiers.wrappers.throttled import Throttle, ThrottledDriver

__all__ = [
    "Call",
    "Latency",
    "MeteredDriver",
    "Metrics",
    "Operation",
    "OperationMetrics",
    "PrefixedDriver",
    "ReadOnlyDriver",
    "RetryPolicy",
    "RetryingDriver",
    "Throttle",
    "ThrottledDriver",
    "WrappingDriver",
    "WrappingReservation",
]
