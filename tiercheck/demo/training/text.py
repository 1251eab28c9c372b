"""The training text: Python's own standard library, or the user's files, as one array of bytes.

Which bytes a rank trains on at a version is a pure function of (seed, version, rank), so a restarted run
sees exactly the batches that an uninterrupted one sees.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from tiercheck.errors import ConfigurationError

__all__ = ["CORPUS_BYTES_MAX", "batch_at", "check_length", "fingerprint", "load_corpus"]

CORPUS_BYTES_MAX = 4 << 20

# Third-party packages may live inside the library's folder, and tests are data rather than prose.
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int64]


def load_corpus(path: Path | None = None, *, bytes_max: int = CORPUS_BYTES_MAX) -> Bytes:
    """The first ``bytes_max`` bytes of the text: uint8, one dimension, read-only.

    ``path`` is a file, or a folder whose files are read in the order of their relative paths; without it, the
    ``.py`` files of the running Python's standard library are read.

    Raises:
        ConfigurationError: the path does not exist, cannot be read, or holds no bytes.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        sources, advice = files_below(root, suffix=".py"), "name a text of your own with --text PATH"
    else:
        root = path
        sources, advice = text_files(path), "name a file with text, or a folder of such files"
    chunks: list[bytes] = []
    room = bytes_max
    try:
        for source in sources:
            with source.open("rb") as file:
                chunks.append(file.read(room))
            room -= len(chunks[-1])
            if room == 0:
                break
    except OSError as error:
        raise ConfigurationError(f"cannot read the training text {error.filename}: {error.strerror}") from error
    corpus = np.frombuffer(b"".join(chunks), dtype=np.uint8)
    if corpus.size == 0:
        raise ConfigurationError(f"there is no training text in {root}; {advice}")
    return corpus


def text_files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from files_below(path)
    elif path.is_file():
        yield path
    else:
        raise ConfigurationError(f"the training text {path} does not exist, or is no file and no folder")


def files_below(root: Path, *, suffix: str = "") -> Iterator[Path]:
    """Plain files below ``root`` in a fixed order: a folder's own files, sorted, then its folders, sorted."""
    for folder, subfolders, names in os.walk(root, onerror=raise_error):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        for name in sorted(names):
            source = Path(folder, name)
            if name.endswith(suffix) and source.is_file():
                yield source


def raise_error(error: OSError) -> None:
    # os.walk passes over folders it cannot list unless it is told otherwise.
    raise error


def fingerprint(corpus: Bytes) -> str:
    """A digest by which two runs know that they trained on the same text."""
    return xxhash.xxh3_64_hexdigest(corpus.data)


def check_length(corpus: Bytes, sequence: int) -> int:
    """The number of places where a sequence and its target can begin. Errors: ``ConfigurationError`` for none."""
    positions = corpus.size - sequence
    if positions < 1:
        raise ConfigurationError(
            f"the training text has {corpus.size} bytes; a sequence of {sequence} needs at least {sequence + 1}"
        )
    return positions


def batch_at(
    corpus: Bytes, *, seed: int, version: int, rank: int, micro_batch: int, sequence: int
) -> tuple[Tokens, Tokens]:
    """The inputs and the targets, one byte ahead, of a rank's iteration: int64, ``(micro_batch, sequence)`` each.

    Raises:
        ConfigurationError: the text is shorter than one sequence and its target.
    """
    positions = check_length(corpus, sequence)
    generator = np.random.default_rng(np.random.SeedSequence((seed, version, rank)))
    starts = generator.integers(0, positions, size=micro_batch)
    windows = np.stack([corpus[start : start + sequence + 1] for start in starts]).astype(np.int64)
    return windows[:, :-1], windows[:, 1:]
