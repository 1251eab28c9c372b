"""A device in host memory whose streams run late, and in any order that their events permit.

What training and the data path put into streams is kept as functions. They run when somebody waits for an event, or
now and then between two calls: a stream is drawn, by its seed, and the first of its functions runs, unless it is held
back by an event that has not come. So whatever is not ordered by an event is reordered, sooner or later, in some seed.
A test that fails names its seed.

Any wait of the package can be left out, by the line that asks for it (:attr:`Reordering.dropped`): a test that still
passes then does not cover that wait.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tiercheck
from tiercheck.errors import UnsupportedSetup
from tiercheck.kernels import narrow_scaled_into
from tiercheck.kernels.reference import scale_search
from tiercheck.streams.codecs import codec as codec_of
from tiercheck.streams.codecs.sparse import Sparse
from tiercheck.streams.device.protocol import Event
from tiercheck.streams.gradients.encoder import scratch
from tiercheck.streams.tensors.as_bytes import array_of, dtype_name

__all__ = ["Reordering", "Site", "uncovered"]

PACKAGE = str(Path(tiercheck.__file__).parent)
WEIGHTS = (0.02, 1.0, 30.0)
"""How eager a stream is, drawn for each and now and then anew: one may lag far behind another."""

Site = tuple[str, str, int]
"""What is asked for (``wait``, ``host wait``), and the file and line of the package that ask for it."""


@dataclass
class Moment:
    device: Reordering
    come: bool = False

    def wait(self) -> None:
        if self.device.is_dropped("host wait"):
            return
        self.device.until(self)


@dataclass
class Step:
    work: Callable[[], None] | None = None
    after: Moment | None = None


@dataclass
class Lane:
    """A stream."""

    device: Reordering
    name: str
    steps: deque[Step] = field(default_factory=deque)
    weight: float = 1.0

    def record(self) -> Moment:
        moment = Moment(self.device)

        def come() -> None:
            moment.come = True

        self._put(Step(come))
        return moment

    def wait(self, event: Event) -> None:
        assert isinstance(event, Moment)
        if not self.device.is_dropped("wait"):
            self._put(Step(after=event))

    def run(self, work: Callable[[], None]) -> None:
        self._put(Step(work))

    def _put(self, step: Step) -> None:
        with self.device.lock:
            self.steps.append(step)
            self.device.go_on_perhaps()


class Reordering:
    """See :class:`~tiercheck.streams.device.protocol.Device`."""

    name = "reordering:0"
    nbytes = 1 << 30

    def __init__(self, seed: int, *, pins: bool = True) -> None:
        self.seed = seed
        self.dropped: Site | None = None
        self.sites: set[Site] = set()
        """What was asked for so far."""
        self.lock = threading.RLock()
        self.capturing = False
        self.pins = pins
        """Whether it counts foreign memory as pinned."""
        self._random = random.Random(seed)
        self._lanes: dict[str, Lane] = {}
        self._of_thread = threading.local()
        self._held: dict[int, torch.Tensor] = {}
        self._empty: list[torch.Tensor] = []
        self._pinned: dict[int, torch.Tensor] = {}
        self.default = self.side("default")

    # What the package asks for

    def holds(self, tensor: torch.Tensor) -> bool:
        if not tensor.numel():  # it lies nowhere
            return any(tensor is each for each in self._empty)
        return tensor.untyped_storage().data_ptr() in self._held

    def current(self) -> Lane:
        if self.capturing:
            raise UnsupportedSetup(f"{self.name} captures a graph")
        return getattr(self._of_thread, "lane", self.default)

    def side(self, purpose: str) -> Lane:
        with self.lock:
            if purpose not in self._lanes:
                self._lanes[purpose] = Lane(self, purpose, weight=self._random.choice(WEIGHTS))
            return self._lanes[purpose]

    def is_pinned(self, memory: torch.Tensor) -> bool:
        return self.pins or memory.untyped_storage().data_ptr() in self._pinned

    def pinned(self, nbytes: int) -> torch.Tensor:
        memory = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
        self._pinned[memory.untyped_storage().data_ptr()] = memory
        return memory

    def memory(self, nbytes: int, purpose: str) -> torch.Tensor:
        return self.put(torch.full((nbytes,), 0xA5, dtype=torch.uint8))

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.put(torch.empty_like(tensor))

    def quantise(
        self,
        codec: str,
        values: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        given = iter((codes, scales))
        codec_of(codec).encode(
            array_of(values),
            dtype_name(values, "a gradient"),
            seed=0,
            slot=lambda *_: next(given).numpy().data,
            residual=None if residual is None else residual.numpy(),
        )

    def find_scale(self, tensors: Sequence[torch.Tensor], found: torch.Tensor) -> None:
        scale = scale_search.find_scale([each.numpy() for each in tensors])
        found.numpy()[:] = np.array([scale, 0], np.float32).view(np.uint8)

    def narrow(self, values: torch.Tensor, found: torch.Tensor, out: torch.Tensor) -> None:
        scale, halves = float(found.numpy().view(np.float32)[0]), out.numpy().view(np.uint16)
        if not narrow_scaled_into.reference(values.numpy(), scale, halves):
            found.numpy()[4:] = 1

    def workspace(self, elements: int, kept: int) -> torch.Tensor:
        self.largest = elements, kept
        return self.memory(4, "of which it needs none")

    def compact(
        self,
        values: torch.Tensor,
        ratio: float,
        seed: int,
        indices: torch.Tensor,
        halves: torch.Tensor,
        said: torch.Tensor,
        workspace: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        parts: dict[str, memoryview] = {}

        def slot(suffix: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
            parts[suffix] = scratch(suffix, dtype, shape)
            return parts[suffix]

        assert values.numel() <= self.largest[0]
        assert indices.numel() // 4 <= self.largest[1]
        encoding = Sparse(ratio).encode(
            array_of(values),
            dtype_name(values, "a gradient"),
            seed=seed,
            slot=slot,
            residual=None if residual is None else residual.numpy(),
        )
        for place, suffix in ((indices, "indices"), (halves, "values")):
            place.numpy()[: parts[suffix].nbytes] = parts[suffix]
        count, scalars = parts["indices"].nbytes // 4, encoding.scalars
        said.numpy().view(np.int32)[:3] = count, scalars["exponent"], scalars["nonfinite"]

    def prepare(self, codec: str) -> None:
        pass

    # What a test does

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, whose memory is the device's from now on."""
        if tensor.numel():
            self._held[tensor.untyped_storage().data_ptr()] = tensor
        else:
            self._empty.append(tensor)
        return tensor

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """The calling thread's current stream is this one."""
        before = self.current()
        self._of_thread.lane = lane
        try:
            yield
        finally:
            self._of_thread.lane = before

    def write(self, tensor: torch.Tensor, work: Callable[[torch.Tensor], None]) -> None:
        """An operation in place, in the current stream. torch counts it at once."""
        with self.lock, torch.no_grad():
            tensor.mul_(1)
        self.write_unseen(tensor, work)

    def write_unseen(self, tensor: torch.Tensor, work: Callable[[torch.Tensor], None]) -> None:
        """The same through ``.data``, which torch does not count."""
        self.current().run(lambda: work(tensor.data))

    def free(self, used_in: Lane, lane: Lane, work: Callable[[], None]) -> None:
        """Memory of a tensor that was allocated in ``lane`` and used in ``used_in`` is freed, and at once used again by
        ``work``. As torch's allocator has it, that comes behind what was put into ``used_in`` so far, if the two differ
        (``record_stream``), and behind no other stream's work."""
        if lane is not used_in:
            lane.steps.append(Step(after=used_in.record()))
        lane.run(work)

    def finish(self) -> None:
        """Run everything."""
        with self.lock:
            while self._go_on():
                pass
        assert not any(lane.steps for lane in self._lanes.values()), f"streams wait for each other (seed {self.seed})"

    # Details

    def until(self, moment: Moment) -> None:
        while True:
            with self.lock:
                if moment.come:
                    return
                assert self._go_on(), f"an event never comes (seed {self.seed})"

    def go_on_perhaps(self) -> None:
        while self._random.random() < 0.3 and self._go_on():
            pass

    def is_dropped(self, what: str) -> bool:
        frame: Any = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if frame is None:
            return False
        site = (what, Path(frame.f_code.co_filename).name, frame.f_lineno)
        self.sites.add(site)
        return site == self.dropped

    def _go_on(self) -> bool:
        """One step of some stream; ``False`` if none can go on."""
        if self._random.random() < 0.01:
            for lane in self._lanes.values():
                lane.weight = self._random.choice(WEIGHTS)
        waiting = [lane for lane in self._lanes.values() if lane.steps]
        ready = [lane for lane in waiting if lane.steps[0].after is None or lane.steps[0].after.come]
        if not ready:
            return False
        lane = self._random.choices(ready, [each.weight for each in ready])[0]
        step = lane.steps.popleft()
        if step.work is not None:
            with torch.no_grad():
                step.work()
        return True


def uncovered(scenario: Callable[[Reordering], None], seeds: range, **options: Any) -> list[Site]:
    """The waits of the package, each left out by itself, without which ``scenario`` passes with every seed.

    With all of them it must pass. Errors: whatever it raises then, with the seed.
    """
    sites: set[Site] = set()
    for seed in seeds:
        device = Reordering(seed, **options)
        try:
            scenario(device)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        sites |= device.sites
    assert sites, "the scenario asks for no wait at all"
    return [site for site in sorted(sites) if all(passes(scenario, seed, site, options) for seed in seeds)]


def passes(scenario: Callable[[Reordering], None], seed: int, dropped: Site, options: dict[str, Any]) -> bool:
    device = Reordering(seed, **options)
    device.dropped = dropped
    try:
        scenario(device)
    except Exception:
        return False
    return True
