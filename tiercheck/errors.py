"""The exceptions TierCheck raises.

::

    TierCheckError
    ├── ConfigurationError        the caller's set-up is wrong; nothing was changed
    │   ├── UnsupportedSetup      a training set-up that cannot be saved whole, refused at attach
    │   ├── UnknownRequest        an agent of another release does not know what it was asked
    │   └── Mismatch              the checkpoint belongs to another model or form of state
    ├── TierError                 a driver could not do what was asked (carries ``tier`` and ``key``)
    │   ├── NotFound              no object under this key
    │   ├── AlreadyExists         CREATE met an object
    │   ├── PreconditionFailed    UPDATE met another etag
    │   ├── Unsupported           the driver's capabilities exclude the call
    │   ├── CapacityExceeded      the tier is full, or smaller than it must be
    │   │   └── FileSystemFull    what lies beneath it is full: others may hold that room, and free it
    │   ├── Corruption            bytes read are not the bytes written
    │   ├── Unauthorized          the tier refuses this caller
    │   ├── Transient             worth another try
    │   │   └── NothingListens    no server is at the address
    │   └── Closed                the driver is not open
    ├── DeadlineExceeded          a wait reached its deadline; the message says for what
    ├── GroupError                a collective among the ranks failed
    │   ├── RanksLate             some ranks did not arrive in time (carries ``late``); a DeadlineExceeded, too
    │   └── PeerLost              a rank's connection broke
    ├── JobConflict               another job, or a newer generation of this one, owns the name
    ├── SaveError                 a version could not be saved
    └── RecoveryError             what the tiers hold cannot be restored
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AlreadyExists",
    "CapacityExceeded",
    "Closed",
    "ConfigurationError",
    "Corruption",
    "DeadlineExceeded",
    "FileSystemFull",
    "GroupError",
    "JobConflict",
    "Mismatch",
    "NotFound",
    "NothingListens",
    "PeerLost",
    "PreconditionFailed",
    "RanksLate",
    "RecoveryError",
    "SaveError",
    "TierCheckError",
    "TierError",
    "Transient",
    "Unauthorized",
    "UnknownRequest",
    "Unsupported",
    "UnsupportedSetup",
]


class TierCheckError(Exception):
    """Whatever TierCheck raises on purpose."""


class ConfigurationError(TierCheckError):
    """The caller asked for something impossible; nothing was changed."""


class UnsupportedSetup(ConfigurationError):
    """A training set-up whose state cannot be saved whole; the message says what is supported."""


class Mismatch(ConfigurationError):
    """The checkpoint was written by another model, or has another form than this job's state."""


class UnknownRequest(ConfigurationError):
    """The agent is of another release, and does not know what it was asked. It goes on, and so may whoever asked."""


class TierError(TierCheckError):
    """A driver could not do what was asked of it.

    ``tier`` names the tier (its URL without secrets), and ``key`` names the object. Each is ``None`` if it is not
    known.
    """

    def __init__(self, message: str, *, tier: str | None = None, key: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.tier = tier
        self.key = key

    def __str__(self) -> str:
        where = ", ".join(
            f"{label} {value!r}" for label, value in (("tier", self.tier), ("object", self.key)) if value is not None
        )
        return f"{self.message} ({where})" if where else self.message


class NotFound(TierError):
    """There is no object under this key."""


class AlreadyExists(TierError):
    """``CREATE`` met an object under this key. The object is unchanged."""


class PreconditionFailed(TierError):
    """``UPDATE`` met an object with another etag, or no object. Nothing is changed."""


class Unsupported(TierError):
    """The driver's capabilities exclude this call."""


class CapacityExceeded(TierError):
    """The tier is full, or is smaller than what it must hold; nothing was published."""


class FileSystemFull(CapacityExceeded):
    """The file system beneath the tier has no room, or the user's quota is used up: others may hold it, and free it."""


class Corruption(TierError):
    """The bytes read are not the bytes that were written."""


class Unauthorized(TierError):
    """The tier refuses this caller."""


class Transient(TierError):
    """A failure that may pass; the call is worth another try."""


class NothingListens(Transient):
    """The store's machine answers, but no server listens there: the server is down, or the address is wrong."""


class Closed(TierError):
    """The driver was not opened, or is closed already."""


class DeadlineExceeded(TierCheckError):
    """A wait reached its deadline: for a tier, an agent, a process of this rank, or (:class:`RanksLate`) for ranks."""


class GroupError(TierCheckError):
    """A collective among the ranks of the job failed: they cannot agree on anything any more."""


class RanksLate(GroupError, DeadlineExceeded):
    """Ranks were waited for, and did not arrive in time. ``late`` holds them, as far as they are known."""

    def __init__(self, message: str, *, late: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.late = tuple(late)


class PeerLost(GroupError):
    """The connection to another rank broke during a collective."""


class JobConflict(TierCheckError):
    """Another live job, or a newer generation of this one, owns the name."""


class SaveError(TierCheckError):
    """A version could not be saved, or it is saved as a differential and its base could not be made. The message says
    which, and names the version, the tier and the cause."""


class RecoveryError(TierCheckError):
    """What the tiers hold cannot be restored into this job."""
