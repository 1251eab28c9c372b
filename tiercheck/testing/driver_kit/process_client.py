"""Another client of a tier: in another process, or at least in a thread with an event loop of its own.

Two clients that share an event loop take turns, so a driver that looks first and writes later is atomic to them as long
as it does not ``await`` in between, and a crash can be staged only where it does. Here the other client runs whenever
it likes, and a process can be killed.

What it does there is a *job*: an async function of this module, or of any other that can be imported, which gets an
open driver, a function that tells its parent something, and its arguments.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from tiercheck.errors import AlreadyExists, PreconditionFailed
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import Payload, PutMode

__all__ = ["InAnotherProcess", "InAnotherThread", "OtherClient"]

ANSWER_S = 60.0
"""How long another client may be silent."""
CREATES_MAX = 4000
TICK_S = 0.0005
"""Creators begin their rounds together, so far apart."""
GENERATIONS = 251
SWITCH_S = 1e-5
"""How soon one thread gives way to another: often enough to come between a look and a write."""

Tell = Callable[[Any], None]
Job = Callable[..., Coroutine[Any, Any, Any]]
Send = Callable[[str, object], None]


class OtherClient(abc.ABC):
    """Another client and its job. The job begins with :meth:`go`."""

    place: str
    """In words, for the report."""

    async def ready(self) -> None:
        """Wait until its driver is open."""
        await self._expect("open")

    @abc.abstractmethod
    def go(self, *arguments: float) -> None:
        """Let the job begin, with ``arguments`` after those that it has."""

    async def told(self) -> Any:
        """The next thing that the job tells."""
        return await self._expect("told")

    async def result(self) -> Any:
        """What the job returns."""
        return await self._expect("done")

    @abc.abstractmethod
    async def end(self) -> None:
        """Nothing of it is left. Idempotent."""

    @abc.abstractmethod
    def _read(self) -> tuple[str, Any]:
        """Wait for its next message."""

    async def _expect(self, expected: str) -> Any:
        """Errors: ``AssertionError`` if the job failed, or has something else to say."""
        reading = asyncio.get_running_loop().run_in_executor(None, self._read)
        try:
            async with asyncio.timeout(ANSWER_S):
                kind, value = await asyncio.shield(reading)
        except TimeoutError:
            raise AssertionError(f"the client in {self.place} was silent for {ANSWER_S:.0f} s") from None
        if kind == "failed":
            raise AssertionError(f"the client in {self.place} failed:\n{value}")
        assert kind == expected, f"the client in {self.place} should have been {expected!r}, but was {kind!r}: {value}"
        return value


class InAnotherProcess(OtherClient):
    """``make`` makes the driver there: a function or a class of a module, or :func:`functools.partial` of one with
    arguments that are texts, numbers, paths or ``None``. No code travels, only its name.

    Errors: ``TypeError`` for any other ``make``.
    """

    place = "another process"

    def __init__(self, make: Callable[[], TierDriver], job: Job, *arguments: object) -> None:
        work = written([named(make), named(functools.partial(job, *arguments))])
        # Not by multiprocessing, which would run the parent's main module again.
        program = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); import {__name__} as m; m.serve()"
        command = [sys.executable, "-c", program, json.dumps(sys.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._write(work)

    def go(self, *arguments: float) -> None:
        self._write(written(arguments))

    async def killed(self) -> list[Any]:
        """Kill it (SIGKILL), and return all that it has told since it was last asked.

        Errors: ``AssertionError`` if it was over already.
        """
        assert self._process.poll() is None, "it was over before it was killed"
        self._process.kill()
        told = []
        while (message := await asyncio.to_thread(self._read))[0] == "told":
            told.append(message[1])
        await self.end()
        return told

    async def end(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _write(self, message: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # of its end the next message tells
            os.write(self._process.stdin.fileno(), message)

    def _read(self) -> tuple[str, Any]:
        assert self._process.stdout is not None
        try:
            kind, value = json.loads(self._process.stdout.readline())
        except ValueError:  # cut short by its end
            return "failed", f"it ended with the exit status {self._process.wait()}"
        return kind, value


class InAnotherThread(OtherClient):
    """``driver``, which is not open, in a thread with an event loop of its own."""

    place = "another thread"

    def __init__(self, driver: TierDriver, job: Job, *arguments: object) -> None:
        self._messages: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._begin: queue.Queue[tuple[float, ...]] = queue.Queue()
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        bound = functools.partial(job, *arguments)
        work = work_of(lambda: driver, bound, self._wait, lambda *message: self._messages.put(message))
        self._thread = threading.Thread(target=asyncio.run, args=(work,), daemon=True)
        self._thread.start()

    def go(self, *arguments: float) -> None:
        self._begin.put(arguments)

    def _wait(self) -> tuple[float, ...]:
        return self._begin.get(timeout=ANSWER_S)

    async def end(self) -> None:
        self._begin.put(())  # a job that waits for the word waits no longer
        await asyncio.to_thread(self._thread.join, ANSWER_S)
        sys.setswitchinterval(self._switch_s)

    def _read(self) -> tuple[str, Any]:
        try:
            return self._messages.get(timeout=ANSWER_S)
        except queue.Empty:
            return "failed", f"it was silent for {ANSWER_S:.0f} s"


async def work_of(
    make: Callable[[], TierDriver], job: functools.partial[Any], wait: Callable[[], Iterable[float]], send: Send
) -> None:
    """Open the driver, wait for the word, do the job; whatever comes of it is sent."""
    try:
        async with make() as driver:
            send("open", None)
            more = wait()
            result = await job.func(driver, lambda value: send("told", value), *job.args, *more)
        send("done", result)
    except BaseException:  # noqa: BLE001  (nobody else hears of it)
        send("failed", traceback.format_exc())


def serve() -> None:
    """The whole of the other process: its work comes by standard input, and its messages go to standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no message

    def send(kind: str, value: object) -> None:
        answers.write(written([kind, value]))
        answers.flush()

    try:
        make, job = (found(each) for each in json.loads(sys.stdin.buffer.readline(), object_hook=path_of))
    except BaseException:  # noqa: BLE001  (such as a module that cannot be imported there)
        send("failed", traceback.format_exc())
        return
    asyncio.run(work_of(make, job, lambda: json.loads(sys.stdin.buffer.readline()), send))


# What goes from one process to the other: lines of JSON.


def written(message: object) -> bytes:
    return json.dumps(message, default=described).encode() + b"\n"


def described(value: object) -> dict[str, str]:
    if isinstance(value, Path):
        return {"path": str(value)}
    raise TypeError(f"a client in another process is made with texts, numbers, paths or None, not with {value!r}")


def path_of(value: dict[str, Any]) -> object:
    return Path(value["path"]) if value.keys() == {"path"} else value


def named(call: Callable[..., object]) -> Mapping[str, object]:
    """A call by the name of what is called. Errors: ``TypeError`` if it cannot be found by its name."""
    bound = call if isinstance(call, functools.partial) else functools.partial(call)
    module, name = getattr(bound.func, "__module__", ""), getattr(bound.func, "__qualname__", "")
    call_by_name = {"module": module, "name": name, "arguments": bound.args, "options": bound.keywords}
    try:
        same = found(call_by_name).func == bound.func
    except (ImportError, AttributeError, ValueError):
        same = False
    if not same:
        raise TypeError(f"another process cannot find {bound.func!r}; make it a function or a class of a module")
    return call_by_name


def found(call: Mapping[str, Any]) -> functools.partial[Any]:
    function: Any = importlib.import_module(call["module"])
    for name in call["name"].split("."):
        function = getattr(function, name)
    return functools.partial(function, *call["arguments"], **call["options"])


# Jobs.


def payload_of(generation: int, nbytes: int) -> Payload:
    """The content of a generation in 8 buffers: that many bytes and a few more, all of one value that names it."""
    value = generation % GENERATIONS
    block = bytes([value]) * (nbytes // 8)
    return [*(block for _ in range(7)), bytes([value]) * (nbytes - 7 * len(block) + value)]


def is_whole(content: bytes | memoryview, nbytes: int) -> bool:
    """Whether it is the content of any generation: not torn, not cut."""
    return len(content) > 0 and content == bytes([content[0]]) * (nbytes + content[0])


async def create_all(
    driver: TierDriver, tell: Tell, name: str, processor: int, rounds_min: int, seconds: float, begin: float
) -> list[bool]:
    """CREATE ``race/0``, ``race/1``... with ``name`` in them, until the time is over; whether each was won.

    Each round begins a tick after the former, from ``begin`` on (by ``time.monotonic``, which is the machine's). If
    rounds take longer than that, who lags behind finds objects there, which is faster than to write them: so the
    clients stay side by side. Each begins them on a ``processor`` of its own, as :func:`move_to` numbers it.
    """
    won: list[bool] = []
    while len(won) < rounds_min or (time.monotonic() < begin + seconds and len(won) < CREATES_MAX):
        move_to(processor)
        while time.monotonic() < begin + len(won) * TICK_S:
            pass  # a sleep would not end at the same moment in both
        try:
            await driver.put(f"race/{len(won)}", [name.encode()], mode=PutMode.CREATE)
        except AlreadyExists:
            won.append(False)
        else:
            won.append(True)
    return won


def move_to(processor: int) -> None:
    """Let this thread go on upon one of its processors, 0 the first and -1 the last of them, from where the system may
    take it again. Two clients on the same one take turns, and a busy machine may leave them there for a second.
    """
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(processors)[processor]})
    os.sched_setaffinity(0, processors)


async def increment(driver: TierDriver, tell: Tell, key: str, seconds: float) -> list[str]:
    """Add 1 to the number in the object by compare-and-swap, until the time is over and at least once; the etags."""
    etags: list[str] = []
    until = time.monotonic() + seconds
    while not etags or time.monotonic() < until:
        info = await driver.stat(key)
        value = int(bytes(await driver.get(key)))
        try:
            info = await driver.put(key, [b"%d" % (value + 1)], mode=PutMode.UPDATE(info.etag))
        except PreconditionFailed:
            continue
        etags.append(info.etag)
    return etags


async def overwrite(
    driver: TierDriver, tell: Tell, kept: str, passing: str, nbytes: int, rounds_min: int, seconds: float
) -> int:
    """Overwrite ``kept``, and let ``passing`` come and go, until the time is over; how often."""
    until = time.monotonic() + seconds
    rounds = 0
    while rounds < rounds_min or time.monotonic() < until:
        rounds += 1
        await driver.put(kept, payload_of(rounds, nbytes))
        await driver.put(passing, payload_of(rounds, nbytes))
        await driver.delete([passing])
    return rounds


async def write_until_killed(driver: TierDriver, tell: Tell, kept: str, fresh: str, nbytes: int) -> None:
    """Tell 1, overwrite ``kept``; tell 2, delete ``fresh`` and put it anew; and so on: each is a generation."""
    generation = 0
    while True:
        generation += 1
        tell(generation)
        if generation % 2:
            await driver.put(kept, payload_of(generation, nbytes))
            continue
        await driver.delete([fresh])
        if driver.capabilities.mappable:
            content = b"".join(payload_of(generation, nbytes))
            reservation = await driver.reserve(fresh, len(content))
            reservation.buffer[:] = content
            await reservation.publish()
        else:
            await driver.put(fresh, payload_of(generation, nbytes))
