"""Ways to save what happened since a base, each of which sees the steps as they are taken.

A scheme's state goes along with the training: each step's gradient is encoded, decoded and replayed at once, with the
codecs and the replay kernel of a recovery, so that no gradient is kept. Another way of saving is another subclass of
:class:`Scheme`, and an entry in :func:`schemes`.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from benchmarks.parts import PartMemory
from benchmarks.training import Floats, Held, State, replay_of
from tiercheck.format.container import Shard, TensorSpec, parse
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.kernels import AdamStep, SparseGradient
from tiercheck.keys import ShardKey
from tiercheck.streams.codecs import codec, codec_names, decode, decode_sparse
from tiercheck.streams.gradients.encoder import GradientEncoder
from tiercheck.streams.optimizers.replay import Replay
from tiercheck.streams.records.base import BaseCapture, read_base
from tiercheck.streams.records.snapshot import SNAPSHOT_CODECS, SnapshotStream, advanced

__all__ = ["EncodedGradients", "Replayed", "Scheme", "Snapshot", "Stale", "schemes"]


class Scheme(abc.ABC):
    """Sees the base, every step after it, and the state that is lost; then tells what it would restore."""

    mode: ClassVar[str]

    def __init__(self, name: str, base: State) -> None:
        self.name = name
        self._state = base
        self.written_bytes = 0
        """All steps together."""
        self.held_bytes = 0
        """What there is of them besides the base when the state is lost."""

    @abc.abstractmethod
    def take(self, gradients: Mapping[str, Floats], step: AdamStep) -> None:
        """The gradients that the coming step applies."""

    def end(self, lost: State) -> None:  # noqa: B027  (most have nothing left to do)
        """The last step is taken, and the state is ``lost``."""

    def restored(self) -> State:
        """What a recovery gets, as of the version of the last step."""
        return self._state


class Stale(Scheme):
    """Nothing is saved between bases."""

    mode = "stale"

    def take(self, gradients: Mapping[str, Floats], step: AdamStep) -> None:
        pass

    def end(self, lost: State) -> None:
        # What follows is compared step by step, so that the count goes on as if none had been lost.
        self._state = State(lost.version, self._state.tensors)


class Replayed(Scheme):
    """A differential a step, by one of the codecs, replayed from the base on."""

    mode = "replay"

    def __init__(
        self,
        codec_name: str,
        base: State,
        *,
        replay: Replay,
        threads: int,
        gradients: EncodedGradients | None = None,
    ) -> None:
        """``gradients``: those that somebody else encodes, step by step; then :meth:`apply` is called alone."""
        super().__init__(codec_name, base.copy())
        self._replay = replay
        self._threads = threads
        sizes = {name: held[0].size for name, held in base.tensors.items()}
        self._gradients = gradients or EncodedGradients(codec_name, sizes, threads)

    def take(self, gradients: Mapping[str, Floats], step: AdamStep) -> None:
        self._gradients.encode(gradients, step.step)
        self.apply(step)

    def apply(self, step: AdamStep) -> None:
        """Replay what was encoded last."""
        for name, decoded in self._gradients.decoded():
            param, first, second = self._state.tensors[name]
            state = {"exp_avg": first, "exp_avg_sq": second}
            self._replay(param, state, [decoded], [step], threads=self._threads)
        self._state = State(step.step, self._state.tensors)
        self.written_bytes += self._gradients.nbytes
        self.held_bytes += self._gradients.nbytes


class EncodedGradients:
    """The gradients of one step, as the differential stream encodes them, in memory that the next step uses again.

    ``trained_on``: the gradients are then what they decode to. Residuals live on from step to step.
    """

    def __init__(self, codec_name: str, sizes: Mapping[str, int], threads: int, *, trained_on: bool = False) -> None:
        chosen = codec(codec_name)
        specs = {name: TensorSpec(name, "F32", (size,)) for name, size in sizes.items()}
        self._encoder = GradientEncoder(chosen, specs, train_on_compressed=trained_on, threads=threads)
        self._memory = {name: PartMemory(chosen, "F32", (size,)) for name, size in sizes.items()}
        self._descriptions: dict[str, dict[str, Any]] = {}
        self._threads = threads

    def encode(self, gradients: Mapping[str, Floats], seed: int) -> None:
        for name, memory in self._memory.items():
            memory.clear()
            encoding = self._encoder.encode(name, torch.from_numpy(gradients[name]), seed=seed, slot=memory.slot)
            self._descriptions[name] = encoding.to_object()

    def decoded(self) -> Iterator[tuple[str, Floats | SparseGradient]]:
        """By parameter, sparse where they are stored so: what a recovery replays."""
        for name, memory in self._memory.items():
            stored = self._descriptions[name], memory.parts
            sparse = decode_sparse(*stored, threads=self._threads)
            yield name, decode(*stored, threads=self._threads) if sparse is None else sparse

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())


class Snapshot(Scheme):
    """The project's own snapshots. Each supersedes the last, so that one alone is held; one a version is written."""

    mode = "snapshot"

    def __init__(self, codec_name: str, base: State, *, threads: int) -> None:
        super().__init__(codec_name, base)
        self._threads = threads
        self._steps = 0

    def take(self, gradients: Mapping[str, Floats], step: AdamStep) -> None:
        self._steps += 1

    def end(self, lost: State) -> None:
        stream = SnapshotStream(HeldState(lost), self.name, 1, encode_threads=self._threads)
        base = base_of(self._state)
        stream.set_reference_base(base)
        key = stream.key(1, lost.version, 0)
        memory = memoryview(bytearray(stream.nbytes_max))
        self.held_bytes = stream.begin(key, memory).finish(skipped=False)
        self.written_bytes = self.held_bytes * self._steps
        state = advanced(read_base(base, tier="memory"), parse(memory[: self.held_bytes]), tier="memory")
        tensors: dict[str, Held] = {}
        for name, master in state.masters.items():
            moments = state.optimizer_state[name]
            tensors[name] = (master.numpy(), moments["exp_avg"].numpy(), moments["exp_avg_sq"].numpy())
        self._state = State(lost.version, tensors)


class HeldState(ModuleProvider):
    """A state of the benchmark, as a provider hands it to the streams."""

    def __init__(self, state: State) -> None:
        self._state = state
        named = {name: torch.nn.Parameter(torch.from_numpy(held[0])) for name, held in state.tensors.items()}
        module = torch.nn.Module()
        for name, parameter in named.items():
            module.register_parameter(name.replace(".", "/"), parameter)
        super().__init__(module, torch.optim.AdamW(named.values()))

    def masters(self) -> Mapping[str, torch.Tensor]:
        return {name: torch.from_numpy(held[0]) for name, held in self._state.tensors.items()}

    def group_of(self) -> Mapping[str, int]:
        return dict.fromkeys(self._state.tensors, 0)

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        keys = ("exp_avg", "exp_avg_sq")
        return {
            name: dict(zip(keys, map(torch.from_numpy, held[1:]), strict=True))
            for name, held in self._state.tensors.items()
        }


def base_of(state: State) -> Shard:
    capture = BaseCapture(HeldState(state), ShardKey.base(1, state.version, 0), 1)
    memory = memoryview(bytearray(capture.nbytes_max))
    capture.copy(memory)
    return parse(memory[: capture.finish()])


def schemes(base: State, *, threads: int, names: Sequence[str] | None = None) -> list[Scheme]:
    """Every scheme, from ``base`` on, or those of ``names``."""
    replay = replay_of("fused")

    def chosen(all_names: Iterable[str]) -> list[str]:
        return [name for name in all_names if names is None or name in names]

    return [
        *(Stale(name, base) for name in chosen(["nothing"])),
        *(Replayed(name, base, replay=replay, threads=threads) for name in chosen(codec_names())),
        *(Snapshot(name, base, threads=threads) for name in chosen(SNAPSHOT_CODECS)),
    ]
