"""Keys to names in the bucket and back, and the identity of each put.

The name of an object is the tier's prefix and its key, as they are: any S3 tool finds it. S3 serves some 3,500 writes a
second under one prefix and splits prefixes that are busier by itself, but only after a while and by name; all ranks
that save one version write under names that differ late, and the next version's are new again. So ``shards=N`` puts
``shard-i-of-N/`` in front of the key, ``i`` being a hash of the *whole* key: each of the N prefixes then gets its share
of every version at once. The price is N listings instead of one, merged; hence it is off (``shards=1``) unless a job is
so large that S3 answers ``SlowDown``.

S3's own ETag is a hash of the content: the same bytes put twice have one. The etag of this driver is therefore
``<ETag>.<token>``: each put writes a random token into the object's metadata. If others have put the object, its
time of change takes the token's place.
"""

from __future__ import annotations

import re
import secrets
import zlib
from collections.abc import Mapping
from typing import Any

from tiercheck.keys import validate_key
from tiercheck.tiers.s3.settings import S3Settings

__all__ = ["TOKEN_FIELD", "Names", "etag_in", "etag_of", "new_token", "server_etag"]

PROBE_FOLDER = ".tiercheck-probe"
TOKEN_FIELD = "tiercheck-put"

_SHARD = re.compile(r"shard-(\d{3})-of-(\d{3})/\Z", re.ASCII)
_ETAG = re.compile(r"([0-9A-Za-z_-]{1,128})\.[0-9a-z@-]{1,32}\Z", re.ASCII)


class Names:
    def __init__(self, settings: S3Settings) -> None:
        self._root = settings.root
        self._shards = settings.shards

    @property
    def roots(self) -> list[str]:
        """What names begin with: one entry for each shard."""
        if self._shards == 1:
            return [self._root]
        return [f"{self._root}shard-{shard:03d}-of-{self._shards:03d}/" for shard in range(self._shards)]

    @property
    def probe_root(self) -> str:
        return f"{self._root}{PROBE_FOLDER}/"

    def name(self, key: str) -> str:
        """Errors: ``ValueError`` for a key that is not safe, or is the driver's own."""
        validate_key(key)
        if key.partition("/")[0] == PROBE_FOLDER:
            raise ValueError(f"the key {key!r} is in the folder where the driver tries out what the server can do")
        if self._shards == 1:
            return self._root + key
        return self.roots[zlib.crc32(key.encode()) % self._shards] + key

    def key(self, name: str, root: str) -> str | None:
        """The key under ``root``; ``None`` for what is no object of the tier (a folder's marker, a probe)."""
        try:
            key = name.removeprefix(root)
            return key if self.name(key) == name else None
        except ValueError:
            return None

    def stranger(self, folders: list[str]) -> str | None:
        """A folder of the prefix that tells of another number of shards, if there is one."""
        for folder in folders:
            relative = folder.removeprefix(self._root)
            match = _SHARD.match(relative)
            if (int(match[2]) if match else 1) != self._shards and relative != f"{PROBE_FOLDER}/":
                return relative
        return None


def new_token() -> str:
    return secrets.token_hex(8)


def server_etag(etag: str) -> str | None:
    """The server's ETag inside one of ours; ``None`` if the text is none of ours."""
    match = _ETAG.match(etag)
    return match[1] if match else None


def etag_of(quoted: str, token: str) -> str:
    """Ours: the server's ``quoted`` ETag, which is one of content, and the token of the put."""
    return f"{quoted.strip(chr(34))}.{token}"


def etag_in(answer: Mapping[str, Any]) -> str:
    """The etag of the object that a ``HeadObject`` or ``GetObject`` answers for. One that others put has no token."""
    token = answer.get("Metadata", {}).get(TOKEN_FIELD) or f"@{int(answer['LastModified'].timestamp())}"
    return etag_of(answer["ETag"], token)
