"""The pytest plug-in ``tiercheck``, loaded wherever TierCheck is installed: the conformance kit's assertions explain
themselves."""

from __future__ import annotations
