"""A GlusterFS server in a network namespace of its own, and two FUSE mounts of it: two clients, as on two nodes.

The clients reach the server through a virtual cable that can be cut. The translators of the clients are those of
a default volume, so that they remember names and contents as mounts in the field do.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers.programs import need

__all__ = ["Gluster", "gluster"]

START_S_MAX = 20.0
PING_S = 1
"""After this long without an answer a client takes the server for lost."""
PORT = 24007

SERVER = """
volume store
  type storage/posix
  option directory {brick}
end-volume
volume locks
  type features/locks
  subvolumes store
end-volume
volume threads
  type performance/io-threads
  subvolumes locks
end-volume
volume server
  type protocol/server
  option transport-type tcp
  option transport.socket.bind-address {address}
  option transport.socket.listen-port {port}
  option auth.addr.threads.allow *
  subvolumes threads
end-volume
"""
CLIENT = """
volume client
  type protocol/client
  option transport-type tcp
  option remote-host {address}
  option remote-port {port}
  option remote-subvolume threads
  option ping-timeout {ping}
end-volume
"""
REMEMBERING = ("write-behind", "readdir-ahead", "open-behind", "quick-read", "md-cache")


def run(*command: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=30, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip() or done.returncode}")
    return done


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_S_MAX
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} within {START_S_MAX:.0f} s")
        time.sleep(0.02)


class Gluster:
    """Use as a context manager. ``brick`` is the server's directory, ``mounts`` are the two clients'."""

    def __init__(self, folder: Path) -> None:
        self.server_program = need("glusterfsd", package="glusterfs-server")
        self.client_program = need("glusterfs", package="glusterfs-client")
        need("ip", package="iproute2")
        self.folder = folder
        self.brick = folder / "brick"
        self.mounts = (folder / "mount1", folder / "mount2")
        token = secrets.token_hex(3)
        self.namespace, self.outside, self.inside = f"gl{token}", f"go{token}", f"gi{token}"
        # A link-local network of two addresses, drawn at random: several of these may live at a time.
        third, fourth = secrets.randbelow(254) + 1, secrets.randbelow(63) * 4
        self.our_address, self.address = f"169.254.{third}.{fourth + 1}", f"169.254.{third}.{fourth + 2}"
        self._server: subprocess.Popen[bytes] | None = None
        self._clients: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Gluster:
        try:
            for path in (self.brick, *self.mounts, self.folder / "log"):
                path.mkdir()
            self._plug_in()
            self.start()
            self._write_client_graph()
            for mount in self.mounts:
                self._mount(mount)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        # The server goes first: a client that cannot reach it answers at once, and can be unmounted.
        self.kill()
        for mount in self.mounts:
            run("umount", "-l", mount, check=False)
        for client in self._clients:
            client.kill()
            client.wait(timeout=10)
        run("ip", "link", "delete", self.outside, check=False)
        run("ip", "netns", "delete", self.namespace, check=False)

    def start(self) -> None:
        """Start the server, and wait until it listens."""
        graph = self.folder / "server.vol"
        graph.write_text(SERVER.format(brick=self.brick, address=self.address, port=PORT))
        # nsenter and not "ip netns exec", which has its own mounts.
        entered = ("nsenter", f"--net=/run/netns/{self.namespace}")
        program = (str(self.server_program), "-N", "-f", str(graph), "-l", str(self.folder / "log" / "server"))
        self._server = subprocess.Popen([*entered, *program, "-p", str(self.folder / "server.pid")])
        wait_for(self._listens, "the GlusterFS server did not listen")

    def kill(self) -> None:
        """SIGKILL to the server; what it had told its clients is on its disk."""
        server, self._server = self._server, None
        if server is not None:
            server.send_signal(signal.SIGKILL)
            server.wait(timeout=10)

    def restart(self) -> None:
        """Start a killed server again, and wait until both clients have found it."""
        self.start()
        self.wait_until_reachable()

    def cut(self) -> None:
        """Cut the cable: nothing arrives, and nobody is told."""
        run("ip", "link", "set", self.outside, "down")

    def heal(self) -> None:
        run("ip", "link", "set", self.outside, "up")
        self.wait_until_reachable()

    def wait_until_reachable(self) -> None:
        def reachable() -> bool:
            try:
                return all(os.listdir(mount) is not None for mount in self.mounts)  # noqa: PTH208
            except OSError:
                return False

        wait_for(reachable, "the clients did not find the server again")

    def _plug_in(self) -> None:
        if os.geteuid():
            pytest.skip("needs root: a network namespace, and mounts")
        try:
            run("ip", "netns", "add", self.namespace)
            run("ip", "link", "add", self.outside, "type", "veth", "peer", "name", self.inside)
            run("ip", "link", "set", self.inside, "netns", self.namespace)
        except RuntimeError as error:
            pytest.skip(f"needs the right to make network namespaces: {error}")
        run("ip", "addr", "add", f"{self.our_address}/30", "dev", self.outside)
        run("ip", "link", "set", self.outside, "up")
        run("ip", "-n", self.namespace, "addr", "add", f"{self.address}/30", "dev", self.inside)
        run("ip", "-n", self.namespace, "link", "set", self.inside, "up")
        run("ip", "-n", self.namespace, "link", "set", "lo", "up")

    def _listens(self) -> bool:
        if self._server is None or self._server.poll() is not None:
            raise RuntimeError(f"the server ended: {(self.folder / 'log' / 'server').read_text()[-2000:]}")
        sockets = run("nsenter", f"--net=/run/netns/{self.namespace}", "cat", "/proc/net/tcp").stdout
        return f":{PORT:04X} 00000000:0000 0A" in sockets

    def _write_client_graph(self) -> None:
        graph = CLIENT.format(address=self.address, port=PORT, ping=PING_S)
        below = "client"
        for translator in REMEMBERING:
            graph += f"volume {translator}\n  type performance/{translator}\n  subvolumes {below}\nend-volume\n"
            below = translator
        (self.folder / "client.vol").write_text(graph)

    def _mount(self, mount: Path) -> None:
        graph, log = self.folder / "client.vol", self.folder / "log" / mount.name
        command = [self.client_program, "-N", "-f", graph, "-l", log, mount]
        client = subprocess.Popen([str(part) for part in command])
        self._clients.append(client)

        def mounted() -> bool:
            if client.poll() is not None:
                text = log.read_text()[-2000:]
                if "fuse" in text and "/dev/fuse" in text:
                    pytest.skip("needs /dev/fuse")
                raise RuntimeError(f"the client ended: {text}")
            return mount.is_mount()

        wait_for(mounted, "the client did not mount")


@pytest.fixture(scope="session")
def gluster() -> Iterator[Gluster]:
    """One server and two mounts for the session; a test takes a directory of its own."""
    folder = Path(tempfile.mkdtemp(prefix="gluster-"))
    try:
        with Gluster(folder) as server:
            yield server
    finally:
        shutil.rmtree(folder)
