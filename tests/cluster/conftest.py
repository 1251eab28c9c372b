"""The servers that tests share: each worker starts one of a kind, and a test has a place of its own there."""

from __future__ import annotations

from tests.servers.azurite import azurite
from tests.servers.seaweed import s3_server
from tests.servers.sshd import sshd

__all__ = ["azurite", "s3_server", "sshd"]
