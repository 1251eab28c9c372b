"""OpenSSH's server on loopback, for its SFTP: with a host key and a user key of its own."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.servers.process import ServerProcess, free_port
from tests.servers.programs import need

__all__ = ["Sshd", "sshd"]

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


class Sshd(ServerProcess):
    """``with Sshd(folder) as server``. ``sftp_options``: for ``internal-sftp``, such as ``-R``."""

    name = "sshd"
    ready_s_max = 20.0

    def __init__(self, folder: Path, *, sftp_options: str = "") -> None:
        super().__init__(folder)
        self.sftp_options = sftp_options
        self.port = free_port()
        self._program = need("sshd", package="openssh-server")

    @property
    def client_options(self) -> str:
        """The options of a tier's URL that let its client in, and let it check whom it talks to."""
        return (
            f"fs.port={self.port}&fs.username={getpass.getuser()}&fs.client_keys={self.folder}/user_key"
            f"&fs.known_hosts={self.folder}/known_hosts&fs.config=null"
        )

    def prepare(self) -> None:
        keygen = need("ssh-keygen", package="openssh-client")
        for name in ("host_key", "user_key"):
            subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        host_key = (self.folder / "host_key.pub").read_text()
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {host_key}")
        text = CONFIGURATION.format(port=self.port, folder=self.folder, sftp_options=self.sftp_options)
        (self.folder / "sshd_config").write_text(text)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # the program refuses to start without it

    def command(self) -> Sequence[str | Path]:
        return [self._program, "-D", "-e", "-f", self.folder / "sshd_config"]

    def is_ready(self) -> bool:
        """Whether it greets."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            return connection.recv(4) == b"SSH-"

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
        self.signal(signal.SIGKILL)
        super().kill()


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with Sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server
