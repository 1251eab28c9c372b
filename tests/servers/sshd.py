"""OpenSSH's server on loopback, for its SFTP: with a host key and a user key of its own."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.servers.programs import need

__all__ = ["Sshd", "free_port", "sshd"]

READY_S_MAX = 20.0
CONFIGURATION = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/user_key.pub
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
MaxSessions 64
MaxStartups 64
Subsystem sftp internal-sftp {sftp_options}
"""


class Sshd:
    """``async``-free: ``with Sshd(folder) as server``. ``sftp_options``: for ``internal-sftp``, such as ``-R``."""

    def __init__(self, folder: Path, *, sftp_options: str = "") -> None:
        self.folder = folder
        self.sftp_options = sftp_options
        self.port = free_port()
        self._program = need("sshd", package="openssh-server")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def client_options(self) -> str:
        """The options of a tier's URL that let its client in, and let it check whom it talks to."""
        return (
            f"fs.port={self.port}&fs.username={getpass.getuser()}&fs.client_keys={self.folder}/user_key"
            f"&fs.known_hosts={self.folder}/known_hosts&fs.config=null"
        )

    def __enter__(self) -> Self:
        keygen = need("ssh-keygen", package="openssh-client")
        for name in ("host_key", "user_key"):
            subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        host_key = (self.folder / "host_key.pub").read_text()
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {host_key}")
        text = CONFIGURATION.format(port=self.port, folder=self.folder, sftp_options=self.sftp_options)
        (self.folder / "sshd_config").write_text(text)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # the program refuses to start without it
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it greets."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, "-D", "-e", "-f", self.folder / "sshd_config"], stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + READY_S_MAX
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                    if connection.recv(4) == b"SSH-":
                        return
            except OSError:
                pass
            if time.monotonic() > deadline or self._process.poll() is not None:
                self.kill()
                raise RuntimeError(f"sshd did not come up: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def processes(self) -> list[int]:
        """The server, and those that serve its connections: they are its descendants."""
        if self._process is None:
            return []
        found = [self._process.pid]
        for pid in found:  # grows while it is walked
            try:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            found += [int(child) for child in children.split()]
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of them."""
        for pid in self.processes():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def kill(self) -> None:
        """SIGKILL, to the processes that serve connections too. Idempotent."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with ExitStack() as stack:
        yield stack.enter_context(Sshd(tmp_path_factory.mktemp("sshd")))
