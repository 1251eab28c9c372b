"""A peer server in a process of its own: ``python -m benchmarks.peer_server shm://NAME?size=1GiB [--bind] [--keys]``.

Prints the address and the public key (or ``-``) when it listens, and ends with its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.peer import PeerKeys, PeerServer
from tiercheck.tiers.registry import open_driver


async def serve(store: str, bind: str, keys: Path | None) -> None:
    async def open_namespace(name: str) -> TierDriver:
        scheme, _, rest = store.partition("://")
        location, mark, options = rest.partition("?")
        return await open_driver(f"{scheme}://{location}-{name}{mark}{options}")

    server = PeerServer(open_namespace, bind=bind, keys=None if keys is None else PeerKeys.load(keys))
    await server.start()
    try:
        print(server.endpoint, server.server_key or "-", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_server")
    parser.add_argument("store", help="where the objects go; the namespace is appended to its name")
    parser.add_argument("--bind", default="tcp://127.0.0.1:0")
    parser.add_argument("--keys", type=Path, default=None, help="a directory made by PeerKeys.generate")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.store, arguments.bind, arguments.keys))
