"""A random token in the metadata of each object, by which a put is told from every other.

A conditional put knows its own object by it where a try was done, its answer lost, and the repetition refused. And on
stores whose etags are a hash of the content it makes them change with every put: an etag is ``<the store's>.<token>``.
Where somebody else has put the object, its time of change takes the token's place. Listings show no metadata: what this
driver has not seen itself is asked for once, object by object, and remembered for as long as the store's etag stays.

So of two puts of the very same bytes by two clients, a listing may still show the etag of the first; an ``UPDATE`` with
it fails, as it should.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import obstore

from tiercheck.errors import NotFound, PreconditionFailed
from tiercheck.types import ObjectInfo
from tiercheck_obstore.driver import ObstoreDriver
from tiercheck_obstore.failures import mapped_errors

if TYPE_CHECKING:
    from obstore import Attributes, ObjectMeta, PutResult, UpdateVersion

__all__ = ["MarkingDriver", "TokenDriver"]

REMEMBERED_MAX = 1 << 16
ASKED_AT_ONCE = 32
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

    _seen: OrderedDict[str, tuple[str, str]]

    async def open(self) -> None:
        self._seen = OrderedDict()
        await super().open()

    def info_of_put(self, key: str, nbytes: int, etag: str, attributes: Attributes | None) -> ObjectInfo:
        assert attributes is not None
        return ObjectInfo(key, nbytes, self._remember(key, etag, str(attributes[self.field])))

    async def head(self, key: str) -> ObjectInfo:
        return (await self._look(key))[0]

    async def infos_of(self, metas: Sequence[ObjectMeta]) -> Sequence[ObjectInfo]:
        slots = asyncio.Semaphore(ASKED_AT_ONCE)

        async def info(meta: ObjectMeta) -> ObjectInfo | None:
            etag = self._known(meta)
            if etag is not None:
                return ObjectInfo(meta["path"], meta["size"], etag)
            async with slots:
                try:
                    with mapped_errors(self.url, meta["path"]):
                        return await self.head(meta["path"])
                except NotFound:
                    return None  # it went while it was listed

        found = await asyncio.gather(*(info(meta) for meta in metas))
        return [each for each in found if each is not None]

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
        return ObjectInfo(key, meta["size"], self._remember(key, self.own_etag(meta["e_tag"], key), str(token))), meta

    def _known(self, meta: ObjectMeta) -> str | None:
        own, etag = self._seen.get(meta["path"], ("", ""))
        return etag if etag and own == self.own_etag(meta["e_tag"], meta["path"]) else None

    def _remember(self, key: str, own: str, token: str) -> str:
        self._seen[key] = (own, f"{own}.{token}")
        self._seen.move_to_end(key)
        if len(self._seen) > REMEMBERED_MAX:
            self._seen.popitem(last=False)
        return self._seen[key][1]
