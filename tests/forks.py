"""Processes of a job that start at once: they are forked from a process that has imported torch and DeepSpeed.

An interpreter that imports both needs seconds of a core, and DeepSpeed's engines collect the garbage of all that was
imported, again and again. Here one process imports them once, takes what it has out of the garbage collector's sight
(``gc.freeze``), and forks the processes of every launch of a test run: all workers of pytest-xdist share it. Each of
them is as fresh as a new interpreter: the process that forks runs nothing of a test.

A launch that ends otherwise than with zeros says how in its log: which rank ended first and how, and, if it was by a
signal or at the deadline, what each thread was doing. :func:`tail` is what a failing test shows of it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

__all__ = ["Forks", "Server", "forks", "join", "pytest_configure_node", "serve_workers", "tail"]

ROOT = Path(__file__).parents[1]
TAIL_CHARS = 16_000
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONFAULTHANDLER": "1"}
ADDRESS = "TESTS_FORKS"
"""The variable that tells a rank, and what it starts, the address of the process that forks."""
REQUEST_BYTES = 1 << 16
DUMP_S_MAX = 10.0
"""At the deadline a rank may take so long to write down what its threads are doing."""
PRELOADED = (
    "deepspeed.runtime.zero.muon.muon_optimizer",  # which engines import when they are built, and it the compiler
    "numba",
    "tiercheck.folding.__main__",
    "tiercheck.integrations.deepspeed",
    "tiercheck.integrations.torch",
    "tiercheck.opening.startup",
    "tiercheck.streams.rebuilding.folding",
    "torch._dynamo",  # which the first optimizer imports
)


class Server:
    """The process that forks: ``with Server() as server``, and :class:`Forks` with its address."""

    def __enter__(self) -> Server:
        self.address = f"tiercheck-tests-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{self.address}")  # in no directory, and gone with the process
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forks", str(listener.fileno()), *PRELOADED],
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass(frozen=True)
class Forks:
    """What starts processes. ``address``: a :class:`Server`'s."""

    address: str

    def run(
        self,
        program: str,
        *arguments: str | Path,
        log: Path,
        ranks: int = 1,
        directory: Path = ROOT,
        deadline_s: float = 240.0,
        environment: Mapping[str, str] | None = None,
    ) -> list[int]:
        """The exit status of each rank of ``program``; what they print is in ``log``, and how they ended unless all
        ended with 0.

        ``program``: a module of the tests, whose ``main`` is called, or the path of a script.

        When one fails, or at the deadline, all are killed.
        """
        launch = {
            "address": self.address,
            "program": program,
            "arguments": [*map(str, arguments)],
            "log": str(log),
            "ranks": ranks,
            "directory": str(directory),
            "deadline_s": deadline_s,
            "environment": dict(environment or {}),
        }
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{self.address}")
            with connection.makefile("rw") as stream:
                stream.write(json.dumps(launch) + "\n")
                stream.flush()
                answer = stream.readline()
        assert answer, "the process that forks has ended"
        codes: list[int] = json.loads(answer)
        return codes

    def run_script(self, text: str, *arguments: str, folder: Path, **options: Any) -> tuple[int, str]:
        """The exit status of a script, and what it printed. Its files lie in ``folder``."""
        script, log = folder / "script.py", folder / "script.log"
        script.write_text(text)
        (code,) = self.run(str(script), *arguments, log=log, **options)
        return code, log.read_text()


def tail(log: Path) -> str:
    """The end of a launch's log, for people."""
    return log.read_text(errors="replace")[-TAIL_CHARS:]


SERVER = pytest.StashKey[Server]()


def serve_workers(config: pytest.Config) -> None:
    """pytest-xdist's controller starts the server of its workers."""
    if config.getoption("tx", None) and not hasattr(config, "workerinput"):
        server = config.stash[SERVER] = Server().__enter__()
        config.add_cleanup(lambda: server.__exit__())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["forks"] = node.config.stash[SERVER].address


@pytest.fixture(scope="session")
def forks(request: pytest.FixtureRequest) -> Iterator[Forks]:
    if hasattr(request.config, "workerinput"):
        yield Forks(request.config.workerinput["forks"])
    else:
        with Server() as server:
            yield Forks(server.address)


def join(backend: str = "gloo", **options: Any) -> None:
    """As ``init_process_group`` under torchrun: the ranks of this launch become a group."""
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port, listener = int(os.environ["MASTER_PORT"]), int(os.environ["TESTS_LISTENER"])
    # Rank 0 takes over a socket that listens already: no other process can have taken its port.
    extra = {"is_master": True, "master_listen_fd": listener} if rank == 0 else {}
    store = dist.TCPStore("127.0.0.1", port, world, **extra)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, **options)


def preload(modules: Iterable[str]) -> None:
    """What each process would do anew."""
    with contextlib.suppress(ImportError):
        # DeepSpeed's Adam on the host asks for the processor's vendor each time, and an interpreter is started for it.
        cpuinfo = importlib.import_module("cpuinfo")
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
        cpuinfo.get_cpu_info()
    for module in modules:
        with contextlib.suppress(ImportError):  # whoever needs it says so
            importlib.import_module(module)
    with contextlib.suppress(ImportError):
        # Numba learns its types at the first function that it compiles or loads: half a second of each process.
        importlib.import_module("numba").njit(lambda number: number)(1)


def serve(listener: socket.socket) -> None:
    """Forks what is asked for on each connection, until the standard input ends."""
    preload(sys.argv[2:])
    gc.collect()
    gc.freeze()
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                listener.close()
                answer(connection)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def answer(connection: socket.socket) -> NoReturn:
    """In a process of its own, so that launches of several workers run at a time."""
    try:
        text, descriptors = received(connection)
        request = json.loads(text)
        os.environ[ADDRESS] = request.pop("address")
        answers = forked_fold(*descriptors, **request) if descriptors else iter([launch(**request)])
        with connection.makefile("w") as stream:
            for each in answers:
                stream.write(json.dumps(each) + "\n")
                stream.flush()
    except SystemExit:
        raise  # in a process that was forked for a rank: see start()
    except BrokenPipeError:
        pass  # who asked was killed
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def received(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A line, and the descriptors that came with it."""
    text, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 2)
    while text and not text.endswith(b"\n"):
        text += connection.recv(REQUEST_BYTES)
    return text, descriptors


def forked_fold(channel: int, errors: int, fold: str, environment: Mapping[str, str]) -> Iterator[int]:
    """The number of a process that is what ``python -m tiercheck.folding FOLD`` would be (``tests/forked_folds.py``);
    and its exit status, once it has ended."""
    if pid := os.fork():
        os.close(channel)
        yield pid
        yield os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number, fd in ((0, nothing), (1, nothing), (2, errors)):
            os.dup2(fd, number)
        random.seed()
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
        told = {**json.loads(fold), "descriptor": channel}
        os.getppid = lambda: told["owner"]  # its parent is this process's
        # As tests/servers/eager has it.
        importlib.import_module("tiercheck.folding.settings").stand_back = lambda *_: "nothing: a test waits for it"
        importlib.import_module("tiercheck.folding.__main__").main(json.dumps(told))
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def launch(ranks: int, deadline_s: float, *, log: str, **what: Any) -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pids = [start(rank, ranks, listener, log=log, **what) for rank in range(ranks)]
    codes, ended = wait(pids, deadline_s)
    if any(codes):
        with Path(log).open("a") as file:
            file.write(f"\n=== the launch has failed: {'; '.join(ended)} ===\n")
    return codes


def start(
    rank: int,
    ranks: int,
    listener: socket.socket,
    program: str,
    arguments: Sequence[str],
    log: str,
    directory: str,
    environment: Mapping[str, str],
) -> int:
    """The process of one rank."""
    if pid := os.fork():
        with contextlib.suppress(PermissionError):  # the process did it itself, and has gone on
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, fd in ((0, nothing), (1, output), (2, output)):
            os.dup2(fd, number)
        os.chdir(directory)
        random.seed()
        os.environ.update(environment)
        if program.startswith("tests."):
            become_rank(rank, ranks, listener)
            sys.argv = [program, *arguments]
            module = importlib.import_module(program)
            gc.freeze()
            module.main()
            code = 0
        else:
            run_as_interpreter(program, arguments)
    except SystemExit:
        raise  # through all that is above, to the interpreter's end
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def become_rank(rank: int, ranks: int, listener: socket.socket) -> None:
    """The variables of torchrun, and the socket for :func:`join`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    os.environ |= {"TESTS_LISTENER": str(listener.fileno())}


def run_as_interpreter(program: str, arguments: Sequence[str]) -> NoReturn:
    """A script, to the regular end of an interpreter."""
    sys.argv = [program, *arguments]
    # In the place of the directory from which this process was started.
    sys.path[0] = str(Path(program).absolute().parent)
    runpy.run_path(program, run_name="__main__")
    sys.exit(0)


def wait(pids: list[int], deadline_s: float) -> tuple[list[int], list[str]]:
    """The ranks' exit statuses, and how they ended, in words and in that order. When one fails, or at the deadline, all
    are killed with what they started."""
    codes: dict[int, int] = {}
    ended: list[str] = []
    living = {os.pidfd_open(pid): pid for pid in pids}

    def reap(until: float | None, why: str = "") -> bool:
        """Whether one ended until then."""
        timeout = None if until is None else max(0.0, until - time.monotonic())
        descriptors, _, _ = select.select(list(living), [], [], timeout)
        for descriptor in descriptors:
            pid = living.pop(descriptor)
            os.close(descriptor)
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            by_us = codes[pid] in (-signal.SIGABRT, -signal.SIGKILL)
            ended.append(f"rank {pids.index(pid)} {in_words(codes[pid])}{why if by_us else ''}")
        return bool(descriptors)

    until, why = time.monotonic() + deadline_s, ", killed since another one had failed"
    while living and not any(codes.values()):
        if not reap(until):
            why = f", killed at the deadline of {deadline_s:g} s"
            send(living.values(), signal.SIGABRT, os.kill)  # faulthandler writes down what each thread is doing
            until = time.monotonic() + DUMP_S_MAX
            while living and reap(until, why):
                pass
            break
    if living or any(codes.values()):
        send(pids, signal.SIGKILL, os.killpg)
    while living:
        reap(None, why)
    return [codes[pid] for pid in pids], ended


def send(pids: Iterable[int], number: signal.Signals, to: Callable[[int, int], None]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            to(pid, number)


def in_words(code: int) -> str:
    names = {-number: number.name for number in signal.Signals}
    return f"ended by {names.get(code, f'signal {-code}')}" if code < 0 else f"ended with exit status {code}"


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
