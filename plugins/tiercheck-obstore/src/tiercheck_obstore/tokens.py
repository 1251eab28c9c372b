"""A random token in the metadata of each object, by which a put is told from every other.

A conditional put knows its own object by it where a try was done, its answer lost, and the repetition refused. And on
stores whose etags are a hash of the content it makes them change with every put: an etag is ``<the store's>.<token>``.
Where somebody else has put the object, its time of change takes the token's place. Listings show no metadata, so they
tell no etags (``capabilities.lists_etags``).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import obstore

from tiercheck.errors import PreconditionFailed
from tiercheck.types import Capabilities, ObjectInfo
from tiercheck_obstore.driver import ObstoreDriver
from tiercheck_obstore.failures import mapped_errors

if TYPE_CHECKING:
    from obstore import Attributes, ObjectMeta, PutResult, UpdateVersion

__all__ = ["MarkingDriver", "TokenDriver"]

_ETAG = re.compile(r'[^"*\s]+\.[0-9a-f@]{1,32}\Z')


class MarkingDriver(ObstoreDriver):
    """A driver whose puts know their own objects."""

    field: ClassVar[str] = "tiercheck-put"
    """What the token is called in the metadata."""

    def new_attributes(self) -> Attributes:
        return {self.field: secrets.token_hex(8)}

    async def own_put(self, key: str, attributes: Attributes | None) -> PutResult | None:
        assert attributes is not None
        try:
            found = await obstore.get_async(self.store, key, options={"head": True})
        except FileNotFoundError:
            return None
        if found.attributes.get(self.field) != attributes[self.field]:
            return None
        return {"e_tag": found.meta["e_tag"], "version": found.meta["version"]}


class TokenDriver(MarkingDriver):
    """A driver with etags that have a token; ``UPDATE`` compares the token, then lets the store compare its own etag.

    Between the two only a put of the very same bytes can go unnoticed, which replaces what the caller has seen by its
    equal.
    """

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, lists_etags=False)

    def info_of_put(self, key: str, nbytes: int, etag: str, attributes: Attributes | None) -> ObjectInfo:
        assert attributes is not None
        return ObjectInfo(key, nbytes, f"{etag}.{attributes[self.field]}")

    async def head(self, key: str) -> ObjectInfo:
        return (await self._look(key))[0]

    async def infos_of(self, metas: Sequence[ObjectMeta]) -> Sequence[ObjectInfo]:
        return [ObjectInfo(meta["path"], meta["size"], "") for meta in metas]

    async def update_version(self, key: str, etag: str) -> UpdateVersion:
        refused = PreconditionFailed(f"the etag should be {etag!r}", tier=self.url, key=key)
        if not _ETAG.match(etag):
            raise refused
        with mapped_errors(self.url, key):
            info, meta = await self._look(key)
        if info.etag != etag:
            raise PreconditionFailed(f"{refused.message}, but it is {info.etag!r}", tier=self.url, key=key)
        return self.version_of(meta)

    def version_of(self, meta: ObjectMeta) -> UpdateVersion:
        """What the store compares."""
        return {"e_tag": meta["e_tag"]}

    async def _look(self, key: str) -> tuple[ObjectInfo, ObjectMeta]:
        found = await obstore.get_async(self.store, key, options={"head": True})
        meta = found.meta
        token = found.attributes.get(self.field) or f"@{meta['last_modified'].timestamp():.0f}"
        return ObjectInfo(key, meta["size"], f"{self.own_etag(meta['e_tag'], key)}.{token}"), meta
