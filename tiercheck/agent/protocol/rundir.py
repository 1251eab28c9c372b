"""The place where the agent of a node and its trainers meet: socket, locks and log, in a directory of this user's
alone."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tiercheck.errors import ConfigurationError
from tiercheck.tiers.posix.files import unlock_and_close

__all__ = ["NODE_DEFAULT", "RunDirectory", "default_node", "lock_file"]

NODE_DEFAULT = "node"
SOCKET_BYTES_MAX = 107
"""What a UNIX socket's address holds (``sun_path``), without its end."""
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}\Z")


def default_node(environment: Mapping[str, str] = os.environ) -> str:
    """The name of this node's agent: ``TIERCHECK_AGENT_NODE``, else ``node``. Several agents, with a name each, can
    run on one machine."""
    return environment.get("TIERCHECK_AGENT_NODE") or NODE_DEFAULT


@dataclass(frozen=True)
class RunDirectory:
    """The files of the agent named ``node``. Make one with :meth:`of`."""

    root: Path
    node: str

    @classmethod
    def of(cls, node: str, environment: Mapping[str, str] = os.environ) -> RunDirectory:
        """The directory ``TIERCHECK_RUN_DIR``, else ``tiercheck-<uid>`` in the temporary directory; made if missing.

        Errors: ``ConfigurationError`` for a name that is no plain word, a directory that is not this user's alone, or
        one whose path is too long for a socket.
        """
        if not _NODE.match(node):
            raise ConfigurationError(
                f"an agent's node name has up to 40 letters, digits, '.', '_' and '-', not {node[:60]!r}"
            )
        chosen = environment.get("TIERCHECK_RUN_DIR")
        root = Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"tiercheck-{os.getuid()}"
        run = cls(root.absolute(), node)
        if len(os.fsencode(run.socket)) > SOCKET_BYTES_MAX:
            raise ConfigurationError(
                f"{run.socket} is too long for a socket ({SOCKET_BYTES_MAX} bytes); point TIERCHECK_RUN_DIR at a "
                "directory with a shorter path"
            )
        run.make()
        return run

    def make(self) -> None:
        """Make the directory if it is missing: what tidies temporary files may have removed it. Errors:
        ``ConfigurationError``, as of :meth:`of`."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.root.lstat()
        except OSError as error:
            raise ConfigurationError(
                f"the agent's files need the directory {self.root}: {error}; point TIERCHECK_RUN_DIR at one of this "
                "node that can be written to"
            ) from error
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise ConfigurationError(f"{self.root} is no directory of this user's; remove it, or set TIERCHECK_RUN_DIR")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigurationError(
                f"{self.root} can be entered by other users; run 'chmod 700 {self.root}' or choose another"
            )

    @property
    def socket(self) -> Path:
        return self.root / f"agent-{self.node}.sock"

    @property
    def address(self) -> str:
        return f"ipc://{self.socket}"

    @property
    def peer_socket(self) -> Path:
        """Of a peer server without keys, which this directory keeps from other users."""
        return self.root / f"peer-{self.node}.sock"

    @property
    def lock(self) -> Path:
        """Held by the agent for as long as it lives; the kernel gives it back however it dies."""
        return self.root / f"agent-{self.node}.lock"

    @property
    def start_lock(self) -> Path:
        """Held by the trainer that is starting an agent, so that of many one does."""
        return self.root / f"agent-{self.node}.start"

    @property
    def log(self) -> Path:
        return self.root / f"agent-{self.node}.log"

    @property
    def info(self) -> Path:
        """JSON: the process, where its status page is, and the peer server's endpoint."""
        return self.root / f"agent-{self.node}.json"

    def agent_lives(self) -> bool:
        """Whether some agent of this name is running, or starting."""
        return self.incarnation() is not None

    def incarnation(self) -> str | None:
        """Which agent of this name is running: each has another one. Empty while it starts; ``None`` for none."""
        try:
            descriptor = lock_file(self.lock, shared=True)
            if descriptor is None:
                return self.lock.read_text().partition(" ")[0]
        except FileNotFoundError:  # its files were removed: no trainer finds an agent there
            return None
        unlock_and_close(descriptor)
        return None

    def say_who(self, lock: int, incarnation: str) -> None:
        """What :meth:`incarnation` and :attr:`process` tell; ``lock`` is the open file :attr:`lock`, which is held."""
        os.pwrite(lock, f"{incarnation} {os.getpid()}".encode(), 0)

    def is_found_by(self, lock: int) -> bool:
        """Whether trainers find the agent that has opened ``lock``: its files may have been removed. What removes old
        files takes them for new ones."""
        try:
            found = os.path.samestat(os.fstat(lock), self.lock.stat())
            os.utime(lock)
            os.utime(self.socket)
        except FileNotFoundError:
            return False
        except OSError:  # that is no answer
            return True
        return found

    def keep_beside(self) -> bool:
        """Have what removes old files take those beside the lock for new ones, too. Whether :attr:`info` is there."""
        with suppress(OSError):  # there is none without keys
            os.utime(self.peer_socket)
        try:
            os.utime(self.info)
        except FileNotFoundError:
            return False
        except OSError:
            pass  # that is no answer
        return True

    @property
    def process(self) -> str:
        """The agent's process, for a message."""
        pid = ""
        try:
            pid = self.lock.read_text().partition(" ")[2]
            stopped = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] in ("T", "t") if pid else False
        except FileNotFoundError:
            stopped = False
        said = f", which is stopped: 'kill -CONT {pid}' lets it go on" if stopped else ""
        return f"process {pid or 'unknown'}{said}"

    def log_tail(self, lines: int = 12) -> str:
        """The end of the agent's log, for a message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return "(there is no log)"
        return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"


def lock_file(path: Path, *, shared: bool = False) -> int | None:
    """Lock the file without waiting: its descriptor, to be closed; ``None`` if somebody else holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
