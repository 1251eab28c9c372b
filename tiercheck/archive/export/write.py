"""An export: the model of a version put together from all ranks' shards, a rank at a time, and written as a format.

Each rank's tensors are copied to their places in a mapped file. So memory holds one rank's state, as
:mod:`tiercheck.archive.rebuild` makes it, however large the model is; of a version that is a base, one tensor of the
model at a time. The formats ``torch``, ``dcp`` and ``deepspeed`` are written from that file, and need its room on the
disk twice.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from tiercheck.archive.export.layout import PlainFile, laid_out, split
from tiercheck.archive.export.model import Model, read_model
from tiercheck.archive.export.target import publish, work_directory
from tiercheck.archive.export.universal import UniversalCheckpoint, torch_save
from tiercheck.archive.inventory import Recoverable
from tiercheck.archive.rebuild import StoredVersion
from tiercheck.archive.shards import from_any, read_digests, read_part, read_references
from tiercheck.errors import ConfigurationError, Corruption
from tiercheck.format.container import ShardHeader
from tiercheck.format.header import STORED_AS, Extent
from tiercheck.format.index.assemble import Transfer
from tiercheck.format.index.boxes import copy_elements
from tiercheck.format.index.logical import EXTRA, MASTER
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Copy
from tiercheck.streams.tensors.as_bytes import DTYPES, array_of, tensor_in
from tiercheck.types import ByteRange, Fidelity

__all__ = ["Exported", "Format", "export"]

T = TypeVar("T")

FILE_NBYTES_MAX = 5_000_000_000
"""Of a file of the format ``huggingface``."""
WINDOW_NBYTES = 64 << 20
"""Of a base, so much is read at a time, or one tensor of the model."""
PLANNING_S = 600.0
FORMAT_NOTE = {"format": "pt"}
"""What readers of safetensors files look for."""

Progress = Callable[[int, int], None]


class Format(StrEnum):
    """What an export is written as."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    HUGGINGFACE = "huggingface"
    DCP = "dcp"
    DEEPSPEED = "deepspeed"


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    format: Format
    version: int
    tensors: int
    nbytes: int
    """Of the tensors."""
    aliases: Mapping[str, str]
    """Other names of tensors (tied weights), and the names under which they were written."""
    fidelity: Fidelity
    """The worst of the ranks that were read; at best approximate if parameters were rounded to another dtype than the
    model's own."""
    notes: tuple[str, ...]


async def export(
    source: StoredVersion, target: Path, format: Format, *, dtype: str | None, overwrite: bool, progress: Progress
) -> Exported:
    """Errors: ``RecoveryError``; ``ConfigurationError`` for a target that is there already, or an unknown dtype;
    ``TierError``, also for what the target's file system refuses."""
    with work_directory(target, overwrite=overwrite) as work:
        if format is Format.DEEPSPEED:
            dtype = dtype or "model"  # the full precision is beside it
        model = await source.scheduler.call(
            read_model(source.hierarchy, source.inventory, source.chosen, dtype),
            what="reading the indexes of all ranks",
            deadline_s=PLANNING_S,
        )
        check_dtypes(model, format)
        specs = sorted((each.spec for each in model.outputs), key=lambda spec: spec.name)
        groups = split(specs, FILE_NBYTES_MAX) if format is Format.HUGGINGFACE else [specs]
        names = file_names(len(groups))
        notes = {**FORMAT_NOTE, "tiercheck": said_of(source.chosen, max(Fidelity, key=len))}
        files = {work / name: laid_out(each, notes) for name, each in zip(names, groups, strict=True)}
        nbytes = sum(spec.nbytes for spec in specs)
        if format is Format.DEEPSPEED:
            universal = UniversalCheckpoint(model, work, source.chosen.version)
            fidelity, told = await filled(source, model, files, progress, universal)
            fidelity, nbytes = Fidelity.worst(fidelity, universal.fidelity), nbytes + universal.nbytes
            out, said = work / "out", said_of(source.chosen, fidelity)
            told += universal.write(out, whole_model(files, model.aliases), said)
            publish(out, target, overwrite=overwrite)
        else:
            fidelity, told = await filled(source, model, files, progress)
            rounded, rounding = model.rounding()
            fidelity, told = Fidelity.worst(fidelity, rounded), (*told, *rounding)
            notes["tiercheck"] = said_of(source.chosen, fidelity)
            for path, file in files.items():
                file.finish(path, notes)
            publish(formatted(work, format, files, model.aliases), target, overwrite=overwrite)
    return Exported(target, format, source.chosen.version, len(specs), nbytes, model.aliases, fidelity, told)


def said_of(chosen: Recoverable, fidelity: Fidelity) -> str:
    return f"version {chosen.version} of generation {chosen.points[0].generation}, {fidelity}"


def file_names(count: int) -> list[str]:
    """As transformers names them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


async def filled(
    source: StoredVersion,
    model: Model,
    files: Mapping[Path, PlainFile],
    progress: Progress,
    universal: UniversalCheckpoint | None = None,
) -> tuple[Fidelity, tuple[str, ...]]:
    """Copy every rank's part into the files, and into the checkpoint if there is one. Returns the fidelity of the worst
    rank, and what there is to know."""
    canvas = Canvas(model, files, progress)
    fidelities, notes = [Fidelity.EXACT], dict[str, None]()
    for rank, by_source in sorted(model.transfers.items()):
        point = source.chosen.points[rank]
        if point.replayed or point.by_snapshot or universal is not None:
            found = await source.rebuild(rank)
            fidelities.append(found.fidelity)
            notes |= dict.fromkeys(found.notes)
            held = {MASTER + name: each for name, each in found.state.masters().items()}
            held |= {EXTRA + name: each for name, each in found.state.buffers().items()}
            for name, transfers in by_source.items():
                canvas.put(transfers, held[name].flatten())
            if universal is not None:
                universal.take(found, by_source)
        else:
            await copy_base(source, rank, by_source, canvas)
    return Fidelity.worst(*fidelities), tuple(notes)


class Canvas:
    """The files' tensors, and how much of them is there."""

    def __init__(self, model: Model, files: Mapping[Path, PlainFile], progress: Progress) -> None:
        self._memory = {name: part for path, file in files.items() for name, part in file.make(path).items()}
        self._kinds = {each.spec.name: each.spec.dtype for each in model.outputs}
        self._output_of = model.output_of
        self._progress = progress
        ranks = model.transfers.values()
        self._total = sum(each.copy.elements for held in ranks for transfers in held.values() for each in transfers)
        self._done = 0

    def put(self, transfers: Sequence[Transfer], flat: torch.Tensor, *, start: int = 0) -> None:
        """``flat``: the elements of their source from ``start`` on."""
        by_kind: dict[str, list[Transfer]] = defaultdict(list)
        for each in transfers:
            by_kind[self._kinds[self._output_of[each.target]]].append(each)
        for kind, alike in by_kind.items():
            held = array_of(flat.to(DTYPES[kind]))
            for each in alike:
                memory = self._memory[self._output_of[each.target]]
                copy_elements([each.copy], held, np.frombuffer(memory, held.dtype), source_start=start)
                self._done += each.copy.elements
        self._progress(self._done, self._total)


async def copy_base(
    source: StoredVersion, rank: int, by_source: Mapping[str, Sequence[Transfer]], canvas: Canvas
) -> None:
    """Of a version that is a base, its tensors straight from the tiers, a window at a time; what is damaged in one copy
    is read from another one."""
    plan = source.chosen.plans[rank]
    await copy_shard(source, plan.anchor, by_source, canvas)
    if plan.constants is not None:
        await copy_shard(source, plan.constants, by_source, canvas, plan.anchor)


async def copy_shard(
    source: StoredVersion,
    copy: Copy,
    by_source: Mapping[str, Sequence[Transfer]],
    canvas: Canvas,
    base: Copy | None = None,
) -> None:
    """What of these tensors lies in a shard; in constants, what the ``base`` refers to."""

    async def call(
        read: Callable[[OpenTier, ShardKey, ShardHeader], Awaitable[T]], what: str, copy: Copy = copy
    ) -> tuple[ShardHeader, T]:
        reading = from_any(source.hierarchy, source.inventory, copy, read)
        return await source.scheduler.call(reading, what=what, deadline_s=source.deadline_s)

    references = None
    if base is not None:
        _, references = await call(read_references, f"reading what {base.key} refers to", base)

    async def checked(tier: OpenTier, key: ShardKey, header: ShardHeader) -> dict[str, bytes]:
        if references is not None:
            references.check(header, tier=tier.name)
        return await read_digests(tier, key, header)

    header, digests = await call(checked, f"reading the checksums of {copy.key}")
    extents = {extent.spec.name: extent for extent in header.extents}
    for name in by_source.keys() & (extents.keys() if references is None else references.tensors.keys()):
        extent, transfers = extents[name], by_source[name]
        for window in windows(transfers, extent.spec.nbytes // max(1, math.prod(extent.spec.shape))):

            async def read(
                tier: OpenTier, key: ShardKey, found: ShardHeader, window: Window = window, extent: Extent = extent
            ) -> memoryview:
                if found.extents != header.extents:
                    raise Corruption("it is another shard than the first copy", tier=tier.name, key=str(key))
                return await read_part(tier, key, found, extent, window.bytes, digests)

            _, content = await call(read, f"reading {name} of {copy.key}")
            elements = window.stop - window.start
            canvas.put(
                window.transfers, tensor_in(content, extent.spec.dtype, (elements,), what=name), start=window.start
            )


@dataclass(frozen=True)
class Window:
    """Some transfers of one stored tensor, and the elements that they need."""

    transfers: Sequence[Transfer]
    start: int
    stop: int
    itemsize: int

    @property
    def bytes(self) -> ByteRange:
        return ByteRange(self.start * self.itemsize, self.stop * self.itemsize)


def windows(transfers: Sequence[Transfer], itemsize: int) -> Iterator[Window]:
    """As many transfers at a time as lie in :data:`WINDOW_NBYTES`; one that needs more, alone."""
    waiting: list[Transfer] = []
    for each in sorted(transfers, key=lambda each: each.copy.source_start):
        if waiting and (each.copy.source_stop - waiting[0].copy.source_start) * itemsize > WINDOW_NBYTES:
            yield window_of(waiting, itemsize)
            waiting = []
        waiting.append(each)
    if waiting:
        yield window_of(waiting, itemsize)


def window_of(transfers: Sequence[Transfer], itemsize: int) -> Window:
    return Window(
        tuple(transfers),
        min(each.copy.source_start for each in transfers),
        max(each.copy.source_stop for each in transfers),
        itemsize,
    )


# Formats


def check_dtypes(model: Model, format: Format) -> None:
    """Errors: ``ConfigurationError`` for a dtype that the format does not have."""
    odd = [each.spec for each in model.outputs if each.spec.dtype in STORED_AS]
    if odd and format in (Format.SAFETENSORS, Format.HUGGINGFACE):
        raise ConfigurationError(f"{odd[0].name} is {odd[0].dtype}, which safetensors lacks: use --format torch")


def formatted(work: Path, format: Format, files: Mapping[Path, PlainFile], aliases: Mapping[str, str]) -> Path:
    """What gets the target's name."""
    out = work / "out"
    if format is Format.SAFETENSORS:
        (only,) = files
        return only
    if format is Format.HUGGINGFACE:
        out.mkdir()
        write_index(out, files)
        for path in files:
            path.rename(out / path.name)
        return out
    whole = whole_model(files, aliases)
    if format is Format.TORCH:
        torch_save(whole, out)
    else:
        write_dcp(whole, out)
    return out


def whole_model(files: Mapping[Path, PlainFile], aliases: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Every tensor of the one file, mapped, under all of its names."""
    (only,) = files
    memory = files[only].map(only)
    specs = {spec.name: spec for spec in files[only].specs}
    whole = {name: tensor_in(memory[name], spec.dtype, spec.shape, what=name) for name, spec in specs.items()}
    return whole | {alias: whole[name] for alias, name in aliases.items() if name in whole}


def write_index(out: Path, files: Mapping[Path, PlainFile]) -> None:
    """By tensor, the file that it is in; one file needs none."""
    if len(files) > 1:
        total = sum(spec.nbytes for file in files.values() for spec in file.specs)
        where = {spec.name: path.name for path, file in files.items() for spec in file.specs}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_dcp(tensors: Mapping[str, torch.Tensor], out: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant
        save(dict(tensors), storage_writer=FileSystemWriter(out), no_dist=True)
