"""The demo's text: real, bounded, in a fixed order; a batch depends on (seed, version, rank) alone."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.demo.training.text import batch_at, check_length, fingerprint, load_corpus
from tiercheck.errors import ConfigurationError

CORPUS = load_corpus(bytes_max=100_000)
SEQUENCE = 32


def test_the_standard_library_is_the_default_text() -> None:
    first = min(path for path in Path(sysconfig.get_path("stdlib")).iterdir() if path.name.endswith(".py"))
    content = first.read_bytes()
    assert load_corpus().tobytes().startswith(content)
    assert load_corpus().size == 4 << 20


def test_another_process_reads_the_same_text() -> None:
    program = "from tiercheck.demo.training.text import fingerprint, load_corpus; print(fingerprint(load_corpus()))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    printed = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert printed.stdout.decode().strip() == fingerprint(load_corpus())


def test_a_folder_is_read_in_order_and_to_the_bound(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("three")
    (tmp_path / "z.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "empty.txt").write_text("")
    assert load_corpus(tmp_path).tobytes() == b"onetwothree"
    assert load_corpus(tmp_path, bytes_max=5).tobytes() == b"onetw"
    assert load_corpus(tmp_path / "z.txt").tobytes() == b"two"


def test_a_text_that_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_corpus(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match="no training text"):
        load_corpus(tmp_path)
    (tmp_path / "short.txt").write_bytes(b"x" * SEQUENCE)
    with pytest.raises(ConfigurationError, match=f"needs at least {SEQUENCE + 1}"):
        check_length(load_corpus(tmp_path), SEQUENCE)
    (tmp_path / "short.txt").write_bytes(b"x" * (SEQUENCE + 1))
    assert check_length(load_corpus(tmp_path), SEQUENCE) == 1


@given(seed=st.integers(0, 2**31 - 1), version=st.integers(1, 10**6), rank=st.integers(0, 64))
def test_a_batch_is_a_pure_function(seed: int, version: int, rank: int) -> None:
    inputs, targets = batch_at(CORPUS, seed=seed, version=version, rank=rank, micro_batch=3, sequence=SEQUENCE)
    again, _ = batch_at(CORPUS.copy(), seed=seed, version=version, rank=rank, micro_batch=3, sequence=SEQUENCE)
    assert inputs.shape == targets.shape == (3, SEQUENCE)
    assert inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(inputs, again)
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    text = CORPUS.tobytes()
    for row, target in zip(inputs, targets, strict=True):
        assert bytes(row.astype(np.uint8)) + bytes([target[-1]]) in text


def test_other_seeds_versions_and_ranks_give_other_batches() -> None:
    places = [(seed, version, rank) for seed in (1, 2) for version in (1, 2, 3) for rank in (0, 1)]
    batches = {
        batch_at(CORPUS, seed=seed, version=version, rank=rank, micro_batch=2, sequence=SEQUENCE)[0].tobytes()
        for seed, version, rank in places
    }
    assert len(batches) == len(places)


def test_the_whole_text_can_be_drawn() -> None:
    corpus = np.arange(5, dtype=np.uint8)
    drawn = {
        int(batch_at(corpus, seed=0, version=version, rank=0, micro_batch=1, sequence=2)[0][0, 0])
        for version in range(60)
    }
    assert drawn == {0, 1, 2}
