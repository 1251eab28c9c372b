"""Which stream a configuration asks for, and which kernels it calls."""

from __future__ import annotations

from typing import Any

from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError
from tiercheck.kernels import Kernel
from tiercheck.streams.codecs.exact import Exact
from tiercheck.streams.codecs.registry import codec, refuse_unknown
from tiercheck.streams.gradients import encoder, gathered
from tiercheck.streams.records.differential import DifferentialStream
from tiercheck.streams.records.iteration import IterationStream
from tiercheck.streams.records.snapshot import SNAPSHOT_CODECS, SnapshotStream
from tiercheck.streams.tensors.provider import StateProvider

__all__ = ["kernels_used", "stream_of"]


def stream_of(
    provider: StateProvider,
    codec_name: str,
    world_size: int,
    *,
    train_on_compressed: bool = False,
    encode_threads: int = 1,
    gpu_staging_bytes: int = CheckpointConfig.gpu_staging_bytes,
    gpu_feedback: bool = CheckpointConfig.gpu_feedback,
) -> IterationStream:
    """What is recorded of every iteration. The arguments are those of :class:`~tiercheck.config.CheckpointConfig`.

    Errors: ``ConfigurationError`` for a name that neither differentials nor snapshots have, and as for the streams.
    """
    if codec_name in SNAPSHOT_CODECS:
        if train_on_compressed:
            raise ConfigurationError(
                f"train_on_compressed=True needs a codec of gradients, such as 'sparse'; {codec_name!r} holds none"
            )
        return SnapshotStream(provider, codec_name, world_size, encode_threads=encode_threads)
    refuse_unknown(codec_name, SNAPSHOT_CODECS)
    return DifferentialStream(
        provider,
        codec_name,
        world_size,
        train_on_compressed=train_on_compressed,
        encode_threads=encode_threads,
        gpu_staging_bytes=gpu_staging_bytes,
        gpu_feedback=gpu_feedback,
    )


def kernels_used(codec_name: str, *, train_on_compressed: bool = False) -> tuple[Kernel[..., Any], ...]:
    """The kernels that the stream of these arguments may call. Errors: ``ConfigurationError``, as :func:`stream_of`."""
    if codec_name in SNAPSHOT_CODECS:
        return SNAPSHOT_CODECS[codec_name].kernels_used()
    used = codec(codec_name)
    beside = encoder.KERNELS_USED if train_on_compressed else ()
    return (*used.kernels_used(), *beside, *(gathered.KERNELS_USED if type(used) is Exact else ()))
